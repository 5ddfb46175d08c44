"""Per-client state on disk: append-only, so that every checkpoint of a run stays exact."""

import ctypes
import os
import shutil
import sys
import tempfile
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from ..clients import Tensors
from ..pytrees import sent

__all__ = ["ClientStore", "MissingClientState"]


class MissingClientState(RuntimeError):
    """A checkpoint refers to per-client state whose files are gone."""


class ClientStore:
    """State of clients that took part, one file a round, each client's latest named by an index.

    A file's state is never changed after it was written. A checkpoint keeps the index only, so that
    a kill between two checkpoints, and going back to an older checkpoint, both find what they need.
    The index has a checksum of each client's state: a file of another run is never taken for it.
    Memory and disk follow the clients that took part, not those that exist: what no checkpoint
    needs any more becomes a hole in its file (on Linux, where the file system has holes) until the
    whole file can go.

    Args:
        folder: Where the files lie; a temporary folder of the process if None.
        like: Shapes and dtypes of one client's state by name; empty if there is none to keep.
    """

    def __init__(self, folder: Path | None, like: Mapping[str, Tensors]) -> None:
        if folder is None and like:
            folder = Path(tempfile.mkdtemp(prefix="fedmuon-clients-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.folder = folder
        self._like = {k: [(t.shape, t.dtype) for t in v] for k, v in like.items()}
        self._size = sum(t.numel() * t.element_size() for v in like.values() for t in v)
        self._index: dict[int, tuple[int, int, int]] = {}
        """Client -> (file number, position in it, CRC-32)."""
        self._part: IO[bytes] | None = None
        """Where :meth:`put` writes until :meth:`commit` gives the file its name."""
        self._rows = 0
        self._pending: dict[int, tuple[int, int]] = {}
        """What is new since the last commit: client -> (position in the part, CRC-32)."""
        self._freed: dict[int, set[int]] = {}
        """Positions that are holes already, by file."""
        self.fresh: list[tuple[int, int, int, int]] = []
        """What the last commit put into the index: client, file, position, CRC-32."""

    def __len__(self) -> int:
        """How many clients have state."""
        return len(self._index)

    def load(self, clients: Sequence[int], device: torch.device) -> dict[str, Tensors]:
        """The clients' state, each tensor ``(C, *shape)``; zeros for a client that has none."""
        out: dict[str, Tensors] = {name: [] for name in self._like}
        if not self._size:
            return out
        rows = bytearray().join(self._read(c) for c in clients)
        table = sent(torch.frombuffer(rows, dtype=torch.uint8), device).view(-1, self._size)
        start = 0
        for name, specs in self._like.items():
            for shape, dtype in specs:
                count = shape.numel() * dtype.itemsize
                piece = table[:, start : start + count]
                aligned = piece.contiguous() if start % dtype.itemsize == 0 else piece.clone()
                out[name].append(aligned.view(-1).view(dtype).view(len(clients), *shape))
                start += count
        return out

    def _read(self, client: int) -> bytes:
        if client in self._pending:
            assert self._part is not None
            self._part.seek(self._pending[client][0] * self._size)
            row = self._part.read(self._size)
            self._part.seek(0, os.SEEK_END)
            return row
        if client not in self._index:
            return bytes(self._size)
        assert self.folder is not None
        return self._stored(self.folder, client)

    def _stored(self, folder: Path, client: int) -> bytes:
        number, position, checksum = self._index[client]
        path = folder / _name(number)
        try:
            with path.open("rb") as f:
                f.seek(position * self._size)
                row = f.read(self._size)
        except FileNotFoundError:
            row = b""
        if len(row) != self._size or zlib.crc32(row) != checksum:
            raise MissingClientState(
                f"the state of client {client} should be in {path}, which is missing, cut short, "
                f"of another run or of a later round of this one"
            )
        return row

    def put(self, clients: Sequence[int], state: Mapping[str, Sequence[Tensor]]) -> None:
        """Writes new state, each tensor ``(C, *shape)``, which counts from :meth:`commit` on."""
        if not self._size or self.folder is None:
            return
        if self._part is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._part = (self.folder / f"{uuid.uuid4().hex}.part").open("w+b")
        # One copy, so that a GPU is waited for once.
        flat = [t.detach().reshape(len(clients), -1) for name in self._like for t in state[name]]
        joined = [torch.cat([*run], 1) for _, run in groupby(flat, key=lambda t: t.dtype)]
        parts = [part.view(torch.uint8) for part in joined]
        table = (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).cpu().numpy()
        for c, client in enumerate(clients):
            row = table[c].tobytes()
            self._part.write(row)
            self._pending[client] = self._rows, zlib.crc32(row)
            self._rows += 1

    def next_number(self) -> int:
        """A number that no file has yet, nor a later one."""
        files = [] if self.folder is None else self.folder.glob("*.bin")
        return max((_number(p) for p in files), default=-1) + 1

    def commit(self, number: int) -> None:
        """Makes what :meth:`put` wrote one new file and moves the index.

        Args:
            number: The file's, at least :meth:`next_number`; where several processes write, each
                has numbers of its own.
        """
        self.fresh = []
        if self._part is None or self.folder is None or not self._pending:
            return
        with self._part as part:
            part.flush()
            os.fsync(part.fileno())
        os.replace(part.name, self.folder / _name(number))
        self._part = None
        self.fresh = [(c, number, position, crc) for c, (position, crc) in self._pending.items()]
        self.adopt(self.fresh)
        self.discard()

    def adopt(self, entries: Iterable[tuple[int, int, int, int]]) -> None:
        """Moves the index to what a commit wrote, this process's or another's."""
        self._index.update({client: (n, p, crc) for client, n, p, crc in entries})

    def agree(self, broadcast: Callable[[Any], Any]) -> None:
        """Takes over the index of the process that ``broadcast`` sends from."""
        self._index = broadcast(self._index)

    def discard(self) -> None:
        """Forgets what :meth:`put` wrote since the last commit."""
        self._pending.clear()
        self._rows = 0
        if self._part is not None:
            self._part.close()
            Path(self._part.name).unlink(missing_ok=True)
            self._part = None

    def __del__(self) -> None:
        """A run that ends in the middle of a round leaves no part of a file."""
        with suppress(Exception):  # at the interpreter's end
            self.discard()

    def clear_parts(self) -> None:
        """Removes what killed processes had begun to write; not while another one writes."""
        for path in [] if self.folder is None else self.folder.glob("*.part"):
            path.unlink()

    def state_dict(self) -> dict[str, Any]:
        """The index in plain values."""
        # Without a Python object a row: a checkpoint is written every round.
        clients = np.fromiter(self._index, np.int64, len(self._index))
        places = np.fromiter(chain.from_iterable(self._index.values()), np.int64, 3 * len(clients))
        rows = np.column_stack([clients, places.reshape(-1, 3)])[np.argsort(clients)]
        return {
            "index": torch.from_numpy(rows),
            "folder": "" if self.folder is None else str(self.folder.resolve()),
        }

    def load_state_dict(self, state: Mapping[str, Any], beside: Path | None = None) -> None:
        """Takes over the index of a checkpoint.

        Every client's state is looked for, at the cost of a block of each; its checksum is compared
        where it could have been given back, and when it is loaded.

        Args:
            state: From :meth:`state_dict`.
            beside: The folder that the checkpoint's run keeps its files in now, tried before the
                one written in the checkpoint; files of another run are copied.

        Raises:
            MissingClientState: If a file that the index needs is nowhere.
        """
        self._index = {c: (n, p, crc) for c, n, p, crc in state["index"].tolist()}
        self.discard()
        if not self._index or self.folder is None:
            return
        witnesses = {number: client for client, (number, *_) in self._index.items()}
        homes = dict.fromkeys(h for h in (beside, Path(state["folder"])) if h is not None)
        for home in homes:
            try:
                for client in witnesses.values():
                    self._stored(home, client)
                for client in self._index:
                    if self._begins_with_zeros(home, client):  # all there is of what was given back
                        self._stored(home, client)
            except MissingClientState:
                continue
            if home.resolve() != self.folder.resolve():
                self._import(home, witnesses)
            return
        raise MissingClientState(
            f"the checkpoint needs per-client state from {' or '.join(map(str, homes))}, where "
            f"files are missing or of another run; resume it in the folder of its run"
        )

    def _begins_with_zeros(self, home: Path, client: int) -> bool:
        number, position, _ = self._index[client]
        with (home / _name(number)).open("rb") as f:
            f.seek(position * self._size)
            return not any(f.read(min(self._size, _BLOCK)))

    def _import(self, home: Path, needed: Iterable[int]) -> None:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        taken = [_number(p) for p in self.folder.glob("*.bin")]
        if not taken:
            # With their names, so that other checkpoints of that run are exact here too.
            for path in home.glob("*.bin"):
                shutil.copyfile(path, self.folder / path.name)
            return
        moved = {n: max(taken) + 1 + i for i, n in enumerate(sorted(needed))}
        for old, new in moved.items():
            shutil.copyfile(home / _name(old), self.folder / _name(new))
        self._index = {c: (moved[n], p, crc) for c, (n, p, crc) in self._index.items()}

    def sweep(self, checkpoints: Iterable[Mapping[str, Any]]) -> None:
        """Removes what neither the index nor one of the checkpoints needs.

        Args:
            checkpoints: What :meth:`state_dict` gave for every checkpoint that may be resumed.
        """
        if self.folder is None:
            return
        indexes = [self.state_dict(), *checkpoints]
        places = np.unique(np.concatenate([s["index"][:, 1:3].numpy() for s in indexes]), axis=0)
        live: dict[int, set[int]] = {}
        for number, position in places.tolist():
            live.setdefault(number, set()).add(position)
        for path in self.folder.glob("*.bin"):
            number = _number(path)
            if number not in live:
                path.unlink()
                self._freed.pop(number, None)
            elif self._size >= _BLOCK:
                there = set(range(path.stat().st_size // self._size))
                free = there - live[number] - self._freed.get(number, set())
                if free:
                    _make_holes(path, [(p * self._size, self._size) for p in sorted(free)])
                    self._freed.setdefault(number, set()).update(free)


_BLOCK = 4096
"""Bytes below which a hole frees nothing."""


def _make_holes(path: Path, places: Iterable[tuple[int, int]]) -> None:
    """Gives the disk space of (offset, length) back; the file keeps its size and reads 0 there.

    Nothing happens where the system or the file system has no holes.
    """
    if not sys.platform.startswith("linux"):
        return
    fallocate = getattr(ctypes.CDLL(None), "fallocate64", None)
    if fallocate is None:
        return
    keep_size_and_punch = 0x01 | 0x02  # linux/falloc.h
    with path.open("r+b") as f:
        for offset, length in places:
            fallocate(
                f.fileno(), keep_size_and_punch, ctypes.c_int64(offset), ctypes.c_int64(length)
            )


def _name(number: int) -> str:
    return f"{number:08d}.bin"


def _number(path: Path) -> int:
    return int(path.stem)
