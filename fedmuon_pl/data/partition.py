"""Which client holds which samples: partitions as compressed index arrays, and how to draw them.

Two different splits are both called "Dirichlet" in the literature, and results under one say little
about the other: :class:`DirichletByClass` (each class is spread over the clients; sizes differ) and
:class:`DirichletByClient` (each client has its own class mix; sizes are equal). A partition is a
function of (labels, clients, seed), with a seed of its own, apart from the run's.
"""

import hashlib
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmuon_pl.seeding import numpy_rng

__all__ = ["IID", "DirichletByClass", "DirichletByClient", "Partition", "Partitioner"]

IntArray = npt.NDArray[np.signedinteger[Any]]
FloatArray = npt.NDArray[np.float64]

# The last id of each draw's key: changing one kind of draw must not move the others.
_POOLS, _SHARES, _CLASSES, _ORDER = range(4)
# Without max_tries, the shares that DirichletByClass draws in all before it gives up: seconds.
_SHARES_IN_ALL = 50_000_000


@dataclass(frozen=True, eq=False, slots=True)
class Partition:
    """The sample indices of every client, in two flat read-only arrays.

    Client ``i`` holds ``indices[offsets[i]:offsets[i + 1]]``. Clients may be empty; nothing here
    asks that clients be disjoint (natural and overlapping partitions are partitions too), though
    all that the partitioners of this module make are. The arrays are copied, so that nobody can
    change them afterwards.

    Args:
        indices: Sample indices, client after client, int32 or int64, shape ``(total,)``.
        offsets: Where each client's samples begin, and the end of the last, ``(clients + 1,)``.

    Raises:
        ValueError: If the arrays are not 1-D integers, an index is negative, or the offsets do not
            rise from 0 to ``total``.
    """

    indices: IntArray
    offsets: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        """Check the two arrays, copy them and make the copies read-only."""
        indices = _integers("indices", self.indices)
        offsets = _integers("offsets", self.offsets)
        if indices.size and int(indices.min()) < 0:
            raise ValueError(f"indices holds {int(indices.min())}: sample indices start at 0")
        if not offsets.size or offsets[0] != 0 or offsets[-1] != indices.size:
            ends = f"{offsets[0]} to {offsets[-1]}" if offsets.size else "nothing"
            raise ValueError(
                f"offsets must run from 0 to the number of indices, {indices.size}, got {ends}"
            )
        if np.any(np.diff(offsets) < 0):
            raise ValueError("offsets must never fall: a client's samples end after they begin")
        wide = np.int32 if indices.dtype == np.int32 else np.int64
        for name, array in (("indices", indices.astype(wide)), ("offsets", _int64(offsets))):
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int] | IntArray]) -> "Partition":
        """Build a partition from one list of sample indices per client.

        Args:
            lists: One sequence or 1-D integer array per client; empty ones are clients without
                data.

        Raises:
            ValueError: As the class, or for a list that is not one of integers.
        """
        parts = [_integers(f"lists[{i}]", one, empty=True) for i, one in enumerate(lists)]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([part.size for part in parts], out=offsets[1:])
        return cls(np.concatenate(parts) if parts else np.zeros(0, np.int64), offsets)

    def __len__(self) -> int:
        """The number of clients, those without data included."""
        return self.offsets.size - 1

    def __getitem__(self, client: int) -> IntArray:
        """The sample indices of one client: a read-only view, shape ``(n_i,)``.

        Raises:
            IndexError: If there is no such client; a negative number is none.
        """
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of a partition with {len(self)} clients")
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    def __eq__(self, other: object) -> bool:
        """Whether every client holds the same samples in the same order, whatever the dtype."""
        if not isinstance(other, Partition):
            return NotImplemented
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(
            self.indices, other.indices
        )

    def __hash__(self) -> int:
        """A hash of the content."""
        return hash(self.digest())

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """The number of samples of each client, shape ``(clients,)``."""
        return np.diff(self.offsets)

    @property
    def clients_with_data(self) -> npt.NDArray[np.int64]:
        """The clients with at least one sample, ascending: those that a cohort is drawn from."""
        return np.flatnonzero(self.sizes).astype(np.int64, copy=False)

    def digest(self) -> str:
        """SHA-256 (hex) of the content, for fingerprints: dtype and platform do not matter."""
        state = hashlib.sha256(b"fedmuon_pl partition\0")
        state.update(len(self).to_bytes(8, "little"))
        for array in (self.offsets, self.indices):
            state.update(np.ascontiguousarray(array, dtype="<i8").data)
        return state.hexdigest()

    def label_counts(
        self, labels: npt.ArrayLike, num_classes: int, start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Samples per client and class.

        Args:
            labels: The class of every sample of the data set, integers in ``[0, num_classes)``,
                shape ``(n,)``.
            num_classes: The number of columns.
            start: First client to count.
            stop: End of the clients to count; all by default. (A million clients times a hundred
                classes is 0.8 GB: walk over them in parts.)

        Returns:
            Counts, shape ``(clients, num_classes)``, or ``(stop - start, num_classes)``.

        Raises:
            ValueError: If the labels do not fit ``num_classes`` or the partition's indices.
        """
        codes = _integers("labels", labels)
        if self.indices.size and int(self.indices.max()) >= codes.size:
            raise ValueError(
                f"labels has {codes.size} entries, but the partition holds sample "
                f"{int(self.indices.max())}: pass the labels that it was made from"
            )
        if codes.size and (int(codes.min()) < 0 or int(codes.max()) >= num_classes):
            raise ValueError(
                f"num_classes={num_classes}, but labels run from {codes.min()} to {codes.max()}"
            )
        offsets = self.offsets[start : len(self) + 1 if stop is None else stop + 1]
        rows = offsets.size - 1
        cells = np.repeat(np.arange(rows, dtype=np.int64) * num_classes, np.diff(offsets))
        cells += codes[self.indices[offsets[0] : offsets[-1]]].astype(np.int64, copy=False)
        counts = np.bincount(cells, minlength=rows * num_classes)
        return counts.astype(np.int64, copy=False).reshape(rows, num_classes)


class Partitioner(ABC):
    """Splits a labelled data set over clients."""

    #: Fewest samples that each client must be able to get.
    _least = 1
    _least_name = "min_samples"

    def __call__(self, labels: npt.ArrayLike, clients: int, seed: int) -> Partition:
        """Draw the partition: a function of these three arguments and nothing else.

        Args:
            labels: The class of every sample, 1-D integers, shape ``(n,)``; any values, with gaps
                or not.
            clients: The number of clients of the partition.
            seed: The partition's own seed.

        Returns:
            Disjoint parts of ``range(n)``, all of it unless the class says otherwise; each client's
            samples are in random order, so that any part of them is a fair part.

        Raises:
            ValueError: If labels are not 1-D integers or are none, ``clients`` is below 1, there
                are more clients than samples can serve, or the seed is negative.
        """
        labels = _integers("labels", labels)
        clients = _count("clients", clients, 1)
        if not labels.size:
            raise ValueError("labels is empty: there is nothing to split over the clients")
        if clients * self._least > labels.size:
            each = f"{self._least_name}={self._least}" if self._least > 1 else "one"
            lower = f", or lower {self._least_name}" if self._least > 1 else ""
            raise ValueError(
                f"clients={clients} cannot each get {each} of the {labels.size} samples in labels: "
                f"use at most {labels.size // self._least} clients{lower}"
            )
        _, codes = np.unique(labels, return_inverse=True)
        return self._split(_compact(codes), clients, seed)

    @abstractmethod
    def _split(self, codes: IntArray, clients: int, seed: int) -> Partition:
        """Split; ``codes`` are the labels renumbered ``0..C-1``, each of which occurs."""


class IID(Partitioner):
    """Every client gets a uniformly random part of the data; sizes differ by one at most.

    The ``n % clients`` clients with one sample more are the first ones. Nothing is left over.
    """

    def __init__(self) -> None:
        """Nothing to set."""

    def _split(self, codes: IntArray, clients: int, seed: int) -> Partition:
        n = codes.size
        sizes = n // clients + (np.arange(clients) < n % clients)
        return Partition(_shuffled(n, numpy_rng(seed, "partition", _POOLS)), _offsets(sizes))


class DirichletByClass(Partitioner):
    r"""Each class is spread over the clients by shares :math:`p_k \sim Dir_J(\alpha \mathbf 1)`.

    Client ``j`` gets the share ``p_{k,j}`` of class ``k``, for every class by a draw of its own, so
    that sizes differ, and with small ``alpha`` some clients get nothing. All samples are used.
    From Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks"
    (arXiv 1905.12022), in wide use since Li et al. (arXiv 2102.02079). This is not the split of
    Hsu et al. (arXiv 1909.06335), which is often named for it: see :class:`DirichletByClient`.

    Shares become whole samples by systematic sampling with a random start per class: the count is
    within one of ``p_{k,j} n_k``, and its mean is exactly that, also where there are more clients
    than samples of a class. (Cutting at ``floor(cumsum(p) n_k)`` favours the same clients in every
    class then.) No hidden rule evens the sizes out. Memory is ``8 * clients * classes`` bytes while
    it draws.

    Args:
        alpha: Concentration, > 0: small is skewed, large is uniform.
        min_samples: Draw all shares anew until each client has at least this many samples. This
            changes the distribution (it conditions on it), hence off by default.
        max_tries: How many draws to try at most for ``min_samples``; by default as many as take
            some seconds (5e7 shares, between 1 and 1,000 draws).

    Raises:
        ValueError: If ``alpha`` is not positive and finite, ``min_samples`` is negative or
            ``max_tries`` is below 1. When called, also if ``max_tries`` draws all fell short.
    """

    def __init__(self, alpha: float, min_samples: int = 0, max_tries: int | None = None) -> None:
        """See the class."""
        self.alpha = _alpha(alpha)
        self.min_samples = self._least = _count("min_samples", min_samples, 0)
        self.max_tries = None if max_tries is None else _count("max_tries", max_tries, 1)

    def _split(self, codes: IntArray, clients: int, seed: int) -> Partition:
        pools, sizes = _class_pools(codes, numpy_rng(seed, "partition", _POOLS))
        rng = numpy_rng(seed, "partition", _SHARES)
        tries = self.max_tries or min(1000, 1 + _SHARES_IN_ALL // (clients * sizes.size))
        best = -1
        for _ in range(tries):
            totals = np.zeros(clients, np.int64)
            counts = []
            for n_k in sizes:
                counts.append(_share_out(int(n_k), self.alpha, clients, rng))
                totals += counts[-1]
            best = max(best, int(totals.min()))
            if best >= self.min_samples:
                break
        else:
            raise ValueError(
                f"min_samples={self.min_samples} was not reached for {clients} clients in {tries} "
                f"draws with alpha={self.alpha} (the smallest client of the best draw had {best}): "
                f"raise alpha, lower min_samples or clients, or raise max_tries"
            )
        owner = np.concatenate([np.repeat(np.arange(clients), row) for row in counts])
        # Shuffled before the stable sort by owner: a client's samples are then in random order.
        order = numpy_rng(seed, "partition", _ORDER).permutation(codes.size)
        return Partition(pools[order[np.argsort(owner[order], kind="stable")]], _offsets(totals))


class DirichletByClient(Partitioner):
    r"""Each client has its own class mix :math:`q_i \sim Dir(\alpha \mathbf 1_C)`, sizes are equal.

    Every client gets ``m = n // clients`` samples, whose classes are drawn one by one from ``q_i``;
    the ``n % clients`` samples left over are used by nobody. The mix per client is that of Hsu et
    al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification" (arXiv 1909.06335), who write it as :math:`Dir(\alpha p)` with a class prior
    ``p`` that sums to one: their alpha is ours times the number of classes. FedMuon's released
    split is this one, with ``alpha`` per class as here; but it hands samples of a used-up class out
    again, to several clients. Here no sample is shared.

    **Who gets the leftovers.** The wishes never add up to the data, so a class runs out, and from
    then on draws are from ``q_i`` renormalised over the classes that are left. Filling one client
    after the other would give the early clients their ``q_i`` and the last ones whatever is left,
    a bias that follows the client's number. Here clients take turns, one sample each, in an order
    drawn once: all have had the same number of draws when a class runs out, each client's first
    draws are exactly from its ``q_i``, the last ones are distorted for all alike, and clients stay
    exchangeable. For 100 clients of 500 samples, ten classes and ``alpha=0.1``, a client's mix is
    0.08 from its ``q_i`` in total variation, 0.16 at the 95th percentile; one client after the
    other gives 0.10 and 0.65. The price: clients are a little less pure than was meant (2.8
    effective classes for 2.4 there, 1.7 for 1.2 at ``alpha=0.01``).

    Memory is ``8 * clients * classes`` bytes for the mixes; time ``O(n * classes)``.

    Args:
        alpha: Concentration per class, > 0: small gives one class per client, large an even mix
            over the classes that occur.

    Raises:
        ValueError: If ``alpha`` is not positive and finite.
    """

    def __init__(self, alpha: float) -> None:
        """See the class."""
        self.alpha = _alpha(alpha)

    def _split(self, codes: IntArray, clients: int, seed: int) -> Partition:
        pools, sizes = _class_pools(codes, numpy_rng(seed, "partition", _POOLS))
        m = codes.size // clients
        log_q = _log_gamma(self.alpha, (clients, sizes.size), numpy_rng(seed, "partition", _SHARES))
        rng = numpy_rng(seed, "partition", _CLASSES)
        turn = rng.permutation(clients)  # log_q[p] is the mix of client turn[p]
        drawn = _draw_classes(log_q, sizes, m, rng)  # (m * clients,), turn after turn
        # The j-th draw of class k takes the j-th sample of that class's shuffled pool.
        used = np.bincount(drawn, minlength=sizes.size)
        first = np.cumsum(sizes) - sizes
        taken = np.concatenate([pools[a : a + u] for a, u in zip(first, used, strict=True)])
        samples = np.empty_like(taken)
        samples[np.argsort(drawn, kind="stable")] = taken
        mine = np.empty((clients, m), samples.dtype)
        mine[turn] = samples.reshape(m, clients).T
        numpy_rng(seed, "partition", _ORDER).permuted(mine, axis=1, out=mine)
        return Partition(mine.reshape(-1), np.arange(clients + 1, dtype=np.int64) * m)


def _draw_classes(log_q: FloatArray, sizes: IntArray, m: int, rng: np.random.Generator) -> IntArray:
    """Draw a class for every position, in order, never more of a class than there is.

    Exactly the loop "for each position s: draw from q of client s % clients, renormalised over the
    classes with samples left", but by blocks: a block is drawn as if nothing ran out in it, kept up
    to the first draw that a class could not serve, and the next block starts there. At most one
    block per class is cut short, which bounds the work.

    Args:
        log_q: Log of unnormalised class weights, in turn order, ``(clients, classes)``.
        sizes: Samples of each class, ``(classes,)``.
        m: Samples per client, ``m * clients <= sizes.sum()``.
        rng: Where the draws come from.

    Returns:
        Classes, position after position, shape ``(m * clients,)``.
    """
    clients, classes = log_q.shape
    total = m * clients
    out = np.empty(total, np.min_scalar_type(-classes))
    left = np.array(sizes, dtype=np.int64)
    done = 0
    while done < total:
        alive = left > 0
        # About as long as it takes the smallest class to run out: little is drawn in vain.
        length = min(max(int(left[alive].min()) * int(alive.sum()), 1024), 16384, total - done)
        rows = np.arange(done, done + length) % clients
        weights = np.where(alive, log_q[rows], -np.inf)
        weights -= weights.max(axis=1, keepdims=True)
        np.exp(weights, out=weights)
        np.cumsum(weights, axis=1, out=weights)
        ends = weights[:, -1]
        at = np.minimum(rng.random(length) * ends, np.nextafter(ends, 0.0))
        block = np.argmax(weights > at[:, None], axis=1)
        over = np.flatnonzero(np.bincount(block, minlength=classes) > left)
        if over.size:
            length = min(int(np.flatnonzero(block == k)[left[k]]) for k in over)
            block = block[:length]
        out[done : done + length] = block
        left -= np.bincount(block, minlength=classes)
        done += length
    return out


def _share_out(
    n: int, alpha: float, clients: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Split ``n`` samples by shares from Dir(alpha): counts that sum to n, shape ``(clients,)``."""
    weights = _log_gamma(alpha, (clients,), rng)
    weights -= weights.max()
    np.exp(weights, out=weights)
    ends = np.cumsum(weights)
    # Client j gets the samples s with s + start in its stretch [ends[j-1], ends[j]) of [0, n).
    ends *= n / ends[-1]
    ends = np.ceil(ends - rng.random())
    ends[-1] = n
    return np.diff(np.minimum(ends, n), prepend=0.0).astype(np.int64)


def _log_gamma(alpha: float, shape: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
    """Logarithms of Gamma(alpha) draws: their softmax is a Dirichlet draw.

    Gamma(alpha) = Gamma(alpha + 1) U^(1 / alpha). In logarithms nothing underflows, so that small
    alpha gives one-hot shares, not 0 / 0; below 1e-100 it makes no difference any more.
    """
    tail = rng.standard_exponential(shape) / max(alpha, 1e-100)
    return np.asarray(np.log(rng.standard_gamma(alpha + 1.0, shape)) - tail)


def _class_pools(codes: IntArray, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """The samples class after class, shuffled within each ``(n,)``, and class sizes ``(C,)``."""
    order = _shuffled(codes.size, rng)
    return order[np.argsort(codes[order], kind="stable")], np.bincount(codes)


def _shuffled(n: int, rng: np.random.Generator) -> IntArray:
    """``range(n)`` in random order, in 32 bits where they do, shape ``(n,)``."""
    return rng.permutation(n).astype(np.int32 if n <= 2**31 else np.int64, copy=False)


def _compact(codes: IntArray) -> IntArray:
    """Codes in the smallest type (NumPy sorts 16-bit integers in linear time)."""
    return codes.astype(np.min_scalar_type(-int(codes.max()) - 1)).reshape(-1)


def _offsets(sizes: IntArray) -> npt.NDArray[np.int64]:
    offsets = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _int64(array: IntArray) -> npt.NDArray[np.int64]:
    return array.astype(np.int64)


def _integers(name: str, values: npt.ArrayLike, empty: bool = False) -> IntArray:
    """A 1-D integer array; with ``empty``, an empty list of no type passes as one."""
    array = np.asarray(values)
    if empty and array.shape == (0,):
        return array.astype(np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be 1-D integers, got {array.dtype} of shape {array.shape}")
    return array


def _count(name: str, value: int, least: int) -> int:
    """A whole number of at least ``least``."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number


def _alpha(alpha: float) -> float:
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(
            f"alpha must be positive and finite, got {alpha!r}: use IID for an even split"
        )
    return float(alpha)
