"""Who trains in a round and on which batches: pure functions of keyed random streams.

Nothing here keeps a state, so that a resumed run, another process or another order of the clients
sees the same cohorts and the same batches. No Lightning here.
"""

import math
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmuon_pl.seeding import numpy_rng

__all__ = [
    "cohort",
    "evaluated_clients",
    "local_batches",
    "local_work",
    "resolve_cohort_size",
]

IntArray = npt.NDArray[np.signedinteger[Any]]


def cohort(round: int, *, seed: int, candidates: IntArray | int, size: int) -> IntArray:
    """The clients that take part in a round: uniform without replacement.

    A function of (seed, round) and the candidates, of nothing else. Time and memory are
    ``O(size)``, however many candidates there are. ``candidates=N`` and ``np.arange(N)`` give the
    same cohort.

    Args:
        round: The round, from 0.
        seed: The run's seed.
        candidates: The ids to choose from, all different, shape ``(N,)``, usually
            ``partition.clients_with_data``; or ``N`` for ``range(N)``.
        size: How many; see :func:`resolve_cohort_size`.

    Returns:
        Client ids, shape ``(size,)``, in the order of ``candidates`` (ascending for a number):
        the order carries no information, and none of the draw's.

    Raises:
        ValueError: If ``size`` is below 1 or above the number of candidates, or ``round`` or
            ``seed`` is negative.
    """
    population = int(candidates) if isinstance(candidates, int | np.integer) else len(candidates)
    if not 1 <= size <= population:
        raise ValueError(
            f"size must be between 1 and the {population} candidates of round {round}, got {size}"
        )
    # shuffle=False keeps NumPy at Floyd's algorithm or a partial shuffle, 50 * size at the most;
    # the set is uniform, the order is not, hence the sort.
    rng = numpy_rng(seed, "cohort", round)
    chosen = np.sort(rng.choice(population, size, replace=False, shuffle=False))
    return chosen if isinstance(candidates, int | np.integer) else candidates[chosen]


def resolve_cohort_size(clients_per_round: int | float, population: int) -> int:
    """The number of clients per round that a setting means.

    Args:
        clients_per_round: A whole number is a count (``1`` is one client); a float in (0, 1] is a
            fraction of the population (``1.0`` is all of them), rounded to the nearest number of
            clients, halves up, as the decimals are written: 0.15 of 10 is 2.
        population: The number of clients that can be sampled, those with data.

    Raises:
        ValueError: For a count outside ``1..population``, a fraction outside (0, 1], a fraction
            that rounds to no client, or anything that is no number.
    """
    value: Any = clients_per_round  # what YAML gave, whatever the annotation says
    if population < 1:
        raise ValueError(
            f"clients_per_round={value!r} has nobody to sample: population={population}"
        )
    if isinstance(value, int | np.integer) and value is not True and value is not False:
        if not 1 <= value <= population:
            raise ValueError(
                f"clients_per_round={value} must be between 1 and the {population} clients that "
                f"have data (or a fraction such as 0.1)"
            )
        return int(value)
    if not isinstance(value, float | np.floating) or not 0 < value <= 1:
        raise ValueError(
            f"clients_per_round={value!r} must be a whole number of clients or a fraction in "
            f"(0, 1], such as 10 or 0.1"
        )
    size = math.floor(Decimal(repr(float(value))) * population + Decimal("0.5"))
    if size < 1:
        raise ValueError(
            f"clients_per_round={value!r} of {population} clients rounds to no client: use at "
            f"least {1 / population:.3g}, or the count 1"
        )
    return size


def evaluated_clients(candidates: IntArray, size: int = 1000) -> IntArray:
    """The clients whose accuracy is reported: all, or a sample that is the same in every run.

    Args:
        candidates: Ids of the clients that have data, ``(N,)``.
        size: The most that are evaluated.
    """
    if len(candidates) <= size:
        return candidates
    rng = numpy_rng(0, "evaluated clients")
    return rng.choice(candidates, size, replace=False)


def local_batches(
    samples: IntArray,
    batch_size: int,
    *,
    rng: np.random.Generator,
    steps: int | None = None,
    epochs: int | None = None,
    drop_last: bool = False,
) -> list[IntArray]:
    """The batches of one client in one round.

    With ``steps``, exactly that many batches of exactly ``batch_size``: the client walks a fresh
    permutation of its samples and runs on into the next one, so that each sample is used equally
    often, to one, and a client with fewer samples than a batch repeats some. More steps lengthen
    the same walk. With ``epochs``, each epoch is a fresh permutation cut into batches.

    Args:
        samples: The client's sample indices, shape ``(n_i,)``.
        batch_size: Samples per batch, B.
        rng: The stream of (seed, round, client), such as ``numpy_rng(seed, "batches", r, i)``.
        steps: The number of local steps, K. Exactly one of ``steps`` and ``epochs`` is given.
        epochs: The number of local epochs, E.
        drop_last: With ``epochs``, drop the short last batch of each epoch, unless it is the
            epoch's only one: no client with data is skipped. (BatchNorm in training mode cannot
            take a batch of one sample of one position.)

    Returns:
        Arrays of sample indices, each ``(batch_size,)``, or shorter where an epoch ends.

    Raises:
        ValueError: If the client has no samples, not exactly one of ``steps`` and ``epochs`` is
            given, or one of the numbers is below 1.
    """
    n = len(samples)
    if n < 1:
        raise ValueError("samples is empty: a client without data cannot train, never sample it")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if (steps is None) == (epochs is None):
        raise ValueError(f"give exactly one of steps and epochs, got {steps=} and {epochs=}")
    if steps is not None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        total = steps * batch_size
        walk = samples[_permutations(n, -(-total // n), rng).reshape(-1)[:total]]
        return list(walk.reshape(steps, batch_size))
    assert epochs is not None
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    stop = n - n % batch_size if drop_last and n >= batch_size else n
    walks = samples[_permutations(n, epochs, rng)]
    return [walk[a : min(a + batch_size, n)] for walk in walks for a in range(0, stop, batch_size)]


def local_work(
    samples: int, batch_size: int, *, steps: int | None, epochs: int | None, drop_last: bool
) -> int:
    """How many samples the batches of :func:`local_batches` have in all.

    Args:
        samples: n_i.
        batch_size: As there, like the others.
        steps: Exactly one of this
        epochs: and this is given.
        drop_last: Whether an epoch's short last batch is left out.
    """
    if steps is not None:
        return steps * batch_size
    assert epochs is not None
    return epochs * (
        samples - samples % batch_size if drop_last and samples >= batch_size else samples
    )


def _permutations(n: int, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Permutations of ``range(n)``, one a row, ``(count, n)``; more rows leave the first ones."""
    if count == 1:
        return rng.permutation(n)[None]
    return rng.permuted(np.broadcast_to(np.arange(n), (count, n)), axis=1)
