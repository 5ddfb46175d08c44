"""FedCM: client-level momentum."""

from functools import partial

import torch

from ..clients import Tensors
from .base import Algorithm, LocalRun, Mechanism, ServerRule, Setting, Upload
from .local import TorchRule, not_negative

__all__ = ["ClientMomentum", "FedCM"]


class ClientMomentum(Mechanism):
    """g <- alpha g + (1 - alpha) Delta with the last round's mean direction Delta.

    ``Delta^{r+1} = -sum_i w_i (x_i^{K_i} - x^r) / sum_k eta_{i,k}``, 0 at first.

    Args:
        alpha: Weight of the client's own gradient, in (0, 1]. (The FedMuon repository's flag is
            1 - alpha.)

    Raises:
        ValueError: If alpha is outside (0, 1].
    """

    name = "client_momentum"

    def __init__(self, alpha: float) -> None:
        super().__init__()
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha}: must be in (0, 1]")
        self.alpha = alpha

    def setup(self, setting: Setting) -> None:
        """Sets Delta to zero."""
        self.server_state = {"delta": setting.zeros()}

    def correct(self, run: LocalRun, gradients: Tensors) -> None:
        """Mixes the gradients with Delta."""
        torch._foreach_mul_(gradients, self.alpha)
        torch._foreach_add_(gradients, self.server_state["delta"], alpha=1 - self.alpha)

    def end(self, run: LocalRun) -> Upload:
        """The client's direction; the server derives it from the displacement."""
        return Upload(run.direction(), sent=False)

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """The new Delta."""
        self.replace("delta", mean)


class FedCM(Algorithm):
    """FedCM (Xu et al., arXiv 2106.10874, Algorithm 2).

    The paper's global rate eta_g is K eta times the server rule's rate, 1 by default.

    Args:
        lr: Local learning rate.
        alpha: Weight of the client's own gradient.
        weight_decay: Coupled (L2), added whole to the mixed direction, not weighed by alpha, as in
            the FedCM of FedMuon's code (github.com/junkangLiu0/FedMuon).
        server: Server rule on the pseudo-gradient; plain averaging if None.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        alpha: float = 0.1,
        weight_decay: float = 0.0,
        server: ServerRule | None = None,
    ) -> None:
        decay = not_negative("weight_decay", weight_decay)
        rule = TorchRule(lr, partial(torch.optim.SGD, weight_decay=decay))
        super().__init__(rule, [ClientMomentum(alpha)], server)
