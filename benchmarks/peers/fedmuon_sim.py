"""fedmuon_pl: the command ``fedmuon fit``, on the work's own data, cohorts and batches."""

import argparse
import sys
import tempfile

import numpy as np
import torch
import work

from fedmuon_pl import FederatedDataModule, Splits
from fedmuon_pl.cli import main
from fedmuon_pl.data.partition import IID, Partition
from fedmuon_pl.server import callback
from fedmuon_pl.server.roundlog import MetricsFile


class Data(FederatedDataModule):
    """The work's samples, split and order of batches."""

    def __init__(self, work: str, batch_size: int) -> None:
        super().__init__(100, IID(), batch_size=batch_size)
        self.work = work

    def load(self):
        x, y, x_test, y_test = work.data(self.work)
        # The others have no validation split, and evaluate on the test set alone.
        return Splits((x, y), (x_test[:1], y_test[:1]), (x_test, y_test), y.numpy(), 10)

    def make_partition(self, splits):
        return Partition.from_lists(work.parts(self.work))

    def client_batches(self, client, *, round, **_):
        w = work.get_work(self.work)
        indices = work.client_indices(self.work, round, client)
        return list(indices.reshape(w.steps, w.batch))


class Network(torch.nn.Module):
    """The work's network at its x^0."""

    def __new__(cls, name: str) -> torch.nn.Module:
        return work.make_model(name)


def fit(name, processes):
    w, clock = work.get_work(name), work.Clock()
    opened, logged = callback.FederatedServer.open_round, MetricsFile.log_metrics

    def open_round(self, *arguments):
        if not clock.marks:
            clock.start()
        return opened(self, *arguments)

    def log_metrics(self, metrics, step=None):
        logged(self, metrics, step)
        if self._rows:  # of rank 0
            clock.round_done(metrics["test/acc"])
            if len(clock.acc) == w.rounds + 1:
                clock.report()

    callback.FederatedServer.open_round = open_round
    callback.cohort = lambda r, **_: np.array(work.cohort(name, r))
    MetricsFile.log_metrics = log_metrics
    task = "model.task.init_args"
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "threads": 2 // processes,
            "server.clients_per_round": w.cohort,
            "model.local_steps": w.steps,
            "model.algorithm.init_args.lr": w.lr,
            "model.task": "Classification",
            f"{task}.num_classes": 10,
            f"{task}.network": "fedmuon_sim.Network",
            f"{task}.network.init_args.name": name,
            "data": "fedmuon_sim.Data",
            "data.init_args.work": name,
            "data.init_args.batch_size": w.batch,
            "trainer.accelerator": "cpu",
            "trainer.devices": processes,
            "trainer.max_epochs": w.rounds + 1,
            "trainer.default_root_dir": folder,
            "trainer.enable_progress_bar": "false",
            "trainer.enable_model_summary": "false",
        }
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        return main(["fit", "-c", "base", "-c", "algorithm/fedavg", *words])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", default="lenet")
    parser.add_argument("--procs", type=int, default=2)
    given = parser.parse_args()
    sys.exit(fit(given.work, given.procs))
