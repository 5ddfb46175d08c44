"""What the optimisers share: checked groups, a step over the parameters that have gradients."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedmuon_pl.optim.orthogonalize import autocast_off

__all__ = ["GroupOptimizer"]


class GroupOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` that checks every group and steps group by group.

    A subclass says in :meth:`_check_group` what a group may hold and in :meth:`_step` how its
    parameters move. Autocast is off in the step.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters (see :class:`torch.optim.Optimizer`).

        Raises:
            ValueError: As the class says; the group is then not added.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for p in group["params"]:
                if p.is_complex():
                    raise ValueError(
                        f"{self._name}: complex parameters are not supported, got {p.dtype}"
                    )
            self._check_group(group)
        except ValueError:
            self.param_groups.pop()
            raise

    @property
    def _name(self) -> str:
        return type(self).__name__

    @abstractmethod
    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises ValueError for what the group may not hold."""

    @abstractmethod
    def _step(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        """Moves the parameters of a group that have a gradient, and there is at least one."""

    def _at_least_zero(self, group: dict[str, Any], *names: str) -> None:
        for name in names:
            if not group[name] >= 0:
                raise ValueError(f"{self._name}: {name} must be at least 0, got {group[name]}")

    def _two_betas(self, group: dict[str, Any]) -> None:
        betas = group["betas"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{self._name}: betas must be two numbers in [0, 1), got {betas}")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step for every parameter that has a gradient.

        Args:
            closure: Computes the gradients anew and returns the loss, which is then returned.

        Raises:
            RuntimeError: For a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError(f"{self._name}: sparse gradients are not supported")
                params.append(p)
                grads.append(p.grad)
            if params:
                with autocast_off(params[0].device.type):
                    self._step(params, grads, group)
        return loss
