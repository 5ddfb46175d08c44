"""Run plans: experiments x algorithms x grids x seeds, as single runs.

A plan is a YAML file (``configs/plan/``), read by :mod:`fedmuon_pl.compare.plan_file`.
:meth:`Plan.runs` resolves it to one command a run; :func:`fedmuon_pl.compare.execute.execute` does
them.
"""

import functools
import itertools
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from .runs import flatten, read_yaml

__all__ = ["Choose", "Entry", "Plan", "PlanError", "Range", "Run", "Search", "flag_text"]

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
class Range:
    """What a search may try for one key: a range of numbers, or a choice of values.

    Attributes:
        low: The smallest.
        high: The greatest.
        log: Whether it is searched on a logarithmic scale.
        choices: Values instead of a range.
    """

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Search:
    """How points are proposed where an algorithm has a search instead of a grid (Optuna).

    Attributes:
        trials: Points for each algorithm, the same number for all.
        sampler: ``tpe`` or ``random``.
        batch: So many are proposed at a time, knowing the results of the batches before.
        seed: Of the sampler.
    """

    trials: int
    sampler: Literal["tpe", "random"] = "tpe"
    batch: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Entry:
    """One algorithm of a plan.

    Attributes:
        label: Its name in folders, tables and figures.
        config: The name of its YAML in ``configs/algorithm``.
        tuned: Whether the tuned YAML is laid over it; ``auto`` means where there is one.
        set: Values for each of its runs, by dotted key.
        grid: Values to try, by dotted key; every combination is one trial.
        search: What the plan's search may try, by dotted key; instead of a grid.
        proposed: The points that a search has proposed so far.
    """

    label: str
    config: str
    tuned: bool | Literal["auto"] = False
    set: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    search: Mapping[str, Range] = field(default_factory=dict)
    proposed: Sequence[Mapping[str, Any]] = ()

    def points(self) -> list[dict[str, Any]]:
        """The grid's points, or those a search proposed; a single empty one without either."""
        if self.search:
            return [dict(point) for point in self.proposed]
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
    """A checked plan (see the module's docstring and ``configs/plan``).

    ``rounds`` takes the place of every run's own number, and evaluations then come as often as
    before, or more often where the last round would not be evaluated.
    """

    name: str
    experiments: Sequence[str]
    entries: Sequence[Entry]
    seeds: Sequence[int]
    set: Mapping[str, Any] = field(default_factory=dict)
    jobs: int | None = None
    threads: int = 1
    choose: Choose = Choose()
    root: str = "runs"
    search: Search | None = None
    slurm: Mapping[str, Any] = field(default_factory=dict)
    rounds: int | None = None

    @property
    def has_grid(self) -> bool:
        """Whether there is anything to choose."""
        return any(entry.grid or entry.search for entry in self.entries)

    def runs(
        self, root: str | Path | None = None, only: Collection[str] | None = None
    ) -> list[Run]:
        """Every run of the plan, in the order in which they are started.

        Args:
            root: The folder for all runs; the plan's own by default.
            only: Their names (:attr:`Run.name`); None for all.

        Raises:
            PlanError: If it has no run of a name, a YAML that a run needs is missing, two runs
                would share a folder, or the last round of one would not be evaluated.
        """
        read = functools.cache(lambda file: flatten(read_yaml(file)))  # most runs share files
        runs = [
            self._run(Path(root or self.root), experiment, entry, point, seed, read)
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
        if only is None:
            return runs
        missing = sorted(set(only) - {run.name for run in runs})
        if missing:
            raise PlanError(f"plan {self.name} has no run {missing[0]}")
        return [run for run in runs if run.name in only]

    def _run(
        self,
        root: Path,
        experiment: str,
        entry: Entry,
        point: Mapping[str, Any],
        seed: int,
        read: Callable[[Path], Mapping[str, Any]],
    ) -> Run:
        configs = ["base", f"experiment/{experiment}", f"algorithm/{entry.config}"]
        files = [self._config(name) for name in configs]
        if entry.tuned:
            for name, file in self._tuned(experiment, entry).items():
                configs.append(name)
                files.append(file)
        flags = {**self.set, **entry.set, **point}
        settings: dict[str, Any] = {}
        for layer in (*map(read, files), flags):
            lay_over(settings, layer)
        every = settings.get("trainer.check_val_every_n_epoch") or 1
        if self.rounds:
            flags["trainer.max_epochs"] = self.rounds
            fitting = max(n for n in range(1, every + 1) if self.rounds % n == 0)
            if fitting != every:
                flags["trainer.check_val_every_n_epoch"] = every = fitting
            settings |= flags
        rounds = settings.get("trainer.max_epochs")
        if isinstance(rounds, int) and rounds > 0 and rounds % every:
            raise PlanError(
                f"plan {self.name}: {entry.label} has trainer.max_epochs={rounds} and "
                f"trainer.check_val_every_n_epoch={every}, so that its last round would not be "
                f"evaluated; make the first a multiple of the second"
            )
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


def lay_over(settings: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Lays flattened settings over others, in place: null takes a class away, a class a null."""
    for key, value in layer.items():
        parent = key
        while "." in parent:
            parent = parent.rpartition(".")[0]
            settings.pop(parent, None)
        if value is None:
            for below in [name for name in settings if name.startswith(f"{key}.")]:
                del settings[below]
        settings[key] = value


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
