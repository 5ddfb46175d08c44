"""Numbers out of runs, as DataFrames: a row per run, and a row per method over its seeds.

``test/*`` is only reported here; what chooses is ``val/*``. A value that was not measured is NaN, a
diverged one infinite.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .fairness import conditions
from .names import higher_is_better
from .runs import RunData

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

__all__ = [
    "QUANTITIES",
    "TARGETS",
    "Stat",
    "best",
    "last",
    "measured",
    "method_table",
    "round_table",
    "run_table",
    "summarise",
    "unmeasured",
]

QUANTITIES = {
    "test": "the test metric after the last round",
    "worst10": "mean test accuracy of the worst tenth of the clients, after the last round",
    "val": "the validation metric after the last round",
    "best_val": "the validation metric of the best round",
    "test_at_best": "the test metric of the round with the best validation metric",
    "area": "area under the validation curve over the rounds, divided by their span",
    "rounds": "rounds done",
    "total_mb": "communicated in all, both ways, in 10^6 bytes",
    "seconds": "time of all rounds",
}
"""Columns of :func:`run_table` that hold a number, and what each is."""

TARGETS = {
    "rounds_to_target": "rounds until the validation metric first reached the target",
    "mb_to_target": "what was communicated until then, in 10^6 bytes",
    "seconds_to_target": "the time of the rounds until then",
}
"""The columns that :func:`run_table` has with a target."""


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation (n - 1) over the seeds that have the number.

    Attributes:
        n: How many seeds have it.
        mean: Their mean; NaN for none, and where one diverged.
        sd: NaN for fewer than two.
    """

    n: int
    mean: float
    sd: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Stat":
        """The statistic of the values that are not NaN; with an infinite one the mean is NaN."""
        there = [float(value) for value in values if not math.isnan(value)]
        if not there or not all(map(math.isfinite, there)):
            return cls(len(there), math.nan, math.nan)
        sd = statistics.stdev(there) if len(there) > 1 else math.nan
        return cls(len(there), statistics.fmean(there), sd)

    def text(self, digits: int, seeds: int, sd: bool = True) -> str:
        """Such as ``0.9712 ± 0.0031``, with ``(2/3)`` behind it where only 2 of 3 seeds have it."""
        if not self.n:
            return "-"
        spread = f" ± {self.sd:.{digits}f}" if sd and not math.isnan(self.sd) else ""
        part = f" ({self.n}/{seeds})" if self.n != seeds else ""
        return f"{self.mean:.{digits}f}{spread}{part}"


# ---------------------------------------------------------------------------------------------
# One run


def measured(run: RunData, tag: str) -> list[tuple[int, float]]:
    """(round, value) wherever a tag was measured. A diverged value is measured, as infinite."""
    if tag not in run.metrics:
        return []
    rounds, values = run.metrics["round"], run.metrics[tag]
    return [(int(r), float(v)) for r, v in zip(rounds, values, strict=True) if not math.isnan(v)]


def last(run: RunData, tag: str) -> float:
    """A tag's value after the last round; NaN if it was not measured there."""
    known = measured(run, tag)
    return known[-1][1] if known and known[-1][0] == len(run.metrics) - 1 else math.nan


def best(run: RunData, tag: str, high: bool) -> float:
    """A tag's best value; NaN if it was never measured."""
    values = [value for _, value in measured(run, tag)]
    return (max if high else min)(values) if values else math.nan


def _area(run: RunData, tag: str) -> float:
    """The trapezoids' area over the rounds, divided by their span: a mean over the training."""
    known = measured(run, tag)
    if len(known) < 2:
        return known[0][1] if known else math.nan
    steps = itertools.pairwise(known)
    area = math.fsum((r1 - r0) * (v0 + v1) / 2 for (r0, v0), (r1, v1) in steps)
    return area / (known[-1][0] - known[0][0])


def _until(run: RunData, tag: str, stop: int) -> float:
    """The sum of a tag over the rounds up to and with ``stop``."""
    known = measured(run, tag)
    return math.fsum(value for r, value in known if r <= stop) if known else math.nan


def _at(run: RunData, tag: str, r: int) -> float:
    return dict(measured(run, tag)).get(r, math.nan)


def at_best(run: RunData, metric: str) -> float:
    """``test/<metric>`` after the first round of the best ``val/<metric>``; NaN without one."""
    val = f"val/{metric}"
    top = best(run, val, higher_is_better(metric))
    rounds = (r for r, value in measured(run, val) if value == top)
    return next((_at(run, f"test/{metric}", r) for r in rounds), math.nan)


def _row(run: RunData, metric: str, target: float | None) -> dict[str, object]:
    high = higher_is_better(metric)
    val, test = f"val/{metric}", f"test/{metric}"
    curve = measured(run, val)
    top = best(run, val, high)
    row: dict[str, object] = {
        "experiment": run.experiment,
        "method": run.method,
        "seed": run.seed,
        "test": last(run, test),
        "worst10": last(run, "client/acc_worst10"),
        "val": last(run, val),
        "best_val": top,
        "test_at_best": at_best(run, metric),
        "area": _area(run, val),
        "rounds": len(run.metrics),
        "total_mb": next((v for _, v in reversed(measured(run, "comm/total_mb"))), math.nan),
        "seconds": _until(run, "time/round_s", len(run.metrics)),
    }
    if target is not None:
        reached = [r for r, v in curve if (v >= target if high else v <= target)]
        first = reached[0] if reached else None
        row["rounds_to_target"] = math.nan if first is None else first + 1
        row["mb_to_target"] = math.nan if first is None else _at(run, "comm/total_mb", first)
        row["seconds_to_target"] = math.nan if first is None else _until(run, "time/round_s", first)
    row["conditions"] = conditions(run)
    return row


def run_table(
    runs: Sequence[RunData], *, metric: str = "acc", target: float | None = None
) -> "pd.DataFrame":
    """A row per run.

    Args:
        runs: Runs as read by :func:`~fedmuon_pl.compare.runs.read_runs`.
        metric: ``acc`` for ``val/acc`` and ``test/acc``; another one likewise.
        target: A value of the validation metric, for what it took to first reach it.

    Returns:
        Columns ``experiment``, ``method``, ``seed``, those of :data:`QUANTITIES`, with a target
        those of :data:`TARGETS`, and ``conditions``, which is equal for runs with the same data,
        cohorts, network and budget.
    """
    import pandas as pd

    names = ["experiment", "method", "seed", *QUANTITIES, *(TARGETS if target is not None else ())]
    rows = [_row(run, metric, target) for run in runs]
    return pd.DataFrame(rows, columns=[*names, "conditions"])


def round_table(runs: Sequence[RunData]) -> "pd.DataFrame":
    """A row per run and round: ``experiment``, ``method``, ``seed``, ``round`` and the tags."""
    import pandas as pd

    parts = []
    for run in runs:
        part = run.metrics.copy()
        for i, key in enumerate(("experiment", "method", "seed")):
            part.insert(i, key, getattr(run, key))
        parts.append(part)
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


# ---------------------------------------------------------------------------------------------
# Methods


def method_table(table: "pd.DataFrame", *, high: bool = True) -> "pd.DataFrame":
    """A row per experiment and method: mean, sample standard deviation and count over the seeds.

    Args:
        table: Columns ``experiment``, ``method``, ``seed`` and numbers, as of :func:`run_table`.
        high: Whether more of ``test`` is better.

    Returns:
        ``experiment``, ``method``, ``seeds`` (a tuple) and for each number ``x`` the columns
        ``x_mean``, ``x_sd`` and ``x_n``. Experiments are in the order of the runs; within each, the
        best ``test`` is first (``val``, where nothing was tested), and what has none is last.
    """
    import pandas as pd

    known = ("experiment", "method", "seed", "conditions")
    numbers = [name for name in table.columns if name not in known]
    rows = []
    for (experiment, method), own in table.groupby(["experiment", "method"], sort=False):
        row = {"experiment": experiment, "method": method, "seeds": tuple(sorted(own["seed"]))}
        for name in numbers:
            stat = Stat.of(own[name])
            row |= {f"{name}_mean": stat.mean, f"{name}_sd": stat.sd, f"{name}_n": stat.n}
        rows.append(row)
    columns = [f"{name}_{kind}" for name in numbers for kind in ("mean", "sd", "n")]
    frame = pd.DataFrame(rows, columns=["experiment", "method", "seeds", *columns])
    places = {name: i for i, name in enumerate(dict.fromkeys(frame["experiment"]))}
    by = next((n for n in ("test", "val") if n in numbers and frame[f"{n}_n"].any()), None)
    rank = frame[f"{by}_mean"] * (-1 if high else 1) if by else 0.0
    order = frame.assign(_place=frame["experiment"].map(places), _rank=rank)
    order = order.sort_values(["_place", "_rank", "method"], kind="stable")  # NaN comes last
    return order.drop(columns=["_place", "_rank"]).reset_index(drop=True)


def summarise(
    runs: Sequence[RunData], *, metric: str = "acc", target: float | None = None
) -> "pd.DataFrame":
    """:func:`run_table` and then :func:`method_table`."""
    table = run_table(runs, metric=metric, target=target)
    return method_table(table, high=higher_is_better(metric))


def unmeasured(runs: Sequence[RunData], metric: str = "acc") -> list[str]:
    """One sentence for each run whose last round lacks a metric that an earlier one has."""
    return [
        f"{run.experiment}/{run.folder.name}: {tag} was last measured in round "
        f"{known[-1][0] + 1} of {len(run.metrics)}, so that its final value is left out"
        for run in runs
        for tag in (f"val/{metric}", f"test/{metric}")
        if (known := measured(run, tag)) and math.isnan(last(run, tag))
    ]
