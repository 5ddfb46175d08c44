"""Cohorts and local batches: uniform, exact in their counts, functions of their keys alone."""

import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedmuon_pl.data.sampling import cohort, local_batches, resolve_cohort_size
from fedmuon_pl.seeding import numpy_rng

# ---------------------------------------------------------------------------------------- cohort


@settings(max_examples=80, deadline=None)
@given(
    round=st.integers(0, 10**6),
    seed=st.integers(0, 2**40),
    population=st.integers(1, 300),
    data=st.data(),
)
def test_cohort_is_a_set_of_candidates(
    round: int, seed: int, population: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, population))
    drawn = cohort(round, seed=seed, candidates=population, size=size)
    assert drawn.shape == (size,)
    assert len(set(drawn.tolist())) == size
    assert 0 <= drawn.min() <= drawn.max() < population
    assert np.all(np.diff(drawn) > 0)
    # A number is its range, and ids are only names for positions.
    ids = np.arange(population)
    np.testing.assert_array_equal(cohort(round, seed=seed, candidates=ids, size=size), drawn)
    names = 1000 - 3 * ids
    np.testing.assert_array_equal(
        cohort(round, seed=seed, candidates=names, size=size), names[drawn]
    )


def test_cohort_depends_on_seed_and_round_alone() -> None:
    forward = [cohort(r, seed=5, candidates=100, size=10).tolist() for r in range(20)]
    np.random.seed(0)
    np.random.rand(3)
    backward = [cohort(r, seed=5, candidates=100, size=10).tolist() for r in range(19, -1, -1)]
    assert backward[::-1] == forward
    assert len({tuple(c) for c in forward}) == 20
    assert cohort(0, seed=6, candidates=100, size=10).tolist() != forward[0]
    # Pinned: a changed draw changes every comparison with an older run.
    assert forward[:2] == [
        [1, 20, 25, 29, 44, 47, 52, 55, 73, 87],
        [1, 6, 34, 37, 66, 75, 82, 91, 97, 99],
    ]


def test_everyone_is_everyone() -> None:
    size = resolve_cohort_size(1.0, 10)
    assert cohort(7, seed=0, candidates=10, size=size).tolist() == list(range(10))


def test_cohort_is_uniform() -> None:
    rounds, population, size = 4000, 12, 4
    drawn = np.array([cohort(r, seed=1, candidates=population, size=size) for r in range(rounds)])
    alone = np.bincount(drawn.ravel(), minlength=population)
    # Without replacement the variance of a count is (1 - S/N) of a multinomial's.
    expected = rounds * size / population
    statistic = ((alone - expected) ** 2 / expected).sum() / (1 - size / population)
    statistic *= (population - 1) / population
    assert 0.005 < stats.chi2.sf(statistic, population - 1) < 0.995
    pairs = Counter((a, b) for row in drawn.tolist() for i, b in enumerate(row) for a in row[:i])
    share = rounds * size * (size - 1) / (population * (population - 1))
    assert len(pairs) == population * (population - 1) // 2
    assert max(abs(n - share) for n in pairs.values()) < 4.5 * share**0.5
    # Of large populations too, where NumPy takes another way.
    big = np.concatenate([cohort(r, seed=1, candidates=50_000, size=900) for r in range(40)])
    counts = np.histogram(big, bins=10, range=(0, 50_000))[0]
    assert stats.chisquare(counts).pvalue > 0.005


def test_cohort_costs_its_size_not_the_population() -> None:
    cohort(0, seed=0, candidates=10, size=2)
    for candidates in (10**12, np.arange(1_000_000)):
        tracemalloc.start()
        drawn = cohort(3, seed=0, candidates=candidates, size=100)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert drawn.size == 100
        assert peak < 100_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size must be between 1 and the 5 candidates of round 3, got 0"),
        ({"size": 6}, "size must be between 1 and the 5 candidates of round 3, got 6"),
        ({"size": 1, "seed": -1}, "non-negative"),
    ],
)
def test_cohort_refuses(arguments: dict[str, Any], message: str) -> None:
    for candidates in (5, np.arange(5)):
        with pytest.raises(ValueError, match=message):
            cohort(3, **({"seed": 0, "candidates": candidates} | arguments))


# ----------------------------------------------------------------------------------- cohort size


@pytest.mark.parametrize(
    ("setting", "population", "size"),
    [
        (0.1, 100, 10),
        (1.0, 10, 10),
        (10, 10, 10),
        (1, 10, 1),
        (0.29, 100, 29),
        (0.15, 10, 2),  # halves up
        (0.25, 10, 3),
        (0.29, 50, 15),  # 14.5, though 0.29 * 50 is 14.499999999999998
        (0.14, 10, 1),
        (1e-6, 1_000_000, 1),
        (np.int64(3), 10, 3),
        (np.float32(0.5), 10, 5),
    ],
)
def test_resolve_cohort_size(setting: float, population: int, size: int) -> None:
    found = resolve_cohort_size(setting, population)
    assert found == size
    assert type(found) is int


@given(population=st.integers(1, 10**7), fraction=st.floats(1e-3, 1.0))
def test_a_fraction_is_within_half_a_client(population: int, fraction: float) -> None:
    if fraction * population < 0.51:
        return
    size = resolve_cohort_size(fraction, population)
    assert 1 <= size <= population
    assert abs(size - fraction * population) <= 0.5 + 1e-6


@pytest.mark.parametrize(
    ("setting", "population", "message"),
    [
        (0, 10, "clients_per_round=0 must be between 1 and the 10 clients"),
        (-1, 10, "clients_per_round=-1 must be between 1 and the 10 clients"),
        (11, 10, "clients_per_round=11 must be between 1 and the 10 clients"),
        (0.0, 10, "clients_per_round=0.0 must be a whole number of clients or a fraction in"),
        (-0.1, 10, "clients_per_round=-0.1 must be"),
        (1.5, 10, "clients_per_round=1.5 must be"),
        (10.0, 10, "clients_per_round=10.0 must be"),
        (float("nan"), 10, "clients_per_round=nan must be"),
        (True, 10, "clients_per_round=True must be"),
        ("all", 10, "clients_per_round='all' must be"),
        (0.01, 10, "clients_per_round=0.01 of 10 clients rounds to no client: use at least 0.1"),
        (1, 0, "clients_per_round=1 has nobody to sample"),
    ],
)
def test_resolve_cohort_size_refuses(setting: Any, population: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_cohort_size(setting, population)


# --------------------------------------------------------------------------------- local batches

SIZES = st.integers(1, 70)


def stream() -> np.random.Generator:
    return numpy_rng(0, "batches", 4, 2)


@settings(max_examples=100, deadline=None)
@given(n=SIZES, batch=SIZES, steps=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_steps_use_each_sample_equally_often(n: int, batch: int, steps: int, seed: int) -> None:
    samples = 100 + 3 * np.arange(n)
    batches = local_batches(samples, batch, rng=numpy_rng(seed, "batches"), steps=steps)
    assert [b.shape for b in batches] == [(batch,)] * steps
    used = Counter(np.concatenate(batches).tolist())
    assert set(used) <= set(samples.tolist())
    low, extra = divmod(steps * batch, n)
    assert sorted(used[s] for s in samples.tolist()) == [low] * (n - extra) + [low + 1] * extra
    # Permutation after permutation: whole passes, in order.
    walk = np.concatenate(batches)
    for a in range(0, walk.size - n + 1, n):
        assert sorted(walk[a : a + n].tolist()) == samples.tolist()


@settings(max_examples=100, deadline=None)
@given(n=SIZES, batch=SIZES, epochs=st.integers(1, 4), drop=st.booleans())
def test_an_epoch_uses_each_sample_once(n: int, batch: int, epochs: int, drop: bool) -> None:
    samples = 100 + 3 * np.arange(n)
    batches = local_batches(samples, batch, rng=stream(), epochs=epochs, drop_last=drop)
    sizes = [batch] * (n // batch)
    if n % batch and (not drop or not sizes):
        sizes.append(n % batch)
    assert [b.size for b in batches] == sizes * epochs
    for e in range(epochs):
        epoch = np.concatenate(batches[e * len(sizes) : (e + 1) * len(sizes)]).tolist()
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(samples.tolist())
        assert len(epoch) == sum(sizes)


def test_more_steps_lengthen_the_walk_and_epochs_are_the_same_walk() -> None:
    samples = np.arange(12)
    long = np.concatenate(local_batches(samples, 4, rng=stream(), steps=9))
    for steps in (1, 3, 4, 7):
        walk = np.concatenate(local_batches(samples, 4, rng=stream(), steps=steps))
        np.testing.assert_array_equal(walk, long[: walk.size])
    epochs = np.concatenate(local_batches(samples, 4, rng=stream(), epochs=3))
    np.testing.assert_array_equal(epochs, long)
    assert not np.array_equal(long[:12], long[12:24])


def test_batches_are_fresh_arrays_of_the_samples_type() -> None:
    samples = np.arange(20, dtype=np.int32)
    samples.flags.writeable = False  # as the views of a Partition are
    for batches in (
        local_batches(samples, 6, rng=stream(), steps=5),
        local_batches(samples, 6, rng=stream(), epochs=2),
    ):
        assert all(b.dtype == np.int32 and b.flags.writeable for b in batches)
        assert not any(np.shares_memory(b, samples) for b in batches)


def test_batches_are_uniform() -> None:
    first = [
        int(local_batches(np.arange(8), 3, rng=numpy_rng(r, "batches"), steps=1)[0][0])
        for r in range(4000)
    ]
    assert stats.chisquare(np.bincount(first, minlength=8)).pvalue > 0.005


def test_a_tiny_client_is_never_skipped() -> None:
    # 5 samples, batches of 32: one short batch, dropped or not; or full ones that repeat.
    for drop in (False, True):
        (only,) = local_batches(np.arange(5), 32, rng=stream(), epochs=1, drop_last=drop)
        assert sorted(only.tolist()) == [0, 1, 2, 3, 4]
    (full,) = local_batches(np.arange(5), 32, rng=stream(), steps=1)
    assert sorted(np.bincount(full).tolist()) == [6, 6, 6, 7, 7]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: local_batches(np.arange(0), 2, rng=r, steps=1), "samples is empty"),
        (lambda r: local_batches(np.arange(3), 0, rng=r, steps=1), "batch_size must be .* got 0"),
        (lambda r: local_batches(np.arange(3), 2, rng=r), "got steps=None and epochs=None"),
        (lambda r: local_batches(np.arange(3), 2, rng=r, steps=1, epochs=2), "exactly one"),
        (lambda r: local_batches(np.arange(3), 2, rng=r, steps=0), "steps must be .* got 0"),
        (lambda r: local_batches(np.arange(3), 2, rng=r, epochs=-1), "epochs must be .* got -1"),
    ],
)
def test_local_batches_refuses(call: Callable[[np.random.Generator], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(stream())
