"""One experiment's comparison, shown and written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.text import Text

from ..errors import ConfigError
from . import render
from .console import write
from .fairness import differences
from .figures import draw_curves, draw_diagnostics
from .names import higher_is_better
from .paired import paired_differences, statements
from .runs import RunData
from .summary import method_table, run_table, unmeasured
from .tensorboard_images import write_pages
from .trials import choose_trials

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

__all__ = ["Comparison", "Format", "compare_runs"]

Format = Literal["terminal", "markdown", "latex", "csv"]


@dataclass(frozen=True, eq=False)
class Comparison:
    """One experiment's numbers, as DataFrames, and what is to be said about them.

    Attributes:
        experiment: Its name.
        runs: What is compared.
        metric: ``acc`` for ``val/acc`` and ``test/acc``.
        target: A value of the validation metric, or None.
        table: A row per run (:func:`~fedmuon_pl.compare.summary.run_table`).
        summary: A row per method (:func:`~fedmuon_pl.compare.summary.method_table`).
        compared: The column that the differences are of: ``test``, or ``val`` without a test.
        pairs: A row per pair (:func:`~fedmuon_pl.compare.paired.paired_differences`).
        statements: What is significant, in words.
        notes: What makes the comparison unfair or incomplete.
        given: How many trials each method had and what chose among them, in words.
    """

    experiment: str
    runs: Sequence[RunData]
    metric: str
    target: float | None
    table: "pd.DataFrame"
    summary: "pd.DataFrame"
    compared: str
    pairs: "pd.DataFrame"
    statements: Sequence[str]
    notes: Sequence[str]
    given: Sequence[str] = ()

    @property
    def grids(self) -> list[render.Grid]:
        """The table of the methods, and that of the pairs where there are any."""
        tables = render.grids(self.summary, metric=self.metric, target=self.target)
        if len(self.pairs) and self.pairs["n"].max() > 1:
            tables.append(render.pair_grid(self.pairs, f"{self.compared} {self.metric}"))
        return tables

    def text(self, form: Format) -> str:
        """All of it as Markdown or LaTeX, or the summary as CSV."""
        if form == "csv":
            return render.to_csv(self.summary)
        if form == "latex":
            said = [*self.statements, *self.given, *(f"note: {note}" for note in self.notes)]
            return render.to_latex(self.grids) + "".join(f"% {line}\n" for line in said)
        parts = [render.to_markdown(self.grids)]
        parts += [" ".join(self.statements) + "\n"] if self.statements else []
        if self.given:
            parts.append("Given:\n\n" + "".join(f"- {line}\n" for line in self.given))
        if self.notes:
            parts.append("Notes:\n\n" + "".join(f"- {note}\n" for note in self.notes))
        return "\n".join(parts)

    def show(self, console: Console) -> None:
        """Prints it."""
        console.print()
        for grid in self.grids:
            console.print(render.to_rich(grid))
            console.print()
        for line in (*self.statements, *self.given):
            console.print(line, soft_wrap=True)
        for note in self.notes:
            console.print(Text.assemble(("note: ", "yellow"), note), soft_wrap=True)

    def save(self, folder: Path, *, figures: bool = True) -> list[Path]:
        """Writes ``table.md``, ``.tex``, ``.csv``, ``runs.csv``, ``pairs.csv`` and figures."""
        texts = {
            "table.md": f"# {self.experiment}\n\n{self.text('markdown')}",
            "table.tex": self.text("latex"),
            "table.csv": self.text("csv"),
            "runs.csv": self.table.drop(columns="conditions").to_csv(index=False),
            "pairs.csv": self.pairs.to_csv(index=False),
        }
        for name, text in texts.items():
            write(folder / name, text)
        return [*(folder / name for name in texts), *(self._figures(folder) if figures else [])]

    def to_tensorboard(self, folder: Path) -> Path:
        """Writes tables and figures as one more run of ``tensorboard --logdir <experiment>``.

        Args:
            folder: That run's folder; figures that :meth:`save` has put there are taken.
        """
        pictures = {f"figures/{name}": folder / f"{name}.png" for name in ("curves", "diagnostics")}
        if not pictures["figures/curves"].is_file():
            self._figures(folder)
        there = {tag: path for tag, path in pictures.items() if path.is_file()}
        return write_pages(folder, there, {"comparison": self.text("markdown")})

    def _figures(self, folder: Path) -> list[Path]:
        tags = (f"{part}/{self.metric}" for part in ("val", "test"))
        if any(tag in run.metrics for tag in tags for run in self.runs):
            curves = draw_curves(self.runs, folder / "curves", metric=self.metric)
            return [*curves, *draw_diagnostics(self.runs, folder / "diagnostics")]
        return []


def compare_runs(
    runs: Sequence[RunData],
    *,
    metric: str = "acc",
    target: float | None = None,
    against: str | None = None,
    all_trials: bool = False,
    given: Mapping[str, Sequence[str]] | None = None,
    left_out: Mapping[str, Sequence[str]] | None = None,
) -> list[Comparison]:
    """Compares runs, each experiment by itself.

    Args:
        runs: Runs as read by :func:`~fedmuon_pl.compare.runs.read_runs`.
        metric: ``acc`` for ``val/acc`` and ``test/acc``; another one likewise.
        target: A value of the validation metric, for what it took to first reach it.
        against: A method that the others are tested against; by default all pairs are.
        all_trials: Compare every grid point as a method of its own; by default only each method's
            best on validation data (:func:`~fedmuon_pl.compare.trials.choose_trials`).
        given: For each experiment what is to be said of the choice, where it was made before.
        left_out: For each experiment what is to be said of runs that are not among them.

    Raises:
        ConfigError: If there is no such method, or nothing is left as no point of any experiment
            went well with every seed.
    """
    said, empty = dict(given or {}), []
    if not all_trials:
        runs, chosen = choose_trials(runs, metric)
        said = {**chosen, **said}
        left = {run.experiment for run in runs}
        empty = [
            f"{experiment}: nothing is left. {' '.join(sentences)}"
            for experiment, sentences in chosen.items()
            if experiment not in left
        ]
        if empty and not left:
            raise ConfigError(" ".join(empty))
    found = []
    high = higher_is_better(metric)
    for experiment in dict.fromkeys(run.experiment for run in runs):
        own = [run for run in runs if run.experiment == experiment]
        table = run_table(own, metric=metric, target=target)
        summary = method_table(table, high=high)
        compared = "test" if table["test"].notna().any() else "val"
        order = {name: i for i, name in enumerate(summary["method"])}
        ranked = table.sort_values("method", key=lambda names: names.map(order), kind="stable")
        pairs = paired_differences(ranked, compared, against=against)
        found.append(
            Comparison(
                experiment=experiment,
                runs=own,
                metric=metric,
                target=target,
                table=table,
                summary=summary,
                compared=compared,
                pairs=pairs,
                statements=statements(pairs, f"{compared} {metric}", high=high),
                notes=[
                    *differences(own),
                    *unmeasured(own, metric),
                    *(left_out or {}).get(experiment, ()),
                    *empty,
                ],
                given=said.get(experiment, ()),
            )
        )
    return found
