"""FedAdam: adaptive moments on the server."""

from functools import partial

import torch

from ..optim.adaptive import AdaptiveServer
from .base import Algorithm
from .local import OptimizerFactory, TorchRule, positive

__all__ = ["FedAdam"]


class FedAdam(Algorithm):
    """FedAdam (Reddi et al., "Adaptive Federated Optimization", arXiv 2003.00295, Algorithm 2).

    With Delta the mean displacement of the clients' SGD: ``m <- beta1 m + (1 - beta1) Delta``,
    ``v <- beta2 v + (1 - beta2) Delta^2``, ``x <- x + server_lr m / (sqrt(v) + tau)``; m starts at
    0 and v at tau^2. Buffers are averaged, never adapted.

    Args:
        lr: Local learning rate eta_l.
        server_lr: Server learning rate eta.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        tau: Degree of adaptivity.
        bias_correction: Whether to correct both moments as Adam does; the paper does not.
        optimizer: The clients' optimiser.
    """

    def __init__(
        self,
        lr: float,
        server_lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        bias_correction: bool = False,
        optimizer: OptimizerFactory = torch.optim.SGD,
    ) -> None:
        positive("server_lr", server_lr)
        rule = partial(
            AdaptiveServer,
            kind="adam",
            lr=server_lr,
            betas=(beta1, beta2),
            tau=tau,
            bias_correction=bias_correction,
        )
        super().__init__(TorchRule(lr, optimizer), server=rule)
