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

__all__ = ["AtomicCheckpointIO", "keep_best"]


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
