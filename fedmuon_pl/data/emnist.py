"""EMNIST: handwritten digits and letters, grey 28 x 28 (Cohen et al., arXiv 1702.05373)."""

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from .arrays import Arrays
from .files import find_folder, read_idx, through_torchvision
from .images import ImageDataModule

__all__ = ["EMNIST"]

_CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}


class EMNIST(ImageDataModule):
    """EMNIST with its official test set; 1 x 28 x 28, upright.

    Six splits: ``byclass`` (62 classes, 697,932 + 116,323 images), ``bymerge`` (47, the same
    images), ``balanced`` (47, 112,800 + 18,800), ``letters`` (26, 124,800 + 20,800; numbered from 0
    here), ``digits`` (10, 240,000 + 40,000) and ``mnist`` (10, 60,000 + 10,000). Made of NIST
    Special Database 19 by Cohen, Afshar, Tapson and van Schaik; a work of the US government's data,
    with no licence stated. No hashes of the single files are published, so they are not checked.

    The images come as IDX files (NIST's ``gzip.zip``) or, with ``writers``, as Matlab files
    (``matlab.zip``), which alone say who wrote each image: then ``data.partition=Natural`` makes
    each writer a client. That is EMNIST by writer, not LEAF's FEMNIST, whose images, writers and
    test part are others.

    Args:
        split: One of the six.
        root: Folder that holds ``EMNIST/raw/emnist-SPLIT-train-images-idx3-ubyte`` and so on, plain
            or ``.gz``, or, with ``writers``, ``EMNIST/matlab/emnist-SPLIT.mat``.
        download: Let torchvision fetch the IDX files into ``root``; it has no Matlab files.
        writers: Read the Matlab file, with writers.
        **kwargs: Those of :class:`ImageDataModule`.

    Raises:
        ConfigError: If the split is none of these, the files are missing or damaged, or a size does
            not fit.
    """

    def __init__(
        self,
        split: str,
        root: str = "data",
        download: bool = False,
        writers: bool = False,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**kwargs)
        if split not in _CLASSES:
            raise ConfigError(f"data.split={split}: EMNIST has {', '.join(_CLASSES)}")
        self.split = split
        self.root = root
        self.download = download
        self.writers = writers

    def read(self) -> tuple[Arrays, Arrays]:
        """See the class."""
        return self._read_mat() if self.writers else self._read_idx()

    def _arrays(self, images: Any, labels: Any, writers: Any = None) -> Arrays:  # noqa: ANN401
        # The files hold each image column by column.
        upright = np.ascontiguousarray(images.reshape(-1, 1, 28, 28).swapaxes(2, 3))
        codes = labels.reshape(-1).astype(np.int64) - (self.split == "letters")
        return Arrays(upright, codes, _CLASSES[self.split], writers)

    def _read_idx(self) -> tuple[Arrays, Arrays]:
        root = Path(self.root).expanduser()
        folders = [root / "EMNIST" / "raw", root / "EMNIST" / "raw" / "gzip", root]
        names = [
            f"emnist-{self.split}-{part}-{kind}-ubyte"
            for part in ("train", "test")
            for kind in ("images-idx3", "labels-idx1")
        ]
        folder = find_folder(folders, names)
        if folder is None and self.download:
            through_torchvision("EMNIST", "", self.root, True, split=self.split)
            folder = find_folder(folders, names)
        if folder is None:
            raise ConfigError(
                f"data.root={root}: EMNIST {self.split} is not there: put {names[0]}.gz and its "
                f"three companions, from NIST's gzip.zip, into {folders[0]}, or set "
                f"data.download=true"
            )
        images, labels, test_images, test_labels = (read_idx(folder, n, {}) for n in names)
        return self._arrays(images, labels), self._arrays(test_images, test_labels)

    def _read_mat(self) -> tuple[Arrays, Arrays]:
        from scipy.io import loadmat  # comes with scikit-learn

        root, name = Path(self.root).expanduser(), f"emnist-{self.split}.mat"
        folder = find_folder([root / "EMNIST" / "matlab", root], [name])
        if folder is None:
            raise ConfigError(
                f"data.root={root}: EMNIST {self.split} with writers is not there: put {name}, "
                f"from NIST's matlab.zip, into {root / 'EMNIST' / 'matlab'}"
            )
        try:
            data = loadmat(folder / name, simplify_cells=True)["dataset"]
            train, test = data["train"], data["test"]
            writers = np.asarray(train["writers"]).reshape(-1).astype(np.int64)
            return (
                self._arrays(train["images"], train["labels"], writers),
                self._arrays(test["images"], test["labels"]),
            )
        except (KeyError, TypeError, ValueError) as e:
            raise ConfigError(f"{folder / name} is no EMNIST file ({e}): get it again") from None
