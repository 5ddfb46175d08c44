"""Run plans: experiments x algorithms x grids x seeds, as single runs.

A plan is a YAML file (``configs/plan/``). :func:`load_plan` checks it, :meth:`Plan.runs` resolves
it to one command a run; :func:`fedmuon_pl.compare.execute.execute` does them.
"""

import difflib
import itertools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from .runs import flatten, read_yaml

__all__ = ["Choose", "Entry", "Plan", "PlanError", "Run", "flag_text", "load_plan", "parse_plan"]

LAUNCHER: tuple[str, ...] = (sys.executable, "-m", "fedmuon_pl", "fit")


class PlanError(ConfigError):
    """A plan that cannot be run, in one sentence."""


@dataclass(frozen=True)
class Choose:
    """How the best grid point is chosen, from the mean over the plan's seeds.

    Attributes:
        metric: A tag that is not measured on the test set.
        mode: Whether more is better.
        at: The metric's value at the ``last`` round, or its ``best`` round.
    """

    metric: str = "val/acc"
    mode: Literal["max", "min"] = "max"
    at: Literal["last", "best"] = "last"


@dataclass(frozen=True)
class Entry:
    """One algorithm of a plan.

    Attributes:
        label: Its name in folders, tables and figures.
        config: The name of its YAML in ``configs/algorithm``.
        tuned: Whether the tuned YAML is laid over it; ``auto`` means where there is one.
        set: Values for each of its runs, by dotted key.
        grid: Values to try, by dotted key; every combination is one trial.
    """

    label: str
    config: str
    tuned: bool | Literal["auto"] = False
    set: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def points(self) -> list[dict[str, Any]]:
        """The grid's points; a single empty one without a grid."""
        return [
            dict(zip(self.grid, values, strict=True))
            for values in itertools.product(*self.grid.values())
        ]


@dataclass(frozen=True)
class Run:
    """One run: what it is, where it goes, and the command that does it.

    Attributes:
        experiment: The experiment's name in folders.
        algorithm: The label of the plan's algorithm.
        method: The label with the grid point behind an ``@``, as in ``fedavg@lr=0.1``.
        seed: The run's seed.
        point: The grid point, by dotted key.
        folder: ``<root>/<experiment>/<method>-s<seed>``.
        log: Where its output is appended.
        command: The process to start, without ``--ckpt_path``.
        settings: What its YAMLs and flags say, flattened.
        rounds: The planned number of rounds, where that is said.
    """

    experiment: str
    algorithm: str
    method: str
    seed: int
    point: Mapping[str, Any]
    folder: Path
    log: Path
    command: tuple[str, ...]
    settings: Mapping[str, Any]
    rounds: int | None

    @property
    def name(self) -> str:
        """Experiment, method and seed in one word."""
        return f"{self.experiment}/{self.folder.name}"


@dataclass(frozen=True)
class Plan:
    """A checked plan (see the module's docstring and ``configs/plan``)."""

    name: str
    experiments: Sequence[str]
    entries: Sequence[Entry]
    seeds: Sequence[int]
    set: Mapping[str, Any] = field(default_factory=dict)
    jobs: int | None = None
    threads: int = 1
    choose: Choose = Choose()
    root: str = "runs"

    @property
    def has_grid(self) -> bool:
        """Whether there is anything to choose."""
        return any(entry.grid for entry in self.entries)

    def runs(self, root: str | Path | None = None) -> list[Run]:
        """Every run of the plan, in the order in which they are started.

        Args:
            root: The folder for all runs; the plan's own by default.

        Raises:
            PlanError: If a YAML that a run needs is missing, or two runs would share a folder.
        """
        runs = [
            self._run(Path(root or self.root), experiment, entry, point, seed)
            for experiment in self.experiments
            for seed in self.seeds
            for entry in self.entries
            for point in entry.points()
        ]
        folders: set[Path] = set()
        for run in runs:
            if run.folder in folders:
                raise PlanError(f"plan {self.name}: two of its runs would write to {run.folder}")
            folders.add(run.folder)
        return runs

    def _run(
        self, root: Path, experiment: str, entry: Entry, point: Mapping[str, Any], seed: int
    ) -> Run:
        configs = ["base", f"experiment/{experiment}", f"algorithm/{entry.config}"]
        files = [self._config(name) for name in configs]
        if entry.tuned:
            for name, file in self._tuned(experiment, entry).items():
                configs.append(name)
                files.append(file)
        flags = {**self.set, **entry.set, **point}
        settings: dict[str, Any] = {}
        for file in files:
            settings |= flatten(read_yaml(file))
        settings |= flags
        rounds = settings.get("trainer.max_epochs")
        group = experiment.replace("/", "-")
        method = entry.label + ("@" + _point_name(point) if point else "")
        folder = root / group / f"{method}-s{seed}"
        named = {
            "trainer.default_root_dir": str(root),
            "experiment": group,
            "method": method,
            "seed_everything": seed,
        }
        return Run(
            experiment=group,
            algorithm=entry.label,
            method=method,
            seed=seed,
            point=dict(point),
            folder=folder,
            log=root / group / "logs" / f"{folder.name}.log",
            command=(
                *LAUNCHER,
                *(word for name in configs for word in ("-c", name)),
                *(f"--{key}={flag_text(value)}" for key, value in {**flags, **named}.items()),
            ),
            settings=settings,
            rounds=rounds if isinstance(rounds, int) and rounds > 0 else None,
        )

    def _config(self, name: str) -> Path:
        try:
            return _find_config(name)
        except FileNotFoundError as error:
            raise PlanError(f"plan {self.name}: {error}") from None

    def _tuned(self, experiment: str, entry: Entry) -> dict[str, Path]:
        names = [f"tuned/{experiment}/{name}" for name in (entry.label, entry.config)]
        for name in names:
            try:
                return {name: _find_config(name)}
            except FileNotFoundError:
                continue
        if entry.tuned == "auto":
            return {}
        raise PlanError(
            f"plan {self.name}: there is no configs/{names[0]}.yaml; tune it first (fedmuon sweep "
            f"with a grid and --write-tuned), or say tuned: false"
        )


def _find_config(name: str) -> Path:
    from ..configuration import find_config

    return find_config(name)


def flag_text(value: object) -> str:
    """A value as it stands on the command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _point_name(point: Mapping[str, Any]) -> str:
    """A grid point for a folder's name: the shortest ends of the keys that tell them apart."""
    words = []
    for key, value in point.items():
        parts = key.split(".")
        size = 1
        while size < len(parts) and any(
            other != key and other.split(".")[-size:] == parts[-size:] for other in point
        ):
            size += 1
        text = re.sub(r"[^A-Za-z0-9._+-]+", "-", flag_text(value))
        words.append(f"{'.'.join(parts[-size:])}={text}")
    return ",".join(words)


# ---------------------------------------------------------------------------------------------
# Reading a plan

_KEYS = (
    "name", "experiments", "algorithms", "tuned", "seeds", "set", "jobs", "threads", "choose",
    "root", "unequal_trials",
)  # fmt: skip
_ENTRY_KEYS = ("grid", "set", "config", "tuned")
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
            path = _find_config(f"plan/{short}" if short.parts[:1] != ("plan",) else str(short))
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
        twice = sorted(set(entry.grid) & (set(overrides) | set(entry.set)))
        if twice:
            raise PlanError(f"{where}: {entry.label} has {twice[0]} both in grid and in set")
    trials = {entry.label: len(entry.points()) for entry in entries}
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
        entries.append(
            Entry(
                label=label,
                config=config,
                tuned=_tuned(options, here, tuned),
                set=_settings(options.get("set"), f"{here}: set"),
                grid=grid,
            )
        )
    return entries


def _choose(content: object, where: str) -> Choose:
    if content is None:
        return Choose()
    if not isinstance(content, dict):
        raise PlanError(f"{where}: choose should map {', '.join(_CHOOSE_KEYS)}, not {content!r}")
    _known(content, _CHOOSE_KEYS, f"{where}: choose")
    choose = Choose(**content)
    if not isinstance(choose.metric, str) or not choose.metric:
        raise PlanError(f"{where}: choose.metric should be a tag, not {choose.metric!r}")
    if re.search(r"(^|[^a-z])test", choose.metric.lower()):
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
    return choose
