"""How long each partition takes to draw, for 1,000 and 100,000 clients of a million samples.

python benchmarks/partitions.py
"""

import time
import tracemalloc

import numpy as np

from fedmuon_pl import (
    IID,
    ClassesPerClient,
    DirichletByClass,
    DirichletByClient,
    DirichletReleasedCode,
    Natural,
    QuantitySkew,
    Shards,
)

SAMPLES, CLASSES = 1_000_000, 100
KINDS = [
    IID(),
    DirichletByClass(0.1),
    DirichletByClient(0.1),
    DirichletReleasedCode(0.1),
    Shards(2),
    ClassesPerClient(2),
    QuantitySkew(0.5),
    Natural(),
]


def main() -> None:
    labels = np.random.default_rng(0).integers(0, CLASSES, SAMPLES)
    print(f"{SAMPLES:,} samples, {CLASSES} classes")
    for clients in (1_000, 100_000):
        writers = np.random.default_rng(1).permutation(np.arange(SAMPLES) % clients)
        for kind in KINDS:
            column = writers if isinstance(kind, Natural) else labels
            start = time.perf_counter()
            kind(column, clients, 0)
            seconds = time.perf_counter() - start
            tracemalloc.start()
            kind(column, clients, 1)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            name = type(kind).__name__
            print(f"{clients:>8,} clients  {name:<22} {seconds:6.2f} s  {peak / 1e6:6.0f} MB")


if __name__ == "__main__":
    main()
