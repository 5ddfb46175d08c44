"""The command ``fedmuon sweep``.

It returns an exit code: 0, 1 if a run failed, 2 (with one sentence on stderr) for a bad request,
130 if stopped by the user.
"""

import argparse
import dataclasses
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console

from ..errors import ConfigError
from .comparison import compare_runs
from .console import CommandParser, guarded, parsed, positive, terminal, write
from .execute import Outcome, execute
from .grid import best_points, given_texts, grid_markdown, grid_note, write_tuned
from .inspection import inspect
from .plan import Plan, Run
from .plan_file import load_plan, parse_plan
from .runs import read_runs
from .search import execute_search
from .slurm import write_array
from .sweep_view import SweepView, show_failures

__all__ = ["sweep_main"]


def _sweep_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="fedmuon sweep",
        description=textwrap.fill(
            "Does every run of a plan (experiments x algorithms x grids x seeds) that is not "
            "finished yet, then prints the table and draws the curves. Finished runs are skipped "
            "and half-done ones resumed, so that the same command goes on after an interruption. "
            "A plan may have Optuna propose the points, or be written as a SLURM job array."
        ),
        epilog=(
            "examples:\n"
            "  fedmuon sweep quickstart --jobs 2\n"
            "  fedmuon sweep tune_mnist5k --dry-run\n"
            "  fedmuon sweep tune_mnist5k --write-tuned configs/tuned\n"
            "  fedmuon sweep quickstart --slurm array && sbatch array/quickstart.sbatch\n"
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
    parser.add_argument(
        "--rounds",
        type=positive,
        metavar="R",
        help="rounds of every run, in the place of its own; the last one is evaluated",
    )
    parser.add_argument("--root", help="folder for the runs (default: the plan's, usually runs)")
    parser.add_argument(
        "--jobs",
        type=positive,
        metavar="N",
        help="runs at a time (default: the plan's; there, auto is the GPUs, or else the cores over "
        "a run's threads)",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="RUN", help="only these runs of it, such as mnist5k/fedavg-s0"
    )
    parser.add_argument(
        "--slurm",
        metavar="DIR",
        help="start nothing: write a SLURM job array of the runs, and their list, into DIR",
    )
    parser.add_argument("--dry-run", action="store_true", help="only show what would be done")
    parser.add_argument(
        "--write-tuned",
        metavar="DIR",
        help="write the best grid points as DIR/<experiment>/<algorithm>.yaml, with the record",
    )
    return parser


def sweep_main(args: list[str]) -> int:
    """``fedmuon sweep PLAN [--root DIR] [--jobs N] [--dry-run] [--write-tuned DIR]``."""
    options = parsed(_sweep_parser(), args)
    if isinstance(options, int):
        return options
    return guarded("sweep", lambda: _sweep(options, args))


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
    flags = {key: f"--set {key}" for key in overrides}
    if options.rounds:
        if "trainer.max_epochs" in flags:
            raise ConfigError(f"--rounds {options.rounds}: --set gives trainer.max_epochs too")
        flags["trainer.max_epochs"] = f"--rounds {options.rounds}"
    for entry in plan.entries:
        own = sorted(flags.keys() & {*entry.set, *entry.grid, *entry.search})
        if own:
            raise ConfigError(
                f"{flags[own[0]]}: plan {plan.name} gives {entry.label} a value of its own"
            )
    seeds = list(dict.fromkeys(options.seed)) if options.seed else plan.seeds
    return dataclasses.replace(
        plan, seeds=seeds, set={**plan.set, **overrides}, rounds=options.rounds
    )


def _setting(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"--set takes KEY=VALUE, such as trainer.max_epochs=2, not {text!r}")
    return key, yaml.safe_load(value)


def _sweep(options: argparse.Namespace, args: Sequence[str]) -> int:
    plan = _plan(options)
    if options.write_tuned and not plan.has_grid:
        raise ConfigError(
            f"plan {plan.name} has no grid, so that --write-tuned has nothing to write"
        )
    if _proposals(plan) and (options.slurm or options.only):
        raise ConfigError(f"plan {plan.name} is a search, whose runs are not known beforehand")
    planned = plan.runs(options.root, options.only)
    console = terminal()
    if options.dry_run:
        for run in planned:
            state, reason = inspect(run)
            words = {"resume": "resume ", "finished": "skip   ", "blocked": "blocked"}
            console.print(f"{words.get(state, 'start  ')} {run.name} {reason}".rstrip())
            print(f"        {shlex.join(run.command)}")
        more = f" and {_proposals(plan)} points to be proposed" if _proposals(plan) else ""
        console.print(f"{len(planned)} runs{more}, nothing was started")
        return 0
    if options.slurm:
        script, units = write_array(plan, planned, options.slurm, _without(args, "--slurm"))
        console.print(f"{len(planned)} runs in {units}\nsbatch {script}", soft_wrap=True)
        return 0
    proposals = len(plan.experiments) * len(plan.seeds) * _proposals(plan)
    with SweepView(console, planned, plan.choose.metric, len(planned) + proposals) as view:
        if proposals:
            outcomes = execute_search(plan, options.root, options.jobs, view, view.add)
        else:
            outcomes = execute(plan, options.root, options.jobs, view, only=options.only)
    if any(outcome.status in ("stopped", "waiting") for outcome in outcomes):
        finished = sum(outcome.status in ("done", "skipped") for outcome in outcomes)
        console.print(
            f"Stopped: {finished} of {len(outcomes)} runs are finished; the same command goes on."
        )
        return 130
    if not options.only:  # others may still run elsewhere
        named = options.plan is not None
        _sweep_report(console, plan, outcomes, options.write_tuned, write_files=named)
    return show_failures(console, outcomes)


def _proposals(plan: Plan) -> int:
    """How many points a search will propose for each experiment and seed."""
    searched = sum(bool(entry.search) for entry in plan.entries)
    return searched * plan.search.trials if plan.search else 0


def _without(args: Sequence[str], option: str) -> list[str]:
    """The arguments without an option and its value."""
    words = list(args)
    for i, word in enumerate(words):
        if word == option:
            return words[:i] + words[i + 2 :]
        if word.startswith(f"{option}="):
            return words[:i] + words[i + 1 :]
    return words


def _sweep_report(
    console: Console, plan: Plan, outcomes: Sequence[Outcome], tuned: str | None, write_files: bool
) -> None:
    """Shows what came of it; ``write_files`` also puts tables and curves beside the runs."""
    finished = [o.run for o in outcomes if o.status in ("done", "skipped")]
    data, problems = read_runs(run.folder for run in finished)
    for problem in problems:
        console.print(f"left out {problem}", soft_wrap=True)
    given = None
    left_out: dict[str, list[str]] = {}
    if not plan.has_grid:  # whose record says it of each trial
        for outcome in outcomes:
            if outcome.status == "failed":
                sentence = f"{outcome.run.folder.name} did not finish: {outcome.reason}"
                left_out.setdefault(outcome.run.experiment, []).append(sentence)
    if plan.has_grid:
        planned = [outcome.run for outcome in outcomes]
        results = best_points(planned, data, plan.choose)
        console.print(grid_markdown(results, plan), soft_wrap=True)
        given = given_texts(results, plan)
        for experiment, folder in _experiments(planned).items():
            own = [result for result in results if result.experiment == experiment]
            record = folder / "compare" / "grid.md"
            write(record, grid_markdown(own, plan))
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
    folders = _experiments(finished)
    for comparison in compare_runs(data, given=given, left_out=left_out):
        folder = folders[comparison.experiment]
        comparison.show(console)
        if write_files:
            comparison.save(folder / "compare")
            comparison.to_tensorboard(folder / "compare")
            console.print(f"Tables and curves: {folder / 'compare'}", soft_wrap=True)
        console.print(f"TensorBoard: tensorboard --logdir {folder}", soft_wrap=True)


def _experiments(runs: Sequence[Run]) -> dict[str, Path]:
    """Each experiment's folder."""
    return {run.experiment: run.folder.parent for run in runs}
