"""Whether runs may be compared, and what tells them apart."""

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .runs import RunData

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

__all__ = ["ABSENT", "class_default", "conditions", "decisive", "differences", "settings"]

# Keys under which two fairly compared runs may differ: they say how fast, never what.
_SPEED = re.compile(
    r"^model\.(clients_at_once|channels_last)$"
    r"|(^|\.)(eval_batch_size|num_workers|pin_memory|download|cache)$"
)
_HASHED = ("CIFAR10", "CIFAR100", "FashionMNIST")
_SECTIONS = re.compile(
    r"^(data|server|model)\.|^trainer\.(max_epochs|precision)$|(^|\.)(local_\w+|batch_size)$"
)
_METHOD = re.compile(r"(^|\.)algorithm(\.|$)")
ABSENT = "(absent)"


def _fair(config: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for every method of a comparison."""
    return {
        key: value
        for key, value in decisive(config).items()
        if _SECTIONS.search(key) and not _METHOD.search(key)
    }


def _own(config: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for every seed of a method."""
    method = {key: value for key, value in config.items() if _METHOD.search(key)}
    return {**_fair(config), **method}


def decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what decides no result: the speed, and where known data lie.

    Of data whose files' hashes are not checked, where they lie says which they are.
    """
    name = str(config.get("data.class_path")).rpartition(".")[2]
    known = name in _HASHED and config.get("data.init_args.verify", True) is True
    return {
        key: value
        for key, value in config.items()
        if not _SPEED.search(key) and not (known and key == "data.init_args.root")
    }


def conditions(run: RunData) -> str:
    """Data, cohorts, network, rounds and budget as one text, equal where runs compare.

    Empty for a run without a configuration: nobody can tell.
    """
    if not run.config:
        return ""
    return json.dumps([len(run.metrics), _fair(run.config)], sort_keys=True, default=str)


def settings(runs: Sequence[RunData]) -> "pd.DataFrame":
    """What differs between the methods' configurations, and only that.

    Args:
        runs: The runs of one experiment.

    Returns:
        A row per dotted key, a column per method; values as text, empty where a method has no such
        key, ``a | b`` where its seeds differ.
    """
    import pandas as pd

    paths = re.compile(
        r"^(method|experiment|seed_everything|ckpt_path|threads)$|_dir$|^trainer\.logger"
    )
    values: dict[str, dict[str, str]] = {}
    methods = list(dict.fromkeys(run.method for run in runs))
    for name in methods:
        configs = [run.config for run in runs if run.method == name]
        for key in dict.fromkeys(key for config in configs for key in config):
            texts = dict.fromkeys(_plain(config.get(key, "")) for config in configs)
            if not paths.search(key):
                values.setdefault(key, {})[name] = " | ".join(texts)
    rows = {
        key: [own.get(name, "") for name in methods]
        for key, own in values.items()
        if len({own.get(name, "") for name in methods}) > 1
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=methods)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def class_default(config: Mapping[str, Any], key: str) -> str:
    """What an argument is that this run's version of our class did not have yet: its default.

    An argument that is added leaves by default everything as it was.

    Args:
        config: Of the run, by dotted key.
        key: Of the argument.

    Returns:
        The default as JSON, ``(absent)`` for a class of another package or an unknown argument.
    """
    base, _, name = key.rpartition(".init_args.")
    module, _, owner = str(config.get(f"{base}.class_path")).rpartition(".")
    if module.partition(".")[0] != "fedmuon_pl":
        return ABSENT
    try:
        found = getattr(importlib.import_module(module), owner)
    except (ImportError, AttributeError):
        return ABSENT
    default = inspect.Parameter.empty
    for kind in getattr(found, "__mro__", (found,)):  # the rest goes by **kwargs to the next one
        arguments = inspect.signature(getattr(kind, "__init__", kind)).parameters
        if name in arguments:
            default = arguments[name].default
            break
    return ABSENT if default is inspect.Parameter.empty else json.dumps(default, default=str)


def _apart(values: Mapping[str, str]) -> str:
    """Who has what, empty where all have the same."""
    owners: dict[str, list[str]] = {}
    for name, value in values.items():
        owners.setdefault(value, []).append(name)
    texts = [f"{value} in {', '.join(names)}" for value, names in owners.items()]
    return "; ".join(texts) if len(texts) > 1 else ""


def _differing(
    runs: Mapping[str, RunData], wanted: Callable[[Mapping[str, Any]], Iterable[str]]
) -> Iterable[tuple[str, str]]:
    """Each wanted key of the configurations that is not the same in all, with who has what."""
    for key in sorted({key for run in runs.values() for key in wanted(run.config)}):
        values = {
            name: json.dumps(run.config[key], default=str)
            if key in run.config
            else class_default(run.config, key)
            for name, run in runs.items()
        }
        if who := _apart(values):
            yield key, who


def differences(runs: Sequence[RunData]) -> list[str]:
    """What makes a comparison of these runs unfair, one sentence each; empty where nothing does.

    Compared are data, model, server, rounds, local steps and batch size between the methods of an
    experiment, everything that a method is between its own seeds, and the sets of seeds.
    """
    notes: list[str] = []
    for experiment in dict.fromkeys(run.experiment for run in runs):
        members = [run for run in runs if run.experiment == experiment]
        methods = {
            name: [run for run in members if run.method == name]
            for name in dict.fromkeys(run.method for run in members)
        }
        for name, own in methods.items():
            known = {f"seed {run.seed}": run for run in own if run.config}
            notes += [
                f"{experiment}, {name}: its seeds differ in {key}: {who}"
                for key, who in _differing(known, _own)
            ]
        firsts = {name: own[0] for name, own in methods.items() if own[0].config}
        notes += [
            f"{experiment}: not the same data, cohort or budget, {key}: {who}"
            for key, who in _differing(firsts, _fair)
        ]
        notes += [
            f"{experiment}: {run.folder} has no config.yaml to tell whether it compares"
            for run in members
            if not run.config
        ]
        seeds = {name: str(sorted(run.seed for run in own)) for name, own in methods.items()}
        lengths = {n: str(max(len(run.metrics) for run in own)) for n, own in methods.items()}
        for what, values in (("seeds", seeds), ("rounds", lengths)):
            if who := _apart(values):
                notes.append(f"{experiment}: not the same {what}: {who}")
        parents = sorted({str(run.folder.parent) for run in members})
        if len(parents) > 1:
            notes.append(f"{experiment}: its runs come from several folders: {', '.join(parents)}")
    return notes
