"""The commands ``fedmuon sweep`` and ``fedmuon compare``.

Both return an exit code: 0, 1 if a run failed, 2 (with one sentence on stderr) for a bad request,
130 if stopped by the user.
"""

import argparse
import dataclasses
import math
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import yaml
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import ConfigError
from .execute import Event, Outcome, execute, inspect
from .figures import draw_curves
from .plan import Plan, Run, load_plan, parse_plan
from .runs import RunData, differences, read_runs
from .tables import (
    best_points,
    grid_markdown,
    grid_note,
    summarise,
    to_csv,
    to_markdown,
    to_rich,
    unmeasured,
    write_tuned,
)

__all__ = ["compare_main", "replace_section", "sweep_main"]


class _Parser(argparse.ArgumentParser):
    """One sentence for a bad command line, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _guarded(name: str, work: Callable[[], int]) -> int:
    """Turns an expected error into one sentence and code 2."""
    try:
        return work()
    except (ConfigError, OSError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.filename or ''}: {error.strerror}".lstrip(": ")
        print(f"fedmuon {name}: {text}", file=sys.stderr)
        return 2


def _parsed(parser: argparse.ArgumentParser, args: Sequence[str]) -> argparse.Namespace | int:
    """The arguments, or the code with which argparse would exit."""
    try:
        return parser.parse_args(args)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2


def _console() -> Console:
    """Standard output; tables into a file or pipe are not squeezed into 80 columns."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=140)
    return console


# ---------------------------------------------------------------------------------------------
# fedmuon sweep


def _sweep_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fedmuon sweep",
        description=textwrap.fill(
            "Does every run of a plan (experiments x algorithms x grids x seeds) that is not "
            "finished yet, then prints the table and draws the curves. Finished runs are skipped "
            "and half-done ones resumed, so that the same command goes on after an interruption."
        ),
        epilog=(
            "examples:\n"
            "  fedmuon sweep quickstart --jobs 2\n"
            "  fedmuon sweep tune_mnist5k --dry-run\n"
            "  fedmuon sweep tune_mnist5k --write-tuned configs/tuned\n"
            "  fedmuon sweep --experiment mnist5k --algorithm fedmuon fedavg --seed 0 1\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "plan", nargs="?", metavar="PLAN", help="a YAML file, or a name in configs/plan"
    )
    named = parser.add_argument_group("instead of a plan", "each with its tuned YAML, if any")
    named.add_argument("--experiment", nargs="+", metavar="E", help="names in configs/experiment")
    named.add_argument("--algorithm", nargs="+", metavar="A", help="names in configs/algorithm")
    parser.add_argument(
        "--seed", nargs="+", type=int, metavar="S", help="seeds (default: the plan's; 0 without)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a flag for every run, such as trainer.max_epochs=2; may be repeated",
    )
    parser.add_argument("--root", help="folder for the runs (default: the plan's, usually runs)")
    parser.add_argument(
        "--jobs",
        type=_positive,
        metavar="N",
        help="runs at a time (default: the plan's; there, auto is the cores over a run's threads)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only show what would be done")
    parser.add_argument(
        "--write-tuned",
        metavar="DIR",
        help="write the best grid points as DIR/<experiment>/<algorithm>.yaml, with the record",
    )
    return parser


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"should be a number from 1, not {text!r}")
    return number


def sweep_main(args: list[str]) -> int:
    """``fedmuon sweep PLAN [--root DIR] [--jobs N] [--dry-run] [--write-tuned DIR]``."""
    options = _parsed(_sweep_parser(), args)
    if isinstance(options, int):
        return options
    return _guarded("sweep", lambda: _sweep(options))


def _plan(options: argparse.Namespace) -> Plan:
    """The plan that is named, or one of the experiments, algorithms and seeds that are."""
    named = (options.experiment, options.algorithm)
    if (options.plan is None) == (named == (None, None)) or (
        options.plan is None and None in named
    ):
        raise ConfigError("name a plan, or --experiment and --algorithm")
    if options.plan is not None:
        plan = load_plan(options.plan)
    else:
        plan = parse_plan(
            {
                "name": "command-line",
                "experiments": options.experiment,
                "algorithms": options.algorithm,
                "seeds": [0],
                "tuned": "auto",
            }
        )
    overrides = dict(_setting(text) for text in options.set)
    seeds = list(dict.fromkeys(options.seed)) if options.seed else plan.seeds
    return dataclasses.replace(plan, seeds=seeds, set={**plan.set, **overrides})


def _setting(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"--set takes KEY=VALUE, such as trainer.max_epochs=2, not {text!r}")
    return key, yaml.safe_load(value)


def _sweep(options: argparse.Namespace) -> int:
    plan = _plan(options)
    if options.write_tuned and not plan.has_grid:
        raise ConfigError(
            f"plan {plan.name} has no grid, so that --write-tuned has nothing to write"
        )
    planned = plan.runs(options.root)
    console = _console()
    if options.dry_run:
        for run in planned:
            state, reason = inspect(run)
            words = {"resume": "resume ", "finished": "skip   ", "blocked": "blocked"}
            console.print(f"{words.get(state, 'start  ')} {run.name} {reason}".rstrip())
            print(f"        {shlex.join(run.command)}")
        console.print(f"{len(planned)} runs, nothing was started")
        return 0
    with _View(console, planned, plan.choose.metric) as view:
        outcomes = execute(plan, options.root, options.jobs, view)
    if any(outcome.status in ("stopped", "waiting") for outcome in outcomes):
        finished = sum(outcome.status in ("done", "skipped") for outcome in outcomes)
        console.print(
            f"Stopped: {finished} of {len(outcomes)} runs are finished; the same command goes on."
        )
        return 130
    _sweep_report(console, plan, outcomes, options.write_tuned, write=options.plan is not None)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        console.print(f"\n{len(failed)} of {len(outcomes)} runs failed:")
        for outcome in failed:
            reason = f"  {outcome.run.name}: {outcome.reason}\n    log: {outcome.run.log}"
            console.print(reason, soft_wrap=True)
    return 1 if failed else 0


def _sweep_report(
    console: Console, plan: Plan, outcomes: Sequence[Outcome], tuned: str | None, write: bool
) -> None:
    """Shows what came of it; ``write`` also puts table and curves beside the runs."""
    finished = [o.run for o in outcomes if o.status in ("done", "skipped")]
    data, problems = read_runs(run.folder for run in finished)
    for problem in problems:
        console.print(f"left out {problem}", soft_wrap=True)
    if plan.has_grid:
        planned = [outcome.run for outcome in outcomes]
        results = best_points(planned, data, plan.choose)
        console.print(grid_markdown(results, plan), soft_wrap=True)
        for experiment, folder in _experiments(planned).items():
            own = [result for result in results if result.experiment == experiment]
            record = folder / "compare" / "grid.md"
            _write(record, grid_markdown(own, plan))
            console.print(f"Grid:        {record}", soft_wrap=True)
        if tuned:
            for path in write_tuned(results, plan, tuned):
                console.print(f"Wrote        {path}", soft_wrap=True)
            for result in results:
                if result.best is None:
                    console.print(f"Not written: {grid_note(result)}", soft_wrap=True)
        # Only what validation data chose is compared further: a table of all trials, sorted by test
        # accuracy, would be a choice on test data.
        chosen = {(r.experiment, r.best.method): r.algorithm for r in results if r.best}
        data = [
            dataclasses.replace(run, method=chosen[run.experiment, run.method])
            for run in data
            if (run.experiment, run.method) in chosen
        ]
    for experiment, folder in _experiments(finished).items():
        own_data = [run for run in data if run.experiment == experiment]
        if own_data:
            _present(console, own_data, folder / "compare" if write else None)
            console.print(f"TensorBoard: tensorboard --logdir {folder}", soft_wrap=True)


def _experiments(runs: Sequence[Run]) -> dict[str, Path]:
    """Each experiment's folder."""
    return {run.experiment: run.folder.parent for run in runs}


_MARKS = {
    "started": ("▸", "cyan"),
    "done": ("✓", "green"),
    "skipped": ("✓", "dim"),
    "failed": ("✗", "red"),
    "stopped": ("■", "yellow"),
}


class _View:
    """Shows a sweep: a line for each run that starts or ends, and in a terminal those that run."""

    def __init__(self, console: Console, runs: Sequence[Run], tag: str) -> None:
        self._console, self._tag = console, tag
        self._total = len(runs)
        self._ended = 0
        self._width = max(len(run.name) for run in runs)
        self._running: dict[str, Event] = {}
        self._since: dict[str, float] = {}
        self._rounds = {run.name: run.rounds or 0 for run in runs}  # still to do
        self._trained = 0
        self._begin = time.monotonic()
        self._stopping = False
        self._live: Live | None = None

    def __enter__(self) -> "_View":
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        name = event.run.name
        before = self._running.get(name)
        if before is not None:
            self._trained += event.rounds - before.rounds
        self._rounds[name] = max(0, (event.run.rounds or 0) - event.rounds)
        if event.kind == "stopping" and not self._stopping:
            self._stopping = True
            self._console.print("Stopping: what runs ends with its round; Ctrl-C again kills it.")
        if event.kind in ("started", "progress", "stopping"):
            self._since.setdefault(name, time.monotonic())
            self._running[name] = event
        else:
            self._running.pop(name, None)
            self._rounds[name] = 0
            self._ended += 1
        if event.kind in ("progress", "stopping") or (
            event.kind == "started" and self._live is not None
        ):
            return
        mark, style = _MARKS[event.kind]
        line = Text.assemble((mark, style), " ", *self._words(event))
        if event.kind in ("done", "stopped"):
            line.append(f"  {_duration(time.monotonic() - self._since[name])}")
        if event.kind == "skipped":
            line.append("  already finished", "dim")
        if event.reason:
            line.append(f"  {event.reason}", "red")
        self._console.print(line, soft_wrap=True)

    def _words(self, event: Event) -> list[str]:
        words = [event.run.name.ljust(self._width)]
        if event.kind != "started" or event.rounds:
            words.append(f"  round {event.rounds}/{event.run.rounds or '?'}")
        if event.value is not None:
            words.append(f"  {self._tag} {event.value:.4f}")
        return words

    def _render(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for name, event in self._running.items():
            value = "" if event.value is None else f"{self._tag} {event.value:.4f}"
            grid.add_row(
                Text("▸", "cyan"),
                name,
                f"round {event.rounds}/{event.run.rounds or '?'}",
                value,
                Text(_duration(now - self._since[name]), "dim"),
            )
        left = ""
        if self._trained and all(event.run.rounds for event in self._running.values()):
            seconds = sum(self._rounds.values()) * (now - self._begin) / self._trained
            left = f", about {_duration(seconds)} left"
        return Group(grid, Text(f"{self._ended} of {self._total} runs ended{left}", "bold"))


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


# ---------------------------------------------------------------------------------------------
# fedmuon compare


def _compare_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fedmuon compare",
        description=textwrap.fill(
            "Compares finished runs: mean and standard deviation over the seeds, per experiment "
            "and method. Says what was left out, and what is not the same between the methods."
        ),
        epilog=(
            "examples:\n"
            "  fedmuon compare runs/mnist5k --target 0.9\n"
            "  fedmuon compare runs/mnist5k -o figures\n"
            "  fedmuon compare runs/mnist5k --markdown README.md --section quickstart\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run folders, or folders of runs")
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="write table.md, table.csv, curves.png and curves.pdf there (in a folder per "
        "experiment where there are several)",
    )
    parser.add_argument(
        "--target",
        type=_number,
        metavar="X",
        help="also count the rounds until the validation metric first reaches X",
    )
    parser.add_argument(
        "--metric", default="acc", help="acc for val/acc and test/acc, loss, ... (default: acc)"
    )
    parser.add_argument(
        "--markdown",
        metavar="FILE",
        help="put the table into FILE, between <!-- results:NAME --> and <!-- /results -->",
    )
    parser.add_argument("--section", metavar="NAME", help="which section of the --markdown file")
    return parser


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"should be a number, not {text!r}")
    return value


def compare_main(args: list[str]) -> int:
    """``fedmuon compare RUNS... [-o DIR] [--target X] [--markdown FILE --section NAME]``."""
    options = _parsed(_compare_parser(), args)
    if isinstance(options, int):
        return options
    return _guarded("compare", lambda: _compare(options))


def _compare(options: argparse.Namespace) -> int:
    if (options.markdown is None) != (options.section is None):
        raise ConfigError("--markdown FILE and --section NAME go together")
    for path in options.runs:
        if not Path(path).is_dir():
            raise ConfigError(f"there is no folder {path}")
    data, problems = read_runs(options.runs)
    console = _console()
    for problem in problems:
        print(f"left out {problem}", file=sys.stderr)
    if not data:
        raise ConfigError(f"there is no finished run in {', '.join(options.runs)}")
    metric, target = options.metric, options.target
    if not any(f"{part}/{metric}" in run.metrics for run in data for part in ("val", "test")):
        raise ConfigError(f"no run has val/{metric} or test/{metric}")
    experiments = list(dict.fromkeys(run.experiment for run in data))
    for experiment in experiments:
        own = [run for run in data if run.experiment == experiment]
        output = Path(options.output) if options.output else None
        if output is not None and len(experiments) > 1:
            output /= experiment
        _present(console, own, output, metric, target)
    if options.markdown:
        rows = summarise(data, target=target, metric=metric)
        text = to_markdown(rows, metric=metric, target=target)
        replace_section(Path(options.markdown), options.section, text)
        console.print(f"Wrote section {options.section} of {options.markdown}", soft_wrap=True)
    return 0


def _present(
    console: Console,
    runs: Sequence[RunData],
    output: Path | None,
    metric: str = "acc",
    target: float | None = None,
) -> None:
    """Prints one experiment's table and notes, and writes them with the curves."""
    rows = summarise(runs, target=target, metric=metric)
    notes = [*differences(runs), *unmeasured(runs, metric)]
    console.print()
    for table in to_rich(rows, metric=metric, target=target):
        console.print(table)
    for note in notes:
        console.print(Text.assemble(("note: ", "yellow"), note), soft_wrap=True)
    if output is None:
        return
    text = f"# {runs[0].experiment}\n\n" + to_markdown(rows, metric=metric, target=target)
    if notes:
        text += "\nNotes:\n\n" + "".join(f"- {note}\n" for note in notes)
    _write(output / "table.md", text)
    _write(output / "table.csv", to_csv(rows, metric=metric, target=target))
    console.print(f"Table:       {output / 'table.md'}", soft_wrap=True)
    if any(f"{part}/{metric}" in run.metrics for run in runs for part in ("val", "test")):
        png, _ = draw_curves(runs, output / "curves", metric=metric)
        console.print(f"Curves:      {png} (and .pdf)", soft_wrap=True)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


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
