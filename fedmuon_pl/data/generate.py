"""Small files in the true formats of public data sets: for trying a whole path without the data.

The images are noise around a pattern of their class, so that a network can learn them. Nothing that
is measured on them says anything about the data set.
"""

import gzip
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..seeding import numpy_rng

__all__ = ["GENERATORS", "generate"]

Images = npt.NDArray[np.uint8]


def _part(name: str, count: int, classes: int, *shape: int) -> tuple[Images, npt.NDArray[np.int64]]:
    """So many images ``(count, *shape)``, every class in turn."""
    labels = np.arange(count) % classes
    patterns = numpy_rng(0, "generated patterns").integers(0, 128, (classes, *shape))
    noise = numpy_rng(0, f"generated {name}").integers(0, 128, (count, *shape))
    return (patterns[labels] + noise).astype(np.uint8), labels


def cifar100(root: Path, per_class: int = 6) -> None:
    """``cifar-100-python/{train,test,meta}``: pickles, each image a row of three planes."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 100 * per_class), ("test", 100)):
        images, labels = _part(part, count, 100, 3, 32, 32)
        content = {"data": images.reshape(count, -1), "fine_labels": labels.tolist()}
        (folder / part).write_bytes(pickle.dumps(content))
    names = {"fine_label_names": [f"class {i}" for i in range(100)]}
    (folder / "meta").write_bytes(pickle.dumps(names))


def tiny_imagenet(root: Path, per_class: int = 3) -> None:
    """``tiny-imagenet-200/``: JPEGs in a folder per class, and a list of the validation images."""
    from PIL import Image

    folder = root / "tiny-imagenet-200"
    (folder / "val" / "images").mkdir(parents=True, exist_ok=True)
    names = [f"n{i:08d}" for i in range(200)]
    (folder / "wnids.txt").write_text("\n".join(names) + "\n")
    images, labels = _part("train", 200 * per_class, 200, 64, 64, 3)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        own = folder / "train" / names[label] / "images"
        own.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(own / f"{names[label]}_{i // 200}.JPEG")
    images, labels = _part("val", 200, 200, 64, 64, 3)
    lines = []
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(folder / "val" / "images" / f"val_{i}.JPEG")
        lines.append(f"val_{i}.JPEG\t{names[label]}\t0\t0\t63\t63\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))


def fashion_mnist(root: Path, per_class: int = 60) -> None:
    """``FashionMNIST/raw/*.gz``: IDX files of bytes, big-endian sizes first."""
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 10 * per_class), ("t10k", 100)):
        images, labels = _part(part, count, 10, 28, 28)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels.astype(np.uint8))):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            path = folder / f"{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(head + array.tobytes()))


GENERATORS: Mapping[str, Callable[[Path], None]] = {
    "CIFAR100": cifar100,
    "TinyImageNet": tiny_imagenet,
    "FashionMNIST": fashion_mnist,
}
"""By the name of the data module that reads them."""


def generate(name: str, root: Path) -> None:
    """Writes the files of a data set, once.

    Args:
        name: Of the data module that is to read them, a key of :data:`GENERATORS`.
        root: Its ``root``.

    Raises:
        KeyError: If there is no generator of that name.
    """
    mark = root / f".{name}"
    if mark.exists():
        return
    GENERATORS[name](root)
    mark.touch()
