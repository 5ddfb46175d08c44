"""FedDyn: dynamic regularisation."""

from functools import partial

import torch

from ..clients import Tensors
from .base import Algorithm, LocalRun, Mechanism, Setting, Upload
from .local import TorchRule, not_negative, positive

__all__ = ["DynamicRegularisation", "FedDyn"]


class DynamicRegularisation(Mechanism):
    """A linear term l_i per client and a proximal one; the server takes the mean h out again.

    A local gradient g becomes ``g - l_i + alpha (x - x^r)``; then ``l_i <- l_i - alpha D_i`` with
    D_i the client's displacement. Server: ``h <- h - (alpha / N) sum_{i in S} D_i`` and
    ``x <- sum_i w_i x_i - h / alpha``. All start at 0; h and l_i are never weighted by size, so
    that h is always the plain mean of all N clients' l_i.

    Args:
        alpha: Strength of the regularisation, positive.
    """

    name = "dynamic_regularisation"
    client_state = ("l_i",)

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = positive("alpha", alpha)

    def setup(self, setting: Setting) -> None:
        """Sets h to zero."""
        self.population = setting.population
        self.server_state = {"h": setting.zeros()}

    def download(self) -> Tensors:
        """Nothing: h stays on the server."""
        return []

    def correct(self, run: LocalRun, gradients: Tensors) -> None:
        """Adds alpha (x - x^r) - l_i to the gradients."""
        torch._foreach_sub_(gradients, run.client_state["l_i"])
        torch._foreach_add_(gradients, torch._foreach_sub(run.x, run.x0), alpha=self.alpha)

    def end(self, run: LocalRun) -> Upload:
        """l_i <- l_i - alpha D_i; the server knows D_i."""
        displacement = run.displacement()
        l_i = torch._foreach_sub(
            run.client_state["l_i"], torch._foreach_mul(displacement, self.alpha)
        )
        run.client_state["l_i"] = list(l_i)
        return Upload(displacement, by_weight=False, sent=False)

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """Subtracts alpha (S/N) times the mean D_i from h."""
        for h, m in zip(self.server_state["h"], mean, strict=True):
            h.sub_(m * (self.alpha * cohort_size / self.population))

    def server_direction(self, displacement: Tensors) -> Tensors:
        """The mean displacement less h / alpha."""
        pairs = zip(displacement, self.server_state["h"], strict=True)
        return [d - h / self.alpha for d, h in pairs]


class FedDyn(Algorithm):
    """FedDyn (Acar et al., arXiv 2111.04263, Algorithm 1) with SGD as the local solver.

    Args:
        lr: Local learning rate.
        alpha: Strength of the dynamic regularisation.
        weight_decay: Coupled (L2), a part of every client's loss.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(self, lr: float, alpha: float = 0.1, weight_decay: float = 0.0) -> None:
        decay = not_negative("weight_decay", weight_decay)
        rule = TorchRule(lr, partial(torch.optim.SGD, weight_decay=decay))
        super().__init__(rule, [DynamicRegularisation(alpha)])
