"""The command ``fedmuon compare``: 0, or 2 with one sentence on stderr for a bad request."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..errors import ConfigError
from . import render
from .comparison import Comparison, Format, compare_runs
from .console import CommandParser, comparison_arguments, guarded, parsed, terminal
from .runs import Problem, RunData, read_runs

__all__ = ["compare_main", "finished_runs", "replace_section"]


def _compare_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="fedmuon compare",
        description=textwrap.fill(
            "Compares finished runs: mean and standard deviation over the seeds, per experiment "
            "and method, and which differences between methods are significant, paired by seed. "
            "Says what was left out, and what is not the same between the methods."
        ),
        epilog=(
            "examples:\n"
            "  fedmuon compare runs/mnist5k --target 0.9\n"
            "  fedmuon compare runs/mnist5k -o figures\n"
            "  fedmuon compare runs/mnist5k --against fedavg --format latex > table.tex\n"
            "  fedmuon compare runs/mnist5k --markdown README.md --section quickstart\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    comparison_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="write table.md, .tex and .csv, runs.csv, pairs.csv and the curves there (in "
        "a folder per experiment where there are several)",
    )
    parser.add_argument(
        "--format",
        choices=("terminal", "markdown", "latex", "csv"),
        default="terminal",
        help="how to print it (default: terminal)",
    )
    parser.add_argument(
        "--markdown",
        metavar="FILE",
        help="put the table into FILE, between <!-- results:NAME --> and <!-- /results -->",
    )
    parser.add_argument("--section", metavar="NAME", help="which section of the --markdown file")
    return parser


def compare_main(args: list[str]) -> int:
    """``fedmuon compare RUNS... [--target X] [--against METHOD] [--format F] [-o DIR]``."""
    options = parsed(_compare_parser(), args)
    if isinstance(options, int):
        return options
    return guarded("compare", lambda: _compare(options))


def _compare(options: argparse.Namespace) -> int:
    if (options.markdown is None) != (options.section is None):
        raise ConfigError("--markdown FILE and --section NAME go together")
    metric, target = options.metric, options.target
    data, problems = finished_runs(options.runs, metric)
    for problem in problems:
        _say(f"left out {problem}")
    console = terminal()
    found = compare_runs(
        data,
        metric=metric,
        target=target,
        against=options.against,
        all_trials=options.all_trials,
        left_out=_by_experiment(problems),
    )
    for comparison in found:
        _print(comparison, options.format, console)
        if options.output:
            folder = Path(options.output)
            folder = folder / comparison.experiment if len(found) > 1 else folder
            comparison.save(folder)
            _say(f"Tables and curves: {folder}")
    if options.markdown:
        replace_section(Path(options.markdown), options.section, _section(found))
        _say(f"Wrote section {options.section} of {options.markdown}")
    return 0


def _by_experiment(problems: Sequence[Problem]) -> dict[str, list[str]]:
    """A sentence for each run that was left out, by its experiment's folder."""
    found: dict[str, list[str]] = {}
    for problem in problems:
        sentence = f"left out {problem.folder.name}: {problem.reason}"
        found.setdefault(problem.folder.parent.name, []).append(sentence)
    return found


def finished_runs(paths: Sequence[str], metric: str) -> tuple[list[RunData], list[Problem]]:
    """The finished runs at or below the folders, and what was left out.

    Raises:
        ConfigError: If a folder is not there, or no run is finished or has the metric.
    """
    for path in paths:
        if not Path(path).is_dir():
            raise ConfigError(f"there is no folder {path}")
    data, problems = read_runs(paths)
    if not data:
        for problem in problems:
            _say(f"left out {problem}")
        raise ConfigError(f"there is no finished run in {', '.join(paths)}")
    if not any(f"{part}/{metric}" in run.metrics for run in data for part in ("val", "test")):
        raise ConfigError(f"no run has val/{metric} or test/{metric}")
    return data, problems


def _print(comparison: Comparison, form: Format, console: Console) -> None:
    if form == "terminal":
        comparison.show(console)
        return
    print(comparison.text(form))
    if form == "csv":  # which has no place for words
        for line in (*comparison.statements, *comparison.given, *comparison.notes):
            _say(line)


def _say(text: str) -> None:
    """What is not the comparison itself: standard output may go into a file."""
    print(text, file=sys.stderr)


def _section(found: Sequence[Comparison]) -> str:
    """The methods' tables and what is significant, for a README."""
    parts = []
    for comparison in found:
        if len(found) > 1:
            parts.append(f"### {comparison.experiment}\n")
        tables = render.grids(
            comparison.summary, metric=comparison.metric, target=comparison.target
        )
        parts += [render.to_markdown([grid]) for grid in tables]
        parts += [" ".join(comparison.statements) + "\n"] if comparison.statements else []
        if comparison.notes:
            parts.append("".join(f"- {note}\n" for note in comparison.notes))
    return "\n".join(parts)


def replace_section(path: Path, name: str, text: str) -> None:
    """Replaces what stands between ``<!-- results:NAME -->`` and the next ``<!-- /results -->``.

    Raises:
        ConfigError: If the file lacks one of the markers, or has the first one twice.
    """
    begin, end = f"<!-- results:{name} -->", "<!-- /results -->"
    content = path.read_text(encoding="utf-8")
    if content.count(begin) != 1:
        many = "more than one" if begin in content else "no"
        raise ConfigError(f"{path} has {many} line {begin}")
    head, tail = content.split(begin)
    inner, close, rest = tail.partition(end)
    if not close or "<!-- results:" in inner:
        raise ConfigError(f"{path} has no {end} after {begin}")
    path.write_text(f"{head}{begin}\n\n{text.strip()}\n\n{end}{rest}", encoding="utf-8")
