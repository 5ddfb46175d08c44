"""SVHN: house numbers in street pictures, colour 32 x 32, ten digits (Netzer et al., 2011)."""

from typing import Any

import numpy as np

from .arrays import Arrays
from .files import through_torchvision
from .images import ImageDataModule

__all__ = ["SVHN"]


class SVHN(ImageDataModule):
    """The cropped digits: 73,257 for training, 26,032 for testing; 10 classes, 3 x 32 x 32.

    Read by torchvision, which checks the files' MD5; the 531,131 easier "extra" images are not
    used. From ufldl.stanford.edu/housenumbers, for non-commercial use only. The label of a zero is
    0, as in torchvision (10 in the files).

    Args:
        root: Folder that holds ``train_32x32.mat`` and ``test_32x32.mat``.
        download: Let torchvision fetch them into ``root``.
        **kwargs: Those of :class:`ImageDataModule`.

    Raises:
        ConfigError: If the files are missing or damaged, or a size does not fit.
    """

    def __init__(self, root: str = "data", download: bool = False, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(**kwargs)
        self.root = root
        self.download = download

    def read(self) -> tuple[Arrays, Arrays]:
        """See the class."""

        def part(split: str) -> Arrays:
            data = through_torchvision(
                "SVHN",
                "put train_32x32.mat and test_32x32.mat into {root}",
                self.root,
                self.download,
                split=split,
            )
            return Arrays(np.ascontiguousarray(data.data), data.labels, 10)

        return part("train"), part("test")
