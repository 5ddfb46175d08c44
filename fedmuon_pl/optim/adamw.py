"""AdamW whose moments can start warm, each with a step count of its own."""

from collections.abc import Callable
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

__all__ = ["AdamW"]


class AdamW(Optimizer):
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters (see :class:`torch.optim.Optimizer`).

        Raises:
            ValueError: As the class says; the group is then not added.
        """
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if not group[name] >= 0:
                raise ValueError(f"AdamW: {name} must be at least 0, got {group[name]}")
        betas = group["betas"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"AdamW: betas must be two numbers in [0, 1), got {betas}")
        for p in group["params"]:
            if p.is_complex():
                raise ValueError(f"AdamW: complex parameters are not supported, got {p.dtype}")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step for every parameter that has a gradient.

        Args:
            closure: Computes the gradients anew and returns the loss, which is then returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step(params, group)
        return loss

    def _step(self, params: list[Tensor], group: dict[str, Any]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        grads: list[Tensor] = []
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            assert p.grad is not None
            if p.grad.is_sparse:
                raise RuntimeError("AdamW: sparse gradients are not supported")
            grads.append(p.grad)
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
