"""Fashion-MNIST: 70,000 grey 28 x 28 pictures of clothes, ten kinds (Xiao et al., 1708.07747)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from .arrays import Arrays
from .files import find_folder, read_idx, through_torchvision
from .images import ImageDataModule

__all__ = ["FashionMNIST", "read_fashion_mnist"]

DEBIAN = Path("/usr/share/datasets/fashion-mnist")

# SHA-256 of the decompressed files.
_KNOWN: dict[str, str] = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def read_fashion_mnist(
    root: str | Path, known: Mapping[str, str | None] = _KNOWN, debian: Path = DEBIAN
) -> tuple[Arrays, Arrays]:
    """The official training and test images.

    Args:
        root: Holds ``FashionMNIST/raw/`` as torchvision writes it, or the four files themselves.
        known: SHA-256 of each file's decompressed content; None for any.
        debian: Where Debian's package puts the files; looked at last.

    Returns:
        uint8 inputs in 0..255, ``(60000, 1, 28, 28)`` and ``(10000, 1, 28, 28)``, 10 classes.

    Raises:
        ConfigError: If the files are nowhere, or are not the known ones.
    """
    root = Path(root).expanduser()
    folder = find_folder([root / "FashionMNIST" / "raw", root, debian], known)
    if folder is None:
        raise ConfigError(
            f"data.root={root}: Fashion-MNIST is not there: put its four files "
            f"({', '.join(f'{name}.gz' for name in known)}) into {root / 'FashionMNIST' / 'raw'}, "
            f"or run `apt-get install dataset-fashion-mnist` on Debian, or set data.download=true"
        )

    def part(name: str) -> Arrays:
        images = read_idx(folder, f"{name}-images-idx3-ubyte", known)
        labels = read_idx(folder, f"{name}-labels-idx1-ubyte", known)
        return Arrays(images[:, None], labels.astype(np.int64), 10)

    return part("train"), part("t10k")


class FashionMNIST(ImageDataModule):
    """Fashion-MNIST with its official test set of 10,000 images; 10 classes, 1 x 28 x 28.

    MIT licence, (c) 2017 Zalando SE.

    Args:
        root: Folder that holds ``FashionMNIST/raw/`` as torchvision writes it, or the four IDX
            files themselves, each plain or ``.gz``. Debian's package ``dataset-fashion-mnist`` is
            found by itself.
        download: Let torchvision fetch the files into ``root`` if they are nowhere.
        verify: Whether the files must be the known ones; false for others of the same format.
        **kwargs: Those of :class:`ImageDataModule`.

    Raises:
        ConfigError: If the files are missing or are not the known ones, or a size does not fit.
    """

    mean = (0.2860,)  # of the official training images: 0.28604 and 0.35302
    std = (0.3530,)

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
        self._known = _KNOWN if verify else dict.fromkeys(_KNOWN)

    def read(self) -> tuple[Arrays, Arrays]:
        """See the class."""
        try:
            return read_fashion_mnist(self.root, self._known)
        except ConfigError:
            if not self.download:
                raise
            through_torchvision("FashionMNIST", "", self.root, True)
            return read_fashion_mnist(self.root, self._known)
