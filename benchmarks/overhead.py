"""What the engine costs beside the arithmetic: rounds of FedAvg on LeNet against a bare loop.

Both do the same work on the same batches, in turns, in one process with one thread:

    python benchmarks/overhead.py [--repeat 7] [--rounds 5]

Prints the median seconds of a round for each, their ratio, and FedMuon's and SCAFFOLD's cost over
FedAvg's, all from one run. No timing is ever a test.
"""

import argparse
import statistics
import tempfile
import time
from copy import deepcopy

import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, Trainer

from fedmuon_pl import Classification, FedAvg, FederatedModule, FederatedServer, FedMuon, Scaffold
from fedmuon_pl.data.digits import MNIST5k
from fedmuon_pl.data.partition import DirichletByClient
from fedmuon_pl.data.sampling import cohort
from fedmuon_pl.models import LeNet

STEPS, COHORT, LR = 10, 10, 0.05


class Rounds(Callback):
    """Seconds of each round, evaluation and logging left out."""

    def __init__(self):
        self.seconds = []

    def on_train_batch_start(self, *_):
        self.begin = time.perf_counter()

    def on_train_batch_end(self, *_):
        self.seconds.append(time.perf_counter() - self.begin)


def engine(algorithm, rounds):
    """Seconds of each round through the Trainer."""
    clock = Rounds()
    module = FederatedModule(Classification(LeNet), algorithm, local_steps=STEPS)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=rounds,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            default_root_dir=folder,
            callbacks=[FederatedServer(COHORT), clock],
        )
        data = MNIST5k(100, DirichletByClient(0.1))
        trainer.fit(module, data)
    return clock.seconds, module, data


def bare(module, data, rounds):
    """The same rounds of FedAvg as one would write them without a framework."""
    model = deepcopy(module.network)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=LR)
    seconds = []
    for r in range(rounds):
        begin = time.perf_counter()
        start = [p.detach().clone() for p in params]
        total = [torch.zeros_like(p) for p in start]
        for client in cohort(r, seed=0, candidates=100, size=COHORT):
            with torch.no_grad():
                torch._foreach_copy_(params, start)
            batches = data.client_batches(
                client, round=r, seed=0, steps=STEPS, epochs=None, drop_last=False
            )
            for batch in batches:
                inputs, labels = data.gather(torch.from_numpy(batch))
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(total, params)
        with torch.no_grad():
            torch._foreach_copy_(params, torch._foreach_div(total, COHORT))
        seconds.append(time.perf_counter() - begin)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds = {"bare loop": [], "FedAvg": [], "SCAFFOLD": [], "FedMuon": []}
    for _ in range(options.repeat):
        for name, build in (
            ("FedAvg", lambda: FedAvg(LR)),
            ("SCAFFOLD", lambda: Scaffold(LR)),
            ("FedMuon", lambda: FedMuon(0.005)),
        ):
            took, module, data = engine(build(), options.rounds + 1)
            seconds[name] += took[1:]
            if name == "FedAvg":
                seconds["bare loop"] += bare(module, data, options.rounds + 1)[1:]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name:10} {median:8.4f} s/round  {median / medians['bare loop']:5.2f} x bare loop")


if __name__ == "__main__":
    main()
