"""Learning curves as in a paper: one colour per method everywhere, the seeds as a band.

The colours are those of Okabe and Ito, which colour-blind readers can tell apart. A method's colour
depends on its name only, so that it is the same in every figure of a project.
"""

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .names import display_name
from .runs import RunData
from .summary import summarise

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]
    from matplotlib.axes import Axes

__all__ = ["curve", "draw_curves", "method_style"]

_VERMILLION, _ORANGE, _BLUE, _GREEN = "#D55E00", "#E69F00", "#0072B2", "#009E73"
_PURPLE, _SKY, _GREY, _BLACK = "#CC79A7", "#56B4E9", "#7F7F7F", "#000000"
# Yellow, the palette's last, is too faint for lines on white; grey stands in for it.

_COLOURS = {
    "fedmuon": _VERMILLION,
    "local_muon": _ORANGE,
    "fedavg": _BLUE,
    "scaffold": _GREEN,
    "fedadam": _PURPLE,
    "fedprox": _SKY,
    "fedcm": _BLACK,
    "fedadamw": _GREY,
}
_PALETTE = (_VERMILLION, _ORANGE, _BLUE, _GREEN, _PURPLE, _SKY, _GREY, _BLACK)
_DASHES: tuple[Any, ...] = ("--", ":", "-.", (0, (6, 2)), (0, (3, 1, 1, 1, 1, 1)))

_STYLE: dict[Any, Any] = {  # Matplotlib types its keys as one long Literal
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 9.0,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "none",
}


def method_style(method: str) -> tuple[str, Any]:
    """A method's colour and line style, a function of its name alone.

    The known methods have fixed colours and solid lines; another one's come from a hash of its name
    and its line is dashed, so that it cannot be taken for a known one.
    """
    if method in _COLOURS:
        return _COLOURS[method], "-"
    number = zlib.crc32(method.encode())
    colour = _PALETTE[number % len(_PALETTE)]
    return colour, _DASHES[number // len(_PALETTE) % len(_DASHES)]


def curve(
    runs: Sequence[RunData], y: str, x: str = "round", band: Literal["minmax", "sd"] = "minmax"
) -> "pd.DataFrame":
    """One method's curve: columns ``x``, ``mean``, ``low``, ``high``, a row per measured round.

    Only rounds that every seed has measured count, so that the mean is over the same seeds all
    along. ``x`` is averaged over the seeds; for ``round`` it is the number of rounds done.

    Args:
        runs: The seeds of one method.
        y: A tag.
        x: ``round``, or a tag such as ``comm/total_mb``.
        band: Smallest to greatest, or one sample standard deviation to each side.
    """
    import pandas as pd

    columns = ["x", "mean", "low", "high"]
    if any(y not in run.metrics or x not in run.metrics for run in runs):
        return pd.DataFrame(columns=columns, dtype=float)
    ys = pd.concat([run.metrics.set_index("round")[y] for run in runs], axis=1)
    xs = pd.concat([run.metrics.set_index("round", drop=False)[x] for run in runs], axis=1)
    both = ys.replace([math.inf, -math.inf], math.nan).notna().all(axis=1)
    both &= xs.notna().all(axis=1)
    ys, xs = ys[both], xs[both]
    mean = ys.mean(axis=1)
    if band == "sd":
        half = ys.std(axis=1, ddof=1).fillna(0.0)
        low, high = mean - half, mean + half
    else:
        low, high = ys.min(axis=1), ys.max(axis=1)
    across = xs.mean(axis=1) + (1 if x == "round" else 0)
    return pd.DataFrame(dict(zip(columns, (across, mean, low, high), strict=True)))


_METRIC_NAMES = {"acc": "accuracy", "loss": "loss", "ppl": "perplexity"}


def draw_curves(
    runs: Sequence[RunData],
    stem: str | Path,
    *,
    metric: str = "acc",
    band: Literal["minmax", "sd"] = "minmax",
    title: str = "",
) -> list[Path]:
    """Draws validation and test curves against rounds and communicated megabytes.

    Args:
        runs: The runs of one experiment, any methods and seeds.
        stem: The pictures' path without a suffix.
        metric: ``acc`` for ``val/acc`` and ``test/acc``; another one likewise.
        band: What the band around the mean shows (see :func:`curve`).
        title: Above the figure; by default the experiment.

    Returns:
        The written PNG and PDF.

    Raises:
        ValueError: If no run has the metric.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    tags = [
        tag for tag in (f"val/{metric}", f"test/{metric}") if any(tag in r.metrics for r in runs)
    ]
    axes_x = [x for x in ("round", "comm/total_mb") if any(x in run.metrics for run in runs)]
    if not tags:
        raise ValueError(f"no run has val/{metric} or test/{metric}")
    ranked = list(summarise(runs, metric=metric)["method"])
    methods = {name: [run for run in runs if run.method == name] for name in ranked}
    styles = _distinct_styles(ranked)
    word = _METRIC_NAMES.get(metric, metric)

    with matplotlib.rc_context(_STYLE):
        size = (0.4 + 3.3 * len(axes_x), 0.75 + 2.45 * len(tags))
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        grid: Any = figure.subplots(
            len(tags), len(axes_x), squeeze=False, sharex="col", sharey="row"
        )
        for i, tag in enumerate(tags):
            for j, x in enumerate(axes_x):
                axes: Axes = grid[i][j]
                for name in reversed(ranked):  # the best lies on top
                    frame = curve(methods[name], tag, x, band)
                    colour, dash = styles[name]
                    xs, mean = frame["x"].to_numpy(), frame["mean"].to_numpy()
                    low, high = frame["low"].to_numpy(), frame["high"].to_numpy()
                    axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0)
                    marker = "o" if len(frame) == 1 else ""
                    axes.plot(xs, mean, color=colour, linestyle=dash, marker=marker, markersize=3)
                axes.margins(x=0.01)
                if j == 0:
                    split = {"val": "validation", "test": "test"}[tag.split("/")[0]]
                    axes.set_ylabel(f"{split} {word}")
                if i == len(tags) - 1:
                    axes.set_xlabel({"round": "round"}.get(x, "communicated MB"))
                if x == "round":
                    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        handles = [
            Line2D([], [], color=styles[name][0], linestyle=styles[name][1]) for name in ranked
        ]
        figure.legend(
            handles,
            [display_name(name) for name in ranked],
            loc="outside lower center",
            ncols=min(len(ranked), 5 if len(axes_x) > 1 else 3),
            frameon=False,
            handlelength=1.8,
            columnspacing=1.6,
            borderpad=0.0,
        )
        figure.suptitle(title or _title(runs, band), fontsize=9, x=0.01, ha="left")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, for both files
        paths = [Path(f"{stem}.png"), Path(f"{stem}.pdf")]
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(paths[0], dpi=200)
        figure.savefig(paths[1], metadata={"CreationDate": None})
    return paths


def _title(runs: Sequence[RunData], band: str) -> str:
    methods = [run.method for run in runs]
    seeds = sorted({methods.count(method) for method in methods})
    experiment = ", ".join(dict.fromkeys(run.experiment for run in runs))
    if seeds[-1] < 2:
        return f"{experiment}, one seed"
    spread = "smallest to greatest" if band == "minmax" else "± one standard deviation"
    count = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    return f"{experiment}: mean of {count} seeds, band: {spread}"


def _distinct_styles(methods: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Each method's own style; where two would look the same, the later gets another dash."""
    styles: dict[str, tuple[str, Any]] = {}
    for name in sorted(methods):
        colour, dash = method_style(name)
        for other in _DASHES:
            if (colour, dash) not in styles.values():
                break
            dash = other
        styles[name] = (colour, dash)
    return styles
