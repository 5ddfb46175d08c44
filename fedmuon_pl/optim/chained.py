"""Several optimisers as one."""

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch.optim import Optimizer

__all__ = ["Chained"]


class Chained(Optimizer):
    """Optimisers with parameters of their own, stepped one after the other as one optimiser.

    Its parameter groups are theirs in order, and its state is theirs together, so that schedulers
    and checkpoints see one ordinary optimiser.

    Args:
        optimizers: At least one, fresh; use them only through this one from now on.

    Raises:
        ValueError: If there is none, or a parameter belongs to two of them.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Take over their parameter groups (see the class)."""
        self.optimizers = list(optimizers)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        super().__init__(groups, {})

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or pickle needs beside torch's own; not part of ``state_dict``."""
        return {**super().__getstate__(), "optimizers": self.optimizers}

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of each.

        Args:
            closure: Computes the gradients anew and returns the loss, which is then returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for optimizer in self.optimizers:
            # Anew in every step: loading a checkpoint has replaced both here.
            last = first + len(optimizer.param_groups)
            optimizer.param_groups, optimizer.state = self.param_groups[first:last], self.state
            optimizer.step()
            first = last
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not after the start: it would belong to none of the optimisers.

        Raises:
            ValueError: If the optimisers' own groups are already there.
        """
        if len(self.param_groups) == sum(len(o.param_groups) for o in self.optimizers):
            raise ValueError(
                "Chained: add parameter groups to its optimisers, before chaining them"
            )
        super().add_param_group(param_group)
