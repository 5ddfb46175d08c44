"""FedAvg: local steps of any optimiser, then the mean."""

import torch

from .base import Algorithm, ServerRule
from .local import OptimizerFactory, TorchRule

__all__ = ["FedAvg"]


class FedAvg(Algorithm):
    """Federated averaging (McMahan et al., arXiv 1602.05629, Algorithm 1).

    Every client of the cohort makes its local steps from x^r with a fresh optimiser, and
    ``x^{r+1} = x^r + sum_i w_i (x_i^{K_i} - x^r)``. The weights w_i are equal by
    default; the paper's are the clients' shares of the samples, ``server.weighting=samples``. With
    another optimiser it is Local Adam, Local AdamW and so on; with SGD with momentum as server rule
    it is FedAvgM.

    Args:
        lr: Local learning rate eta.
        optimizer: Any optimiser of ``torch.optim`` that needs no closure; ``lr`` sets its rate, and
            another one inside it is refused.
        server: Server rule on the pseudo-gradient; plain averaging if None.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        optimizer: OptimizerFactory = torch.optim.SGD,
        server: ServerRule | None = None,
    ) -> None:
        super().__init__(TorchRule(lr, optimizer), server=server)
