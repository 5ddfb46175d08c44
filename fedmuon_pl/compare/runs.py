"""Reading run folders: which runs exist, whether they are finished, and whether they compare.

A run folder holds ``metrics.csv`` (one row a round, first column ``round``), ``config.yaml``, and,
once its last round is logged, ``done``. Only text files are read here; nothing needs torch.
"""

import csv
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

try:  # libyaml's parser, ten times as fast
    from yaml import CSafeLoader as _SafeLoader
except ImportError:
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

__all__ = [
    "Problem",
    "RunData",
    "done_rounds",
    "flatten",
    "progress",
    "read_runs",
    "read_yaml",
]


@dataclass(frozen=True)
class Problem:
    """A folder that was left out, and why, in one sentence."""

    folder: Path
    reason: str

    def __str__(self) -> str:
        """Folder and reason."""
        return f"{self.folder}: {self.reason}"


@dataclass(frozen=True, eq=False)
class RunData:
    """One run as read from disk.

    Attributes:
        folder: Where it lies.
        experiment: The experiment's name.
        method: The method's name, with the grid point behind an ``@`` where there is one.
        seed: The run's seed.
        config: The saved configuration, flattened to dotted keys; empty where there is none.
        metrics: One row a round, in order; columns are ``round`` and the tags.
        done: Whether the run reached its last round.
    """

    folder: Path
    experiment: str
    method: str
    seed: int
    config: Mapping[str, Any]
    metrics: "pd.DataFrame"
    done: bool


class _Loader(_SafeLoader):
    """YAML in which ``1e-3`` is a number, as it is for LightningCLI (YAML 1.1 wants ``1.0e-3``)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ValueError: If the file is no YAML or holds something else; one sentence with the path.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise ValueError(f"{path} is not valid YAML{where}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold keys and values, not a {type(content).__name__}")
    return content


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as ``{"a.b.c": value}``; lists stay values, empty mappings vanish."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def done_rounds(folder: Path) -> int | None:
    """The number of rounds that the ``done`` file states, or None without a readable one."""
    try:
        return int(json.loads((folder / "done").read_text(encoding="utf-8"))["rounds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def progress(folder: Path, tag: str = "val/acc") -> tuple[int, float | None]:
    """How many rounds ``metrics.csv`` holds and the last measured value of a tag.

    Reads without pandas, and stands a file that is being written: a torn last line counts for
    nothing.
    """
    rounds, value = 0, None
    try:
        with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
            complete = (line for line in file if line.endswith("\n"))
            for row in csv.DictReader(complete):
                rounds = max(rounds, int(row["round"]) + 1)
                if row.get(tag):
                    value = float(row[tag])
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        pass
    return rounds, value


def _read_metrics(path: Path) -> "pd.DataFrame":
    import pandas as pd

    try:
        frame = pd.read_csv(path, encoding="utf-8")
    except pd.errors.EmptyDataError:
        raise ValueError("metrics.csv is empty") from None
    except (pd.errors.ParserError, UnicodeDecodeError):
        raise ValueError("metrics.csv is not a readable table") from None
    if frame.empty:
        raise ValueError("metrics.csv has no round yet")
    if frame.columns[0] != "round":
        raise ValueError(f"metrics.csv starts with column {frame.columns[0]!r}, not 'round'")
    for column in frame.columns:
        try:
            frame[column] = pd.to_numeric(frame[column])
        except (ValueError, TypeError):
            raise ValueError(
                f"metrics.csv holds something that is no number in {column!r}"
            ) from None
    if list(frame["round"]) != list(range(len(frame))):
        raise ValueError("the rounds in metrics.csv are not 0, 1, 2, ... once each")
    return frame


def _read_run(folder: Path, finished_only: bool) -> RunData:
    config_file = folder / "config.yaml"
    config = flatten(read_yaml(config_file)) if config_file.is_file() else {}
    named = re.fullmatch(r"(?P<method>.+)-s(?P<seed>\d+)", folder.name)
    method = config.get("method") or (named and named["method"])
    seed = config.get("seed_everything")
    if seed is None or isinstance(seed, bool):  # `true` means that Lightning drew one
        seed = named and named["seed"]
    if not method or seed is None:
        raise ValueError("neither config.yaml nor the folder's name tells method and seed")
    metrics = _read_metrics(folder / "metrics.csv")
    rounds = done_rounds(folder)
    if rounds is not None and rounds != len(metrics):
        raise ValueError(f"done says {rounds} rounds, but metrics.csv holds {len(metrics)}")
    if rounds is None and finished_only:
        planned = config.get("trainer.max_epochs")
        of = f" of {planned}" if planned else ""
        raise ValueError(f"not finished: it has {len(metrics)}{of} rounds and no done file")
    return RunData(
        folder=folder,
        experiment=str(config.get("experiment") or folder.resolve().parent.name),
        method=str(method),
        seed=int(seed),
        config=config,
        metrics=metrics,
        done=rounds is not None,
    )


def read_runs(
    paths: Iterable[str | Path], *, finished_only: bool = True
) -> tuple[list[RunData], list[Problem]]:
    """Reads every run at or below the given folders.

    Args:
        paths: Run folders, or folders above them.
        finished_only: Leave out (and name) the runs without a ``done`` file.

    Returns:
        The readable runs, ordered by experiment, method and seed, and what was left out.
    """
    runs: dict[tuple[str, str, int], RunData] = {}
    problems: list[Problem] = []
    folders: dict[Path, Path] = {}
    for path in map(Path, paths):
        found = sorted(file.parent for file in path.rglob("metrics.csv"))
        if not found:
            reason = "there is no run in it" if path.is_dir() else "there is no such folder"
            problems.append(Problem(path, reason))
        for folder in found:
            folders.setdefault(folder.resolve(), folder)
    for folder in folders.values():
        try:
            run = _read_run(folder, finished_only)
        except (OSError, ValueError) as error:
            problems.append(Problem(folder, str(error)))
            continue
        first = runs.setdefault((run.experiment, run.method, run.seed), run)
        if first is not run:
            same = f"{run.experiment}, {run.method}, seed {run.seed}"
            problems.append(Problem(folder, f"the same run ({same}) is also in {first.folder}"))
    return [runs[key] for key in sorted(runs)], problems
