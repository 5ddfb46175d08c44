"""FedProx: local losses with a proximal term."""

import torch

from ..clients import Tensors
from .base import Algorithm, LocalRun, Mechanism, ServerRule
from .local import OptimizerFactory, TorchRule, not_negative

__all__ = ["FedProx", "Proximal"]


class Proximal(Mechanism):
    """The gradient of (mu/2) ||x - x^r||^2: g <- g + mu (x - x^r).

    Args:
        mu: Weight of the term, at least 0.
    """

    name = "proximal"

    def __init__(self, mu: float) -> None:
        super().__init__()
        self.mu = not_negative("mu", mu)

    def correct(self, run: LocalRun, gradients: Tensors) -> None:
        """See the class."""
        torch._foreach_add_(gradients, torch._foreach_sub(run.x, run.x0), alpha=self.mu)


class FedProx(Algorithm):
    """FedProx (Li et al., arXiv 1812.06127, Algorithm 2), solved inexactly by the local steps.

    Args:
        lr: Local learning rate.
        mu: Weight of the proximal term; 0 is FedAvg.
        optimizer: The clients' optimiser.
        server: Server rule on the pseudo-gradient; plain averaging if None.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        mu: float = 0.01,
        optimizer: OptimizerFactory = torch.optim.SGD,
        server: ServerRule | None = None,
    ) -> None:
        super().__init__(TorchRule(lr, optimizer), [Proximal(mu)], server)
