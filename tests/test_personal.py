"""The clients' own models, against plain loops, and that measuring them changes nothing."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from cli_runs import checkpoint, difference, events, fit, rows
from federation import ClientLists, Recorder, federate, trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from fedmuon_pl import (
    Classification,
    FedAvg,
    FedBN,
    FederatedModule,
    FederatedServer,
    LanguageModelling,
    PersonalEvaluation,
    SklearnDigits,
)
from fedmuon_pl.data.partition import IID, DirichletByClient
from fedmuon_pl.data.sampling import evaluated_clients
from fedmuon_pl.errors import ConfigError
from fedmuon_pl.models import MLP
from fedmuon_pl.seeding import derive
from fedmuon_pl.server.roundlog import RoundLog, find

TAGS = ["client/personal_val_acc", "client/personal_acc_mean", "client/personal_acc_worst10"]
MULTI = partial(MLP, 64, [32], 10)


def skewed(clients=12, **kwargs):
    return SklearnDigits(clients, DirichletByClient(0.3), batch_size=16, **kwargs)


def train(algorithm, data, folder, callbacks=(), *, network=MULTI, rounds=3, cohort=4, **work):
    """Trains in float32 with validation; returns the rows, the module and the server."""
    work = work or {"local_steps": 3}
    seen = {}

    class Watch(Recorder):
        def on_train_end(self, fitting, module):
            seen["store"] = module.server.store

    log, watch = RoundLog(), Watch()
    module = FederatedModule(Classification(network, num_classes=10), algorithm, **work)
    run = trainer(
        folder,
        rounds,
        [FederatedServer(cohort), log, watch, *callbacks],
        precision="32-true",
        limit_val_batches=1.0,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        num_sanity_val_steps=0,
    )
    run.fit(module, data)
    seen |= {"x": watch.x, "rng": torch.get_rng_state()}
    return log.history, module, seen


def own_model(module, store, client):
    """A client's network, put together by hand: x^R and what the client keeps."""
    network = MULTI(batch_norm=True)
    network.load_state_dict(module.network.state_dict())
    has, *kept = store.load([client], torch.device("cpu"))["own_layers"]
    if has:
        norm = network[2]
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        norm.load_state_dict({n: t[0] for n, t in zip(names, kept, strict=True)})
    return network


def class_accuracy(network, split, shares):
    """sum_y share_y P(right | y), by counting over the whole split."""
    inputs, labels = split
    with torch.no_grad():
        right = (network.eval()(inputs).argmax(1) == labels).numpy()
    labels = labels.numpy()
    return sum(s * right[labels == y].mean() for y, s in enumerate(shares) if s)


def worst(values):
    values = sorted(values)
    return np.mean(values[: math.ceil(len(values) / 10)])


# -- what is measured ---------------------------------------------------------------


def test_without_anything_personal_it_is_the_global_models_accuracy(tmp_path):
    history, *_ = train(FedAvg(0.3), skewed(), tmp_path, [PersonalEvaluation(1)])
    for row in history:
        assert row["client/personal_acc_mean"] == pytest.approx(row["client/acc_mean"], abs=1e-12)
        ours, theirs = row["client/personal_acc_worst10"], row["client/acc_worst10"]
        assert ours == pytest.approx(theirs, abs=1e-12)
    assert history[-1]["client/acc_mean"] != history[0]["client/acc_mean"]


@pytest.mark.parametrize("epochs", [0, 2])
@pytest.mark.parametrize("work", [{"local_steps": 3}, {"local_epochs": 1, "drop_last": True}])
def test_models_are_the_clients_own(epochs, work, tmp_path):
    data = skewed()
    personal = PersonalEvaluation(fine_tune_epochs=epochs, fine_tune_lr=0.05)
    history, module, seen = train(
        FedBN(0.3), data, tmp_path, [personal], network=partial(MULTI, batch_norm=True), **work
    )
    assert 0 < len(seen["store"]) < 12
    found = {"val": [], "test": []}
    for client in range(12):
        network = own_model(module, seen["store"], client).train()
        n = len(data.partition[client])
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        batches = data.client_batches(
            client,
            round=2,
            seed=derive(0, "fine-tuning"),
            steps=math.ceil(2 * n / 16) if "local_steps" in work else None,
            epochs=None if "local_steps" in work else 2,
            drop_last=module.drop_last,
        )
        for samples in batches if epochs else ():
            inputs, labels = data.gather(torch.from_numpy(samples))
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(inputs), labels).backward()
            optimizer.step()
        shares = data.label_shares([client])[0]
        for split in found:
            found[split].append(class_accuracy(network, getattr(data.splits, split), shares))
    row = history[-1]
    assert row["client/personal_val_acc"] == pytest.approx(np.mean(found["val"]), abs=1e-6)
    assert row["client/personal_acc_mean"] == pytest.approx(np.mean(found["test"]), abs=1e-6)
    assert row["client/personal_acc_worst10"] == pytest.approx(worst(found["test"]), abs=1e-6)
    assert abs(row["client/personal_acc_mean"] - row["client/acc_mean"]) > 1e-3
    assert not set(TAGS) & {key for r in history[:-1] for key in r}


def test_a_clients_own_part(tmp_path):
    data = skewed()
    parts = {}

    def client_split(client, split):
        inputs, labels = getattr(data.splits, split)
        # Client 5 has a test sample of its own and no validation part.
        parts[client, split] = part = inputs[client : client + 7], labels[client : client + 7]
        return None if (client, split) == (5, "val") else part

    data.client_split = client_split
    history, module, _ = train(FedAvg(0.3), data, tmp_path, [PersonalEvaluation()])
    network, found = module.network.eval(), {"val": [], "test": []}
    for (client, split), (inputs, labels) in parts.items():
        accuracy = (network(inputs).argmax(1) == labels).double().mean().item()
        if (client, split) == (5, "val"):
            shares = data.label_shares([5])[0]
            accuracy = class_accuracy(network, data.splits.val, shares)
        found[split].append(accuracy)
    row = history[-1]
    assert row["client/personal_val_acc"] == pytest.approx(np.mean(found["val"]), abs=1e-6)
    assert row["client/personal_acc_mean"] == pytest.approx(np.mean(found["test"]), abs=1e-6)
    assert row["client/personal_acc_worst10"] == pytest.approx(worst(found["test"]), abs=1e-6)


def test_a_fixed_sample_of_clients(tmp_path):
    data = skewed()
    history, module, _ = train(FedAvg(0.3), data, tmp_path, [PersonalEvaluation(max_clients=3)])
    chosen = evaluated_clients(np.arange(12), 3)
    assert len(set(chosen.tolist())) == 3
    assert chosen.tolist() == evaluated_clients(np.arange(12), 3).tolist()
    assert evaluated_clients(np.arange(3), 3).tolist() == [0, 1, 2]
    found = [
        class_accuracy(module.network, data.splits.test, shares)
        for shares in data.label_shares(chosen)
    ]
    assert history[-1]["client/personal_acc_mean"] == pytest.approx(np.mean(found), abs=1e-6)


# -- when, and what it leaves behind ---------------------------------------------------------------


def test_every_nth_round_also_where_nothing_is_validated(tmp_path):
    callbacks = [PersonalEvaluation(every_n_rounds=2)]
    _, module = federate(
        FedAvg(0.3), skewed(), tmp_path, task=Classification(MULTI), callbacks=callbacks
    )
    history = find(module.trainer, RoundLog).history
    assert [TAGS[0] in row for row in history] == [False, True, False, True]


class Noisy(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 10)
        )
        self[2].eval()  # a user's choice: it is to stay so


@pytest.mark.filterwarnings("ignore:Found 1 module")  # Lightning's, of Noisy
@pytest.mark.parametrize("algorithm", [partial(FedAvg, 0.3), partial(FedBN, 0.3)])
def test_it_leaves_no_trace(algorithm, tmp_path):
    runs = []
    for callbacks in ([], [PersonalEvaluation(1, fine_tune_epochs=1)]):
        torch.manual_seed(0)
        history, module, seen = train(
            algorithm(), skewed(), tmp_path, callbacks, network=Noisy, local_steps=2
        )
        for row in history:
            for key in [k for k in row if k.startswith("time/") or k in TAGS]:
                del row[key]
        modes = [part.training for part in module.network.modules()]
        runs.append([seen["x"], seen["rng"], history, modes, module.network.state_dict()])
    assert difference(*runs) is None


@pytest.mark.filterwarnings("ignore:Found 1 module")  # Lightning's, of Noisy
def test_the_measurement_is_the_same_in_every_run(tmp_path):
    found = []
    for every in (1, 2, 3):
        torch.manual_seed(every)
        history, *_ = train(
            FedAvg(0.3),
            skewed(),
            tmp_path,
            [PersonalEvaluation(every, fine_tune_epochs=1)],
            network=Noisy,
            rounds=6,
        )
        found.append([history[-1][tag] for tag in TAGS])
    assert found[0] == found[1] == found[2]


def test_it_may_choose_a_checkpoint_by_validation_only(tmp_path):
    best = partial(ModelCheckpoint, tmp_path, mode="max", save_on_train_epoch_end=True)
    chosen = best(monitor="client/personal_val_acc")
    # So high a rate that the best round is not the last.
    history, *_ = train(FedAvg(3.0), skewed(), tmp_path, [PersonalEvaluation(1), chosen], rounds=4)
    values = [row["client/personal_val_acc"] for row in history]
    assert float(chosen.best_model_score) == pytest.approx(max(values), abs=1e-6)
    assert f"epoch={int(np.argmax(values))}" in chosen.best_model_path
    with pytest.raises(ConfigError, match="monitors client/personal_acc_mean: nothing is chosen"):
        train(FedAvg(0.1), skewed(), tmp_path, [best(monitor="client/personal_acc_mean")])


def test_what_makes_no_sense_is_refused(tmp_path):
    for arguments, sentence in (
        ({"every_n_rounds": 0}, "every_n_rounds=0 must be at least 1"),
        ({"fine_tune_epochs": -1}, "fine_tune_epochs=-1 must be at least 0"),
        ({"max_clients": 0}, "max_clients=0 must be at least 1"),
        ({"fine_tune_lr": 0.0}, "fine_tune_lr=0.0 must be positive"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            PersonalEvaluation(**arguments)
    task = LanguageModelling(partial(nn.Embedding, 5, 5), vocabulary=5)
    tokens = {0: (torch.zeros(4, 3, dtype=torch.long), torch.zeros(4, dtype=torch.long))}
    with pytest.raises(ConfigError, match="needs a task with classes, not LanguageModelling"):
        federate(
            FedAvg(0.1),
            ClientLists(tokens, num_classes=5),
            tmp_path,
            task=task,
            cohort=1,
            callbacks=[PersonalEvaluation()],
        )


def test_by_the_command_line(tmp_path):
    norm = ("--model.task.init_args.network.init_args.batch_norm", "true")
    args = ("-c", "callbacks/personal", *norm)
    plain = fit("fedavg", tmp_path / "plain", *norm)
    folder = fit("fedavg", tmp_path / "personal", *args)
    for name in ("last", "best"):  # base.yaml's callbacks are still there
        one, two = (checkpoint(f, name) for f in (folder, plain))
        for saved in (one, two):
            del saved["callbacks"]["RoundLog"]
        assert difference(one, two) is None
    ours, theirs = rows(folder), rows(plain)
    assert [{k: v for k, v in row.items() if k not in TAGS} for row in ours] == theirs
    assert [row[TAGS[1]] for row in ours[:-1]] == [""] * 3
    assert ours[-1][TAGS[1]] == ours[-1]["client/acc_mean"]
    assert events(folder)[TAGS[0], 3] == pytest.approx(float(ours[-1][TAGS[0]]), abs=1e-6)
    tuned = fit(
        "fedavg",
        tmp_path / "tuned",
        *args,
        *("--trainer.callbacks.fine_tune_epochs", "3"),
        *("--trainer.callbacks.fine_tune_lr", "0.1"),
    )
    assert float(rows(tuned)[-1][TAGS[1]]) > float(ours[-1][TAGS[1]]) + 0.05


# -- what it is for ---------------------------------------------------------------


class Shifted(SklearnDigits):
    """Each client sees all digits in its own scale and brightness."""

    def make_partition(self, splits):
        partition = super().make_partition(splits)
        rng = np.random.default_rng(0)
        self.scale = torch.from_numpy(np.exp(rng.normal(0, 1, self.clients))).float()
        self.shift = torch.from_numpy(rng.normal(0, 3, self.clients)).float()
        for client in range(self.clients):
            own = torch.tensor(partition[client])
            splits.train[0][own] = self.seen(client, splits.train[0][own])
        return partition

    def seen(self, client, inputs):
        return inputs * self.scale[client] + self.shift[client]

    def client_split(self, client, split):
        inputs, labels = getattr(self.splits, split)
        return self.seen(client, inputs), labels


def test_fedbn_beats_fedavg_under_feature_shift(tmp_path):
    accuracy = {}
    for algorithm in (FedAvg(0.1), FedBN(0.1)):
        history, *_ = train(
            algorithm,
            Shifted(8, IID(), batch_size=32),
            tmp_path,
            [PersonalEvaluation()],
            network=partial(MULTI, batch_norm=True),
            rounds=8,
            cohort=8,
            local_epochs=1,
        )
        accuracy[algorithm.name] = history[-1]["client/personal_acc_mean"]
    assert accuracy["FedBN"] > accuracy["FedAvg"] + 0.1


def test_fine_tuning_beats_the_global_model_under_label_skew(tmp_path):
    history, *_ = train(
        FedAvg(0.1),
        skewed(),
        tmp_path,
        [PersonalEvaluation(fine_tune_epochs=3, fine_tune_lr=0.1)],
        rounds=8,
    )
    assert history[-1]["client/personal_acc_mean"] > history[-1]["client/acc_mean"] + 0.1
