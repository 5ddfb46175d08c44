"""Server rules of their own over any local optimiser: FedAvgM, FedAdam, FedYogi, FedAdagrad."""

from functools import partial
from typing import Literal

import torch

from ..optim.adaptive import AdaptiveServer
from .base import Algorithm
from .local import OptimizerFactory, TorchRule, below_one, positive

__all__ = ["FedAdagrad", "FedAdam", "FedAvgM", "FedYogi"]


class FedAvgM(Algorithm):
    """FedAvgM (Hsu et al., arXiv 1909.06335): heavy-ball momentum on the server.

    With Delta the mean displacement: ``v <- server_momentum v + Delta``, ``x <- x + server_lr v``,
    or ``x <- x + server_lr (Delta + server_momentum v)`` with Nesterov's momentum, which the
    paper's experiments have. The paper weights clients by their samples:
    ``server.weighting=samples``.

    Args:
        lr: Local learning rate.
        server_lr: Server learning rate.
        server_momentum: Server momentum beta in [0, 1); 0 is FedAvg.
        server_nesterov: Whether it is Nesterov's.
        optimizer: The clients' optimiser.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        server_lr: float = 1.0,
        server_momentum: float = 0.9,
        server_nesterov: bool = False,
        optimizer: OptimizerFactory = torch.optim.SGD,
    ) -> None:
        rule = partial(
            torch.optim.SGD,
            lr=positive("server_lr", server_lr),
            momentum=below_one("server_momentum", server_momentum),
            nesterov=server_nesterov,
        )
        super().__init__(TorchRule(lr, optimizer), server=rule)


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

    Raises:
        ValueError: If an argument is out of its range.
    """

    _kind: Literal["adam", "yogi"] = "adam"

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
        rule = partial(
            AdaptiveServer,
            kind=self._kind,
            lr=positive("server_lr", server_lr),
            betas=(beta1, beta2),
            tau=tau,
            bias_correction=bias_correction,
        )
        super().__init__(TorchRule(lr, optimizer), server=rule)


class FedYogi(FedAdam):
    """FedYogi (arXiv 2003.00295, Algorithm 2): :class:`FedAdam` with Yogi's second moment.

    ``v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)``; all else, the arguments too, as there.
    """

    _kind = "yogi"


class FedAdagrad(Algorithm):
    """FedAdagrad (arXiv 2003.00295, Algorithm 2): ``v <- v + Delta^2``; else as FedAdam.

    Args:
        lr: Local learning rate eta_l.
        server_lr: Server learning rate eta.
        beta1: Decay of the first moment; the paper's experiments have 0 here.
        tau: Degree of adaptivity.
        optimizer: The clients' optimiser.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        server_lr: float = 0.1,
        beta1: float = 0.0,
        tau: float = 1e-3,
        optimizer: OptimizerFactory = torch.optim.SGD,
    ) -> None:
        rule = partial(
            AdaptiveServer,
            kind="adagrad",
            lr=positive("server_lr", server_lr),
            betas=(beta1, 0.0),
            tau=tau,
        )
        super().__init__(TorchRule(lr, optimizer), server=rule)
