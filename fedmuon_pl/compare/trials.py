"""Runs of several grid points of one method: only what validation data chose is compared.

A table of all trials, sorted by test accuracy, would be a choice on test data.
"""

import dataclasses
import math
from collections.abc import Sequence

from .names import display_name, higher_is_better
from .render import seeds_text
from .runs import RunData
from .summary import Stat, last

__all__ = ["choose_trials", "given", "unequal"]


def given(method: str, trials: Sequence[str], chosen: str | None, how: str) -> str:
    """One sentence on what a method was given.

    Args:
        method: The method.
        trials: Its points, as text.
        chosen: The point that was chosen, or None.
        how: What chose it.
    """
    count = f"{len(trials)} trial{'s' if len(trials) > 1 else ''}"
    name = display_name(method)
    if chosen is None:
        return f"{name}: {count}, none of which went well with every seed; left out."
    return f"{name}: {count} ({'; '.join(trials)}); chosen by {how}: {chosen}."


def choose_trials(
    runs: Sequence[RunData], metric: str = "acc"
) -> tuple[list[RunData], dict[str, list[str]]]:
    """Of each method's points (``fedavg@lr=0.1``) the one that is best on validation data.

    That is the mean over the seeds of ``val/<metric>`` after the last round; a point that lacks a
    seed which another point of the method has, or diverged with one, is not chosen. The first of
    equals is. A method's runs without a point that have other seeds than its points are what the
    points were tried for: then they are compared, and the points are not.

    Args:
        runs: As read; those without a point in their method's name stay as they are.
        metric: ``acc`` for ``val/acc``.

    Returns:
        The runs that are left, under their method's plain name, and for each experiment a sentence
        for each method that had a choice, and one where the numbers of trials differ.
    """
    groups: dict[tuple[str, str], dict[str, list[RunData]]] = {}
    for run in runs:
        label = run.method.partition("@")[0]
        groups.setdefault((run.experiment, label), {}).setdefault(run.method, []).append(run)
    kept: list[RunData] = []
    said: dict[str, list[str]] = {}
    counts: dict[str, dict[str, int]] = {}
    high = higher_is_better(metric)
    for (experiment, label), points in groups.items():
        counts.setdefault(experiment, {})[label] = len(points)
        if list(points) == [label]:
            kept += points[label]
            continue
        plain = {run.seed for run in points.get(label, ())}
        tried = {run.seed for name in points if name != label for run in points[name]}
        if plain and not plain & tried:
            kept += points[label]
            counts[experiment][label] = 1
            said.setdefault(experiment, []).append(
                f"{display_name(label)}: as it is, {seeds_text(sorted(plain))}; its "
                f"{len(points) - 1} other points have {seeds_text(sorted(tried))} and are left out."
            )
            continue
        seeds = {run.seed for own in points.values() for run in own}
        scores = {
            name: stat.mean * (1 if high else -1)
            for name, own in points.items()
            if (stat := Stat.of(last(run, f"val/{metric}") for run in own)).n == len(seeds)
            and math.isfinite(stat.mean)
        }
        best = max(scores, key=lambda name: scores[name]) if scores else None
        texts = {name: name.partition("@")[2].replace(",", ", ") or "as it is" for name in points}
        for name, runs_of in points.items():
            lacking = seeds - {run.seed for run in runs_of}
            if lacking:
                texts[name] += f" without {seeds_text(sorted(lacking))}"
        how = f"val {metric} after the last round, {seeds_text(sorted(seeds))}"
        sentence = given(label, list(texts.values()), texts[best] if best else None, how)
        said.setdefault(experiment, []).append(sentence)
        if best is not None:
            kept += [dataclasses.replace(run, method=label) for run in points[best]]
    for experiment, sentences in said.items():
        sentences += unequal(counts[experiment])
    return kept, said


def unequal(counts: dict[str, int]) -> list[str]:
    """A sentence where methods had different numbers of trials."""
    if len(set(counts.values())) < 2:
        return []
    words = ", ".join(f"{display_name(name)} {count}" for name, count in counts.items())
    return [f"Not the same number of trials: {words}."]
