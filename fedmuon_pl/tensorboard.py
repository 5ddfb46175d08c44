"""What TensorBoard shows of a run beside its curves: method, settings, partition, HParams.

At the start the method's equations and the configuration as text, the partition as picture and
histogram, and a layout of the Custom Scalars tab with one chart a question for all methods. At the
end, in an event file of its own, the HParams tab's settings with the final metrics, and the curves
against kilobytes and milliseconds: TensorBoard's x-axis is a whole number, the step.
"""

import inspect
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from .compare.runs import flatten, read_yaml
from .server.folders import run_folder
from .server.roundlog import EVENTS, FINAL, RoundLog, find

__all__ = ["LAYOUT", "TensorBoardPages", "by_cost", "settings_of"]

_CURVES = ("val/acc", "test/acc", "client/acc_worst10")


def _by(prefix: str, tag: str) -> str:
    return f"{prefix}/{tag.replace('/', '_')}"


LAYOUT = {
    "accuracy by round": {tag: ["Multiline", [f"{tag}$"]] for tag in _CURVES},
    "accuracy by kilobytes sent": {
        tag: ["Multiline", [f"{_by('by_kb', tag)}$"]] for tag in _CURVES
    },
    "accuracy by milliseconds": {tag: ["Multiline", [f"{_by('by_ms', tag)}$"]] for tag in _CURVES},
    "why": {
        "client drift": ["Multiline", ["fed/client_drift$"]],
        "alignment with the last update": ["Multiline", ["fed/alignment$"]],
        "training loss": ["Multiline", ["train/loss$"]],
    },
}
"""The Custom Scalars tab: a chart for each question, with every run of the folder in it."""

_MOST_CLIENTS = 10_000


def by_cost(history: Sequence[Mapping[str, float]]) -> list[tuple[str, float, int]]:
    """(tag, value, step) of the curves against kilobytes (``by_kb/``) and milliseconds.

    Args:
        history: A run's rows, a round each.
    """
    events = []
    seconds = 0.0
    for row in history:
        seconds += row.get("time/round_s", 0.0)
        for tag in _CURVES:
            if tag not in row:
                continue
            if "comm/total_mb" in row:
                events.append((_by("by_kb", tag), row[tag], round(1000 * row["comm/total_mb"])))
            events.append((_by("by_ms", tag), row[tag], round(1000 * seconds)))
    return events


def settings_of(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """What HParams shows of a run: the settings that decide its result, and only single values.

    Args:
        config: The run's saved configuration.
    """
    wanted = ("model.", "data.", "server.", "trainer.max_epochs", "trainer.precision")
    named = ("experiment", "method", "seed_everything")
    found: dict[str, bool | int | float | str] = {}
    for key, value in flatten(config).items():
        if not (key in named or key.startswith(wanted)) or value is None:
            continue
        plain = isinstance(value, bool | int | float | str)
        # The tab sorts by name: what tells methods apart comes first.
        short = key.replace(".init_args", "").replace("model.algorithm.", "algorithm.")
        found[short] = value if plain else str(value)
    return found


class TensorBoardPages(Callback):
    """Writes the pages into every TensorBoardLogger of a run; add it after :class:`RoundLog`."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """At the very start, when ``config.yaml`` is there; a resumed run has its pages."""
        if trainer.current_epoch or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                self._start(logger.experiment, trainer, pl_module)
                logger.experiment.flush()

    def _start(self, writer: Any, trainer: Trainer, module: Any) -> None:  # noqa: ANN401
        writer.add_custom_scalars(LAYOUT)
        method = type(module.algorithm)
        writer.add_text("method", f"# {method.__name__}\n\n{_code(inspect.getdoc(method) or '')}")
        config = run_folder(trainer) / "config.yaml"
        if config.is_file():
            writer.add_text("config", _code(config.read_text(encoding="utf-8")))
        data: Any = getattr(trainer, "datamodule", None)
        partition = getattr(data, "partition", None)
        if partition is None:
            return
        writer.add_histogram("partition/samples_per_client", np.asarray(partition.sizes), 0)
        labels = getattr(data.splits, "labels", None)
        if labels is not None and len(partition) <= _MOST_CLIENTS:
            picture = _partition_picture(partition, labels, data.splits.num_classes)
            writer.add_image("partition", picture, 0, dataformats="HWC")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """HParams, and the curves against what they cost."""
        history = find(trainer, RoundLog).history
        config = run_folder(trainer) / "config.yaml"
        if not trainer.is_global_zero or not history or len(history) != trainer.max_epochs:
            return
        settings = settings_of(read_yaml(config)) if config.is_file() else {}
        finals = {
            f"final/{key.replace('/', '_')}": float(value)
            for key, value in history[-1].items()
            if key.startswith(("val/", "test/", "client/", "comm/total")) and math.isfinite(value)
        }
        finals["final/seconds"] = math.fsum(row.get("time/round_s", 0.0) for row in history)
        for logger in trainer.loggers:
            if not isinstance(logger, TensorBoardLogger):
                continue
            for path in Path(logger.log_dir).glob(EVENTS + FINAL):  # a finished run was resumed
                path.unlink()
            with SummaryWriter(logger.log_dir, filename_suffix=FINAL) as writer:
                for summary in hparams(settings, finals):  # type: ignore[no-untyped-call]
                    writer.file_writer.add_summary(summary)
                for tag, value in finals.items():
                    writer.add_scalar(tag, value, len(history))
                for tag, value, step in by_cost(history):
                    writer.add_scalar(tag, value, step)


def _code(text: str) -> str:
    """Text as Markdown that keeps its lines."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _partition_picture(partition: Any, labels: Any, classes: int) -> Any:  # noqa: ANN401
    """Who holds what, ``(height, width, 3)`` in bytes."""
    from matplotlib.image import imread

    from .compare.partition_report import partition_figure

    with tempfile.TemporaryDirectory() as folder:
        path = partition_figure(partition, labels, classes, Path(folder) / "partition.png")
        return (imread(path)[..., :3] * 255).round().astype(np.uint8)
