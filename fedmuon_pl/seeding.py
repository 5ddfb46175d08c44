"""One rule for every random draw: a pure function of (seed, purpose, ids).

No draw may depend on a worker, a rank, an order, or on what ran before. Nothing here reads or
writes the global random state of Python, NumPy or torch.
"""

import zlib

import numpy as np

__all__ = ["derive", "numpy_rng"]


def _sequence(seed: int, purpose: str, ids: tuple[int, ...]) -> np.random.SeedSequence:
    if seed < 0 or any(i < 0 for i in ids):
        raise ValueError(f"seed and ids must be non-negative, got seed={seed}, ids={ids}")
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *ids])


def numpy_rng(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A NumPy generator of its own for one purpose.

    Args:
        seed: The run's seed (or the partition's, which is separate).
        purpose: What is drawn, such as ``"cohort"`` or ``"batches"``; part of the key.
        *ids: Whatever else the draw depends on, usually ``round`` and ``client``.

    Raises:
        ValueError: If the seed or an id is negative.
    """
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, ids)))


def derive(seed: int, purpose: str, *ids: int) -> int:
    """A 63-bit integer seed for code that wants a number (see :func:`numpy_rng`)."""
    return int(_sequence(seed, purpose, ids).generate_state(1, np.uint64)[0] >> np.uint64(1))
