"""Files of data sets: where they lie, whether they are the known ones, and the IDX format."""

import gzip
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

__all__ = ["checked", "find_folder", "parse_idx", "read_idx"]

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def find_folder(folders: Iterable[Path], names: Iterable[str]) -> Path | None:
    """The first folder that holds all files, each as it is or with ``.gz``; None if none does."""
    wanted = list(names)
    for folder in folders:
        if all(_plain_or_gz(folder / name) for name in wanted):
            return folder
    return None


def _plain_or_gz(path: Path) -> Path | None:
    return next((p for p in (path, path.with_name(path.name + ".gz")) if p.is_file()), None)


def checked(path: Path, content: bytes, sha256: str | None) -> bytes:
    """The content, if it is the known one.

    Args:
        path: Where it is from, for the message.
        content: The bytes, decompressed: how they were packed makes no difference to the data.
        sha256: The expected SHA-256 (hex); None leaves it unchecked.

    Raises:
        ConfigError: If it is another one.
    """
    digest = hashlib.sha256(content).hexdigest()
    if sha256 is not None and digest != sha256:
        raise ConfigError(
            f"{path} is not the known file (SHA-256 of its content {digest[:16]}..., expected "
            f"{sha256[:16]}...): get it again"
        )
    return content


def read_idx(folder: Path, name: str, known: Mapping[str, str]) -> npt.NDArray[Any]:
    """An IDX file, plain or with ``.gz``, checked by its content.

    Args:
        folder: Where it lies.
        name: Its name without ``.gz``.
        known: SHA-256 (hex) of the decompressed content by name.

    Returns:
        A writeable array in the machine's byte order.

    Raises:
        ConfigError: If it is not the known file, or no IDX file.
        FileNotFoundError: If it is not there.
    """
    path = _plain_or_gz(folder / name)
    if path is None:
        raise FileNotFoundError(f"{folder / name} is not there, nor is {name}.gz")
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError) as e:
            raise ConfigError(f"{path} is damaged ({e}): get it again") from None
    return parse_idx(checked(path, content, known.get(name)), str(path))


def parse_idx(content: bytes, where: str = "the content") -> npt.NDArray[Any]:
    """An array in the IDX format of MNIST's files (http://yann.lecun.com/exdb/mnist).

    Two zero bytes, one for the type, one for the number of axes; the length of each axis as a
    big-endian 32-bit integer; the values, big-endian, last axis fastest.

    Args:
        content: The file, decompressed.
        where: What the message of a failure calls it.

    Raises:
        ConfigError: If it is no such file.
    """
    kind = _IDX_TYPES.get(content[2]) if content[:2] == b"\0\0" and len(content) >= 4 else None
    start = 4 + 4 * content[3] if kind else 0
    if kind and len(content) >= start:
        shape = tuple(int(n) for n in np.frombuffer(content, ">i4", content[3], 4))
        dtype = np.dtype(kind)
        if min(shape, default=1) >= 0 and len(content) - start == dtype.itemsize * int(
            np.prod(shape, dtype=np.int64)
        ):
            values = np.frombuffer(content, dtype, offset=start).reshape(shape)
            return values.astype(dtype.newbyteorder("="))
    raise ConfigError(f"{where} is no whole IDX file: get it again")
