"""Values: batches, which are pytrees; arguments as plain values; what a client sends; devices."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["all_finite", "map_tensors", "plain", "sent"]


def all_finite(stacked: Tensor) -> Tensor:
    """Whether all of each client's numbers are finite, ``(C,)``.

    By the largest and the smallest, which not-a-number passes through: a twentieth of the time of
    ``isfinite``, and no copy of another memory layout.

    Args:
        stacked: ``(C, *any)``, of real numbers.
    """
    if stacked.numel() == 0:
        return torch.ones(len(stacked), dtype=torch.bool, device=stacked.device)
    t = stacked if stacked.ndim > 1 else stacked.unsqueeze(1)
    rest = tuple(range(1, t.ndim))
    return t.amax(rest).isfinite() & t.amin(rest).isfinite()


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:  # noqa: ANN401
    """``tree_map`` over a batch; the usual ones, a tensor or a plain tuple of them, at no cost."""
    if isinstance(batch, Tensor):
        return function(batch)
    if type(batch) is tuple and all(isinstance(t, Tensor) for t in batch):
        return tuple(function(t) for t in batch)
    return tree_map(function, batch)


def plain(value: Any) -> Any:  # noqa: ANN401
    """A constructor argument as numbers, strings, lists and dicts."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [plain(v) for v in value]
    if isinstance(value, partial):
        # The CLI's factories carry the class among the arguments.
        kinds: list[Any] = [a for a in value.args if isinstance(a, type)] or [value.func]
        return {"call": plain(kinds[0]), **{k: plain(v) for k, v in value.keywords.items()}}
    if callable(getattr(value, "describe", None)) and not isinstance(value, type):
        return value.describe()
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def sent(array: Tensor | npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array, there; a GPU gets it from pinned memory, so that nobody waits for its work."""
    t = array if isinstance(array, Tensor) else torch.from_numpy(array)
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)
