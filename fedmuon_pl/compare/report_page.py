"""The report: one HTML page that holds everything it needs, and the figures as files.

The curves are drawn in the reader's browser by Chart.js (MIT licence, carried in
``compare/page``), so that a method can be hidden and a value read off; nothing is fetched.
"""

import base64
import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from .comparison import Comparison
from .fairness import settings
from .figures import DIAGNOSTICS, X_AXES, draw_curves, draw_diagnostics, draw_finals
from .names import display_name
from .render import Grid
from .report_data import TAG_NAMES, environments, experiment_data, tags_of
from .runs import Problem, RunData
from .style import dash_lengths, distinct_styles

__all__ = ["write_report"]


def write_report(
    comparisons: Sequence[Comparison],
    folder: str | Path,
    *,
    left_out: Sequence[Problem] = (),
    partition: bool = True,
    title: str = "",
) -> Path:
    """Writes ``index.html``, and for each experiment its figures and tables.

    Args:
        comparisons: As of :func:`~fedmuon_pl.compare.comparison.compare_runs`.
        folder: Where to; made if it is not there.
        left_out: Runs that could not be read; the page names them.
        partition: Whether to draw who holds what, which loads each experiment's data.
        title: The page's; by default the experiments.

    Returns:
        The page.
    """
    folder = Path(folder)
    sections = []
    for number, comparison in enumerate(comparisons):
        own = folder / comparison.experiment if len(comparisons) > 1 else folder
        comparison.save(own, figures=False)
        _figures(comparison, own / "figures")
        picture = _partition(comparison.runs, own / "figures") if partition else None
        sections.append(_section(number, comparison, picture, own.relative_to(folder)))
    if left_out:
        items = "".join(f"<li>{escape(str(problem))}</li>" for problem in left_out)
        sections.append(f'<h2>Left out</h2><div class="notes"><ul>{items}</ul></div>')
    names = [comparison.experiment for comparison in comparisons]
    data = {"axes": X_AXES, "experiments": [experiment_data(one) for one in comparisons]}
    links = "".join(f'<a href="#experiment-{i}">{escape(name)}</a>' for i, name in enumerate(names))
    parts = {
        "title": escape(title or f"Comparison: {', '.join(names)}"),
        "contents": f"<nav>{links}</nav>" if len(names) > 1 else "",
        "style": _file("page.css"),
        "body": "\n".join(sections),
        "footer": "Written by <code>fedmuon report</code>. Curves by Chart.js (MIT licence), which "
        "this page carries: it needs no network.",
        "library": _file("chart.js"),
        # A tag inside a text could end the script.
        "data": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "script": _file("page.js"),
    }
    # In one pass: what was put in is not looked into again.
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("page.html"))
    path = folder / "index.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _file(name: str) -> str:
    return (resources.files("fedmuon_pl.compare") / "page" / name).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------
# Files beside the page


def _figures(comparison: Comparison, folder: Path) -> None:
    runs, metric = comparison.runs, comparison.metric
    draw_curves(runs, folder / "curves", metric=metric, against=tuple(X_AXES))
    draw_diagnostics(runs, folder / "diagnostics")
    if comparison.table[comparison.compared].abs().lt(float("inf")).any():
        draw_finals(runs, folder / "finals", metric=metric)


def _partition(runs: Sequence[RunData], folder: Path) -> bytes | str:
    """The picture of the first run's partition, or why there is none."""
    from .partition_command import load_data
    from .partition_report import partition_figure

    try:
        data = load_data(runs[0].folder / "config.yaml")
        title = f"{len(data.partition):,} clients, {type(data.partitioner).__name__}"
        paths = [
            partition_figure(
                data.partition,
                data.splits.labels,
                data.splits.num_classes,
                folder / f"partition.{kind}",
                title=title,
            )
            for kind in ("png", "pdf", "svg")
        ]
    except (OSError, ValueError) as error:
        return " ".join(str(error).split())
    return paths[0].read_bytes()


# ---------------------------------------------------------------------------------------------
# HTML


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        words = []
        for i, cell in enumerate(cells):
            kind = ' class="word long"' if len(cell) > 40 else ' class="word"' if i < left else ""
            words.append(f"<{tag}{kind}>{escape(cell)}</{tag}>")
        return f"<tr>{''.join(words)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="table"><table>{line(heads, "th")}{body}</table></div>'


def _grid(grid: Grid, heading: bool) -> str:
    title = f"<h3>{escape(grid.title)}</h3>" if heading else ""
    table = _table(grid.heads, grid.rows, grid.left)
    return f'{title}{table}<p class="soft">{escape(grid.caption)}</p>'


def _chips(methods: Sequence[str]) -> str:
    styles = distinct_styles(methods)
    parts = []
    for name in methods:
        colour, dash = styles[name]
        dashes = " ".join(f"{3 * length:g}" for length in dash_lengths(dash))
        line = (
            f'<svg viewBox="0 0 32 10"><line x1="1" y1="5" x2="31" y2="5" stroke="{colour}" '
            f'stroke-width="4" stroke-dasharray="{dashes}"/></svg>'
        )
        parts.append(
            f'<button type="button" aria-pressed="true" data-method="{escape(name)}">{line}'
            f"{escape(display_name(name))}</button>"
        )
    return f'<div class="chips" role="group" aria-label="methods">{"".join(parts)}</div>'


def _options(pairs: Sequence[tuple[str, str]]) -> str:
    return "".join(f'<option value="{escape(v)}">{escape(text)}</option>' for v, text in pairs)


def _controls(comparison: Comparison) -> str:
    runs = comparison.runs
    tags = [(tag, TAG_NAMES.get(tag, tag)) for tag in tags_of(runs, comparison.metric)]
    needs = {"round": "round", "comm/total_mb": "comm/total_mb", "seconds": "time/round_s"}
    axes = [(x, t) for x, t in X_AXES.items() if any(needs[x] in run.metrics for run in runs)]
    return (
        f'<div class="controls"><label>show <select class="tag">{_options(tags)}</select></label>'
        f'<label>against <select class="x">{_options(axes)}</select></label>'
        '<label><input type="checkbox" class="log"> logarithmic</label></div>'
    )


def _section(number: int, comparison: Comparison, picture: bytes | str | None, own: Path) -> str:
    runs = comparison.runs
    methods = list(comparison.summary["method"])
    main, *others = comparison.grids
    several = comparison.summary["seeds"].map(len).max() > 1
    band = (
        "Lines are means over the seeds, bands reach from the smallest to the greatest. "
        if several
        else "One seed: no bands. "
    )
    parts = [f'<section id="experiment-{number}"><h2>{escape(comparison.experiment)}</h2>']
    if comparison.statements:
        said = "".join(f"<p>{escape(line)}</p>" for line in comparison.statements)
        parts.append(f'<div class="said">{said}</div>')
    if comparison.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in comparison.notes)
        parts.append(
            f'<div class="notes"><p>Not everything is equal or complete:</p><ul>{items}</ul></div>'
        )
    parts.append(_chips(methods))
    parts.append(f"<h3>Curves</h3>{_controls(comparison)}")
    parts.append('<div class="chart"><canvas class="curves"></canvas></div>')
    parts.append(
        f'<p class="soft">{band}Click a method above to hide it; point at a curve, or touch it, '
        "for its values.</p>"
    )
    parts.append("<h3>After the last round</h3>")
    parts.append('<div class="chart"><canvas class="finals"></canvas></div>')
    parts.append('<p class="soft">A point is a seed, a stroke the mean.</p>')
    parts.append(f"<h3>Results</h3>{_grid(main, False)}")
    parts += [_grid(grid, True) for grid in others]
    if comparison.given:
        items = "".join(f"<li>{escape(line)}</li>" for line in comparison.given)
        parts.append(f"<h3>What each method was given</h3><ul>{items}</ul>")
    parts.append(_diagnostics(runs))
    parts.append(_partition_part(picture))
    parts.append(_settings(runs, methods))
    parts.append(_environment(runs))
    parts.append(_downloads(own))
    return "\n".join([*parts, "</section>"])


def _diagnostics(runs: Sequence[RunData]) -> str:
    tags = [tag for tag in DIAGNOSTICS if any(tag in run.metrics for run in runs)]
    figures = "".join(
        f"<figure><figcaption>{escape(DIAGNOSTICS[tag])}</figcaption>"
        f'<div class="chart"><canvas class="diagnostic" data-tag="{tag}"></canvas></div></figure>'
        for tag in tags
    )
    return f'<h3>Diagnostics</h3><div class="small">{figures}</div>' if tags else ""


def _partition_part(picture: bytes | str | None) -> str:
    if picture is None:
        return ""
    if isinstance(picture, str):
        return f'<h3>Who holds what</h3><p class="soft">No picture: {escape(picture)}</p>'
    text = base64.b64encode(picture).decode()
    image = f'<img alt="Class shares of every client" src="data:image/png;base64,{text}">'
    return f"<h3>Who holds what</h3>{image}"


def _settings(runs: Sequence[RunData], methods: Sequence[str]) -> str:
    table = settings(runs)[list(methods)]
    if table.empty:
        return ""
    heads = ["setting", *(display_name(name) for name in methods)]
    rows = [
        [str(key).replace(".init_args", ""), *(v.removeprefix("fedmuon_pl.") for v in values)]
        for key, *values in table.itertuples()
        if set(values) - {"", "null"}
    ]
    return (
        "<h3>Settings</h3>"
        '<p class="soft">What is not the same for all methods; everything else is.</p>'
        f"{_table(heads, rows)}"
    )


def _environment(runs: Sequence[RunData]) -> str:
    rows = []
    for key, counts in environments(runs).items():
        every = len(counts) == 1 and sum(counts.values()) == len(runs)
        texts = [t if every else f"{t} ({n} of {len(runs)} runs)" for t, n in counts.items()]
        rows.append([key.replace("packages.", ""), "; ".join(texts)])
    heads = ["", "value"]
    dirty = '<p class="soft">A + behind the commit: tracked files were changed since.</p>'
    table = _table(heads, rows, left=2)
    inner = f"<summary>Versions, commit, machine</summary>{table}{dirty}"
    return f"<h3>Environment</h3><details>{inner}</details>"


def _downloads(own: Path) -> str:
    where = f"<code>{escape(str(own / 'figures'))}</code>"
    return (
        f'<p class="soft">Every figure as PNG, PDF and SVG is in {where} beside this page, the '
        f"tables as Markdown, LaTeX and CSV in <code>{escape(str(own))}</code>.</p>"
    )
