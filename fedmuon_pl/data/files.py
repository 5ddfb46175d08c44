"""Files of data sets: where they lie, whether they are the known ones, the IDX format, a cache."""

import gzip
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

__all__ = ["cached", "checked", "find_folder", "parse_idx", "read_idx", "through_torchvision"]

Tables = dict[str, npt.NDArray[Any]]

_LARGE = 2**27  # bytes that would take seconds to compress

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


def read_idx(folder: Path, name: str, known: Mapping[str, str | None]) -> npt.NDArray[Any]:
    """An IDX file, plain or with ``.gz``, checked by its content.

    Args:
        folder: Where it lies.
        name: Its name without ``.gz``.
        known: SHA-256 (hex) of the decompressed content by name; None for any.

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


_PARTS = ("train_list", "test_list")


def through_torchvision(
    name: str,
    put: str,
    root: str | Path,
    download: bool,
    verify: bool = True,
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """A data set of torchvision, which checks its files by MD5.

    Args:
        name: Its class in ``torchvision.datasets``.
        put: What the message says to do; ``{root}`` is filled in.
        root: Where torchvision looks.
        download: Whether it may fetch what is missing.
        verify: Whether the files of CIFAR must be the known ones.
        **kwargs: Which part, in torchvision's words.

    Raises:
        ConfigError: If files are missing or damaged, or cannot be fetched.
    """
    import torchvision  # late: it takes seconds

    root = Path(root).expanduser()
    kind = getattr(torchvision.datasets, name)
    if not verify:
        parts = {part: [[file, None] for file, _ in getattr(kind, part)] for part in _PARTS}
        kind = type(name, (kind,), {**parts, "meta": {**kind.meta, "md5": None}})
    try:
        return kind(root, download=download, **kwargs)
    except (RuntimeError, OSError) as e:
        if download:
            raise ConfigError(f"data.download: {name} could not be fetched: {e}") from None
        raise ConfigError(
            f"data.root={root}: {name} is not there, or damaged: {put.format(root=root)}, or set "
            f"data.download=true"
        ) from None


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


def cached(
    key: str, make: Callable[[], Tables], fits: Callable[[Tables], bool] = lambda _: True
) -> Tables:
    """What ``make`` returns, kept on disk: ``$FEDMUON_CACHE``, or the user's cache folder.

    A damaged file, or one that does not fit, is made anew; without a folder to write to, it is
    made each time.

    Args:
        key: The file's name without ending; must hold everything that the arrays depend on.
        make: Makes the arrays.
        fits: Whether arrays from the disk can be those.
    """
    folder = _cache_dir()
    path = None if folder is None else folder / f"{key}.npz"
    found = None if path is None else _load(path)
    if found is not None and fits(found):
        return found
    made = make()
    if path is not None:
        _store(path, made)
    return made


def _cache_dir() -> Path | None:
    """Where parsed data is kept: ``$FEDMUON_CACHE``, or the platform's folder for caches."""
    if chosen := os.environ.get("FEDMUON_CACHE"):
        return Path(chosen).expanduser()
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home folder
        return None
    return base / "fedmuon_pl"


def _load(path: Path) -> Tables | None:
    """The arrays; None if there are none or they are damaged (zip files carry a checksum)."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception:  # damage shows as any of ten exceptions, and the file is made anew
        return None


def _store(path: Path, tables: Tables) -> None:
    """Write the cache in one step: a reader, or a kill, never meets half a file."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = file.name
            small = sum(t.nbytes for t in tables.values()) < _LARGE
            (np.savez_compressed if small else np.savez)(file, **tables)  # type: ignore[arg-type]
        os.replace(temporary, path)
    except OSError:  # not writable or full: the cache only saves time
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
