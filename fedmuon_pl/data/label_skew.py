"""More partitions in which clients see few classes: shards, classes per client, a parity split."""

import numpy as np

from ..seeding import numpy_rng
from .partition import (
    FloatArray,
    IntArray,
    Partition,
    Partitioner,
    _alpha,
    _class_pools,
    _count,
    _log_gamma,
    _offsets,
)

__all__ = ["ClassesPerClient", "DirichletLMO", "DirichletReleasedCode", "Shards"]

# The last id of each draw's key: changing one kind of draw must not move the others.
_POOLS, _SHARES, _CLASSES, _ORDER = range(4)


class Shards(Partitioner):
    """The samples sorted by class, cut into equal shards, dealt at random: McMahan et al.

    From "Communication-Efficient Learning of Deep Networks from Decentralized Data" (arXiv
    1602.05629, section 3), which gives each of 100 clients two shards of 300 MNIST digits. Shards
    differ by one sample at most where the data do not divide; all samples are used. A client sees
    about ``shards_per_client`` classes, one more for each of its shards that crosses a border.

    Args:
        shards_per_client: How many shards each client gets.

    Raises:
        ValueError: If ``shards_per_client`` is below 1. When called, also if there are fewer
            samples than shards.
    """

    _least_name = "shards_per_client"

    def __init__(self, shards_per_client: int = 2) -> None:
        """See the class."""
        self.shards_per_client = self._least = _count("shards_per_client", shards_per_client, 1)

    def _split(self, codes: IntArray, clients: int, seed: int) -> Partition:
        pools, _ = _class_pools(codes, numpy_rng(seed, "partition", _POOLS))
        shards = clients * self.shards_per_client
        ends = _offsets(codes.size // shards + (np.arange(shards) < codes.size % shards))
        dealt = numpy_rng(seed, "partition", _CLASSES).permutation(shards)
        owner = np.empty(shards, np.int64)
        owner[dealt] = np.repeat(np.arange(clients), self.shards_per_client)
        return by_owner(pools, np.repeat(owner, np.diff(ends)), clients, seed)


class ClassesPerClient(Partitioner):
    """Each client holds a fixed number of classes, and a class is split evenly over its clients.

    The "#C = k" of Li et al., "Federated Learning on Non-IID Data Silos" (arXiv 2102.02079,
    section 4.1, quantity-based label imbalance): client i holds class i mod C and k - 1 others at
    random, so that with at least C clients every class is held by somebody. Here classes and
    clients are numbered at random for that. The samples of a class that nobody holds are used by
    nobody; a client may get nothing of a class with fewer samples than clients. Memory is
    ``8 * clients * classes`` bytes while it draws.

    Args:
        classes: How many classes each client holds, k.

    Raises:
        ValueError: If ``classes`` is below 1. When called, also if the data have fewer.
    """

    def __init__(self, classes: int) -> None:
        """See the class."""
        self.classes = _count("classes", classes, 1)

    def _split(self, codes: IntArray, clients: int, seed: int) -> Partition:
        pools, sizes = _class_pools(codes, numpy_rng(seed, "partition", _POOLS))
        if self.classes > sizes.size:
            raise ValueError(f"classes={self.classes}, but the data have {sizes.size}: lower it")
        rng = numpy_rng(seed, "partition", _CLASSES)
        keys = rng.random((clients, sizes.size))
        first = rng.permutation(sizes.size)[np.arange(clients) % sizes.size]
        keys[rng.permutation(clients), first] = -1.0
        held = np.zeros((clients, sizes.size), bool)
        chosen = np.argpartition(keys, self.classes - 1, axis=1)[:, : self.classes]
        np.put_along_axis(held, chosen, True, axis=1)
        kept, owner, start = [], [], 0
        for k, n_k in enumerate(sizes.tolist()):
            owners = rng.permutation(np.flatnonzero(held[:, k]))  # who gets one more is random
            if owners.size:
                each = n_k // owners.size + (np.arange(owners.size) < n_k % owners.size)
                owner.append(np.repeat(owners, each))
                kept.append(pools[start : start + n_k])
            start += n_k
        return by_owner(np.concatenate(kept), np.concatenate(owner), clients, seed)


class DirichletReleasedCode(Partitioner):
    r"""The split of FedMuon's released code, for parity with its numbers only.

    Client after client draws :math:`q_i \sim Dir(\alpha \mathbf 1_C)` and ``m = n // clients``
    classes from it, one by one, and takes the next unused sample of each class; when a class is
    used up, its samples are shuffled and handed out again. So **clients share samples, a client may
    hold a sample several times, and some are held by nobody**: with CIFAR-100, 100 clients and
    alpha 0.1 about 14 % of the images. Same distribution as github.com/junkangLiu0/FedMuon,
    ``dirichlet_data.py``, but not its random stream; nor its exception that alpha 1 means an even
    random split (use :class:`IID`). For anything but parity, :class:`DirichletByClient`.

    Args:
        alpha: Concentration per class, > 0.

    Raises:
        ValueError: If ``alpha`` is not positive and finite.
    """

    def __init__(self, alpha: float) -> None:
        """See the class."""
        self.alpha = _alpha(alpha)

    def _split(self, codes: IntArray, clients: int, seed: int) -> Partition:
        pools, sizes = _class_pools(codes, numpy_rng(seed, "partition", _POOLS))
        q: FloatArray = _log_gamma(
            self.alpha, (clients, sizes.size), numpy_rng(seed, "partition", _SHARES)
        )
        q = np.exp(q - q.max(axis=1, keepdims=True))
        q /= q.sum(axis=1, keepdims=True)
        rng = numpy_rng(seed, "partition", _CLASSES)
        counts = rng.multinomial(codes.size // clients, q)
        taken, owner, start = [], [], 0
        for k, n_k in enumerate(sizes.tolist()):
            pool = pools[start : start + n_k]
            start += n_k
            wanted = int(counts[:, k].sum())
            again = [rng.permutation(pool) for _ in range(-(-wanted // n_k) - 1)]
            taken.append(np.concatenate([pool, *again])[:wanted])
            owner.append(np.repeat(np.arange(clients), counts[:, k]))
        return by_owner(np.concatenate(taken), np.concatenate(owner), clients, seed)


class DirichletLMO(Partitioner):
    r"""The split of a public reproduction of FedMuon-LMO, for parity with its numbers only.

    Of each class, one after the other, client ``j`` gets ``floor(p_{k,j} n_k)`` samples with
    :math:`p_k \sim Dir_J(\alpha \mathbf 1)`, and what is left over goes to the client that has
    least of it (the first of them). The shares are those that github.com/HiraNayak/FedMuon,
    ``data.py``, draws for this seed, which is 42 there; which images of a class a client gets is
    not. For anything but parity, :class:`~fedmuon_pl.data.partition.DirichletByClass`.

    Args:
        alpha: Concentration, > 0.
        class_size: Images a class of the data that the shares were published for, as the random
            stream follows it; None for as many as there are.

    Raises:
        ValueError: If ``alpha`` is not positive and finite, or ``class_size`` below 1.
    """

    def __init__(self, alpha: float, class_size: int | None = None) -> None:
        """See the class."""
        self.alpha = _alpha(alpha)
        self.class_size = None if class_size is None else _count("class_size", class_size, 1)

    def _split(self, codes: IntArray, clients: int, seed: int) -> Partition:
        pools, sizes = _class_pools(codes, numpy_rng(seed, "partition", _POOLS))
        rng = np.random.default_rng(seed)
        owner = []
        for n_k in sizes.tolist():
            rng.shuffle(np.arange(self.class_size or n_k))  # theirs shuffles the class first
            counts = (rng.dirichlet(np.full(clients, self.alpha)) * n_k).astype(np.int64)
            counts[counts.argmin()] += n_k - counts.sum()
            owner.append(np.repeat(np.arange(clients), counts))
        return by_owner(pools, np.concatenate(owner), clients, seed)


def by_owner(samples: IntArray, owner: IntArray, clients: int, seed: int) -> Partition:
    """The partition in which ``samples[i]`` belongs to client ``owner[i]``, in random order."""
    # Shuffled before the stable sort by owner: a client's samples are then in random order.
    order = numpy_rng(seed, "partition", _ORDER).permutation(samples.size)
    sizes = np.bincount(owner, minlength=clients)
    return Partition(samples[order[np.argsort(owner[order], kind="stable")]], _offsets(sizes))
