"""Batches are pytrees of tensors."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["map_tensors"]


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:  # noqa: ANN401
    """``tree_map`` over a batch; the usual ones, a tensor or a plain tuple of them, at no cost."""
    if isinstance(batch, Tensor):
        return function(batch)
    if type(batch) is tuple and all(isinstance(t, Tensor) for t in batch):
        return tuple(function(t) for t in batch)
    return tree_map(function, batch)
