"""What a round costs through the engine: side by side with a bare PyTorch loop, and each lever.

All contestants do the same work on the same batches, in turns, each in a process of one thread that
begins as a fork of this one, so that none finds the memory that another has left:

    OMP_NUM_THREADS=1 python benchmarks/overhead.py lenet [--repeat 6] [--rounds 4]
    OMP_NUM_THREADS=1 python benchmarks/overhead.py resnet [--repeat 3] [--rounds 1]

More options: ``--clients N --only CONTESTANT ... --toy --json FILE``. What needs bfloat16 is left
out where the CPU only emulates it.

Prints seconds of CPU, which other people's jobs on the machine inflate less than the clock's: the
median and the least of a round, and the ratio of both to the row that the table names. No timing is
ever a test.
"""

import argparse
import contextlib
import logging
import multiprocessing
import statistics
import tempfile
import time
import warnings
from copy import deepcopy
from functools import partial

import torch
import torch.nn.functional as F
from measure import has_bfloat16, markdown, options, report
from pytorch_lightning import Callback, Trainer

from fedmuon_pl import (
    Classification,
    FedAvg,
    FederatedDataModule,
    FederatedModule,
    FederatedServer,
    FedMuon,
    Scaffold,
    Splits,
)
from fedmuon_pl.data.digits import MNIST5k
from fedmuon_pl.data.partition import IID, DirichletByClient
from fedmuon_pl.data.sampling import cohort
from fedmuon_pl.models import LeNet, ResNet8, ResNet18

LR = 0.05


class Noise(FederatedDataModule):
    """Images of the size of CIFAR's; what they show does not change the time."""

    def load(self):
        g = torch.Generator().manual_seed(0)
        data = (
            torch.randn(1000, 3, 32, 32, generator=g),
            torch.randint(0, 100, (1000,), generator=g),
        )
        return Splits(data, data, data, data[1].numpy(), 100)


WORK = {
    "lenet": {
        "what": "LeNet on MNIST-5k",
        "network": LeNet,
        "classes": 10,
        "data": lambda batch: MNIST5k(100, DirichletByClient(0.1), batch_size=batch),
        "cohort": 10,
        "steps": 10,
        "batch": 32,
    },
    "resnet": {
        "what": "ResNet-18 with GroupNorm on 3 x 32 x 32",
        "network": ResNet18,
        "classes": 100,
        "data": lambda batch: Noise(10, IID(), batch_size=batch),
        "cohort": 4,
        "steps": 2,
        "batch": 50,
    },
}
TOY = {
    "lenet": {"cohort": 1, "steps": 1, "batch": 2},
    "resnet": {"cohort": 1, "steps": 1, "batch": 2, "network": partial(ResNet8, 3, 100)},
}
REPEAT = {"lenet": (6, 4), "resnet": (3, 1)}  # repetitions, rounds of each
FLOAT, HALF = "32-true", "bf16-mixed"
# name: (algorithm, arguments of the module, precision, the row that it is compared with)
CONTESTANTS = {
    "bare loop": (None, {}, FLOAT, "bare loop"),
    "bare loop, channels last": (None, {"channels_last": True}, FLOAT, "bare loop"),
    "FedAvg": (lambda: FedAvg(LR), {}, FLOAT, "bare loop"),
    "FedAvg, contiguous": (lambda: FedAvg(LR), {"channels_last": False}, FLOAT, "bare loop"),
    "SCAFFOLD": (lambda: Scaffold(LR), {}, FLOAT, "FedAvg"),
    "FedMuon": (lambda: FedMuon(0.005), {}, FLOAT, "FedAvg"),
    "FedMuon, orthogonalised in bf16": (
        lambda: FedMuon(0.005, ns_dtype="bfloat16"), {}, FLOAT, "FedAvg",
    ),
    "bare loop, bf16-mixed": (None, {}, HALF, "bare loop"),
    "FedAvg, bf16-mixed": (lambda: FedAvg(LR), {}, HALF, "bare loop"),
}  # fmt: skip
# What the table of ratios wants, each over the row that it is compared with.
ROWS = {
    "lenet": {
        "lenet": "FedAvg",
        "muon_lenet": "FedMuon",
        "muon_lenet_half": "FedMuon, orthogonalised in bf16",
    },
    "resnet": {
        "resnet": "FedAvg",
        "resnet_half": "FedAvg, bf16-mixed",
        "muon_resnet": "FedMuon",
        "muon_resnet_half": "FedMuon, orthogonalised in bf16",
    },
}


class Rounds(Callback):
    """Seconds of each round, evaluation and logging left out."""

    def __init__(self, clock):
        self.clock, self.seconds = clock, []

    def on_train_batch_start(self, *_):
        self.begin = self.clock()

    def on_train_batch_end(self, *_):
        self.seconds.append(self.clock() - self.begin)


def engine(
    work, algorithm, arguments, precision, rounds, accelerator="cpu", clock=time.process_time
):
    """Seconds of each round through the Trainer."""
    times = Rounds(clock)
    task = Classification(work["network"], num_classes=work["classes"])
    module = FederatedModule(task, algorithm, local_steps=work["steps"], **arguments)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=rounds,
            accelerator=accelerator,
            devices=1,
            precision=precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            default_root_dir=folder,
            callbacks=[FederatedServer(work["cohort"]), times],
        )
        trainer.fit(module, work["data"](work["batch"]))
    return times.seconds


def bare(work, precision, rounds, channels_last=False):
    """The same rounds of FedAvg as one would write them without a framework."""
    data = work["data"](work["batch"])
    data.setup()
    model = deepcopy(Classification(work["network"], num_classes=work["classes"]).build_network(0))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=LR)
    half = precision == "bf16-mixed"
    context = torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext()
    inputs, labels = data.splits.train
    if channels_last:
        inputs = inputs.to(memory_format=torch.channels_last)
    seconds = []
    for r in range(rounds):
        begin = time.process_time()
        start = [p.detach().clone() for p in params]
        total = [torch.zeros_like(p) for p in start]
        for client in cohort(r, seed=0, candidates=data.clients, size=work["cohort"]):
            with torch.no_grad():
                torch._foreach_copy_(params, start)
            batches = data.client_batches(
                client, round=r, seed=0, steps=work["steps"], epochs=None, drop_last=False
            )
            for batch in batches:
                index = torch.from_numpy(batch)
                optimizer.zero_grad()
                with context:
                    loss = F.cross_entropy(model(inputs[index]), labels[index])
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(total, params)
        with torch.no_grad():
            torch._foreach_copy_(params, torch._foreach_div(total, work["cohort"]))
        seconds.append(time.process_time() - begin)
    return seconds


def apart(function):
    """What a function returns, called in a fork of this process.

    Raises:
        EOFError: If it fails; the fork has printed why.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=lambda: sender.send(function()))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


def measure(work, names, repeat, rounds):
    """Seconds of every round but each run's first, by contestant, in turns."""
    seconds = {name: [] for name in names}
    for _ in range(repeat):
        for name in names:
            build, arguments, precision, _ = CONTESTANTS[name]
            if build is None:
                run = partial(bare, work, precision, rounds + 1, **arguments)
            else:
                run = partial(engine, work, build(), arguments, precision, rounds + 1)
            seconds[name] += apart(run)[1:]
    return seconds


def quiet():
    """Nothing of Lightning's on the terminal."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=WORK)
    options(parser, repeat=None)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--clients", type=int, help="in a round; the work's own if not given")
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, help="all if not given")
    given = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    work = WORK[given.work]
    if given.clients:
        work = {**work, "cohort": given.clients}
    repeat, rounds = REPEAT[given.work]
    if given.toy:
        work, repeat, rounds = {**work, **TOY[given.work]}, 1, 1
    names = given.only or [n for n in CONTESTANTS if has_bfloat16() or "bf16" not in n]
    if given.toy and not given.only:
        needed = {"bare loop", "FedAvg", *ROWS[given.work].values()}
        names = [n for n in CONTESTANTS if n in needed]
    seconds = measure(work, names, given.repeat or repeat, given.rounds or rounds)
    cpu = torch.backends.cpu.get_cpu_capability()
    print(
        f"{work['what']}, K = {work['steps']}, batch {work['batch']}, {work['cohort']} clients a "
        f"round; {cpu}, 1 thread, torch {torch.__version__}\n"
    )
    ratio, lines = {}, []
    for name, values in seconds.items():
        base = CONTESTANTS[name][-1]
        cells = [name, *(f"{v:.3f}" for v in (statistics.median(values), min(values))), base]
        if base in seconds:
            ratio[name] = statistics.median(values) / statistics.median(seconds[base])
            cells += [f"{ratio[name]:.2f}", f"{min(values) / min(seconds[base]):.2f}"]
        lines.append([*cells, *["-"] * (6 - len(cells))])
    table = markdown(["what", "median s", "least s", "over", "median", "least"], lines)
    rows = {row: ratio.get(name) for row, name in ROWS[given.work].items()}
    halves = [row for row, name in ROWS[given.work].items() if "bf16" in name]
    why = {} if has_bfloat16() else dict.fromkeys(halves, "the CPU has no bfloat16")
    report(given.json, table, rows, why)


if __name__ == "__main__":
    main()
