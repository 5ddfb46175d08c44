"""Starts the processes of one machine: forks of the command, which itself is the first of them."""

import ctypes
import gc
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning import LightningDataModule, Trainer
from pytorch_lightning.strategies.launchers.launcher import _Launcher

from .errors import ConfigError, FedMuonError, ProcessLost
from .hardware import cores

if TYPE_CHECKING:
    from .parallel import ClientParallel

__all__ = ["ForkLauncher", "end_openmp_threads"]

_GRACE = 60.0
"""Seconds that the first process gets to notice by itself that another one is gone."""

_LOST = re.compile(r"(?i)gloo|nccl|connection (closed|reset|refused)|timed out waiting|broken pipe")


class ForkLauncher(_Launcher):
    """Runs rank 0 in this process and the other ranks of the machine in forks of it."""

    def __init__(self, strategy: "ClientParallel") -> None:
        self._strategy = strategy
        self._children: list[ForkProcess] = []

    @property
    def is_interactive_compatible(self) -> bool:
        """A fork needs no script that could be run again."""
        return True

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,  # noqa: ANN401
        trainer: Trainer | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Calls the function in every process and returns what rank 0's returns."""
        strategy = self._strategy
        environment, here = strategy.cluster_environment, strategy.num_processes
        assert environment is not None
        environment.validate_settings(num_devices=here, num_nodes=strategy.num_nodes)
        if isinstance(environment, LightningEnvironment) and strategy.num_nodes > 1:
            missing = [k for k in ("MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
            if "NODE_RANK" not in os.environ and "GROUP_RANK" not in os.environ:
                missing.append("NODE_RANK")
            if missing:
                raise ConfigError(
                    f"trainer.num_nodes={strategy.num_nodes}: start the command on every node, by "
                    f"torchrun, by SLURM's srun, or by hand with {' and '.join(missing)} set"
                )
        before = torch.get_num_threads()
        torch.set_num_threads(strategy.threads or max(1, min(before, cores() // here)))
        try:
            if here == 1 or environment.creates_processes_externally:
                return _call(function, args, kwargs)
            return self._fork(function, args, kwargs, trainer)
        finally:
            torch.set_num_threads(before)

    def kill(self, signum: Any) -> None:  # noqa: ANN401
        """Sends a signal to the other processes."""
        for child in self._children:
            if child.is_alive() and child.pid is not None:
                os.kill(child.pid, signum)

    def _fork(self, function: Any, args: Any, kwargs: Any, trainer: Trainer | None) -> Any:  # noqa: ANN401
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise ConfigError(
                "this process has used CUDA already and cannot be forked into several: start the "
                "run in a fresh process, or with torchrun"
            )
        for data in (*args, *kwargs.values()):
            if isinstance(data, LightningDataModule):
                # Once, for all: forks share what is loaded.
                data.prepare_data()
                data.setup("fit")
        folder = tempfile.mkdtemp(prefix="fedmuon-processes-")
        if self._strategy.num_nodes == 1:
            self._strategy.store_path = os.path.join(folder, "store")
        # Ports are chosen now, so that all agree.
        assert self._strategy.cluster_environment is not None
        _ = self._strategy.cluster_environment.main_port
        end_openmp_threads()
        gc.freeze()  # a collection would touch, and so copy, every shared page
        context = multiprocessing.get_context("fork")
        reports: dict[Connection, tuple[int, ForkProcess]] = {}
        try:
            for rank in range(1, self._strategy.num_processes):
                mine, theirs = context.Pipe(duplex=False)
                child = context.Process(
                    target=_child, args=(rank, os.getpid(), theirs, function, args, kwargs)
                )
                with warnings.catch_warnings():
                    # Python 3.12 warns where a thread exists; those of OpenMP have ended.
                    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork")
                    child.start()
                theirs.close()
                self._children.append(child)
                reports[mine] = rank, child
            watch = _Watch(reports, self._strategy.num_processes, trainer)
            watch.start()
            try:
                result = _call(function, args, kwargs)
                if dist.is_initialized():
                    dist.destroy_process_group()  # nccl wants it of all ranks at the same time
            except RuntimeError as error:
                if isinstance(error, ProcessLost) and watch.failed.wait(5):
                    assert watch.failure is not None
                    raise watch.failure from error
                raise
            finally:
                watch.ended.set()
            watch.join(_GRACE)
            if watch.failure is not None:
                raise watch.failure
            return result
        finally:
            self.kill(signal.SIGKILL)
            for child in self._children:
                child.join()
            self._children.clear()
            gc.unfreeze()
            if dist.is_initialized():
                dist.destroy_process_group()
            self._strategy.store_path = None
            shutil.rmtree(folder, ignore_errors=True)


class _Unreachable(ProcessLost):
    """What those see who are left: they do not know why."""


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:  # noqa: ANN401
    """Calls it, and says in a sentence when another process is gone."""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        if isinstance(error, FedMuonError) or not _LOST.search(f"{type(error).__name__} {error}"):
            raise
        why = str(error).partition("\n")[0]
        raise _Unreachable(
            f"another process of the run has ended or cannot be reached (its own message says "
            f"why; here: {why}); resume with --ckpt_path last"
        ) from error


def _child(
    rank: int,
    parent: int,
    report: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """One forked rank; reports nothing but an empty message, or the error that ended it."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to all; rank 0 ends the others
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["LOCAL_RANK"] = str(rank)
    message = b""
    try:
        _call(function, args, kwargs)
        if dist.is_initialized():
            dist.destroy_process_group()
    except SystemExit:
        pass  # SIGTERM, on which all ranks have agreed
    except BaseException as error:
        error.add_note(f"in process {rank}:\n{traceback.format_exc()}")
        try:
            message = pickle.dumps(error)
            pickle.loads(message)
        except Exception:
            message = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    report.send_bytes(message)
    if message:
        sys.exit(1)


class _Watch(threading.Thread):
    """Waits for the other processes' reports, and ends this one if it cannot go on.

    A collective notices a dead partner with gloo at once, with nccl on one machine perhaps never.
    """

    def __init__(
        self,
        reports: dict[Connection, tuple[int, ForkProcess]],
        processes: int,
        trainer: Trainer | None,
    ) -> None:
        super().__init__(name="fedmuon-watch", daemon=True)
        self._waiting = dict(reports)
        self._processes = processes
        self._trainer = trainer
        self.failure: BaseException | None = None
        self.failed = threading.Event()
        self.ended = threading.Event()

    def run(self) -> None:
        """Until every process has reported, or one has failed."""
        failures: list[BaseException] = []
        # After the first failure a moment more: who lost a partner may speak before the cause.
        while self._waiting and (ready := wait(list(self._waiting), 1 if failures else None)):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank, process = self._waiting.pop(pipe)
                try:
                    message = pipe.recv_bytes()
                except (EOFError, OSError):
                    failures.append(self._lost(rank, process))
                else:
                    failures += [pickle.loads(message)] if message else []
            if any(not isinstance(f, _Unreachable) for f in failures):
                break
        if not failures:
            return
        self.failure = min(failures, key=lambda f: isinstance(f, _Unreachable))
        self.failed.set()
        if not self.ended.wait(_GRACE):
            print(f"fedmuon: {self.failure}", file=sys.stderr, flush=True)
            os._exit(1)

    def _lost(self, rank: int, process: ForkProcess) -> ProcessLost:
        process.join(5)
        code = process.exitcode
        how = "is gone"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        elif code:
            how = f"ended with status {code}"
        at = "" if self._trainer is None else f" in round {self._trainer.current_epoch}"
        return ProcessLost(
            f"process {rank} of 0..{self._processes - 1} {how}{at} (out of memory?); resume with "
            f"--ckpt_path last, with any number of processes"
        )


def _die_with(parent: int) -> None:
    """The kernel ends this process when the one that forked it ends, however that does (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # too late to be told
        os._exit(1)


def end_openmp_threads() -> None:
    """Ends OpenMP's idle threads: in a fork GNU's runtime would wait for them for ever.

    They come back when they are needed (``omp_pause_resource_all``, OpenMP 5.0).
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        omp_pause_hard = 2
        pause(omp_pause_hard)
