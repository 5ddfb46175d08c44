"""Checkpoints that a kill at any moment leaves whole."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from ..errors import ConfigError

__all__ = ["AtomicCheckpointIO", "check_saving", "keep_best", "states_in_use"]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and moves, so that a reader never sees half a file.

    Lightning's own goes through a temporary folder, and across file systems the last move copies.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,  # noqa: ANN401
    ) -> None:
        """See :class:`TorchCheckpointIO`."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        with part.open("wb") as f:
            torch.save(checkpoint, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, target)


def check_saving(trainer: Trainer) -> None:
    """Has every ModelCheckpoint save at a round's end, where a run can be resumed.

    Lightning saves after the validation where that is not in every epoch: before the round's end.

    Raises:
        ConfigError: If one asks for another moment, or keeps the best of several by a metric that
            was not measured in the rounds between.
    """
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint):
            continue
        if callback._every_n_train_steps >= 1 or callback._train_time_interval is not None:
            raise ConfigError(
                "a ModelCheckpoint with every_n_train_steps or train_time_interval would save "
                "inside a round; use every_n_epochs"
            )
        if callback._save_on_train_epoch_end is None:
            callback._save_on_train_epoch_end = True
        if not callback._save_on_train_epoch_end:
            raise ConfigError(
                "a ModelCheckpoint with save_on_train_epoch_end=False would save before the "
                "round's end, and could not be resumed; leave it out"
            )
        every = trainer.check_val_every_n_epoch or 1
        several = callback.monitor is not None and callback.save_top_k not in (-1, 0, 1)
        if several and callback._every_n_epochs % every:
            raise ConfigError(
                f"a ModelCheckpoint with save_top_k={callback.save_top_k} would rank rounds "
                f"without validation by the value of an earlier one; set its every_n_epochs to "
                f"trainer.check_val_every_n_epoch={every}"
            )


def _known_checkpoints(trainer: Trainer) -> list[Path]:
    """The checkpoints that the run may be resumed from, as far as it knows them."""
    found: dict[Path, None] = {}
    for callback in trainer.checkpoint_callbacks:
        folder = getattr(callback, "dirpath", None)
        if folder:  # also below it: a slash in a metric's name makes a folder
            found |= dict.fromkeys(Path(folder).rglob("*.ckpt"))
        if isinstance(callback, ModelCheckpoint):
            kept = (*callback.best_k_models, callback.last_model_path, callback.best_model_path)
            found |= dict.fromkeys(Path(path) for path in kept if path)
    if trainer.ckpt_path:
        found[Path(trainer.ckpt_path)] = None
    return [path for path in found if path.is_file()]


def states_in_use(trainer: Trainer, key: str) -> list[Any] | None:
    """The indexes of per-client state in the checkpoints that the run may be resumed from.

    Args:
        trainer: Whose checkpoints they are.
        key: Of the server among the callbacks.

    Returns:
        One for each checkpoint that has any; None if one cannot be read, and so may need all.
    """
    states = []
    for path in _known_checkpoints(trainer):
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as e:  # of somebody else, in any format
            warnings.warn(
                f"per-client state is kept as {path} cannot be read, which may need it: {e}",
                stacklevel=2,
            )
            return None
        # Weights alone, or another trainer's checkpoint, have no index.
        server = saved.get("callbacks", {}).get(key, {})
        if "clients" in server:
            states.append(server["clients"])
    return states


def keep_best(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Lets a run go on in another folder with the best checkpoints that it has so far.

    Where the folder's name differs, Lightning forgets them, and a worse one would become the best.

    Args:
        trainer: About to restore from its ``ckpt_path``.
        checkpoint: Its content; the state of every ModelCheckpoint is changed to the new folder.
    """
    for callback in trainer.checkpoint_callbacks:
        state = checkpoint["callbacks"].get(callback.state_key)
        if not isinstance(callback, ModelCheckpoint) or state is None:
            continue
        here, there = callback.dirpath, state["dirpath"]
        if here is None or there is None or str(here) == there:
            continue

        def moved(path: str, here: Any = here, there: str = there) -> str:  # noqa: ANN401
            return os.path.join(here, os.path.relpath(path, there)) if path else path

        # They lie beside the checkpoint if the folder was moved or copied.
        beside = Path(str(trainer.ckpt_path)).parent
        # One process copies; what is there afterwards is what it says.
        for path in state["best_k_models"] if trainer.is_global_zero else ():
            target = Path(moved(path))
            homes = [beside / os.path.relpath(path, there), Path(path)]
            source = next((p for p in homes if p.is_file()), None)
            if source is not None and source.resolve() != target.resolve():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        best = {moved(k): v for k, v in state["best_k_models"].items() if Path(moved(k)).is_file()}
        best = trainer.strategy.broadcast(best)
        for key in ("best_model_path", "kth_best_model_path", "last_model_path"):
            state[key] = moved(state[key])
        if len(best) < len(state["best_k_models"]):
            warnings.warn(
                f"the best checkpoint so far, of {there}, is not there any more: what is best is "
                f"chosen from the rounds to come",
                stacklevel=2,
            )
        else:
            state.update(best_k_models=best, dirpath=str(here))
