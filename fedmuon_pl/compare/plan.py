"""Run plans: experiments x algorithms x grids x seeds, as single runs, and their execution.

A plan is a YAML file (``configs/plan/``). :func:`load_plan` checks it, :meth:`Plan.runs` resolves
it to one command a run, and :func:`execute` does what is not done yet, each run as its own process.
A run's folder is the only memory: a finished run is skipped and a half-done one resumed, whoever
started it and however it ended.
"""

import difflib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal

from ..errors import ConfigError
from .runs import done_rounds, flatten, progress, read_yaml

__all__ = [
    "Choose",
    "Entry",
    "Event",
    "Outcome",
    "Plan",
    "PlanError",
    "Run",
    "execute",
    "inspect",
    "load_plan",
    "parse_plan",
]

LAUNCHER: tuple[str, ...] = (sys.executable, "-m", "fedmuon_pl", "fit")

_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class PlanError(ConfigError):
    """A plan that cannot be run, in one sentence."""


@dataclass(frozen=True)
class Choose:
    """How the best grid point is chosen, from the mean over the plan's seeds.

    Attributes:
        metric: A tag that is not measured on the test set.
        mode: Whether more is better.
        at: The metric's value at the ``last`` round, or its ``best`` round.
    """

    metric: str = "val/acc"
    mode: Literal["max", "min"] = "max"
    at: Literal["last", "best"] = "last"


@dataclass(frozen=True)
class Entry:
    """One algorithm of a plan.

    Attributes:
        label: Its name in folders, tables and figures.
        config: The name of its YAML in ``configs/algorithm``.
        tuned: Whether the tuned YAML is laid over it; ``auto`` means where there is one.
        set: Values for each of its runs, by dotted key.
        grid: Values to try, by dotted key; every combination is one trial.
    """

    label: str
    config: str
    tuned: bool | Literal["auto"] = False
    set: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def points(self) -> list[dict[str, Any]]:
        """The grid's points; a single empty one without a grid."""
        return [
            dict(zip(self.grid, values, strict=True))
            for values in itertools.product(*self.grid.values())
        ]


@dataclass(frozen=True)
class Run:
    """One run: what it is, where it goes, and the command that does it.

    Attributes:
        experiment: The experiment's name in folders.
        algorithm: The label of the plan's algorithm.
        method: The label with the grid point behind an ``@``, as in ``fedavg@lr=0.1``.
        seed: The run's seed.
        point: The grid point, by dotted key.
        folder: ``<root>/<experiment>/<method>-s<seed>``.
        log: Where its output is appended.
        command: The process to start, without ``--ckpt_path``.
        settings: What its YAMLs and flags say, flattened.
        rounds: The planned number of rounds, where that is said.
    """

    experiment: str
    algorithm: str
    method: str
    seed: int
    point: Mapping[str, Any]
    folder: Path
    log: Path
    command: tuple[str, ...]
    settings: Mapping[str, Any]
    rounds: int | None

    @property
    def name(self) -> str:
        """Experiment, method and seed in one word."""
        return f"{self.experiment}/{self.folder.name}"


@dataclass(frozen=True)
class Plan:
    """A checked plan (see the module's docstring and ``configs/plan``)."""

    name: str
    experiments: Sequence[str]
    entries: Sequence[Entry]
    seeds: Sequence[int]
    set: Mapping[str, Any] = field(default_factory=dict)
    jobs: int | None = None
    threads: int = 1
    choose: Choose = Choose()
    root: str = "runs"

    @property
    def has_grid(self) -> bool:
        """Whether there is anything to choose."""
        return any(entry.grid for entry in self.entries)

    def runs(self, root: str | Path | None = None) -> list[Run]:
        """Every run of the plan, in the order in which they are started.

        Args:
            root: The folder for all runs; the plan's own by default.

        Raises:
            PlanError: If a YAML that a run needs is missing, or two runs would share a folder.
        """
        runs = [
            self._run(Path(root or self.root), experiment, entry, point, seed)
            for experiment in self.experiments
            for seed in self.seeds
            for entry in self.entries
            for point in entry.points()
        ]
        folders: set[Path] = set()
        for run in runs:
            if run.folder in folders:
                raise PlanError(f"plan {self.name}: two of its runs would write to {run.folder}")
            folders.add(run.folder)
        return runs

    def _run(
        self, root: Path, experiment: str, entry: Entry, point: Mapping[str, Any], seed: int
    ) -> Run:
        configs = ["base", f"experiment/{experiment}", f"algorithm/{entry.config}"]
        files = [self._config(name) for name in configs]
        if entry.tuned:
            for name, file in self._tuned(experiment, entry).items():
                configs.append(name)
                files.append(file)
        flags = {**self.set, **entry.set, **point}
        settings: dict[str, Any] = {}
        for file in files:
            settings |= flatten(read_yaml(file))
        settings |= flags
        rounds = settings.get("trainer.max_epochs")
        group = experiment.replace("/", "-")
        method = entry.label + ("@" + _point_name(point) if point else "")
        folder = root / group / f"{method}-s{seed}"
        named = {
            "trainer.default_root_dir": str(root),
            "experiment": group,
            "method": method,
            "seed_everything": seed,
        }
        return Run(
            experiment=group,
            algorithm=entry.label,
            method=method,
            seed=seed,
            point=dict(point),
            folder=folder,
            log=root / group / "logs" / f"{folder.name}.log",
            command=(
                *LAUNCHER,
                *(word for name in configs for word in ("-c", name)),
                *(f"--{key}={_flag(value)}" for key, value in {**flags, **named}.items()),
            ),
            settings=settings,
            rounds=rounds if isinstance(rounds, int) and rounds > 0 else None,
        )

    def _config(self, name: str) -> Path:
        try:
            return _find_config(name)
        except FileNotFoundError as error:
            raise PlanError(f"plan {self.name}: {error}") from None

    def _tuned(self, experiment: str, entry: Entry) -> dict[str, Path]:
        names = [f"tuned/{experiment}/{name}" for name in (entry.label, entry.config)]
        for name in names:
            try:
                return {name: _find_config(name)}
            except FileNotFoundError:
                continue
        if entry.tuned == "auto":
            return {}
        raise PlanError(
            f"plan {self.name}: there is no configs/{names[0]}.yaml; tune it first (fedmuon sweep "
            f"with a grid and --write-tuned), or say tuned: false"
        )


def _find_config(name: str) -> Path:
    from ..configuration import find_config

    return find_config(name)


def _flag(value: object) -> str:
    """A value as it stands on the command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _point_name(point: Mapping[str, Any]) -> str:
    """A grid point for a folder's name: the shortest ends of the keys that tell them apart."""
    words = []
    for key, value in point.items():
        parts = key.split(".")
        size = 1
        while size < len(parts) and any(
            other != key and other.split(".")[-size:] == parts[-size:] for other in point
        ):
            size += 1
        text = re.sub(r"[^A-Za-z0-9._+-]+", "-", _flag(value))
        words.append(f"{'.'.join(parts[-size:])}={text}")
    return ",".join(words)


# ---------------------------------------------------------------------------------------------
# Reading a plan

_KEYS = (
    "name", "experiments", "algorithms", "tuned", "seeds", "set", "jobs", "threads", "choose",
    "root", "unequal_trials",
)  # fmt: skip
_ENTRY_KEYS = ("grid", "set", "config", "tuned")
_CHOOSE_KEYS = ("metric", "mode", "at")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


def load_plan(name: str | Path) -> Plan:
    """Reads and checks a plan.

    Args:
        name: An existing file, or a short name such as ``quickstart``: looked for as
            ``configs/plan/quickstart.yaml`` here and then among the packaged configurations.

    Raises:
        PlanError: If there is no such plan, or it says something that cannot be.
    """
    path = Path(name)
    if not path.is_file():
        short = path.with_suffix("") if path.suffix in (".yaml", ".yml") else path
        try:
            path = _find_config(f"plan/{short}" if short.parts[:1] != ("plan",) else str(short))
        except FileNotFoundError as error:
            raise PlanError(f"there is no plan {str(name)!r}: {error}") from None
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        raise PlanError(f"the plan cannot be read: {error}") from None
    return parse_plan({"name": path.stem, **content})


def parse_plan(content: Mapping[str, Any]) -> Plan:
    """Checks a plan's content.

    Raises:
        PlanError: One sentence that names the key and the value.
    """
    name = content.get("name", "?")
    where = f"plan {name}"
    _known(content, _KEYS, where)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PlanError(f"{where}: name should be a word, not {name!r}")
    experiments = _list(content, "experiments", str, where)
    seeds = _list(content, "seeds", int, where)
    if min(seeds) < 0:
        raise PlanError(f"{where}: seeds should be 0 or more, not {min(seeds)}")
    tuned = _tuned(content, where, False)
    entries = _entries(content.get("algorithms"), tuned, where)
    jobs = content.get("jobs", "auto")
    if jobs != "auto" and (not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1):
        raise PlanError(f"{where}: jobs should be auto or a number from 1, not {jobs!r}")
    threads = content.get("threads", 1)
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise PlanError(f"{where}: threads should be a number from 1, not {threads!r}")
    root = content.get("root", "runs")
    if not isinstance(root, str) or not root:
        raise PlanError(f"{where}: root should be a folder, not {root!r}")
    overrides = _settings(content.get("set"), f"{where}: set")
    for entry in entries:
        twice = sorted(set(entry.grid) & (set(overrides) | set(entry.set)))
        if twice:
            raise PlanError(f"{where}: {entry.label} has {twice[0]} both in grid and in set")
    trials = {entry.label: len(entry.points()) for entry in entries}
    if len(set(trials.values())) > 1 and not _bool(content, "unequal_trials", where):
        counts = ", ".join(f"{label} {count}" for label, count in trials.items())
        raise PlanError(
            f"{where}: every algorithm should have the same number of trials, but they have "
            f"{counts}; even them out, or say unequal_trials: true"
        )
    return Plan(
        name=name,
        experiments=experiments,
        entries=entries,
        seeds=seeds,
        set=overrides,
        jobs=None if jobs == "auto" else jobs,
        threads=threads,
        choose=_choose(content.get("choose"), where),
        root=root,
    )


def _known(content: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    for key in content:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise PlanError(f"{where}: unknown key {key!r}{hint}; allowed are {', '.join(allowed)}")


def _bool(content: Mapping[str, Any], key: str, where: str) -> bool:
    value = content.get(key, False)
    if not isinstance(value, bool):
        raise PlanError(f"{where}: {key} should be true or false, not {value!r}")
    return value


def _tuned(
    content: Mapping[str, Any], where: str, default: bool | Literal["auto"]
) -> bool | Literal["auto"]:
    value = content.get("tuned", default)
    if value == "auto":
        return "auto"
    if not isinstance(value, bool):
        raise PlanError(f"{where}: tuned should be true, false or auto, not {value!r}")
    return value


def _list(content: Mapping[str, Any], key: str, kind: type, where: str) -> list[Any]:
    values = content.get(key)
    word = {str: "names", int: "whole numbers"}[kind]
    if (
        not isinstance(values, list)
        or not values
        or any(not isinstance(v, kind) or isinstance(v, bool) for v in values)
    ):
        raise PlanError(f"{where}: {key} should be a list of {word}, not {values!r}")
    for value in values:
        if values.count(value) > 1:
            raise PlanError(f"{where}: {key} has {value!r} more than once")
    return values


def _settings(content: object, where: str) -> dict[str, Any]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise PlanError(f"{where} should map dotted keys to values, not {content!r}")
    return flatten(content)


def _entries(content: object, tuned: bool | Literal["auto"], where: str) -> list[Entry]:
    if isinstance(content, list):
        names = _list({"algorithms": content}, "algorithms", str, where)
        content = dict.fromkeys(names)
    if not isinstance(content, dict) or not content:
        raise PlanError(
            f"{where}: algorithms should be a list of names, or map names to "
            f"{', '.join(_ENTRY_KEYS)}, not {content!r}"
        )
    entries = []
    for label, options in content.items():
        here = f"{where}: algorithm {label}"
        if not isinstance(label, str) or not _NAME.fullmatch(label):
            raise PlanError(f"{where}: {label!r} is not a name for an algorithm")
        options = {} if options is None else options
        if not isinstance(options, dict):
            raise PlanError(f"{here} should map {', '.join(_ENTRY_KEYS)}, not be {options!r}")
        _known(options, _ENTRY_KEYS, here)
        config = options.get("config", label)
        if not isinstance(config, str) or not config:
            raise PlanError(f"{here}: config should be the name of a YAML, not {config!r}")
        grid = _settings(options.get("grid"), f"{here}: grid")
        for key in grid:
            values = grid[key]
            if not isinstance(values, list) or not values:
                raise PlanError(f"{here}: grid {key} should be a list of values, not {values!r}")
            if len({_flag(value) for value in values}) < len(values):
                raise PlanError(f"{here}: grid {key} has a value more than once: {values!r}")
        entries.append(
            Entry(
                label=label,
                config=config,
                tuned=_tuned(options, here, tuned),
                set=_settings(options.get("set"), f"{here}: set"),
                grid=grid,
            )
        )
    return entries


def _choose(content: object, where: str) -> Choose:
    if content is None:
        return Choose()
    if not isinstance(content, dict):
        raise PlanError(f"{where}: choose should map {', '.join(_CHOOSE_KEYS)}, not {content!r}")
    _known(content, _CHOOSE_KEYS, f"{where}: choose")
    choose = Choose(**content)
    if not isinstance(choose.metric, str) or not choose.metric:
        raise PlanError(f"{where}: choose.metric should be a tag, not {choose.metric!r}")
    if re.search(r"(^|[^a-z])test", choose.metric.lower()):
        raise PlanError(
            f"{where}: choose.metric is {choose.metric}, but nothing is chosen on test data: use a "
            f"validation metric such as val/acc"
        )
    for key, allowed in (("mode", ("max", "min")), ("at", ("last", "best"))):
        if getattr(choose, key) not in allowed:
            value = getattr(choose, key)
            raise PlanError(
                f"{where}: choose.{key} should be {' or '.join(allowed)}, not {value!r}"
            )
    return choose


# ---------------------------------------------------------------------------------------------
# What a run's folder says

State = Literal["new", "resume", "remains", "finished", "blocked"]


def inspect(run: Run) -> tuple[State, str]:
    """What is to be done for a run, and for ``blocked`` why nothing can be.

    ``remains`` are of a run that died before its first checkpoint: they are cleared by the start.
    """
    folder = run.folder
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return "new", ""
    traces = (folder / "config.yaml", folder / "metrics.csv", *folder.glob("events.out.tfevents*"))
    if not folder.is_dir() or folder.is_symlink() or not any(path.is_file() for path in traces):
        return "blocked", f"{folder} is no run's folder; move it away"
    last = (folder / "checkpoints" / "last.ckpt").is_file()
    marked = (folder / "done").exists()
    if not last and not marked and not any(folder.rglob("*.ckpt")):
        return "remains", ""
    conflict = _conflict(run)
    if conflict:
        return "blocked", f"{folder} was made with other settings ({conflict}); move it away"
    if _finished(run):
        return "finished", ""
    if last:
        return "resume", ""
    return "blocked", f"{folder} is unfinished and has no checkpoints/last.ckpt; move it away"


def _finished(run: Run) -> bool:
    """Round R is logged and the marker written; an exit code says nothing."""
    rounds = done_rounds(run.folder)
    return rounds is not None and min(rounds, progress(run.folder)[0]) >= (run.rounds or rounds)


def _conflict(run: Run) -> str | None:
    """The first planned value that the folder's ``config.yaml`` contradicts.

    A finished run is only as good as its settings: after a new tuning, its old result must not
    stand for the new learning rate. Only what decides the result is compared, and only plain
    values: paths, and ``auto``, are resolved before they are saved.
    """
    try:
        saved = flatten(read_yaml(run.folder / "config.yaml"))
    except (OSError, ValueError):
        return None  # reported by whoever reads the run
    for key, planned in run.settings.items():
        if key.split(".")[0] not in ("model", "data", "server") or key not in saved:
            continue
        there, here = (
            str(value).split(".")[-1] if key.endswith("class_path") else _flag(value)
            for value in (saved[key], planned)
        )
        if isinstance(planned, list) or planned in (None, "auto") or "/" in there + here:
            continue
        if there != here and not _equal_numbers(there, here):
            return f"{key} is {there} there and {here} in the plan"
    return None


def _equal_numbers(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return False


# ---------------------------------------------------------------------------------------------
# Execution


@dataclass(frozen=True)
class Event:
    """Something that happened to a run: its rounds so far and the last ``choose.metric``."""

    kind: Literal["started", "progress", "stopping", "done", "skipped", "failed", "stopped"]
    run: Run
    rounds: int = 0
    value: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a run ended; ``reason`` is a sentence for ``failed``. ``waiting`` ones never started."""

    run: Run
    status: Literal["done", "skipped", "failed", "stopped", "waiting"]
    reason: str = ""


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Our own sentence may follow a progress bar that was not closed.
_ERROR = re.compile(r"fedmuon( \w+)?: .*|^([\w.-]+: )*error: .*|^[\w.]*Error: .*")


class _Stop:
    """How often the user asked to stop."""

    count = 0


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Counts Ctrl-C, SIGTERM and SIGHUP instead of dying of them, so that children can be ended."""
    stop = _Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.count += 1

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), handle) for name in names}
    try:
        yield stop
    finally:
        for name, old in before.items():
            signal.signal(getattr(signal, name), old if old is not None else signal.SIG_DFL)


class _Child:
    """A run in progress: a process with a session of its own, its output going to the run's log."""

    def __init__(self, run: Run, resume: bool, log: IO[bytes], threads: int) -> None:
        self.run = run
        command = [*run.command, *(["--ckpt_path=last"] if resume else [])]
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        log.write(f"\n# {stamp}\n$ {shlex.join(command)}\n".encode())
        log.flush()
        self._offset = log.tell()
        self._seen: tuple[int, int] | None = None
        self.state: tuple[int, float | None] = (0, None)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **dict.fromkeys(_THREADS, str(threads)),
                "PYTHONUNBUFFERED": "1",  # or the log would end with old lines, not with the error
            },
            start_new_session=True,  # the terminal's Ctrl-C goes to us only, and we end it well
        )

    def advanced(self, tag: str) -> bool:
        """Whether ``metrics.csv`` says something new."""
        try:
            stat = (self.run.folder / "metrics.csv").stat()
        except OSError:
            return False
        seen = (stat.st_mtime_ns, stat.st_size)
        if seen == self._seen:
            return False
        self._seen = seen
        before, self.state = self.state, progress(self.run.folder, tag)
        return self.state != before

    def signal(self, number: int) -> None:
        """Sends a signal to the process and to its own children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def outcome(self, stopping: bool) -> Outcome:
        """How the ended process left its run."""
        code = self.process.returncode
        if _finished(self.run):
            return Outcome(self.run, "done")
        if stopping:
            return Outcome(self.run, "stopped")
        if code < 0:
            return Outcome(self.run, "failed", f"killed by {signal.Signals(-code).name}")
        if code == 0:
            rounds, planned = progress(self.run.folder)[0], self.run.rounds or "?"
            return Outcome(self.run, "failed", f"it ended after {rounds} of {planned} rounds")
        return Outcome(self.run, "failed", self._last_words() or f"exit code {code}")

    def _last_words(self) -> str:
        """The error's line: the last that looks like one, else the last."""
        with self.run.log.open("rb") as file:
            file.seek(max(self._offset, file.seek(0, os.SEEK_END) - 100_000))
            text = re.sub(r"\x1b\[[0-9;]*m", "", file.read().decode(errors="replace"))
        lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
        errors = [found[0] for line in lines if (found := _ERROR.search(line))]
        return (errors or lines or [""])[-1][:500]


def _open_log(run: Run) -> IO[bytes] | None:
    """The run's log, locked; None where another process is at this run.

    The lock belongs to the open file, which the child inherits: it lasts as long as the run does,
    even if the sweep is killed, and keeps a second sweep from writing into the same folder.
    """
    run.log.parent.mkdir(parents=True, exist_ok=True)
    log = run.log.open("ab")
    try:
        import fcntl

        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # no such locks on Windows
        pass
    except OSError:
        log.close()
        return None
    return log


def _start(run: Run, threads: int) -> _Child | Outcome:
    """Starts a run, or says why there is nothing to start."""
    try:
        log = _open_log(run)
        if log is None:
            return Outcome(run, "failed", "another process is at this run")
        with log:  # the child has its own copy
            state, reason = inspect(run)
            if state == "finished":
                return Outcome(run, "skipped")
            if state == "blocked":
                return Outcome(run, "failed", reason)
            if state == "remains":
                shutil.rmtree(run.folder)
            return _Child(run, state == "resume", log, threads)
    except OSError as error:
        return Outcome(run, "failed", str(error))


def execute(
    plan: Plan,
    root: str | Path | None = None,
    jobs: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    grace: float = 30.0,
    poll: float = 0.2,
) -> list[Outcome]:
    """Does every run of a plan that is not finished, several at a time.

    A failed run does not stop the others. Ctrl-C (and SIGTERM, SIGHUP) starts nothing more and
    ends what runs, which another call takes up again; a second Ctrl-C does not wait.

    Args:
        plan: The plan.
        root: The folder for all runs; the plan's own by default.
        jobs: How many at a time; by default the plan's, for ``auto`` the cores over the threads.
        on_event: Called with each :class:`Event`, in this process.
        grace: Seconds that a run has to end by itself (at its round's end) when stopped.
        poll: Seconds between two looks at the runs.

    Returns:
        One outcome a run, in the plan's order; some are ``stopped`` or ``waiting`` after Ctrl-C.

    Raises:
        PlanError: If the plan cannot be resolved; nothing was started then.
    """
    runs = plan.runs(root)
    width = jobs or plan.jobs or max(1, cores() // plan.threads)
    tag = plan.choose.metric
    waiting = deque(runs)
    active: list[_Child] = []
    outcomes: dict[str, Outcome] = {}
    deadline: float | None = None

    def end(outcome: Outcome) -> None:
        outcomes[outcome.run.name] = outcome
        if outcome.status != "waiting":
            state = progress(outcome.run.folder, tag)
            on_event(Event(outcome.status, outcome.run, *state, outcome.reason))

    with _stop_signals() as stop:
        try:
            while active or (waiting and not stop.count):
                while waiting and not stop.count and len(active) < width:
                    started = _start(waiting.popleft(), plan.threads)
                    if isinstance(started, Outcome):
                        end(started)
                    else:
                        active.append(started)
                        on_event(Event("started", started.run, *progress(started.run.folder, tag)))
                if active:
                    time.sleep(poll)
                for child in list(active):
                    ended = child.process.poll() is not None
                    if child.advanced(tag) and not ended:
                        on_event(Event("progress", child.run, *child.state))
                    if ended:
                        active.remove(child)
                        end(child.outcome(stopping=stop.count > 0))
                if stop.count and deadline is None:
                    deadline = time.monotonic() + grace
                    for child in active:
                        child.signal(signal.SIGTERM)
                        on_event(Event("stopping", child.run, *child.state))
                if stop.count > 1 or (deadline is not None and time.monotonic() > deadline):
                    for child in active:
                        child.signal(signal.SIGKILL)
        finally:
            for child in active:  # only if something above raised
                child.signal(signal.SIGKILL)
                child.process.wait()
    return [outcomes.get(run.name, Outcome(run, "waiting")) for run in runs]
