"""One row a round, written once to every logger, also after a kill and a resume."""

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import Logger, TensorBoardLogger
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from .callback import FederatedServer
from .folders import run_folder

if TYPE_CHECKING:
    from ..module import FederatedModule

T = TypeVar("T", bound=Callback)

__all__ = ["DONE", "EVENTS", "FINAL", "MetricsFile", "RoundLog", "find", "prune_events"]

EVENTS = "events.out.tfevents.*"
FINAL = ".final"
"""Ending of the event file that is written when a run is finished, and dropped when it goes on."""
DONE = "done"
"""Name of the file that marks a finished run."""


class RoundLog(Callback):
    """Collects a round's measurements and writes them with ``step = round``.

    Add it after :class:`FederatedServer`; Lightning runs ModelCheckpoint after both, so that a
    checkpoint holds the rows up to its own round. When training starts, rows and events at or after
    the round it starts with are taken out of the files; a resumed run loses none and repeats none.
    """

    state_key = "RoundLog"

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []
        """The rows so far; each has ``round``."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Brings the loggers' files to where the run is."""
        self.history = [row for row in self.history if row["round"] < trainer.current_epoch]
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                logger.rewrite(self.history)
            elif isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                folder = Path(logger.log_dir)
                for path in folder.glob(EVENTS + FINAL):
                    path.unlink()
                kept: set[tuple[str, int]] = set()
                # One file is the logger's own, just opened; more are those of an earlier start.
                if len(list(folder.glob(EVENTS))) > 1:
                    # A file that is replaced while it is open would swallow what follows.
                    logger.experiment.close()
                    kept = prune_events(folder, trainer.current_epoch)
                self._complete(logger, kept)
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            (run_folder(trainer) / DONE).unlink(missing_ok=True)

    def _complete(self, logger: TensorBoardLogger, kept: set[tuple[str, int]]) -> None:
        """Writes what the files lack of the rows: in a new folder all of them, or a torn tail."""
        start = f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""
        for row in self.history:
            r = int(row["round"])
            lost = {k: v for k, v in row.items() if (start + k, r) not in kept and k != "round"}
            logger.log_metrics(lost, step=r)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: "FederatedModule") -> None:  # type: ignore[override]
        """Writes the row of the round that was closed, if one was."""
        server = find(trainer, FederatedServer)
        if server.report is None:
            return
        row = {**pl_module.take_evaluation(), **server.report}
        server.report = None
        r = trainer.current_epoch
        self.history.append({"round": r, **row})
        for logger in trainer.loggers:
            logger.log_metrics(row, step=r)
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.flush()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Marks the run as finished if its last round is logged."""
        rounds = len(self.history)
        if not trainer.is_global_zero or trainer.fast_dev_run or rounds != trainer.max_epochs:  # type: ignore[attr-defined]
            return
        path = run_folder(trainer) / DONE
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(DONE + ".part")
        part.write_text(json.dumps({"rounds": rounds, "last": self.history[-1]}, indent=1) + "\n")
        os.replace(part, path)

    def state_dict(self) -> dict[str, Any]:
        """The rows."""
        return {"history": list(self.history)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the rows."""
        self.history = list(state_dict["history"])


class MetricsFile(Logger):
    """``metrics.csv``: one header, one row a round, an empty cell where nothing was measured.

    Lightning's CSVLogger deletes the file when a run is resumed and writes two rows a round.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self._folder = Path(folder)
        self.path = self._folder / "metrics.csv"
        self._columns: list[str] = []
        self._rows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        """Nothing: the folder is the run's own."""
        return ""

    @property
    def version(self) -> str:
        """Nothing: the folder is the run's own."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self._folder)

    @property
    def log_dir(self) -> str:
        """The run's folder."""
        return str(self._folder)

    @property
    @rank_zero_experiment
    def experiment(self) -> None:
        """Nothing: rows are written as they come."""
        return None

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing: the run's ``config.yaml`` has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Appends one row.

        Args:
            metrics: Values by tag.
            step: The round.
        """
        row = {"round": float(step or 0), **metrics}
        self._rows.append(row)
        if set(row) <= set(self._columns):
            with self.path.open("a", newline="") as f:
                csv.DictWriter(f, self._columns).writerow(_format(row))
        else:
            self.rewrite(self._rows)

    @rank_zero_only
    def rewrite(self, rows: list[dict[str, float]]) -> None:
        """Replaces the whole file at once."""
        self._rows = list(rows)
        self._columns = list(dict.fromkeys(key for row in rows for key in row))
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        with part.open("w", newline="") as f:
            writer = csv.DictWriter(f, self._columns)
            if rows:
                writer.writeheader()
            writer.writerows(_format(row) for row in rows)
        os.replace(part, self.path)


def _format(row: Mapping[str, float]) -> dict[str, str]:
    """Every float with all its digits, so that equal curves are equal text."""
    return {k: str(int(v)) if k == "round" else repr(float(v)) for k, v in row.items()}


def prune_events(folder: Path, first: int) -> set[tuple[str, int]]:
    """Takes scalar events of rounds ``first`` and later out of a folder's TensorBoard files.

    Each file is replaced by one of its events up to there; a torn last record is left out, and a
    file without any event is removed.

    Returns:
        Tag and round of the events that were kept.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    kept: set[tuple[str, int]] = set()
    # TensorBoard reads every file with "tfevents" in its name, half a file of a kill too.
    part = folder / "events.part"
    for path in sorted(folder.glob(EVENTS)):
        before = len(kept)
        with part.open("wb") as f:
            writer = RecordWriter(f)
            for raw in RawEventFileLoader(str(path)).Load():
                event = Event.FromString(raw)
                if not (event.HasField("summary") and event.step >= first):
                    writer.write(raw)
                    kept |= {(value.tag, event.step) for value in event.summary.value}
            writer.flush()
        if len(kept) > before:
            os.replace(part, path)
        else:
            path.unlink()
    part.unlink(missing_ok=True)
    return kept


def find(trainer: Trainer, kind: type[T]) -> T:
    """The Trainer's callback of one class.

    Raises:
        LookupError: If there is none.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, kind):
            return callback
    raise LookupError(f"the Trainer has no {kind.__name__}")
