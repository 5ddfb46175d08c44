"""Where a run's files lie."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning import Trainer

__all__ = ["run_folder", "state_folder"]


def run_folder(trainer: Trainer) -> Path:
    """The folder of the run: of its ``metrics.csv``, else of its first logger, else the root."""
    from .roundlog import MetricsFile  # which imports what imports this module

    own = [logger.log_dir for logger in trainer.loggers if isinstance(logger, MetricsFile)]
    # Not trainer.log_dir, which all processes would have to call together.
    first = trainer.loggers[0] if trainer.loggers else None
    theirs = getattr(first, "log_dir", None) or getattr(first, "save_dir", None)
    return Path(own[0] if own else theirs or trainer.default_root_dir)


def state_folder(trainer: Trainer, restored: Mapping[str, Any] | None) -> Path:
    """A folder for per-client state that no other run writes to.

    Args:
        trainer: Whose run it is.
        restored: The server's state in the checkpoint that is resumed, if one is.
    """
    from .roundlog import MetricsFile  # which imports what imports this module

    home = run_folder(trainer)
    folder = home / "client_state"
    if any(isinstance(logger, MetricsFile) for logger in trainer.loggers):
        return folder  # the run has a folder to itself
    if restored is not None:
        saved = Path(restored["clients"]["folder"])
        if saved.parent == home.resolve() and saved.is_dir():
            return saved
    home.mkdir(parents=True, exist_ok=True)
    for n in itertools.count(2):
        try:
            folder.mkdir()
        except FileExistsError:
            folder = home / f"client_state-{n}"
        else:
            break
    return folder
