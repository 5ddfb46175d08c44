"""Numbers out of runs: the comparison table, and the choice of a grid's best point.

``test/*`` is only reported here. What chooses is ``val/*``, and a plan that asks for anything else
is refused before it runs.
"""

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..errors import ConfigError
from .plan import Choose, Plan, Run
from .runs import RunData

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "GridResult",
    "Row",
    "Stat",
    "Trial",
    "best_points",
    "display_name",
    "grid_markdown",
    "grid_note",
    "higher_is_better",
    "summarise",
    "to_csv",
    "to_markdown",
    "to_rich",
    "unmeasured",
    "write_tuned",
]

_NAMES = {
    "fedmuon": "FedMuon",
    "fedmuon_official": "FedMuon (official)",
    "fedmuon_lmo": "FedMuon-LMO",
    "local_muon": "Local Muon",
    "fedavg": "FedAvg",
    "fedavgm": "FedAvgM",
    "fedprox": "FedProx",
    "fednova": "FedNova",
    "feddyn": "FedDyn",
    "fedcm": "FedCM",
    "fedbn": "FedBN",
    "scaffold": "SCAFFOLD",
    "mime": "MIME",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "fedadagrad": "FedAdagrad",
    "fedadamw": "FedAdamW",
    "fedacg": "FedACG",
    "local_adamw": "Local AdamW",
    "fedmuon_fedadam": "FedMuon + FedAdam",
}


def display_name(method: str) -> str:
    """A method's name as papers write it; an unknown one stays as it is."""
    label, _, point = method.partition("@")
    name = _NAMES.get(label, label)
    return f"{name} ({point.replace(',', ', ')})" if point else name


def higher_is_better(metric: str) -> bool:
    """False for losses, errors and perplexities."""
    return not any(word in metric.lower() for word in ("loss", "err", "ppl", "perplexity"))


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation (n - 1) over the seeds that have the number.

    Attributes:
        n: How many seeds have it.
        mean: Their mean; None for none.
        sd: None for fewer than two.
    """

    n: int
    mean: float | None
    sd: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Stat":
        """The statistic of the values that are there; with a non-finite one the mean is NaN."""
        there = [value for value in values if value is not None]
        if not there:
            return cls(0, None, None)
        if not all(math.isfinite(value) for value in there):
            return cls(len(there), math.nan, None)
        sd = statistics.stdev(there) if len(there) > 1 else None
        return cls(len(there), statistics.fmean(there), sd)

    def text(self, digits: int, seeds: int, sd: bool = True) -> str:
        """Such as ``0.9712 ± 0.0031``, with ``(2/3)`` behind it where only 2 of 3 seeds have it."""
        if self.mean is None:
            return "-"
        spread = f" ± {self.sd:.{digits}f}" if sd and self.sd is not None else ""
        part = f" ({self.n}/{seeds})" if self.n != seeds else ""
        return f"{self.mean:.{digits}f}{spread}{part}"


@dataclass(frozen=True)
class Row:
    """One method of one experiment; every statistic is over its seeds.

    Attributes:
        experiment: The experiment.
        method: The method.
        seeds: Its seeds.
        test: The test metric after the last round.
        val_final: The validation metric after the last round.
        val_best: The validation metric of each seed's best round.
        rounds: How many rounds it ran.
        to_target: Rounds until validation first reached the target; None without a target.
        megabytes: Communicated in all, both ways.
        seconds: Time of all rounds.
    """

    experiment: str
    method: str
    seeds: tuple[int, ...]
    test: Stat
    val_final: Stat
    val_best: Stat
    rounds: Stat
    to_target: Stat | None
    megabytes: Stat
    seconds: Stat


def _measured(run: RunData, tag: str) -> list[tuple[int, float]]:
    """(round, value) wherever a tag was measured. A diverged value is measured, as infinite."""
    if tag not in run.metrics:
        return []
    rounds, values = run.metrics["round"], run.metrics[tag]
    return [(int(r), float(v)) for r, v in zip(rounds, values, strict=True) if not math.isnan(v)]


def _last(run: RunData, tag: str) -> float | None:
    """A tag's value after the last round; None if it was not measured there."""
    measured = _measured(run, tag)
    final = len(run.metrics) - 1
    return measured[-1][1] if measured and measured[-1][0] == final else None


def _best(run: RunData, tag: str, high: bool) -> float | None:
    values = [value for _, value in _measured(run, tag)]
    return (max if high else min)(values) if values else None


def _reached(run: RunData, tag: str, target: float, high: bool) -> float | None:
    for number, value in _measured(run, tag):
        if (value >= target) if high else (value <= target):
            return float(number + 1)
    return None


def _total(run: RunData, tag: str) -> float | None:
    values = [value for _, value in _measured(run, tag)]
    return math.fsum(values) if values else None


def summarise(
    runs: Sequence[RunData], *, target: float | None = None, metric: str = "acc"
) -> list[Row]:
    """One row per experiment and method.

    Args:
        runs: Runs as read by :func:`~fedmuon_pl.compare.runs.read_runs`.
        target: A value of the validation metric, for the rounds until it is first reached.
        metric: ``acc`` for ``val/acc`` and ``test/acc``; another one likewise.

    Returns:
        Experiments in the order of the runs; within each, the best final test metric first (or
        validation metric, where nothing was tested).
    """
    high = higher_is_better(metric)
    val, test = f"val/{metric}", f"test/{metric}"
    groups: dict[tuple[str, str], list[RunData]] = {}
    for run in runs:
        groups.setdefault((run.experiment, run.method), []).append(run)
    rows = [
        Row(
            experiment=experiment,
            method=method,
            seeds=tuple(sorted(run.seed for run in own)),
            test=Stat.of(_last(run, test) for run in own),
            val_final=Stat.of(_last(run, val) for run in own),
            val_best=Stat.of(_best(run, val, high) for run in own),
            rounds=Stat.of(len(run.metrics) for run in own),
            to_target=None
            if target is None
            else Stat.of(_reached(run, val, target, high) for run in own),
            megabytes=Stat.of(value[-1][1] for run in own if (value := _measured(run, _MB))),
            seconds=Stat.of(_total(run, "time/round_s") for run in own),
        )
        for (experiment, method), own in groups.items()
    ]
    order = list(dict.fromkeys(row.experiment for row in rows))

    tested = any(row.test.n for row in rows)

    def key(row: Row) -> tuple[int, bool, float, str]:
        mean = row.test.mean if tested else row.val_final.mean
        known = mean is not None and not math.isnan(mean)
        rank = 0.0 if mean is None or not known else (-mean if high else mean)
        return order.index(row.experiment), not known, rank, row.method

    return sorted(rows, key=key)


_MB = "comm/total_mb"


def unmeasured(runs: Sequence[RunData], metric: str = "acc") -> list[str]:
    """One sentence for each run whose last round lacks a metric that an earlier one has."""
    return [
        f"{run.experiment}/{run.folder.name}: {tag} was last measured in round "
        f"{measured[-1][0] + 1} of {len(run.metrics)}, so that its final value is left out"
        for run in runs
        for tag in (f"val/{metric}", f"test/{metric}")
        if (measured := _measured(run, tag)) and _last(run, tag) is None
    ]


def _cells(rows: Sequence[Row], metric: str, target: float | None) -> tuple[list[str], list[Any]]:
    """Headings and, per row, the texts below them. The first column is text, the rest numbers."""
    some = any(row.test.n for row in rows)
    heads = ["method", "seeds"]
    heads += [f"test {metric}"] if some else []
    heads += [f"val {metric}", f"best val {metric}"]
    heads += [f"rounds to {target:g}"] if target is not None else []
    heads += ["sent MB", "seconds"]
    table = []
    for row in rows:
        n = len(row.seeds)
        cells = [display_name(row.method), str(n)]
        cells += [row.test.text(4, n)] if some else []
        cells += [row.val_final.text(4, n), row.val_best.text(4, n)]
        if target is not None:
            cells.append(row.to_target.text(1, n) if row.to_target else "-")
        cells += [row.megabytes.text(1, n, sd=False), row.seconds.text(1, n, sd=False)]
        table.append(cells)
    return heads, table


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _caption(rows: Sequence[Row], metric: str, target: float | None) -> str:
    rounds = sorted({round(row.rounds.mean) for row in rows if row.rounds.mean})
    seeds = sorted({seed for row in rows for seed in row.seeds})
    after = "after the last round" if len(rounds) > 1 else f"after {rounds[0]} rounds"
    spread = "Mean ± sample standard deviation" if len(seeds) > 1 else "Values"
    until = (
        f" Rounds to {target:g}: until val {metric} first reached it; (k/n) where only k seeds did."
        if target is not None
        else ""
    )
    tested = any(row.test.n for row in rows)
    order = f"sorted by test {metric}, which chose nothing" if tested else f"sorted by val {metric}"
    return (
        f"{spread} {'over the' if len(seeds) > 1 else 'of'} {_seeds(seeds)}, {after}; {order}."
        f"{until} Sent MB: "
        f"in all, both ways."
    )


def to_markdown(rows: Sequence[Row], *, metric: str = "acc", target: float | None = None) -> str:
    """The rows as Markdown, a heading per experiment where there are several."""
    parts = []
    experiments = list(dict.fromkeys(row.experiment for row in rows))
    for experiment in experiments:
        own = [row for row in rows if row.experiment == experiment]
        heads, table = _cells(own, metric, target)
        if len(experiments) > 1:
            parts.append(f"### {experiment}\n")
        parts.append(_markdown(heads, table))
        parts.append(_caption(own, metric, target) + "\n")
    return "\n".join(parts)


def _markdown(heads: Sequence[str], table: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table with aligned columns; the first ``left`` are text."""
    widths = [max(len(row[i]) for row in [heads, *table]) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        words = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(words) + " |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(heads), line(rule), *map(line, table)]) + "\n"


def to_rich(
    rows: Sequence[Row], *, metric: str = "acc", target: float | None = None
) -> "list[Table]":
    """The rows for a terminal, one table per experiment."""
    from rich import box
    from rich.table import Table

    tables = []
    for experiment in dict.fromkeys(row.experiment for row in rows):
        own = [row for row in rows if row.experiment == experiment]
        heads, cells = _cells(own, metric, target)
        table = Table(
            title=experiment,
            caption=_caption(own, metric, target),
            box=box.SIMPLE_HEAD,
            title_justify="left",
            caption_justify="left",
            pad_edge=False,
        )
        for i, head in enumerate(heads):
            table.add_column(head, justify="left" if i == 0 else "right", no_wrap=True)
        for line in cells:
            table.add_row(*line)
        tables.append(table)
    return tables


def to_csv(rows: Sequence[Row], *, metric: str = "acc", target: float | None = None) -> str:
    """The rows as CSV with full precision: a mean, a standard deviation and a count each."""
    columns = {
        f"test_{metric}": "test",
        f"val_{metric}": "val_final",
        f"best_val_{metric}": "val_best",
        "rounds": "rounds",
        **({f"rounds_to_{target:g}": "to_target"} if target is not None else {}),
        "total_mb": "megabytes",
        "seconds": "seconds",
    }
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    kinds = ("mean", "sd", "n")
    names = [f"{name}_{kind}" for name in columns for kind in kinds]
    writer.writerow(["experiment", "method", "seeds", *names])
    for row in rows:
        stats: list[Stat] = [getattr(row, name) or Stat.of([]) for name in columns.values()]
        values = [getattr(stat, kind) for stat in stats for kind in kinds]
        seeds = " ".join(map(str, row.seeds))
        writer.writerow([row.experiment, row.method, seeds, *values])
    return out.getvalue()


# ---------------------------------------------------------------------------------------------
# Choosing a grid's best point


@dataclass(frozen=True)
class Trial:
    """One grid point: its value is over all of the plan's seeds, or it has none.

    A point at which a seed failed or diverged has no mean, and cannot be chosen for the seeds that
    went well.
    """

    method: str
    point: Mapping[str, Any]
    value: Stat
    seeds: int

    @property
    def score(self) -> float | None:
        """The mean over the seeds, if every one has a finite value."""
        mean = self.value.mean
        complete = self.value.n == self.seeds and mean is not None and math.isfinite(mean)
        return mean if complete else None


@dataclass(frozen=True)
class GridResult:
    """All trials of one algorithm in one experiment.

    Attributes:
        experiment: The experiment.
        algorithm: The plan's label.
        trials: In the grid's order.
        best: The chosen one; None if no trial is complete. The first of equals.
        edges: The keys whose chosen value is the smallest or greatest of its grid: the true
            optimum may lie beyond.
    """

    experiment: str
    algorithm: str
    trials: tuple[Trial, ...]
    best: Trial | None
    edges: tuple[str, ...]


def best_points(
    planned: Sequence[Run], runs: Sequence[RunData], choose: Choose
) -> list[GridResult]:
    """The best grid point of every algorithm of a plan.

    Args:
        planned: The plan's runs.
        runs: What was read of them.
        choose: The metric, never a test one, and how it is used.
    """
    read = {(run.experiment, run.method, run.seed): run for run in runs}
    groups: dict[tuple[str, str], dict[str, list[Run]]] = {}
    for run in planned:
        points = groups.setdefault((run.experiment, run.algorithm), {})
        points.setdefault(run.method, []).append(run)
    high = choose.mode == "max"

    def value(run: Run) -> float | None:
        data = read.get((run.experiment, run.method, run.seed))
        if data is None:
            return None
        if choose.at == "last":
            return _last(data, choose.metric)
        return _best(data, choose.metric, high)

    results = []
    for (experiment, algorithm), points in groups.items():
        trials = tuple(
            Trial(method, own[0].point, Stat.of(map(value, own)), len(own))
            for method, own in points.items()
        )
        scored = [trial for trial in trials if trial.score is not None]
        pick = max if high else min
        best = pick(scored, key=lambda trial: trial.score or 0.0) if scored else None
        edges = _edges(best.point, trials) if best else ()
        results.append(GridResult(experiment, algorithm, trials, best, edges))
    return results


def _edges(point: Mapping[str, Any], trials: Sequence[Trial]) -> tuple[str, ...]:
    found = []
    for key, value in point.items():
        axis = {trial.point[key] for trial in trials}
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in axis)
        if numeric and len(axis) > 1 and value in (min(axis), max(axis)):
            found.append(key)
    return tuple(found)


def _point_text(point: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{key.split('.')[-1]} {value}" for key, value in point.items()) or "(as it is)"
    )


def grid_markdown(results: Sequence[GridResult], plan: Plan) -> str:
    """The record of a grid: every trial with its value, the chosen ones in bold."""
    choose = plan.choose
    over = f"mean over the {_seeds(plan.seeds)}" if len(plan.seeds) > 1 else _seeds(plan.seeds)
    parts = [
        f"# Grid of plan {plan.name}\n",
        f"Chosen by {choose.metric} ({choose.mode}, {choose.at} round), {over}. A trial with a "
        "failed or diverged seed is not chosen. No test data.\n",
    ]
    for experiment in dict.fromkeys(result.experiment for result in results):
        parts.append(f"## {experiment}\n")
        heads = ["algorithm", "trials", "trial", choose.metric]
        table = []
        for result in results:
            if result.experiment != experiment:
                continue
            for i, trial in enumerate(result.trials):
                bold = "**" if trial is result.best else ""
                text = trial.value.text(4, trial.seeds) if trial.value.n else "failed"
                first = [display_name(result.algorithm), str(len(result.trials))]
                cells = [f"{bold}{_point_text(trial.point)}{bold}", f"{bold}{text}{bold}"]
                table.append([*(["", ""] if i else first), *cells])
        parts.append(_markdown(heads, table, left=3))
        for result in results:
            if result.experiment == experiment and (note := grid_note(result)):
                parts.append(note + "\n")
    return "\n".join(parts)


def grid_note(result: GridResult) -> str:
    """What is to be known about a choice, or nothing."""
    name = f"{display_name(result.algorithm)} on {result.experiment}"
    if result.best is None:
        return f"{name}: nothing chosen, as no trial went well with every seed."
    if result.edges:
        keys = ", ".join(key.split(".")[-1] for key in result.edges)
        return f"{name}: the best {keys} is at the edge of its grid; the optimum may lie beyond."
    return ""


def write_tuned(results: Sequence[GridResult], plan: Plan, directory: str | Path) -> list[Path]:
    """Writes the chosen values as ``<directory>/<experiment>/<algorithm>.yaml``, and the record.

    Returns:
        The written files; an algorithm without a grid, or without a complete trial, has none.

    Raises:
        ConfigError: If a key of a grid is both a value and a section.
    """
    written = []
    for result in results:
        if result.best is None or not result.best.point:
            continue
        path = Path(directory) / result.experiment / f"{result.algorithm}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_tuned_yaml(result, result.best, plan), encoding="utf-8")
        written.append(path)
    for experiment in dict.fromkeys(path.parent for path in written):
        own = [result for result in results if result.experiment == experiment.name]
        record = experiment / "grid.md"
        record.write_text(grid_markdown(own, plan), encoding="utf-8")
        written.append(record)
    return written


def _tuned_yaml(result: GridResult, best: Trial, plan: Plan) -> str:
    choose = plan.choose
    lines = [
        f"Chosen by `fedmuon sweep {plan.name} --write-tuned`; the whole record is in grid.md.",
        f"{len(result.trials)} trials, {_seeds(plan.seeds)}:",
    ]
    for key in best.point:
        values = dict.fromkeys(str(trial.point[key]) for trial in result.trials)
        lines.append(f"  {key}: {', '.join(values)}")
    value = best.value.text(4, best.seeds)
    lines.append(f"Best {choose.metric} ({choose.mode}, {choose.at} round): {value}.")
    if note := grid_note(result):
        lines.append(note)
    nested: dict[str, Any] = {}
    for key, chosen in best.point.items():
        *sections, leaf = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ConfigError(f"the grid's key {key} lies below another of its keys")
        place[leaf] = chosen
    comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return comment + yaml.safe_dump(nested, sort_keys=False)
