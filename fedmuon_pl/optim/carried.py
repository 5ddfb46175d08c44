"""Adam whose moments go on from earlier rounds."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fedmuon_pl.optim.base import GroupOptimizer

__all__ = ["CarriedAdamW"]


class CarriedAdamW(GroupOptimizer):
    """AdamW that can start from given moments and still correct their bias.

    For each parameter x with gradient g, in step k = 1, 2, ... of this optimiser, learning rate η
    and weight decay λ::

        m <- β1 m + (1 - β1) g
        v <- β2 v + (1 - β2) g²
        u <- max(u, v)             amsgrad; else u = v
        x <- (1 - η λ) x - η (m / c1) / (√(u / c2) + ε)

    with ``c1 = 1 - d1 β1^k`` and ``c2 = 1 - d2 β2^k``, or both 1 without ``bias_correction``. The
    carried decays d1 and d2 are what the weights of m's and v's earlier steps lack to 1: 1 for
    fresh moments (then this is ``torch.optim.AdamW``), β1^K and β2^K after K earlier steps.

    Moments are ``state[p]["exp_avg"]``, ``["exp_avg_sq"]`` and, with ``amsgrad``,
    ``["max_exp_avg_sq"]``, of p's shape: place them before the first step, which makes zeros of
    those that it does not find. ``state[p]["step"]`` is k.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: (β1, β2), each in [0, 1).
        eps: ε, at least 0.
        weight_decay: Decoupled: x shrinks by lr * weight_decay per step.
        amsgrad: Whether steps are divided by the largest second moment so far.
        bias_correction: As above.
        carried: (d1, d2): numbers, or tensors ``(clients,)`` where the parameters have a leading
            client axis; usually set in ``param_groups`` before the first step.

    Raises:
        ValueError: For an argument out of range.

    Source: I. Loshchilov, F. Hutter, arXiv 1711.05101, Algorithm 2; S. Reddi et al., AMSGrad,
    arXiv 1904.09237, Algorithm 2.
    """

    elementwise: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        bias_correction: bool = True,
        carried: tuple[float | Tensor, float | Tensor] = (1.0, 1.0),
    ) -> None:
        """Check the arguments (see the class)."""
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "bias_correction": bias_correction,
            "carried": carried,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        self._at_least_zero(group, "lr", "eps", "weight_decay")
        self._two_betas(group)

    def _step(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        states = [self.state[p] for p in params]
        for state in states:
            state["step"] = state.get("step", 0) + 1
        m, v = (_moments(states, params, key) for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
        u = v
        if group["amsgrad"]:
            u = _moments(states, params, "max_exp_avg_sq")
            torch._foreach_maximum_(u, v)
        denominators = list(torch._foreach_sqrt(u))
        if group["bias_correction"]:
            d1, d2 = group["carried"]
            for p, state, d in zip(params, states, denominators, strict=True):
                k = state["step"]
                d.div_(_per_client((1 - d2 * beta2**k) ** 0.5, p)).add_(group["eps"])
                d.mul_(_per_client(1 - d1 * beta1**k, p))
        else:
            torch._foreach_add_(denominators, group["eps"])
        if group["weight_decay"] != 0:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(params, m, denominators, -lr)


def _moments(states: list[dict[str, Any]], params: list[Tensor], key: str) -> list[Tensor]:
    for state, p in zip(states, params, strict=True):
        if key not in state:
            state[key] = torch.zeros_like(p)
    return [state[key] for state in states]


def _per_client(factor: float | Tensor, p: Tensor) -> float | Tensor:
    """A number as it is; one of each client in the shape that multiplies p's slices."""
    if not isinstance(factor, Tensor):
        return factor
    return factor.view(-1, *[1] * (p.ndim - 1)).to(p.dtype)
