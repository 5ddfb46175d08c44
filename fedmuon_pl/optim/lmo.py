"""Steps along a linear minimisation oracle: the polar factor of matrices, unit vectors else."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fedmuon_pl.optim.muon import Muon, Scale, step_scale
from fedmuon_pl.optim.orthogonalize import Orthogonalizer, as_matrix

__all__ = ["LMO"]


class LMO(Muon):
    """Momentum whose corrected value, in every step, chooses the best direction of a unit ball.

    For each parameter x with gradient g, momentum M, correction D and learning rate η::

        M <- (1 - alpha) M + alpha g
        x <- x - η s O(M + D)          matrices, s as in :class:`~fedmuon_pl.optim.muon.Muon`
        x <- x - η (M + D) / ||M + D||  the rest, in the 2-norm; 0 of 0

    ``state[p]["momentum_buffer"]`` is M and ``state[p]["correction"]`` is D, of p's shape; each is
    0 where it was not placed before the first step.

    Args:
        params: Parameters or parameter groups; lr, scale and ``spectral`` (whether the group is one
            of matrices, the default, or of the rest) may differ between groups.
        lr: Learning rate.
        alpha: Weight of the newest gradient, in (0, 1].
        scale: See :func:`~fedmuon_pl.optim.muon.step_scale`.
        orthogonalizer: O; Newton-Schulz with 0 steps is the matrix over its Frobenius norm.
        client_axis: Whether the first axis of every parameter counts clients.

    Raises:
        ValueError: As :class:`~fedmuon_pl.optim.muon.Muon`.

    Source: Y. Takezawa et al., arXiv 2509.26337, Algorithm 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        alpha: float = 0.1,
        scale: Scale = "none",
        orthogonalizer: Orthogonalizer = Orthogonalizer(),  # noqa: B008 (frozen)
        client_axis: bool = False,
    ) -> None:
        """Check the arguments (see the class)."""
        super().__init__(
            params,
            lr=lr,
            momentum=1 - alpha,
            nesterov=False,
            ema=True,
            scale=scale,
            orthogonalizer=orthogonalizer,
            client_axis=client_axis,
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        group.setdefault("spectral", True)
        super()._check_group(group if group["spectral"] else {**group, "params": []})

    def _step(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
        momenta = [state["momentum_buffer"] for state in states]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        corrected = [
            state["momentum_buffer"] + state["correction"]
            if "correction" in state
            else state["momentum_buffer"]
            for state in states
        ]
        if group["spectral"]:
            matrices = [as_matrix(u, int(self.client_axis)) for u in corrected]
            scales = [step_scale(m.shape[-2], m.shape[-1], group["scale"]) for m in matrices]
            directions = self._orthogonalize(matrices)
        else:
            scales = [1.0] * len(params)
            directions = [self._unit(u) for u in corrected]
        for p, o, s in zip(params, directions, scales, strict=True):
            p.add_(o.view_as(p), alpha=-group["lr"] * s)

    def _unit(self, u: Tensor) -> Tensor:
        rows = u.reshape(len(u) if self.client_axis else 1, -1)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        unit: Tensor = rows / norms.where(norms > 0, 1)
        return unit.view_as(u)
