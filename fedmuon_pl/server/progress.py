"""A progress bar that counts clients and says which round it is."""

import sys
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.callbacks.progress.tqdm_progress import Tqdm

from .callback import FederatedServer
from .roundlog import find

__all__ = ["RoundProgressBar"]


class RoundProgressBar(TQDMProgressBar):
    """One line: ``round 12/50``, the clients done in it, and the last validation accuracy."""

    def init_train_tqdm(self) -> Tqdm:
        """A bar over the clients of a round."""
        return Tqdm(
            desc="round",
            position=0,
            disable=self.is_disabled,
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
        bar = self.train_progress_bar
        bar.reset(total=find(trainer, FederatedServer).cohort_size)
        bar.set_description(
            f"round {trainer.current_epoch + 1}/{trainer.max_epochs}", refresh=False
        )
        bar.set_postfix(self.get_metrics(trainer), refresh=False)

    def advance_clients(self, clients: int) -> None:
        """A block of clients is done; called by the module."""
        self.train_progress_bar.update(clients)

    def on_train_batch_end(self, *_: Any) -> None:  # noqa: ANN401
        """Nothing: a batch is the whole round."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws the round's last state."""
        self.train_progress_bar.refresh()

    def on_exception(self, trainer: Trainer, *_: Any) -> None:  # noqa: ANN401
        """Ends the line, so that the message has its own."""
        if self._train_progress_bar is not None:
            self._train_progress_bar.close()

    def get_metrics(self, trainer: Trainer, *_: Any) -> dict[str, Any]:  # noqa: ANN401
        """The last validation accuracy, where the task has one."""
        accuracy = trainer.callback_metrics.get("val/acc")
        return {} if accuracy is None else {"val/acc": f"{accuracy:.4f}"}
