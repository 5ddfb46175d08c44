"""The command ``fedmuon reproduce``: a published table, from data to figure.

It returns an exit code: 0, 1 if a run failed, 2 (with one sentence on stderr) for a bad request,
130 if stopped by the user.
"""

import argparse
import dataclasses
import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..environment import FILE
from ..errors import ConfigError
from ..hardware import gpus
from . import render
from .comparison import compare_runs
from .console import CommandParser, guarded, parsed, positive, terminal, write
from .cost import estimate_apart
from .execute import Outcome, execute
from .inspection import inspect
from .plan import Plan, Run
from .reproduction import Case, Reproduction, beside, build, load_reproduction
from .runs import RunData, read_runs
from .sweep_view import SweepView, duration, show_failures

__all__ = ["reproduce_main"]


@dataclass(frozen=True)
class _Section:
    """One case on the page: its table, what is said under it, what is significant, its runs."""

    case: str
    grid: render.Grid
    notes: Sequence[str]
    said: str
    finished: Sequence[Path]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="fedmuon reproduce",
        description=textwrap.fill(
            "Runs the methods of a published table on its data and network, and puts ours beside "
            "the published numbers. Finished runs are skipped and half-done ones resumed, so that "
            "the same command goes on after an interruption."
        ),
        epilog=(
            "examples:\n"
            "  fedmuon reproduce cifar100-resnet18 --smoke\n"
            "  fedmuon reproduce cifar100-resnet18 --case dir0.1 --seed 0\n"
            "  fedmuon reproduce lmo -o results\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="a name in configs/reproduce, or a YAML file")
    parser.add_argument("--case", nargs="+", metavar="C", help="only these columns of the table")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="only these methods")
    parser.add_argument("--seed", nargs="+", type=int, metavar="S", help="default: 0 1 2")
    parser.add_argument("--rounds", type=positive, metavar="R", help="fewer rounds in every run")
    parser.add_argument("--root", metavar="DIR", help="for the runs (default: runs/reproduce)")
    parser.add_argument("--data", metavar="DIR", help="where the data are (default: data)")
    parser.add_argument(
        "--download", action="store_true", help="fetch the data first, where they are missing"
    )
    parser.add_argument(
        "--jobs", type=positive, metavar="N", help="runs at a time (default: cores, or GPUs)"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="the whole path at toy size, on generated files of the right format",
    )
    parser.add_argument(
        "--parity",
        action="store_true",
        help="with what the published numbers' own code does otherwise, such as cropped test "
        "images",
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", help="for table and curves (default: beside the runs)"
    )
    return parser


def reproduce_main(args: list[str]) -> int:
    """``fedmuon reproduce NAME [--smoke]``."""
    options = parsed(_parser(), args)
    if isinstance(options, int):
        return options
    return guarded("reproduce", lambda: _reproduce(options))


def _reproduce(options: argparse.Namespace) -> int:
    reproduction = load_reproduction(options.name)
    console = terminal()
    if options.parity and not reproduction.parity:
        raise ConfigError(f"reproduction {reproduction.name} has no parity settings")
    cases = _cases(reproduction, options.case)
    folder = Path(options.root or "runs/reproduce") / f"{reproduction.name}{_suffix(options)}"
    compared = reproduction.check()
    console.print(
        f"{reproduction.title}: {reproduction.parameters:,} weights and {compared} settings of "
        f"the full runs are as they should be.",
        soft_wrap=True,
    )
    plans = {case: _plan(reproduction, case, options, folder) for case in cases}
    runs = [run for case, plan in plans.items() for run in plan.runs(folder / case.name)]
    if options.smoke:
        _generate(runs, folder)
    _check_data(reproduction, plans, options.download)
    test_samples = 200 if options.smoke else reproduction.test_samples
    cost = estimate_apart(runs, reproduction.input_shape, test_samples, reproduction.plan.threads)
    jobs = options.jobs or next(iter(plans.values())).jobs
    if jobs is None and cost.device == "cuda" and not gpus():  # torch sees one, we do not
        jobs = 1
    console.print(
        f"{len(runs)} runs: about {duration(cost.seconds)} of one {cost.device} in all, from a "
        f"measured step of one client ({1000 * cost.step:.3g} ms, where it orthogonalises "
        f"{1000 * cost.orthogonalise:.3g} ms more), and at most {cost.bytes / 1e9:.1f} GB of disk "
        f"in {folder}.",
        soft_wrap=True,
    )
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    if cost.bytes > free:
        console.print(f"Only {free / 1e9:.1f} GB are free there.", soft_wrap=True)
    stopped = False
    outcomes: list[Outcome] = []
    sections: dict[str, _Section] = {}
    output = Path(options.output) if options.output else folder / "results"
    for case, plan in plans.items():
        with SweepView(console, plan.runs(folder / case.name), plan.choose.metric) as view:
            done = execute(plan, folder / case.name, jobs, view)
        outcomes += done
        if stopped := any(outcome.status in ("stopped", "waiting") for outcome in done):
            console.print("Stopped; the same command goes on.")
            break
        section = _section(reproduction, case, options, folder, output, done)
        console.print()
        console.print(render.to_rich(section.grid))
        for note in section.notes:
            console.print(f"- {note}", soft_wrap=True)
        sections[case.name] = section
    for case in reproduction.cases:  # and what earlier calls have finished, or a stopped one
        if case.name not in sections:
            sections[case.name] = _section(reproduction, case, options, folder, output, [])
    page = [sections[case.name] for case in reproduction.cases if sections[case.name].finished]
    if page:
        _write(reproduction, page, output, options)
        console.print(f"Tables and curves: {output}", soft_wrap=True)
    return 130 if stopped else show_failures(console, outcomes)


def _section(
    reproduction: Reproduction,
    case: Case,
    options: argparse.Namespace,
    folder: Path,
    output: Path,
    outcomes: Sequence[Outcome],
) -> _Section:
    """A case of the page, with every run of it that is finished, by this call or another one."""
    whole = _whole(reproduction, case, options, folder)
    states = [(run, *inspect(run)) for run in whole.runs(folder / case.name)]
    data, problems = read_runs(run.folder for run, state, _ in states if state == "finished")
    failed: dict[str, dict[int, str]] = {}
    for run, state, why in states:
        if state not in ("finished", "new"):
            failed.setdefault(run.algorithm, {})[run.seed] = why or "it is to be gone on with"
    for outcome in outcomes:
        if outcome.status == "failed":
            failed.setdefault(outcome.run.algorithm, {})[outcome.run.seed] = outcome.reason
    grid, notes = beside(reproduction, case, data, failed, _caveat(options))
    notes += [f"left out {problem}" for problem in problems]
    said = _curves(reproduction, case, data, output, _suffix(options)) if data else ""
    return _Section(case.name, grid, notes, said, [run.folder for run in data])


def _suffix(options: argparse.Namespace) -> str:
    """What tells the folder and the page of other runs from those of the full ones."""
    return (
        f"{'-smoke' if options.smoke else ''}{'-parity' if options.parity else ''}"
        f"{f'-{options.rounds}-rounds' if options.rounds else ''}"
    )


def _caveat(options: argparse.Namespace) -> str:
    """Why the numbers are not to be compared with the published ones; empty if they are."""
    if options.smoke:
        return "A smoke test on generated files: these numbers say nothing."
    if options.rounds:
        return "Shorter than the published runs: not to be compared with their numbers."
    return ""


def _cases(reproduction: Reproduction, names: Sequence[str] | None) -> list[Case]:
    known = {case.name: case for case in reproduction.cases}
    for name in names or ():
        if name not in known:
            raise ConfigError(
                f"reproduction {reproduction.name} has no case {name}; it has {', '.join(known)}"
            )
    return [known[name] for name in names] if names else list(reproduction.cases)


def _plan(
    reproduction: Reproduction, case: Case, options: argparse.Namespace, folder: Path
) -> Plan:
    """The case's plan as the command line wants it."""
    settings: dict[str, Any] = dict(reproduction.parity) if options.parity else {}
    seeds = list(options.seed or reproduction.plan.seeds)
    if options.data:
        settings["data.init_args.root"] = options.data
    if options.smoke:
        seeds = seeds[:1]
        settings |= {**reproduction.smoke, "data.init_args.root": str(folder / "data")}
    entries = reproduction.plan.entries
    if options.only:
        labels = [entry.label for entry in entries]
        for name in options.only:
            if name not in labels:
                raise ConfigError(
                    f"reproduction {reproduction.name} has no method {name}; it has "
                    f"{', '.join(labels)}"
                )
        entries = [entry for entry in entries if entry.label in options.only]
    return reproduction.case_plan(
        case, set=settings, seeds=seeds, entries=entries, rounds=options.rounds
    )


def _whole(
    reproduction: Reproduction, case: Case, options: argparse.Namespace, folder: Path
) -> Plan:
    """The same with all methods and seeds, also those of other calls."""
    asked = _plan(reproduction, case, options, folder)
    every = [] if options.smoke else reproduction.plan.seeds
    there = _seeds(folder / case.name / case.experiment)
    seeds = list(dict.fromkeys([*every, *asked.seeds, *there]))
    return dataclasses.replace(asked, entries=reproduction.plan.entries, seeds=seeds)


def _seeds(folder: Path) -> list[int]:
    """The seeds of the runs that lie there, also of other calls."""
    found = {path.name.rpartition("-s")[2] for path in folder.glob("*-s*")}
    return sorted(int(seed) for seed in found if seed.isdecimal())


def _generate(runs: Sequence[Run], folder: Path) -> None:
    """Writes small files for the data module of the runs."""
    from ..data.generate import generate

    for kind in {str(run.settings["data.class_path"]).rpartition(".")[2] for run in runs}:
        generate(kind, folder / "data")


def _check_data(
    reproduction: Reproduction, plans: Mapping[Case, Plan], download: bool = False
) -> None:
    """Loads what the runs will load: what is missing is said once, and not by every run.

    Raises:
        ConfigError: What is to be put where, or that the partition cannot be made.
    """
    from ..arguments import root_cause

    for case, plan in plans.items():
        settings = dict(plan.runs(case.name)[0].settings)
        if download and "data.init_args.download" not in settings:
            raise ConfigError(f"reproduction {reproduction.name}: its data cannot be fetched")
        if download:
            settings["data.init_args.download"] = True
        try:
            build("data", settings).setup()
        except ValueError as e:
            said = str(e if isinstance(e, ConfigError) else root_cause(e))
            said = said.replace("set data.download=true", "add --download (make: DOWNLOAD=1)")
            raise ConfigError(f"reproduction {reproduction.name}: {said}") from e


def _curves(
    reproduction: Reproduction, case: Case, data: Sequence[RunData], output: Path, suffix: str
) -> str:
    """Writes tables and curves of a case, and returns what is significant, in words."""
    there = {run.method for run in data}
    against = reproduction.against if reproduction.against in there and len(there) > 1 else None
    (comparison,) = compare_runs(data, against=against)
    own = output / f"{reproduction.name}{suffix}-{case.name}"
    comparison.save(own)
    curves = own / "curves.png"
    if curves.is_file():
        shutil.copyfile(curves, output / f"{own.name}.png")
    return " ".join([*comparison.statements, *comparison.notes])


def _write(
    reproduction: Reproduction,
    sections: Sequence[_Section],
    output: Path,
    options: argparse.Namespace,
) -> None:
    """The page ``NAME.md`` and the tables ``NAME.tex``."""
    name = f"{reproduction.name}{_suffix(options)}"
    parts = [f"# {reproduction.title}\n"]
    if _caveat(options):
        parts.append(f"**{_caveat(options)}**\n")
    for section in sections:
        parts += [f"## {section.case}\n", render.to_markdown([section.grid])]
        parts.append("".join(f"- {note}\n" for note in section.notes))
        parts += [f"{section.said}\n"] if section.said else []
        picture = f"{name}-{section.case}.png"
        parts += [f"![Curves]({picture})\n"] if (output / picture).is_file() else []
    finished = [folder for section in sections for folder in section.finished]
    parts.append(_record(finished, options))
    write(output / f"{name}.md", "\n".join(part for part in parts if part))
    said = "".join(f"% {s.case}: {note}\n" for s in sections for note in s.notes)
    latex = render.to_latex([section.grid for section in sections]) + said
    write(output / f"{name}.tex", latex)


def _record(folders: Sequence[Path], options: argparse.Namespace) -> str:
    """By which command, commit and machine."""
    words = [f"fedmuon reproduce {options.name}"]
    words += [f"--rounds {options.rounds}"] if options.rounds else []
    words += [f"--{flag}" for flag in ("smoke", "parity") if getattr(options, flag)]
    starts = [
        start
        for folder in folders
        if (folder / FILE).is_file()
        for start in json.loads((folder / FILE).read_text(encoding="utf-8"))
    ]
    commits = dict.fromkeys(str(start.get("commit") or "unknown") for start in starts)
    machines = dict.fromkeys(
        f"{start['processor']}, {start['cores']} cores"
        + "".join(f", {name}" for name in start["cuda"])
        + f", torch {start['packages']['torch']}"
        for start in starts
    )
    return f"Made by `{' '.join(words)}` at commit {', '.join(commits)} on {'; '.join(machines)}.\n"
