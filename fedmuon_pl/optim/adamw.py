"""AdamW whose moments can start warm."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fedmuon_pl.optim.base import GroupOptimizer

__all__ = ["AdamW"]


class AdamW(GroupOptimizer):
    """AdamW, which divides each moment by the weights of the gradients in it.

    For a parameter x with gradient g, learning rate η and weight decay λ::

        m <- β1 m + (1 - β1) g        a <- β1 a + (1 - β1)
        v <- β2 v + (1 - β2) g²       b <- β2 b + (1 - β2)
        u <- max(u, v)                amsgrad; else u = v
        x <- (1 - η λ) x
        x <- x - η (m / a) / (√(u / b) + ε)

    with a = b = 1 without ``bias_correction``. From an empty state it is ``torch.optim.AdamW``, for
    after t steps ``a = 1 - β1^t``. That has one count t for both moments: it cannot go on from an
    averaged m beside an empty v without a bias of up to 1 / (1 - β) in the step, nor exactly from
    the mean of moments that have seen different numbers of steps, as the mean of 1 - β^t is not
    1 - β to the mean of t. The weights a and b are averaged as the moments are, and stay right.

    State per parameter: ``exp_avg`` (m), ``exp_avg_sq`` (v) and, with ``amsgrad``,
    ``max_exp_avg_sq`` (u) of its shape; with ``bias_correction`` also ``exp_avg_weight`` (a) and
    ``exp_avg_sq_weight`` (b), numbers or tensors ``(clients,)`` where the parameters have a leading
    client axis. Whatever of it is missing starts at 0: place a moment and its weight before the
    first step to start warm.

    Args:
        params: Parameters or parameter groups; every other argument may differ by group.
        lr: Learning rate η.
        betas: (β1, β2), each in [0, 1).
        eps: ε.
        weight_decay: Decoupled, λ.
        amsgrad: Whether steps are divided by the largest second moment so far.
        bias_correction: As above.

    Raises:
        ValueError: For an argument out of range or a complex parameter.
        RuntimeError: In ``step``, for a sparse gradient.

    Source: I. Loshchilov and F. Hutter, arXiv 1711.05101, Algorithm 2; S. Reddi et al., AMSGrad,
    arXiv 1904.09237, Algorithm 2.
    """

    elementwise: ClassVar[bool] = True
    weights: ClassVar[dict[str, str]] = {
        "exp_avg": "exp_avg_weight",
        "exp_avg_sq": "exp_avg_sq_weight",
        "max_exp_avg_sq": "exp_avg_sq_weight",
    }
    """The states that may be placed, and the number that each is divided by."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        bias_correction: bool = True,
    ) -> None:
        """Check the arguments (see the class)."""
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also takes a state of torch's AdamW, and of older versions, which counted steps."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("amsgrad", False)
            group.setdefault("bias_correction", True)
            for p in group["params"]:
                own = self.state.get(p, {})
                if "step" not in own:
                    continue
                steps = float(own.pop("step"))
                counts = steps, float(own.pop("step_sq", steps))
                names = ("exp_avg_weight", "exp_avg_sq_weight")
                for name, beta, count in zip(names, group["betas"], counts, strict=True):
                    own[name] = 1 - beta**count

    def _check_group(self, group: dict[str, Any]) -> None:
        self._at_least_zero(group, "lr", "eps", "weight_decay")
        self._two_betas(group)

    def _step(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        states = [self.state[p] for p in params]
        m, v = (_moments(states, params, key) for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, value=1 - beta2)
        u = v
        if group["amsgrad"]:
            u = _moments(states, params, "max_exp_avg_sq")
            torch._foreach_maximum_(u, v)
        denominators = list(torch._foreach_sqrt(u))
        if group["bias_correction"]:
            for state in states:
                for weight, beta in (("exp_avg_weight", beta1), ("exp_avg_sq_weight", beta2)):
                    state[weight] = beta * state.get(weight, 0.0) + (1 - beta)
            torch._foreach_div_(denominators, _factors(states, params, "exp_avg_sq_weight", 0.5))
        torch._foreach_add_(denominators, group["eps"])
        if group["bias_correction"]:
            torch._foreach_mul_(denominators, _factors(states, params, "exp_avg_weight"))
        if group["weight_decay"] != 0:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(params, m, denominators, value=-lr)


def _moments(states: list[dict[str, Any]], params: list[Tensor], key: str) -> list[Tensor]:
    for state, p in zip(states, params, strict=True):
        if key not in state:
            state[key] = torch.zeros_like(p)
    return [state[key] for state in states]


def _factors(
    states: list[dict[str, Any]], params: list[Tensor], weight: str, power: float = 1.0
) -> list[Any]:
    """The weights to a power: numbers, or of each client in the shape that fits p's slices."""
    if not isinstance(states[0][weight], Tensor):
        return [state[weight] ** power for state in states]
    return [
        (state[weight] ** power).view(-1, *[1] * (p.ndim - 1)).to(p.dtype)
        for p, state in zip(params, states, strict=True)
    ]
