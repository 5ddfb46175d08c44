"""A comparison as a terminal's tables, Markdown, LaTeX (booktabs) and CSV.

Every function takes the rows of :func:`~fedmuon_pl.compare.summary.method_table`; those of
:func:`~fedmuon_pl.compare.paired.paired_differences` have their own.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .names import display_name
from .summary import Stat

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]
    from rich.table import Table

__all__ = [
    "Grid",
    "grids",
    "latex_table",
    "markdown_table",
    "pair_grid",
    "seeds_text",
    "to_csv",
    "to_latex",
    "to_markdown",
    "to_rich",
]


@dataclass(frozen=True)
class Grid:
    """A table of texts: the first ``left`` columns are words, the rest numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    left: int = 1


def seeds_text(seeds: Sequence[int]) -> str:
    """``seed 0`` or ``seeds 0, 1, 2``."""
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


_QUALITY = {
    "test": "test {metric}",
    "worst10": "worst 10 %",
    "val": "val {metric}",
    "best_val": "best val {metric}",
    "area": "mean val",
}
_COST = {"total_mb": "sent MB", "seconds": "seconds"}
_TARGET = {"rounds_to_target": "rounds", "mb_to_target": "sent MB", "seconds_to_target": "seconds"}


def _cells(row: Any, names: Iterable[str]) -> list[str]:  # noqa: ANN401
    """Method, number of seeds, and a text for each number."""
    n = len(row["seeds"])
    cells = [display_name(row["method"]), str(n)]
    for name in names:
        mean, sd = float(row[f"{name}_mean"]), float(row[f"{name}_sd"])
        digits = 4 if name in _QUALITY else 1
        cells.append(Stat(int(row[f"{name}_n"]), mean, sd).text(digits, n, name not in _COST))
    return cells


def grids(
    summary: "pd.DataFrame", *, metric: str = "acc", target: float | None = None
) -> list[Grid]:
    """A table per experiment, and with a target another one of what it took to reach it.

    A test column that nothing was measured for is left out.
    """
    found = []
    for experiment, own in summary.groupby("experiment", sort=False):
        rows = [row for _, row in own.iterrows()]
        names = {
            name: head.format(metric=metric)
            for name, head in {**_QUALITY, **_COST}.items()
            if name not in ("test", "worst10") or own[f"{name}_n"].any()
        }
        heads = ["method", "seeds", *names.values()]
        caption = _caption(rows, heads, metric)
        found.append(Grid(str(experiment), heads, [_cells(row, names) for row in rows], caption))
        if target is not None:
            caption = f"Until val {metric} first reached {target:g}; (k/n) where only k seeds did."
            title = f"{experiment}: to val {metric} {target:g}"
            heads = ["method", "seeds", *_TARGET.values()]
            found.append(Grid(title, heads, [_cells(row, _TARGET) for row in rows], caption))
    return found


def _caption(rows: Sequence[Any], heads: Sequence[str], metric: str) -> str:
    rounds = sorted({round(row["rounds_mean"]) for row in rows})
    seeds = sorted({seed for row in rows for seed in row["seeds"]})
    after = "after the last round" if len(rounds) > 1 else f"after {rounds[0]} rounds"
    spread = "Mean ± sample standard deviation over the" if len(seeds) > 1 else "Values of"
    tested = any(row["test_n"] for row in rows)
    order = f"sorted by test {metric}, which chose nothing" if tested else f"sorted by val {metric}"
    words = [f"{spread} {seeds_text(seeds)}, {after}; {order}."]
    if "worst 10 %" in heads:
        words.append("Worst 10 %: mean test accuracy of the worst tenth of the clients.")
    words.append(f"Mean val: val {metric} averaged over the rounds (area under its curve).")
    words.append("Sent MB: in all, both ways.")
    words.append("Seconds: all rounds by the clock, which runs side by side on a machine share.")
    return " ".join(words)


# ---------------------------------------------------------------------------------------------
# Paired differences


def _number(value: float, digits: int, sign: bool = True) -> str:
    return "-" if math.isnan(value) else f"{value:{'+' if sign else ''}.{digits}f}"


def _p(value: float) -> str:
    return "-" if math.isnan(value) else "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def pair_grid(pairs: "pd.DataFrame", name: str, confidence: float = 0.95) -> Grid:
    """One experiment's paired differences as a table.

    Args:
        pairs: Rows of :func:`~fedmuon_pl.compare.paired.paired_differences`.
        name: What was compared.
        confidence: As given there.
    """
    percent = f"{100 * confidence:.3g} %"
    rows = []
    for row in pairs.itertuples():
        verdict = row.reason or ("yes" if row.significant else "no")
        between = "-" if math.isnan(row.low) else f"{row.low:+.4f} to {row.high:+.4f}"
        names = f"{display_name(str(row.method))} − {display_name(str(row.other))}"  # noqa: RUF001
        p = (_p(row.p), _p(row.p_holm))
        rows.append([names, str(row.n), _number(row.mean, 4), between, *p, verdict])
    heads = ["difference", "seeds", name, f"{percent} interval", "p", "p (Holm)", "significant"]
    caption = (
        "Paired by seed (same data, cohorts and initial weights). Interval: Student's t, of each "
        f"pair alone. p (Holm): adjusted for {pairs['p'].notna().sum()} pairs."
    )
    return Grid("Paired differences", heads, rows, caption)


# ---------------------------------------------------------------------------------------------
# Forms


def to_rich(grid: Grid) -> "Table":
    """For a terminal."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=grid.title,
        caption=grid.caption,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for i, head in enumerate(grid.heads):
        left = i < grid.left
        table.add_column(head, justify="left" if left else "right", no_wrap=left)
    for line in grid.rows:
        table.add_row(*line)
    return table


def markdown_table(heads: Sequence[str], table: Sequence[Sequence[str]], left: int = 1) -> str:
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


def to_markdown(tables: Sequence[Grid]) -> str:
    """As Markdown, a heading for each table where there are several."""
    parts = []
    for grid in tables:
        if len(tables) > 1:
            parts.append(f"### {grid.title}\n")
        parts.append(markdown_table(grid.heads, grid.rows, grid.left))
        parts.append(grid.caption + "\n")
    return "\n".join(parts)


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "−": "$-$", "<": "$<$", ">": "$>$",  # noqa: RUF001
}  # fmt: skip


def latex_table(heads: Sequence[str], table: Sequence[Sequence[str]], left: int = 1) -> str:
    """A LaTeX ``tabular`` with the rules of package booktabs."""

    def line(cells: Sequence[str]) -> str:
        texts = ["".join(_LATEX.get(letter, letter) for letter in cell) for cell in cells]
        return " & ".join(texts) + r" \\"

    columns = "l" * left + "r" * (len(heads) - left)
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            line(heads),
            r"\midrule",
            *map(line, table),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def to_latex(tables: Sequence[Grid]) -> str:
    """As LaTeX tables with captions; they need the package booktabs."""
    parts = []
    for grid in tables:
        caption = "".join(_LATEX.get(letter, letter) for letter in grid.caption)
        title = "".join(_LATEX.get(letter, letter) for letter in grid.title)
        parts.append(
            "\\begin{table}\n\\centering\n\\small\n"
            f"\\caption{{{title}. {caption}}}\n{latex_table(grid.heads, grid.rows, grid.left)}\n"
            "\\end{table}\n"
        )
    return "% needs \\usepackage{booktabs}\n" + "\n".join(parts)


def to_csv(summary: "pd.DataFrame") -> str:
    """With full precision: a mean, a standard deviation and a count for each number."""
    seeds = summary["seeds"].map(lambda values: " ".join(map(str, values)))
    return str(summary.assign(seeds=seeds).to_csv(index=False, lineterminator="\n"))
