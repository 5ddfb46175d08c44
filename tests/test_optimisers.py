"""Optimisers that methods share: warm AdamW, LMO steps, several optimisers as one."""

from copy import deepcopy
from functools import partial

import pytest
import reference
import torch
from federation import federate

from fedmuon_pl import AdamW, FedAdamW, FedAvg, FedLADA, FedMuonLMO, LocalMuon, MuLoCo, ServerMuon
from fedmuon_pl.algorithms.base import Setting
from fedmuon_pl.errors import NonFiniteUpdate
from fedmuon_pl.optim.chained import Chained
from fedmuon_pl.optim.lmo import LMO
from fedmuon_pl.optim.muon import Muon, step_scale
from fedmuon_pl.optim.orthogonalize import Orthogonalizer

EXACT = {"rtol": 0, "atol": 1e-13}
SHAPES = [(3, 4), (5,), (), (2, 3, 2, 2)]
SVD = Orthogonalizer("svd")


def leaves(shapes=SHAPES, clients=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lead = () if clients is None else (clients,)
    return [
        torch.randn((*lead, *s), generator=generator, dtype=torch.float64).requires_grad_()
        for s in shapes
    ]


def steps(optimizer, params, count, seed=1):
    """Steps on gradients that depend on the seed only."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()


def same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


# -- AdamW with warm moments ------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
def test_fresh_moments_are_torchs_adamw(amsgrad):
    options = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}
    mine, theirs = leaves(), leaves()
    steps(AdamW(mine, **options, amsgrad=amsgrad), mine, 5)
    steps(torch.optim.AdamW(theirs, **options, amsgrad=amsgrad), theirs, 5)
    same(mine, theirs)


def test_no_bias_correction():
    (p,) = leaves([()])
    start = p.detach().clone()
    options = {"eps": 0.0, "weight_decay": 0.0, "bias_correction": False}
    optimizer = AdamW([p], lr=0.5, betas=(0.9, 0.99), **options)
    p.grad = torch.full_like(p, -3.0)
    optimizer.step()
    torch.testing.assert_close(p.detach() - start, torch.full_like(p, 0.5), **EXACT)  # 0.1 / 0.1
    assert set(optimizer.state[p]) == {"exp_avg", "exp_avg_sq"}


def test_placed_moments_go_on_as_if_never_stopped():
    options = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.2}
    whole, parts = leaves(), leaves()
    reference = AdamW(whole, **options)
    steps(reference, whole, 3, seed=1)
    steps(reference, whole, 2, seed=2)
    first = AdamW(parts, **options)
    steps(first, parts, 3, seed=1)
    second = AdamW(parts, **options)
    for p in parts:
        second.state[p] = {**first.state[p], "exp_avg_weight": 1 - 0.8**3}
    steps(second, parts, 2, seed=2)
    same(parts, whole)


def test_the_mean_of_moments_of_unequal_age_has_no_bias():
    # Every gradient is g: then m / a is g and v / b is g^2, whatever is averaged, and the step -lr.
    g = torch.tensor([3.0, -0.5], dtype=torch.float64)
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 0.0, "weight_decay": 0.0}
    states = []
    for count in (1, 7, 20):
        (p,) = leaves([(2,)])
        optimizer = AdamW([p], **options)
        for _ in range(count):
            p.grad = g.clone()
            optimizer.step()
        states.append(optimizer.state[p])
    (p,) = leaves([(2,)])
    start = p.detach().clone()
    optimizer = AdamW([p], **options)
    optimizer.state[p] = {k: sum(state[k] for state in states) / 3 for k in states[0]}
    p.grad = g.clone()
    optimizer.step()
    torch.testing.assert_close(p.detach() - start, -0.1 * g.sign(), **EXACT)


def test_each_client_has_moments_of_its_own_age():
    options = {"lr": 0.1, "betas": (0.8, 0.9)}
    ages = torch.tensor([[0.0, 0.5, 0.2], [0.0, 0.7, 0.6]], dtype=torch.float64)
    together = leaves(clients=3)
    alone = [[p.detach()[c].clone().requires_grad_() for p in together] for c in range(3)]
    optimizer = AdamW(together, **options)
    others = [AdamW(alone[c], **options) for c in range(3)]
    for key, age in zip(("exp_avg_weight", "exp_avg_sq_weight"), ages, strict=True):
        for p in together:
            optimizer.state[p][key] = age
        for c in range(3):
            for p in alone[c]:
                others[c].state[p][key] = float(age[c])
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for i, p in enumerate(together):
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            for c in range(3):
                alone[c][i].grad = p.grad[c].clone()
        for each in (optimizer, *others):
            each.step()
    for c in range(3):
        same([p[c] for p in together], alone[c])


@pytest.mark.parametrize(
    "bad", [{"lr": -1.0}, {"eps": -1.0}, {"weight_decay": -1.0}, {"betas": (0.9, 1.0)}]
)
def test_adamw_refuses(bad):
    with pytest.raises(ValueError, match=f"AdamW: {next(iter(bad))} must be"):
        AdamW(leaves(), **bad)


# -- LMO --------------------------------------------------------------------------------------


def test_lmo_of_matrices_without_correction_is_muon():
    shapes = [(3, 4), (4, 3), (2, 3, 2, 2)]
    mine, theirs = leaves(shapes), leaves(shapes)
    steps(LMO(mine, 0.1, 0.3, "rms", SVD), mine, 4)
    muon = partial(Muon, lr=0.1, momentum=0.7, ema=True, nesterov=False, scale="rms")
    steps(muon(theirs, orthogonalizer=SVD), theirs, 4)
    same(mine, theirs)


def test_lmo_of_the_rest_is_a_unit_step_of_each_client():
    x = leaves([(5,), (), (2, 3)], clients=3)
    before = [p.detach().clone() for p in x]
    optimizer = LMO([{"params": x, "spectral": False}], 0.1, 0.25, client_axis=True)
    correction = [torch.randn_like(p) for p in x]
    for p, d in zip(x, correction, strict=True):
        optimizer.state[p]["correction"] = d
        p.grad = torch.zeros_like(p)
        p.grad[1] = 4.0  # M = 1 after one step
        d[2] = 0.0  # nothing to follow: no step
    optimizer.step()
    for p, old, d in zip(x, before, correction, strict=True):
        for c, along in ((0, d[0]), (1, d[1] + 1)):
            step = -0.1 * along / along.pow(2).sum().sqrt()
            torch.testing.assert_close(p[c] - old[c], step, **EXACT)
        assert torch.equal(p[2], old[2])


def test_lmo_refuses_vectors_among_matrices():
    with pytest.raises(ValueError, match="2 or more axes"):
        LMO(leaves([(5,)]))


# -- several as one ---------------------------------------------------------------------------


def pair(params):
    muon = Muon([params[0]], lr=0.1, orthogonalizer=SVD)
    return [muon, torch.optim.SGD(params[1:3], lr=0.2, momentum=0.9), torch.optim.AdamW(params[3:])]


def test_chained_is_each_alone_and_survives_copies_and_checkpoints():
    alone, chained, copied, loaded = (leaves() for _ in range(4))
    for optimizer in pair(alone):
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            for _ in range(3):
                for p in alone:
                    p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
                optimizer.step()
    first = Chained(pair(chained))
    steps(first, chained, 3, seed=1)
    box = deepcopy({"optimizer": first, "params": chained})
    again = Chained(pair(loaded))
    again.load_state_dict(deepcopy(first.state_dict()))
    with torch.no_grad():
        for p, q in zip(loaded, chained, strict=True):
            p.copy_(q)
    copied = box["params"]
    for optimizer, params in ((first, chained), (box["optimizer"], copied), (again, loaded)):
        steps(optimizer, params, 3, seed=2)
        same(params, alone)


def test_chained_rates_can_be_changed():
    params = leaves()
    before = [p.detach().clone() for p in params]
    optimizer = Chained(pair(params))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    steps(optimizer, params, 2)
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


def test_chained_refuses():
    params = leaves()
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        Chained([torch.optim.SGD(params, lr=0.1), torch.optim.SGD(params[:1], lr=0.1)])
    with pytest.raises(ValueError, match="empty parameter list"):
        Chained([])
    with pytest.raises(ValueError, match="before chaining"):
        Chained([torch.optim.SGD(params, lr=0.1)]).add_param_group({"params": leaves()})


# -- what they rest on ------------------------------------------------------------------------


def test_no_iteration_is_the_matrix_over_its_norm():
    m = leaves([(40, 120)])[0].detach()
    for method in ("newton_schulz", "polar_express"):
        found = Orthogonalizer(method, steps=0)(m)
        torch.testing.assert_close(found, m / (m.pow(2).sum().sqrt() + 1e-7), **EXACT)


def test_operator_scale():
    assert step_scale(8, 2, "operator") == 2.0
    assert step_scale(2, 8, "operator") == 0.5


# -- arguments of the methods that use them -----------------------------------------------------


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (partial(FedLADA, alpha=0.0), r"alpha=0.0: must be in \(0, 1\]"),
        (partial(FedLADA, eps=0.0), "eps=0.0: must be positive"),
        (partial(FedAdamW, alpha=1.0), r"alpha=1.0: must be in \[0, 1\)"),
        (partial(FedAdamW, second_moment="mean"), "second_moment=mean: use 'block_mean' or 'full'"),
        (partial(FedMuonLMO, alpha=0.0), r"alpha=0.0: must be in \(0, 1\]"),
        (partial(FedMuonLMO, server_lr=0.0), "server_lr=0.0: must be positive"),
        (partial(MuLoCo, server_lr=-1.0), "server_lr=-1.0: must be positive"),
        (partial(ServerMuon, rest=partial(torch.optim.SGD, lr=0.1)), "set by `lr`"),
        (partial(ServerMuon, server_lr=0.0), "server_lr=0.0: must be positive"),
    ],
)
def test_methods_refuse(method, message):
    with pytest.raises(ValueError, match=message):
        method(0.1)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.SGD, "keeps no state"),
        (partial(torch.optim.SGD, momentum=0.9, dampening=0.5), "does not start at zero"),
        (torch.optim.Adam, "cannot keep the state 'step' of Adam"),
        (torch.optim.Adagrad, "cannot keep the state 'step' of Adagrad"),
    ],
)
def test_states_that_clients_cannot_keep(optimizer, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        federate(FedAvg(0.1, optimizer, keep_state=True), reference.tiny_problem()[2], tmp_path)


class Kept(torch.optim.Optimizer):
    """Momentum, with one thing that a test wants to be odd."""

    elementwise = True

    def __init__(self, params, lr=0.1, oddity=""):
        super().__init__(params, {"lr": lr, "oddity": oddity})

    def step(self):
        for group in self.param_groups:
            oddity = group["oddity"]
            if oddity == "counts":
                group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if "m" not in state:
                    state["m"] = p.detach().clone() if oddity == "weights" else torch.zeros_like(p)
                if oddity == "dtype":
                    state["m"] = state["m"].float()
                state["m"].mul_(0.9).add_(p.grad)
                noise = torch.randn_like(p) if oddity == "noise" else 0
                p.sub_(group["lr"] * (state["m"] + noise))  # in place, without no_grad


@pytest.mark.parametrize(
    ("oddity", "message"),
    [
        ("", None),
        ("noise", None),
        ("weights", "does not start at zero"),
        ("counts", "counts in its groups"),
        ("dtype", "cannot keep the state 'm' of Kept"),
    ],
)
def test_any_optimiser_whose_state_starts_at_zero_can_be_kept(oddity, message, tmp_path):
    data = reference.tiny_problem()[2]
    method = FedAvg(0.1, partial(Kept, oddity=oddity), keep_state=True)
    if message:
        with pytest.raises(ValueError, match=message):
            federate(method, data, tmp_path)
        return
    mine, _ = federate(method, data, tmp_path / "a")
    if not oddity:
        sgd = partial(torch.optim.SGD, momentum=0.9)
        theirs, _ = federate(FedAvg(0.1, sgd, keep_state=True), data, tmp_path / "b")
        for x, y in zip(mine.x, theirs.x, strict=True):
            same(x.values(), y.values())


def test_the_probe_of_kept_state_leaves_the_random_stream_alone():
    method = FedAvg(0.1, partial(Kept, oddity="noise"), keep_state=True)
    setting = Setting.of(torch.nn.Linear(3, 2), 5)
    before = torch.get_rng_state()
    method.setup(setting)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_client_whose_kept_state_is_not_finite_is_refused(tmp_path):
    """A second moment of infinity makes steps of 0: nothing else would tell."""
    data = {c: (1e22 * x.float(), y) for c, (x, y) in reference.tiny_problem()[2].items()}
    method = FedAvg(1e-3, partial(AdamW, weight_decay=0.0), keep_state=True)
    with pytest.raises(NonFiniteUpdate):
        federate(
            method,
            data,
            tmp_path,
            network=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)),
            trainer_kwargs={"precision": "32-true"},
        )


@pytest.mark.parametrize("rtol", [None, 0.0, 0.1])
def test_the_cut_of_an_svd_reaches_the_lmo(rtol):
    method = FedMuonLMO(0.1, orthogonalizer="svd", svd_rtol=rtol)
    method.setup(Setting.of(torch.nn.Linear(3, 2), 5))
    (member,) = method.local.build(list(torch.nn.Linear(3, 2).parameters()), client_axis=False)
    assert member.optimizer.orthogonalizer == Orthogonalizer("svd", rtol=rtol)


def test_muloco_with_a_plain_server_and_no_kept_state_is_local_muon(tmp_path):
    _, _, data = reference.tiny_problem()
    options = {"beta": 0.9, "scale": "rms", "weight_decay": 0.1}
    plain = {"server_lr": 1.0, "server_momentum": 0.0, "server_nesterov": False}
    adam = {"rest_betas": (0.9, 0.99), "rest_eps": 1e-8}
    mine, _ = federate(
        MuLoCo(0.05, 0.02, **options, **plain, keep_state=False), data, tmp_path / "a"
    )
    theirs, _ = federate(LocalMuon(0.05, 0.02, **options, **adam), data, tmp_path / "b")
    for x, y in zip(mine.x, theirs.x, strict=True):
        same(x.values(), y.values())
