"""Every data set and partition, imported so that a configuration can name their classes."""

from . import (
    augment,
    cifar,
    digits,
    emnist,
    fashion,
    feature_skew,
    folders,
    label_skew,
    npz,
    partition,
    size_skew,
    svhn,
)

__all__ = [
    "augment",
    "cifar",
    "digits",
    "emnist",
    "fashion",
    "feature_skew",
    "folders",
    "label_skew",
    "npz",
    "partition",
    "size_skew",
    "svhn",
]
