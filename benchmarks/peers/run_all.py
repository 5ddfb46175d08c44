"""fedmuon_pl beside a bare loop, Flower and pfl on the same work: writes a section of RESULTS.md.

    python benchmarks/peers/run_all.py [--only REGEX] [--repeat 3] [--toy]     # make bench-peers

Each contestant is a process of its own, in turns, two cores in all. Columns: seconds of a round
(median over the measured rounds, and over the repetitions), over the bare loop with gloo in two
processes; CPU seconds of a round of the whole process tree, which other people's jobs inflate less;
start-up and the first round; the peak proportional set size of the tree; cores that other work used
meanwhile; and the test accuracy after the first round and after the last, which must agree, but for
rounding, if the contestants do the same.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measure import busy_seconds, machine, markdown  # noqa: E402

from fedmuon_pl.compare.compare_command import replace_section  # noqa: E402

TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1"]
BARE = "bare loop, 2 processes, gloo"
CONTESTANTS = {
    BARE: ["bare_torch.py", "--procs", "2"],
    "fedmuon_pl, 2 processes": ["fedmuon_sim.py", "--procs", "2"],
    "pfl, 2 processes": [*TORCHRUN, "--master_port=29555", "pfl_sim.py"],
    "Flower, 2 actors": ["flower_sim.py"],
    "bare loop, 1 process, 2 threads": ["bare_torch.py", "--procs", "1"],
    "fedmuon_pl, 1 process, 2 threads": ["fedmuon_sim.py", "--procs", "1"],
    "pfl, 1 process, 2 threads": ["pfl_sim.py"],
}
WORKS = {
    "lenet": "LeNet on digits, K = 20, batch 50",
    "resnet": "ResNet-18 with GroupNorm on 3 x 32 x 32, K = 2, batch 50",
    "toy": "LeNet on digits, K = 2: a test of the harness",
}


class Tree(threading.Thread):
    """Memory and CPU time of a process tree."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.root, self.ended = psutil.Process(pid), threading.Event()
        self.cpu, self.seen, self.samples, self.pss = {}, {}, [], 0

    def run(self):
        turn = 0
        while not self.ended.wait(0.25):
            try:
                tree = [self.root, *self.root.children(recursive=True)]
            except psutil.NoSuchProcess:
                break
            pss = 0
            for p in tree:
                try:
                    times = p.cpu_times()
                    self.cpu[p.pid] = times.user + times.system
                    self.seen[p.pid] = p
                    pss += p.memory_full_info().pss if turn % 4 == 0 else 0
                except psutil.Error:
                    continue
            self.samples.append((time.time(), sum(self.cpu.values()), busy_seconds() or 0.0))
            self.pss = max(self.pss, pss)
            turn += 1

    def between(self, a, b):
        """Its own CPU seconds between two times, and those of the whole machine."""
        inside = [s for s in self.samples if a <= s[0] <= b] or self.samples[-1:]
        first, last = inside[0], inside[-1]
        scale = (b - a) / (last[0] - first[0]) if last[0] > first[0] else 0.0
        return [(last[k] - first[k]) * scale for k in (1, 2)]


def once(words, work, limit):
    """One process of a contestant: its numbers, or why there are none."""
    env = {
        **os.environ,
        "PEERS_T0": str(time.time()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
        "PYTHONUNBUFFERED": "1",
    }
    env.pop("OMP_NUM_THREADS", None)
    child = subprocess.Popen(
        [sys.executable, *words, "--work", work],
        cwd=HERE,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    tree = Tree(child.pid)
    tree.start()
    try:
        out, _ = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        for p in tree.seen.values():  # only what was seen under our own child
            try:
                p.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue
        out, _ = child.communicate()
        return {"error": f"more than {limit:.0f} s: {out[-300:]}"}
    tree.ended.set()
    tree.join()
    said = [line for line in out.splitlines() if line.startswith("RESULT ")]
    if not said:
        return {"error": f"exit {child.returncode}: {out[-1500:]}"}
    found = json.loads(said[-1][7:])
    own, everybody = tree.between(*found["window"])
    seconds = found["window"][1] - found["window"][0]
    return {
        "round": statistics.median(found["rounds_s"]),
        "cpu": own / len(found["rounds_s"]),
        "start": found["startup_s"] + found["warmup_s"],
        "pss": tree.pss / 2**20,
        "others": max(0.0, everybody - own) / seconds,
        "acc": [found["acc"][0], found["acc"][-1]],
    }


def table(runs):
    """One work's contestants as Markdown."""
    middle = {}
    for name, repeats in runs.items():
        good = sorted((r for r in repeats if "error" not in r), key=lambda r: r["round"])
        middle[name] = good[(len(good) - 1) // 2] if good else None
    base = middle.get(BARE)
    lines = []
    for name, r in middle.items():
        if r is None:
            lines.append([name, "failed", *["-"] * 6])
            continue
        over = f"{r['round'] / base['round']:.2f}" if base else "-"
        numbers = [f"{r['round']:.3f}", over, f"{r['cpu']:.2f}", f"{r['start']:.1f}"]
        accuracy = " to ".join(f"{a:.3f}" for a in r["acc"])
        lines.append([name, *numbers, f"{r['pss']:.0f}", f"{r['others']:.2f}", accuracy])
    heads = ["what", "s/round", "over bare", "CPU s/round", "first round s", "PSS MiB", "others"]
    return markdown([*heads, "test acc"], lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="'work/contestant' that match")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--toy", action="store_true", help="shows that all work; writes nothing")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a contestant")
    given = parser.parse_args()
    works = ["toy"] if given.toy else ["lenet", "resnet"]
    chosen = [(w, c) for w in works for c in CONTESTANTS if re.search(given.only, f"{w}/{c}")]
    if "resnet" in works:
        sys.path.insert(0, str(HERE))
        import work

        work.data("resnet")  # its file is made once
    load = os.getloadavg()[0]
    runs = {w: {c: [] for v, c in chosen if v == w} for w in works}
    for _ in range(1 if given.toy else given.repeat):
        for w, c in chosen:
            runs[w][c].append(once(CONTESTANTS[c], w, given.timeout))
            print(f"{w}, {c}: {runs[w][c][-1]}", flush=True)
    where = machine()
    names = ("torch", "flwr", "ray", "pfl", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    command = "python benchmarks/peers/run_all.py " + " ".join(sys.argv[1:])
    text = f"`{command.strip()}`\n\n" + (
        f"{where['machine']}; {versions}; commit {where['commit']}, {where['date']}; load "
        f"{load:.1f} to {os.getloadavg()[0]:.1f}. FedAvg, 100 clients, 10 a "
        f"round, Dirichlet 0.1, the same cohorts, batches and x^0 for all; the middle "
        f"of the repetitions.\n"
    )
    for w in works:
        text += f"\n{WORKS[w]}:\n\n{table(runs[w])}"
    print("\n" + text)
    failed = [c for w in works for c, r in runs[w].items() if any("error" in x for x in r)]
    if not given.toy and not given.only:
        replace_section(HERE.parent / "RESULTS.md", "peers", text)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
