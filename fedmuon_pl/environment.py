"""Where a run was made: versions, commit and machine, one record for each start of the run."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["FILE", "PLANNED", "commit_of", "describe_environment", "record_start"]

FILE = "environment.json"
"""Name of the file in a run's folder: a list with one record for each start of the run."""

PLANNED = "FEDMUON_PLANNED"
"""Environment variable by which a sweep says what it planned for a run, as JSON."""

PACKAGES = (
    "fedmuon_pl",
    "torch",
    "torchvision",
    "pytorch-lightning",
    "torchmetrics",
    "numpy",
    "scikit-learn",
)


def commit_of(file: Path) -> str | None:
    """The commit that a file belongs to, with ``+`` where tracked files were changed since.

    Args:
        file: It has to be tracked: a package in the environment folder of somebody's project is not
            of that project's commit.

    Returns:
        40 hexadecimal digits, or None without git or outside of a repository.
    """

    def git(*words: str) -> str | None:
        command = ["git", "-C", str(file.parent), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    if git("ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return None if commit is None else commit + ("+" if changed else "")


def describe_environment() -> dict[str, Any]:
    """Versions, the package's commit, the machine and its devices."""
    import torch

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "cuda": devices,
        "commit": commit_of(Path(__file__)),
        "packages": versions,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def record_start(folder: Path, first_round: int, **more: Any) -> None:  # noqa: ANN401
    """Adds a record to ``environment.json``; a resumed run may go on elsewhere.

    Args:
        folder: The run's folder.
        first_round: The round that this start begins with.
        more: Whatever else is to be said, as plain values.
    """
    path = folder / FILE
    try:
        starts = json.loads(path.read_text(encoding="utf-8")) if first_round else []
    except (OSError, ValueError):
        starts = []
    starts = starts if isinstance(starts, list) else []
    planned = json.loads(os.environ.get(PLANNED, "null"))
    said = {} if planned is None else {"planned": planned}
    starts.append({"first_round": first_round, **describe_environment(), **more, **said})
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(FILE + ".part")
    part.write_text(json.dumps(starts, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
