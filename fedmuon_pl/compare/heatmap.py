"""Heat maps of grids with two settings: how sensitive a method is, at a glance."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .runs import RunData, read_runs

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

__all__ = ["draw_heat_maps", "heat_map", "heatmap_main"]


def heat_map(runs: Sequence[RunData], metric: str = "val/acc") -> "pd.DataFrame":
    """The last round's metric over a grid of two settings, mean over the seeds.

    Args:
        runs: The grid points of one algorithm of a plan, such as ``fedmuon@alpha=0.5,beta=0.9``.
        metric: A tag.

    Returns:
        Rows: the grid's first setting, ascending; columns: its second; empty where a run is
        missing or did not measure it.

    Raises:
        ConfigError: If a method's name has not two settings behind its ``@``.
    """
    import pandas as pd

    rows = []
    for run in runs:
        point = [part.partition("=") for part in run.method.partition("@")[2].split(",")]
        if len(point) != 2 or not all(sign for _, sign, _ in point):
            raise ConfigError(f"{run.folder}: {run.method} is no point of a grid of two settings")
        (first, _, a), (second, _, b) = point
        values = [] if metric not in run.metrics else run.metrics[metric].dropna().to_list()
        last = values[-1] if values else float("nan")
        rows.append({first: _number(a), second: _number(b), metric: last})
    frame = pd.DataFrame(rows)
    return frame.pivot_table(metric, first, second, aggfunc="mean", dropna=False)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def draw_heat_maps(
    runs: Sequence[RunData], stem: str | Path, *, metric: str = "val/acc"
) -> list[Path]:
    """Draws one map for each algorithm of the grids, on one scale.

    Args:
        runs: Grid points of any number of a plan's algorithms.
        stem: The pictures' path without a suffix.
        metric: A tag.

    Returns:
        The written PNG and PDF.

    Raises:
        ConfigError: If a run is no point of a grid of two settings.
    """
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(run.method.partition("@")[0] for run in runs))
    maps = {
        label: heat_map([r for r in runs if r.method.partition("@")[0] == label], metric)
        for label in labels
    }
    low = min(float(m.min(axis=None)) for m in maps.values())
    high = max(float(m.max(axis=None)) for m in maps.values())
    style: dict[Any, Any] = {"font.size": 8.0, "axes.titlesize": 8.5, "pdf.fonttype": 42}
    with matplotlib.rc_context(style):
        widths = [m.shape[1] + 1.2 for m in maps.values()]
        height = 0.9 + 0.36 * max(m.shape[0] for m in maps.values())
        figure = Figure(figsize=(0.52 * sum(widths), height), layout="constrained")
        grid: Any = figure.subplots(1, len(maps), squeeze=False, width_ratios=widths)
        for axes, (label, values) in zip(grid[0], maps.items(), strict=True):
            cells = values.to_numpy()
            axes.imshow(cells, cmap="viridis", vmin=low, vmax=high, aspect="auto", origin="lower")
            best = np.nanmax(cells)
            for (i, j), value in np.ndenumerate(cells):
                if np.isnan(value):
                    continue
                dark = (value - low) < 0.6 * (high - low)
                axes.text(
                    j, i, f"{value:.3f}".lstrip("0"), ha="center", va="center",
                    color="white" if dark else "black",
                    fontweight="bold" if value == best else "normal",
                )  # fmt: skip
            axes.set_xticks(range(values.shape[1]), [f"{v:g}" for v in values.columns])
            axes.set_yticks(range(values.shape[0]), [f"{v:g}" for v in values.index])
            axes.set_xlabel(values.columns.name)
            axes.set_ylabel(values.index.name)
            axes.set_title(label)
        experiment = ", ".join(dict.fromkeys(run.experiment for run in runs))
        figure.suptitle(f"{experiment}: {metric} after the last round", x=0.01, ha="left")
        paths = [Path(f"{stem}.png"), Path(f"{stem}.pdf")]
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(paths[0], dpi=200)
        figure.savefig(paths[1], metadata={"CreationDate": None})
    return paths


def heatmap_main(args: list[str]) -> int:
    """``fedmuon heatmap RUNS... -o STEM``.

    Args:
        args: The command line after ``heatmap``.

    Returns:
        The exit status: 0, or 2 after one sentence on the standard error.
    """
    parser = argparse.ArgumentParser(
        prog="fedmuon heatmap",
        description="Heat maps of sweeps over two settings, one for each algorithm of the plan. "
        "Example: fedmuon heatmap runs/sensitivity/mnist5k -o docs/sensitivity",
    )
    parser.add_argument("runs", nargs="+", help="folders of runs, searched for grid points")
    parser.add_argument("-o", "--output", required=True, help="path of the pictures, no suffix")
    parser.add_argument("--metric", default="val/acc", help="a tag (default: val/acc)")
    options = parser.parse_args(args)
    try:
        data, problems = read_runs(options.runs)
        for problem in problems:
            print(f"left out {problem}", file=sys.stderr)
        if not data:
            raise ConfigError(f"there is no finished run in {', '.join(options.runs)}")
        for path in draw_heat_maps(data, options.output, metric=options.metric):
            print(path)
    except ConfigError as e:
        print(f"fedmuon: {e}", file=sys.stderr)
        return 2
    return 0
