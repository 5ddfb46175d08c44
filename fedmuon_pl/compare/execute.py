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
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Literal

from ..environment import PLANNED
from ..hardware import cores, gpus
from .inspection import deciding, finished, inspect
from .plan import Plan, Run
from .runs import progress
from .warm import Starter, WarmRun

__all__ = ["Event", "Outcome", "execute"]

_MODULE = (sys.executable, "-m", "fedmuon_pl")
_THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


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
        self,
        run: Run,
        resume: bool,
        log: IO[bytes],
        threads: int,
        gpu: str | None,
        starter: Starter | None,
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
        env = {
            **os.environ,
            **dict.fromkeys(_THREADS, str(threads)),
            **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
            PLANNED: json.dumps(deciding(run.settings), default=str),
            "PYTHONUNBUFFERED": "1",  # or the log would end with old lines, not with the error
        }
        self.process: subprocess.Popen[bytes] | WarmRun
        if starter is not None:
            self.process = starter.start(command[len(_MODULE) :], log, env)
        else:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
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
        code = self.process.poll()
        assert code is not None
        if finished(self.run):
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


def _start(run: Run, threads: int, gpu: str | None, starter: Starter | None) -> _Child | Outcome:
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
            return _Child(run, state == "resume", log, threads, gpu, starter)
    except OSError as error:
        return Outcome(run, "failed", str(error))


def _several_devices(runs: Collection[Run]) -> bool:
    """Whether a run spreads over GPUs by itself, or wants none."""
    return any(
        run.settings.get("trainer.devices", 1) != 1
        or run.settings.get("trainer.accelerator", "auto") not in ("auto", "gpu", "cuda")
        for run in runs
    )


def _can_start_warm(runs: Collection[Run]) -> bool:
    """Whether runs can be forks of one process; see :mod:`fedmuon_pl.compare.warm`."""
    ours = all(run.command[: len(_MODULE)] == _MODULE for run in runs)
    able = sys.platform == "linux" and not Path("/proc/driver/nvidia").exists()
    return len(runs) > 1 and ours and able and os.environ.get("FEDMUON_COLD_START", "0") == "0"


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
    runs = plan.runs(root, only)
    there = gpus()
    devices = [] if _several_devices(runs) else there
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

    warm = not there and _can_start_warm(runs)
    threads = dict.fromkeys(_THREADS, str(plan.threads))
    with _stop_signals() as stop, Starter(threads) as server:
        try:
            while active or (waiting and not stop.count):
                while waiting and not stop.count and len(active) < width:
                    gpu = min(devices, key=[c.gpu for c in active].count, default=None)
                    starter = server if warm else None
                    started = _start(waiting.popleft(), plan.threads, gpu, starter)
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
