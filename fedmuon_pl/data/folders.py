"""Images in folders: Tiny-ImageNet-200, and any folder with a subfolder for each class."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from .arrays import Arrays
from .files import cached
from .images import ImageDataModule

__all__ = ["ImageFolder", "TinyImageNet"]

_ENDINGS = {".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in _ENDINGS)


def _from_16_bits(image: Any) -> Any:  # noqa: ANN401
    from PIL import Image

    return Image.fromarray((np.asarray(image) // 257).astype(np.uint8))


def _decode(root: Path, files: Sequence[Path], size: int, grey: bool) -> npt.NDArray[np.uint8]:
    """The files as uint8 ``(n, C, size, size)``, kept in the cache.

    The shorter side is brought to ``size``, bilinearly, and the middle is cut out.
    """
    from PIL import Image, UnidentifiedImageError

    shape = (len(files), 1 if grey else 3, size, size)

    def make() -> dict[str, npt.NDArray[Any]]:
        out = np.empty(shape, np.uint8)
        for i, path in enumerate(files):
            try:
                with Image.open(path) as raw:
                    if raw.mode in ("I", "F"):
                        raise ConfigError(
                            f"{path} has pixels of 32 bits; convert it to 8 or 16 bits a channel"
                        )
                    wide = raw.mode.startswith("I;16")  # which Pillow would cut off at 255
                    shown = _from_16_bits(raw) if wide else raw
                    image = shown.convert("L" if grey else "RGB")
            except (OSError, UnidentifiedImageError) as e:
                raise ConfigError(f"{path} is no readable image ({e})") from None
            short = min(image.size)
            if short != size:
                sides = [max(size, round(side * size / short)) for side in image.size]
                image = image.resize((sides[0], sides[1]), Image.Resampling.BILINEAR)
            left, top = ((side - size) // 2 for side in image.size)
            pixels = np.asarray(image.crop((left, top, left + size, top + size)))
            out[i] = pixels if grey else pixels.transpose(2, 0, 1)
        return {"images": out}

    state = hashlib.sha256(f"{size} {grey} {root.resolve()}".encode())
    for path in files:
        stat = path.stat()
        state.update(f"\0{path.relative_to(root)}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    images: npt.NDArray[np.uint8] = cached(
        f"images-{state.hexdigest()[:32]}", make, lambda t: t["images"].shape == shape
    )["images"]
    return images


class ImageFolder(ImageDataModule):
    """``root/train/CLASS/*`` and ``root/test/CLASS/*`` (or ``root/val/``, if there is no test).

    Classes are the folders of ``train``, by name. Images of any size are brought to one (the
    shorter side bilinearly, then the middle), decoded once and kept in the cache. Licence and
    source are those of your images.

    Args:
        root: The folder.
        image_size: Height and width in the end.
        grey: One channel, not three.
        **kwargs: Those of :class:`ImageDataModule`.

    Raises:
        ConfigError: If folders or images are missing or unreadable, or a size does not fit.
    """

    def __init__(self, root: str, image_size: int, grey: bool = False, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(**kwargs)
        if image_size < 1:
            raise ConfigError(f"data.image_size={image_size}: must be at least 1")
        self.root = root
        self.image_size = image_size
        self.grey = grey

    def read(self) -> tuple[Arrays, Arrays]:
        """See the class."""
        root = Path(self.root).expanduser()
        tests = [root / name for name in ("test", "val") if (root / name).is_dir()]
        if not (root / "train").is_dir() or not tests:
            raise ConfigError(
                f"data.root={root}: put training images into {root / 'train'}/CLASS/ and test "
                f"images into {root / 'test'}/CLASS/"
            )
        classes = sorted(p.name for p in (root / "train").iterdir() if p.is_dir())

        def part(folder: Path) -> Arrays:
            found = sorted(p.name for p in folder.iterdir() if p.is_dir())
            if strange := sorted(set(found) - set(classes)):
                raise ConfigError(f"{folder / strange[0]}: no such class in {root / 'train'}")
            files = {name: _files(folder / name) for name in found}
            flat = [path for name in found for path in files[name]]
            labels = [classes.index(name) for name in found for _ in files[name]]
            if not flat:
                raise ConfigError(f"{folder} holds no images in folders of classes")
            images = _decode(root, flat, self.image_size, self.grey)
            return Arrays(images, np.array(labels, np.int64), len(classes))

        return part(root / "train"), part(tests[0])


class TinyImageNet(ImageDataModule):
    """Tiny-ImageNet-200: 100,000 images for training, 10,000 for testing; 200 classes, 3 x 64 x 64.

    From Stanford's CS231n (cs231n.stanford.edu/tiny-imagenet-200.zip), a part of ImageNet under
    ImageNet's terms: non-commercial research. The labels of its test images were never published,
    so its official validation part is the test set, as everywhere. Decoded once (a minute or two)
    and kept in the cache, 1.4 GB.

    Args:
        root: Folder that holds ``tiny-imagenet-200/``, or that folder.
        **kwargs: Those of :class:`ImageDataModule`.

    Raises:
        ConfigError: If files are missing or unreadable, or a size does not fit.
    """

    def __init__(self, root: str = "data", **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(**kwargs)
        self.root = root

    def read(self) -> tuple[Arrays, Arrays]:
        """See the class."""
        given = Path(self.root).expanduser()
        root = next(
            (p for p in (given / "tiny-imagenet-200", given) if (p / "wnids.txt").is_file()), None
        )
        if root is None or not (root / "val" / "val_annotations.txt").is_file():
            raise ConfigError(
                f"data.root={given}: Tiny-ImageNet is not there: unpack tiny-imagenet-200.zip, so "
                f"that there is {given / 'tiny-imagenet-200' / 'wnids.txt'}"
            )
        classes = {
            name: i for i, name in enumerate(sorted((root / "wnids.txt").read_text().split()))
        }
        train: list[Path] = []
        labels: list[int] = []
        for name, label in classes.items():
            folder = root / "train" / name / "images"
            if not folder.is_dir():
                raise ConfigError(f"{folder} is not there: unpack tiny-imagenet-200.zip again")
            files = _files(folder)
            train += files
            labels += [label] * len(files)
        test: list[Path] = []
        test_labels: list[int] = []
        for line in (root / "val" / "val_annotations.txt").read_text().splitlines():
            file, name = line.split()[:2]
            test.append(root / "val" / "images" / file)
            test_labels.append(classes[name])
        if missing := [path for path in test if not path.is_file()]:
            raise ConfigError(f"{missing[0]} is not there: unpack tiny-imagenet-200.zip again")
        return (
            Arrays(_decode(root, train, 64, False), np.array(labels, np.int64), len(classes)),
            Arrays(_decode(root, test, 64, False), np.array(test_labels, np.int64), len(classes)),
        )
