"""Shards, classes per client, quantity skew, natural, the released code's split; and the cache."""

import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedmuon_pl.data import partition_cache
from fedmuon_pl.data.label_skew import ClassesPerClient, DirichletLMO, DirichletReleasedCode, Shards
from fedmuon_pl.data.partition import IID, DirichletByClient
from fedmuon_pl.data.partition_cache import cached_partition
from fedmuon_pl.data.size_skew import Natural, QuantitySkew

LABELS = st.lists(st.integers(-2, 5), min_size=1, max_size=80).map(np.array)
SEEDS = st.integers(0, 2**40)
ALPHAS = st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 10.0, 1e6])
KINDS = [
    Shards(2),
    ClassesPerClient(2),
    QuantitySkew(0.5, 1),
    Natural(),
    DirichletReleasedCode(0.5),
    DirichletLMO(0.5),
]
by_name = pytest.mark.parametrize("kind", KINDS, ids=lambda p: type(p).__name__)


def is_cover(partition, n):
    return sorted(partition.indices.tolist()) == list(range(n))


# -- shards ---------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(labels=LABELS, clients=st.integers(1, 30), shards=st.integers(1, 4), seed=SEEDS)
def test_shards(labels, clients, shards, seed):
    if clients * shards > labels.size:
        with pytest.raises(ValueError, match=f"clients={clients} cannot each get"):
            Shards(shards)(labels, clients, seed)
        return
    p = Shards(shards)(labels, clients, seed)
    assert is_cover(p, labels.size)
    assert len(p) == clients
    small = labels.size // (clients * shards)
    assert (p.sizes >= shards * small).all()
    assert (p.sizes <= shards * (small + 1)).all()


def test_shards_of_mcmahan():
    # 100 clients with two shards of 300 digits each: at most two classes, or three or four where a
    # shard crosses a border; with classes that shards divide, two at most.
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 6000))
    p = Shards(2)(labels, 100, 0)
    counts = p.label_counts(labels, 10)
    assert set(p.sizes.tolist()) == {600}
    assert set(counts[counts > 0].tolist()) == {300, 600}
    # Dealt at random: a client has both shards of one class with probability 19/199.
    pure = np.mean(
        [(Shards(2)(labels, 100, s).label_counts(labels, 10) == 600).sum() for s in range(20)]
    )
    assert abs(pure - 100 * 19 / 199) < 4 * (9.55 / 20) ** 0.5


# -- classes per client ---------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(labels=LABELS, clients=st.integers(1, 30), k=st.integers(1, 4), seed=SEEDS)
def test_classes_per_client(labels, clients, k, seed):
    kinds = np.unique(labels)
    if k > kinds.size or clients > labels.size:
        with pytest.raises(ValueError, match=r"classes=|clients="):
            ClassesPerClient(k)(labels, clients, seed)
        return
    p = ClassesPerClient(k)(labels, clients, seed)
    assert np.unique(p.indices).size == p.indices.size
    codes = np.searchsorted(kinds, labels)
    counts = p.label_counts(codes, kinds.size)
    assert ((counts > 0).sum(1) <= k).all()
    sizes = np.bincount(codes)
    for c in range(kinds.size):  # whole classes are used, or nothing of them, and split evenly
        held = counts[counts[:, c] > 0, c]
        assert held.sum() in (0, sizes[c])
        assert not held.size or held.max() - held.min() <= 1
    if clients >= kinds.size:
        assert is_cover(p, labels.size)


def test_classes_per_client_are_exact_and_random():
    labels = np.repeat(np.arange(10), 600)
    p = ClassesPerClient(3)(labels, 40, 1)
    held = p.label_counts(labels, 10) > 0
    assert (held.sum(1) == 3).all()
    # Everybody's first class goes round; the others are any two of the rest.
    pairs = Counter()
    for seed in range(60):
        held = ClassesPerClient(2)(labels, 10, seed).label_counts(labels, 10) > 0
        assert held.any(0).all()
        pairs.update(tuple(np.flatnonzero(row)) for row in held)
    assert len(pairs) == 45
    assert stats.chisquare(list(pairs.values())).pvalue > 1e-4


# -- quantity -------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    labels=LABELS,
    clients=st.integers(1, 60),
    alpha=ALPHAS,
    least=st.integers(0, 3),
    seed=SEEDS,
)
def test_quantity_skew(labels, clients, alpha, least, seed):
    kind = QuantitySkew(alpha, least)
    if clients * least > labels.size:
        with pytest.raises(ValueError, match="cannot each get"):
            kind(labels, clients, seed)
        return
    p = kind(labels, clients, seed)
    assert is_cover(p, labels.size)
    assert len(p) == clients
    assert p.sizes.min() >= least


@pytest.mark.parametrize("alpha", [0.3, 3.0])
def test_quantity_shares_are_dirichlet(alpha):
    labels, n = np.zeros(20_000, int), 10
    shares = np.array([QuantitySkew(alpha)(labels, n, s).sizes for s in range(300)]) / 20_000
    # A share is Beta(alpha, (n - 1) alpha).
    assert stats.kstest(shares[:, 3], stats.beta(alpha, 9 * alpha).cdf).pvalue > 1e-3
    assert np.abs(shares.mean(0) - 0.1).max() < 5 * (0.09 / (10 * alpha + 1) / 300) ** 0.5


# -- natural --------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(writers=LABELS, clients=st.integers(1, 8), least=st.integers(1, 5), seed=SEEDS)
def test_natural(writers, clients, least, seed):
    sizes = Counter(writers.tolist())
    there = sorted(w for w, n in sizes.items() if n >= least)
    if clients > min(len(there), writers.size):
        with pytest.raises(ValueError, match=f"clients={clients}"):
            Natural(least)(writers, clients, seed)
        return
    p = Natural(least)(writers, clients, seed)
    mine = [set(writers[p[c]].tolist()) for c in range(clients)]
    assert all(len(one) == 1 for one in mine)
    order = [one.pop() for one in mine]
    assert order == sorted(set(order))
    assert set(order) <= set(there)
    assert p.sizes.tolist() == [sizes[w] for w in order]
    assert np.unique(p.indices).size == p.indices.size
    if clients == len(there):
        assert order == there


def test_natural_chooses_at_random():
    writers = np.repeat(np.arange(10), 3)
    chosen = Counter()
    for seed in range(200):
        p = Natural()(writers, 3, seed)
        chosen.update(writers[p.indices[::3]].tolist())
    assert stats.chisquare(list(chosen.values())).pvalue > 1e-4
    assert len(chosen) == 10


# -- the released code's --------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(labels=LABELS, clients=st.integers(1, 30), alpha=ALPHAS, seed=SEEDS)
def test_released_code(labels, clients, alpha, seed):
    if clients > labels.size:
        return
    p = DirichletReleasedCode(alpha)(labels, clients, seed)
    assert set(p.sizes.tolist()) == {labels.size // clients}
    # A class is handed out in turns: no sample twice more often than another of its class.
    used = np.bincount(p.indices, minlength=labels.size)
    for k in np.unique(labels):
        own = used[labels == k]
        assert own.max() - own.min() <= 1


def test_released_code_has_the_shape_of_its_own_cache():
    # CIFAR-100 with Dir-0.1: of 50,000 slots 42,996 unique images in the cache that was shipped.
    labels = np.repeat(np.arange(100), 500)
    unique = [np.unique(DirichletReleasedCode(0.1)(labels, 100, s).indices).size for s in range(5)]
    assert abs(np.mean(unique) - 42_996) < 1000
    even = np.unique(DirichletReleasedCode(0.6)(labels, 100, 0).indices).size
    assert abs(even - 47_505) < 700
    # A client's classes are n draws from its own Dirichlet draw: E sum q^2 = (a + 1) / (C a + 1).
    p = DirichletReleasedCode(0.1)(labels, 100, 0)
    shares = p.label_counts(labels, 100) / 500
    expected = 1.1 / 11 * (1 - 1 / 500) + 1 / 500
    assert abs((shares**2).sum(1).mean() - expected) < 0.01


@pytest.mark.parametrize("alpha", [0.1, 10.0])
def test_the_shares_are_those_of_the_public_reproduction(alpha):
    """Its own lines for the counts, of Fashion-MNIST's 6,000 images a class and seed 42."""
    labels = np.random.default_rng(5).permutation(np.repeat(np.arange(10), 6000))
    stream = np.random.default_rng(42)
    theirs = np.zeros((16, 10), int)
    for c in range(10):
        images = np.where(labels == c)[0]
        stream.shuffle(images)
        shares = (stream.dirichlet(np.repeat(alpha, 16)) * len(images)).astype(int)
        shares[shares.argmin()] += len(images) - shares.sum()
        theirs[:, c] = shares
    p = DirichletLMO(alpha)(labels, 16, 42)
    assert is_cover(p, labels.size)
    assert np.array_equal(p.label_counts(labels, 10), theirs)
    # With a part held out the shares stay the same.
    kept = np.sort(np.random.default_rng(6).permutation(labels.size)[:55_000])
    fewer = DirichletLMO(alpha, class_size=6000)(labels[kept], 16, 42).label_counts(
        labels[kept], 10
    )
    sizes = np.bincount(labels[kept])
    assert np.abs(fewer / sizes - theirs / 6000).max() < 20 / 5000
    if alpha == 0.1:
        assert theirs.sum(1).min() == 495
        assert theirs.sum(1).max() == 12_986


# -- all ------------------------------------------------------------------------------------------


@by_name
def test_only_the_column_clients_and_seed_matter(kind):
    labels = np.random.default_rng(0).integers(0, 8, 200)
    first = kind(labels, 8, 3)
    np.random.seed(1)
    for other in (labels.tolist(), labels.astype(np.uint8), labels.astype(np.int64)):
        assert kind(other, 8, 3) == first
    assert kind(labels, 8, 4) != first
    if not isinstance(kind, Natural):
        assert kind(labels, 7, 3) != first


@by_name
def test_a_clients_samples_are_in_random_order(kind):
    labels = np.repeat(np.arange(4), 500)
    p = kind(labels, 4, 0)
    for client in np.flatnonzero(p.sizes > 100):
        assert abs(stats.spearmanr(p[client], np.arange(len(p[client])))[0]) < 0.2


def test_streams_are_pinned():
    # A changed draw changes every published partition: it must not happen unnoticed.
    labels = np.repeat(np.arange(10), 60)
    found = {type(k).__name__: k(labels, 10, 0).digest()[:12] for k in KINDS}
    assert found == {
        "Shards": "a8b19ff34e34",
        "ClassesPerClient": "262b11949e0b",
        "QuantitySkew": "8405e6c56fe2",
        "Natural": "0ba8de5aeb5e",
        "DirichletReleasedCode": "2b5f44ed9235",
        "DirichletLMO": "664ed8990f37",
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shards(0), "shards_per_client must be a whole number of at least 1, got 0"),
        (lambda: Shards(3)([0] * 5, 2, 0), "clients=2 cannot each get shards_per_client=3 of the "),
        (lambda: ClassesPerClient(0), "classes must be a whole number of at least 1, got 0"),
        (lambda: ClassesPerClient(3)([0, 1], 2, 0), "classes=3, but the data have 2: lower it"),
        (lambda: QuantitySkew(0), "alpha must be positive and finite, got 0"),
        (lambda: QuantitySkew(1, -1), "min_samples must be a whole number of at least 0, got -1"),
        (lambda: Natural(0), "min_samples must be a whole number of at least 1, got 0"),
        (lambda: Natural()([3, 3, 3], 2, 0), "clients=2, but the data have 1 writers with at lea"),
        (lambda: DirichletReleasedCode(-1), "alpha must be positive and finite, got -1"),
        (lambda: DirichletLMO(0.1, 0), "class_size must be a whole number of at least 1, got 0"),
    ],
)
def test_refusals_are_one_sentence(make, message):
    with pytest.raises(ValueError, match=message) as e:
        make()
    assert "\n" not in str(e.value)


# -- the cache ------------------------------------------------------------------------------------


class Counted(DirichletByClient):
    """Counts how often it draws."""

    drawn = 0

    def _split(self, codes, clients, seed):
        Counted.drawn += 1
        return super()._split(codes, clients, seed)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(partition_cache, "_SMALL", 100)
    Counted.drawn = 0
    return tmp_path / "cache"


def test_a_partition_is_drawn_once(folder):
    labels = np.repeat(np.arange(10), 60)
    first = cached_partition(Counted(0.5), labels, 10, 0)
    assert first == DirichletByClient(0.5)(labels, 10, 0)
    again = cached_partition(Counted(0.5), labels.astype(np.int32), 10, 0)
    assert again == first
    assert again.indices.dtype == first.indices.dtype
    assert Counted.drawn == 1
    # A damaged file, or one that does not fit, is made anew and then used again.
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    tables = dict(np.load(path))
    broken = [whole[: len(whole) // 2], b"", whole[:200] + bytes(9) + whole[209:]]
    for i, content in enumerate([*broken, {}, {"indices": [10**6]}, {"offsets": [0, 600]}]):
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.savez(path, **({**tables, **content} if content else {"other": np.arange(3)}))
        for _ in range(2):
            assert cached_partition(Counted(0.5), labels, 10, 0) == first
        assert Counted.drawn == i + 2
    assert os.listdir(folder) == [path.name]


def test_everything_that_matters_is_in_the_key(folder, monkeypatch):
    labels = np.repeat(np.arange(10), 60)
    other = labels.copy()
    other[0] = 1
    for args in [
        (Counted(0.5), labels, 10, 0),
        (Counted(0.6), labels, 10, 0),
        (Counted(0.5), labels, 11, 0),
        (Counted(0.5), labels, 10, 1),
        (Counted(0.5), other, 10, 0),
    ]:
        before = Counted.drawn
        assert cached_partition(*args) == DirichletByClient(args[0].alpha)(*args[1:])
        assert Counted.drawn == before + 1
    assert cached_partition(IID(), labels, 10, 0) == IID()(labels, 10, 0)
    monkeypatch.setattr(partition_cache.np, "__version__", "another")
    cached_partition(Counted(0.5), labels, 10, 0)
    assert Counted.drawn == 6
    assert len(list(folder.iterdir())) == 7


def test_a_change_of_the_code_is_noticed(folder, tmp_path, monkeypatch):
    labels = np.repeat(np.arange(10), 60)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "my_partition.py"
    source.write_text("from fedmuon_pl import IID\nclass Mine(IID):\n    pass\n")
    import my_partition

    for _ in range(2):
        cached_partition(my_partition.Mine(), labels, 10, 0)
    assert len(list(folder.iterdir())) == 1
    source.write_text(source.read_text() + "# changed\n")
    cached_partition(my_partition.Mine(), labels, 10, 0)
    assert len(list(folder.iterdir())) == 2


def test_what_cannot_be_told_or_is_small_is_drawn(folder, monkeypatch):
    labels = np.repeat(np.arange(10), 60)

    class Odd(Counted):
        def __init__(self):
            super().__init__(0.5)
            self.how = object()

    for _ in range(2):
        cached_partition(Odd(), labels, 10, 0)
    assert Counted.drawn == 2
    monkeypatch.setattr(partition_cache, "_SMALL", 10_000)
    cached_partition(Counted(0.5), labels, 10, 0)
    assert not folder.exists()
    with pytest.raises(ValueError, match="clients=601 cannot each get"):
        cached_partition(IID(), labels, 601, 0)
