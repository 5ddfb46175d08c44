"""Whole runs through ``fedmuon fit`` in one and in two processes, beside a bare loop with gloo.

    python benchmarks/processes.py [--repeat 3] [--rounds 20] [--only REGEX]

Every contestant is a process of its own, with one thread for each of its processes, and does the
same: FedAvg, LeNet on MNIST-5k, 100 clients, 10 a round, K = 20 steps of batch 50, an evaluation on
the validation and test sets after every round. Prints, as medians over the repetitions: seconds of
the whole command; seconds to the end of the first round; seconds of a later round (the slope
between the first and the last); and the peak proportional set size of all its processes. No timing
is a test.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

STEPS, COHORT, CLIENTS, BATCH, LR = 20, 10, 100, 50, 0.05
CONTESTANTS = {
    "bare loop, 1 process": ("bare", 1),
    "bare loop, 2 processes, gloo": ("bare", 2),
    "fedmuon fit, 1 process": ("fit", 1),
    "fedmuon fit, 2 processes": ("fit", 2),
}


def bare(rank, processes, rounds, store):
    """As one would write it: each rank trains every other client, then one all-reduce."""
    from fedmuon_pl.data.digits import MNIST5k
    from fedmuon_pl.data.partition import DirichletByClient
    from fedmuon_pl.data.sampling import cohort, local_batches
    from fedmuon_pl.models import LeNet
    from fedmuon_pl.seeding import numpy_rng

    torch.set_num_threads(1)
    if processes > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=processes
        )
    data = MNIST5k(CLIENTS, DirichletByClient(0.1), batch_size=BATCH)
    data.setup()
    torch.manual_seed(0)
    model = LeNet()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=LR)
    for r in range(rounds):
        start = [p.detach().clone() for p in params]
        total = [torch.zeros_like(p) for p in start]
        for client in cohort(r, seed=0, candidates=CLIENTS, size=COHORT)[rank::processes]:
            with torch.no_grad():
                torch._foreach_copy_(params, start)
            samples, rng = data.partition[client], numpy_rng(0, "batches", r, client)
            for batch in local_batches(samples, BATCH, rng=rng, steps=STEPS):
                inputs, labels = data.gather(torch.from_numpy(batch))
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(total, params)
        flat = torch.cat([t.flatten() for t in total])
        if processes > 1:
            dist.all_reduce(flat)
        with torch.no_grad():
            for p, t in zip(params, flat.split([p.numel() for p in params]), strict=True):
                p.copy_((t / COHORT).view_as(p))
            if rank == 0:
                for inputs, labels in (data.splits.val, data.splits.test):
                    (model(inputs).argmax(1) == labels).float().mean().item()
                print(f"ROUND {time.time()}", flush=True)
    if processes > 1:
        dist.destroy_process_group()


def fit(processes, rounds, root):
    """The command, with the end of each round on the standard output."""
    from fedmuon_pl.cli import main
    from fedmuon_pl.server.roundlog import MetricsFile

    original = MetricsFile.log_metrics

    def log_metrics(self, metrics, step=None):
        original(self, metrics, step)
        if self._rows:  # of rank 0
            print(f"ROUND {time.time()}", flush=True)

    MetricsFile.log_metrics = log_metrics
    settings = {
        "threads": 1,
        "server.clients_per_round": COHORT,
        "model.local_steps": STEPS,
        "model.algorithm.lr": LR,
        "data.init_args.batch_size": BATCH,
        "trainer.accelerator": "cpu",
        "trainer.devices": processes,
        "trainer.max_epochs": rounds,
        "trainer.default_root_dir": root,
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
    }
    flags = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    configs = ["-c", "base", "-c", "experiment/mnist5k", "-c", "algorithm/fedavg"]
    return main(["fit", *configs, *flags])


class Memory(threading.Thread):
    """The peak proportional set size of a process group, in MiB."""

    def __init__(self, group):
        super().__init__(daemon=True)
        self.group, self.peak, self.ended = group, 0.0, threading.Event()

    def run(self):
        while not self.ended.wait(0.1):
            total = 0
            for stat in Path("/proc").glob("[0-9]*/stat"):
                try:
                    if int(stat.read_text().rsplit(")", 1)[1].split()[2]) == self.group:
                        rollup = (stat.parent / "smaps_rollup").read_text()
                        total += int(re.search(r"^Pss:\s+(\d+)", rollup, re.M)[1])
                except (OSError, TypeError):
                    continue
            self.peak = max(self.peak, total / 1024)


def measure(kind, processes, rounds):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--run", kind, str(processes), str(rounds), folder]
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
        out, err = child.communicate(timeout=600)
        took = time.time() - begin
        memory.ended.set()
    if child.returncode:
        sys.exit(f"{' '.join(command)}: {err}")
    ends = [float(line.split()[1]) for line in out.splitlines() if line.startswith("ROUND")]
    assert len(ends) == rounds
    return took, ends[0] - begin, (ends[-1] - ends[0]) / (rounds - 1), memory.peak


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="contestants whose name matches")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        kind, processes, rounds, folder = options.run
        processes, rounds = int(processes), int(rounds)
        if kind == "fit":
            sys.exit(fit(processes, rounds, folder))
        store = os.path.join(folder, "store")
        if processes == 1:
            bare(0, 1, rounds, store)
        else:
            arguments = (processes, rounds, store)
            torch.multiprocessing.start_processes(bare, arguments, processes, start_method="fork")
        return
    names = [name for name in CONTESTANTS if re.search(options.only, name)]
    taken = {name: [] for name in names}
    for _ in range(options.repeat):  # in turns: what else the machine does hits all alike
        for name in names:
            taken[name].append(measure(*CONTESTANTS[name], options.rounds))
    print(f"| {'what':30} | command s | first round s | s/round | PSS MiB |")
    print(f"|{'-' * 32}|{'---:|' * 4}")
    medians = {
        n: [statistics.median(column) for column in zip(*t, strict=True)] for n, t in taken.items()
    }
    for name, (whole, first, later, peak) in medians.items():
        print(f"| {name:30} | {whole:.1f} | {first:.1f} | {later:.3f} | {peak:.0f} |")
    if options.only:
        return
    for column, what in ((0, "command"), (2, "round")):
        two, one = medians["fedmuon fit, 2 processes"], medians["fedmuon fit, 1 process"]
        bare_two = medians["bare loop, 2 processes, gloo"]
        ratio = {"over the bare loop": two[column] / bare_two[column]}
        ratio["over one process"] = two[column] / one[column]
        print(what, json.dumps({k: round(v, 3) for k, v in ratio.items()}))


if __name__ == "__main__":
    main()
