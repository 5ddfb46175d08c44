"""Clients over processes and nodes: a Lightning strategy that shares a round's work.

Every process (rank) trains its share of the cohort, and all meet once a round, in one all-reduce
(:mod:`fedmuon_pl.server.reduce`). Nothing is wrapped: a plain DDP would average the gradients at
every local step, and the clients would be one.
"""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from pytorch_lightning import LightningDataModule, Trainer
from pytorch_lightning.overrides.distributed import _sync_module_states
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from pytorch_lightning.strategies.launchers.launcher import _Launcher

from .errors import ConfigError, FedMuonError, ProcessLost

__all__ = ["ClientParallel", "cores", "processes_of_launcher", "processes_threads"]

_GRACE = 60.0
"""Seconds that the first process gets to notice by itself that another one is gone."""

_LOST = re.compile(r"(?i)gloo|nccl|connection (closed|reset|refused)|timed out waiting|broken pipe")


class ClientParallel(DDPStrategy):
    """``trainer.strategy=clients``: each process trains its share of every round's clients.

    gloo on CPUs, nccl on GPUs. On one machine the command itself is rank 0 and forks the others
    after everything is imported and the data are loaded, so that they share both; they die with it.
    Under ``torchrun`` and SLURM, or with ``NODE_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` set on
    every node, Lightning's cluster environments say who is who.

    If a process dies, the others end with one sentence. Where the first process does not notice by
    itself within a minute, it is ended too.

    Args:
        threads: CPU threads of each process; by default the cores are divided.
        timeout_minutes: How long a process waits for the slowest one, at the end of a round.
        process_group_backend: ``"gloo"`` or ``"nccl"``; by default what fits the device.
        **kwargs: What Lightning sets itself: accelerator, devices, environment, plugins.
    """

    strategy_name = "clients"

    def __init__(
        self,
        threads: int | None = None,
        timeout_minutes: float = 30,
        process_group_backend: str | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(minutes=timeout_minutes),
            **kwargs,
        )
        self.threads = threads
        self.stop_requested = False
        """Whether SIGTERM has come; the ranks agree on it at the end of the round."""
        self.store_path: str | None = None
        """The file through which the processes of one machine find each other."""

    def _configure_launcher(self) -> None:
        self._launcher = _ForkLauncher(self)

    def setup_distributed(self) -> None:
        """Joins the process group, once."""
        if self.store_path is None:
            super().setup_distributed()
        else:
            self.set_world_ranks()
            backend = self._process_group_backend = self._get_process_group_backend()
            ranks, device = self.world_size, self.root_device
            with _loopback():
                dist.init_process_group(
                    backend,
                    store=dist.FileStore(self.store_path, ranks),  # type: ignore[attr-defined]
                    rank=self.global_rank,
                    world_size=ranks,
                    timeout=self._timeout,
                    device_id=None if device.type == "cpu" else device,
                )
        # What is logged is the same everywhere: torchmetrics has added it up already.
        warnings.filterwarnings("ignore", ".*sync_dist=True")
        if not self.is_global_zero:
            warnings.simplefilter("ignore")  # rank 0 says the same

    def configure_ddp(self) -> None:
        """Wraps nothing; everyone starts from rank 0's weights."""
        assert self.model is not None
        _sync_module_states(self.model)

    def on_train_start(self) -> None:
        """Replaces Lightning's SIGTERM handler, whose broadcast may meet another collective."""
        self.stop_requested = False
        self._handle_sigterm(self._request_stop)

    def on_validation_start(self) -> None:
        """An evaluation by itself just ends at SIGTERM."""
        module = self.lightning_module
        if module is not None and module.trainer.state.fn != "fit":
            self._handle_sigterm(signal.SIG_DFL)

    def on_test_start(self) -> None:
        """See :meth:`on_validation_start`."""
        self._handle_sigterm(signal.SIG_DFL)

    def _request_stop(self, *_: Any) -> None:  # noqa: ANN401
        self.stop_requested = True

    @staticmethod
    def _handle_sigterm(handler: Any) -> None:  # noqa: ANN401
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:  # noqa: ANN401
        """Makes ``Trainer(strategy="clients")`` known."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(
                cls.strategy_name, cls, description="Clients of a round over processes and nodes"
            )


ClientParallel.register_strategies(StrategyRegistry)


# -- how many processes, of how many threads --------------------------------------------------


def cores() -> int:
    """The CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processes_of_launcher() -> tuple[str, int, int] | None:
    """Who started this process as one of several: name, processes in all, of them here; or None."""
    env = os.environ
    if TorchElasticEnvironment.detect():
        return "torchrun", int(env["WORLD_SIZE"]), int(env.get("LOCAL_WORLD_SIZE", 1))
    if SLURMEnvironment.detect():
        total, nodes = int(env["SLURM_NTASKS"]), int(env.get("SLURM_NNODES", 1))
        return "SLURM", total, total // nodes
    return None


def processes_threads(
    devices: int | None, threads: int | None, clients: int | None
) -> tuple[int, int]:
    """Processes and threads of each on this machine's CPU.

    Clients one beside the other need no barrier at every operation, as threads do: as many
    processes as there are cores or clients, and threads only from the cores that are left.

    Args:
        devices: The number of processes, or None to choose.
        threads: The threads of each, or None to choose.
        clients: The clients of a round, if known: more processes than that have nothing to do.
    """
    available = cores()
    if devices is None:
        launched = processes_of_launcher()
        most = max(1, available // (threads or 1))
        devices = launched[2] if launched else max(1, min(most, clients or most))
    if threads is None:
        asked = os.environ.get("OMP_NUM_THREADS")
        threads = torch.get_num_threads() if asked or devices == 1 else 0
        threads = threads or max(1, available // devices)
    return devices, threads


# -- starting the processes of one machine ----------------------------------------------------


class _ForkLauncher(_Launcher):
    """Runs rank 0 in this process and the other ranks of the machine in forks of it."""

    def __init__(self, strategy: ClientParallel) -> None:
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
        _end_openmp_threads()
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


def _end_openmp_threads() -> None:
    """Ends OpenMP's idle threads: in a fork GNU's runtime would wait for them for ever.

    They come back when they are needed (``omp_pause_resource_all``, OpenMP 5.0).
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        omp_pause_hard = 2
        pause(omp_pause_hard)


@contextmanager
def _loopback() -> Iterator[None]:
    """Lets gloo talk through the loopback interface: a host's name may lead nowhere."""
    key, name = "GLOO_SOCKET_IFNAME", {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if key in os.environ or name is None:
        yield
        return
    os.environ[key] = name
    try:
        yield
    finally:
        del os.environ[key]
