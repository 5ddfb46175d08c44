"""Muon, for matrices and convolutions, with or without a leading client axis."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fedmuon_pl.optim.base import GroupOptimizer
from fedmuon_pl.optim.orthogonalize import MatrixView, Orthogonalizer, as_matrix

__all__ = ["Muon", "Scale", "step_scale"]

Scale = Literal["none", "spectral", "rms", "operator", "spectral_unflattened"]

# On a CPU, batching saves calls and costs copies and cache: at 1 thread, 3 to 6 parameters of up to
# 2^15 elements (clients included) took 0.4 to 0.9 of the time, of 4 * 10^4 and more up to 1.3.
_CPU_BATCH_ELEMENTS = 2**15


@cache
def step_scale(rows: int, cols: int, scale: Scale) -> float:
    """Factor of an orthogonalised update of shape ``(rows, cols)``.

    ``none`` is 1. ``spectral`` is sqrt(max(1, rows / cols)) (Jordan et al., Muon, 2024): where
    rows >= cols, a step changes the outputs for inputs of unit RMS by an RMS of at most the
    learning rate. ``rms`` is 0.2 sqrt(max(rows, cols))
    (J. Liu et al., arXiv 2502.16982): an update of full rank then has an RMS of 0.2,
    like AdamW's, so that AdamW's learning rate and weight decay carry over. ``operator`` is
    sqrt(rows / cols), ``spectral`` without its floor of 1: the update of every matrix has operator
    norm 1 between vectors measured by RMS (Yang et al., arXiv 2310.17813).

    For a convolution, rows and cols are those of the flattened ``(out, in * kh * kw)``, but for
    ``spectral_unflattened``: ``spectral`` of the last two axes of the tensor as it is, for a
    convolution sqrt(max(1, kh / kw)). That is a slip (KellerJordan/Muon, issue 63) which the
    released code of FedMuon has, and with it its published numbers.
    """
    if scale == "none":
        return 1.0
    if scale == "rms":
        return 0.2 * math.sqrt(max(rows, cols))
    if scale == "operator":
        return math.sqrt(rows / cols)
    return math.sqrt(max(1.0, rows / cols))


class Muon(GroupOptimizer):
    """Momentum whose every step is orthogonalised.

    For each parameter x with gradient g and momentum M, learning rate η and weight decay λ::

        M <- β M + g           u = g + β M         ema=False, the classic form
        M <- β M + (1 - β) g   u = (1 - β) g + β M  ema=True
                               u = M               nesterov=False
        x <- (1 - η λ) x - η s O(u)

    O is the orthogonaliser and s is :func:`step_scale`. Both forms of momentum give O the same
    direction, at sizes that differ by 1 - β.

    A parameter of 2 or more axes is the matrix ``(out, in * kh * kw)``, or several, by
    ``matrix_view``; give biases and norm gains
    (fewer axes) to another optimiser, see :func:`fedmuon_pl.optim.routing.split_parameters`.

    ``state[p]["momentum_buffer"]`` is M, of p's shape. It is made, as zeros, by the first step that
    finds none: place one before to start warm, read it after to average it over clients.

    Args:
        params: Parameters or parameter groups; lr, momentum, nesterov, ema, weight_decay and scale
            may differ between groups.
        lr: Learning rate; with ``scale="none"`` the spectral norm of a step.
        momentum: β in [0, 1).
        nesterov: Whether to look ahead.
        ema: Whether M is an exponential moving average (as the released code has it) or a decaying
            sum (as the paper writes it).
        weight_decay: Decoupled: x shrinks by lr * weight_decay per step.
        scale: See :func:`step_scale`.
        orthogonalizer: The method and its options.
        matrix_view: How tensors of more than 2 axes are read, see
            :func:`~fedmuon_pl.optim.orthogonalize.as_matrix`.
        client_axis: Whether the first axis of every parameter counts clients, each with a matrix of
            its own: shape ``(clients, out, in, ...)``.
        batch_equal_shapes: Whether matrices of one shape are orthogonalised in one batched call,
            which gives the same result up to rounding. None: on a CPU for parameters of at most
            2^15 elements, elsewhere always.

    Raises:
        ValueError: For an argument out of range, a complex parameter, or one that is no matrix.
        RuntimeError: In ``step``, for a sparse gradient.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        ema: bool = True,
        weight_decay: float = 0.0,
        scale: Scale = "spectral",
        orthogonalizer: Orthogonalizer = Orthogonalizer(),  # noqa: B008 (frozen)
        matrix_view: MatrixView = "flatten",
        client_axis: bool = False,
        batch_equal_shapes: bool | None = None,
    ) -> None:
        """Check the arguments (see the class)."""
        if matrix_view not in get_args(MatrixView):
            raise ValueError(f"Muon: matrix_view must be flatten or last_two, got {matrix_view!r}")
        self.orthogonalizer = orthogonalizer
        self.matrix_view: MatrixView = matrix_view
        self.client_axis = client_axis
        self.batch_equal_shapes = batch_equal_shapes
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ema": ema,
            "weight_decay": weight_decay,
            "scale": scale,
        }
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or pickle needs beside torch's own; not part of ``state_dict``."""
        names = ("orthogonalizer", "matrix_view", "client_axis", "batch_equal_shapes")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def _check_group(self, group: dict[str, Any]) -> None:
        self._at_least_zero(group, "lr", "weight_decay")
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"Muon: momentum must be in [0, 1), got {group['momentum']}")
        if group["scale"] not in get_args(Scale):
            raise ValueError(
                f"Muon: scale must be one of {', '.join(get_args(Scale))}, got {group['scale']!r}"
            )
        for p in group["params"]:
            if p.ndim - self.client_axis < 2:
                behind = " behind the client axis" if self.client_axis else ""
                raise ValueError(
                    f"Muon takes parameters of 2 or more axes{behind}, got shape {tuple(p.shape)}; "
                    "give this one to another optimiser, such as torch.optim.AdamW"
                )

    def _step(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        momenta: list[Tensor] = []
        for p in params:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            momenta.append(state["momentum_buffer"])

        lr, beta = group["lr"], group["momentum"]
        updates: Sequence[Tensor] = momenta
        if group["ema"]:
            torch._foreach_lerp_(momenta, grads, 1 - beta)
            if group["nesterov"]:
                updates = torch._foreach_lerp(grads, momenta, beta)
        else:
            torch._foreach_mul_(momenta, beta)
            torch._foreach_add_(momenta, grads)
            if group["nesterov"]:
                updates = torch._foreach_add(grads, momenta, alpha=beta)

        axis = int(self.client_axis)
        kernels = [_channels_behind(u, axis) for u in updates]
        directions = self._orthogonalize([as_matrix(k, axis, self.matrix_view) for k in kernels])
        if group["weight_decay"] != 0:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        # One pass per parameter: twice as fast on a CPU as scaling and adding by foreach.
        for p, u, k, o in zip(params, updates, kernels, directions, strict=True):
            rows, cols = (p if group["scale"] == "spectral_unflattened" else o).shape[-2:]
            step = o.view(k.shape)
            step = step if k is u else step.movedim(-1, axis + 1)
            p.add_(step, alpha=-lr * step_scale(rows, cols, group["scale"]))

    def _orthogonalize(self, matrices: list[Tensor]) -> list[Tensor]:
        """O of each matrix, in order; equal shapes in one call where that was asked or pays."""
        batches: dict[Any, list[int]] = {}
        for i, m in enumerate(matrices):
            batch = self.batch_equal_shapes
            if batch is None:
                batch = not m.is_cpu or m.numel() <= _CPU_BATCH_ELEMENTS
            batches.setdefault((m.shape, m.dtype, m.device) if batch else i, []).append(i)
        directions = list(matrices)
        for members in batches.values():
            if len(members) == 1:
                directions[members[0]] = self.orthogonalizer(matrices[members[0]])
            else:
                together = self.orthogonalizer(torch.stack([matrices[i] for i in members]))
                for i, o in zip(members, together.unbind(), strict=True):
                    directions[i] = o
        return directions


def _channels_behind(kernel: Tensor, axis: int) -> Tensor:
    """``(out, kh, kw, in)`` of a kernel ``(out, in, kh, kw)`` that lies so in memory, else itself.

    It then is a matrix without a copy. Its columns are in another order, and so are those of its
    orthogonalisation: O(M P) = O(M) P for a permutation P.
    """
    if kernel.ndim - axis != 4 or kernel.is_contiguous():
        return kernel
    moved = kernel.movedim(axis + 1, -1)
    return moved if moved.is_contiguous() else kernel
