"""Apple's pfl: SimulatedBackend + PyTorchModel + FederatedAveraging, stock classes.
One process with 2 threads, or `torchrun --nproc_per_node=2` with 1 thread each."""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import work
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Net(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def loss(self, x, y):
        self.train()
        return F.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        self.eval()
        return {"acc": Weighted((self.net(x).argmax(1) == y).sum().item(), len(y))}


class Tick(TrainingProcessCallback):
    def __init__(self, clock):
        self.clock = clock

    def on_train_begin(self, *, model):
        self.clock.start()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        acc = [v for k, v in aggregate_metrics.to_simple_dict().items() if k == "Central val | acc"]
        self.clock.round_done(float(acc[0]))
        return False, Metrics()


def main(name):
    w, clock = work.get_work(name), work.Clock()
    world = int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(2 // world)
    net = Net(work.make_model(name))
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))

    order = ((r, c) for r in range(w.rounds + 2) for c in work.cohort(name, r))
    train = FederatedDataset(
        lambda rc: PyTorchTensorDataset(work.client_batches(name, *rc)), lambda: next(order)
    )
    central = PyTorchTensorDataset(work.data(name)[2:])
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=w.rounds + 1,
            evaluation_frequency=10**9,
            train_cohort_size=w.cohort,
            val_cohort_size=0,
        ),
        # evaluation_frequency still evaluates users in iteration 0, the warm-up; never after
        backend=SimulatedBackend(train, train),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=w.lr, local_batch_size=w.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[CentralEvaluationCallback(central, frequency=1), Tick(clock)],
    )
    if int(os.environ.get("RANK", 0)) == 0:
        clock.report()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--work", default="lenet")
    main(ap.parse_args().work)
