"""Adaptive server optimisers: FedAdam, FedYogi and FedAdagrad."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fedmuon_pl.optim.base import GroupOptimizer

__all__ = ["AdaptiveServer"]

_KINDS = ("adam", "yogi", "adagrad")


class AdaptiveServer(GroupOptimizer):
    """One adaptive server step per round on the mean client displacement Δ.

    The gradient that it finds is the pseudo-gradient -Δ. From m = 0 and v = τ², element by
    element::

        m <- β1 m + (1 - β1) Δ
        v <- v + Δ²                           adagrad
        v <- v - (1 - β2) Δ² sign(v - Δ²)     yogi
        v <- β2 v + (1 - β2) Δ²               adam
        x <- x + η m / (√v + τ)

    ``torch.optim.Adam`` differs in v at the start, and always corrects the bias.

    With ``bias_correction``, step t (from 1) uses m / (1 - β1^t) and, but for adagrad whose v is a
    sum, v / (1 - β2^t) in place of m and v. The τ² that v starts from is divided along with the
    rest, so that early steps are still damped.

    State per parameter, of its shape: ``exp_avg`` (m) and ``exp_avg_sq`` (v); ``step`` is an int.

    Args:
        params: Global parameters or parameter groups; every other argument may differ by group.
        kind: ``adam``, ``yogi`` or ``adagrad``.
        lr: Server learning rate η.
        betas: (β1, β2), each in [0, 1); adagrad has no use for β2. The source takes (0.9, 0.99)
            for adam and yogi, and β1 = 0 for adagrad.
        tau: Degree of adaptivity τ > 0, in units of Δ; the source takes 1e-3.
        bias_correction: As above; the source has none.

    Raises:
        ValueError: For an argument out of range or a complex parameter.
        RuntimeError: In ``step``, for a sparse gradient.

    Source: S. Reddi et al., "Adaptive Federated Optimization", arXiv 2003.00295, Algorithm 2.
    """

    def __init__(
        self,
        params: ParamsT,
        kind: Literal["adam", "yogi", "adagrad"] = "adam",
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float = 1e-3,
        bias_correction: bool = False,
    ) -> None:
        """Check the arguments (see the class)."""
        defaults = {
            "kind": kind,
            "lr": lr,
            "betas": tuple(betas),
            "tau": tau,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        kind, tau = group["kind"], group["tau"]
        if kind not in _KINDS:
            raise ValueError(f"AdaptiveServer: kind must be one of {_KINDS}, got {kind!r}")
        self._at_least_zero(group, "lr")
        self._two_betas(group)
        if not tau > 0:
            raise ValueError(f"AdaptiveServer: tau must be positive, got {tau}")

    def _step(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        (beta1, beta2), tau, kind = group["betas"], group["tau"], group["kind"]
        ms: list[Tensor] = []
        vs: list[Tensor] = []
        counts: list[int] = []
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.full_like(p, tau**2)
            state["step"] += 1
            ms.append(state["exp_avg"])
            vs.append(state["exp_avg_sq"])
            counts.append(state["step"])

        torch._foreach_mul_(ms, beta1)
        torch._foreach_add_(ms, grads, alpha=beta1 - 1)  # Δ is minus the pseudo-gradient
        squares = torch._foreach_mul(grads, grads)
        if kind == "adagrad":
            torch._foreach_add_(vs, squares)
        elif kind == "yogi":
            signs = torch._foreach_sub(vs, squares)
            torch._foreach_sign_(signs)
            torch._foreach_mul_(squares, signs)
            torch._foreach_add_(vs, squares, alpha=beta2 - 1)
        else:
            torch._foreach_mul_(vs, beta2)
            torch._foreach_add_(vs, squares, alpha=1 - beta2)

        denominators = torch._foreach_sqrt(vs)
        factors = [group["lr"]] * len(params)
        if group["bias_correction"]:
            factors = [lr / (1 - beta1**t) for lr, t in zip(factors, counts, strict=True)]
            if kind != "adagrad":
                torch._foreach_div_(denominators, [(1 - beta2**t) ** 0.5 for t in counts])
        torch._foreach_add_(denominators, tau)
        torch._foreach_addcdiv_(params, ms, denominators, factors)
