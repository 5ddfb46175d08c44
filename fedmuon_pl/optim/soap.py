"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner, with or without a client axis."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fedmuon_pl.optim.base import GroupOptimizer

__all__ = ["SOAP", "merged_shape"]


def merged_shape(shape: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Joins neighbouring axes, from the first on, while their product is at most ``limit``.

    A convolution (64, 3, 3, 3) becomes (576, 3) with a limit of 1000 and (1728,) with 10000.
    """
    merged: list[int] = []
    current = 1
    for size in shape:
        if current * size <= limit:
            current *= size
        elif current > 1:
            merged.append(current)
            current = size
        else:
            merged.append(size)
    if current > 1 or not merged:
        merged.append(current)
    return tuple(merged)


class SOAP(GroupOptimizer):
    """Adam in the eigenbasis of the gradient's second moments along each axis.

    For a matrix x with gradient G, learning rate η, weight decay λ and step t of a parameter::

        G' = Q_L^T G Q_R
        M <- β1 M + (1 - β1) G                  M' = Q_L^T M Q_R
        V <- β2 V + (1 - β2) G'²
        N' = M' / (1 - β1^t) / (√(V / (1 - β2^t)) + ε)
        x <- (1 - η λ) x - η Q_L N' Q_R^T
        L <- β L + (1 - β) G G^T                R <- β R + (1 - β) G^T G
        every f steps, with P = L and R:  Q <- the Q of QR(P Q)

    The first Q is the eigenvectors of P by ``eigh``, eigenvalues falling; before a power iteration
    the columns of Q, and V with them, are sorted by the diagonal of Q^T P Q, as in the authors'
    code. A parameter of more axes has a P and a Q for each (a convolution four): the same formulas
    with the tensor unfolded along that axis. An axis longer than ``max_precond_dim`` has none, and
    fewer than two axes are Adam's. G' uses no gradient that has not been used for Q before.

    Hence the first step: the authors' code only takes up the gradient in L and R there and moves
    nothing, one-axis parameters included. The paper's algorithm says nothing about it.
    ``skip_first=False`` steps at once, in the basis of L and R as they were placed before (a warm
    start), else of the first gradient itself.

    The authors' code puts ε beside √V, not √(V / (1 - β2^t)), and decays after the step by
    the moved weights; here both are as in AdamW. P has no bias correction: its size has no effect
    on Q. Where P has fewer than full rank, as with a wide layer after a few small batches, the
    basis of its null space is arbitrary, and rounding (another LAPACK, another number of clients
    side by side) then changes the steps taken there.

    State per parameter: ``exp_avg`` (M) and ``exp_avg_sq`` (V) of its shape, for each axis d with
    a preconditioner ``gram_<d>`` (P) and ``basis_<d>`` (Q), ``(clients, n, n)`` with a client axis,
    and numbers: ``exp_avg_weight``, ``exp_avg_sq_weight`` and ``gram_weight``, the weights of the
    gradients in M, V and P (``1 - β1^t`` and so on, see :class:`~fedmuon_pl.optim.adamw.AdamW`),
    and ``updates`` (steps since this state was made). M and P, with their weights, may be placed
    before the first step; V belongs to its basis.

    Args:
        params: Parameters or parameter groups; every other argument but client_axis may differ by
            group.
        lr: Learning rate η.
        betas: (β1, β2), each in [0, 1).
        shampoo_beta: β of L and R; β2 if None.
        eps: ε.
        weight_decay: Decoupled, λ.
        precondition_frequency: f.
        max_precond_dim: The longest axis that is preconditioned.
        merge_dims: Whether neighbouring axes are first joined up to that length, see
            :func:`merged_shape`.
        skip_first: Whether the first step only fills L and R.
        client_axis: Whether the first axis of every parameter counts clients, each with state of
            its own.

    Raises:
        ValueError: For an argument out of range or a complex parameter.
        RuntimeError: In ``step``, for a sparse gradient.

    Source: N. Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv 2409.11321,
    Algorithms 3 and 4; the authors' code is github.com/nikhilvyas/SOAP.
    """

    weights: ClassVar[dict[str, str]] = {
        "exp_avg": "exp_avg_weight",
        "gram": "gram_weight",
    }
    """The states that may be placed, and the number that tells how much is in each."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10000,
        merge_dims: bool = False,
        skip_first: bool = True,
        client_axis: bool = False,
    ) -> None:
        """Check the arguments (see the class)."""
        self.client_axis = client_axis
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_precond_dim": max_precond_dim,
            "merge_dims": merge_dims,
            "skip_first": skip_first,
        }
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or pickle needs beside torch's own; not part of ``state_dict``."""
        return {**super().__getstate__(), "client_axis": self.client_axis}

    def _check_group(self, group: dict[str, Any]) -> None:
        self._at_least_zero(group, "lr", "eps", "weight_decay")
        self._two_betas(group)
        beta = group["shampoo_beta"]
        if beta is not None and not 0 <= beta < 1:
            raise ValueError(f"SOAP: shampoo_beta must be in [0, 1), got {beta}")
        for name in ("precondition_frequency", "max_precond_dim"):
            if not group[name] >= 1:
                raise ValueError(f"SOAP: {name} must be at least 1, got {group[name]}")

    def _step(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        for p, grad in zip(params, grads, strict=True):
            self._step_one(p, grad, group)

    def _step_one(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        first, new = "updates" not in state, True
        if first:
            new = not self._start(p, state, group) or group["skip_first"]
            if new:
                self._feed(grad, state, group)
            for d in self._axes(state):
                state[f"basis_{d}"] = eigenbasis(state[f"gram_{d}"])
            if group["skip_first"]:
                return
        state["updates"] += 1
        for weight, beta in (("exp_avg_weight", beta1), ("exp_avg_sq_weight", beta2)):
            state[weight] = beta * state[weight] + (1 - beta)
        turned = self._turn(grad, state, group)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        denominator = state["exp_avg_sq"].sqrt().div_(state["exp_avg_sq_weight"] ** 0.5)
        denominator.add_(group["eps"])
        adam = self._turn(state["exp_avg"], state, group) / denominator
        if group["weight_decay"] != 0:
            p.mul_(1 - group["lr"] * group["weight_decay"])
        direction = self._turn(adam, state, group, back=True)
        p.add_(direction, alpha=-group["lr"] / state["exp_avg_weight"])
        if not (first and new):
            self._feed(grad, state, group)
        if state["updates"] % group["precondition_frequency"] == 0:
            self._power_iteration(state, group)

    def _start(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> bool:
        """Makes what is missing of the state; returns whether the gram matrices were there."""
        warm = bool(state.get("gram_weight", 0.0) > 0)
        for moment in ("exp_avg", "exp_avg_sq"):
            if moment not in state:
                state[moment] = torch.zeros_like(p)
        for number in (*self.weights.values(), "exp_avg_sq_weight", "updates"):
            state.setdefault(number, 0.0)
        shape = self._shape(p, group)
        matrix = p.ndim - self.client_axis >= 2
        for d, n in enumerate(shape[1:]):
            if matrix and n <= group["max_precond_dim"] and f"gram_{d}" not in state:
                axis = shape[:1] if self.client_axis else ()
                state[f"gram_{d}"] = p.new_zeros((*axis, n, n))
        return warm

    def _shape(self, p: Tensor, group: dict[str, Any]) -> tuple[int, ...]:
        """(clients, *axes) of the tensor that is preconditioned."""
        shape = tuple(p.shape) if self.client_axis else (1, *p.shape)
        if group["merge_dims"] and len(shape) > 2:
            shape = (shape[0], *merged_shape(shape[1:], group["max_precond_dim"]))
        return shape

    def _axes(self, state: dict[str, Any]) -> list[int]:
        """The axes that have a preconditioner."""
        grams = [key for key in state if key.startswith("gram_") and key != "gram_weight"]
        return [int(key.removeprefix("gram_")) for key in grams]

    def _feed(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Takes up G in L and R."""
        beta = group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]
        state["gram_weight"] = beta * state["gram_weight"] + (1 - beta)
        g = grad.reshape(self._shape(grad, group))
        for d in self._axes(state):
            unfolded = g.movedim(d + 1, 1)
            unfolded = unfolded.reshape(*unfolded.shape[:2], -1)
            gram = state[f"gram_{d}"]
            gram.lerp_((unfolded @ unfolded.mT).view_as(gram), 1 - beta)

    def _turn(
        self, t: Tensor, state: dict[str, Any], group: dict[str, Any], back: bool = False
    ) -> Tensor:
        """Into the eigenbasis, Q^T along every axis, or back."""
        shape, axes = self._shape(t, group), self._axes(state)
        if not axes:
            return t
        turned = t.reshape(shape)
        for d in range(len(shape) - 1):
            # The first axis goes last; after all of them the order is the old one.
            turned = turned.movedim(1, -1)
            if d in axes:
                q = state[f"basis_{d}"].reshape(shape[0], shape[d + 1], shape[d + 1])
                rows = turned.reshape(shape[0], -1, shape[d + 1])
                turned = (rows @ (q.mT if back else q)).view_as(turned)
        return turned.reshape(t.shape)

    def _power_iteration(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        shape = self._shape(state["exp_avg_sq"], group)
        v = state["exp_avg_sq"].reshape(shape)
        for d in self._axes(state):
            state[f"basis_{d}"], order = power_step(state[f"gram_{d}"], state[f"basis_{d}"])
            index = order.reshape(shape[0], *(-1 if e == d else 1 for e in range(len(shape) - 1)))
            v = v.gather(d + 1, index.expand(shape))
        state["exp_avg_sq"] = v.reshape(state["exp_avg_sq"].shape)


def eigenbasis(gram: Tensor) -> Tensor:
    """Eigenvectors of symmetric matrices ``(..., n, n)`` in columns, eigenvalues falling.

    A matrix that is not finite gets NaN, and the others theirs.
    """
    finite, p = _guard(gram)
    try:
        q: Tensor = torch.linalg.eigh(p).eigenvectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # float32 may fail to converge where float64 does.
        q = torch.linalg.eigh(p.double()).eigenvectors
    return q.flip(-1).to(gram.dtype).masked_fill(~finite, torch.nan)


def power_step(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The Q of QR(P Q) with Q's columns sorted by diag(Q^T P Q), falling; and their order.

    Args:
        gram: P, ``(..., n, n)``.
        basis: Q, ``(..., n, n)``.
    """
    finite, p = _guard(gram)
    q = torch.where(finite, basis.to(p.dtype), _identity(p))
    order = (q * (p @ q)).sum(-2).argsort(dim=-1, descending=True, stable=True)
    q = q.gather(-1, order.unsqueeze(-2).expand_as(q))
    q = torch.linalg.qr(p @ q).Q
    return q.to(gram.dtype).masked_fill(~finite, torch.nan), order


def _guard(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Which matrices are finite, and all of them in LAPACK's dtypes, identities for the others."""
    finite = gram.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    p = gram if gram.dtype in (torch.float32, torch.float64) else gram.float()
    return finite, torch.where(finite, p, _identity(p))


def _identity(p: Tensor) -> Tensor:
    return torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
