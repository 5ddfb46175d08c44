"""Server Muon: the averaged pseudo-gradient is orthogonalised, not the clients' steps."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..optim.chained import Chained
from ..optim.muon import Muon, Scale
from ..optim.orthogonalize import Orthogonalizer
from .base import Algorithm
from .fedmuon import DType, Method
from .local import OptimizerFactory, TorchRule, is_ema, positive

__all__ = ["ServerMuon"]


class ServerMuon(Algorithm):
    """Local steps of any optimiser, Muon as the server's.

    FedOpt (Reddi et al., arXiv 2003.00295, Algorithm 1) with Muon (Jordan et al., 2024) as
    ServerOpt: with Delta the mean displacement, ``M <- beta M - Delta`` and
    ``x <- x - server_lr O(M)`` for a matrix. It orthogonalises after averaging, so that the mean
    of the clients' polar factors, which is none, never arises; so do EF21-Muon (arXiv 2510.00643)
    with one local step, and the outer Muon in the research code of MuLoCo
    (github.com/facebookresearch/MuLoCo). No paper defines the method itself.

    Args:
        lr: Local learning rate.
        server_lr: Server learning rate of the matrices.
        rest_server_lr: Server learning rate of the rest.
        beta: Momentum of the server's Muon.
        nesterov: Whether it looks ahead.
        momentum_form: ``"classic"`` or ``"ema"``, see :class:`~fedmuon_pl.optim.muon.Muon`.
        orthogonalizer: ``"newton_schulz"``, ``"polar_express"`` or ``"svd"``.
        ns_steps: Iterations of the first two.
        ns_coefficients: Of Newton-Schulz; the quintic of Jordan et al. if None.
        ns_dtype: What the iteration is computed in; the weights' own if None.
        scale: Step scale of a matrix.
        weight_decay: Of the matrices, decoupled: x shrinks by server_lr weight_decay a round.
        rest: The server's optimiser for tensors of fewer than two axes, such as AdamW; plain SGD
            at a rate of 1 averages them.
        optimizer: The clients' optimiser.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        server_lr: float = 0.05,
        rest_server_lr: float = 1.0,
        beta: float = 0.9,
        nesterov: bool = False,
        momentum_form: Literal["classic", "ema"] = "classic",
        orthogonalizer: Method = "newton_schulz",
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] | None = None,
        ns_dtype: DType | None = None,
        scale: Scale = "none",
        weight_decay: float = 0.0,
        rest: OptimizerFactory = torch.optim.SGD,
        optimizer: OptimizerFactory = torch.optim.SGD,
    ) -> None:
        positive("server_lr", server_lr)
        ema = is_ema(momentum_form)
        orthogonal = Orthogonalizer(
            orthogonalizer, steps=ns_steps, coefficients=ns_coefficients, dtype=ns_dtype
        )
        other = TorchRule(positive("rest_server_lr", rest_server_lr), rest)

        def server(params: Iterable[Tensor]) -> Optimizer:
            every = list(params)
            matrices = [p for p in every if p.ndim >= 2]
            vectors = [p for p in every if p.ndim < 2]
            parts: list[Optimizer] = []
            if matrices:
                muon = Muon(
                    matrices,
                    lr=server_lr,
                    momentum=beta,
                    nesterov=nesterov,
                    ema=ema,
                    weight_decay=weight_decay,
                    scale=scale,
                    orthogonalizer=orthogonal,
                )
                parts.append(muon)
            if vectors:
                parts += [m.optimizer for m in other.build(vectors, client_axis=False)]
            return Chained(parts)

        super().__init__(TorchRule(lr, optimizer), server=server)
