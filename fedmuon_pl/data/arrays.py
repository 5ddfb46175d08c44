"""Labelled arrays, and fixed stratified parts of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..seeding import numpy_rng

__all__ = ["SPLIT_SEED", "Arrays", "split", "stratified"]

SPLIT_SEED = 0
"""What is held out of a data set is part of the data set: one choice for everybody."""


@dataclass(frozen=True, eq=False)
class Arrays:
    """A classification data set in memory.

    Args:
        inputs: uint8 (raw values, not scaled) or float32, ``(n, channels, height, width)``.
        labels: int64 in ``[0, num_classes)``, shape ``(n,)``.
        num_classes: The number of classes.
        writers: Who each sample is from, int64, shape ``(n,)``; None where nobody knows.

    Raises:
        ValueError: If a shape, a dtype or a label does not fit.
    """

    inputs: npt.NDArray[np.uint8] | npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    num_classes: int
    writers: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Check shapes, dtypes and the range of the labels."""
        if self.inputs.ndim != 4 or self.inputs.dtype not in (np.uint8, np.float32):
            raise ValueError(
                f"inputs must be uint8 or float32 of shape (n, channels, height, width), got "
                f"{self.inputs.dtype} of shape {self.inputs.shape}"
            )
        if self.labels.shape != self.inputs.shape[:1] or self.labels.dtype != np.int64:
            raise ValueError(
                f"labels must be int64 of shape ({len(self.inputs)},), got "
                f"{self.labels.dtype} of shape {self.labels.shape}"
            )
        if self.labels.size and not 0 <= self.labels.min() <= self.labels.max() < self.num_classes:
            raise ValueError(
                f"num_classes={self.num_classes}, but labels run from {self.labels.min()} to "
                f"{self.labels.max()}"
            )
        writers = self.writers
        if writers is not None and (
            writers.shape != self.labels.shape or writers.dtype != np.int64
        ):
            raise ValueError(
                f"writers must be int64 of shape ({len(self.inputs)},), got {writers.dtype} of "
                f"shape {writers.shape}"
            )


def split(
    labels: npt.NDArray[np.integer[Any]], seed: int, validation: float, test: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Fixed stratified train, validation and test parts of a data set that has none.

    Every class gives each part its share, rounded up or down; the rounding errors are carried from
    class to class, so that the parts as a whole have their shares too, also where classes have
    fewer samples than parts.

    Args:
        labels: The class of every sample, integers, shape ``(n,)``.
        seed: The seed of the split, best the partition's.
        validation: Share of the validation part, in [0, 1).
        test: Share of the test part, in [0, 1).

    Returns:
        Train, validation and test indices, each ascending: disjoint, and together ``range(n)``.

    Raises:
        ValueError: If labels are not 1-D integers, a share is outside [0, 1), nothing is left for
            training, or a part with a share above 0 would be empty.
    """
    labels = np.asarray(labels)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels must be 1-D integers, got {labels.dtype} {labels.shape}")
    for name, share in (("validation", validation), ("test", test)):
        if not 0 <= share < 1:
            raise ValueError(f"{name} must be a share in [0, 1), got {share}")
    if validation + test >= 1:
        raise ValueError(f"{validation=} and {test=} leave nothing for training: lower one")
    shares = np.array([1 - validation - test, validation, test])
    rng = numpy_rng(seed, "split")
    part = np.empty(labels.size, np.int8)
    carried = np.zeros(3)
    for label in np.unique(labels):
        mine = rng.permutation(np.flatnonzero(labels == label))
        quota = np.round(mine.size * shares, 9)  # 0.1 * 30 is 3
        counts = np.floor(quota).astype(np.int64)
        rest = quota - counts
        # Whole samples that are left go to the parts most behind, one at the most to each.
        behind = np.where(rest > 0, rest + carried, -np.inf)
        counts[np.argsort(-behind, kind="stable")[: mine.size - counts.sum()]] += 1
        carried += quota - counts
        part[mine] = np.repeat(np.arange(3, dtype=np.int8), counts)
    train, val, held_out = (np.flatnonzero(part == i).astype(np.int64) for i in range(3))
    for name, share, found in (
        ("the training part", shares[0], train),
        ("validation", validation, val),
        ("test", test, held_out),
    ):
        if share > 0 and not found.size:
            raise ValueError(
                f"{name} with a share of {share:.3g} of {labels.size} samples is empty: change "
                f"validation or test"
            )
    return train, val, held_out


def stratified(
    labels: npt.NDArray[np.integer[Any]], seed: int, sizes: Sequence[int]
) -> list[npt.NDArray[np.int64]]:
    """Fixed disjoint stratified parts of exactly the given sizes.

    Each part has its share of every class, to one (largest remainders). A part does not depend on
    the sizes of those after it.

    Args:
        labels: The class of every sample, integers, shape ``(n,)``.
        seed: The seed of the draw.
        sizes: Samples of each part, in all at most n.

    Returns:
        Ascending indices, part after part.

    Raises:
        ValueError: If a size is below 1 or there are not that many samples.
    """
    if min(sizes) < 1 or sum(sizes) > labels.size:
        raise ValueError(f"parts of {list(sizes)} of {labels.size} samples cannot be taken")
    rng = numpy_rng(seed, "stratified")
    codes = np.unique(labels, return_inverse=True)[1]
    order = rng.permutation(labels.size)
    order = order[np.argsort(codes[order], kind="stable")]  # class after class, each shuffled
    left = np.bincount(codes)
    first = np.cumsum(left) - left
    parts = []
    for size in sizes:
        # Whole shares, then one more for those with the largest remainders.
        counts, rest = np.divmod(left * size, left.sum())
        counts[np.argsort(-rest, kind="stable")[: size - counts.sum()]] += 1
        taken = [order[a : a + c] for a, c in zip(first, counts, strict=True)]
        parts.append(np.sort(np.concatenate(taken)).astype(np.int64))
        first, left = first + counts, left - counts
    return parts
