"""Averages: weights, order, buffers, and what may not be averaged in."""

from functools import partial

import numpy as np
import pytest
import torch
from federation import ClientLists, TinyNet, federate
from hypothesis import given
from hypothesis import strategies as st
from networks import Everything, Frozen, OwnBuffer, batch_norm
from pytorch_lightning import Callback
from torch import nn

from fedmuon_pl import Classification, FedAdam, FedAvg, FedMuon, Scaffold
from fedmuon_pl.algorithms.base import Algorithm, Mechanism, Upload
from fedmuon_pl.algorithms.local import TorchRule
from fedmuon_pl.data.sampling import cohort
from fedmuon_pl.errors import NonFiniteUpdate
from fedmuon_pl.pytrees import all_finite
from fedmuon_pl.server.aggregate import RunningMean

SGD = torch.optim.SGD


def make_data(sizes, means=None, seed=0, dtype=torch.float64):
    """Clients with inputs N(mean, 1) of shape (1, 4, 4)."""
    rng = torch.Generator().manual_seed(seed)
    out = {}
    for i, n in enumerate(sizes):
        x = torch.randn(n, 1, 4, 4, generator=rng, dtype=torch.float64)
        y = torch.randint(0, 3, (n,), generator=rng)
        out[i] = ((x + (means[i] if means else 0.0)).to(dtype), y)
    return out


# -- running sums ---------------------------------------------------------------------------------


def test_nobody_or_no_weight_is_no_mean():
    sums = RunningMean()
    assert sums.means() == {}
    sums.add("x", [torch.full((2, 3), torch.nan)], [0, 0])
    assert sums.weight("x") == 0
    assert sums.means() == {}


def test_a_client_of_weight_0_is_not_even_multiplied():
    sums = RunningMean()
    sums.add("x", [torch.tensor([[1.0], [torch.inf], [4.0], [torch.nan]])], [1, 0, 2, 0])
    assert sums.means()["x"][0].tolist() == [3.0]
    assert sums.weight("x") == 3


def test_weights_sum_to_one_for_any_cohort():
    value = torch.tensor([0.1, -7.3e5, 3e-9])
    for clients in (1, 2, 3, 5, 11):
        for weights in ([1] * clients, list(range(1, clients + 1))):
            sums = RunningMean()
            sums.add("x", [value.expand(clients, 3)], weights)
            assert torch.equal(sums.means()["x"][0].float(), value)


def test_order_and_blocks_of_clients_do_not_matter():
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(20, 50, generator=rng) * 10.0 ** torch.randint(
        -3, 3, (20, 1), generator=rng
    )
    weights = torch.randint(1, 100, (20,), generator=rng).tolist()
    results = []
    for _ in range(5):
        order, sums = torch.randperm(20, generator=rng), RunningMean()
        for block in order.split(int(torch.randint(1, 7, (), generator=rng))):
            sums.add("x", [values[block]], [weights[c] for c in block])
        results.append(sums.means()["x"][0])
    exact = (values.double() * torch.tensor(weights).view(-1, 1)).sum(0) / sum(weights)
    for r in results:
        assert torch.equal(r.float(), results[0].float())
        torch.testing.assert_close(r, exact, rtol=1e-13, atol=1e-15)


def test_averaging_changes_no_input():
    values = [torch.randn(3, 4), torch.randn(3, 2, 2)]
    before = [v.clone() for v in values]
    sums = RunningMean()
    for _ in range(2):
        sums.add("x", values, [1, 2, 3])
    sums.means()
    assert all(torch.equal(a, b) for a, b in zip(values, before, strict=True))


def test_two_blocks_with_other_keys_do_not_mix():
    sums = RunningMean()
    sums.add("x", [torch.ones(1, 2)], [1])
    sums.add("y", [torch.full((1, 2), 5.0)], [3])
    sums.add("x", [], [1])
    assert sums.weight("x") == 1
    assert sums.means()["y"][0].tolist() == [5.0, 5.0]


# -- buffers --------------------------------------------------------------------------------------


class FirstNorm(nn.Sequential):
    """BatchNorm on the inputs: its statistics follow from the data alone."""

    def __init__(self):
        super().__init__(nn.BatchNorm2d(1, affine=False), nn.Flatten(), nn.Linear(16, 3))


def two_clients(weighting, folder, swap=False, at_once=1, algorithm=None):
    data = make_data([6, 18], [0.0, 10.0])
    order = [1, 0] if swap else [0, 1]
    _, learner = federate(
        algorithm or FedAvg(0.1),
        {i: data[c] for i, c in enumerate(order)},
        folder,
        network=FirstNorm,
        rounds=1,
        cohort=2,
        weighting=weighting,
        batch_size=18,
        local_epochs=1,
        clients_at_once=at_once,
    )
    return {k: b.clone() for k, b in learner.network.named_buffers()}, [
        data[order[0]],
        data[order[1]],
    ]


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_running_statistics_are_the_weighted_mean_of_the_clients(weighting, tmp_path):
    buffers, clients = two_clients(weighting, tmp_path)
    weights = [0.5, 0.5] if weighting == "uniform" else [0.25, 0.75]
    mean = sum(w * 0.1 * x.mean() for w, (x, _) in zip(weights, clients, strict=True))
    var = sum(w * (0.9 + 0.1 * x.var()) for w, (x, _) in zip(weights, clients, strict=True))
    assert mean > 0.4
    torch.testing.assert_close(buffers["0.running_mean"][0], mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(buffers["0.running_var"][0], var, rtol=0, atol=1e-12)
    assert buffers["0.num_batches_tracked"].item() == 1


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_running_statistics_do_not_depend_on_the_order_of_clients(weighting, tmp_path):
    one, other = (two_clients(weighting, tmp_path, swap=s)[0] for s in (False, True))
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=0, atol=1e-14)


def test_buffers_of_a_round_are_those_of_plain_averaging_whatever_the_server_does(tmp_path):
    plain, _ = two_clients("uniform", tmp_path)
    for algorithm in (FedAdam(0.1, server_lr=3.0), FedAvg(0.1, server=partial(SGD, lr=5.0))):
        moved, _ = two_clients("uniform", tmp_path, algorithm=algorithm)
        assert all(torch.equal(moved[k], b) for k, b in plain.items())


class EveryBuffer(TinyNet):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("third", torch.tensor(1 / 3, dtype=torch.float32))
        self.register_buffer("ids", torch.arange(3, dtype=torch.int32))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


@pytest.mark.parametrize("at_once", [1, 3])
def test_constant_buffers_stay_what_they_are(at_once, tmp_path):
    _, learner = federate(
        FedAvg(0.1),
        make_data([4, 8, 9]),
        tmp_path,
        network=EveryBuffer,
        weighting="samples",
        clients_at_once=at_once,
        trainer_kwargs={"precision": "32-true"},
    )
    for key, value in EveryBuffer().named_buffers():
        own = learner.network.get_buffer(key)
        assert own.dtype == value.dtype
        assert torch.equal(own, value)


SERVERS = {
    "fedadam": lambda: FedAdam(0.3, server_lr=0.3),
    "fedavgm": lambda: FedAvg(0.3, server=partial(SGD, lr=1.0, momentum=0.9)),
}


@pytest.mark.parametrize("name", SERVERS)
def test_server_optimisers_leave_running_statistics_sound(name, tmp_path):
    # Server momentum on a falling running_var would make it negative.
    data = {i: (x * 1e-3, y) for i, (x, y) in make_data([8] * 4).items()}
    recorder, learner = federate(
        SERVERS[name](), data, tmp_path, network=batch_norm, rounds=8, local_steps=5
    )
    buffers = dict(learner.network.named_buffers())
    assert len(recorder.x) == 8
    assert buffers["1.running_var"].min() >= 0
    assert buffers["1.running_var"].max() < 0.5  # 1 at first
    assert buffers["1.running_mean"].abs().min() > 0
    assert buffers["1.num_batches_tracked"].dtype == torch.int64
    assert buffers["1.num_batches_tracked"].item() == 8 * 5


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_buffer_that_the_forward_replaces_is_averaged_and_does_not_leak(at_once, tmp_path):
    data = make_data([4, 4], [1.0, 5.0])
    recorder, learner = federate(
        FedAvg(0.1),
        data,
        tmp_path,
        network=OwnBuffer,
        rounds=3,
        cohort=2,
        local_steps=2,
        clients_at_once=at_once,
    )
    expected = torch.zeros((), dtype=torch.float64)
    for batches in recorder.rounds:
        ends = []
        for client in sorted(batches):
            value = expected
            for x, _ in batches[client]:
                value = 0.5 * value + 0.5 * x.mean()
            ends.append(value)
        expected = sum(ends) / 2
    assert expected > 2
    torch.testing.assert_close(learner.network.running, expected, rtol=0, atol=1e-12)


def test_control_variates_know_no_buffer_and_no_frozen_parameter(tmp_path):
    recorder, learner = federate(Scaffold(0.05), make_data([8] * 5), tmp_path, network=Everything)
    shapes = [p.shape for p in learner.network.parameters() if p.requires_grad]
    assert [c.shape for c in recorder.state[-1]["control_variates.c"]] == shapes
    c_i = learner.server.store.load([0], torch.device("cpu"))["c_i"]
    assert [t.shape[1:] for t in c_i] == shapes
    frozen = {n: p for n, p in learner.network.named_parameters() if not p.requires_grad}
    assert set(frozen) == {"frozen.body.weight", "frozen.body.bias"}
    start = Classification(Everything, 3).build_network(learner.seed).double().state_dict()
    for name, p in frozen.items():
        assert torch.equal(p, start[name])
    assert not torch.equal(learner.network.frozen.head.weight, start["frozen.head.weight"])


def test_frozen_parameters_are_in_no_optimiser(tmp_path):
    _, learner = federate(FedAdam(0.1), make_data([8] * 3), tmp_path, network=Frozen, rounds=1)
    held = {id(p) for g in learner.optimizers().param_groups for p in g["params"]}
    assert held == {id(p) for p in learner.network.parameters() if p.requires_grad}


# -- what may not be averaged in ------------------------------------------------------------------

METHODS = {
    "scaffold": lambda: Scaffold(0.1),
    "fedmuon": lambda: FedMuon(0.05),
    "low_rank": lambda: FedMuon(0.05, momentum_ratio=0.3, error_feedback=True),
    "fedadam": lambda: FedAdam(0.1),
}


def poisoned(client, sizes=(8, 8, 8, 12, 8)):
    data = make_data(sizes)
    data[client][0][0] = torch.nan
    return data


def rounds_of(client, rounds, clients, size):
    """In which rounds the client takes part."""
    return [r for r in range(rounds) if client in cohort(r, seed=0, candidates=clients, size=size)]


@pytest.mark.parametrize("at_once", [1, 2])
def test_stop_names_round_client_and_step_and_averages_nothing_in(at_once, tmp_path):
    bad = next(c for c in range(5) if rounds_of(c, 4, 5, 3)[:1] == [1])
    data = ClientLists(poisoned(bad), 4)
    recorded = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            recorded.append({k: v.clone() for k, v in module.network.state_dict().items()})

        def on_exception(self, trainer, module, exception):
            recorded.append(exception)
            self.module = module

    watch = Watch()
    with pytest.raises(NonFiniteUpdate) as error:
        federate(
            Scaffold(0.1),
            data,
            tmp_path,
            network=batch_norm,
            local_epochs=1,
            clients_at_once=at_once,
            callbacks=[watch],
        )
    batches = data.client_batches(bad, round=1, seed=0, steps=None, epochs=1, drop_last=False)
    first = data.partition[bad][0]
    k = next(i for i, b in enumerate(batches) if first in b) + 1
    assert f"round 1, client {bad}: the training loss became nan at local step {k} of " in str(
        error.value
    )
    assert "\n" not in str(error.value)
    after_round_0, exception = recorded
    assert exception is error.value
    for key, value in watch.module.network.state_dict().items():
        assert torch.equal(value, after_round_0[key])
    store = watch.module.server.store
    assert len(store) == 3  # those of round 0


class Spoilt(Mechanism):
    """One client's upload is not finite, while its loss, weights and buffers are."""

    name = "spoilt"

    def setup(self, setting):
        self.server_state = {"mean": [torch.zeros(2, 3, dtype=torch.float64)]}

    def end(self, run):
        values = torch.ones(len(run.clients), 2, 3, dtype=torch.float64)
        for c, client in enumerate(run.clients):
            values[c, 1, 2] = torch.nan if client == 2 else client
        return Upload([values])

    def aggregate(self, mean, cohort_size):
        self.replace("mean", mean)


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    layout=st.permutations(range(3)),
    bad=st.lists(
        st.tuples(st.sampled_from([np.inf, -np.inf, np.nan]), st.integers(0, 255)), max_size=2
    ),
)
def test_finite_says_of_each_client_whether_all_is_finite(shape, dtype, layout, bad):
    t = torch.linspace(-1, 1, max(int(np.prod(shape)), 1), dtype=torch.float64)
    t = t.mul(torch.finfo(dtype).max).to(dtype)
    t = t[: int(np.prod(shape))].reshape(shape)
    for value, at in bad:
        if t.numel():
            t.view(-1)[at % t.numel()] = value
    if t.ndim == 4:
        order = [0, *(1 + i for i in layout)]
        t = t.permute(order).contiguous().permute([order.index(i) for i in range(4)])
    expected = [bool(one.isfinite().all()) for one in t]
    assert all_finite(t).tolist() == expected


@pytest.mark.parametrize("at_once", [1, 3])
def test_an_upload_that_is_not_finite_is_refused(at_once, tmp_path):
    data, settings = make_data([8] * 5), {"cohort": 5, "clients_at_once": at_once, "rounds": 2}
    method = partial(Algorithm, TorchRule(0.1), [Spoilt()])
    with pytest.raises(
        NonFiniteUpdate, match=r"client 2: .* other uploads were infinite or not-a-"
    ):
        federate(method(), data, tmp_path, **settings)
    recorder, _ = federate(method(), data, tmp_path, on_nonfinite="drop", **settings)
    assert [r["fed/clients_dropped"] for r in recorder.report] == [1, 1]
    assert recorder.state[-1]["spoilt.mean"][0][1, 2] == pytest.approx((0 + 1 + 3 + 4) / 4)


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_drop_is_the_round_without_the_client(name, at_once, tmp_path, monkeypatch):
    bad, members = 2, [[0, 2, 4], [1, 2, 3], [0, 1, 2]]

    def run(cohorts, folder, policy):
        monkeypatch.setattr(
            "fedmuon_pl.server.callback.cohort", lambda r, **_: np.array(cohorts[r])
        )
        return federate(
            METHODS[name](),
            poisoned(bad),
            folder,
            network=batch_norm,
            rounds=3,
            weighting="samples",
            on_nonfinite=policy,
            clients_at_once=at_once,
            local_steps=4,
        )

    dropped, one = run(members, tmp_path / "a", "drop")
    without, other = run([[c for c in m if c != bad] for m in members], tmp_path / "b", "stop")
    for r in range(3):
        assert dropped.report[r]["fed/clients_dropped"] == 1
        for key, value in without.x[r].items():
            torch.testing.assert_close(dropped.x[r][key], value, rtol=0, atol=1e-12)
        for key, tensors in without.state[r].items():
            for mine, theirs in zip(dropped.state[r][key], tensors, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
        assert dropped.report[r]["train/loss"] == pytest.approx(without.report[r]["train/loss"])
    for key, buffer in other.network.named_buffers():
        torch.testing.assert_close(one.network.get_buffer(key), buffer, rtol=0, atol=1e-12)
    if name == "scaffold":
        everyone = range(5)
        mine = one.server.store.load(everyone, torch.device("cpu"))["c_i"]
        theirs = other.server.store.load(everyone, torch.device("cpu"))["c_i"]
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
            assert not a[bad].any()


def test_nobody_left_is_an_error(tmp_path):
    data = {i: (x * torch.nan, y) for i, (x, y) in make_data([8] * 3).items()}
    with pytest.raises(NonFiniteUpdate, match="round 0: no client of the cohort"):
        federate(FedAvg(0.1), data, tmp_path, on_nonfinite="drop")


def test_infinite_buffers_do_not_reach_the_global_model(tmp_path):
    # Inputs of 1e25 give a variance that float32 cannot hold, yet finite losses and weights.
    data = make_data([8] * 3, dtype=torch.float32)
    data[1][0].mul_(1e25)
    settings = {"network": FirstNorm, "rounds": 2, "trainer_kwargs": {"precision": "32-true"}}
    recorder, learner = federate(FedAvg(0.1), data, tmp_path, on_nonfinite="drop", **settings)
    assert all(b.isfinite().all() for b in learner.network.buffers())
    assert [r["fed/clients_dropped"] for r in recorder.report] == [1, 1]
    with pytest.raises(NonFiniteUpdate, match="round 0, client 1: weights, buffers or"):
        federate(FedAvg(0.1), data, tmp_path, **settings)


def test_clients_without_data_are_never_sampled_and_the_run_says_so(tmp_path):
    data = make_data([6, 0, 5, 0, 7])
    with pytest.warns(UserWarning, match="2 of 5 clients have no data and are never sampled"):
        recorder, learner = federate(Scaffold(0.1), data, tmp_path, cohort=2, rounds=6)
    assert {c for cohort in recorder.rounds for c in cohort} == {0, 2, 4}
    assert learner.algorithm.setting.population == 3
    assert all(p.isfinite().all() for p in recorder.x[-1].values())
