"""What the Trainer reads: evaluation in batches, and one training batch a round."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["Batches", "OneRound"]


class Batches:
    """Batches of evaluation: a sized iterable that any number of passes may read.

    Args:
        data: A pytree of tensors whose first axis is the samples.
        size: Samples in a batch; the last may be shorter.
        prepare: What is done to a batch when it is taken.
        rank: Of the processes that share the batches, this one's number.
        ranks: How many there are; rank r has batches r, r + ranks, and so on. One that has none
            gets an empty batch: all processes must go through the same evaluations.
    """

    def __init__(
        self,
        data: Any,  # noqa: ANN401
        size: int,
        prepare: Callable[[Any], Any] = lambda batch: batch,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.data = data
        self.size = size
        self.prepare = prepare
        self.samples = len(tree_leaves(data)[0])
        batches = range(-(-self.samples // size))
        past_the_end = range(len(batches), len(batches) + 1)
        self._own = batches[rank::ranks] or (past_the_end if rank else batches)

    def __len__(self) -> int:
        """The number of batches."""
        return len(self._own)

    def __iter__(self) -> Iterator[Any]:
        """Batch after batch, in order."""
        for i in self._own:
            part = slice(i * self.size, (i + 1) * self.size)
            yield self.prepare(tree_map(lambda t, part=part: t[part], self.data))


class OneRound:
    """The training loader: one batch, the whole round; the clients' data go another way."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[int]:
        yield 0
