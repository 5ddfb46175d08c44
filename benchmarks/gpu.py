"""What a GPU is held to, in at most eight minutes on one: see ``gpu.sh``.

    python benchmarks/gpu.py [--repeat 3] [--toy] [--json FILE] [--rows FILE.md]

LeNet with a cohort of 100 (K = 10, batch 32): the clients side by side and one at a time. ResNet-18
with GroupNorm (K = 20, batch 50, 4 clients): a round of FedAvg through the engine, and as many
plain training steps on a batch that lies ready, contiguous or channels last, the faster of the two;
in float32 with TF32 and in bf16-mixed. FedMuon beside FedAvg on both, orthogonalised in float32 and
in bfloat16. Contestants take turns; times are of the clock with the device synchronised. Without a
GPU only ``--toy`` runs, on the CPU: it shows that the script works, its numbers mean nothing.
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from copy import deepcopy
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import Watch, machine, markdown, options, report
from overhead import FLOAT, HALF, LR, TOY, WORK, engine, quiet

from fedmuon_pl import Classification, FedAvg, FedMuon

ONE = {"clients_at_once": 1}


def muon(dtype):
    return lambda: FedMuon(0.005, ns_dtype=dtype)


# name: (work, algorithm, arguments of the module, precision); None: the plain step in that layout
CONTESTANTS = {
    "LeNet, FedAvg, one at a time": ("lenet", lambda: FedAvg(LR), ONE, FLOAT),
    "LeNet, FedAvg, side by side": ("lenet", lambda: FedAvg(LR), {}, FLOAT),
    "LeNet, FedMuon": ("lenet", muon(None), {}, FLOAT),
    "LeNet, FedMuon, bf16": ("lenet", muon("bfloat16"), {}, FLOAT),
    "ResNet-18, plain step, TF32": ("resnet", None, {}, FLOAT),
    "ResNet-18, FedAvg, TF32": ("resnet", lambda: FedAvg(LR), ONE, FLOAT),
    "ResNet-18, FedAvg, TF32, by default": ("resnet", lambda: FedAvg(LR), {}, FLOAT),
    "ResNet-18, plain step, bf16-mixed": ("resnet", None, {}, HALF),
    "ResNet-18, FedAvg, bf16-mixed": ("resnet", lambda: FedAvg(LR), ONE, HALF),
    "ResNet-18, FedMuon, TF32": ("resnet", muon(None), ONE, FLOAT),
    "ResNet-18, FedMuon, TF32, bf16": ("resnet", muon("bfloat16"), ONE, FLOAT),
}
# row: (contestant, what it is compared with, whether as throughput)
ROWS = {
    "gpu_lenet": ("LeNet, FedAvg, side by side", "LeNet, FedAvg, one at a time", True),
    "gpu_resnet": ("ResNet-18, FedAvg, TF32", "ResNet-18, plain step, TF32", True),
    "gpu_resnet_auto": (
        "ResNet-18, FedAvg, TF32, by default", "ResNet-18, plain step, TF32", True,
    ),
    "gpu_resnet_half": (
        "ResNet-18, FedAvg, bf16-mixed", "ResNet-18, plain step, bf16-mixed", True,
    ),
    "gpu_muon_lenet": ("LeNet, FedMuon", "LeNet, FedAvg, side by side", False),
    "gpu_muon_lenet_half": ("LeNet, FedMuon, bf16", "LeNet, FedAvg, side by side", False),
    "gpu_muon_resnet": ("ResNet-18, FedMuon, TF32", "ResNet-18, FedAvg, TF32", False),
    "gpu_muon_resnet_half": ("ResNet-18, FedMuon, TF32, bf16", "ResNet-18, FedAvg, TF32", False),
}  # fmt: skip


def clock():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def plain(work, precision, rounds, device, channels_last):
    """Seconds of each round's number of training steps, on one batch."""
    task = Classification(work["network"], num_classes=work["classes"])
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = deepcopy(task.build_network(0)).to(device, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(work["batch"], 3, 32, 32, device=device).to(memory_format=layout)
    y = torch.randint(0, work["classes"], (work["batch"],), device=device)
    half = precision == HALF
    seconds = []
    for _ in range(rounds):
        begin = clock()
        for _ in range(work["cohort"] * work["steps"]):
            optimizer.zero_grad()
            mixed = torch.autocast(device, torch.bfloat16) if half else contextlib.nullcontext()
            with mixed:
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        seconds.append(clock() - begin)
    return seconds


def once(name, sizes, rounds, device):
    """Seconds of a contestant's rounds but the first, and its peak MiB on the device."""
    kind, build, arguments, precision = CONTESTANTS[name]
    work = {**WORK[kind], **sizes[kind]}
    runs = []
    for channels_last in (False, True) if build is None else (None,):
        left = 0
        if device == "cuda":
            gc.collect()  # a Trainer and its module refer to each other
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            left = torch.cuda.memory_allocated()
        if build is None:
            took = plain(work, precision, rounds + 1, device, channels_last)
        else:
            took = engine(work, build(), arguments, precision, rounds + 1, device, clock)
        cuda = device == "cuda"
        peak = (torch.cuda.max_memory_allocated() - left) / 2**20 if cuda else float("nan")
        runs.append((took[1:], peak))
    return min(runs, key=lambda run: statistics.median(run[0]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options(parser, repeat=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=Path, help="where to write the table of contestants")
    parser.add_argument("--run-json", type=Path, help="for `run_all.py --add` on another machine")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not given.toy:
        sys.exit("gpu.py: there is no GPU here; --toy runs on the CPU")
    quiet()
    torch.set_float32_matmul_precision("high")  # TF32 for all alike
    watch = Watch()
    sizes = {"lenet": {"cohort": 100}, "resnet": {"cohort": 4, "steps": 20}}
    repeat, rounds = given.repeat, given.rounds
    if given.toy:
        sizes, repeat, rounds = {k: {**v, "cohort": 2} for k, v in TOY.items()}, 1, 1
    found = {name: [] for name in CONTESTANTS}
    for _ in range(repeat):
        for name in CONTESTANTS:
            found[name].append(once(name, sizes, rounds, device))
    seconds = {
        n: statistics.median(t for took, _ in runs for t in took) for n, runs in found.items()
    }
    peak = {n: max(p for _, p in runs) for n, runs in found.items()}
    where = machine()
    table = markdown(
        ["what", "s/round", "steps/s", "peak MiB"],
        [
            [n, f"{s:.4f}", f"{_steps(n, sizes) / s:.0f}", f"{peak[n]:.0f}".replace("nan", "-")]
            for n, s in seconds.items()
        ],
    )
    table = f"{where['machine']}; torch {where['torch']}, commit {where['commit']}\n\n{table}"
    rows = {
        row: seconds[other] / seconds[name] if throughput else seconds[name] / seconds[other]
        for row, (name, other, throughput) in ROWS.items()
    }
    ratio = peak["ResNet-18, FedAvg, TF32"] / peak["ResNet-18, plain step, TF32"]
    rows["gpu_memory"] = None if ratio != ratio else ratio
    report(given.json, table, rows, {"gpu_memory": "no GPU"})
    if given.rows:
        given.rows.parent.mkdir(parents=True, exist_ok=True)
        given.rows.write_text(table)
    if given.run_json:
        run = {
            "command": "benchmarks/gpu.sh" + (" --toy" if given.toy else ""),
            **where,
            "load": [round(watch.load, 1), round(Watch().load, 1)],
            "others": [None, watch.others()],
            "rows": rows,
            "why": {},
            "table": table,
        }
        given.run_json.write_text(json.dumps(run, indent=1) + "\n")


def _steps(name, sizes):
    work = {**WORK[CONTESTANTS[name][0]], **sizes[CONTESTANTS[name][0]]}
    return work["cohort"] * work["steps"]


if __name__ == "__main__":
    main()
