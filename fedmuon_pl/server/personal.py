"""Personalised evaluation: each client's own model on what that client meets."""

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from pytorch_lightning import Callback, Trainer
from torch import Tensor

from ..clients import ClientStack, random_state_kept, trainable
from ..data.batches import Batches
from ..data.datamodule import FederatedDataModule
from ..data.sampling import evaluated_clients
from ..errors import ConfigError
from ..optim.orthogonalize import autocast_off
from ..seeding import derive
from .callback import FederatedServer
from .checks import PERSONAL_VAL
from .client_accuracy import present_classes
from .reduce import count_alone
from .roundlog import find

if TYPE_CHECKING:
    from ..module import FederatedModule

__all__ = ["PersonalEvaluation"]


class PersonalEvaluation(Callback):
    """Accuracy of the clients' own models, after every n-th round or after the last one only.

    A client's own model is x^{r+1} with the layers that the method keeps on the client
    (:class:`~fedmuon_pl.algorithms.fedbn.LocalLayers`), then fine-tuned, if asked, by plain SGD on
    the client's training data: the usual baseline of personalised learning (FedAvg-FT; Cheng et
    al., arXiv 2108.07313; Collins et al., arXiv 2205.13692). Nothing of it goes back: the run is,
    bit for bit, the one without this callback. In the round's row:

    - ``client/personal_val_acc``: the clients' mean accuracy on the validation split, which may
      choose a learning rate or a checkpoint (then with ``every_n_rounds=1``);
    - ``client/personal_acc_mean`` and ``client/personal_acc_worst10``: mean over all clients and
      over the worst tenth of them, on the test set.

    As in ``client/acc_mean``, a client's accuracy is that of each class weighted by the client's
    label shares; where the data module gives the client a part of its own
    (:meth:`FederatedDataModule.client_split`), the accuracy on that.

    Args:
        every_n_rounds: n; None for the last round only (``max_epochs``; never, if a callback stops
            the run before).
        fine_tune_epochs: Passes over the client's training data; 0 for no fine-tuning. Batches are
            those of a round's local work: with the run's ``local_steps`` as many whole ones as the
            passes need, else by its ``drop_last``.
        fine_tune_lr: Learning rate of the fine-tuning.
        max_clients: The most clients that are evaluated: a sample, fixed for all runs.

    Raises:
        ConfigError: If an argument makes no sense, or the task has no classes.
    """

    def __init__(
        self,
        every_n_rounds: int | None = None,
        fine_tune_epochs: int = 0,
        fine_tune_lr: float = 0.01,
        max_clients: int = 1000,
    ) -> None:
        for name, value, least in (
            ("every_n_rounds", every_n_rounds, 1),
            ("fine_tune_epochs", fine_tune_epochs, 0),
            ("max_clients", max_clients, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(f"PersonalEvaluation: {name}={value} must be at least {least}")
        if not 0 < fine_tune_lr < math.inf:
            raise ConfigError(f"PersonalEvaluation: fine_tune_lr={fine_tune_lr} must be positive")
        self.every_n_rounds = every_n_rounds
        self.fine_tune_epochs = fine_tune_epochs
        self.fine_tune_lr = fine_tune_lr
        self.max_clients = max_clients

    def setup(self, trainer: Trainer, pl_module: "FederatedModule", stage: str) -> None:  # type: ignore[override]
        """Refuses a task without classes."""
        if stage == "fit" and pl_module.task.class_metric() is None:
            raise ConfigError(
                f"PersonalEvaluation needs a task with classes, not {type(pl_module.task).__name__}"
            )

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: "FederatedModule",  # type: ignore[override]
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        """Evaluates: the round is closed then, and its row not yet written."""
        r = trainer.current_epoch
        n = self.every_n_rounds or trainer.max_epochs
        assert n is not None
        if (r + 1) % n == 0:
            with autocast_off(pl_module.device.type), random_state_kept(pl_module.device):
                pl_module.add_evaluation(self.evaluate(trainer, pl_module, r))

    def evaluate(self, trainer: Trainer, module: "FederatedModule", round: int) -> dict[str, float]:
        """Builds and measures the clients' models one after the other.

        Returns:
            The measurements by tag.
        """
        algorithm, server = module.algorithm, find(trainer, FederatedServer)
        store = server.store
        x = [p.detach() for p in trainable(module.network).values()]
        buffers = dict(module.network.named_buffers())
        stack = ClientStack(module.network, 1)
        modes = [(part, part.training) for part in stack.shell.modules()]
        accuracy = _Accuracy(trainer, module)
        clients = evaluated_clients(server.candidates, self.max_clients)
        table = torch.zeros(len(clients), 2, dtype=torch.float64)  # each process fills its rows
        for row in range(server.rank, len(clients), server.ranks):
            client = int(clients[row])
            stack.load(x, buffers)
            if algorithm.stays_local():
                state = store.load([client], module.device)
                algorithm.personalise(stack.x, stack.buffers, state)
            if self.fine_tune_epochs:
                self._fine_tune(trainer, module, stack, client, round)
            stack.shell.eval()
            table[row, 0] = accuracy(stack, client, "val")
            table[row, 1] = accuracy(stack, client, "test")
            for part, training in modes:
                part.training = training
        table = trainer.strategy.reduce(table.to(module.device), reduce_op="sum").cpu()
        # Not-a-number where there is nothing to measure a client on.
        val, test = (sorted(v for v in table[:, i].tolist() if not math.isnan(v)) for i in (0, 1))
        worst = test[: math.ceil(len(test) / 10)]
        means = {
            PERSONAL_VAL: val,
            "client/personal_acc_mean": test,
            "client/personal_acc_worst10": worst,
        }
        return {tag: math.fsum(v) / len(v) for tag, v in means.items() if v}

    def _fine_tune(
        self,
        trainer: Trainer,
        module: "FederatedModule",
        stack: ClientStack,
        client: int,
        round: int,
    ) -> None:
        """x <- x - lr g, batch after batch."""
        data = module.data
        whole = module.local_steps is not None
        passes = self.fine_tune_epochs * len(data.partition[client]) / data.batch_size
        batches = data.client_batches(
            client,
            round=round,
            seed=derive(module.seed, "fine-tuning"),
            steps=math.ceil(passes) if whole else None,
            epochs=None if whole else self.fine_tune_epochs,
            drop_last=module.drop_last,
        )
        torch.manual_seed(derive(module.seed, "fine-tuning forward", round, client))
        for samples in batches:
            batch = data.gather(torch.from_numpy(samples).unsqueeze(0).to(module.device))
            with torch.enable_grad(), trainer.precision_plugin.forward_context():
                loss = stack.losses(module.task.loss, batch)
            stack.zero_grad()
            loss.sum().backward()  # type: ignore[no-untyped-call]
            torch._foreach_add_(stack.x, stack.gradients(), alpha=-self.fine_tune_lr)


class _Accuracy:
    """The accuracy of one client's model on what that client meets."""

    def __init__(self, trainer: Trainer, module: "FederatedModule") -> None:
        self.trainer = trainer
        self.task = module.task
        self.device = module.device
        self.data: FederatedDataModule = module.data
        self.classes = {
            split: self.task.classes(getattr(self.data.splits, split)) for split in ("val", "test")
        }
        classes = self.data.splits.num_classes
        self.present = {
            split: present_classes(labels, classes).numpy()
            for split, labels in self.classes.items()
        }

    def __call__(self, stack: ClientStack, client: int, split: Literal["val", "test"]) -> float:
        own = self.data.client_split(client, split)
        if own is not None:
            empty = not len(self.task.classes(own))
            return math.nan if empty else float(self._measure(stack, own, by_class=False))
        # Only classes that the client has count, and of which there are samples.
        shares = torch.from_numpy(self.data.label_shares([client], self.present[split])[0])
        if not shares.any():
            return math.nan
        met = (shares > 0).to(self.device)[self.classes[split]]
        samples = self.data.seen_by(client, split, met)
        by_class = self._measure(stack, samples, by_class=True)
        return float(shares @ by_class.double().cpu())

    @torch.no_grad()
    def _measure(self, stack: ClientStack, samples: Any, by_class: bool) -> Tensor:  # noqa: ANN401
        metrics = self.task.metrics()
        metric = self.task.class_metric()
        assert metric is not None
        metrics.add_metrics({"class_acc": metric})
        metrics = metrics.to(self.device)
        for one in metrics.values():
            count_alone(one)  # other processes measure other clients
        for batch in Batches(samples, self.data.evaluated_at_once(), self.data.prepare):
            with self.trainer.precision_plugin.forward_context():
                self.task.evaluate(stack.shell, batch, metrics)
        value: Tensor = metrics["class_acc" if by_class else "acc"].compute()
        return value
