"""Tasks: token sequences, batches of any structure, and where x^0 comes from."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from federation import ClientLists, TinyNet, federate, trainer
from test_aggregate import make_data
from torch import nn
from torchmetrics import MeanMetric, MetricCollection

from fedmuon_pl import (
    Classification,
    FedAvg,
    FederatedModule,
    FederatedServer,
    FedMuon,
    LanguageModelling,
    Scaffold,
    Splits,
    Task,
    engine,
)
from fedmuon_pl.data.partition import Partition
from fedmuon_pl.server.roundlog import RoundLog, find

VOCABULARY, PADDING, LENGTH = 11, 0, 7


class TinyLanguageModel(nn.Module):
    """An embedding, a causal convolution with a residual, and the embedding again as head."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=PADDING)
        self.mix = nn.Conv1d(width, width, 3)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        past = F.pad(x.transpose(1, 2), (2, 0))
        return self.head(self.norm(x + torch.tanh(self.mix(past)).transpose(1, 2)))


class TinyAttention(nn.Module):
    """One causal attention layer."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.zeros(LENGTH, width))
        # A bias of the keys has no effect: its gradient is rounding, which AdamW would blow up.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


def tokens(clients=4, each=6):
    """Sequences that count upwards, of different lengths, padded."""
    rng = torch.Generator().manual_seed(0)
    start = torch.randint(1, VOCABULARY, (clients * each, 1), generator=rng)
    walk = 1 + (start + torch.arange(LENGTH) - 1) % (VOCABULARY - 1)
    ends = torch.randint(2, LENGTH + 1, (clients * each, 1), generator=rng)
    return walk.masked_fill(torch.arange(LENGTH) >= ends, PADDING)


class Sequences(ClientLists):
    """Integer tokens alone: no inputs, no labels."""

    def __init__(self, sequences, clients=4, **kwargs):
        super().__init__({i: None for i in range(clients)}, **kwargs)
        self.sequences = sequences
        self.eval_batch_size = 5  # the last batch is shorter, and each has other padding

    def load(self):
        s = self.sequences
        return Splits(s, s[: len(s) // 2], s[len(s) // 3 :], torch.zeros(len(s)).long().numpy(), 1)

    def make_partition(self, splits):
        return Partition.from_lists(torch.arange(len(self.sequences)).chunk(self.clients))


def train(task, data, folder, algorithm=None, *, rounds=4, precision="64-true", **kwargs):
    """x after every round, the log's rows and the module."""
    kwargs.setdefault("local_epochs", 2)
    learner = FederatedModule(task, algorithm or FedAvg(0.3), **kwargs)
    fit = trainer(folder, rounds, [FederatedServer(3)], precision=precision, limit_val_batches=1.0)
    fit.fit(learner, data)
    return learner, find(fit, RoundLog).history


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention's backward
@pytest.mark.parametrize("network", [TinyLanguageModel, TinyAttention])
@pytest.mark.parametrize(
    "algorithm", [partial(FedAvg, 0.3), partial(FedMuon, 0.05, 0.05), partial(Scaffold, 0.3)]
)
def test_a_language_model_learns_one_at_a_time_and_side_by_side(network, algorithm, tmp_path):
    task = LanguageModelling(network, VOCABULARY, ignore_index=PADDING)
    ends = []
    for at_once in (1, 3):
        learner, rows = train(
            task, Sequences(tokens()), tmp_path, algorithm(), rounds=6, clients_at_once=at_once
        )
        assert rows[-1]["val/loss"] < rows[0]["val/loss"]
        assert rows[-1]["train/loss"] < rows[0]["train/loss"]
        assert "client/acc_mean" not in rows[-1]
        ends.append((learner.network.state_dict(), rows))
    for key, value in ends[0][0].items():
        torch.testing.assert_close(ends[1][0][key], value, rtol=0, atol=1e-9)
    for one, other in zip(ends[0][1], ends[1][1], strict=True):
        for tag in ("val/loss", "val/acc", "test/loss", "test/acc", "train/loss"):
            assert one[tag] == pytest.approx(other[tag], abs=1e-6)


def test_loss_and_accuracy_are_per_token_by_hand(tmp_path):
    task = LanguageModelling(TinyLanguageModel, VOCABULARY, ignore_index=PADDING)
    data = Sequences(tokens())
    learner, rows = train(task, data, tmp_path)
    for split in ("val", "test"):
        losses, hits = [], []
        for sequence in getattr(data.splits, split):
            with torch.no_grad():
                logits = learner.network(sequence[None, :-1])[0]
            for position, target in enumerate(sequence[1:]):
                if target != PADDING:
                    losses.append(-logits[position].log_softmax(0)[target].item())
                    hits.append(int(logits[position].argmax() == target))
        assert rows[-1][f"{split}/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
        assert rows[-1][f"{split}/acc"] == pytest.approx(sum(hits) / len(hits), rel=1e-6)
        assert 0 < sum(hits) < len(hits)


def test_training_loss_is_the_mean_over_the_targets_of_the_batch():
    task = LanguageModelling(TinyLanguageModel, VOCABULARY, ignore_index=PADDING)
    network, batch = task.build_network(0), tokens()[:5]
    expected = F.cross_entropy(
        network(batch[:, :-1]).transpose(1, 2), batch[:, 1:], ignore_index=PADDING
    )
    torch.testing.assert_close(task.loss(network, batch), expected)


def test_a_batch_without_a_target_has_no_loss_and_no_gradient(tmp_path):
    task = LanguageModelling(TinyLanguageModel, VOCABULARY, ignore_index=PADDING)
    network = task.build_network(0)
    loss = task.loss(network, torch.full((3, LENGTH), PADDING))
    loss.backward()
    assert loss == 0
    assert all(not p.grad.any() for p in network.parameters() if p.grad is not None)
    empty = tokens()
    empty[:6] = PADDING  # the first client holds nothing but padding
    learner, rows = train(task, Sequences(empty), tmp_path, clients_at_once=2)
    assert all(p.isfinite().all() for p in learner.parameters())
    assert rows[-1]["val/loss"] < 4


class Regression(Task):
    """Batches are dictionaries, one level deeper than needed."""

    def loss(self, network, batch):
        return F.mse_loss(network(batch["in"]["x"])[:, 0], batch["y"])

    def metrics(self):
        return MetricCollection({"loss": MeanMetric(), "bias": MeanMetric()}, compute_groups=False)

    def evaluate(self, network, batch, metrics):
        error = network(batch["in"]["x"])[:, 0] - batch["y"]
        metrics["loss"].update(error.square())
        metrics["bias"].update(error)


class Table(Sequences):
    def __init__(self, n=24):
        super().__init__(torch.arange(n))
        rng = torch.Generator().manual_seed(0)
        x = torch.randn(n, 3, generator=rng, dtype=torch.float64)
        self.table = {"in": {"x": x}, "y": x @ torch.tensor([1.0, -2.0, 0.5]).double() + 1}

    def load(self):
        return Splits(self.table, self.table, self.table, torch.zeros(24).long().numpy(), 1)


def test_a_task_of_ones_own_with_dictionary_batches(tmp_path):
    ends = []
    for at_once in (1, 2):
        learner, rows = train(
            Regression(partial(nn.Linear, 3, 1)),
            Table(),
            tmp_path,
            FedAvg(0.1),
            rounds=10,
            clients_at_once=at_once,
        )
        assert rows[-1]["val/loss"] < 0.2 * rows[0]["val/loss"]
        assert {"val/bias", "test/bias"} <= set(rows[-1])
        ends.append(learner.network.state_dict())
    for key, value in ends[0].items():
        torch.testing.assert_close(ends[1][key], value, rtol=0, atol=1e-9)
    weight = ends[0]["weight"][0]
    torch.testing.assert_close(weight, torch.tensor([1.0, -2.0, 0.5]).double(), rtol=0, atol=0.3)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(VOCABULARY, 6), nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def test_a_network_that_cannot_run_side_by_side_runs_one_at_a_time(tmp_path):
    task = LanguageModelling(Recurrent, VOCABULARY, ignore_index=PADDING)
    learner, rows = train(task, Sequences(tokens()), tmp_path, FedAvg(1.0))
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert engine.clients_at_once(learner, torch.device("meta")) == 1  # "auto" elsewhere
    with pytest.raises(ValueError, match=r"clients_at_once=2: .*cannot run side by side.*use 1$"):
        train(task, Sequences(tokens()), tmp_path, clients_at_once=2)


# -- x^0 ------------------------------------------------------------------------------------------


def test_the_start_depends_on_the_seed_and_on_nothing_else():
    task, starts = Classification(TinyNet, 3), []
    for disturb in (0, 1, 2):
        torch.manual_seed(disturb)
        torch.rand(disturb)
        before = torch.get_rng_state()
        starts.append(task.build_network(4).state_dict())
        assert torch.equal(torch.get_rng_state(), before)
    for other in starts[1:]:
        assert all(torch.equal(other[k], v) for k, v in starts[0].items())
    assert not torch.equal(task.build_network(5).state_dict()["fc.weight"], starts[0]["fc.weight"])
    again = FederatedModule(task, Scaffold(0.1), local_steps=1, seed=4).network.state_dict()
    assert all(torch.equal(again[k], v) for k, v in starts[0].items())


def test_a_given_network_is_used_as_it_is(tmp_path):
    network = TinyNet().double()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    recorder, learner = federate(
        FedAvg(0.1), make_data([8] * 3), tmp_path, task=Classification(network, 3), rounds=1
    )
    assert learner.network is network
    moved = {k: v - before[k] for k, v in network.state_dict().items()}
    assert all(0 < d.abs().max() < 0.5 for d in moved.values())
    assert all(torch.equal(recorder.x[0][k], v) for k, v in network.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"num_classes": 1}, "num_classes=1"), ({"label_smoothing": 1.0}, "label_smoothing=1.0")],
)
def test_arguments_that_make_no_sense(arguments, said):
    with pytest.raises(ValueError, match=said):
        Classification(TinyNet, **arguments)


def test_classification_by_hand():
    task = Classification(TinyNet, 3, label_smoothing=0.1)
    network = task.build_network(0).double()
    (x, y), metrics = make_data([30])[0], task.metrics()
    metrics.add_metrics({"class_acc": task.class_metric()})
    for part in (slice(0, 7), slice(7, 30)):  # means over samples, not over batches
        task.evaluate(network, (x[part], y[part]), metrics)
    logits = network(x)
    right = logits.argmax(1) == y
    assert metrics["loss"].compute().item() == pytest.approx(F.cross_entropy(logits, y).item())
    assert metrics["acc"].compute().item() == pytest.approx(right.double().mean().item())
    for c, value in enumerate(metrics["class_acc"].compute()):
        assert value.item() == pytest.approx(right[y == c].double().mean().item())
    smooth = F.cross_entropy(logits, y, label_smoothing=0.1)
    assert task.loss(network, (x, y)).item() == pytest.approx(smooth.item())
    assert smooth != F.cross_entropy(logits, y)
