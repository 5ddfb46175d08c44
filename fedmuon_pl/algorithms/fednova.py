"""FedNova: normalised averaging for clients with different local work."""

from functools import partial

import torch

from ..clients import Tensors
from .base import Algorithm, LocalRun, Mechanism, ServerRule, Upload
from .local import TorchRule, gradient_weights

__all__ = ["FedNova", "NormalisedAveraging"]


class NormalisedAveraging(Mechanism):
    """The server steps along ``tau_eff sum_i w_i D_i / |a_i|``, ``tau_eff = sum_i w_i |a_i|``.

    a_i holds the weight of each of a client's gradients in its displacement D_i: ones for plain
    SGD. Its sum |a_i| is what K_i steps on a constant gradient of 1 move, in units of the rate.

    Args:
        momentum: Of the local SGD.
        nesterov: Of the local SGD.
    """

    name = "normalised_averaging"

    def __init__(self, momentum: float, nesterov: bool) -> None:
        super().__init__()
        self.momentum = momentum
        self.nesterov = nesterov

    def end(self, run: LocalRun) -> Upload:
        """D_i / |a_i| and |a_i|; the server derives both from D_i and K_i."""
        norm = gradient_weights(run.steps, self.momentum, self.nesterov)
        scaled = list(torch._foreach_div(run.displacement(), norm))
        norms = run.x[0].new_full((len(run.clients),), norm)
        return Upload([*scaled, norms], sent=False)

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """Keeps the means for :meth:`server_direction`."""
        *self._normalised, self._tau_eff = mean

    def server_direction(self, displacement: Tensors) -> Tensors:
        """tau_eff sum_i w_i D_i / |a_i|."""
        return [d * self._tau_eff for d in self._normalised]


class FedNova(Algorithm):
    """FedNova (Wang et al., arXiv 2007.07481, section 4) over SGD with momentum.

    Equal to FedAvg where all clients make the same number of steps.

    Args:
        lr: Local learning rate.
        momentum: Local momentum.
        nesterov: Whether the local momentum is Nesterov's.
        weight_decay: Local L2 penalty, coupled.
        server: Server rule on the pseudo-gradient; plain averaging if None.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        server: ServerRule | None = None,
    ) -> None:
        sgd = partial(
            torch.optim.SGD, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay
        )
        super().__init__(TorchRule(lr, sgd), [NormalisedAveraging(momentum, nesterov)], server)
