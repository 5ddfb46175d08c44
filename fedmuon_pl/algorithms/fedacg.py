"""FedACG: clients start from a look-ahead point."""

import torch

from ..clients import Tensors
from .base import Algorithm, LocalRun, Mechanism, Setting, Upload
from .local import TorchRule, below_one, not_negative

__all__ = ["AcceleratedStart", "FedACG"]


class AcceleratedStart(Mechanism):
    """Clients start from z = x^r + lam m and are held near it by (beta/2) ||x - z||^2.

    ``m <- lam m + sum_i w_i (x_i - z)`` and ``x <- x + m``, which is the mean of the clients'
    weights; hence m is their mean displacement from x^r.

    Args:
        lam: Momentum, in [0, 1).
        beta: Weight of the proximal term, at least 0.

    Raises:
        ValueError: If an argument is out of its range.
    """

    name = "accelerated_start"

    def __init__(self, lam: float, beta: float) -> None:
        super().__init__()
        self.lam = below_one("lam", lam)
        self.beta = not_negative("beta", beta)

    def setup(self, setting: Setting) -> None:
        """Sets m to zero."""
        self.server_state = {"momentum": setting.zeros()}

    def download(self) -> Tensors:
        """Nothing: z is sent in the place of x^r."""
        return []

    def begin(self, run: LocalRun) -> None:
        """x_i <- z."""
        z = torch._foreach_add(run.x0, self.server_state["momentum"], alpha=self.lam)
        torch._foreach_copy_(run.x, z)
        run.memory[self.name] = z

    def correct(self, run: LocalRun, gradients: Tensors) -> None:
        """Adds beta (x - z) to the gradients."""
        away = torch._foreach_sub(run.x, run.memory[self.name])
        torch._foreach_add_(gradients, away, alpha=self.beta)

    def end(self, run: LocalRun) -> Upload:
        """The displacement, which is sent anyway."""
        return Upload(run.displacement(), sent=False)

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """The new m: sum_i w_i (x_i - x^r)."""
        self.replace("momentum", mean)


class FedACG(Algorithm):
    """FedACG (Kim et al., arXiv 2201.03172, Algorithm 1).

    Args:
        lr: Local learning rate.
        lam: Momentum of the look-ahead.
        beta: Weight of the proximal term.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(self, lr: float, lam: float = 0.85, beta: float = 0.01) -> None:
        super().__init__(TorchRule(lr), [AcceleratedStart(lam, beta)])
