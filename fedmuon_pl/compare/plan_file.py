"""Reading a plan's YAML, and saying in one sentence what is wrong with it."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from . import plan
from .names import higher_is_better
from .plan import Choose, Entry, Plan, PlanError, Range, Search, flag_text
from .runs import flatten, read_yaml

__all__ = ["load_plan", "parse_plan"]

_KEYS = (
    "name", "experiments", "algorithms", "tuned", "seeds", "set", "jobs", "threads", "choose",
    "root", "unequal_trials", "search", "slurm",
)  # fmt: skip
_ENTRY_KEYS = ("grid", "search", "set", "config", "tuned")
_RANGE_KEYS = ("low", "high", "log", "choices")
_SEARCH_KEYS = ("trials", "sampler", "batch", "seed")
_CHOOSE_KEYS = ("metric", "mode", "at")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


def load_plan(name: str | Path) -> Plan:
    """Reads and checks a plan.

    Args:
        name: An existing file, or a short name such as ``quickstart``: looked for as
            ``configs/plan/quickstart.yaml`` here and then among the packaged configurations.

    Raises:
        PlanError: If there is no such plan, or it says something that cannot be.
    """
    path = Path(name)
    if not path.is_file():
        short = path.with_suffix("") if path.suffix in (".yaml", ".yml") else path
        try:
            path = plan._find_config(
                f"plan/{short}" if short.parts[:1] != ("plan",) else str(short)
            )
        except FileNotFoundError as error:
            raise PlanError(f"there is no plan {str(name)!r}: {error}") from None
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        raise PlanError(f"the plan cannot be read: {error}") from None
    return parse_plan({"name": path.stem, **content})


def parse_plan(content: Mapping[str, Any]) -> Plan:
    """Checks a plan's content.

    Raises:
        PlanError: One sentence that names the key and the value.
    """
    name = content.get("name", "?")
    where = f"plan {name}"
    _known(content, _KEYS, where)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PlanError(f"{where}: name should be a word, not {name!r}")
    experiments = _list(content, "experiments", str, where)
    seeds = _list(content, "seeds", int, where)
    if min(seeds) < 0:
        raise PlanError(f"{where}: seeds should be 0 or more, not {min(seeds)}")
    tuned = _tuned(content, where, False)
    entries = _entries(content.get("algorithms"), tuned, where)
    jobs = content.get("jobs", "auto")
    if jobs != "auto" and (not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1):
        raise PlanError(f"{where}: jobs should be auto or a number from 1, not {jobs!r}")
    threads = content.get("threads", 1)
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise PlanError(f"{where}: threads should be a number from 1, not {threads!r}")
    root = content.get("root", "runs")
    if not isinstance(root, str) or not root:
        raise PlanError(f"{where}: root should be a folder, not {root!r}")
    overrides = _settings(content.get("set"), f"{where}: set")
    for entry in entries:
        tried = set(entry.grid) | set(entry.search)
        twice = sorted(tried & (set(overrides) | set(entry.set)))
        if twice:
            kind = "grid" if entry.grid else "search"
            raise PlanError(f"{where}: {entry.label} has {twice[0]} both in {kind} and in set")
    search = _search(content.get("search"), where)
    searching = [entry.label for entry in entries if entry.search]
    if searching and search is None:
        raise PlanError(f"{where}: {searching[0]} is searched, but the plan has no search: trials")
    trials = {
        entry.label: search.trials if entry.search and search else len(entry.points())
        for entry in entries
    }
    if len(set(trials.values())) > 1 and not _bool(content, "unequal_trials", where):
        counts = ", ".join(f"{label} {count}" for label, count in trials.items())
        raise PlanError(
            f"{where}: every algorithm should have the same number of trials, but they have "
            f"{counts}; even them out, or say unequal_trials: true"
        )
    return Plan(
        name=name,
        experiments=experiments,
        entries=entries,
        seeds=seeds,
        set=overrides,
        jobs=None if jobs == "auto" else jobs,
        threads=threads,
        choose=_choose(content.get("choose"), where),
        root=root,
        search=search,
        slurm=_settings(content.get("slurm"), f"{where}: slurm"),
    )


def _known(content: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    for key in content:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise PlanError(f"{where}: unknown key {key!r}{hint}; allowed are {', '.join(allowed)}")


def _bool(content: Mapping[str, Any], key: str, where: str) -> bool:
    value = content.get(key, False)
    if not isinstance(value, bool):
        raise PlanError(f"{where}: {key} should be true or false, not {value!r}")
    return value


def _tuned(
    content: Mapping[str, Any], where: str, default: bool | Literal["auto"]
) -> bool | Literal["auto"]:
    value = content.get("tuned", default)
    if value == "auto":
        return "auto"
    if not isinstance(value, bool):
        raise PlanError(f"{where}: tuned should be true, false or auto, not {value!r}")
    return value


def _list(content: Mapping[str, Any], key: str, kind: type, where: str) -> list[Any]:
    values = content.get(key)
    word = {str: "names", int: "whole numbers"}[kind]
    if (
        not isinstance(values, list)
        or not values
        or any(not isinstance(v, kind) or isinstance(v, bool) for v in values)
    ):
        raise PlanError(f"{where}: {key} should be a list of {word}, not {values!r}")
    for value in values:
        if values.count(value) > 1:
            raise PlanError(f"{where}: {key} has {value!r} more than once")
    return values


def _settings(content: object, where: str) -> dict[str, Any]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise PlanError(f"{where} should map dotted keys to values, not {content!r}")
    return flatten(content)


def _entries(content: object, tuned: bool | Literal["auto"], where: str) -> list[Entry]:
    if isinstance(content, list):
        names = _list({"algorithms": content}, "algorithms", str, where)
        content = dict.fromkeys(names)
    if not isinstance(content, dict) or not content:
        raise PlanError(
            f"{where}: algorithms should be a list of names, or map names to "
            f"{', '.join(_ENTRY_KEYS)}, not {content!r}"
        )
    entries = []
    for label, options in content.items():
        here = f"{where}: algorithm {label}"
        if not isinstance(label, str) or not _NAME.fullmatch(label):
            raise PlanError(f"{where}: {label!r} is not a name for an algorithm")
        options = {} if options is None else options
        if not isinstance(options, dict):
            raise PlanError(f"{here} should map {', '.join(_ENTRY_KEYS)}, not be {options!r}")
        _known(options, _ENTRY_KEYS, here)
        config = options.get("config", label)
        if not isinstance(config, str) or not config:
            raise PlanError(f"{here}: config should be the name of a YAML, not {config!r}")
        grid = _settings(options.get("grid"), f"{here}: grid")
        for key in grid:
            values = grid[key]
            if not isinstance(values, list) or not values:
                raise PlanError(f"{here}: grid {key} should be a list of values, not {values!r}")
            if len({flag_text(value) for value in values}) < len(values):
                raise PlanError(f"{here}: grid {key} has a value more than once: {values!r}")
        ranges = _ranges(options.get("search"), f"{here}: search")
        if grid and ranges:
            raise PlanError(f"{here} has both a grid and a search")
        entries.append(
            Entry(
                label=label,
                config=config,
                tuned=_tuned(options, here, tuned),
                set=_settings(options.get("set"), f"{here}: set"),
                grid=grid,
                search=ranges,
            )
        )
    return entries


def _choose(content: object, where: str) -> Choose:
    if content is None:
        return Choose()
    if not isinstance(content, dict):
        raise PlanError(f"{where}: choose should map {', '.join(_CHOOSE_KEYS)}, not {content!r}")
    _known(content, _CHOOSE_KEYS, f"{where}: choose")
    high = higher_is_better(str(content.get("metric", Choose.metric)))
    choose = Choose(**{"mode": "max" if high else "min", **content})
    if not isinstance(choose.metric, str) or not choose.metric:
        raise PlanError(f"{where}: choose.metric should be a tag, not {choose.metric!r}")
    # client/acc_mean and the like are measured on the test set too.
    measured_there = re.search(r"(^|[^a-z])test", choose.metric.lower())
    client = choose.metric.startswith("client/") and "val" not in choose.metric
    if measured_there or client:
        raise PlanError(
            f"{where}: choose.metric is {choose.metric}, but nothing is chosen on test data: use a "
            f"validation metric such as val/acc"
        )
    for key, allowed in (("mode", ("max", "min")), ("at", ("last", "best"))):
        if getattr(choose, key) not in allowed:
            value = getattr(choose, key)
            raise PlanError(
                f"{where}: choose.{key} should be {' or '.join(allowed)}, not {value!r}"
            )
    known = choose.metric.rpartition("/")[2] in ("acc", "loss")
    if known and (choose.mode == "max") is not high:
        raise PlanError(
            f"{where}: choose.mode is {choose.mode}, which takes the worst by {choose.metric}"
        )
    return choose


def _ranges(content: object, where: str) -> dict[str, Range]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise PlanError(f"{where} should map dotted keys to ranges, not {content!r}")
    found = {}
    for key, options in content.items():
        here = f"{where} {key}"
        if not isinstance(options, dict) or ("choices" in options) == ("low" in options):
            raise PlanError(f"{here} should be {{low, high, log}} or {{choices}}, not {options!r}")
        _known(options, _RANGE_KEYS, here)
        if "choices" in options:
            values = options["choices"]
            if not isinstance(values, list) or len(values) < 2:
                raise PlanError(f"{here}: choices should be a list of values, not {values!r}")
            found[key] = Range(choices=tuple(values))
            continue
        low, high = options["low"], options.get("high", math.nan)
        log = _bool(options, "log", here)
        if not (_number(low) and _number(high) and low < high) or (log and low <= 0):
            rule = "0 < low < high" if log else "low < high"
            raise PlanError(f"{here} should have {rule}, not {low!r} and {high!r}")
        found[key] = Range(float(low), float(high), log)
    return found


def _number(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, int | float) and not isinstance(value, bool)


def _search(content: object, where: str) -> Search | None:
    if content is None:
        return None
    if not isinstance(content, dict) or "trials" not in content:
        keys = ", ".join(_SEARCH_KEYS)
        raise PlanError(f"{where}: search should map trials and more of {keys}, not {content!r}")
    _known(content, _SEARCH_KEYS, f"{where}: search")
    search = Search(**content)
    for key, least in (("trials", 1), ("batch", 1), ("seed", 0)):
        value = getattr(search, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise PlanError(f"{where}: search.{key} should be a number from {least}, not {value!r}")
    if search.sampler not in ("tpe", "random"):
        raise PlanError(f"{where}: search.sampler should be tpe or random, not {search.sampler!r}")
    return search
