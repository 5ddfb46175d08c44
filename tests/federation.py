"""Runs a small federation through the real engine and records every round."""

from dataclasses import dataclass, field

import numpy as np
import torch
from pytorch_lightning import Callback, Trainer

from fedmuon_pl import Classification, FederatedDataModule, FederatedModule, FederatedServer, Splits
from fedmuon_pl.data.partition import Partition


class TinyNet(torch.nn.Module):
    """The network of ``reference.tiny_problem``."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 2, 3, bias=False)
        self.fc = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(torch.tanh(self.conv(x)).flatten(1))


class ClientLists(FederatedDataModule):
    """Clients whose data are given one by one."""

    def __init__(self, data, batch_size=4, num_classes=3):
        super().__init__(len(data), None, batch_size=batch_size)
        self.client_data = data
        self.num_classes = num_classes

    def load(self):
        inputs, labels = (
            torch.cat(parts) for parts in zip(*self.client_data.values(), strict=True)
        )
        everything = (inputs, labels)
        return Splits(everything, everything, everything, labels.numpy(), self.num_classes)

    def make_partition(self, splits):
        sizes = [len(labels) for _, labels in self.client_data.values()]
        ends = np.cumsum(sizes)
        return Partition.from_lists([np.arange(e - n, e) for n, e in zip(sizes, ends, strict=True)])


@dataclass
class Recorder(Callback):
    """What every round did: x^{r+1} by name, the cohort's batches, the method's server state."""

    x: list = field(default_factory=list)
    rounds: list = field(default_factory=list)
    state: list = field(default_factory=list)
    report: list = field(default_factory=list)

    def on_train_batch_start(self, trainer, module, *_):
        plan, data = module.server.plan, module.data
        self.rounds.append({})
        for client in plan.clients:
            batches = data.client_batches(
                client,
                round=plan.round,
                seed=module.seed,
                steps=module.local_steps,
                epochs=module.local_epochs,
                drop_last=module.drop_last,
            )
            self.rounds[-1][client] = [
                tuple(t.clone() for t in data.gather(torch.from_numpy(b))) for b in batches
            ]

    def on_train_batch_end(self, trainer, module, *_):
        self.x.append({n: p.detach().clone() for n, p in module.network.named_parameters()})
        saved = module.algorithm.state_dict()
        self.state.append(
            {f"{k}.{n}": [t.clone() for t in ts] for k, v in saved.items() for n, ts in v.items()}
        )
        self.report.append(dict(module.server.report))


def trainer(folder, rounds, callbacks=(), **kwargs):
    settings = {
        "accelerator": "cpu",
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        **kwargs,
    }
    return Trainer(
        max_epochs=rounds, default_root_dir=str(folder), callbacks=list(callbacks), **settings
    )


def federate(
    algorithm,
    data,
    folder,
    *,
    network=TinyNet,
    rounds=4,
    cohort=3,
    task=None,
    weighting="uniform",
    batch_size=4,
    on_nonfinite="stop",
    callbacks=(),
    trainer_kwargs=None,
    **module,
):
    """Trains and returns (recorder, module)."""
    if "local_epochs" not in module:
        module.setdefault("local_steps", 3)
    recorder = Recorder()
    learner = FederatedModule(task or Classification(network, num_classes=3), algorithm, **module)
    data_module = data if isinstance(data, FederatedDataModule) else ClientLists(data, batch_size)
    server = FederatedServer(cohort, weighting=weighting, on_nonfinite=on_nonfinite)
    fit = trainer(folder, rounds, [server, recorder, *callbacks], **(trainer_kwargs or {}))
    fit.fit(learner, data_module)
    return recorder, learner
