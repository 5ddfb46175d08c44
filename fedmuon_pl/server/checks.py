"""What Lightning allows and a federated run cannot honour, refused with what to use instead."""

from collections.abc import Mapping
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.accelerators import MPSAccelerator
from pytorch_lightning.strategies import SingleDeviceStrategy

from ..errors import ConfigError
from ..parallel import ClientParallel, processes_of_launcher

__all__ = ["PERSONAL_VAL", "PRECISIONS", "check_trainer", "check_trainer_config"]

PRECISIONS = ("32-true", "64-true", "bf16-mixed")
_ALIASES = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed", "None": "32-true"}

_ONE_PROCESS = ("None", "auto", "single_device")
_CLIENTS = (ClientParallel.strategy_name, ClientParallel.__name__)
_GRADIENTS = "it would average gradients at every local step, and the clients would be one"
_USE_CLIENTS = "leave it at auto, or use trainer.strategy=clients"

PERSONAL_VAL = "client/personal_val_acc"
"""The one tag of the clients that is measured on the validation split."""

_ROUND = "an epoch is a communication round and its clients' local steps belong together"


def check_trainer_config(trainer: Mapping[str, Any]) -> None:
    """Refuses Trainer arguments, as the CLI parsed them, before the Trainer is built.

    Raises:
        ConfigError: Naming the key, its value and what to use instead.
    """

    def refuse(key: str, value: object, instead: str) -> None:
        raise ConfigError(f"trainer.{key}={value} cannot be used here: {instead}")

    get = trainer.get
    if get("max_steps", -1) not in (-1, None):
        refuse("max_steps", get("max_steps"), f"{_ROUND}; set the rounds with trainer.max_epochs")
    if get("min_steps") is not None:
        refuse("min_steps", get("min_steps"), f"{_ROUND}; use trainer.min_epochs")
    if get("max_epochs") in (None, -1) and not get("fast_dev_run"):
        refuse("max_epochs", get("max_epochs"), "set the number of rounds, such as 50")
    if get("val_check_interval") not in (None, 1.0) or isinstance(get("val_check_interval"), str):
        refuse(
            "val_check_interval",
            get("val_check_interval"),
            "validation inside a round would see no aggregated model; use "
            "trainer.check_val_every_n_epoch to validate every n rounds",
        )
    precision = str(get("precision"))
    if _ALIASES.get(precision, precision) not in PRECISIONS:
        refuse(
            "precision",
            precision,
            f"clients share no loss scale, and weights are averaged in full precision; use one of "
            f"{', '.join(PRECISIONS)}",
        )
    if get("gradient_clip_val"):
        refuse(
            "gradient_clip_val",
            get("gradient_clip_val"),
            "clipping is per client and local step; use model.client_clip_norm",
        )
    if get("accumulate_grad_batches", 1) != 1:
        refuse("accumulate_grad_batches", get("accumulate_grad_batches"), "raise data.batch_size")
    for key, harmless in (("limit_train_batches", 1), ("overfit_batches", 0)):
        if get(key) not in (None, harmless):
            refuse(
                key, get(key), "one training batch is a whole round; use server.clients_per_round"
            )
    if get("sync_batchnorm"):
        refuse("sync_batchnorm", True, "statistics would mix clients; buffers are averaged anyway")
    strategy = get("strategy", "auto")
    name = _strategy_name(strategy)
    if name not in (*_ONE_PROCESS, *_CLIENTS):
        refuse("strategy", name, f"{_GRADIENTS}; {_USE_CLIENTS}")
    devices, nodes = get("devices", "auto"), get("num_nodes", 1) or 1
    count = len(devices) if isinstance(devices, list) else devices
    several = str(count) not in ("1", "auto", "None") or nodes != 1
    if str(count) in ("0", "[]"):
        refuse("devices", devices, "use 1, a number of processes, or auto")
    if several and name == "single_device":
        refuse("strategy", name, f"trainer.devices={devices} needs another; leave it at auto")
    launched = processes_of_launcher()
    if launched and str(count).isdigit() and int(count) * nodes != launched[1]:
        by, total, here = launched
        raise ConfigError(
            f"{by} has started {total} process{'es' * (total > 1)}, {here} on each node, but "
            f"trainer.devices={devices} and trainer.num_nodes={nodes}: start as many, or use "
            f"trainer.devices={here} and trainer.num_nodes={total // here}"
        )
    if several or (launched and launched[1] > 1):
        for key in ("limit_val_batches", "limit_test_batches"):
            limit = get(key)
            if limit not in (None, 0) and not (isinstance(limit, float) and limit == 1.0):
                refuse(key, limit, "it would count the batches of each process; use one process")


def _strategy_name(strategy: Any) -> str:  # noqa: ANN401
    """A strategy as parsed (a name, or a class with arguments) or built, by its name."""
    if isinstance(strategy, Mapping):
        return str(strategy.get("class_path")).rsplit(".", 1)[-1]
    if isinstance(strategy, SingleDeviceStrategy):
        return "single_device"
    return str(strategy) if isinstance(strategy, str | None) else type(strategy).__name__


def check_trainer(trainer: Trainer) -> None:
    """The same for a built Trainer, for users of Python.

    Raises:
        ConfigError: Naming the key, its value and what to use instead.
    """
    if isinstance(trainer.accelerator, MPSAccelerator):
        raise ConfigError("trainer.accelerator=mps cannot be used here: it has no float64; use cpu")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = getattr(callback, "monitor", None)
        if str(monitor).startswith(("test/", "client/")) and monitor != PERSONAL_VAL:
            raise ConfigError(
                f"{type(callback).__name__} monitors {monitor}: nothing is chosen on test data; "
                f"use val/acc or another tag of the validation split"
            )
    fast = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
    check_trainer_config(
        {
            "max_steps": -1 if fast else trainer.max_steps,
            "min_steps": trainer.min_steps,
            "max_epochs": trainer.max_epochs,
            "fast_dev_run": fast,
            "val_check_interval": trainer.val_check_interval,
            "precision": trainer.precision,
            "gradient_clip_val": trainer.gradient_clip_val,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "limit_train_batches": None if fast else trainer.limit_train_batches,
            "overfit_batches": trainer.overfit_batches,  # type: ignore[attr-defined]
            "limit_val_batches": None if fast else trainer.limit_val_batches,
            "limit_test_batches": None if fast else trainer.limit_test_batches,
            "sync_batchnorm": getattr(trainer.strategy, "_layer_sync", None),
            "num_nodes": trainer.num_nodes,
            "devices": trainer.num_devices,
            "strategy": trainer.strategy,
        }
    )


def first_difference(saved: Any, own: Any, at: str = "") -> str | None:  # noqa: ANN401
    """Where two nested plain values first differ, in words; None if they do not."""
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        for key in [*own, *(k for k in saved if k not in own)]:
            where = f"{at}.{key}" if at else str(key)
            found = first_difference(saved.get(key), own.get(key), where)
            if found:
                return found
        return None
    return None if saved == own else f"{at} is {saved} there and {own} here"
