"""Doing a plan: each run as its own process, several at a time.

A run's folder is the only memory: a finished run is skipped and a half-done one resumed, whoever
started it and however it ended.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal

from ..environment import FILE, PLANNED
from .fairness import SPEED, known_files
from .plan import Plan, PlanError, Run, flag_text
from .runs import done_rounds, flatten, progress, read_yaml

__all__ = ["Event", "Outcome", "execute", "inspect"]

_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

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
    """The first planned value that the folder's run contradicts.

    A finished run is only as good as its settings: after a new tuning, its old result must not
    stand for the new learning rate. Only what decides the result is compared. A run that a plan
    made has what was planned in ``environment.json``: that is compared both ways. In
    ``config.yaml``, which every run has, are all defaults too, and ``auto`` and paths as resolved.
    """
    try:
        saved = flatten(read_yaml(run.folder / "config.yaml"))
    except (OSError, ValueError):
        return None  # reported by whoever reads the run
    done = done_rounds(run.folder)
    if done is not None and run.rounds is not None and done > run.rounds:
        return f"it has {done} rounds, and the plan {run.rounds}"
    planned, before = deciding(run.settings), _planned_before(run)
    for key, value in planned.items():
        if key in before:
            if not _same(key, before[key], value, short=False):
                return _differs(key, before[key], value)
        elif key in saved:
            resolved = value == "auto" or "/" in flag_text(saved[key]) + flag_text(value)
            if not resolved and not _same(key, saved[key], value):
                return _differs(key, saved[key], value)
        else:
            parent = next((p for p in _parents(key) if p in saved), None)
            if parent is not None:  # null there, a class here
                return _differs(parent, saved[parent], planned.get(f"{parent}.class_path", "set"))
            if value is None and f"{key}.class_path" in saved:
                return _differs(key, saved[f"{key}.class_path"], None)
            if value:  # an argument that the version of that run did not have
                return _differs(key, "not set", value)
    for key, value in before.items():
        if key not in planned and value is not None:
            return _differs(key, value, "not set")
    return None


def _differs(key: str, there: object, here: object) -> str:
    texts = _text(key, there), _text(key, here)
    if texts[0] == texts[1]:  # classes of one name
        texts = flag_text(there), flag_text(here)
    return f"{key} is {texts[0]} there and {texts[1]} in the plan"


def _text(key: str, value: object) -> str:
    """A value as on the command line, a class without its module."""
    text = flag_text(value)
    return text.rpartition(".")[2] if key.endswith("class_path") else text


def deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a plan's settings that decide a run's result.

    Not where data lie whose files are checked; of others that is what they are.
    """
    known = known_files(settings)
    return {
        key: value
        for key, value in settings.items()
        if (key.split(".")[0] in ("model", "data", "server") or key == "trainer.precision")
        and not SPEED.search(key)
        and not (known and key == "data.init_args.root")
    }


def _planned_before(run: Run) -> Mapping[str, Any]:
    """What the plan said that last started the run; nothing if none did."""
    try:
        starts = json.loads((run.folder / FILE).read_text(encoding="utf-8"))
        planned = [start["planned"] for start in starts if "planned" in start]
    except (OSError, ValueError, TypeError):
        return {}
    return deciding(planned[-1]) if planned and isinstance(planned[-1], dict) else {}


def _parents(key: str) -> Iterator[str]:
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _same(key: str, one: object, other: object, short: bool = True) -> bool:
    """Whether two values mean the same; a class's module counts where both say it, or not at all.

    In ``config.yaml`` a class stands where it is defined, which need not be where a plan names it.
    """
    texts = flag_text(one), flag_text(other)
    if key.endswith("class_path") and (short or not all("." in text for text in texts)):
        texts = _text(key, one), _text(key, other)
    try:
        return texts[0] == texts[1] or float(texts[0]) == float(texts[1])
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


def gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    there = Path("/proc/driver/nvidia/gpus")  # importing torch to ask it would take seconds
    return [str(i) for i in range(len(list(there.iterdir())))] if there.is_dir() else []


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

    def __init__(
        self, run: Run, resume: bool, log: IO[bytes], threads: int, gpu: str | None
    ) -> None:
        self.run = run
        self.gpu = gpu
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
                **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
                PLANNED: json.dumps(deciding(run.settings), default=str),
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


def _start(run: Run, threads: int, gpu: str | None) -> _Child | Outcome:
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
            return _Child(run, state == "resume", log, threads, gpu)
    except OSError as error:
        return Outcome(run, "failed", str(error))


def _several_devices(runs: Collection[Run]) -> bool:
    """Whether a run spreads over GPUs by itself, or wants none."""
    return any(
        run.settings.get("trainer.devices", 1) != 1
        or run.settings.get("trainer.accelerator", "auto") not in ("auto", "gpu", "cuda")
        for run in runs
    )


def execute(
    plan: Plan,
    root: str | Path | None = None,
    jobs: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    only: Collection[str] | None = None,
    grace: float = 30.0,
    poll: float = 0.2,
) -> list[Outcome]:
    """Does every run of a plan that is not finished, several at a time.

    A failed run does not stop the others. Ctrl-C (and SIGTERM, SIGHUP) starts nothing more and
    ends what runs, which another call takes up again; a second Ctrl-C does not wait.

    Args:
        plan: The plan.
        root: The folder for all runs; the plan's own by default.
        jobs: How many at a time; by default the plan's, for ``auto`` the GPUs, or else the cores
            over the threads. Each run has one GPU to itself, or shares it where there are fewer.
        on_event: Called with each :class:`Event`, in this process.
        only: Names of the runs to do (:attr:`~fedmuon_pl.compare.plan.Run.name`); None for all.
        grace: Seconds that a run has to end by itself (at its round's end) when stopped.
        poll: Seconds between two looks at the runs.

    Returns:
        One outcome a run, in the plan's order; some are ``stopped`` or ``waiting`` after Ctrl-C.

    Raises:
        PlanError: If the plan cannot be resolved, or has no run of a name; nothing was started.
    """
    runs = plan.runs(root)
    if only is not None:
        missing = sorted(set(only) - {run.name for run in runs})
        if missing:
            raise PlanError(f"plan {plan.name} has no run {missing[0]}")
        runs = [run for run in runs if run.name in only]
    devices = [] if _several_devices(runs) else gpus()
    width = jobs or plan.jobs or len(devices) or max(1, cores() // plan.threads)
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
                    gpu = min(devices, key=[c.gpu for c in active].count, default=None)
                    started = _start(waiting.popleft(), plan.threads, gpu)
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
