"""What the report's page draws, as plain values for JSON, and where the runs were made."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..environment import FILE
from .comparison import Comparison
from .figures import DIAGNOSTICS, X_AXES, curve
from .names import display_name
from .runs import RunData, flatten
from .style import dash_lengths, distinct_styles
from .summary import last

__all__ = ["TAG_NAMES", "environments", "experiment_data", "tags_of"]

MOST_POINTS = 400
"""Of a longer curve so many points are drawn, evenly spaced."""

TAG_NAMES = {
    "val/acc": "validation accuracy",
    "test/acc": "test accuracy",
    "val/loss": "validation loss",
    "test/loss": "test loss",
    "client/acc_mean": "accuracy of the mean client",
    **DIAGNOSTICS,
    "fed/client_lr": "clients' learning rate",
    "time/client_steps_per_s": "client steps per second",
}
"""How the page calls the tags, in the order in which it offers them; others follow as they are."""

_AXES = ("round", "time/round_s", "comm/up_mb", "comm/down_mb", "comm/total_mb")


def tags_of(runs: Sequence[RunData], metric: str) -> list[str]:
    """The tags that can be drawn, those of the metric first."""
    there = dict.fromkeys(
        tag for run in runs for tag in run.metrics if tag not in _AXES and run.metrics[tag].any()
    )
    first = [f"val/{metric}", f"test/{metric}"]
    order = [*first, *(tag for tag in TAG_NAMES if tag not in first)]
    return [tag for tag in order if tag in there] + [tag for tag in there if tag not in order]


def _number(value: float) -> float:
    """Six digits are more than a screen shows."""
    return float(f"{value:.6g}")


def _curve(runs: Sequence[RunData], tag: str, x: str) -> dict[str, list[float]] | None:
    frame = curve(runs, tag, x)
    if frame.empty:
        return None
    if len(frame) > MOST_POINTS:
        step = (len(frame) - 1) / (MOST_POINTS - 1)
        frame = frame.iloc[[round(i * step) for i in range(MOST_POINTS)]]
    return {name: [_number(value) for value in frame[name]] for name in frame.columns}


def experiment_data(comparison: Comparison) -> dict[str, Any]:
    """One experiment's methods with their curves, and the final value of every seed."""
    ranked = list(comparison.summary["method"])
    styles = distinct_styles(ranked)
    tags = tags_of(comparison.runs, comparison.metric)
    methods = []
    for name in ranked:
        own = [run for run in comparison.runs if run.method == name]
        curves: dict[str, dict[str, Any]] = {}
        for tag in tags:
            drawn = {x: found for x in X_AXES if (found := _curve(own, tag, x))}
            if drawn:
                curves[tag] = drawn
        colour, dash = styles[name]
        methods.append(
            {
                "name": name,
                "label": display_name(name),
                "colour": colour,
                "dash": dash_lengths(dash),
                "curves": curves,
            }
        )
    tag = f"{comparison.compared}/{comparison.metric}"
    points = {
        name: [
            {"seed": run.seed, "value": _number(value)}
            for run in comparison.runs
            if run.method == name and math.isfinite(value := last(run, tag))
        ]
        for name in ranked
    }
    return {
        "name": comparison.experiment,
        "seeds": int(comparison.summary["seeds"].map(len).max()),
        "methods": methods,
        "finals": {
            "title": f"{TAG_NAMES.get(tag, tag)} after the last round",
            "methods": [name for name in ranked if points[name]],
            "points": points,
            "seeds": {name: sum(run.method == name for run in comparison.runs) for name in ranked},
        },
    }


def environments(runs: Sequence[RunData]) -> dict[str, dict[str, int]]:
    """How many runs each value of each entry of ``environment.json`` belongs to.

    A run that was resumed elsewhere counts for both places; one without the file, or with one that
    cannot be read, for ``not recorded``.
    """
    found: dict[str, dict[str, int]] = {}
    for run in runs:
        try:
            starts = json.loads((run.folder / FILE).read_text(encoding="utf-8"))
            flat = [flatten(start) for start in starts]
        except (OSError, ValueError, AttributeError, TypeError):
            flat = [{"commit": "not recorded"}]
        values: Mapping[str, dict[str, None]] = {}
        values = {key: {} for start in flat for key in start}
        for start in flat:
            for key, value in start.items():
                values[key][_text(value)] = None
        for key, texts in values.items():
            if key in ("first_round", "command"):
                continue
            counts = found.setdefault(key, {})
            for text in texts:
                counts[text] = counts.get(text, 0) + 1
    return found


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "unknown" if value is None else str(value)
