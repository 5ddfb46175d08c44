"""Partitions kept on disk: large ones take a while to draw, and every run of a plan needs them."""

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np

from .files import cached
from .partition import IntArray, Partition, Partitioner

__all__ = ["cached_partition"]

_SMALL = 20_000  # fewer samples and clients are drawn in milliseconds


def cached_partition(
    partitioner: Partitioner, column: IntArray, clients: int, seed: int
) -> Partition:
    """``partitioner(column, clients, seed)``, from the disk where it was drawn before.

    The key holds all that decides: the settings, the column, clients, seed, NumPy's version, and
    the source code of the partitioner's module and of those it is built on. What cannot be told so
    (a class of a notebook, settings that are no plain values) is drawn each time, and so is what
    is small. A damaged file is made anew.

    Args:
        partitioner: Draws it.
        column: Labels, or writers for :class:`Natural`, ``(n,)``.
        clients: The number of clients.
        seed: The partition's seed.

    Raises:
        ValueError: What the partitioner raises.
    """
    key = None
    if column.size + clients >= _SMALL:
        key = _key(partitioner, column, clients, seed)
    if key is None:
        return partitioner(column, clients, seed)
    found: list[Partition] = []

    def fits(tables: dict[str, Any]) -> bool:
        try:
            made = Partition(tables["indices"], tables["offsets"])
        except (KeyError, ValueError):
            return False
        inside = not made.indices.size or int(made.indices.max()) < column.size
        found.append(made)
        return inside and len(made) == clients

    def make() -> dict[str, Any]:
        found[:] = [partitioner(column, clients, seed)]
        return {"indices": found[0].indices, "offsets": found[0].offsets}

    cached(f"partition-{key}", make, fits)
    return found[0]


def _key(partitioner: Partitioner, column: IntArray, clients: int, seed: int) -> str | None:
    kind = type(partitioner)
    try:
        # A change of the code must not find what the old code drew.
        sources = {inspect.getsourcefile(c) for c in kind.__mro__ if c.__module__ != "builtins"}
        sources.add(str(Path(__file__).with_name("label_skew.py")))  # by_owner
        code = [Path(str(s)).read_bytes() for s in sorted(map(str, sources)) if s]
        plain = json.dumps([kind.__module__, kind.__qualname__, vars(partitioner), clients, seed])
    except (OSError, TypeError, ValueError):
        return None
    state = hashlib.sha256(f"{plain} {np.__version__}".encode())
    for text in [*code, np.ascontiguousarray(column, "<i8").tobytes()]:
        state.update(hashlib.sha256(text).digest())
    return state.hexdigest()[:32]
