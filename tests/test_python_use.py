"""Lightning's own ways, from Python: other checkpoints and loggers, a second fit, evaluation."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from federation import ClientLists, TinyNet, trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import Logger
from test_aggregate import make_data
from torch import nn

from fedmuon_pl import Classification, FedAvg, FederatedModule, FederatedServer, Scaffold
from fedmuon_pl.errors import ConfigError
from fedmuon_pl.models import MLP, ResNet8
from fedmuon_pl.server.roundlog import RoundLog
from fedmuon_pl.tasks import _mean

# What Lightning says of a folder that is used on purpose, and of callbacks that are not:
# https://github.com/Lightning-AI/pytorch-lightning/issues/8878
pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create",
)


def parts(method=Scaffold, **kwargs):
    module = FederatedModule(Classification(TinyNet, num_classes=3), method(0.1), local_steps=2)
    return module, FederatedServer(3), ClientLists(make_data([8] * 5), 4)


def fit(folder, rounds, callbacks=(), ckpt_path=None, method=Scaffold, **kwargs):
    """A new module and server, trained or resumed."""
    module, server, data = parts(method)
    settings = {
        "limit_val_batches": 1.0,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        **kwargs,
    }
    if any(isinstance(c, ModelCheckpoint) for c in callbacks):
        settings["enable_checkpointing"] = True
    run = trainer(folder, rounds, [server, *callbacks], **settings)
    run.fit(module, data, ckpt_path=ckpt_path)
    return module, server, run, data


def weights(module):
    return {n: p.detach().clone() for n, p in module.network.named_parameters()}


@pytest.mark.parametrize("every", [1, 2])
def test_a_plain_checkpoint_can_be_resumed(every, tmp_path):
    """Lightning's default saves after the validation where that is not in every round."""
    straight, *_ = fit(tmp_path / "straight", 6, check_val_every_n_epoch=every)
    saving = ModelCheckpoint(filename="plain")
    fit(tmp_path / "run", 4, [saving], check_val_every_n_epoch=every)
    again, *_ = fit(
        tmp_path / "run",
        6,
        [ModelCheckpoint(filename="plain")],
        ckpt_path=saving.best_model_path,
        check_val_every_n_epoch=every,
    )
    for name, value in weights(straight).items():
        assert torch.equal(weights(again)[name], value)


@pytest.mark.parametrize(
    ("saving", "words"),
    [
        ({"every_n_train_steps": 1}, "would save inside a round; use every_n_epochs"),
        ({"save_on_train_epoch_end": False}, "would save before the round's end"),
        ({"monitor": "val/acc", "save_top_k": 2}, "set its every_n_epochs to .*=3"),
    ],
)
def test_checkpoints_that_could_not_be_used_are_refused(saving, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        fit(tmp_path, 3, [ModelCheckpoint(**saving)], check_val_every_n_epoch=3)
    good = {"monitor": "val/acc", "save_top_k": 2, "every_n_epochs": 3}
    fit(tmp_path, 3, [ModelCheckpoint(**good)], check_val_every_n_epoch=3)


def test_a_second_fit_does_not_forget_the_method_s_state(tmp_path):
    module, _, run, data = fit(tmp_path, 2)
    run.fit_loop.max_epochs = 3
    with pytest.raises(ConfigError, match="has finished 2 rounds: go on from a checkpoint"):
        run.fit(module, data)


class Elsewhere(Logger):
    """One that keeps its logs on a server and says that its files lie in the working folder."""

    def __init__(self, folder):
        super().__init__()
        self.save_dir_, self.name_ = folder, "stub"

    name = property(lambda self: self.name_)
    version = property(lambda self: "0")
    save_dir = property(lambda self: str(self.save_dir_))

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, *args, **kwargs):
        pass


@pytest.mark.parametrize("logger", [False, True])
def test_runs_from_one_folder_keep_their_clients_apart(logger, tmp_path):
    def run(name, rounds, ckpt_path=None):
        saving = ModelCheckpoint(dirpath=tmp_path / name, filename="last")
        own = Elsewhere(tmp_path) if logger else False
        return fit(tmp_path, rounds, [saving], ckpt_path, logger=own)

    run("one", 11)
    one = {p: p.read_bytes() for p in (tmp_path / "client_state").iterdir()}
    _, server, *_ = run("two", 11)  # sweeps after ten rounds
    assert server.store.folder.name == "client_state-2"
    assert {p: p.read_bytes() for p in (tmp_path / "client_state").iterdir()} == one
    longer, server, *_ = run("one", 13, str(tmp_path / "one/last.ckpt"))
    assert server.store.folder.name == "client_state"
    straight, *_ = fit(tmp_path / "straight", 13)
    for name, value in weights(straight).items():
        assert torch.equal(weights(longer)[name], value)


def test_checkpoints_below_a_folder_keep_their_clients(tmp_path):
    """A slash in the metric's name makes a folder of it."""
    name = "{epoch}-{val/acc:.2f}"
    saving = ModelCheckpoint(dirpath=tmp_path / "kept", filename=name, save_top_k=-1)
    _, server, *_ = fit(tmp_path, 11, [saving])
    kept = sorted((tmp_path / "kept").rglob("*.ckpt"))
    assert len(kept) == 11
    assert all(path.parent != tmp_path / "kept" for path in kept)
    for path in kept:
        saved = torch.load(path, weights_only=True)["callbacks"]["FederatedServer"]["clients"]
        server.store.load_state_dict(saved)
        server.store.load(saved["index"][:, 0].tolist(), torch.device("cpu"))


def test_a_foreign_checkpoint_in_the_folder_does_not_end_the_run(tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path / "kept", filename="last")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/mine.ckpt").write_bytes(b"something else")
    with pytest.warns(UserWarning, match=r"mine\.ckpt cannot be read, which may need it"):
        fit(tmp_path, 10, [saving])


def test_evaluation_before_a_fit_is_no_measurement_of_it(tmp_path):
    module, server, data = parts(FedAvg)
    log = RoundLog()
    run = trainer(
        tmp_path,
        4,
        [server, log],
        limit_val_batches=1.0,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=2,
        logger=Elsewhere(tmp_path),
        log_every_n_steps=1,
    )
    run.validate(module, data, verbose=False)
    run.test(module, data, verbose=False)
    run.fit(module, data)
    assert [("val/acc" in row, "test/loss" in row) for row in log.history] == [
        (False, False),
        (True, True),
    ] * 2
    run.test(module, data, verbose=False)


def test_a_network_of_other_arguments_does_not_fit():
    """ResNet-8 with other groups has parameters of the same shapes."""
    two, four = (
        Classification(partial(ResNet8, num_classes=3, norm="group", groups=g), 3) for g in (2, 4)
    )
    assert two.describe() != four.describe()
    same = Classification(partial(ResNet8, num_classes=3, norm="group", groups=2), 3)
    assert two.describe() == same.describe()
    layers = [nn.Sequential(nn.Flatten(), nn.Dropout(p), nn.Linear(4, 3)) for p in (0.1, 0.1, 0.5)]
    texts = [Classification(network, 3).describe()["network"] for network in layers]
    assert texts[0] == texts[1] != texts[2]
    moved = [Classification(partial(MLP, 4, pretrained_file=f), 3) for f in ("a/x", "b/x")]
    assert moved[0].describe() == moved[1].describe()


def test_a_loss_that_is_not_a_number_is_not_left_out(tmp_path):
    metric = _mean()
    metric.update(torch.tensor(1.0), weight=3)
    metric.update(torch.tensor(2.0), weight=1)
    assert metric.compute() == 1.25
    metric.update(torch.tensor(torch.nan), weight=1)
    assert metric.compute().isnan()

    class Overflows(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 3).double()

        def forward(self, x):
            out = self.fc(x.flatten(1))
            return out if self.training else out * torch.nan

    log = RoundLog()
    module = FederatedModule(Classification(Overflows, num_classes=3), FedAvg(0.1), local_steps=2)
    run = trainer(
        tmp_path, 1, [FederatedServer(3), log], limit_val_batches=1.0, num_sanity_val_steps=0
    )
    run.fit(module, ClientLists(make_data([8] * 5), 4))
    assert log.history[-1]["val/loss"] == math.inf
    assert log.history[-1]["test/loss"] == math.inf


def test_classes_without_a_sample_say_nothing():
    data = ClientLists(make_data([6, 6, 6]), 4)
    data.setup()
    data.splits.labels = np.array([0] * 6 + [0, 0, 0, 1, 1, 1] + [1] * 6)
    present = np.array([True, False, False])
    everything = data.label_shares([0, 1, 2])
    np.testing.assert_allclose(everything, [[1, 0, 0], [0.5, 0.5, 0], [0, 1, 0]])
    within = data.label_shares([0, 1, 2], present)
    np.testing.assert_allclose(within, [[1, 0, 0], [1, 0, 0], [0, 0, 0]])
