"""Mime and MimeLite: a server optimiser's momentum, fixed during the round, in every local step."""

from functools import partial
from typing import Literal

import torch

from ..clients import Tensors
from .base import Algorithm, LocalRun, Mechanism, ServerRule, Setting, Upload
from .local import TorchRule, below_one, is_ema, not_negative

__all__ = ["Mime", "MimeLite"]


class GlobalMomentum(Mechanism):
    """Steps ``y <- y - eta ((1 - beta) g + beta m)`` with a momentum m that only the server moves.

    At the round's end ``m <- (1 - beta) c + beta m`` with ``c = sum_i w_i grad f_i(x^r)``, each
    over the client's whole data; m starts at 0. A coupled weight decay lambda belongs to f_i: it
    is in g and in c.

    Args:
        beta: Momentum, in [0, 1).
        ema: Whether fresh gradients are weighed by 1 - beta, else by 1.
        weight_decay: lambda.
        correct_gradients: Whether g is the control-variate form ``g - grad f_i(x^r; batch) + c`` of
            Mime; MimeLite takes the batch's gradient as it is, and c need not be sent.

    Raises:
        ValueError: If beta is outside [0, 1).
    """

    name = "global_momentum"

    def __init__(
        self, beta: float, ema: bool, weight_decay: float, correct_gradients: bool
    ) -> None:
        super().__init__()
        below_one("beta", beta)
        self.beta, self.weight_decay = beta, weight_decay
        self.fresh = 1 - beta if ema else 1.0
        # The correction needs the cohort's mean before the first local step.
        self.full_gradient = "cohort" if correct_gradients else "client"
        self.anchor_gradient = correct_gradients

    def setup(self, setting: Setting) -> None:
        """Sets m to zero."""
        self._x, self._c = setting.x, setting.zeros()
        self.server_state = {"momentum": setting.zeros()}

    def cohort_gradient(self, mean: Tensors) -> None:
        """Keeps c for this round."""
        self._c = [m.to(c.dtype) for m, c in zip(mean, self._c, strict=True)]

    def download(self) -> Tensors:
        """The momentum, and for Mime the mean gradient c."""
        return self.server_state["momentum"] + (self._c if self.anchor_gradient else [])

    def local_scale(self, index: int) -> float:
        """The weight of a fresh gradient."""
        return self.fresh

    def begin(self, run: LocalRun) -> None:
        """The momentum's part of a step, the same for every step of the round."""
        weights = [-self.beta * lr for lr in run.lr]
        run.memory[self.name] = torch._foreach_mul(self.server_state["momentum"], weights)

    def correct(self, run: LocalRun, gradients: Tensors) -> None:
        """Mime: subtracts the batch's gradient at x^r and adds c."""
        if run.anchor_gradient is not None:
            torch._foreach_sub_(gradients, run.anchor_gradient)
            torch._foreach_add_(gradients, self._c)

    def after_step(self, run: LocalRun) -> None:
        """Subtracts eta beta m from the weights."""
        torch._foreach_add_(run.x, run.memory[self.name])

    def end(self, run: LocalRun) -> Upload | None:
        """MimeLite: the client's full gradient; Mime has sent it before the local steps."""
        return None if run.full_gradient is None else Upload(run.full_gradient)

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """The new m, with c and the decay of x^r (the server has not stepped yet)."""
        for m, c, x in zip(self.server_state["momentum"], mean or self._c, self._x, strict=True):
            m.mul_(self.beta).add_(c + self.weight_decay * x, alpha=self.fresh)


class Mime(Algorithm):
    """Mime with SGD momentum (Karimireddy et al., arXiv 2008.03606, Algorithm 1, table 1).

    A round has two exchanges: the mean gradient c of the cohort at x^r, then the local steps.

    Args:
        lr: Local learning rate eta.
        beta: Momentum.
        momentum_form: ``"ema"``, the paper's (1 - beta) g + beta m, or ``"classic"``, g + beta m,
            which is what fedjax computes with its SGD.
        weight_decay: Coupled (L2), a part of the loss.
        server: Server rule on the pseudo-gradient; plain averaging if None.

    Raises:
        ValueError: If an argument is out of its range.
    """

    _correct_gradients = True

    def __init__(
        self,
        lr: float,
        beta: float = 0.9,
        momentum_form: Literal["ema", "classic"] = "ema",
        weight_decay: float = 0.0,
        server: ServerRule | None = None,
    ) -> None:
        decay = not_negative("weight_decay", weight_decay)
        rule = TorchRule(lr, partial(torch.optim.SGD, weight_decay=decay))
        momentum = GlobalMomentum(beta, is_ema(momentum_form), decay, self._correct_gradients)
        super().__init__(rule, [momentum], server)


class MimeLite(Mime):
    """MimeLite (arXiv 2008.03606, Algorithm 1): :class:`Mime` without correcting the gradients.

    One exchange a round; the clients' full gradients go into the momentum only.
    """

    _correct_gradients = False
