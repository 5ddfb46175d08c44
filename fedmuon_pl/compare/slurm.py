"""A plan as a SLURM job array: a task for each run, which may be killed and queued again."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from .plan import Plan, Run

__all__ = ["write_array"]

_SCRIPT = """#!/bin/bash
{headers}
# Written by `fedmuon sweep --slurm`. Each task does one line of the list, and what is finished is
# skipped, so that the whole array can be submitted again:
#   sbatch {script}
# When all are done, the plan's own command prints the comparison:
#   {report}
set -euo pipefail
cd {here}
unit=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {units})
# exec: the signal before the time limit reaches the sweep, which ends the run with its round.
exec {command} --jobs 1 --only "$unit"
"""


def write_array(
    plan: Plan, runs: Sequence[Run], folder: str | Path, arguments: Sequence[str]
) -> tuple[Path, Path]:
    """Writes ``<plan>.sbatch`` and ``<plan>.units``, the list of its runs.

    Args:
        plan: The plan; its ``slurm`` maps options of ``sbatch`` to values, such as ``time``.
        runs: Its runs.
        folder: Where to, on a disk that the nodes see.
        arguments: Those of ``fedmuon sweep`` that make the plan, without ``--slurm``.

    Returns:
        The script and the list.
    """
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    script, units = folder / f"{plan.name}.sbatch", folder / f"{plan.name}.units"
    units.write_text("".join(f"{run.name}\n" for run in runs), encoding="utf-8")
    options = {
        "job-name": plan.name,
        "array": f"0-{len(runs) - 1}" + (f"%{plan.jobs}" if plan.jobs else ""),
        "output": folder / "%x-%A_%a.log",
        "cpus-per-task": plan.threads,
        "signal": "B:TERM@120",
        **plan.slurm,
    }
    command = [sys.executable, "-m", "fedmuon_pl", "sweep", *arguments]
    script.write_text(
        _SCRIPT.format(
            headers="\n".join(_header(key, value) for key, value in options.items()),
            script=shlex.quote(str(script)),
            report=shlex.join(command),
            here=shlex.quote(str(Path.cwd())),
            units=shlex.quote(str(units)),
            command=shlex.join(command),
        ),
        encoding="utf-8",
    )
    return script, units


def _header(key: str, value: object) -> str:
    """``--requeue`` is true and has no value."""
    return f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={value}"
