"""A progress bar that counts clients and says which round it is."""

import sys
import time
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.callbacks.progress.tqdm_progress import Tqdm

from .callback import FederatedServer
from .roundlog import find

__all__ = ["RoundProgressBar"]


class RoundProgressBar(TQDMProgressBar):
    """One line: ``round 12/50``, the clients done in it, and the last validation accuracy.

    In a terminal it is a bar; in a file (a log, a pipe) a line for the first and the last round and
    at most one every ``seconds`` between.
    """

    def __init__(self, seconds: float = 30.0) -> None:
        super().__init__()
        self._seconds = seconds
        self._said: float | None = None
        self._clients = 0

    def init_train_tqdm(self) -> Tqdm:
        """A bar over the clients of a round."""
        return Tqdm(
            desc="round",
            position=0,
            disable=self.is_disabled or not sys.stdout.isatty(),
            leave=True,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format="{desc} |{bar:20}| {n_fmt}/{total_fmt} clients{postfix}",
        )

    def init_validation_tqdm(self) -> Tqdm:
        """None: evaluation is a small part of a round."""
        return Tqdm(disable=True)

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:  # noqa: ANN401
        """Starts the round's bar."""
        self._clients = 0
        bar = self.train_progress_bar
        bar.reset(total=find(trainer, FederatedServer).cohort_size)
        bar.set_description(
            f"round {trainer.current_epoch + 1}/{trainer.max_epochs}", refresh=False
        )
        bar.set_postfix(self.get_metrics(trainer), refresh=False)

    def advance_clients(self, clients: int) -> None:
        """A block of clients is done; called by the module."""
        self._clients += clients
        self.train_progress_bar.update(clients)
        whole = self._clients >= find(self.trainer, FederatedServer).cohort_size
        if not whole and self._said is not None:  # a whole round has its line when it is evaluated
            self._say(self.trainer)

    def on_train_batch_end(self, *_: Any) -> None:  # noqa: ANN401
        """Nothing: a batch is the whole round."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws the round's last state."""
        self.train_progress_bar.refresh()
        self._say(trainer, trainer.current_epoch + 1 == trainer.max_epochs)

    def on_exception(self, trainer: Trainer, *_: Any) -> None:  # noqa: ANN401
        """Ends the line, so that the message has its own."""
        if self._train_progress_bar is not None:
            self._train_progress_bar.close()

    def get_metrics(self, trainer: Trainer, *_: Any) -> dict[str, Any]:  # noqa: ANN401
        """The last validation accuracy, where the task has one."""
        accuracy = trainer.callback_metrics.get("val/acc")
        return {} if accuracy is None else {"val/acc": f"{accuracy:.4f}"}

    def _say(self, trainer: Trainer, due: bool = False) -> None:
        """Prints a line where there is no bar, and the last one is long ago or it is ``due``."""
        if self.is_disabled or sys.stdout.isatty():
            return
        now = time.monotonic()
        if not due and self._said is not None and now - self._said < self._seconds:
            return
        self._said = now
        cohort = find(trainer, FederatedServer).cohort_size
        words = [f"round {trainer.current_epoch + 1}/{trainer.max_epochs}"]
        words += [f"{self._clients}/{cohort} clients"]
        words += [f"{key} {value}" for key, value in self.get_metrics(trainer).items()]
        print("  ".join(words), flush=True)
