"""Figures as in a paper, each as PNG, PDF and SVG: curves, final values, diagnostics."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .names import display_name
from .runs import RunData
from .style import distinct_styles
from .summary import last, summarise

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DIAGNOSTICS", "X_AXES", "curve", "draw_curves", "draw_diagnostics", "draw_finals"]

X_AXES = {"round": "round", "comm/total_mb": "communicated MB", "seconds": "seconds of training"}
"""What a curve may be drawn against, and how its axis is called."""

DIAGNOSTICS = {
    "fed/client_drift": "client drift",
    "fed/alignment": "alignment with the last update",
    "fed/update_norm": "norm of the global update",
    "fed/orthogonality": "orthogonality of the mean update",
    "client/acc_worst10": "accuracy of the worst tenth",
    "train/loss": "training loss",
}
"""The tags of :func:`draw_diagnostics`, and what each is called."""

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
    "svg.hashsalt": "fedmuon_pl",  # the same picture is the same file
}


def curve(
    runs: Sequence[RunData], y: str, x: str = "round", band: Literal["minmax", "sd"] = "minmax"
) -> "pd.DataFrame":
    """One method's curve: columns ``x``, ``mean``, ``low``, ``high``, a row per measured round.

    Only rounds that every seed has measured count, so that the mean is over the same seeds all
    along. ``x`` is averaged over the seeds; for ``round`` it is the number of rounds done.

    Args:
        runs: The seeds of one method.
        y: A tag.
        x: ``round``, ``seconds`` (the time of the rounds so far) or a tag such as
            ``comm/total_mb``.
        band: Smallest to greatest, or one sample standard deviation to each side.
    """
    import pandas as pd

    columns = ["x", "mean", "low", "high"]
    across = [_across(run, x) for run in runs]
    if any(
        values is None or y not in run.metrics for values, run in zip(across, runs, strict=True)
    ):
        return pd.DataFrame(columns=columns, dtype=float)
    ys = pd.concat([run.metrics.set_index("round")[y] for run in runs], axis=1)
    xs = pd.concat([values for values in across if values is not None], axis=1)
    both = ys.replace([math.inf, -math.inf], math.nan).notna().all(axis=1)
    both &= xs.notna().all(axis=1)
    ys, xs = ys[both], xs[both]
    mean = ys.mean(axis=1)
    if band == "sd":
        half = ys.std(axis=1, ddof=1).fillna(0.0)
        low, high = mean - half, mean + half
    else:
        low, high = ys.min(axis=1), ys.max(axis=1)
    return pd.DataFrame(dict(zip(columns, (xs.mean(axis=1), mean, low, high), strict=True)))


def _across(run: RunData, x: str) -> "pd.Series | None":
    """The values on the x-axis, by round."""
    metrics = run.metrics.set_index("round", drop=False)
    if x == "round":
        return metrics["round"] + 1
    if x == "seconds":
        return metrics["time/round_s"].cumsum() if "time/round_s" in metrics else None
    return metrics.get(x)


_METRIC_NAMES = {"acc": "accuracy", "loss": "loss", "ppl": "perplexity"}


def draw_curves(
    runs: Sequence[RunData],
    stem: str | Path,
    *,
    metric: str = "acc",
    band: Literal["minmax", "sd"] = "minmax",
    title: str = "",
    against: Sequence[str] = ("round", "comm/total_mb"),
) -> list[Path]:
    """Draws validation and test curves.

    Args:
        runs: The runs of one experiment, any methods and seeds.
        stem: The pictures' path without a suffix.
        metric: ``acc`` for ``val/acc`` and ``test/acc``; another one likewise.
        band: What the band around the mean shows (see :func:`curve`).
        title: Above the figure; by default the experiment.
        against: The x-axes, of :data:`X_AXES`; one that nothing was measured for is left out.

    Returns:
        The written PNG, PDF and SVG.

    Raises:
        ValueError: If no run has the metric.
    """
    tags = [
        tag for tag in (f"val/{metric}", f"test/{metric}") if any(tag in r.metrics for r in runs)
    ]
    if not tags:
        raise ValueError(f"no run has val/{metric} or test/{metric}")
    axes_x = [x for x in against if any(_across(run, x) is not None for run in runs)]
    methods = _ranked(runs, metric)
    word = _METRIC_NAMES.get(metric, metric)
    size = (0.4 + 3.3 * len(axes_x), 0.75 + 2.45 * len(tags))
    with _figure(size, stem, title or _title(runs, band)) as (figure, paths):
        grid: Any = figure.subplots(
            len(tags), len(axes_x), squeeze=False, sharex="col", sharey="row"
        )
        for i, tag in enumerate(tags):
            for j, x in enumerate(axes_x):
                _draw(grid[i][j], methods, tag, x, band)
                if j == 0:
                    split = {"val": "validation", "test": "test"}[tag.split("/")[0]]
                    grid[i][j].set_ylabel(f"{split} {word}")
                if i == len(tags) - 1:
                    grid[i][j].set_xlabel(X_AXES.get(x, x))
        _legend(figure, list(methods), 5 if len(axes_x) > 1 else 3)
    return paths


def draw_diagnostics(
    runs: Sequence[RunData], stem: str | Path, *, band: Literal["minmax", "sd"] = "minmax"
) -> list[Path]:
    """Draws those of :data:`DIAGNOSTICS` that were measured, against rounds.

    Returns:
        The written PNG, PDF and SVG; nothing where nothing was measured.
    """
    tags = [tag for tag in DIAGNOSTICS if any(tag in run.metrics for run in runs)]
    if not tags:
        return []
    columns = min(3, len(tags))
    rows = -(-len(tags) // columns)
    methods = _ranked(runs, "acc")
    size = (0.4 + 2.6 * columns, 0.75 + 2.0 * rows)
    with _figure(size, stem, _title(runs, band)) as (figure, paths):
        grid: Any = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for axes, tag in zip(grid.flat, tags, strict=False):
            _draw(axes, methods, tag, "round", band)
            axes.set_title(DIAGNOSTICS[tag], loc="left")
        for axes in list(grid.flat)[len(tags) :]:
            axes.set_visible(False)
        for axes in list(grid.flat)[len(tags) - columns : len(tags)]:
            axes.set_xlabel("round")
            axes.tick_params(labelbottom=True)
        _legend(figure, list(methods), 5 if columns > 1 else 3)
    return paths


def draw_finals(
    runs: Sequence[RunData], stem: str | Path, *, metric: str = "acc", title: str = ""
) -> list[Path]:
    """Draws the metric after the last round: a point a seed, a stroke for the mean of all.

    A method of which a seed has no finite value has no stroke, and says so.

    On the test set, or on the validation data where nothing was tested.

    Returns:
        The written PNG, PDF and SVG.

    Raises:
        ValueError: If no run has the metric after its last round.
    """
    methods = _ranked(runs, metric)
    finals: dict[str, list[float]] = {}
    tag = ""
    for tag in (f"test/{metric}", f"val/{metric}"):
        finals = {
            name: [value for run in own if math.isfinite(value := last(run, tag))]
            for name, own in methods.items()
        }
        if any(finals.values()):
            break
    else:
        raise ValueError(f"no run has a finite test/{metric} or val/{metric} after its last round")
    styles = distinct_styles(list(methods))
    size = (4.6, 0.75 + 0.36 * len(methods))
    with _figure(size, stem, title or _title(runs, None)) as (figure, paths):
        axes: Axes = figure.subplots()
        for place, (name, values) in enumerate(finals.items()):
            spread = [0.09 * (2 * i - len(values) + 1) / max(1, len(values) - 1)
                      for i in range(len(values))]  # fmt: skip
            axes.plot(values, [place + s for s in spread], "o", color=styles[name][0],
                      markersize=4.5, alpha=0.75, markeredgewidth=0)  # fmt: skip
            if values and len(values) == len(methods[name]):
                mean = math.fsum(values) / len(values)
                axes.plot([mean, mean], [place - 0.3, place + 0.3], color=styles[name][0], lw=2)
        names = [
            display_name(name)
            + (f" ({len(v)} of {len(methods[name])} seeds)" if len(v) < len(methods[name]) else "")
            for name, v in finals.items()
        ]
        axes.set_yticks(range(len(finals)), names)
        axes.set_ylim(len(finals) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        split = {"val": "validation", "test": "test"}[tag.split("/")[0]]
        axes.set_xlabel(f"{split} {_METRIC_NAMES.get(metric, metric)} after the last round")
    return paths


# ---------------------------------------------------------------------------------------------


def _ranked(runs: Sequence[RunData], metric: str) -> dict[str, list[RunData]]:
    """Each method's runs, the best first."""
    names = summarise(runs, metric=metric)["method"]
    return {name: [run for run in runs if run.method == name] for name in names}


def _draw(
    axes: "Axes",
    methods: dict[str, list[RunData]],
    tag: str,
    x: str,
    band: Literal["minmax", "sd"],
) -> None:
    from matplotlib.ticker import MaxNLocator

    styles = distinct_styles(list(methods))
    for name in reversed(methods):  # the best lies on top
        frame = curve(methods[name], tag, x, band)
        colour, dash = styles[name]
        xs, mean = frame["x"].to_numpy(), frame["mean"].to_numpy()
        low, high = frame["low"].to_numpy(), frame["high"].to_numpy()
        axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0)
        marker = "o" if len(frame) == 1 else ""
        axes.plot(xs, mean, color=colour, linestyle=dash, marker=marker, markersize=3)
    axes.margins(x=0.01)
    if x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))


def _legend(figure: "Figure", methods: Sequence[str], columns: int) -> None:
    from matplotlib.lines import Line2D

    styles = distinct_styles(methods)
    handles = [Line2D([], [], color=styles[name][0], linestyle=styles[name][1]) for name in methods]
    names = [display_name(name) for name in methods]
    # A letter of 9 points is about 0.075 inches wide; the line and the gap are worth seven.
    fit = int(figure.get_figwidth() / 0.075) // (max(map(len, names), default=0) + 7)
    figure.legend(
        handles,
        names,
        loc="outside lower center",
        ncols=max(1, min(len(methods), columns, fit)),
        frameon=False,
        handlelength=1.8,
        columnspacing=1.6,
        borderpad=0.0,
    )


@contextmanager
def _figure(
    size: tuple[float, float], stem: str | Path, title: str
) -> "Iterator[tuple[Figure, list[Path]]]":
    """A figure in the paper's style, written as PNG, PDF and SVG when its block ends."""
    import matplotlib
    from matplotlib.figure import Figure

    paths = [Path(f"{stem}.{kind}") for kind in ("png", "pdf", "svg")]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        yield figure, paths
        figure.suptitle(title, fontsize=9, x=0.01, ha="left")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, for all files
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(paths[0], dpi=200)
        figure.savefig(paths[1], metadata={"CreationDate": None})
        figure.savefig(paths[2], metadata={"Date": None})


def _title(runs: Sequence[RunData], band: str | None) -> str:
    methods = [run.method for run in runs]
    seeds = sorted({methods.count(method) for method in methods})
    experiment = ", ".join(dict.fromkeys(run.experiment for run in runs))
    if seeds[-1] < 2:
        return f"{experiment}, one seed"
    count = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    if band is None:
        return f"{experiment}: {count} seeds and their mean"
    spread = "smallest to greatest" if band == "minmax" else "± one standard deviation"
    return f"{experiment}: mean of {count} seeds, band: {spread}"
