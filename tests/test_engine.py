"""What must always be true of the engine, whatever the method (docs/design.md)."""

import gc
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from federation import ClientLists, TinyNet, federate, trainer
from hypothesis import given
from hypothesis import strategies as st
from networks import NETWORKS, batch_norm
from pytorch_lightning import Callback, Trainer
from test_aggregate import make_data
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchmetrics import MeanMetric, MetricCollection

from fedmuon_pl import (
    IID,
    Classification,
    FedAdam,
    FedAdamW,
    FedAvg,
    FederatedModule,
    FederatedServer,
    FedMuon,
    FedMuonLMO,
    LocalMuon,
    Mime,
    MimeLite,
    MuLoCo,
    Scaffold,
    SklearnDigits,
    Task,
    engine,
)
from fedmuon_pl.algorithms.local import ELEMENTWISE
from fedmuon_pl.clients import ClientStack
from fedmuon_pl.data.sampling import cohort
from fedmuon_pl.errors import ConfigError
from fedmuon_pl.optim.orthogonalize import Orthogonalizer
from fedmuon_pl.schedules import StepDecay
from fedmuon_pl.seeding import derive
from fedmuon_pl.server.checks import check_trainer, check_trainer_config

SGD, AdamW, RMSprop = torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop
CPU = torch.device("cpu")

METHODS = {
    "fedavg-momentum": lambda: FedAvg(0.1, partial(SGD, momentum=0.9, weight_decay=0.01)),
    "fedavg-adamw": lambda: FedAvg(0.02, AdamW),
    "fedavg-rmsprop": lambda: FedAvg(0.01, RMSprop),
    "fedmuon": lambda: FedMuon(0.05, 0.02),
    "scaffold": lambda: Scaffold(0.1),
    "fedmuon_lmo": lambda: FedMuonLMO(0.05),
    "fedavg-kept": lambda: FedAvg(0.1, partial(SGD, momentum=0.9), keep_state=True),
    "local_muon-kept": lambda: FedMuonLMO(0.05, control_variates=False),
    "muloco": lambda: MuLoCo(0.05),
    "fedadamw": lambda: FedAdamW(0.02),
}


def close(mine, theirs, atol):
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(mine[key], value, rtol=0, atol=atol)


def equal(mine, theirs):
    return all(torch.equal(mine[key], value) for key, value in theirs.items())


# -- one client at a time against side by side ----------------------------------------------------

# A cohort of 5 of these splits into blocks of equal step counts and batch shapes.
SIZES = [8, 8, 8, 8, 12, 12, 5]
PAIRS = [(n, "fedavg-momentum") for n in NETWORKS] + [
    *[("everything", m) for m in METHODS if m != "fedavg-momentum"],
    *[("batch_norm", m) for m in ("fedmuon", "scaffold")],
]


@pytest.mark.parametrize(("network", "method"), PAIRS)
def test_side_by_side_equals_one_at_a_time(network, method, tmp_path, monkeypatch):
    blocks = []
    resize = ClientStack.resize
    monkeypatch.setattr(
        ClientStack, "resize", lambda stack, n: (blocks.append(n), resize(stack, n))[1]
    )

    def run(at_once):
        blocks.clear()
        recorder, learner = federate(
            METHODS[method](),
            make_data(SIZES),
            tmp_path,
            network=NETWORKS[network],
            cohort=5,
            local_epochs=1,
            clients_at_once=at_once,
        )
        return recorder, {k: b.clone() for k, b in learner.network.named_buffers()}, set(blocks)

    alone, buffers, _ = run(1)
    shapes = [[tuple(len(y) for _, y in b) for b in r.values()] for r in alone.rounds]
    assert all(len(s) == 5 and len(set(s)) > 1 for s in shapes)
    for at_once in (2, 3):
        together, their_buffers, sizes = run(at_once)
        assert sizes >= set(range(1, at_once + 1))
        assert len(together.x) == 4
        for mine, theirs in zip(together.x, alone.x, strict=True):
            close(mine, theirs, 1e-9)
        close(their_buffers, buffers, 1e-9)
    assert not equal(alone.x[0], alone.x[3])


def test_dropout_is_one_client_at_a_time(tmp_path):
    def network():
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3))

    run = partial(federate, FedAvg(0.1), make_data([8] * 3), tmp_path, network=network, rounds=1)
    with pytest.raises(ConfigError, match=r"clients_at_once=2.*random numbers.*; use 1$"):
        run(clients_at_once=2)
    _, learner = run(clients_at_once="auto")
    assert learner.engine()["clients_at_once"] == 1
    accelerator = torch.device("meta")  # where "auto" would like the whole cohort
    assert engine.clients_at_once(learner, accelerator) == 1
    _, learner = federate(FedAvg(0.1), make_data([8] * 3), tmp_path, rounds=1)
    assert engine.clients_at_once(learner, accelerator) == 3


def test_auto_takes_even_blocks_that_fit_the_free_memory(tmp_path, monkeypatch):
    accelerator = torch.device("meta")
    _, learner = federate(FedAvg(0.1), make_data([8] * 10), tmp_path, cohort=10, rounds=1)
    need = engine.client_memory(learner)
    for free, expected in [(10.5, 10), (9.9, 5), (5.1, 5), (4.9, 4), (3.3, 3), (1.1, 1), (0, 1)]:
        monkeypatch.setattr(engine, "free_memory", lambda _, free=free: int(free * need))
        assert engine.clients_at_once(learner, accelerator) == expected, free
    # A run that is resumed on the same kind of device keeps its blocks, whatever is free now.
    saved = learner.server.state_dict()
    saved["engine"] |= {"device": "meta", "clients_at_once": 3}
    learner.server.load_state_dict(saved)
    assert engine.clients_at_once(learner, accelerator) == 3
    saved["engine"] |= {"device": "cuda"}
    assert engine.clients_at_once(learner, accelerator) == 1


@given(st.integers(1, 2000), st.integers(0, 3000))
def test_even_blocks(cohort, most):
    size = engine.even_blocks(cohort, most)
    number = -(-cohort // size)
    assert 1 <= size <= max(1, min(most, cohort))
    assert number == -(-cohort // max(1, min(most, cohort)))  # no more blocks than needed
    assert size * number - cohort < number  # as even as whole clients can be


def test_the_memory_of_a_client_is_what_its_tensors_take(tmp_path):
    """In float64: 16 x 5 and 5 x 3 weights; batches of 8 of which each layer keeps its input."""

    def network():
        layers = [nn.Linear(16, 5, bias=False), nn.Sigmoid(), nn.Linear(5, 3, bias=False)]
        return nn.Sequential(nn.Flatten(), *layers)

    _, learner = federate(
        FedAvg(0.1), make_data([8] * 3), tmp_path, network=network, rounds=1, batch_size=8
    )
    inputs, hidden = 8 * 16, 8 * 5  # Sigmoid keeps its output, which is the next layer's input
    logits = 8 * 3  # log-softmax keeps its output, too
    targets = 8  # int64
    weights = 16 * 5 + 5 * 3
    scalar = 1  # the sum of the loss's weights
    elements = 2 * (inputs + hidden + logits + targets + scalar) + 8 * weights
    assert engine.client_memory(learner) == 8 * elements


@pytest.mark.parametrize(("at_once", "said"), [(3, "set model.clients_at_once=1"), (1, "lower da")])
def test_out_of_memory_says_what_to_do(at_once, said, tmp_path):
    training = []

    class Full(TinyNet):
        def forward(self, x):
            if training:
                raise torch.OutOfMemoryError("no more")
            return super().forward(x)

    class Begun(Callback):
        def on_train_batch_start(self, *_):
            training.append(True)

    run = partial(federate, FedAvg(0.1), make_data([8] * 3), tmp_path, network=Full)
    clients = "3 clients" if at_once == 3 else "1 client"
    with pytest.raises(ConfigError, match=f"out of memory with {clients} side by side; {said}"):
        run(clients_at_once=at_once, callbacks=[Begun()])


def test_an_optimiser_that_couples_elements_is_one_client_at_a_time(tmp_path):
    data = make_data([8] * 3)
    run = partial(federate, FedAvg(0.1, torch.optim.Adafactor), data, tmp_path, rounds=1)
    with pytest.raises(ConfigError, match=r"clients_at_once=2: the local optimiser couples"):
        run(clients_at_once=2)
    _, learner = run()
    assert engine.clients_at_once(learner, torch.device("meta")) == 1


# -- against a bare PyTorch loop ------------------------------------------------------------------


def bare_loop(network, data, learner, optimizer, *, rounds, size, autocast=False):
    """FedAvg as one would write it without this project; returns the global model of each round."""
    model, out = deepcopy(network).train(), []
    for r in range(rounds):
        means = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        for client in cohort(r, seed=learner.seed, candidates=len(data.partition), size=size):
            local = deepcopy(model)
            opt = optimizer(local.parameters())
            torch.manual_seed(derive(learner.seed, "forward", r, int(client)))
            batches = data.client_batches(
                int(client),
                round=r,
                seed=learner.seed,
                steps=learner.local_steps,
                epochs=learner.local_epochs,
                drop_last=False,
            )
            for batch in batches:
                inputs, labels = data.gather(torch.from_numpy(np.array(batch)))
                opt.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = F.cross_entropy(local(inputs), labels)
                loss.backward()
                opt.step()
            for mean, p, q in zip(means, local.parameters(), model.parameters(), strict=True):
                mean += (p - q).detach()
        with torch.no_grad():
            for mean, q in zip(means, model.parameters(), strict=True):
                q += (mean / size).to(q.dtype)
        out.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return out


class Digits(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 4, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(36, 16),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(16, 10),
        )


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fedavg_equals_a_bare_loop_bit_for_bit(precision, tmp_path):
    task = Classification(Digits)
    data = SklearnDigits(8, IID(), batch_size=16)
    torch.manual_seed(99)  # nothing may depend on it
    recorder, learner = federate(
        FedAvg(0.1, partial(SGD, momentum=0.9)),
        data,
        tmp_path,
        task=task,
        rounds=3,
        cohort=4,
        local_steps=5,
        channels_last=False,  # as the bare loop
        seed=3,
        trainer_kwargs={"precision": precision},
    )
    expected = bare_loop(
        task.build_network(3),
        data,
        learner,
        partial(SGD, lr=0.1, momentum=0.9),
        rounds=3,
        size=4,
        autocast=precision == "bf16-mixed",
    )
    for mine, theirs in zip(recorder.x, expected, strict=True):
        for key, value in theirs.items():
            assert torch.equal(mine[key], value), key
    assert not torch.equal(expected[0]["0.weight"], expected[2]["0.weight"])


class Counting(SGD):
    """Keeps something beside its state, as many optimisers of other packages do."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.param_groups[0]["t"] = 0

    def step(self, closure=None):
        group = self.param_groups[0]
        group["t"] += 1
        for p in group["params"]:
            p.data.sub_(group["lr"] / group["t"] * p.grad)


class CountingSideBySide(Counting):
    """The same, and it says that clients can train side by side."""

    elementwise = True


OPTIMIZERS = {n: getattr(torch.optim, n) for n in sorted(ELEMENTWISE)} | {
    "SGD-nesterov": partial(SGD, momentum=0.9, nesterov=True),
    "Adam-amsgrad": partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    "Adagrad-start": partial(torch.optim.Adagrad, initial_accumulator_value=0.5, lr_decay=0.1),
    "Adafactor": torch.optim.Adafactor,
    "Counting": Counting,
    "CountingSideBySide": CountingSideBySide,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_client_has_a_fresh_optimiser_like_a_bare_loop(name, tmp_path):
    data = ClientLists(make_data([8, 8, 12]), 4)
    task = Classification(TinyNet, 3)
    expected = None
    side_by_side = name.split("-")[0] in ELEMENTWISE or name == "CountingSideBySide"
    for at_once in (1, 2) if side_by_side else (1,):
        recorder, learner = federate(
            FedAvg(0.05, OPTIMIZERS[name]),
            data,
            tmp_path,
            task=task,
            rounds=2,
            clients_at_once=at_once,
        )
        if expected is None:
            network = task.build_network(0).double()
            optimizer = partial(OPTIMIZERS[name], lr=0.05)
            expected = bare_loop(network, data, learner, optimizer, rounds=2, size=3)
        # These two keep scalars of their state in float32.
        atol = 1e-8 if name in ("NAdam", "ASGD") else 1e-11
        for mine, theirs in zip(recorder.x, expected, strict=True):
            close(mine, theirs, atol)


# -- reductions -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def five():
    return make_data([8, 9, 12, 8, 5], [0, 1, -1, 2, 0.5])


def run(algorithm, data, folder, **kwargs):
    return federate(algorithm, data, folder, **kwargs)[0].x


def test_fedavgm_without_momentum_is_fedavg(five, tmp_path):
    one = run(FedAvg(0.1, server=partial(SGD, lr=1.0, momentum=0.0)), five, tmp_path)
    other = run(FedAvg(0.1), five, tmp_path)
    with_momentum = run(FedAvg(0.1, server=partial(SGD, lr=1.0, momentum=0.5)), five, tmp_path)
    assert all(equal(a, b) for a, b in zip(one, other, strict=True))
    assert not equal(with_momentum[1], other[1])


def test_the_first_round_of_scaffold_is_fedavgs(five, tmp_path):
    scaffold, fedavg = run(Scaffold(0.1), five, tmp_path), run(FedAvg(0.1), five, tmp_path)
    assert equal(scaffold[0], fedavg[0])
    assert not equal(scaffold[1], fedavg[1])


def test_mimelite_without_momentum_is_fedavg(five, tmp_path):
    one, other = run(MimeLite(0.1, beta=0.0), five, tmp_path), run(FedAvg(0.1), five, tmp_path)
    assert all(equal(a, b) for a, b in zip(one, other, strict=True))
    with_momentum = run(MimeLite(0.1, beta=0.5), five, tmp_path)
    assert not equal(with_momentum[1], other[1])


def test_mimes_forms_of_momentum_are_one_at_rates_1_minus_beta_apart(five, tmp_path):
    for method in (Mime, MimeLite):
        ema = run(method(0.3, beta=0.75), five, tmp_path)
        classic = run(method(0.075, beta=0.75, momentum_form="classic"), five, tmp_path)
        for a, b in zip(ema, classic, strict=True):
            close(a, b, 1e-12)


def test_local_muon_is_fedmuon_without_its_two_mechanisms(five, tmp_path):
    local = run(LocalMuon(0.05, 0.02), five, tmp_path)
    off = run(FedMuon(0.05, 0.02, alpha=0.0, average_momentum=False), five, tmp_path)
    assert all(equal(a, b) for a, b in zip(local, off, strict=True))
    averaged = run(FedMuon(0.05, 0.02, alpha=0.0), five, tmp_path)
    assert equal(averaged[0], local[0])  # M is 0 in the first round
    assert not equal(averaged[1], local[1])
    aligned = run(FedMuon(0.05, 0.02, average_momentum=False), five, tmp_path)
    assert not equal(aligned[0], local[0])


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_one_full_batch_step_of_everybody_is_gradient_descent(weighting, five, tmp_path):
    got = run(
        FedAvg(0.3),
        five,
        tmp_path,
        cohort=1.0,
        weighting=weighting,
        batch_size=100,
        local_epochs=1,
    )
    network = Classification(TinyNet, 3).build_network(0).double()
    for x in got:
        if weighting == "samples":
            inputs, labels = (torch.cat(parts) for parts in zip(*five.values(), strict=True))
            loss = F.cross_entropy(network(inputs), labels)
        else:
            loss = sum(F.cross_entropy(network(x), y) for x, y in five.values()) / len(five)
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        with torch.no_grad():
            for p, g in zip(network.parameters(), gradients, strict=True):
                p -= 0.3 * g
        close(x, dict(network.named_parameters()), 1e-13)


class Invariant(Callback):
    """c = sum_i c_i / N after every round; remembers every c_i."""

    def __init__(self, clients):
        self.clients, self.seen = clients, []

    def on_train_batch_end(self, trainer, module, *_):
        c = module.algorithm.state_dict()["control_variates"]["c"]
        c_i = module.server.store.load(range(self.clients), CPU)["c_i"]
        for mean, each in zip(c, c_i, strict=True):
            assert mean.abs().max() > 0
            torch.testing.assert_close(each.mean(0), mean, rtol=0, atol=1e-13)
        self.seen.append([t.clone() for t in c_i])


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_control_variates_sum_to_the_servers(weighting, five, tmp_path):
    watch = Invariant(5)
    recorder, _ = federate(
        Scaffold(0.1, server_lr=0.5),
        five,
        tmp_path,
        rounds=6,
        cohort=2,
        weighting=weighting,
        local_epochs=2,
        clients_at_once=2,
        callbacks=[watch],
    )
    assert len(watch.seen) == 6
    before = [torch.zeros_like(t) for t in watch.seen[0]]
    for members, now in zip(recorder.rounds, watch.seen, strict=True):
        changed = [(a != b).flatten(1).any(1) for a, b in zip(now, before, strict=True)]
        moved = set(torch.stack(changed).any(0).nonzero().flatten().tolist())
        assert moved == set(members)
        before = now


def test_control_variates_are_per_step_and_rate_really_used(tmp_path):
    # With plain SGD, option II's first c_i is the mean of the client's gradients.
    data = make_data([8, 12])
    recorder, learner = federate(
        Scaffold(0.2), data, tmp_path, rounds=1, cohort=2, local_epochs=2, lr_schedule=StepDecay(1)
    )
    x0 = Classification(TinyNet, 3).build_network(0).double()
    c_i = learner.server.store.load([0, 1], CPU)["c_i"]
    for client in range(2):
        network, gradients = deepcopy(x0), []
        for x, y in recorder.rounds[0][client]:
            network.zero_grad()
            F.cross_entropy(network(x), y).backward()
            gradients.append([p.grad.clone() for p in network.parameters()])
            with torch.no_grad():
                for p in network.parameters():
                    p -= 0.2 * p.grad
        assert len(gradients) in (4, 6)
        for mine, each in zip(c_i, zip(*gradients, strict=True), strict=True):
            torch.testing.assert_close(mine[client], torch.stack(each).mean(0), rtol=0, atol=1e-13)


# -- quadratics: everything has a closed form -----------------------------------------------------


class Vector(nn.Module):
    """x itself is the model; matrix-shaped, so that Muon takes it."""

    def __init__(self, start=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((4, 3), float(start), dtype=torch.float64))

    def forward(self):
        return self.w


class Quadratic(Task):
    """Client i pulls w towards b_i: 1/2 ||w - b||^2, a batch being rows of the number b_i."""

    def __init__(self, start=0.0):
        super().__init__(partial(Vector, start))

    def loss(self, network, batch):
        return 0.5 * (network() - batch.mean()).square().sum()

    def metrics(self):
        return MetricCollection({"loss": MeanMetric()})

    def evaluate(self, network, batch, metrics):
        metrics["loss"].update(self.loss(network, batch))


class Targets(ClientLists):
    """One target for each client."""

    def __init__(self, targets, batch_size=2):
        super().__init__(
            {
                i: (torch.full((2,), float(b), dtype=torch.float64), torch.zeros(2).long())
                for i, b in enumerate(targets)
            },
            batch_size,
        )

    def load(self):
        splits = super().load()
        splits.train = splits.train[0]
        return splits


def quadratic(algorithm, targets, folder, *, start=0.0, rounds=1, size=1.0, at_once=1, **kwargs):
    """x after each round and the cohorts."""
    xs, cohorts, server = [], [], FederatedServer(size)

    class Watch(Callback):
        def on_train_batch_start(self, trainer, module, *_):
            cohorts.append(list(module.server.plan.clients))

        def on_train_batch_end(self, trainer, module, *_):
            xs.append(module.network.w.detach().clone())

    kwargs.setdefault("local_steps", 3)
    learner = FederatedModule(Quadratic(start), algorithm, clients_at_once=at_once, **kwargs)
    trainer(folder, rounds, [server, Watch()]).fit(learner, Targets(targets))
    return xs, cohorts, learner


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fedavg_on_quadratics_is_the_hand_value_for_any_cohort(size, tmp_path):
    targets = [1.0, -2.0, 5.0, 10.0]
    xs, cohorts, _ = quadratic(FedAvg(0.1), targets, tmp_path, rounds=3, size=size, at_once=2)
    w = 0.0
    for x, members in zip(xs, cohorts, strict=True):
        assert len(members) == size
        w = np.mean([targets[c] + 0.9**3 * (w - targets[c]) for c in members])
        torch.testing.assert_close(x, torch.full_like(x, w), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("clients", "size"), [(4, 1), (4, 2), (4, 3), (15, 0.3), (15, 1.0)])
def test_identical_clients_move_the_model_as_each_does(clients, size, tmp_path):
    # 15 clients and a fraction of 0.3: the official code samples 4 and divides by 4.5.
    for algorithm in (FedAvg(0.1), Scaffold(0.1), FedMuon(0.05)):
        xs, cohorts, _ = quadratic(algorithm, [2.0] * clients, tmp_path, size=size)
        if isinstance(algorithm, FedMuon):
            expected = quadratic(FedMuon(0.05), [2.0], tmp_path)[0][0]
        else:
            expected = torch.full_like(xs[0], 2 - 2 * 0.9**3)
        torch.testing.assert_close(xs[0], expected, rtol=0, atol=1e-14)
        assert len(cohorts[0]) == (size if isinstance(size, int) else {0.3: 5, 1.0: 15}[size])


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(0.1, partial(SGD, momentum=0.9)), Scaffold(0.1), FedMuon(0.1), FedAdam(0.1)],
    ids=["fedavg", "scaffold", "fedmuon", "fedadam"],
)
def test_clients_at_their_optimum_stay_there(algorithm, tmp_path):
    # A sum that is not cleared, or anything that divides by a norm, would move them.
    xs, _, _ = quadratic(algorithm, [3.0] * 4, tmp_path, start=3.0, rounds=5, size=2)
    assert all(torch.equal(x, torch.full_like(x, 3.0)) for x in xs)


def test_running_sums_start_anew_in_every_round(tmp_path):
    xs, _, _ = quadratic(FedAvg(1.0), [1.0, 3.0], tmp_path, rounds=5, local_steps=1)
    assert all(torch.equal(x, torch.full_like(x, 2.0)) for x in xs)  # lr 1: each lands on its b


def test_scaffold_finds_the_mean_of_the_targets(tmp_path):
    xs, _, _ = quadratic(Scaffold(0.2), [1.0, -2.0, 5.0, 10.0], tmp_path, rounds=25)
    torch.testing.assert_close(xs[-1], torch.full_like(xs[-1], 3.5), rtol=0, atol=1e-6)


def test_the_rate_is_a_function_of_the_round(tmp_path):
    xs, _, _ = quadratic(
        FedAvg(0.8), [1.0], tmp_path, rounds=4, local_steps=2, lr_schedule=StepDecay(1, 0.5)
    )
    gap = 1.0
    for r, x in enumerate(xs):
        gap *= (1 - 0.8 * 0.5**r) ** 2
        torch.testing.assert_close(x, torch.full_like(x, 1 - gap), rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_the_cohort_does_not_matter(method, five, tmp_path, monkeypatch):
    def with_order(order, precision="64-true"):
        monkeypatch.setattr(
            "fedmuon_pl.server.callback.cohort",
            lambda r, **kwargs: cohort(r, **kwargs)[list(order)],
        )
        settings = {"network": batch_norm, "trainer_kwargs": {"precision": precision}}
        recorder, learner = federate(METHODS[method](), five, tmp_path, rounds=2, **settings)
        return {**recorder.x[-1], **dict(learner.network.named_buffers())}

    close(with_order((2, 0, 1)), with_order((0, 1, 2)), 1e-12)
    single = [with_order(order, "32-true") for order in ((2, 1, 0), (0, 1, 2))]
    assert all(torch.equal(single[1][k], v) for k, v in single[0].items())


def test_what_ran_before_does_not_matter(five, tmp_path):
    first = run(Scaffold(0.1), five, tmp_path / "a", rounds=2)
    algorithm = Scaffold(0.1)
    run(FedMuon(0.1), five, tmp_path / "b", rounds=2)
    torch.manual_seed(5)
    again = run(algorithm, five, tmp_path / "c", rounds=2)
    once_more = run(algorithm, five, tmp_path / "c", rounds=2)  # the same object and folder
    assert all(equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(equal(a, b) for a, b in zip(first, once_more, strict=True))


def test_the_global_random_state_is_left_alone(five, tmp_path):
    def network():
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3))

    torch.manual_seed(7)
    before = torch.get_rng_state()
    run(FedAvg(0.1), five, tmp_path, network=network, rounds=1)
    assert torch.equal(torch.get_rng_state(), before)


# -- cost follows work ----------------------------------------------------------------------------


def test_memory_and_constructions_do_not_grow_with_the_rounds(tmp_path, monkeypatch):
    made = {"stacks": 0, "optimisers": 0, "loads": 0}

    def counted(kind, name, key):
        original = getattr(kind, name)

        def wrapper(*args, **kwargs):
            made[key] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(kind, name, wrapper)

    counted(ClientStack, "__init__", "stacks")
    counted(torch.optim.Optimizer, "__init__", "optimisers")
    counted(ClientLists, "load", "loads")
    counts = []

    class Count(Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch in (9, 59):
                gc.collect()
                alive = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
                counts.append({"tensors": alive, **made})

    federate(
        Scaffold(0.01),
        make_data([8, 8, 8, 8]),
        tmp_path,
        network=batch_norm,
        rounds=60,
        cohort=2,
        local_steps=1,
        clients_at_once=2,
        callbacks=[Forget(), Count()],
    )
    early, late = counts
    assert late == early
    assert late["loads"] == 1
    assert late["stacks"] <= 4  # the run's own and those of the check before it
    assert late["optimisers"] <= 3  # the server's, and one for each block size


class Forget(Callback):
    """Empties the recorder, which keeps every round."""

    def on_train_epoch_end(self, trainer, module):
        for callback in trainer.callbacks:
            if type(callback).__name__ == "Recorder":
                callback.x.clear(), callback.rounds.clear()
                callback.state.clear(), callback.report.clear()


# -- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 2])
def test_only_the_forward_runs_in_autocast(at_once, tmp_path, monkeypatch):
    seen = {"forward": [], "optimiser": [], "orthogonaliser": []}

    class Spy(TinyNet):
        def forward(self, x):
            logits = super().forward(x)
            seen["forward"].append((torch.is_autocast_enabled("cpu"), logits.dtype))
            return logits

    original = Orthogonalizer.__call__

    def spy(self, matrix):
        out = original(self, matrix)
        seen["orthogonaliser"].append(
            (torch.is_autocast_enabled("cpu"), (matrix @ matrix.mT).dtype, out.dtype)
        )
        return out

    monkeypatch.setattr(Orthogonalizer, "__call__", spy)
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen["optimiser"].append(
            (type(optimizer).__name__, torch.is_autocast_enabled("cpu"))
        )
    )
    try:
        recorder, _ = federate(
            FedMuon(0.05, 0.02),
            make_data([8] * 4, dtype=torch.float32),
            tmp_path,
            network=Spy,
            rounds=8,
            clients_at_once=at_once,
            trainer_kwargs={"precision": "bf16-mixed"},
        )
    finally:
        hook.remove()
    if at_once == 1:
        assert set(seen["forward"]) == {(True, torch.bfloat16)}
    else:  # vmap adds a bias in float32; the first forwards are those of the check before the run
        assert {enabled for enabled, _ in seen["forward"][3:]} == {True}
    assert set(seen["orthogonaliser"]) == {(False, torch.float32, torch.float32)}
    assert set(seen["optimiser"]) == {("Muon", False), ("AdamW", False), ("SGD", False)}
    assert all(p.dtype == torch.float32 for p in recorder.x[-1].values())
    assert recorder.report[-1]["train/loss"] < 0.8 * recorder.report[0]["train/loss"]


# -- what is refused ------------------------------------------------------------------------------

REFUSED = {
    "max_steps": (7, "trainer.max_epochs"),
    "min_steps": (7, "trainer.min_epochs"),
    "val_check_interval": (0.5, "trainer.check_val_every_n_epoch"),
    "precision": ("bf16-true", "bf16-mixed"),
    "gradient_clip_val": (1.0, "model.client_clip_norm"),
    "accumulate_grad_batches": (2, "data.batch_size"),
    "limit_train_batches": (0.5, "server.clients_per_round"),
    "overfit_batches": (1, "server.clients_per_round"),
    "max_epochs": (-1, "number of rounds"),
}


@pytest.mark.filterwarnings("ignore:.*val_check_interval.*", "ignore:.*overfit.*")
@pytest.mark.parametrize("key", REFUSED)
def test_trainer_settings_that_cannot_be_honoured(key, tmp_path):
    value, instead = REFUSED[key]
    settings = {"precision": "32-true", "max_epochs": 1, **{key: value}}
    started = []

    class Watch(Callback):
        def on_train_start(self, *_):
            started.append(1)

    fit = Trainer(
        **settings,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[FederatedServer(1), Watch()],
    )
    with pytest.raises(ConfigError) as error:
        fit.fit(
            FederatedModule(Classification(TinyNet, 3), FedAvg(0.1), local_steps=1),
            ClientLists(make_data([4, 4])),
        )
    message = str(error.value)
    assert message.startswith(f"trainer.{key}={value} cannot be used here: ")
    assert instead in message
    assert "\n" not in message
    assert not started


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"devices": 2}, "trainer.strategy=DDPStrategy.*use trainer.strategy=clients"),
        ({"devices": 1, "strategy": "ddp"}, "trainer.strategy=DDPStrategy.*leave it at auto"),
        ({"devices": 1, "num_nodes": 2}, "trainer.strategy=DDPStrategy.*trainer.strategy=clients"),
    ],
)
def test_strategies_that_average_gradients_are_refused(settings, said):
    # fit() would start other processes, each with this test in it.
    built = Trainer(accelerator="cpu", max_epochs=1, logger=False, **settings)
    with pytest.raises(ConfigError, match=said):
        check_trainer(built)


def test_loss_scaling_is_refused():
    # On a CPU, Lightning itself turns 16-mixed into bf16-mixed.
    with pytest.raises(ConfigError, match=r"trainer.precision=16-mixed.*bf16-mixed"):
        check_trainer_config({"max_epochs": 1, "precision": "16-mixed"})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "exactly one of model.local_steps"),
        ({"local_steps": 1, "local_epochs": 1}, "exactly one of model.local_steps"),
        ({"local_steps": 0}, "model.local_steps=0"),
        ({"local_epochs": 0}, "model.local_epochs=0"),
        ({"local_steps": 1, "client_clip_norm": 0.0}, "model.client_clip_norm=0.0"),
        ({"local_steps": 1, "clients_at_once": 0}, "model.clients_at_once=0"),
    ],
)
def test_module_arguments_that_make_no_sense(arguments, said):
    with pytest.raises(ConfigError, match=said):
        FederatedModule(Classification(TinyNet, 3), FedAvg(0.1), **arguments)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_run_without_a_server_or_with_other_data_says_so(five, tmp_path):
    learner = FederatedModule(Classification(TinyNet, 3), FedAvg(0.1), local_steps=1)
    with pytest.raises(ConfigError, match="needs the FederatedServer callback"):
        trainer(tmp_path, 1).fit(learner, ClientLists(five))
    with pytest.raises(ConfigError, match="needs a FederatedDataModule"):
        trainer(tmp_path, 1, [FederatedServer(1)]).fit(learner, [0])
    with pytest.raises(ConfigError, match="clients_per_round=6 must be between 1 and the 5"):
        federate(FedAvg(0.1), five, tmp_path, cohort=6)
