"""The choice of a grid's best point, never on test data, and its record."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError
from .names import display_name
from .plan import Choose, Plan, Run
from .render import markdown_table, seeds_text
from .runs import RunData
from .summary import Stat, best, last
from .trials import given, unequal

__all__ = [
    "GridResult",
    "Trial",
    "best_points",
    "given_texts",
    "grid_markdown",
    "grid_note",
    "write_tuned",
]


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
        complete = self.value.n == self.seeds and math.isfinite(self.value.mean)
        return self.value.mean if complete else None


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

    def value(run: Run) -> float:
        data = read.get((run.experiment, run.method, run.seed))
        if data is None:
            return math.nan
        if choose.at == "last":
            return last(data, choose.metric)
        return best(data, choose.metric, high)

    results = []
    for (experiment, algorithm), points in groups.items():
        trials = tuple(
            Trial(method, own[0].point, Stat.of(map(value, own)), len(own))
            for method, own in points.items()
        )
        scored = [trial for trial in trials if trial.score is not None]
        pick = max if high else min
        chosen = pick(scored, key=lambda trial: trial.score or 0.0) if scored else None
        edges = _edges(chosen.point, trials) if chosen else ()
        results.append(GridResult(experiment, algorithm, trials, chosen, edges))
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
    over = (
        f"mean over the {seeds_text(plan.seeds)}" if len(plan.seeds) > 1 else seeds_text(plan.seeds)
    )
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
        parts.append(markdown_table(heads, table, left=3))
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


def given_texts(results: Sequence[GridResult], plan: Plan) -> dict[str, list[str]]:
    """For each experiment what each algorithm was given, in words."""
    found: dict[str, list[str]] = {}
    how = f"{plan.choose.metric} ({plan.choose.mode}, {plan.choose.at} round)"
    for experiment in dict.fromkeys(result.experiment for result in results):
        own = [result for result in results if result.experiment == experiment]
        lines = [
            given(
                result.algorithm,
                [_point_text(trial.point) for trial in result.trials],
                _point_text(result.best.point) if result.best else None,
                f"{how}, {seeds_text(plan.seeds)}",
            )
            for result in own
        ]
        counts = {result.algorithm: len(result.trials) for result in own}
        found[experiment] = [*lines, *unequal(counts)]
    return found


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
        record = experiment / f"{plan.name}.md"
        record.write_text(grid_markdown(own, plan), encoding="utf-8")
        written.append(record)
    return written


def _tuned_yaml(result: GridResult, best: Trial, plan: Plan) -> str:
    choose = plan.choose
    lines = [
        f"Chosen by `fedmuon sweep {plan.name} --write-tuned`; the whole record is in "
        f"{plan.name}.md.",
        f"{len(result.trials)} trials, {seeds_text(plan.seeds)}:",
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
