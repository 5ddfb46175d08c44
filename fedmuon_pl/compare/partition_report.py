"""What a partition looks like: a table for the terminal and a picture for the paper."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedmuon_pl.data.partition import Partition

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["effective_classes", "partition_figure", "partition_table"]

Labels = npt.NDArray[np.integer[Any]]
Counts = npt.NDArray[np.int64]

_CLIENTS_AT_ONCE = 65_536
_MOST_CLASS_COLUMNS = 12
_MOST_BARS = 40

# Paul Tol's "muted" scheme and its grey: ten colours that colour-blind readers tell apart.
_COLOURS = (
    *("#332288", "#88CCEE", "#44AA99", "#117733", "#999933"),
    *("#DDCC77", "#CC6677", "#882255", "#AA4499", "#BBBBBB"),
)


def effective_classes(counts: Counts) -> npt.NDArray[np.float64]:
    """The effective number of classes per client: exp of the entropy of its class shares.

    k classes with equal shares give k; one class gives 1. (Hill's number of order 1.)

    Args:
        counts: Samples per client and class, ``(clients, classes)``.

    Returns:
        Shape ``(clients,)``; NaN for a client without data.
    """
    totals = counts.sum(axis=1, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=1)
    return np.where(totals[:, 0] > 0, np.exp(entropy), np.nan)


def partition_table(
    partition: Partition, labels: Labels, num_classes: int, max_rows: int = 20
) -> Table:
    """Class counts per client, and a summary of all of them.

    Args:
        partition: Who holds what.
        labels: The class of every sample of the data set, shape ``(n,)``.
        num_classes: The number of classes. Up to twelve have a column each; of more, a client's
            largest ones are listed.
        max_rows: How many clients to show, the first ones. The summary is over all.

    Returns:
        A table for ``rich.print``; the caption counts clients without data and samples used.

    Raises:
        ValueError: If the labels do not fit the partition or ``num_classes``.
    """
    clients, sizes = len(partition), partition.sizes
    effective = np.empty(clients)
    overall = np.zeros(num_classes, np.int64)
    for start in range(0, clients, _CLIENTS_AT_ONCE):
        stop = min(start + _CLIENTS_AT_ONCE, clients)
        counts = partition.label_counts(labels, num_classes, start, stop)
        effective[start:stop] = effective_classes(counts)
        overall += counts.sum(axis=0)

    wide = num_classes <= _MOST_CLASS_COLUMNS
    table = Table(
        title="Samples per client and class",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("client", justify="right", no_wrap=True)
    table.add_column("samples", justify="right", no_wrap=True)
    table.add_column("eff.\nclasses", justify="right", no_wrap=True)
    if wide:
        for k in range(num_classes):
            table.add_column(str(k), justify="right", no_wrap=True)
    else:
        table.add_column("largest classes (class:samples)")

    def row(name: str, size: str, effect: float, counts: Counts | None) -> None:
        cells = [name, size, "" if np.isnan(effect) else f"{effect:.1f}"]
        if counts is None:
            table.add_row(*cells)
        elif wide:
            table.add_row(*cells, *(f"{c:,}" if c else "·" for c in counts))
        else:
            largest = [k for k in np.argsort(-counts, kind="stable")[:6] if counts[k]]
            more = int(np.count_nonzero(counts)) - len(largest)
            text = "  ".join(f"{k}:{counts[k]:,}" for k in largest)
            table.add_row(*cells, text + (f"  and {more} more" if more else ""))

    shown = min(max_rows, clients)
    for i, counts in enumerate(partition.label_counts(labels, num_classes, 0, shown)):
        row(str(i), f"{sizes[i]:,}", effective[i], counts)
    if shown < clients:
        row(f"+ {clients - shown:,}", "...", np.nan, None)
    table.add_section()
    filled = effective[~np.isnan(effective)]
    for name, of in (("min", np.min), ("median", np.median), ("max", np.max)):
        value = float(of(sizes)) if clients else 0.0
        row(name, f"{value:,.10g}", float(of(filled)) if filled.size else np.nan, None)
    table.add_section()
    total = effective_classes(overall[None])[0]
    row("all", f"{overall.sum():,}", float(total), overall)

    times = np.bincount(partition.indices, minlength=len(labels))
    table.caption = (
        f"{clients:,} clients, {np.count_nonzero(sizes == 0):,} without data; "
        f"{np.count_nonzero(times):,} of {len(labels):,} samples used"
    )
    if shared := np.count_nonzero(times > 1):
        table.caption += f", {shared:,} of them more than once"
    table.caption_justify = "left"
    return table


def partition_figure(
    partition: Partition,
    labels: Labels,
    num_classes: int,
    path: str | Path,
    title: str = "",
    max_clients: int = 1000,
) -> Path:
    """Draw who holds what: sizes above, classes below.

    Up to 40 clients and ten classes are stacked bars in the order of the client ids. More are a
    heat map of each client's class shares, the clients sorted by their largest class and by its
    share in them: what matters with a hundred clients is the mix, not the numbers of the clients.

    Args:
        partition: Who holds what.
        labels: The class of every sample of the data set, shape ``(n,)``.
        num_classes: The number of classes.
        path: The file to write; its suffix (``.png``, ``.pdf``, ``.svg``) is the format. Folders
            are made.
        title: Title of the picture.
        max_clients: Of more clients, so many are drawn, evenly spaced by id; the axis says so.

    Returns:
        The path.

    Raises:
        ValueError: If the labels do not fit, there is no client, or ``max_clients`` is below 1.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if max_clients < 1 or len(partition) < 1:
        raise ValueError(
            f"nothing to draw: max_clients={max_clients}, and the partition has {len(partition)} "
            f"clients"
        )
    ids = np.unique(np.linspace(0, len(partition) - 1, min(max_clients, len(partition))).round())
    some = Partition.from_lists([partition[int(i)] for i in ids])
    counts = some.label_counts(labels, num_classes)

    figure = Figure(figsize=(8.0, 4.5), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)  # no pyplot: no window, no backend and no global state is touched
    some_of = f" ({len(ids):,} of {len(partition):,})" if len(ids) < len(partition) else ""
    if len(counts) <= _MOST_BARS and num_classes <= len(_COLOURS):
        _bars(figure, counts, [str(int(i)) for i in ids], f"client{some_of}")
    else:
        _heat_map(figure, counts, f"clients{some_of}, sorted by their largest class")
    if title:
        figure.suptitle(title, fontsize=11)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _bars(figure: "Figure", counts: Counts, names: list[str], xlabel: str) -> None:
    """Stacked class counts, one bar per client."""
    from matplotlib.collections import PolyCollection

    axis = figure.subplots()
    x = np.arange(len(counts))
    below = np.zeros(len(counts), np.int64)
    for k, colour in zip(range(counts.shape[1]), _COLOURS, strict=False):
        # A collection a class: Axes.bar's rectangles, one each, take a second at every run's start.
        there = counts[:, k] > 0
        left, low, high = x[there] - 0.425, below[there], below[there] + counts[there, k]
        sides = [(left, low), (left + 0.85, low), (left + 0.85, high), (left, high)]
        corners = np.stack([np.stack(corner, -1) for corner in sides], 1)  # (bars, 4, 2)
        axis.add_collection(
            PolyCollection(
                list(corners), facecolors=colour, edgecolors="white", linewidths=0.3, label=str(k)
            ),
            autolim=False,
        )
        below += counts[:, k]
    axis.set_ylim(0, max(1.0, 1.05 * float(below.max())))
    every = 1 + (len(x) - 1) // 20
    axis.set_xticks(x[::every], names[::every])
    axis.set_xlim(-0.6, len(x) - 0.4)
    axis.set_xlabel(xlabel)
    axis.set_ylabel("samples")
    axis.spines[["top", "right"]].set_visible(False)
    handles, classes = axis.get_legend_handles_labels()
    figure.legend(  # read from top to bottom as the bars are
        handles[::-1], classes[::-1], title="class", loc="outside right center", frameon=False
    )


def _heat_map(figure: "Figure", counts: Counts, xlabel: str) -> None:
    """Class shares per client below, sizes above; clients sorted, those without data last."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    sizes = counts.sum(axis=1)
    shares = counts / np.maximum(sizes, 1)[:, None]
    largest = np.where(sizes > 0, shares.argmax(axis=1), counts.shape[1])
    order = np.lexsort((-shares.max(axis=1), largest))
    edges = np.arange(len(counts) + 1) - 0.5

    above, axis = figure.subplots(2, 1, sharex=True, height_ratios=(1, 4))
    above.stairs(sizes[order], edges, fill=True, color="#666666")
    above.set_ylabel("samples")
    above.set_ylim(0, max(1.0, 1.05 * float(sizes.max())))
    above.spines[["top", "right"]].set_visible(False)
    above.tick_params(labelbottom=False)
    # One hue, light to dark, for grey print and for all eyes. White is kept for "none of this
    # class": the smallest share that there is can be seen.
    hue = ListedColormap(colormaps["Blues"](np.linspace(0.2, 1.0, 256)))
    drawn = np.ma.masked_equal(shares[order].T, 0.0)
    image = axis.imshow(
        drawn, aspect="auto", interpolation="nearest", cmap=hue, vmin=0.0, vmax=shares.max() or 1.0
    )
    axis.set_ylabel("class")
    axis.set_xlabel(xlabel)
    if counts.shape[1] <= 20:
        axis.set_yticks(np.arange(counts.shape[1]))
    figure.colorbar(image, ax=axis, label="share of the client's samples", pad=0.01)
