"""Whole runs through ``fedmuon fit`` in one and in two processes, beside a bare loop with gloo.

    python benchmarks/processes.py [--repeat 3] [--rounds N] [--only REGEX] [--toy] [--json FILE]

Every contestant is a process of its own, with one thread for each of its processes, and does the
same: FedAvg, LeNet on MNIST-5k, 100 clients, 10 a round, K = 20 steps of batch 50, an evaluation on
the validation and test sets after every round. Two processes make 100 rounds, a third of the
paper's run, and one makes 20. Prints, as medians over the repetitions: seconds of the whole
command; seconds to the end of the first round, or of the imports alone; seconds of a later round
(the slope between the first and the last); and the peak proportional set size of all its processes.
No timing is a test.
"""

import argparse
import math
import os
import re
import statistics
import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import fit, markdown, options, python, report, round_done, run

STEPS, COHORT, CLIENTS, BATCH, LR = 20, 10, 100, 50, 0.05
CONTESTANTS = {
    "import torch and Lightning": ("imports", 1),
    "bare loop, 1 process": ("bare", 1),
    "bare loop, 2 processes, gloo": ("bare", 2),
    "fedmuon fit, 1 process": ("fit", 1),
    "fedmuon fit, 2 processes": ("fit", 2),
}
ROUNDS = {1: 20, 2: 100}  # by the number of processes
IMPORTS, BARE_1, BARE_2, FIT_1, FIT_2 = CONTESTANTS


def write_inputs(path, rounds):
    """The bare loop's images, labels and batches, so that it imports torch and NumPy alone."""
    from fedmuon_pl.data.digits import MNIST5k
    from fedmuon_pl.data.partition import DirichletByClient
    from fedmuon_pl.data.sampling import cohort, local_batches
    from fedmuon_pl.seeding import numpy_rng

    data = MNIST5k(CLIENTS, DirichletByClient(0.1), batch_size=BATCH)
    data.setup()
    batches = np.empty((rounds, COHORT, STEPS, BATCH), dtype=np.int64)
    for r in range(rounds):
        clients = cohort(r, seed=0, candidates=CLIENTS, size=COHORT)
        for i, client in enumerate(clients):
            rng, samples = numpy_rng(0, "batches", r, client), data.partition[client]
            for k, batch in enumerate(local_batches(samples, BATCH, rng=rng, steps=STEPS)):
                batches[r, i, k] = batch
    arrays = {"batches": batches}
    for split in ("train", "val", "test"):
        inputs, labels = getattr(data.splits, split)
        arrays |= {f"{split}_inputs": inputs.numpy(), f"{split}_labels": labels.numpy()}
    np.savez(path, **arrays)


def bare(rank, processes, rounds, store):
    """As one would write it: each rank trains every other client, then one all-reduce."""
    from fedmuon_pl.models import LeNet

    torch.set_num_threads(1)
    if processes > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=processes
        )
    with np.load(f"{store}.npz") as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    inputs, labels = arrays["train_inputs"], arrays["train_labels"]
    torch.manual_seed(0)
    model = LeNet()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=LR)
    for r in range(rounds):
        start = [p.detach().clone() for p in params]
        total = [torch.zeros_like(p) for p in start]
        for client in arrays["batches"][r, rank::processes]:
            with torch.no_grad():
                torch._foreach_copy_(params, start)
            for batch in client:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[batch]), labels[batch]).backward()
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
                for split in ("val", "test"):
                    found = model(arrays[f"{split}_inputs"]).argmax(1)
                    (found == arrays[f"{split}_labels"]).float().mean().item()
                round_done()
    if processes > 1:
        dist.destroy_process_group()


def command(processes, rounds, root):
    """The command."""
    settings = {
        "server.clients_per_round": COHORT,
        "model.local_steps": STEPS,
        "model.algorithm.lr": LR,
        "data.init_args.batch_size": BATCH,
        "trainer.devices": processes,
        "trainer.max_epochs": rounds,
        "trainer.default_root_dir": root,
    }
    return fit(["base", "experiment/mnist5k", "algorithm/fedavg"], settings)


def child(kind, processes, rounds, folder):
    if kind == "fit":
        return command(processes, rounds, folder)
    store = os.path.join(folder, "store")
    if processes == 1:
        bare(0, 1, rounds, store)
    else:
        arguments = (processes, rounds, store)
        torch.multiprocessing.start_processes(bare, arguments, processes, start_method="fork")
    return 0


def measure(kind, processes, rounds):
    if kind == "imports":
        work = "import time, torch, pytorch_lightning; print('ROUND', time.time(), 0, flush=True)"
        done = run([sys.executable, "-c", work])  # the interpreter's end takes seconds too
        return done.seconds, done.ends[0], math.nan, done.peak
    with tempfile.TemporaryDirectory() as folder:
        if kind == "bare":
            write_inputs(os.path.join(folder, "store.npz"), rounds)
        done = run(python("processes.py", "--run", kind, processes, rounds, folder))
    assert len(done.ends) == rounds
    later = (done.ends[-1] - done.ends[0]) / (rounds - 1)
    return done.seconds, done.ends[0], later, done.peak


def cells(whole, first, later, peak):
    return f"{whole:.1f}", f"{first:.1f}", f"{later:.3f}", f"{peak:.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options(parser, repeat=3)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", default="", help="contestants whose name matches")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        kind, processes, rounds, folder = given.run
        sys.exit(child(kind, int(processes), int(rounds), folder))
    names = [name for name in CONTESTANTS if re.search(given.only, name)]
    rounds = {n: given.rounds or (2 if given.toy else own) for n, own in ROUNDS.items()}
    taken = {name: [] for name in names}
    for _ in range(1 if given.toy else given.repeat):  # in turns: what else runs hits all alike
        for name in names:
            kind, processes = CONTESTANTS[name]
            taken[name].append(measure(kind, processes, rounds[processes]))
    medians = {
        n: [statistics.median(column) for column in zip(*t, strict=True)] for n, t in taken.items()
    }
    heads = ["what", "command s", "first round s", "s/round", "PSS MiB"]
    table = markdown(
        heads,
        [
            [name, *(cell.replace("nan", "-") for cell in cells(*median))]
            for name, median in medians.items()
        ],
    )
    rows = {}
    if {FIT_2, BARE_2} <= set(medians):
        rows["fit_2"] = medians[FIT_2][0] / medians[BARE_2][0]
    for processes, fit_n, bare_n in ((1, FIT_1, BARE_1), (2, FIT_2, BARE_2)):
        if fit_n in medians:
            rows[f"first_{processes}"] = medians[fit_n][1]
            if IMPORTS in medians:
                rows[f"first_{processes}_imports"] = medians[fit_n][1] / medians[IMPORTS][1]
            if bare_n in medians:
                rows[f"first_{processes}_bare"] = medians[fit_n][1] / medians[bare_n][1]
    if FIT_2 in medians:
        rows["memory_2"] = medians[FIT_2][3] / 1024
    report(given.json, table, rows)


if __name__ == "__main__":
    main()
