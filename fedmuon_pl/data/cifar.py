"""CIFAR-10 and CIFAR-100: 60,000 colour 32 x 32 images each (Krizhevsky, 2009)."""

from typing import Any

import numpy as np

from .arrays import Arrays
from .files import through_torchvision
from .images import ImageDataModule

__all__ = ["CIFAR10", "CIFAR100"]


class CIFAR10(ImageDataModule):
    """CIFAR-10 with its official test set of 10,000 images; 10 classes, 3 x 32 x 32.

    Read by torchvision, which checks the files' MD5. A labelled part of the Tiny Images; its
    authors (Krizhevsky, Nair, Hinton; cs.toronto.edu/~kriz/cifar.html) state no licence and ask to
    cite "Learning Multiple Layers of Features from Tiny Images", 2009.

    Args:
        root: Folder that holds ``cifar-10-batches-py/`` (unpack ``cifar-10-python.tar.gz`` there).
        download: Let torchvision fetch it into ``root``.
        verify: Whether the files must be the known ones; false for others of the same format.
        **kwargs: Those of :class:`ImageDataModule`.

    Raises:
        ConfigError: If the files are missing or damaged, or a size does not fit.
    """

    mean = (0.4914, 0.4822, 0.4465)  # of the official training images
    std = (0.2470, 0.2435, 0.2616)
    _classes = 10
    _put = "unpack cifar-10-python.tar.gz, so that there is {root}/cifar-10-batches-py"

    def __init__(
        self,
        root: str = "data",
        download: bool = False,
        verify: bool = True,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**kwargs)
        self.root = root
        self.download = download
        self.verify = verify

    def read(self) -> tuple[Arrays, Arrays]:
        """See the class."""

        def part(train: bool) -> Arrays:
            data = through_torchvision(
                type(self).__name__,
                self._put,
                self.root,
                self.download,
                self.verify,
                train=train,
            )
            images = np.ascontiguousarray(data.data.transpose(0, 3, 1, 2))
            return Arrays(images, np.array(data.targets, np.int64), self._classes)

        return part(True), part(False)


class CIFAR100(CIFAR10):
    """CIFAR-100 with its official test set of 10,000 images; 100 (fine) classes, 3 x 32 x 32.

    Source and licence as :class:`CIFAR10`.

    Args:
        root: Folder that holds ``cifar-100-python/`` (unpack ``cifar-100-python.tar.gz`` there).
        download: Let torchvision fetch it into ``root``.
        verify: Whether the files must be the known ones; false for others of the same format.
        **kwargs: Those of :class:`ImageDataModule`.

    Raises:
        ConfigError: If the files are missing or damaged, or a size does not fit.
    """

    mean = (0.5071, 0.4865, 0.4409)  # of the official training images
    std = (0.2673, 0.2564, 0.2762)
    _classes = 100
    _put = "unpack cifar-100-python.tar.gz, so that there is {root}/cifar-100-python"
