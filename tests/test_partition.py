"""Partitions: disjoint, deterministic, and distributed as their papers say."""

import io
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from fedmuon_pl.compare.partition_report import (
    _COLOURS,
    effective_classes,
    partition_figure,
    partition_table,
)
from fedmuon_pl.data import partition as module
from fedmuon_pl.data.partition import (
    IID,
    DirichletByClass,
    DirichletByClient,
    Partition,
    Partitioner,
)

ALPHAS = st.sampled_from([1e-300, 1e-3, 0.01, 0.1, 1.0, 10.0, 1e6])
LABELS = st.lists(st.integers(-2, 5), min_size=1, max_size=80).map(np.array)


def sorted_labels(classes: int, per_class: int) -> np.ndarray:
    return np.repeat(np.arange(classes), per_class)


# ------------------------------------------------------------------------------------- Partition


def test_partition_access() -> None:
    p = Partition.from_lists([[3, 1], [], np.array([0, 2, 4], np.int32)])
    assert len(p) == 3
    assert p.sizes.tolist() == [2, 0, 3]
    assert p.clients_with_data.tolist() == [0, 2]
    assert [one.tolist() for one in p] == [[3, 1], [], [0, 2, 4]]
    assert np.shares_memory(p[2], p.indices)
    for bad in (-1, 3):
        with pytest.raises(IndexError, match=rf"client {bad} of a partition with 3 clients"):
            p[bad]


def test_partition_is_immutable_and_owns_its_arrays() -> None:
    indices, offsets = np.arange(4), np.array([0, 2, 4])
    p = Partition(indices, offsets)
    digest = p.digest()
    indices[0], offsets[1] = 9, 1
    assert p.digest() == digest
    assert p[0].tolist() == [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        p[0][0] = 5
    with pytest.raises(AttributeError):
        p.indices = indices  # type: ignore[misc]


def test_digest_is_of_the_content() -> None:
    wide = Partition(np.arange(4, dtype=np.int64), np.array([0, 1, 4]))
    narrow = Partition(np.arange(4, dtype=np.int32), np.array([0, 1, 4], np.int32))
    assert narrow.indices.dtype == np.int32
    assert wide == narrow
    assert wide.digest() == narrow.digest()
    assert hash(wide) == hash(narrow)
    others = [[[0], [1, 2, 3], []], [[0, 1], [2, 3]], [[1], [0, 2, 3]], [[], [0], [1, 2, 3]]]
    digests = {Partition.from_lists(lists).digest() for lists in others}
    assert len(digests | {wide.digest()}) == 5
    # Pinned: fingerprints of old runs must stay readable.
    assert wide.digest().startswith("8c8c787ac75f1c86")
    assert wide != "another thing"


def test_label_counts_agree_with_a_loop() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 50).astype(np.uint8)
    p = Partition.from_lists([rng.integers(0, 50, k) for k in (5, 0, 9, 1)])  # overlapping
    counts = p.label_counts(labels, 6)
    assert counts.shape == (4, 6)
    for i in range(4):
        found = Counter(labels[p[i]].tolist())
        assert [found[k] for k in range(6)] == counts[i].tolist()
    np.testing.assert_array_equal(p.label_counts(labels, 6, 1, 3), counts[1:3])
    assert p.label_counts(labels, 6, 2).shape == (2, 6)
    assert Partition.from_lists([]).label_counts(labels, 4).shape == (0, 4)


@pytest.mark.parametrize(
    ("indices", "offsets", "message"),
    [
        ([0, -1], [0, 2], "indices holds -1"),
        ([0.5], [0, 1], "indices must be 1-D integers"),
        ([[0]], [0, 1], "indices must be 1-D integers"),
        ([0, 1], [0, 1], r"offsets must run from 0 to the number of indices, 2, got 0 to 1"),
        ([0, 1], [1, 2], "got 1 to 2"),
        ([0, 1], np.zeros(0, np.int64), "got nothing"),
        ([0, 1], [0, 2, 1, 2], "offsets must never fall"),
    ],
)
def test_partition_refuses(indices: Any, offsets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Partition(np.array(indices), np.array(offsets))


def test_label_counts_refuses() -> None:
    p = Partition.from_lists([[0, 3]])
    with pytest.raises(ValueError, match="labels has 3 entries, but the partition holds sample 3"):
        p.label_counts(np.zeros(3, int), 2)
    with pytest.raises(ValueError, match="num_classes=2, but labels run from 0 to 2"):
        p.label_counts(np.arange(4) % 3, 2)
    with pytest.raises(ValueError, match=r"lists\[1\] must be 1-D integers"):
        Partition.from_lists([[1], [0.5]])  # type: ignore[list-item]


# ---------------------------------------------------------------------------- what holds for all


@settings(max_examples=60, deadline=None)
@given(labels=LABELS, clients=st.integers(1, 80), seed=st.integers(0, 2**40))
def test_iid_is_an_equal_disjoint_cover(labels: np.ndarray, clients: int, seed: int) -> None:
    clients = min(clients, labels.size)
    p = IID()(labels, clients, seed)
    assert len(p) == clients
    assert sorted(p.indices.tolist()) == list(range(labels.size))
    assert p.sizes.max() - p.sizes.min() <= 1


@settings(max_examples=80, deadline=None)
@given(labels=LABELS, clients=st.integers(1, 120), seed=st.integers(0, 2**40), alpha=ALPHAS)
def test_by_class_is_a_disjoint_cover(
    labels: np.ndarray, clients: int, seed: int, alpha: float
) -> None:
    p = DirichletByClass(alpha)(labels, clients, seed)
    assert len(p) == clients
    assert sorted(p.indices.tolist()) == list(range(labels.size))


@settings(max_examples=80, deadline=None)
@given(labels=LABELS, clients=st.integers(1, 80), seed=st.integers(0, 2**40), alpha=ALPHAS)
def test_by_client_is_disjoint_and_equal(
    labels: np.ndarray, clients: int, seed: int, alpha: float
) -> None:
    clients = min(clients, labels.size)
    p = DirichletByClient(alpha)(labels, clients, seed)
    assert p.sizes.tolist() == [labels.size // clients] * clients
    assert len(set(p.indices.tolist())) == p.indices.size
    assert p.indices.max() < labels.size


PARTITIONERS = [IID(), DirichletByClass(0.3), DirichletByClass(0.5, 2), DirichletByClient(0.3)]


@pytest.mark.parametrize("partitioner", PARTITIONERS, ids=lambda p: type(p).__name__)
def test_only_labels_clients_and_seed_matter(partitioner: Partitioner) -> None:
    labels = sorted_labels(5, 40)
    first = partitioner(labels, 8, seed=3)
    np.random.seed(1)
    random.seed(1)
    torch.manual_seed(1)
    before = (np.random.get_state()[1].copy(), random.getstate(), torch.get_rng_state())
    assert partitioner(labels.copy(), 8, seed=3) == first
    np.testing.assert_array_equal(np.random.get_state()[1], before[0])
    assert random.getstate() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert partitioner(labels.astype(np.uint8), 8, seed=3) == first
    assert partitioner(labels * 7 - 3, 8, seed=3) == first  # the values are names only
    assert partitioner(labels, 8, seed=4) != first
    np.testing.assert_array_equal(labels, sorted_labels(5, 40))


@pytest.mark.parametrize("partitioner", PARTITIONERS, ids=lambda p: type(p).__name__)
def test_samples_of_a_client_are_in_random_order(partitioner: Partitioner) -> None:
    # The data is sorted by class: a client's first half must not be its lower classes.
    labels = sorted_labels(10, 500)
    p = partitioner(labels, 10, seed=0)
    halves = [(labels[s[: s.size // 2]].mean(), labels[s[s.size // 2 :]].mean()) for s in p]
    assert abs(np.mean([a - b for a, b in halves])) < 0.25
    assert all(np.any(np.diff(s) < 0) for s in p if s.size > 10)


def test_streams_are_pinned() -> None:
    # A changed draw changes every published partition: it must not happen unnoticed.
    labels = sorted_labels(4, 25)
    digests = [p(labels, 5, seed=0).digest()[:12] for p in PARTITIONERS]
    assert digests == ["48d5fa7ab0c1", "fc4fdb7b0298", "3ac00e032cb3", "58966f67c516"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DirichletByClass(0.0), "alpha must be positive and finite, got 0.0"),
        (lambda: DirichletByClient(-1), "alpha must be positive and finite, got -1"),
        (lambda: DirichletByClient(float("nan")), "alpha must be .* got nan"),
        (lambda: DirichletByClass(float("inf")), "alpha must be .* got inf: use IID"),
        (lambda: DirichletByClass(1.0, -1), "min_samples must be a whole number of at least 0"),
        (lambda: DirichletByClass(1.0, 1.5), "min_samples must be a whole number .* got 1.5"),
        (lambda: DirichletByClass(1.0, 1, 0), "max_tries must be a whole number of at least 1"),
        (lambda: IID()(np.zeros(5, int), 0, 0), "clients must be .* at least 1, got 0"),
        (lambda: IID()(np.zeros(5, int), True, 0), "clients must be .* got True"),
        (lambda: IID()(np.zeros(5), 2, 0), "labels must be 1-D integers, got float64"),
        (lambda: IID()(np.zeros((5, 1), int), 2, 0), r"labels must be .* shape \(5, 1\)"),
        (lambda: IID()(np.zeros(0, int), 2, 0), "labels is empty"),
        (lambda: IID()(np.zeros(5, int), 2, -1), "seed and ids must be non-negative"),
        (lambda: IID()(np.zeros(5, int), 6, 0), "clients=6 .* 5 samples .* at most 5 clients"),
        (lambda: DirichletByClient(1.0)(np.zeros(5, int), 6, 0), "use at most 5 clients"),
        (
            lambda: DirichletByClass(1.0, 10)(np.zeros(2000, int), 1000, 0),
            "clients=1000 .* min_samples=10 of the 2000 samples .* at most 200 clients",
        ),
    ],
)
def test_refusals_are_one_sentence(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------- Dirichlet by class


def shares_by_class(alpha: float, clients: int, classes: int, per_class: int) -> np.ndarray:
    labels = sorted_labels(classes, per_class)
    return DirichletByClass(alpha)(labels, clients, 0).label_counts(labels, classes) / per_class


def test_by_class_shares_are_dirichlet() -> None:
    # A share of Dir_J(alpha 1) is Beta(alpha, (J - 1) alpha). One client per class (shares of one
    # class depend on each other) gives independent draws for a chi-square over ten equal bins.
    alpha, clients, classes = 0.7, 4, 3000
    rng = np.random.default_rng(0)
    shares = [module._share_out(10**6, alpha, clients, rng)[0] / 10**6 for _ in range(classes)]
    bins = stats.beta.ppf(np.linspace(0, 1, 11), alpha, (clients - 1) * alpha)
    assert stats.chisquare(np.histogram(shares, bins)[0]).pvalue > 0.01


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0])
def test_by_class_moments(alpha: float) -> None:
    clients, classes = 5, 2500
    shares = shares_by_class(alpha, clients, classes, per_class=400)
    mean, total = 1 / clients, alpha * clients
    variance = mean * (1 - mean) / (total + 1)
    np.testing.assert_allclose(shares.mean(axis=1), mean, atol=4 * (variance / classes) ** 0.5)
    np.testing.assert_allclose(shares.var(axis=1), variance, rtol=0.15)
    pair = np.cov(shares)[np.triu_indices(clients, 1)]
    np.testing.assert_allclose(pair, -mean * mean / (total + 1), rtol=0.3)


def test_by_class_is_fair_with_more_clients_than_samples_of_a_class() -> None:
    # Near-equal shares of 1 / 40 sample: cutting at floor(cumsum(p) n) would always serve the same
    # clients. Here each is as likely as another.
    classes, clients, per_class = 2000, 40, 10
    labels = sorted_labels(classes, per_class)
    sizes = DirichletByClass(1e4)(labels, clients, 0).sizes
    expected = classes * per_class / clients
    assert abs(sizes - expected).max() < 5 * (expected * 0.75) ** 0.5
    assert 0.3 < sizes.var() / (expected * 0.75) < 2


def test_min_samples_only_rejects() -> None:
    labels = sorted_labels(10, 100)
    free = DirichletByClass(0.5)(labels, 10, seed=0)
    least = int(free.sizes.min())
    assert DirichletByClass(0.5, least)(labels, 10, seed=0) == free
    more = DirichletByClass(0.5, least + 20)(labels, 10, seed=0)
    assert more.sizes.min() >= least + 20
    assert sorted(more.indices.tolist()) == list(range(1000))


def test_min_samples_out_of_reach_stops_after_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[int] = []
    share_out = module._share_out

    def counted(n: int, alpha: float, clients: int, rng: np.random.Generator) -> np.ndarray:
        shared.append(clients)
        return share_out(n, alpha, clients, rng)

    monkeypatch.setattr(module, "_share_out", counted)
    labels = sorted_labels(10, 200)
    with pytest.raises(ValueError, match=r"min_samples=20 was not reached for 50 clients in 7 d"):
        DirichletByClass(0.05, 20, max_tries=7)(labels, 50, 0)
    assert len(shared) == 7 * 10
    # Without max_tries the work is bounded in shares, not in tries.
    monkeypatch.setattr(module, "_SHARES_IN_ALL", 5000)
    shared.clear()
    with pytest.raises(ValueError, match="raise alpha, lower min_samples or clients, or raise max"):
        DirichletByClass(0.05, 20)(labels, 50, 0)
    assert sum(shared) <= 5000 + 50 * 10
    # By default too: never more than 1,000 tries.
    monkeypatch.undo()
    with pytest.raises(ValueError, match="in 1000 draws with alpha="):
        DirichletByClass(0.05, 20)(labels, 50, 0)


# -------------------------------------------------------------------------- Dirichlet by client


def test_by_client_mixes_follow_dirichlet_while_nothing_runs_out() -> None:
    # Few draws from deep pools: class counts are Dirichlet-multinomial. For two classes that is
    # the beta-binomial, of which all cells are known.
    alpha, m, clients = 0.4, 6, 6000
    log_q = module._log_gamma(alpha, (clients, 2), np.random.default_rng(0))
    deep = np.array([10**6, 10**6])
    drawn = module._draw_classes(log_q, deep, m, np.random.default_rng(1)).reshape(m, clients)
    ones = np.bincount(drawn.sum(axis=0), minlength=m + 1)
    expected = stats.betabinom.pmf(np.arange(m + 1), m, alpha, alpha) * clients
    assert stats.chisquare(ones, expected).pvalue > 0.01


def test_by_client_early_draws_follow_dirichlet_in_a_whole_partition() -> None:
    # Drawn to the last sample, classes do run out. The first third of the turns is untouched: two
    # draws of one client agree with probability (alpha + 1) / (C alpha + 1).
    alpha, classes, clients, m = 0.2, 10, 3000, 12
    log_q = module._log_gamma(alpha, (clients, classes), np.random.default_rng(0))
    sizes = np.full(classes, clients * m // classes)
    drawn = module._draw_classes(log_q, sizes, m, np.random.default_rng(1)).reshape(m, clients)
    early = drawn[: m // 3]
    agree = np.mean([early[a] == early[b] for a in range(4) for b in range(a)])
    assert agree == pytest.approx((alpha + 1) / (classes * alpha + 1), rel=0.04)
    shares = np.bincount(early.ravel(), minlength=classes) / early.size
    np.testing.assert_allclose(shares, 1 / classes, atol=0.02)
    # The last turn is not from the mixes, but it is so for every client alike (next test).
    assert np.bincount(drawn.ravel(), minlength=classes).tolist() == sizes.tolist()


def test_by_client_leftovers_do_not_depend_on_the_client_id() -> None:
    # Filling client after client gives the last ones what is left: many classes, few of each.
    labels = sorted_labels(10, 500)
    effective = np.mean(
        [
            effective_classes(DirichletByClient(0.1)(labels, 50, seed).label_counts(labels, 10))
            for seed in range(60)
        ],
        axis=0,
    )
    error = effective.std()
    assert abs(effective[:10].mean() - effective[-10:].mean()) < 3 * error * (2 / 10) ** 0.5
    assert abs(np.corrcoef(np.arange(50), effective)[0, 1]) < 0.4


def outcomes(q: np.ndarray, left: tuple[int, ...], m: int) -> dict[tuple[int, ...], float]:
    """All class sequences of the plain sequential rule, with their probabilities."""
    found: dict[tuple[int, ...], float] = {}

    def walk(done: tuple[int, ...], left: tuple[int, ...], probability: float) -> None:
        if len(done) == m * len(q):
            found[done] = probability
            return
        weights = q[len(done) % len(q)] * (np.array(left) > 0)
        for k, weight in enumerate(weights / weights.sum()):
            if weight > 0:
                rest = tuple(n - (k == j) for j, n in enumerate(left))
                walk((*done, k), rest, probability * weight)

    walk((), left, 1.0)
    return found


def test_blocks_are_exactly_the_sequential_rule() -> None:
    q = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]])
    expected = outcomes(q, (2, 1, 2), 2)
    rng = np.random.default_rng(0)
    runs = 6000
    seen = Counter(
        tuple(module._draw_classes(np.log(q), np.array([2, 1, 2]), 2, rng).tolist())
        for _ in range(runs)
    )
    assert set(seen) <= set(expected)
    observed = [seen[key] for key in expected]
    assert stats.chisquare(observed, [p * runs for p in expected.values()]).pvalue > 0.01


def test_work_is_linear_in_the_samples() -> None:
    """The draws made in vain are bounded: one cut block per class."""

    class Counting(np.random.Generator):
        drawn = 0

        def random(self, *args: Any, **kwargs: Any) -> Any:
            out = super().random(*args, **kwargs)
            self.drawn += np.size(out)
            return out

    for clients, classes, n in ((1000, 10, 50_000), (20_000, 10, 100_000), (10, 100, 50_000)):
        rng = Counting(np.random.PCG64(0))
        log_q = module._log_gamma(0.1, (clients, classes), rng)
        drawn = module._draw_classes(log_q, np.full(classes, n // classes), n // clients, rng)
        assert drawn.size == n
        assert rng.drawn <= n + classes * 16384
        assert rng.drawn < 4 * n


@pytest.mark.parametrize("alpha", [1e-320, 1e-12, 0.01])
def test_tiny_alpha_gives_one_hot_mixes_and_no_nan(alpha: float) -> None:
    log_q = module._log_gamma(alpha, (500, 20), np.random.default_rng(0))
    assert np.isfinite(log_q).all()
    labels = sorted_labels(10, 5000)
    counts = DirichletByClient(alpha)(labels, 1000, 0).label_counts(labels, 10)
    assert counts.sum() == 50_000
    assert np.median(effective_classes(counts)) < 1.5  # what is left over is shared by all
    by_class = DirichletByClass(alpha)(labels, 100, 0)
    assert by_class.indices.size == 50_000
    assert by_class.clients_with_data.size < 70


def test_large_alpha_is_an_even_mix() -> None:
    labels = sorted_labels(10, 500)
    counts = DirichletByClass(1e9)(labels, 10, 0).label_counts(labels, 10)
    assert abs(counts - 50).max() <= 1
    counts = DirichletByClient(1e9)(labels, 10, 0).label_counts(labels, 10)
    assert effective_classes(counts).min() > 9


# ------------------------------------------------------------------------------------- the report


def test_effective_classes() -> None:
    counts = np.array([[5, 5, 0], [7, 0, 0], [0, 0, 0], [2, 2, 2]])
    np.testing.assert_allclose(effective_classes(counts), [2, 1, np.nan, 3])


def render(p: Partition, labels: np.ndarray, classes: int, rows: int) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(partition_table(p, labels, classes, rows))
    return console.export_text()


def test_table_shows_counts_and_a_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmuon_pl.compare.partition_report._CLIENTS_AT_ONCE", 2)
    p = Partition.from_lists([[0, 1], [], [2, 3, 4, 5], [6], [6, 7]])
    labels = np.array([0, 0, 1, 1, 2, 2, 0, 1, 2])
    text = render(p, labels, 3, rows=3)
    lines = [line.split() for line in text.replace("│", " ").splitlines()]
    assert ["0", "2", "1.0", "2", "·", "·"] in lines
    assert ["2", "4", "2.0", "·", "2", "2"] in lines
    assert ["+", "2", "..."] in lines
    assert ["min", "0", "1.0"] in lines
    assert ["median", "2", "1.5"] in lines
    assert ["max", "4", "2.0"] in lines
    assert ["all", "9", "2.9", "4", "3", "2"] in lines
    caption = "5 clients, 1 without data; 8 of 9 samples used, 1 of them more than once"
    assert caption in " ".join(text.split())


def test_table_of_many_classes_lists_the_largest() -> None:
    labels = np.repeat(np.arange(30), np.arange(1, 31))
    text = render(IID()(labels, 1, 0), labels, 30, rows=5)
    assert "29:30  28:29  27:28  26:27  25:26  24:25  and 24 more" in text
    assert "+ " not in text
    assert "0 clients" in render(Partition.from_lists([]), labels, 30, rows=5)


@pytest.mark.parametrize(
    ("clients", "classes", "suffix"),
    [(10, 10, "png"), (100, 10, "pdf"), (3000, 10, "png"), (5, 30, "svg")],
)
def test_figure_is_written(tmp_path: Any, clients: int, classes: int, suffix: str) -> None:
    labels = sorted_labels(classes, 400)
    p = DirichletByClass(0.05)(labels, clients, 0)
    path = partition_figure(p, labels, classes, tmp_path / "new" / f"p.{suffix}", title="A title")
    assert path.stat().st_size > 4000


def test_bars_are_as_high_as_the_counts(tmp_path: Any) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    # Of the three classes 30, 60 and 40 in all; the last client has none.
    counts = np.array([[30, 10, 0], [0, 20, 40], [0, 30, 0], [0, 0, 0]])
    labels = np.repeat(np.tile(np.arange(3), 4), counts.ravel())
    clients = np.repeat(np.arange(4), counts.sum(axis=1))
    p = Partition.from_lists([np.flatnonzero(clients == i) for i in range(4)])
    picture = imread(partition_figure(p, labels, 3, tmp_path / "p.png"))[..., :3]
    bars = picture[:, : int(0.88 * picture.shape[1])]  # without the legend
    found = [abs(bars - np.array(to_rgb(c))).max(axis=-1) < 0.01 for c in _COLOURS[:3]]
    areas = np.array([where.sum() for where in found])
    np.testing.assert_allclose(areas / areas.sum(), np.array([30, 60, 40]) / 130, atol=0.01)
    # Stacked in the order of the classes: the first is nearest to the axis.
    lowest = [np.flatnonzero(where.any(axis=1)).max() for where in found]
    assert lowest[0] == lowest[1] > lowest[2]


def test_figure_refuses(tmp_path: Any) -> None:
    p = Partition.from_lists([[0]])
    for what, most in ((p, 0), (Partition.from_lists([]), 5)):
        with pytest.raises(ValueError, match=f"nothing to draw: max_clients={most}"):
            partition_figure(what, np.zeros(1, int), 1, tmp_path / "p.png", max_clients=most)
