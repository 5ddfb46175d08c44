"""FedAvg: local steps of any optimiser, then the mean."""

import torch

from .base import Algorithm, ServerRule
from .kept_state import KeptState
from .local import OptimizerFactory, TorchRule

__all__ = ["FedAvg"]


class FedAvg(Algorithm):
    """Federated averaging (McMahan et al., arXiv 1602.05629, Algorithm 1).

    Every client of the cohort makes its local steps from x^r with a fresh optimiser, and
    ``x^{r+1} = x^r + sum_i w_i (x_i^{K_i} - x^r)``. The weights w_i are equal by
    default; the paper's are the clients' shares of the samples, ``server.weighting=samples``. With
    another optimiser it is Local Adam, Local AdamW and so on; with SGD with momentum as server rule
    it is FedAvgM.

    With ``keep_state`` a client's optimiser goes on where its last round ended
    (:class:`~fedmuon_pl.algorithms.kept_state.KeptState`), as in some public code; the paper's
    clients keep nothing.

    Args:
        lr: Local learning rate eta.
        optimizer: Any optimiser of ``torch.optim`` that needs no closure; ``lr`` sets its rate, and
            another one inside it is refused.
        server: Server rule on the pseudo-gradient; plain averaging if None.
        keep_state: Whether clients keep their optimiser's state: momentum SGD's, or that of
            :class:`fedmuon_pl.optim.adamw.AdamW`.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        optimizer: OptimizerFactory = torch.optim.SGD,
        server: ServerRule | None = None,
        keep_state: bool = False,
    ) -> None:
        rule = TorchRule(lr, optimizer)
        super().__init__(rule, [KeptState(rule)] if keep_state else [], server)
