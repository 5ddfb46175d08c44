"""Partitions by size alone, and the natural one: by who each sample is from."""

import numpy as np

from ..seeding import numpy_rng
from .label_skew import by_owner
from .partition import (
    IntArray,
    Partition,
    Partitioner,
    _alpha,
    _count,
    _offsets,
    _share_out,
    _shuffled,
)

__all__ = ["Natural", "QuantitySkew"]

# The last id of each draw's key: changing one kind of draw must not move the others.
_POOLS, _SHARES, _CLASSES = range(3)


class QuantitySkew(Partitioner):
    r"""Random samples for everybody, but sizes by shares :math:`q \sim Dir_N(\alpha \mathbf 1)`.

    The quantity skew of Li et al., "Federated Learning on Non-IID Data Silos" (arXiv 2102.02079,
    section 4.3). Shares become whole samples by systematic sampling, as in
    :class:`DirichletByClass`; all samples are used. Their released code draws until each client has
    ten; here ``min_samples`` are given to each client first and the rest by the shares, which is
    not the same but needs no luck.

    Args:
        alpha: Concentration, > 0: small gives few clients nearly all, large gives equal sizes.
        min_samples: What each client gets at least; with 0 some may get nothing.

    Raises:
        ValueError: If ``alpha`` is not positive and finite or ``min_samples`` is negative.
    """

    def __init__(self, alpha: float, min_samples: int = 0) -> None:
        """See the class."""
        self.alpha = _alpha(alpha)
        self.min_samples = self._least = _count("min_samples", min_samples, 0)

    def _split(self, codes: IntArray, clients: int, seed: int) -> Partition:
        rest = codes.size - clients * self.min_samples
        shares = numpy_rng(seed, "partition", _SHARES)
        sizes = self.min_samples + _share_out(rest, self.alpha, clients, shares)
        order = _shuffled(codes.size, numpy_rng(seed, "partition", _POOLS))
        return Partition(order, _offsets(sizes))


class Natural(Partitioner):
    """Each client is one writer, user, speaker, ...: called with who each sample is from.

    The data module passes that column in place of the labels; data without one refuse it. With
    fewer clients than writers, a random choice of writers takes part and the samples of the others
    are used by nobody. Clients are in the order of the writers' ids.

    Args:
        min_samples: Writers with fewer samples do not count.

    Raises:
        ValueError: If ``min_samples`` is below 1. When called, also if there are not that many
            writers.
    """

    def __init__(self, min_samples: int = 1) -> None:
        """See the class."""
        self.min_samples = _count("min_samples", min_samples, 1)

    def _split(self, codes: IntArray, clients: int, seed: int) -> Partition:
        eligible = np.flatnonzero(np.bincount(codes) >= self.min_samples)
        if clients > eligible.size:
            raise ValueError(
                f"clients={clients}, but the data have {eligible.size} writers with at least "
                f"min_samples={self.min_samples}: use at most {eligible.size} clients"
            )
        rng = numpy_rng(seed, "partition", _CLASSES)
        chosen = np.sort(rng.choice(eligible, clients, replace=False))
        client = np.full(int(codes.max()) + 1, -1)
        client[chosen] = np.arange(clients)
        owner = client[codes]
        samples = np.flatnonzero(owner >= 0)
        return by_owner(samples, owner[samples], clients, seed)
