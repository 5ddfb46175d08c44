"""Layers that stay on the client: FedBN and what else is made of them."""

import math
from functools import partial

import pytest
import reference
import torch
from federation import TinyNet, federate
from pytorch_lightning import Callback
from test_logging import Normed, tiny_data
from test_methods import SETTINGS, scheduled
from torch import nn

from fedmuon_pl import Algorithm, FedAvg, FedBN, FedMuon, FedProx, Mime, Scaffold
from fedmuon_pl.algorithms.fedbn import LocalLayers
from fedmuon_pl.algorithms.local import TorchRule
from fedmuon_pl.clients import batch_norm_state
from fedmuon_pl.errors import ConfigError

X0, S0, DATA = reference.norm_problem()
NORM = ["norm.weight", "norm.bias"]


class NormNet(TinyNet):
    """The network of ``reference.norm_problem``; nothing in its names says BatchNorm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(2)
        self.double().load_state_dict({**self.state_dict(), **X0, **S0})

    def forward(self, x):
        return self.fc(torch.tanh(self.norm(self.conv(x))).flatten(1))


class OwnLayers(Callback):
    """What each client of a federation keeps, after every round: (has any, tensors)."""

    def __init__(self, clients=5):
        self.clients = clients
        self.kept = []

    def on_train_batch_end(self, trainer, module, *_):
        store = module.server.store
        self.kept.append(
            [store.load([c], module.device)["own_layers"] for c in range(self.clients)]
        )


def with_layers(base, **kwargs):
    """Any method with local layers before its own mechanisms."""
    return Algorithm(base.local, [LocalLayers(**kwargs), *base.mechanisms], base.server)


@pytest.mark.parametrize("setting", SETTINGS)
def test_fedbn_equals_its_reference(setting, tmp_path):
    work, options = SETTINGS[setting]
    own = OwnLayers()
    recorder, learner = federate(
        FedBN(0.3), DATA, tmp_path, network=NormNet, callbacks=[own], **work, **options
    )
    arguments = {"lr": 0.3, "statistics": reference.norm_statistics, "s0": S0}
    if options.get("weighting") == "samples":
        arguments["weights"] = {i: len(y) for i, (_, y) in DATA.items()}
    if "client_clip_norm" in work:
        arguments["clip_norm"] = work["client_clip_norm"]
    if "lr_schedule" in work:
        arguments["lr"] = scheduled(0.3, work["lr_schedule"], len(recorder.rounds))
    trace = reference.fedbn(X0, reference.norm_gradient, recorder.rounds, **arguments)
    assert all(len(cohort) == 3 for cohort in recorder.rounds)
    steps = dict.fromkeys(range(5), 0)
    for r, (x, state) in enumerate(zip(trace.x, trace.state, strict=True)):
        for key in x:
            torch.testing.assert_close(recorder.x[r][key], x[key], rtol=0, atol=1e-10)
        for i, batches in recorder.rounds[r].items():
            steps[i] += len(batches)
        for i, (has, *kept, counter) in enumerate(own.kept[r]):
            assert has.item() == (i in state["own"])
            assert counter.item() == steps[i]
            if has:
                expected = [*state["own"][i].values(), *state["s"][i].values()]
                for mine, value in zip(kept, expected, strict=True):
                    torch.testing.assert_close(mine[0], value, rtol=0, atol=1e-10)
    # Somebody took part more than once, and went on from where it was.
    assert max(sum(i in cohort for cohort in recorder.rounds) for i in range(5)) > 1
    assert not all(has for has, *_ in own.kept[0])
    # The global model's own are those of x^0, to the bit.
    left = learner.network.state_dict()
    assert all(torch.equal(left[key], {**X0, **S0}[key]) for key in [*NORM, *S0])
    assert left["norm.num_batches_tracked"] == 0


def test_fedbn_in_float32(tmp_path):
    class Float(NormNet):
        def __init__(self):
            super().__init__()
            self.float()

    data = {i: (x.float(), y) for i, (x, y) in DATA.items()}
    recorder, _ = federate(
        FedBN(0.3), data, tmp_path, network=Float, trainer_kwargs={"precision": "32-true"}
    )
    rounds = [
        {i: [(x.double(), y) for x, y in batches] for i, batches in cohort.items()}
        for cohort in recorder.rounds
    ]
    trace = reference.fedbn(X0, reference.norm_gradient, rounds, lr=0.3)
    for key, value in trace.x[-1].items():
        torch.testing.assert_close(recorder.x[-1][key].double(), value, rtol=0, atol=1e-4)


def test_the_comparison_can_fail(tmp_path):
    recorder, _ = federate(FedAvg(0.3), DATA, tmp_path, network=NormNet)
    trace = reference.fedbn(X0, reference.norm_gradient, recorder.rounds, lr=0.3)
    assert max((recorder.x[-1][k] - v).abs().max() for k, v in trace.x[-1].items()) > 1e-3


# -- other methods ---------------------------------------------------------------


MUON = partial(FedMuon, 0.05, rest_lr=0.02, orthogonalizer="svd")
ALONE = {
    "fedmuon": partial(MUON, align_rest=False),
    "local_adamw": partial(FedAvg, 0.02, torch.optim.AdamW),
    "fedprox": partial(FedProx, 0.3, mu=0.5),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_client_alone_does_not_notice(name, tmp_path):
    # Its layers are where it left them, on the server or at home. (A shared direction, or control
    # variates, would act on them only if they were shared.)
    runs, kept = [], OwnLayers(1)
    for algorithm in (ALONE[name](), with_layers(ALONE[name]())):
        callbacks = [kept] if runs else []
        recorder, _ = federate(
            algorithm, {0: DATA[0]}, tmp_path, network=NormNet, cohort=1, callbacks=callbacks
        )
        runs.append(recorder.x)
    for r, (plain, personal) in enumerate(zip(*runs, strict=True)):
        own = dict(zip(NORM, (t[0] for t in kept.kept[r][0][1:]), strict=False))
        assert {
            n: torch.equal(p, X0[n]) for n, p in personal.items() if n in NORM
        } == dict.fromkeys(NORM, True)
        for key, value in {**personal, **own}.items():
            torch.testing.assert_close(value, plain[key], rtol=0, atol=1e-10)


@pytest.mark.parametrize("base", [MUON, partial(Scaffold, 0.3), partial(FedProx, 0.3, mu=0.5)])
def test_side_by_side_with_other_mechanisms(base, tmp_path):
    runs = [
        federate(
            with_layers(base()), DATA, tmp_path, network=NormNet, local_epochs=1, clients_at_once=n
        )[0].x[-1]
        for n in (1, 3)
    ]
    for key in X0:
        torch.testing.assert_close(runs[0][key], runs[1][key], rtol=0, atol=1e-9)


@pytest.mark.parametrize("base", [partial(Mime, 0.1), partial(Scaffold, 0.1, option="I")])
def test_gradients_at_x_r_are_refused(base, tmp_path):
    # They would be taken at the global model's layers, in which no client is.
    with pytest.raises(ValueError, match=r"local_layers cannot be combined with .*gradients at x"):
        federate(with_layers(base()), DATA, tmp_path, network=NormNet)


def test_a_direction_that_is_not_sent(tmp_path):
    runs = [
        federate(with_layers(MUON(send_direction=send)), DATA, tmp_path, network=NormNet)[0].x
        for send in (True, False)
    ]
    for sent, derived in zip(*runs, strict=True):
        for key, value in sent.items():
            torch.testing.assert_close(derived[key], value, rtol=0, atol=1e-9)


def test_a_local_head_and_nothing_shared(tmp_path):
    # FedPer's head by its name, and its reference by the same rule.
    algorithm = Algorithm(TorchRule(0.3), [LocalLayers(batch_norm=False, patterns=["^fc"])])
    x0, gradient, data = reference.tiny_problem()

    class Net(TinyNet):
        def __init__(self):
            super().__init__()
            self.double().load_state_dict(x0)

    recorder, _ = federate(algorithm, data, tmp_path, network=Net)
    trace = reference.fedbn(
        x0, gradient, recorder.rounds, lr=0.3, local=lambda name: name.startswith("fc")
    )
    for key, value in trace.x[-1].items():
        torch.testing.assert_close(recorder.x[-1][key], value, rtol=0, atol=1e-10)

    everything = Algorithm(TorchRule(0.3), [LocalLayers(batch_norm=False, patterns=["."])])
    recorder, _ = federate(everything, data, tmp_path, network=Net)
    assert all(torch.equal(recorder.x[-1][key], x0[key]) for key in x0)
    assert recorder.report[-1]["comm/total_mb"] == 0


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize(
    ("algorithm", "up", "down"),
    [
        # 49 weights less two gains and biases; no statistics, no counter.
        (partial(FedBN, 0.1), 45, 45),
        # Mbar of 42 up; Delta_g (zero in the local layers) of 49 and Mbar down.
        (lambda: with_layers(FedMuon(0.1)), 45 + 42, 45 + 49 + 42),
    ],
)
def test_bytes(algorithm, up, down, at_once, tmp_path):
    recorder, _ = federate(
        algorithm(),
        tiny_data(),
        tmp_path,
        network=Normed,
        rounds=2,
        clients_at_once=at_once,
        trainer_kwargs={"precision": "32-true"},
    )
    for row in recorder.report:
        assert row["comm/up_mb"] == pytest.approx(3 * 4 * up / 1e6, rel=1e-12)
        assert row["comm/down_mb"] == pytest.approx(3 * 4 * down / 1e6, rel=1e-12)


# -- which layers ---------------------------------------------------------------


def test_the_class_says_what_is_batch_norm():
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)),
        nn.GroupNorm(1, 2),
        nn.InstanceNorm2d(2, affine=True),
        nn.SyncBatchNorm(2, track_running_stats=False),
    )
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert batch_norm_state(network) == {
        *(f"1.1.{name}" for name in ("weight", "bias", *statistics)),
        *("4.weight", "4.bias"),
    }
    assert batch_norm_state(nn.BatchNorm1d(2)) == {"weight", "bias", *statistics}
    assert batch_norm_state(nn.Linear(2, 2)) == frozenset()


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        (partial(FedBN, 0.1), "FedBN: the network has no BatchNorm layer that could stay local"),
        (
            lambda: with_layers(FedAvg(0.1), batch_norm=False, patterns=["head"]),
            "patterns: 'head' matches no parameter or buffer",
        ),
        (
            lambda: Algorithm(
                TorchRule(0.1),
                [*FedProx(0.1).mechanisms, LocalLayers(batch_norm=False, patterns=["fc"])],
            ),
            "local_layers must be the first of the mechanisms",
        ),
    ],
)
def test_what_cannot_stay_local_is_refused(algorithm, sentence, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        federate(algorithm(), DATA, tmp_path)
    with pytest.raises(ValueError, match=r"patterns: '\(' is no regular expression"):
        LocalLayers(patterns=["("])


class Peak(nn.Module):
    """A buffer that the loss does not depend on."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(9, 3)
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, x):
        self.peak.copy_(x.amax())
        return self.fc(x[..., :3, :3].flatten(1))


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_client_whose_own_layers_are_not_finite_is_refused(at_once, tmp_path):
    data = {i: (x.clone(), y) for i, (x, y) in DATA.items()}
    data[2][0][..., 3, 3] = math.inf
    kept = OwnLayers()
    recorder, _ = federate(
        with_layers(FedAvg(0.1), batch_norm=False, patterns=["peak"]),
        data,
        tmp_path,
        network=Peak,
        cohort=5,
        on_nonfinite="drop",
        callbacks=[kept],
        clients_at_once=at_once,
    )
    assert [row["fed/clients_dropped"] for row in recorder.report] == [1] * 4
    assert [has.item() for has, _ in kept.kept[-1]] == [True, True, False, True, True]
    assert all(p.isfinite().all() for p in recorder.x[-1].values())
