"""What the processes of a run tell each other: one flat all-reduce at the end of a round.

All of them plan the same shares without a word. What they add up is in float64: running sums with
integer weights, so that the number of processes changes nothing after rounding to float32, and
tables in which each process fills its own rows and leaves the others' at zero.
"""

import heapq
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from pytorch_lightning.strategies import Strategy
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_sum

from ..clients import Tensors
from ..errors import ConfigError

if TYPE_CHECKING:
    from .callback import FederatedServer

__all__ = [
    "check_shared",
    "count_alone",
    "merge_round",
    "merge_sums",
    "shares",
    "sum_metrics",
]


def shares(clients: Sequence[int], work: Sequence[int], ranks: int) -> list[list[int]]:
    """Who trains whom: the largest work first, each time for the rank with the least so far.

    At most 4/3 of the best possible makespan (Graham 1969, "Bounds on multiprocessing timing
    anomalies", LPT rule). Within a rank the cohort's order is kept. Rank 0 always has a client.

    Args:
        clients: The cohort.
        work: The samples that each of its clients passes through the network, positive.
        ranks: The number of processes.

    Returns:
        The clients of each rank; some have none if there are fewer clients than ranks.
    """
    loads = [(0, rank) for rank in range(ranks)]
    placed: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(clients)), key=lambda i: -work[i]):
        load, rank = loads[0]
        placed[rank].append(i)
        heapq.heapreplace(loads, (load + work[i], rank))
    return [[clients[i] for i in sorted(mine)] for mine in placed]


def merge_sums(server: "FederatedServer", strategy: Strategy, extra: Tensors = ()) -> Tensors:  # type: ignore[assignment]
    """Adds up the running sums that are not yet those of all ranks; every rank gets the totals.

    Args:
        server: With an open round.
        strategy: Of its Trainer.
        extra: More float64 tensors, of equal shapes on all ranks, to be added up in the same call.

    Returns:
        The totals of ``extra``.
    """
    assert server.plan is not None
    sums = server.totals.sums
    if not all(server.plan.shares):
        # A rank without clients does not know what they send; rank 0 always has some.
        sums.expect(strategy.broadcast(sums.layout()), strategy.root_device)
    mine = sums.unmerged()
    keys = list(mine)
    weights = torch.tensor([float(sums.weight(k)) for k in keys], dtype=torch.float64)
    own = [*(t for key in keys for t in mine[key]), weights, *extra]
    flat = torch.cat([t.to(strategy.root_device, torch.float64).flatten() for t in own])
    dist.all_reduce(flat)
    pieces: Tensors = list(flat.split([t.numel() for t in own]))  # type: ignore[no-untyped-call]
    totals = [piece.view(t.shape) for t, piece in zip(own, pieces, strict=True)]
    start = sum(len(mine[key]) for key in keys)
    torch._foreach_copy_(own[:start], totals[:start])
    for key, weight in zip(keys, totals[start].tolist(), strict=True):
        sums.merged(key, int(weight))
    return totals[start + 1 :]


def merge_round(server: "FederatedServer", strategy: Strategy) -> bool:
    """Brings every rank to where a single process would be that had trained the whole cohort.

    Args:
        server: With an open round, whose new per-client state has been written.
        strategy: Of its Trainer.

    Returns:
        Whether a rank was asked to stop (SIGTERM).

    Raises:
        ConfigError: If the ranks do not hold the same global model.
    """
    plan, ranks, rank = server.plan, server.ranks, server.rank
    assert plan is not None
    first = sum(map(len, plan.shares[:rank]))
    at = slice(first, first + len(plan.shares[rank]))
    counters = {n: b for n, b in server.totals.buffers.items() if not b.is_floating_point()}

    measured = _rows(server.diagnostics.rows, 4, len(plan.clients), at)
    stored = _rows(server.store.fresh, 4, len(plan.clients), at)
    tally = torch.tensor(
        [*server.totals.tally(), float(getattr(strategy, "stop_requested", False))],
        dtype=torch.float64,
    )
    model = torch.zeros(ranks, dtype=torch.float64)
    model[rank] = _checksum(plan.x0)
    width = sum(b.numel() for b in counters.values())
    largest = torch.zeros(ranks, 1 + width, dtype=torch.float64)
    if server.totals.counters:
        largest[rank, 0] = 1
        largest[rank, 1:] = torch.cat([server.totals.counters[n].flatten() for n in counters]).cpu()

    extra = merge_sums(server, strategy, [measured, stored, tally, model, largest])
    measured, stored, tally, model, largest = (t.cpu() for t in extra)
    if not bool((model == model[0]).all()):
        raise ConfigError(
            f"round {plan.round}: the processes do not hold the same global model any more; they "
            f"must run on machines and devices of one kind"
        )
    server.diagnostics.rows = [(int(w), a, b, c) for w, a, b, c in _filled(measured)]
    server.store.adopt((int(c), int(n), int(p), int(crc)) for c, n, p, crc in _filled(stored))
    totals: list[float]
    stop: float
    *totals, stop = tally.tolist()
    server.totals.take_tally([int(t) for t in totals])
    server.totals.counters = _tops(largest, counters)
    return stop > 0


def _rows(rows: Sequence[Sequence[float]], width: int, clients: int, at: slice) -> Tensor:
    """A table of the cohort, ``(clients, 1 + width)``, whose own rows begin with a one."""
    table = torch.zeros(clients, 1 + width, dtype=torch.float64)
    if rows:
        own = torch.tensor([list(map(float, row)) for row in rows], dtype=torch.float64)
        table[at][: len(rows), 0] = 1
        table[at][: len(rows), 1:] = own
    return table


def _filled(table: Tensor) -> list[list[float]]:
    rows: list[list[float]] = table[table[:, 0] > 0, 1:].tolist()
    return rows


def _tops(largest: Tensor, counters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The counters' largest values over the ranks that have any."""
    present = largest[largest[:, 0] > 0, 1:]
    if not len(present):
        return {}
    pieces = present.amax(0).split([b.numel() for b in counters.values()])  # type: ignore[no-untyped-call]
    pairs = zip(counters.items(), pieces, strict=True)
    return {n: piece.view(b.shape).to(b.device, b.dtype) for (n, b), piece in pairs}


def _checksum(tensors: Tensors) -> int:
    """Equal for equal bits; a float64 holds it exactly."""
    kinds = [{4: torch.int32, 8: torch.int64}.get(t.element_size(), torch.uint8) for t in tensors]
    flat = [t.contiguous().view(-1) for t in tensors]
    sums = torch.stack([t.view(kind).sum() for t, kind in zip(flat, kinds, strict=True)]).tolist()
    total = 0
    for value in sums:
        total = (31 * total + value) % 2**50
    return total


def sum_metrics(metrics: Sequence[Metric], strategy: Strategy) -> None:
    """Adds up metrics over the ranks in one call; torchmetrics would need a dozen for each.

    Afterwards their states are those of the whole evaluation. A metric with a state that is not a
    sum is left to torchmetrics.
    """
    mine = [m for m in metrics if all(f is dim_zero_sum for f in m._reductions.values())]
    names = [(m, name) for m in mine for name in m._reductions]
    states = [getattr(m, name) for m, name in names]
    if not states:
        return
    flat = torch.cat([t.to(strategy.root_device, torch.float64).flatten() for t in states])
    dist.all_reduce(flat)
    pieces: Tensors = list(flat.split([t.numel() for t in states]))  # type: ignore[no-untyped-call]
    for (m, name), state, piece in zip(names, states, pieces, strict=True):
        setattr(m, name, piece.view(state.shape).to(state.device, state.dtype))
    for m in mine:
        count_alone(m)


def count_alone(metric: Metric) -> None:
    """Lets a metric compute its value from its own states: no process waits for another.

    ``sync_on_compute`` says that too, but to its constructor only.
    """
    metric.distributed_available_fn = _never


def _never() -> bool:
    return False


def check_shared(folder: Path, strategy: Strategy) -> None:
    """Refuses a folder of per-client state that some process does not see.

    Raises:
        ConfigError: Naming the folder.
    """
    path = folder / f"{strategy.broadcast(uuid.uuid4().hex)}.shared"
    if strategy.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    strategy.barrier()
    seen = strategy.reduce_boolean_decision(path.exists())
    if strategy.is_global_zero:
        path.unlink()
    if not seen:
        raise ConfigError(
            f"the method keeps state of each client, which any process may need next, but {folder} "
            f"is not the same folder for all; put trainer.default_root_dir on a shared disk"
        )
