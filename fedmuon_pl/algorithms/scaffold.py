"""SCAFFOLD: control variates against client drift."""

from functools import partial
from typing import Literal

import torch

from ..clients import Tensors, alike
from ..errors import ConfigError
from .base import Algorithm, LocalRun, Mechanism, Setting, Upload
from .local import TorchRule, below_one, gradient_weights, not_negative, positive

__all__ = ["ControlVariates", "Scaffold"]


class ControlVariates(Mechanism):
    """The control variates c (server) and c_i (client) of SCAFFOLD.

    Both start at zero. A local gradient g becomes ``g - c_i + c``. The client's new variate is, by
    option I, its gradient at x^r over its whole data; by option II, after K_i steps,
    ``c_i - c + (x^r - x_i^{K_i}) / sum_k eta_{i,k}``, with the steps and rates that the client
    really used. With local momentum the sum counts each gradient's weight in the displacement
    (:func:`~fedmuon_pl.algorithms.local.gradient_weights`), so that c_i stays a mean of
    gradients. The server adds ``(S/N) mean_{i in S} (c_i^+ - c_i)``, S of N clients,
    never weighted by size. Hence ``c = sum_i c_i / N`` at all times. Buffers and frozen parameters
    have no control variate.

    Args:
        option: ``"I"`` or ``"II"`` (equation 4).
        weight_decay: Coupled (L2), a part of f_i: option I adds it to the gradient at x^r, and in
            option II it is among the steps.
        momentum: Of the local SGD.

    Raises:
        ValueError: For another option.
    """

    name = "control_variates"
    client_state = ("c_i",)

    def __init__(
        self, option: Literal["I", "II"], weight_decay: float = 0.0, momentum: float = 0.0
    ) -> None:
        super().__init__()
        self._weight_decay, self._momentum = weight_decay, momentum
        if option not in ("I", "II"):
            raise ValueError(f'option={option!r}: SCAFFOLD has the options "I" and "II"')
        self.full_gradient = "client" if option == "I" else None

    def setup(self, setting: Setting) -> None:
        """Sets c to zero."""
        self.population = setting.population
        self.server_state = {"c": setting.zeros()}

    def begin(self, run: LocalRun) -> None:
        """The correction c - c_i, the same for every step of the round."""
        c_i = run.client_state["c_i"]
        correction = torch._foreach_neg(c_i)
        torch._foreach_add_(correction, self.server_state["c"])
        run.memory[self.name] = [alike(c, t) for c, t in zip(correction, run.x, strict=True)]

    def correct(self, run: LocalRun, gradients: Tensors) -> None:
        """Adds c - c_i to the gradients."""
        torch._foreach_add_(gradients, run.memory[self.name])

    def end(self, run: LocalRun) -> Upload:
        """The change of c_i (equation 4); the new c_i stays with the client."""
        if run.full_gradient is not None:
            change = list(torch._foreach_sub(run.full_gradient, run.client_state["c_i"]))
            if self._weight_decay != 0:
                torch._foreach_add_(change, run.x0, alpha=self._weight_decay)
        else:
            change = self._second_option(run)
        run.client_state["c_i"] = list(torch._foreach_add(run.client_state["c_i"], change))
        return Upload(change, by_weight=False)

    def _second_option(self, run: LocalRun) -> Tensors:
        if any(lr <= 0 for lr in run.lr):
            raise ConfigError(
                f"round {run.round}: SCAFFOLD divides by the local learning rate, which is "
                f"{min(run.lr)} in this round; use a schedule that stays positive, or option I"
            )
        change = run.direction()
        if self._momentum != 0:
            by = run.steps / gradient_weights(run.steps, self._momentum)
            torch._foreach_mul_(change, by)
        torch._foreach_sub_(change, self.server_state["c"])
        return change

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """Adds (S/N) times the mean change to c."""
        for c, m in zip(self.server_state["c"], mean, strict=True):
            c.add_(m * (cohort_size / self.population))


class Scaffold(Algorithm):
    """SCAFFOLD (Karimireddy et al., arXiv 1910.06378, Algorithm 1).

    Args:
        lr: Local learning rate eta_l.
        option: How a client renews its control variate: ``"II"``, from its own steps, as in the
            paper's experiments, or ``"I"``, by a pass over its whole data at x^r, which is more
            stable and costs as much as an epoch.
        server_lr: Global learning rate eta_g; 1 is plain averaging.
        weight_decay: Coupled (L2), a part of every client's loss.
        momentum: Of the local SGD, in [0, 1), from zero in every round. The paper has none; others
            compare with one (arXiv 2509.26337).

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        option: Literal["I", "II"] = "II",
        server_lr: float = 1.0,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
    ) -> None:
        below_one("momentum", momentum)
        decay = not_negative("weight_decay", weight_decay)
        rule = TorchRule(lr, partial(torch.optim.SGD, momentum=momentum, weight_decay=decay))
        server = partial(torch.optim.SGD, lr=positive("server_lr", server_lr))
        super().__init__(rule, [ControlVariates(option, decay, momentum)], server)
