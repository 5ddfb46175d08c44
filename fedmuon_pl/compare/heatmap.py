"""Heat maps of grids with two settings: how sensitive a method is, at a glance."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .console import CommandParser, guarded, parsed
from .names import higher_is_better
from .render import seeds_text
from .runs import RunData, read_runs
from .summary import last

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

__all__ = ["draw_heat_maps", "heat_map", "heatmap_main"]


def heat_map(runs: Sequence[RunData], metric: str = "val/acc") -> "pd.DataFrame":
    """The last round's metric over a grid of two settings, mean over the seeds.

    Args:
        runs: The grid points of one algorithm in one experiment, such as
            ``fedmuon@alpha=0.5,beta=0.9``.
        metric: A tag.

    Returns:
        Rows: the grid's first setting, ascending; columns: its second; empty where a seed that
        another point has is missing, or did not measure it after its last round, or diverged.

    Raises:
        ConfigError: If a method's name has not two settings behind its ``@``.
    """
    import pandas as pd

    cells: dict[tuple[float | str, float | str], dict[int, float]] = {}
    names = ("", "")
    for run in runs:
        point = [part.partition("=") for part in run.method.partition("@")[2].split(",")]
        if len(point) != 2 or not all(sign for _, sign, _ in point):
            raise ConfigError(f"{run.folder}: {run.method} is no point of a grid of two settings")
        (first, _, a), (second, _, b) = point
        names = (first, second)
        cells.setdefault((_number(a), _number(b)), {})[run.seed] = last(run, metric)
    seeds = {run.seed for run in runs}
    means = {
        place: math.fsum(values.values()) / len(values)
        if values.keys() == seeds and all(map(math.isfinite, values.values()))
        else math.nan
        for place, values in cells.items()
    }
    order = [
        sorted({place[i] for place in cells}, key=lambda v: (isinstance(v, str), v)) for i in (0, 1)
    ]
    return pd.DataFrame(
        [[means.get((a, b), math.nan) for b in order[1]] for a in order[0]],
        index=pd.Index(order[0], name=names[0]),
        columns=pd.Index(order[1], name=names[1]),
    )


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def draw_heat_maps(
    runs: Sequence[RunData], stem: str | Path, *, metric: str = "val/acc"
) -> list[Path]:
    """Draws one map for each algorithm and experiment of the grids, on one scale.

    The best cell is bold, but not of a test metric, by which nothing is chosen.

    Args:
        runs: Grid points of any number of a plan's algorithms.
        stem: The pictures' path without a suffix.
        metric: A tag.

    Returns:
        The written PNG and PDF.

    Raises:
        ConfigError: If a run is no point of a grid of two settings, or no cell has a value.
    """
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    groups: dict[tuple[str, str], list[RunData]] = {}
    for run in runs:
        groups.setdefault((run.experiment, run.method.partition("@")[0]), []).append(run)
    experiments = list(dict.fromkeys(experiment for experiment, _ in groups))
    maps = {
        label if len(experiments) == 1 else f"{experiment}, {label}": heat_map(own, metric)
        for (experiment, label), own in groups.items()
    }
    if not any(m.notna().to_numpy().any() for m in maps.values()):
        raise ConfigError(f"no point of the grid has {metric} after the last round of every seed")
    chosen = not metric.startswith(("test/", "client/"))
    extreme = np.nanmax if higher_is_better(metric) else np.nanmin
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
            best = extreme(cells) if chosen and not np.isnan(cells).all() else None
            for (i, j), value in np.ndenumerate(cells):
                if np.isnan(value):
                    continue
                dark = (value - low) < 0.6 * (high - low)
                axes.text(
                    j, i, f"{value:.3f}".lstrip("0"), ha="center", va="center",
                    color="white" if dark else "black",
                    fontweight="bold" if value == best else "normal",
                )  # fmt: skip
            axes.set_xticks(range(values.shape[1]), list(map(_text, values.columns)))
            axes.set_yticks(range(values.shape[0]), list(map(_text, values.index)))
            axes.set_xlabel(values.columns.name)
            axes.set_ylabel(values.index.name)
            axes.set_title(label)
        words = f"{metric} after the last round, {seeds_text(sorted({r.seed for r in runs}))}"
        figure.suptitle(f"{', '.join(experiments)}: {words}", x=0.01, ha="left")
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
    parser = CommandParser(
        prog="fedmuon heatmap",
        description="Heat maps of sweeps over two settings, one for each algorithm of the plan. "
        "Example: fedmuon heatmap runs/sensitivity/mnist5k -o docs/sensitivity",
    )
    parser.add_argument("runs", nargs="+", help="folders of runs, searched for grid points")
    parser.add_argument("-o", "--output", required=True, help="path of the pictures, no suffix")
    parser.add_argument("--metric", default="val/acc", help="a tag (default: val/acc)")
    options = parsed(parser, args)
    if isinstance(options, int):
        return options

    def work() -> int:
        data, problems = read_runs(options.runs)
        for problem in problems:
            print(f"left out {problem}", file=sys.stderr)
        if not data:
            raise ConfigError(f"there is no finished run in {', '.join(options.runs)}")
        for path in draw_heat_maps(data, options.output, metric=options.metric):
            print(path)
        return 0

    return guarded("heatmap", work)
