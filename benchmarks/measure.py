"""What the benchmarks share: commands and their memory, runs of ``fedmuon fit``, the machine."""

import contextlib
import json
import os
import platform
import re
import resource
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Memory(threading.Thread):
    """The peak proportional set size of a process group, in MiB.

    The kernel walks all pages for it, in the time of those that are measured: 30 ms for three
    processes with Lightning in them. So a fiftieth of one core is spent on it, no more.
    """

    def __init__(self, group):
        super().__init__(daemon=True)
        self.group, self.peak, self.ended = group, 0.0, threading.Event()

    def run(self):
        wait = 0.1
        while not self.ended.wait(wait):
            begin, total = time.perf_counter(), 0
            for stat in Path("/proc").glob("[0-9]*/stat"):
                try:
                    if int(stat.read_text().rsplit(")", 1)[1].split()[2]) == self.group:
                        rollup = (stat.parent / "smaps_rollup").read_text()
                        total += int(re.search(r"^Pss:\s+(\d+)", rollup, re.M)[1])
                except (OSError, TypeError):
                    continue
            self.peak = max(self.peak, total / 1024)
            wait = max(0.1, 50 * (time.perf_counter() - begin))


@dataclass
class Run:
    """A command that has ended.

    Attributes:
        seconds: From its start to its end.
        ends: When its rounds ended, in seconds from its start.
        resident: Rank 0's resident MiB at these moments.
        peak: The most proportional MiB of all its processes.
    """

    seconds: float
    peak: float
    ends: list[float] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)

    @property
    def rounds(self):
        """Seconds of every round but the first."""
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]


def run(command, timeout=1200):
    """Runs a command with one thread for each process; it says ``ROUND time MiB`` after each round.

    Raises:
        RuntimeError: With what it wrote, if it fails.
    """
    begin = time.time()
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    memory = Memory(child.pid)
    memory.start()
    out, err = child.communicate(timeout=timeout)
    took = time.time() - begin
    memory.ended.set()
    memory.join()
    if child.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {err[-3000:]}")
    said = [line.split()[1:] for line in out.splitlines() if line.startswith("ROUND ")]
    ends, resident = [float(at) - begin for at, _ in said], [float(mib) for _, mib in said]
    return Run(took, memory.peak, ends, resident)


def round_done():
    """Says that a round has ended, for :func:`run`."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    print(f"ROUND {time.time()} {mib:.1f}", flush=True)


def fit(configs, settings):
    """``fedmuon fit``, which says when each round has been logged; the exit status."""
    from fedmuon_pl.cli import command
    from fedmuon_pl.server.roundlog import MetricsFile

    original = MetricsFile.log_metrics

    def log_metrics(self, metrics, step=None):
        original(self, metrics, step)
        if self._rows:  # of rank 0
            round_done()

    MetricsFile.log_metrics = log_metrics
    settings = {
        "threads": 1,
        "trainer.accelerator": "cpu",
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
        **settings,
    }
    words = [word for name in configs for word in ("-c", name)]
    words += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return command(["fit", *words])


# -- the machine ----------------------------------------------------------------------------------


def has_bfloat16():
    """Whether the CPU multiplies in bfloat16; elsewhere it is emulated, 15 to 30 times slower."""
    with contextlib.suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text()
        return bool(re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", flags))
    return False


def machine():
    """The processor, torch, the commit and the time, as texts."""
    import torch

    from fedmuon_pl.environment import commit_of, describe_environment

    found = describe_environment()
    commit = commit_of(HERE / "measure.py") or "unknown"
    cpu = (
        f"{found['processor']} ({torch.backends.cpu.get_cpu_capability()}), {os.cpu_count()} cores"
    )
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "machine": cpu if gpu is None else f"{gpu}; {cpu}",
        "torch": version("torch"),
        "python": platform.python_version(),
        "commit": commit[:10] + ("+" if commit.endswith("+") else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def busy_seconds():
    """CPU seconds that the whole machine has worked; None where that is not known."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except (OSError, IndexError):
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, first)
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq + steal) / ticks


def _own():
    both = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in both)


class Watch:
    """How many cores others have used since it was made, by this process and its ended children."""

    def __init__(self):
        self.load = os.getloadavg()[0]
        self._busy, self._own, self._at = busy_seconds(), _own(), time.time()

    def others(self):
        """Cores that others have used on average."""
        now = busy_seconds()
        if now is None or self._busy is None:
            return None
        seconds = time.time() - self._at
        return max(0.0, (now - self._busy) - (_own() - self._own)) / seconds


def markdown(heads, rows):
    """A Markdown table; the first column is text."""
    from fedmuon_pl.compare.render import markdown_table

    return markdown_table(heads, [[str(cell) for cell in row] for row in rows])


def options(parser, repeat):
    """Adds what every part takes, see ``run_all.py``."""
    parser.add_argument("--repeat", type=int, default=repeat)
    parser.add_argument("--toy", action="store_true", help="a size that only shows that it works")
    parser.add_argument("--json", type=Path, help="where to write the rows of the table of ratios")


def report(path, table, rows, why=None):
    """Prints a part's table and writes what ``run_all.py`` takes.

    Args:
        path: The JSON file; None for none.
        table: Markdown.
        rows: Numbers by the row's name in ``run_all.py``; None where it cannot be measured here.
        why: The reason for a None, by row.
    """
    print(table)
    for name, value in rows.items():
        print(f"{name}: {(why or {}).get(name) if value is None else f'{value:.3f}'}")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rows": rows, "why": why or {}, "table": table}, indent=1))


def python(script, *words):
    """A command line of one of the scripts beside this one."""
    return [sys.executable, str(HERE / script), *map(str, words)]
