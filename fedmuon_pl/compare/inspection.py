"""What a planned run's folder says: whether it is new, half done, finished, or another run's.

A run's folder is the only memory of a plan.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ..environment import FILE
from .fairness import ABSENT, class_default, decisive
from .plan import Run, flag_text
from .runs import done_rounds, flatten, progress, read_yaml

__all__ = ["State", "deciding", "finished", "inspect"]

State = Literal["new", "resume", "remains", "finished", "blocked"]


def inspect(run: Run) -> tuple[State, str]:
    """What is to be done for a run, and for ``blocked`` why nothing can be.

    ``remains`` are of a run that died before its first checkpoint: they are cleared by the start.
    """
    folder = run.folder
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return "new", ""
    traces = (folder / "config.yaml", folder / "metrics.csv", *folder.glob("events.out.tfevents*"))
    if not folder.is_dir() or folder.is_symlink() or not any(path.is_file() for path in traces):
        return "blocked", f"{folder} is no run's folder; move it away"
    last = (folder / "checkpoints" / "last.ckpt").is_file()
    marked = (folder / "done").exists()
    if not last and not marked and not any(folder.rglob("*.ckpt")):
        return "remains", ""
    conflict = _conflict(run)
    if conflict:
        return "blocked", f"{folder} was made with other settings ({conflict}); move it away"
    if finished(run):
        return "finished", ""
    if last:
        return "resume", ""
    return "blocked", f"{folder} is unfinished and has no checkpoints/last.ckpt; move it away"


def finished(run: Run) -> bool:
    """Round R is logged and the marker written; an exit code says nothing."""
    rounds = done_rounds(run.folder)
    return rounds is not None and min(rounds, progress(run.folder)[0]) >= (run.rounds or rounds)


def _conflict(run: Run) -> str | None:
    """The first planned value that the folder's run contradicts.

    A finished run is only as good as its settings: after a new tuning, its old result must not
    stand for the new learning rate. Only what decides the result is compared. A run that a plan
    made has what was planned in ``environment.json``: that is compared both ways. In
    ``config.yaml``, which every run has, are all defaults too, and ``auto`` and paths as resolved.
    """
    try:
        saved = flatten(read_yaml(run.folder / "config.yaml"))
    except (OSError, ValueError):
        return None  # reported by whoever reads the run
    done = done_rounds(run.folder)
    if done is not None and run.rounds is not None and done > run.rounds:
        return f"it has {done} rounds, and the plan {run.rounds}"
    planned, before = deciding(run.settings), _planned_before(run)
    for key, value in planned.items():
        if key in before:
            if not _same(key, before[key], value, short=False):
                return _differs(key, before[key], value)
        elif key in saved:
            resolved = value == "auto" or "/" in flag_text(saved[key]) + flag_text(value)
            if not resolved and not _same(key, saved[key], value):
                return _differs(key, saved[key], value)
        else:
            parent = next((p for p in _parents(key) if p in saved), None)
            if parent is not None:  # null there, a class here
                return _differs(parent, saved[parent], planned.get(f"{parent}.class_path", "set"))
            if value is None and f"{key}.class_path" in saved:
                return _differs(key, saved[f"{key}.class_path"], None)
            # An argument that the version of that run did not have is what it is by default.
            default = class_default(saved, key)
            if value if default == ABSENT else not _same(key, json.loads(default), value):
                return _differs(key, "not set", value)
    for key, value in before.items():
        if key not in planned and value is not None:
            return _differs(key, value, "not set")
    return None


def _differs(key: str, there: object, here: object) -> str:
    texts = _text(key, there), _text(key, here)
    if texts[0] == texts[1]:  # classes of one name
        texts = flag_text(there), flag_text(here)
    return f"{key} is {texts[0]} there and {texts[1]} in the plan"


def _text(key: str, value: object) -> str:
    """A value as on the command line, a class without its module."""
    text = flag_text(value)
    return text.rpartition(".")[2] if key.endswith("class_path") else text


def deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a plan's settings that decide a run's result."""
    return {
        key: value
        for key, value in decisive(settings).items()
        if key.split(".")[0] in ("model", "data", "server") or key == "trainer.precision"
    }


def _planned_before(run: Run) -> Mapping[str, Any]:
    """What the plan said that last started the run; nothing if none did."""
    try:
        starts = json.loads((run.folder / FILE).read_text(encoding="utf-8"))
        planned = [start["planned"] for start in starts if "planned" in start]
    except (OSError, ValueError, TypeError):
        return {}
    return deciding(planned[-1]) if planned and isinstance(planned[-1], dict) else {}


def _parents(key: str) -> Iterator[str]:
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _same(key: str, one: object, other: object, short: bool = True) -> bool:
    """Whether two values mean the same; a class's module counts where both say it, or not at all.

    In ``config.yaml`` a class stands where it is defined, which need not be where a plan names it.
    """
    texts = flag_text(one), flag_text(other)
    if key.endswith("class_path") and (short or not all("." in text for text in texts)):
        texts = _text(key, one), _text(key, other)
    try:
        return texts[0] == texts[1] or float(texts[0]) == float(texts[1])
    except ValueError:
        return False
