"""The LightningModule: K local steps of every client of a round, in manual optimisation."""

import math
from typing import Any, Literal

import torch
from pytorch_lightning import Callback, LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torchmetrics import MetricCollection

from . import engine
from .algorithms.base import Algorithm
from .clients import ClientStack, clip_per_client, random_state_kept, trainable
from .data.datamodule import FederatedDataModule
from .data.partition import IntArray
from .errors import ConfigError
from .optim.orthogonalize import autocast_off
from .schedules import Constant, Schedule
from .seeding import derive
from .server.callback import FederatedServer, RoundPlan
from .server.checkpointing import keep_best
from .server.checks import check_trainer, first_difference
from .server.client_accuracy import ClientAccuracy
from .server.progress import RoundProgressBar
from .server.reduce import sum_metrics
from .server.roundlog import RoundLog, find
from .start_gradients import StartGradients
from .tasks import Task

__all__ = ["FederatedModule"]


class FederatedModule(LightningModule):
    """Trains a task with a federated method; the module's weights are always the global model.

    An epoch is a communication round and one training batch is the whole round. The module makes
    the clients' local steps, in blocks of clients that train side by side; the
    :class:`~fedmuon_pl.server.FederatedServer` callback of the same Trainer opens and closes the
    round. Set exactly one of ``local_steps`` and ``local_epochs``.

    Args:
        task: Network, loss and metrics.
        algorithm: The federated method.
        local_steps: K: every client makes K steps of exactly B samples, over fresh permutations of
            its data one after the other.
        local_epochs: E: every client passes E times over its data.
        drop_last: With ``local_epochs``, whether the short last batch of a pass is left out; a
            client's only batch is kept.
        lr_schedule: Factor on all client learning rates as a function of the round.
        client_clip_norm: Clips each client's gradient, after the method's correction, to this
            global norm at every local step; None for no clipping.
        clients_at_once: How many clients train side by side: a number, or ``"auto"`` for one on a
            CPU and on an accelerator what fits of the cohort (one if the forward draws random
            numbers, which would depend on the block), see
            :func:`fedmuon_pl.engine.clients_at_once`.
        channels_last: Whether the clients' convolutions run with their kernels in memory as
            (out, kh, kw, in), which changes speed and the last bits only. ``"auto"``: where it is
            the faster and the network allows it, see :func:`fedmuon_pl.engine.channels_last`.
        seed: The run's seed: x^0, cohorts, batches and dropout follow from it. The CLI links it to
            ``seed_everything``.

    Raises:
        ConfigError: If an argument makes no sense; in training, if memory runs out.
    """

    def __init__(
        self,
        task: Task,
        algorithm: Algorithm,
        local_steps: int | None = None,
        local_epochs: int | None = None,
        drop_last: bool = False,
        lr_schedule: Schedule | None = None,
        client_clip_norm: float | None = None,
        clients_at_once: int | Literal["auto"] = "auto",
        channels_last: bool | Literal["auto"] = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        if (local_steps is None) == (local_epochs is None):
            raise ConfigError(
                f"set exactly one of model.local_steps (now {local_steps}) and model.local_epochs "
                f"(now {local_epochs}); null unsets one"
            )
        for name, value in (("local_steps", local_steps), ("local_epochs", local_epochs)):
            if value is not None and value < 1:
                raise ConfigError(f"model.{name}={value}: must be at least 1")
        if client_clip_norm is not None and not 0 < client_clip_norm < math.inf:
            raise ConfigError(f"model.client_clip_norm={client_clip_norm}: must be positive")
        if clients_at_once != "auto" and clients_at_once < 1:
            raise ConfigError(f"model.clients_at_once={clients_at_once}: use auto or at least 1")
        self.task = task
        self.algorithm = algorithm
        self.local_steps = local_steps
        self.local_epochs = local_epochs
        self.drop_last = drop_last
        self.lr_schedule = lr_schedule or Constant()
        self.client_clip_norm = client_clip_norm
        self.clients_at_once = clients_at_once
        self.channels_last = channels_last
        self.seed = int(seed)  # a plain one: a parser may hand over a subclass
        self.network = task.build_network(seed)
        if not trainable(self.network):
            raise ConfigError("the network has no trainable parameter")
        self.evaluators = torch.nn.ModuleDict({s: self._metrics(s) for s in ("val", "test")})
        self._evaluation: dict[str, float] = {}
        self._client_accuracy = ClientAccuracy()
        self._at_once, self._channels_last = 1, False

    # -- Lightning's hooks --------------------------------------------------------------------

    def configure_optimizers(self) -> Optimizer:
        """The server optimiser over the global parameters: its steps are the rounds."""
        try:
            return self.algorithm.server_optimizer(trainable(self.network).values())
        except ValueError as e:
            raise ConfigError(f"{self.algorithm.name}: {e}") from e

    def configure_callbacks(self) -> list[Callback]:
        """Adds the round's log where the Trainer has none."""
        if self.trainer.state.fn == "fit":
            # Here, before Lightning refuses some of it in other words, or waits for other nodes.
            check_trainer(self.trainer)
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        return [] if any(isinstance(c, RoundLog) for c in callbacks) else [RoundLog()]

    def setup(self, stage: str) -> None:
        """Finds the server."""
        if stage != "fit":
            return
        try:
            self.server = find(self.trainer, FederatedServer)
        except LookupError:
            raise ConfigError(
                "a federated run needs the FederatedServer callback: "
                "Trainer(callbacks=[FederatedServer(clients_per_round=10)])"
            ) from None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses a checkpoint of another run before anything is restored from it."""
        trainer = self._trainer
        if trainer is None:
            return
        if trainer.state.fn == "fit":
            self.server.check_checkpoint(trainer, self, checkpoint)
            keep_best(trainer, checkpoint)
        saved, own = (
            {name: list(t.shape) for name, t in state.items()}
            for state in (checkpoint["state_dict"], self.state_dict())
        )
        found = first_difference(saved, own)
        if found:
            raise ConfigError(f"{trainer.ckpt_path} does not fit this network: {found}")
        if trainer.precision == "64-true":
            # Lightning converts the network after it has loaded the weights, which rounds them.
            self.network.double()

    def on_fit_start(self) -> None:
        """Places the data and allocates the client stack, once the model is on its device."""
        engine.keep_freed_memory()
        x = next(iter(trainable(self.network).values()))
        self.data.place(x.device, x.dtype)
        self._at_once = engine.clients_at_once(self, x.device)
        self._channels_last = engine.channels_last(self, x, self._at_once)
        self.stack = ClientStack(self.network, self._at_once, self._channels_last)
        self._at_start = StartGradients(self, self._at_once, self._channels_last)

    @property
    def data(self) -> FederatedDataModule:
        """The Trainer's data module."""
        return self.trainer.datamodule  # type: ignore[attr-defined, no-any-return]

    def engine(self) -> dict[str, Any]:
        """What may change the last bits of a result, as resolved."""
        return {
            "clients_at_once": self._at_once,
            "channels_last": self._channels_last,
            "processes": self.trainer.world_size,
            "threads": torch.get_num_threads(),
            "device": self.device.type,
            "torch": str(torch.__version__),
            **engine.gpu_settings(self.device),
        }

    def describe(self) -> dict[str, Any]:
        """Plain values that say what is trained and how, for fingerprints."""
        shapes = {n: list(p.shape) for n, p in trainable(self.network).items()}
        return {
            "task": self.task.describe(),
            "parameters": shapes,
            "local_steps": self.local_steps,
            "local_epochs": self.local_epochs,
            "drop_last": self.drop_last,
            "lr_schedule": self.lr_schedule.describe(),
            "client_clip_norm": self.client_clip_norm,
            "seed": self.seed,
            "precision": str(self.trainer.precision),
        }

    # -- a round ------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
        """This process's clients of the round, then the server's step."""
        plan = self.server.plan or self.server.open_round(self.trainer, self)
        with autocast_off(self.device.type), random_state_kept(self.device):
            if self.algorithm.asks_for("cohort"):
                with engine.enough_memory(self._at_once):
                    self._at_start.cohort(plan)
            work = {c: self._batches(plan, c) for c in plan.share}
            for clients, batches in engine.blocks(work, self._at_once):
                with engine.enough_memory(len(clients)):
                    self._train_block(plan, clients, batches)
                self._advance(len(clients))
            self._advance(len(plan.clients) - len(plan.share))
            self.server.close_round(self.trainer, self)

    def _batches(self, plan: RoundPlan, client: int) -> list[IntArray]:
        """A client's samples, step by step."""
        return self.data.client_batches(
            client,
            round=plan.round,
            seed=self.seed,
            steps=self.local_steps,
            epochs=self.local_epochs,
            drop_last=self.drop_last,
        )

    def losses(self, stack: ClientStack, data: Any) -> Tensor:  # noqa: ANN401
        """The batch losses of a stack's clients, ``(C,)``, in the Trainer's precision."""
        with self.trainer.precision_plugin.forward_context():
            return stack.losses(self.task.loss, data)

    def _train_block(
        self, plan: RoundPlan, clients: list[int], batches: list[list[IntArray]]
    ) -> None:
        """K local steps of a block; ``batches[c][k]`` are client c's samples in step k."""
        stack, algorithm = self.stack, self.algorithm
        at_start, asks = self._at_start, algorithm.asks_for
        full = at_start.of_clients(plan, clients) if asks("client") else None
        stack.resize(len(clients))
        stack.load(plan.x0, plan.buffers)
        anchor = at_start.anchor(plan, len(clients)) if asks("anchor") else None
        state = self.server.store.load(clients, self.device)
        run = algorithm.begin(
            stack,
            plan.x0,
            round=plan.round,
            clients=clients,
            lr_factor=plan.lr_factor,
            client_state=state,
        )
        run.full_gradient = full
        engine.seed_forward(derive(self.seed, "forward", plan.round, *clients), self.device)
        losses = []
        for data in self.data.local_data(
            batches, clients, self.device, round=plan.round, seed=self.seed
        ):
            if anchor is not None:
                run.anchor_gradient = at_start.of_batch(anchor, data)
            loss = self.losses(stack, data)
            stack.zero_grad()
            loss.sum().backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                gradients = stack.gradients()
                algorithm.correct(run, gradients)
                if self.client_clip_norm is not None:
                    clip_per_client(gradients, self.client_clip_norm)
                algorithm.step(run)
            losses.append(loss.detach())
        with torch.no_grad():
            uploads = algorithm.end(run)
        self.server.totals.receive(run, uploads, torch.stack(losses), stack.buffers)
        algorithm.release(run)
        stack.zero_grad()

    def _advance(self, clients: int) -> None:
        bar = self.trainer.progress_bar_callback
        if isinstance(bar, RoundProgressBar):
            bar.advance_clients(clients)

    # -- evaluation ---------------------------------------------------------------------------

    def _metrics(self, split: str) -> MetricCollection:
        metrics = self.task.metrics()
        by_class = self.task.class_metric()
        if split == "test" and by_class is not None:
            metrics.add_metrics({"class_acc": by_class})
        return metrics

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:  # noqa: ANN401
        """Loader 0 is the validation split, loader 1, during ``fit``, the test set."""
        self._evaluate(batch, "test" if dataloader_idx else "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
        """The test set."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Any, split: str) -> None:  # noqa: ANN401
        metrics = self.evaluators[split]
        assert isinstance(metrics, MetricCollection)
        if len(tree_leaves(batch)[0]):  # a process may have no part in it
            self.task.evaluate(self.network, batch, metrics)

    def on_validation_epoch_end(self) -> None:
        """Computes what the validation measured."""
        fitting = self.trainer.state.fn == "fit"
        self._finish(["val", "test"] if fitting else ["val"])

    def on_test_epoch_end(self) -> None:
        """Computes what the test measured."""
        self._finish(["test"])

    def _finish(self, splits: list[str]) -> None:
        if self.trainer.world_size > 1:
            measured = [self.evaluators[split] for split in splits]
            sum_metrics([m for c in measured for m in c.values()], self.trainer.strategy)  # type: ignore[operator]
        values: dict[str, float] = {}
        for split in splits:
            metrics = self.evaluators[split]
            assert isinstance(metrics, MetricCollection)
            computed = metrics.compute()
            with torch.inference_mode(False):  # or the zeros could not be used outside of it
                metrics.reset()
            by_class = computed.pop("class_acc", None)
            # Not-a-number would stand for "not measured" in what is written.
            values |= {
                f"{split}/{name}": math.inf if v.isnan() else float(v)
                for name, v in computed.items()
            }
            if by_class is not None:
                values |= self._client_accuracy(self.data, self.task, by_class)
        if self.trainer.sanity_checking:
            return  # x^0 on two batches is no measurement of a round
        if self.trainer.state.fn == "fit":
            self._evaluation |= values
        # In fit, RoundLog writes; the other commands print a table of what is "logged".
        self.log_dict(values, logger=self.trainer.state.fn != "fit")

    def add_evaluation(self, values: dict[str, float]) -> None:
        """Puts a callback's measurements of the round into its row, by tag; callbacks see them."""
        self._evaluation |= values
        self.log_dict(values, logger=False, on_step=False, on_epoch=True, batch_size=1)

    def take_evaluation(self) -> dict[str, float]:
        """What was measured since the last call, by tag; empty if nothing was."""
        values, self._evaluation = self._evaluation, {}
        return values
