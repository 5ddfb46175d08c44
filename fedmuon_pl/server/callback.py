"""The federated server: cohort, broadcast, aggregation and server step, as a Lightning callback."""

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from ..algorithms.base import Setting
from ..clients import Tensors, trainable
from ..data.datamodule import FederatedDataModule
from ..data.sampling import cohort, local_work, resolve_cohort_size
from ..errors import ConfigError, NonFiniteUpdate
from .aggregate import mean_buffers
from .checkpointing import AtomicCheckpointIO, check_saving, states_in_use
from .checks import check_trainer, first_difference
from .diagnostics import RoundDiagnostics
from .folders import state_folder
from .reduce import check_shared, merge_round, merge_sums, shares
from .state import ClientStore
from .totals import RoundTotals

if TYPE_CHECKING:
    from ..module import FederatedModule

__all__ = ["FederatedServer", "RoundPlan"]


@dataclass
class RoundPlan:
    """An open round: what the server broadcasts, and to whom.

    Attributes:
        round: r, 0-based.
        clients: The cohort's client ids, in the order drawn.
        shares: Who trains them: the clients of each process.
        share: The clients that this process trains.
        lr_factor: The schedule's factor on every client learning rate.
        x0: x^r, the global parameters themselves; they do not change while the round is open.
        buffers: The global model's buffers.
    """

    round: int
    clients: list[int]
    shares: list[list[int]]
    share: list[int]
    lr_factor: float
    x0: Tensors
    buffers: dict[str, Tensor]


class FederatedServer(Callback):
    """Opens each round, sums up what the clients send, and closes it before validation.

    A round is one epoch with one training batch. :meth:`close_round` is called by the module at
    the end of its training step, so that validation and checkpoints of round r see x^{r+1}.

    Args:
        clients_per_round: S: a whole number of clients, or a fraction in (0, 1] of those that
            have data (``1`` is one client, ``1.0`` all of them).
        weighting: Weight of a client in every average: ``"uniform"`` 1/S, or ``"samples"``
            n_i / sum n, by its number of training samples.
        on_nonfinite: What to do with a client whose loss, weights or buffers become infinite or
            not-a-number: ``"stop"`` the run, or ``"drop"`` its update from the round and count it
            in ``fed/clients_dropped``.

    Raises:
        ConfigError: In ``setup``, if the Trainer or the data cannot be used.
    """

    state_key = "FederatedServer"

    def __init__(
        self,
        clients_per_round: int | float = 1.0,
        weighting: Literal["uniform", "samples"] = "uniform",
        on_nonfinite: Literal["stop", "drop"] = "stop",
    ) -> None:
        if weighting not in ("uniform", "samples"):
            raise ConfigError(f"server.weighting={weighting}: use 'uniform' or 'samples'")
        if on_nonfinite not in ("stop", "drop"):
            raise ConfigError(f"server.on_nonfinite={on_nonfinite}: use 'stop' or 'drop'")
        self.clients_per_round = clients_per_round
        self.weighting = weighting
        self.on_nonfinite = on_nonfinite
        self.rank, self.ranks = 0, 1
        """Which of the processes that share the clients this is, and how many there are."""
        self.plan: RoundPlan | None = None
        self.report: dict[str, float] | None = None
        """The last closed round's measurements by tag, until they are logged."""
        self._rounds_done = 0
        self._total_bytes = 0
        self._restored: dict[str, Any] | None = None
        self._module: FederatedModule | None = None

    # -- life cycle ---------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: "FederatedModule", stage: str) -> None:  # type: ignore[override]
        """Checks everything that can be checked before any work is done."""
        if stage != "fit":
            return
        check_trainer(trainer)
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, FederatedDataModule):
            raise ConfigError(
                f"a federated run needs a FederatedDataModule, got {type(data).__name__}"
            )
        self.data = data
        pl_module.task.check(data.splits.num_classes)
        self.candidates = data.partition.clients_with_data
        try:
            self.cohort_size = resolve_cohort_size(self.clients_per_round, len(self.candidates))
        except ValueError as e:
            raise ConfigError(f"server.{e}") from None
        empty = len(data.partition) - len(self.candidates)
        if empty:
            warnings.warn(
                f"{empty} of {len(data.partition)} clients have no data and are never sampled",
                stacklevel=2,
            )
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        check_saving(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: "FederatedModule") -> None:  # type: ignore[override]
        """Allocates the method's state on the model's device, or restores it.

        Raises:
            ConfigError: If this server has trained before: the method's state would start anew in
                the middle of its rounds.
        """
        if self._rounds_done and self._restored is None:
            raise ConfigError(
                f"this FederatedServer has finished {self._rounds_done} rounds: go on from a "
                f"checkpoint (ckpt_path), or fit a new one with a new module"
            )
        network = pl_module.network
        self._module = pl_module
        self._fingerprint = self.fingerprint(trainer, pl_module)
        self._server_params = list(trainable(network).values())
        algorithm = pl_module.algorithm
        try:
            population, steps = len(self.candidates), pl_module.local_steps
            algorithm.setup(setting := Setting.of(network, population, steps))
            algorithm.members(pl_module.stack)
        except ValueError as e:
            raise ConfigError(f"{algorithm.name}: {e}") from e
        local = algorithm.stays_local()
        buffers = {n: b for n, b in setting.buffers.items() if n not in local}
        shared = [x for n, x in zip(setting.names, setting.x, strict=True) if n not in local]
        self.rank, self.ranks = trainer.global_rank, trainer.world_size
        if self.ranks > self.cohort_size:
            warnings.warn(
                f"{self.ranks - self.cohort_size} of {self.ranks} processes have nothing to train: "
                f"a round has {self.cohort_size} clients",
                stacklevel=2,
            )
        self.store = self._open_store(trainer, algorithm.client_state_like())
        self.diagnostics = RoundDiagnostics(setting.x)
        self.totals = RoundTotals(
            buffers,
            [*shared, *buffers.values()],
            self._weight,
            self.on_nonfinite,
            self.diagnostics,
            self.store,
        )
        if self._restored is not None:
            self._restore(trainer, pl_module, self._restored)
            self._restored = None
        self._next_file = trainer.strategy.broadcast(self.store.next_number())
        if self._rounds_done != trainer.current_epoch:
            raise ConfigError(
                f"the server has finished {self._rounds_done} rounds but training starts at round "
                f"{trainer.current_epoch}; fit a new FederatedServer, or resume from a checkpoint"
            )

    def _open_store(self, trainer: Trainer, like: dict[str, Tensors]) -> ClientStore:
        """The per-client state: one folder for all processes, the one of rank 0."""
        store = None
        if trainer.is_global_zero:
            nothing = trainer.fast_dev_run or not like  # type: ignore[attr-defined]
            store = ClientStore(None if nothing else state_folder(trainer, self._restored), like)
            store.clear_parts()
        folder = trainer.strategy.broadcast(None if store is None else store.folder)
        if like and trainer.num_nodes > 1 and folder is not None:
            check_shared(folder, trainer.strategy)
        return ClientStore(folder, like) if store is None else store

    def on_train_epoch_start(self, trainer: Trainer, pl_module: "FederatedModule") -> None:  # type: ignore[override]
        """Opens the round."""
        self.open_round(trainer, pl_module)

    def open_round(self, trainer: Trainer, module: "FederatedModule") -> RoundPlan:
        """Draws the cohort and broadcasts: a function of (seed, round) and the server's state."""
        r = self._rounds_done
        drawn = cohort(r, seed=module.seed, candidates=len(self.candidates), size=self.cohort_size)
        assert trainer.max_epochs is not None
        clients = [int(self.candidates[i]) for i in drawn]
        placed = shares(clients, [self._work(module, c) for c in clients], self.ranks)
        self.plan = RoundPlan(
            round=r,
            clients=clients,
            shares=placed,
            share=placed[self.rank],
            lr_factor=module.lr_schedule(r, trainer.max_epochs),
            x0=[p.detach() for p in self._server_params],
            buffers=dict(module.network.named_buffers()),
        )
        self.totals.start()
        self._opened = time.perf_counter()
        return self.plan

    def _work(self, module: "FederatedModule", client: int) -> int:
        """The samples that a client passes through the network in a round."""
        samples = len(self.data.partition[client])
        asks = module.algorithm.asks_for
        steps = local_work(
            samples,
            self.data.batch_size,
            steps=module.local_steps,
            epochs=module.local_epochs,
            drop_last=module.drop_last,
        )
        whole = samples if asks("client") or asks("cohort") else 0
        return steps * (2 if asks("anchor") else 1) + whole

    def mean_full_gradient(self, trainer: Trainer) -> Tensors:
        """The cohort's mean gradient over all data at x^r, in float64.

        Raises:
            NonFiniteUpdate: If no client sent a finite one.
        """
        assert self.plan is not None, "no round is open"
        if self.ranks > 1:
            merge_sums(self, trainer.strategy)
        means = self.totals.sums.means()
        if "full_gradient" not in means:
            raise NonFiniteUpdate(f"round {self.plan.round}: no client sent a finite gradient")
        return means["full_gradient"]

    def _weight(self, client: int) -> int:
        return 1 if self.weighting == "uniform" else len(self.data.partition[client])

    # -- the round's end ----------------------------------------------------------------------

    @torch.no_grad()
    def close_round(self, trainer: Trainer, module: "FederatedModule") -> None:
        """Averages, makes the server step and updates the method's state; x is x^{r+1} after it.

        The server optimiser steps through ``module.optimizers()``, whose steps Lightning counts,
        saves and restores.

        Raises:
            NonFiniteUpdate: If no client's update was accepted.
        """
        assert self.plan is not None, "no round is open"
        r = self.plan.round
        self._commit_and_merge(trainer)
        totals = self.totals
        if totals.accepted == 0:
            raise NonFiniteUpdate(f"round {r}: no client of the cohort sent a finite update")
        means = totals.sums.means()
        before = [x.clone() for x in self.plan.x0]
        direction = module.algorithm.aggregate(means, totals.accepted, self.plan.lr_factor)
        for p, d in zip(self._server_params, direction, strict=True):
            p.grad = torch.empty_like(p).copy_(d).neg_()
        optimizer: Any = module.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        mean_buffers(means.get("buffers", []), totals.counters, totals.buffers)
        self._total_bytes += totals.up + totals.down
        measured = self.diagnostics.summary(means["displacement"], before, self.plan.x0)
        seconds = time.perf_counter() - self._opened  # that has waited for all of a GPU's work
        self.report = {
            **measured,
            "fed/client_lr": module.algorithm.local.lr * self.plan.lr_factor,
            "comm/up_mb": totals.up / 1e6,
            "comm/down_mb": totals.down / 1e6,
            "comm/total_mb": self._total_bytes / 1e6,
            "time/round_s": seconds,
            "time/client_steps_per_s": totals.steps / seconds,
        }
        if self.on_nonfinite == "drop":
            self.report["fed/clients_dropped"] = totals.dropped
        self._rounds_done = r + 1
        self.plan = None

    def _commit_and_merge(self, trainer: Trainer) -> None:
        """Writes the per-client state and adds up what all processes have received."""
        strategy = trainer.strategy
        # Counted, not looked up: the folder has a file for every round.
        self.store.commit(self._next_file + self.rank)
        self._next_file += self.ranks
        if self.ranks == 1:
            stop = getattr(strategy, "stop_requested", False)
        else:
            stop = merge_round(self, strategy)
        if stop:
            trainer._signal_connector.received_sigterm = True  # Lightning stops at the round's end

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Now and then removes per-client files that no checkpoint of the run needs."""
        if (
            self.rank == 0
            and len(self.store)
            and self._rounds_done % 10 == 0
            and self.store.folder is not None
        ):
            states = states_in_use(trainer, self.state_key)
            if states is not None:
                self.store.sweep(states)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Gives up the open round; the global model still is x^r."""
        self.plan = None

    # -- checkpoints --------------------------------------------------------------------------

    def fingerprint(self, trainer: Trainer, module: "FederatedModule") -> dict[str, Any]:
        """What must be equal for a checkpoint to be resumed: method, data, seed, local work."""
        horizon = {"rounds": trainer.max_epochs} if module.lr_schedule.horizon else {}
        return {
            "algorithm": module.algorithm.describe(),
            **module.describe(),
            "data": self.data.describe(),
            "clients_per_round": self.cohort_size,
            "weighting": self.weighting,
            "on_nonfinite": self.on_nonfinite,
            **horizon,
        }

    def check_checkpoint(
        self, trainer: Trainer, module: "FederatedModule", checkpoint: Mapping[str, Any]
    ) -> None:
        """Refuses a checkpoint that another run made; nothing has been restored yet.

        Raises:
            ConfigError: Naming the first setting that differs.
        """
        path = trainer.ckpt_path or "the checkpoint"
        saved = checkpoint.get("callbacks", {}).get(self.state_key)
        if saved is None:
            raise ConfigError(f"{path} is not a checkpoint of a federated run")
        found = first_difference(saved["fingerprint"], self.fingerprint(trainer, module))
        if found:
            raise ConfigError(
                f"{path} does not fit this run: {found}; to begin anew, move that run away or name "
                f"this one otherwise"
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors only, so that it loads with ``weights_only=True``."""
        if self._module is None:
            return {}
        return {
            "fingerprint": self._fingerprint,
            "engine": self._module.engine(),
            "rounds_done": self._rounds_done,
            "total_bytes": self._total_bytes,
            "algorithm": self._module.algorithm.state_dict(),
            "diagnostics": self.diagnostics.state_dict(),
            "clients": self.store.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state until the model is on its device."""
        self._restored = state_dict
        self._rounds_done = state_dict["rounds_done"]
        self._total_bytes = state_dict["total_bytes"]

    @property
    def restored_engine(self) -> dict[str, Any]:
        """The engine of the checkpoint that is being resumed; empty in a new run."""
        return self._restored["engine"] if self._restored else {}

    def _restore(self, trainer: Trainer, module: "FederatedModule", state: dict[str, Any]) -> None:
        try:
            module.algorithm.load_state_dict(state["algorithm"])
        except ValueError as e:
            raise ConfigError(f"{trainer.ckpt_path} is of another version: {e}") from None
        self.diagnostics.load_state_dict(state["diagnostics"])
        beside = Path(str(trainer.ckpt_path)).parent.parent / "client_state"
        if trainer.is_global_zero:  # it may copy files
            self.store.load_state_dict(state["clients"], beside)
        self.store.agree(trainer.strategy.broadcast)
        # The number of processes alone changes no bit.
        saved, engine = ({**e, "processes": 0} for e in (state["engine"], module.engine()))
        changed = first_difference(saved, engine)
        if changed:
            warnings.warn(
                f"the run goes on with another engine ({changed}): results agree to rounding only",
                stacklevel=2,
            )
