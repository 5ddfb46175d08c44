"""What it costs that many clients exist: whole runs of ``fedmuon fit``, many clients beside few.

    python benchmarks/population.py [--repeat 3] [--rounds 200] [--toy] [--json FILE]

FedAvg of a small network on noise, two samples a client, 10 clients a round, K = 20, with
evaluation, logging and checkpoints after every round, one process of one thread: 1,000,000 clients
and 1,000 in turns. Then SCAFFOLD and FedAvg with 100,000 clients and 20 a round, of a network whose
control variates of all clients would take 29 GB. Prints start-up, seconds of a round (median), of
the last quarter of the rounds over the first, peak proportional memory and its growth. No timing is
a test.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from measure import fit, markdown, options, python, report, run

from fedmuon_pl import FederatedDataModule, Splits
from fedmuon_pl.clients import nbytes
from fedmuon_pl.data.partition import IID
from fedmuon_pl.models import MLP

FEATURES, CLASSES, SAMPLES = 16, 10, 2
STEPS = 20
SMALL, LARGE = (64, 32), (256, 256)
# name: (method, clients, in a round, hidden layers)
CONTESTANTS = {
    "FedAvg, 1,000 clients": ("fedavg", 1_000, 10, SMALL),
    "FedAvg, 1,000,000 clients": ("fedavg", 1_000_000, 10, SMALL),
    "FedAvg, 100,000 clients": ("fedavg", 100_000, 20, LARGE),
    "SCAFFOLD, 100,000 clients": ("scaffold", 100_000, 20, LARGE),
}
FEW, MANY, PLAIN, STATE = CONTESTANTS


class Features(FederatedDataModule):
    """Noise, two samples for each client: what it is does not change the time."""

    def __init__(self, clients: int, batch_size: int = SAMPLES) -> None:
        super().__init__(clients, IID(), batch_size=batch_size)

    def load(self):
        def part(n, seed):
            g = torch.Generator().manual_seed(seed)
            return (
                torch.randn(n, FEATURES, generator=g),
                torch.randint(0, CLASSES, (n,), generator=g),
            )

        train = part(SAMPLES * self.clients, 0)
        return Splits(train, part(500, 1), part(500, 2), train[1].numpy(), CLASSES)


def child(name, clients, rounds, steps, folder):
    method, _, cohort, hidden = CONTESTANTS[name]
    network = "model.task.init_args.network"
    settings = {
        "server.clients_per_round": cohort,
        "model.local_steps": steps,
        "model.algorithm.init_args.lr": 0.05,
        "model.task": "Classification",
        "model.task.init_args.num_classes": CLASSES,
        network: "fedmuon_pl.models.MLP",
        f"{network}.init_args.in_features": FEATURES,
        f"{network}.init_args.hidden": list(hidden),
        f"{network}.init_args.num_classes": CLASSES,
        "data": "population.Features",
        "data.init_args.clients": clients,
        "trainer.max_epochs": rounds,
        "trainer.default_root_dir": folder,
    }
    return fit(["base", f"algorithm/{method}"], settings)


def state_ratio(folder, clients):
    """Bytes of per-client state on disk over those of the clients that took part."""
    saved = torch.load(next(folder.rglob("last.ckpt")), weights_only=True, map_location="cpu")
    took_part = len(saved["callbacks"]["FederatedServer"]["clients"]["index"])
    assert 0 < took_part < clients
    one = nbytes(MLP(FEATURES, LARGE, CLASSES).parameters())
    written = sum(512 * p.stat().st_blocks for p in folder.rglob("client_state/*"))  # not holes
    return written / (took_part * one)


def measure(name, clients, rounds, steps):
    with tempfile.TemporaryDirectory() as folder:
        done = run(python("population.py", "--run", name, clients, rounds, steps, folder))
        assert len(done.ends) == rounds
        disk = state_ratio(Path(folder), clients) if name == STATE else None
    quarter = max(1, len(done.rounds) // 4)
    first, last = (
        statistics.median(part) for part in (done.rounds[:quarter], done.rounds[-quarter:])
    )
    # The first rounds allocate what all use: growth is that of the last three quarters.
    settled = done.resident[len(done.resident) // 4]
    return {
        "start": done.ends[0],
        "round": statistics.median(done.rounds),
        "later": last / first,
        "peak": done.peak,
        "growth": done.resident[-1] / settled,
        "disk": disk,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options(parser, repeat=3)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", nargs="*", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        name, *numbers, folder = given.run
        sys.exit(child(name, *map(int, numbers), folder))
    rounds = given.rounds or (3 if given.toy else 200)
    steps = 1 if given.toy else STEPS
    found = {name: [] for name in given.only}
    for _ in range(1 if given.toy else given.repeat):
        for name in given.only:
            clients = CONTESTANTS[name][1]
            clients = min(clients, 300) if given.toy else clients
            # The run with state is shorter: it writes 290 kB for each client of each round.
            long = name in (FEW, MANY)
            own = rounds if long else max(3, rounds // 4)
            found[name].append(measure(name, clients, own, steps))
    middle = {
        name: {key: _median([one[key] for one in runs]) for key in runs[0]}
        for name, runs in found.items()
    }
    heads = ["what", "first round s", "s/round", "last / first quarter", "PSS MiB", "growth"]
    table = markdown(
        heads,
        [
            [
                name,
                f"{m['start']:.1f}",
                f"{m['round']:.4f}",
                f"{m['later']:.2f}",
                f"{m['peak']:.0f}",
                f"{m['growth']:.3f}",
            ]
            for name, m in middle.items()
        ],
    )
    rows = {}
    if {FEW, MANY} <= set(middle):
        rows["million_round"] = middle[MANY]["round"] / middle[FEW]["round"]
        rows["million_later"] = middle[MANY]["later"]
        rows["million_growth"] = middle[MANY]["growth"]
    if {PLAIN, STATE} <= set(middle):
        rows["scaffold_memory"] = middle[STATE]["peak"] / middle[PLAIN]["peak"]
    if STATE in middle:
        rows["scaffold_disk"] = middle[STATE]["disk"]
    report(given.json, table, rows)


def _median(values):
    return None if None in values else float(np.median(values))


if __name__ == "__main__":
    main()
