"""AdamW whose moments can start warm, each with a step count of its own."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fedmuon_pl.optim.base import GroupOptimizer

__all__ = ["AdamW"]


class AdamW(GroupOptimizer):
    """AdamW, which corrects each moment for the steps that this moment has seen.

    For a parameter x with gradient g, learning rate η and weight decay λ::

        m <- β1 m + (1 - β1) g       s <- s + 1
        v <- β2 v + (1 - β2) g²      t <- t + 1
        x <- (1 - η λ) x
        x <- x - η m / (1 - β1^s) / (√(v / (1 - β2^t)) + ε)

    From an empty state it is ``torch.optim.AdamW``, which has one count for both moments: it cannot
    go on from an averaged m beside an empty v, or the other way round, without a bias of up to
    1 / (1 - β) in the step.

    State per parameter: ``exp_avg`` (m) and ``exp_avg_sq`` (v) of its shape, and the numbers
    ``step`` (s) and ``step_sq`` (t), which may be fractions. Whatever of it is missing starts at 0:
    place a moment and its count before the first step to start warm.

    Args:
        params: Parameters or parameter groups; every other argument may differ by group.
        lr: Learning rate η.
        betas: (β1, β2), each in [0, 1).
        eps: ε.
        weight_decay: Decoupled, λ.

    Raises:
        ValueError: For an argument out of range or a complex parameter.
        RuntimeError: In ``step``, for a sparse gradient.

    Source: I. Loshchilov and F. Hutter, arXiv 1711.05101, Algorithm 2.
    """

    elementwise: ClassVar[bool] = True
    counts: ClassVar[dict[str, str]] = {"exp_avg": "step", "exp_avg_sq": "step_sq"}

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        """Check the arguments (see the class)."""
        super().__init__(
            params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        self._at_least_zero(group, "lr", "eps", "weight_decay")
        self._two_betas(group)

    def _step(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            for moment, count in self.counts.items():
                if moment not in state:
                    state[moment] = torch.zeros_like(p)
                state[count] = state.get(count, 0.0) + 1.0
        m = [state["exp_avg"] for state in states]
        v = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, value=1 - beta2)
        if group["weight_decay"] != 0:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        denominators = torch._foreach_sqrt(v)
        torch._foreach_div_(denominators, [(1 - beta2 ** s["step_sq"]) ** 0.5 for s in states])
        torch._foreach_add_(denominators, group["eps"])
        sizes = [-lr / (1 - beta1 ** s["step"]) for s in states]
        torch._foreach_addcdiv_(params, m, denominators, sizes)
