"""Running sums of what the clients of a round send: memory does not grow with the cohort."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..clients import Tensors
from ..pytrees import sent

__all__ = ["RunningMean", "mean_buffers"]


class RunningMean:
    """Weighted means of lists of tensors, by key.

    Contributions are summed in float64 with integer weights and divided once, so that the result
    does not depend on the order of the clients beyond the last bits of a float64, and not at all
    after rounding to float32.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensors] = {}
        self._weights: dict[str, int] = {}
        self._merged: set[str] = set()

    @torch.no_grad()
    def add(self, key: str, tensors: Sequence[Tensor], weights: Sequence[int]) -> None:
        """Adds the contributions of a block of clients.

        Args:
            key: What is averaged.
            tensors: Each ``(C, *any)``, floating point; none is fine.
            weights: C non-negative integers; a client of weight 0 is left out altogether.
        """
        if not tensors:
            return
        if key not in self._sums:
            self._sums[key] = [torch.zeros_like(t[0], dtype=torch.float64) for t in tensors]
            self._weights[key] = 0
        if len(weights) > 1 and min(weights) > 0:  # in few calls; a 0 would let a NaN through
            row = sent(torch.tensor(weights, dtype=torch.float64), tensors[0].device)
            for total, t in zip(self._sums[key], tensors, strict=True):
                total.add_(torch.tensordot(row, t.to(torch.float64), 1))
            self._weights[key] += sum(weights)
            return
        for c, weight in enumerate(weights):
            if weight:
                torch._foreach_add_(self._sums[key], [t[c] for t in tensors], alpha=weight)
                self._weights[key] += weight

    def weight(self, key: str) -> int:
        """The sum of the weights so far."""
        return self._weights.get(key, 0)

    def layout(self) -> dict[str, list[tuple[int, ...]]]:
        """The shapes by key, for :meth:`expect`."""
        return {key: [tuple(t.shape) for t in sums] for key, sums in self._sums.items()}

    def expect(self, layout: Mapping[str, Sequence[Sequence[int]]], device: torch.device) -> None:
        """Starts sums that nothing was added to: those of other processes will be."""
        for key, shapes in layout.items():
            if key not in self._sums:
                zeros = [torch.zeros(tuple(s), dtype=torch.float64, device=device) for s in shapes]
                self._sums[key], self._weights[key] = zeros, 0

    def unmerged(self) -> dict[str, Tensors]:
        """The sums themselves, by key, of this process alone; :meth:`merged` takes them out."""
        return {key: sums for key, sums in self._sums.items() if key not in self._merged}

    def merged(self, key: str, weight: int) -> None:
        """The sums of a key now are those of all processes, and so is their weight."""
        self._weights[key] = weight
        self._merged.add(key)

    def means(self) -> dict[str, Tensors]:
        """The weighted means in float64; keys whose weights sum to 0 are left out."""
        return {
            key: list(torch._foreach_div(sums, float(self._weights[key])))
            for key, sums in self._sums.items()
            if self._weights[key] > 0
        }


def mean_buffers(
    means: Sequence[Tensor], counters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> None:
    """Writes the clients' averaged buffers into the global model's, in place.

    Float buffers are averaged with the round's weights; integer ones, which count, take the
    largest value of the cohort. Server rules never touch buffers.
    """
    floats = [b for b in buffers.values() if b.is_floating_point()]
    if means:
        for buffer, mean in zip(floats, means, strict=True):
            buffer.copy_(mean)
    for name, value in counters.items():
        buffers[name].copy_(value)
