"""Clients over processes and nodes: a Lightning strategy that shares a round's work.

Every process (rank) trains its share of the cohort, and all meet once a round, in one all-reduce
(:mod:`fedmuon_pl.server.reduce`). Nothing is wrapped: a plain DDP would average the gradients at
every local step, and the clients would be one.
"""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from pytorch_lightning.overrides.distributed import _sync_module_states
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from .hardware import cores
from .launch import ForkLauncher

__all__ = ["ClientParallel", "processes_of_launcher", "processes_threads"]


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
        self._launcher = ForkLauncher(self)

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


ClientParallel.register_strategies(StrategyRegistry)


# -- how many processes, of how many threads --------------------------------------------------


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
