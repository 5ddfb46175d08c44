"""``fedmuon fit``, ``validate`` and ``test``: a LightningCLI over the federated module."""

import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import NonNegativeInt
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException

# Imported so that a configuration can name their classes without a module.
from . import algorithms, models, schedules, tasks  # noqa: F401
from .arguments import ConfigName, Parser, root_cause
from .data import catalogue  # noqa: F401
from .data.datamodule import FederatedDataModule
from .environment import record_start
from .errors import ConfigError, FedMuonError
from .hardware import cores
from .module import FederatedModule
from .parallel import ClientParallel, processes_of_launcher, processes_threads
from .server.callback import FederatedServer
from .server.checks import check_trainer_config
from .server.folders import run_folder
from .server.progress import RoundProgressBar
from .server.roundlog import MetricsFile, RoundLog
from .server.state import MissingClientState
from .tensorboard import TensorBoardPages

__all__ = ["FederatedCLI", "train_main"]


class _SaveRunConfig(SaveConfigCallback):
    """Saves ``config.yaml`` when training starts, as resolved, and notes where it was started."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Nothing yet."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file."""
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        assert isinstance(pl_module, FederatedModule)
        for name in ("clients_at_once", "channels_last"):
            self.config.model[name] = pl_module.engine()[name]
        path = run_folder(trainer) / self.config_filename
        path.parent.mkdir(parents=True, exist_ok=True)
        self.parser.save(self.config, str(path), skip_unset=False, overwrite=True, multifile=False)
        kept = ("threads", "processes", "device")
        engine = {k: v for k, v in pl_module.engine().items() if k in kept}
        record_start(path.parent, trainer.current_epoch, **engine)


class FederatedCLI(LightningCLI):
    """LightningCLI with a server, short configuration names and one folder for each run."""

    def __init__(self, args: list[str]) -> None:
        self._command = args[0]
        super().__init__(
            FederatedModule,
            FederatedDataModule,
            subclass_mode_data=True,
            save_config_callback=_SaveRunConfig,
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=args,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The one that was asked for, alone: a parser of each takes a fifth of a second."""
        loaders = (
            {"train_dataloaders", "val_dataloaders"} if self._command == "fit" else {"dataloaders"}
        )
        return {self._command: {"model", "datamodule", "weights_only", *loaders}}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:  # noqa: ANN401
        """A parser whose ``-c`` takes short names."""
        parser = Parser(**{"prog": "fedmuon", **kwargs})
        parser.add_argument(
            "-c", "--config", action=ConfigName, help="A configuration: a file or a short name."
        )
        return parser

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """One seed for the run."""
        parser.add_argument(
            "--seed_everything",
            type=NonNegativeInt,
            default=0,
            help="The run's seed: x^0, cohorts, batches, dropout. The partition has its own.",
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The server, and what names the run's folder."""
        parser.add_lightning_class_args(FederatedServer, "server")
        parser.link_arguments("seed_everything", "model.seed")
        parser.add_argument(
            "--experiment", type=str, default="default", help="Names the folder of the comparison."
        )
        parser.add_argument(
            "--method", type=str | None, help="Names the run's folder; the algorithm if null."
        )
        parser.add_argument(
            "--threads",
            type=int | None,
            help="CPU threads of each process; if null torch's choice, or a share of the cores.",
        )

    def _parse_ckpt_path(self) -> None:
        """Nothing: a checkpoint never changes the configuration."""

    # -- before anything is built ---------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Checks what can be checked early, and names the run's folder."""
        config = self.config[self.subcommand]
        if config.threads is not None and config.threads < 1:
            raise ConfigError(f"threads={config.threads}: must be at least 1")
        check_trainer_config(config.trainer.as_dict())
        if config.trainer.accelerator == "auto":
            # Sums are in float64, which Apple's MPS, Lightning's choice on a Mac, does not have.
            config.trainer.accelerator = "cuda" if torch.cuda.is_available() else "cpu"
        self._resolve_processes(config)
        root = Path(config.trainer.default_root_dir or "runs")
        method = config.method or config.model.algorithm.class_path.rsplit(".", 1)[-1].lower()
        self.experiment, self.run_name = config.experiment, f"{method}-s{config.seed_everything}"
        self.root = root
        self.folder = root / self.experiment / self.run_name
        self.checkpoint = self._find_checkpoint(config.ckpt_path)
        fast = bool(config.trainer.fast_dev_run)
        if self.subcommand == "fit" and not fast and self.checkpoint is None and self._has_run():
            raise ConfigError(
                f"{self.folder} already holds a run: resume it with --ckpt_path last (or auto, "
                f"which also starts what is new), or remove it, or write elsewhere with "
                f"--trainer.default_root_dir, --experiment or --method"
            )

    def _resolve_processes(self, config: Any) -> None:  # noqa: ANN401
        """Settles processes and threads, so that the saved configuration says what was used."""
        trainer = config.trainer
        on_cpu = trainer.accelerator == "cpu"
        given = None if str(trainer.devices) in ("auto", "-1") else trainer.devices
        if on_cpu:
            if given is not None and not (str(given).isdigit() and int(given) > 0):
                raise ConfigError(
                    f"trainer.devices={given}: on a CPU it is the number of processes, or auto"
                )
            clients = config.server.clients_per_round if "server" in config else None
            trainer.devices, config.threads = processes_threads(
                None if given is None else int(given),
                config.threads,
                clients if isinstance(clients, int) else None,
            )
        elif given is None and trainer.accelerator in ("cuda", "gpu"):
            launched = processes_of_launcher()
            trainer.devices = launched[2] if launched else torch.cuda.device_count()
        if not on_cpu and config.threads is None and str(trainer.devices).isdigit():
            share = max(1, cores() // max(1, int(trainer.devices)))
            config.threads = min(torch.get_num_threads(), share)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        config.threads = torch.get_num_threads()
        several = str(trainer.devices) not in ("1", "[0]") or trainer.num_nodes > 1
        if several and trainer.strategy in ("auto", None):
            trainer.strategy = ClientParallel.strategy_name

    def _has_run(self) -> bool:
        """Whether there is anything to lose; a run that died before its first checkpoint is not."""
        return any((self.folder / name).exists() for name in ("checkpoints", "done"))

    def _find_checkpoint(self, given: str | None) -> str | None:
        if given is None:
            if self.subcommand != "fit":
                raise ConfigError(
                    f"{self.subcommand} needs --ckpt_path: last, best or a file; without one it "
                    f"would evaluate untrained weights"
                )
            return None
        name = str(given)
        if name == "auto" and self.subcommand == "fit":
            path = self.folder / "checkpoints" / "last.ckpt"
            return str(path) if path.is_file() else None
        known = name in ("last", "best")
        path = self.folder / "checkpoints" / f"{name}.ckpt" if known else Path(name)
        if not path.is_file():
            hint = f"; --ckpt_path {name} is that of the run {self.folder}" if known else ""
            raise ConfigError(f"there is no checkpoint {path}{hint}")
        return str(path)

    def instantiate_classes(self) -> None:
        """Builds everything; what an argument has against its value is one sentence."""
        try:
            super().instantiate_classes()
        except ValueError as e:
            raise ConfigError(str(root_cause(e))) from e

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:  # noqa: ANN401
        """A Trainer whose loggers, checkpoints and configuration lie in the run's folder."""
        trainer = dict(self._get(self.config_init, "trainer"))
        trainer["default_root_dir"] = str(self.folder)
        trainer["logger"] = self._loggers(trainer.get("logger"))
        if SLURMEnvironment.detect() and not trainer.get("plugins"):
            # Lightning's requeueing saves in the middle of a round.
            trainer["plugins"] = [SLURMEnvironment(auto_requeue=False)]
            _end_round_on(signal.SIGUSR1)
        callbacks = [self._get(self.config_init, "server"), RoundLog(), TensorBoardPages()]
        if trainer.get("enable_progress_bar") is not False and self.subcommand == "fit":
            callbacks.append(RoundProgressBar())
        built = self._instantiate_trainer(trainer, callbacks)
        if isinstance(built.strategy, ClientParallel) and built.strategy.threads is None:
            built.strategy.threads = torch.get_num_threads()
        for callback in built.checkpoint_callbacks:
            if getattr(callback, "dirpath", "") is None:
                # Absolute: ModelCheckpoint forgets the best so far where the text differs.
                callback.dirpath = str((self.folder / "checkpoints").resolve())  # type: ignore[attr-defined]
        return built

    def _loggers(self, given: Any) -> Any:  # noqa: ANN401
        if self.subcommand != "fit":
            return DummyLogger()  # nothing is written, and the results are printed
        if given is False:
            return False
        if given in (None, True):
            given = [
                TensorBoardLogger(
                    str(self.root), self.experiment, self.run_name, default_hp_metric=False
                )
            ]
        loggers = given if isinstance(given, list) else [given]
        return [*loggers, MetricsFile(self.folder)]

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """With the checkpoint that was found."""
        return {**super()._prepare_subcommand_kwargs(subcommand), "ckpt_path": self.checkpoint}


def _end_round_on(number: signal.Signals) -> None:
    """Lets a signal do what SIGTERM does: the run ends at its round's end, to be resumed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, lambda *_: os.kill(os.getpid(), signal.SIGTERM))


def train_main(args: list[str]) -> int:
    """``fedmuon fit|validate|test``.

    Args:
        args: The command line, beginning with the command.

    Returns:
        The exit status: 0, or 2 after one sentence on the standard error.
    """
    _quieten()
    try:
        FederatedCLI(args)
    except (FedMuonError, MisconfigurationException, MissingClientState) as e:
        if os.environ.get("FEDMUON_DEBUG"):
            raise
        print(f"fedmuon: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    return 0


def _quieten() -> None:
    """Warnings that are known to be false here, each with its reason."""
    # Lightning calls a jsonargparse method that was renamed; nothing a user can do.
    warnings.filterwarnings("ignore", message=r"(?s).*instantiate_classes.*deprecated")
    warnings.filterwarnings("ignore", message=r"(?s).*one JsonargparseDeprecationWarning per type")
    # A resumed run goes on in its own folder; other runs are refused there.
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
    # keep_best has seen to it before Lightning looks.
    warnings.filterwarnings("ignore", message="The dirpath has changed from")
    # Rounds before the first validation (trainer.check_val_every_n_epoch); later Lightning raises.
    warnings.filterwarnings("ignore", message=".*could not find the monitored key")
    # The arguments come from main(), also in tests and notebooks.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
