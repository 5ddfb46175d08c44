"""FedMuon's options and variants: the released code, low-rank momentum, the cached direction."""

import inspect
import math
from functools import partial
from pathlib import Path

import pytest
import reference
import torch
import yaml
from federation import TinyNet, federate
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedmuon_pl import FedMuon, LocalMuon, Muon
from fedmuon_pl.algorithms.lowrank import LowRank, truncation_rank
from fedmuon_pl.errors import ConfigError
from fedmuon_pl.optim.orthogonalize import Orthogonalizer, as_matrix, newton_schulz
from fedmuon_pl.schedules import Cosine

SGD = torch.optim.SGD
X0, GRADIENT, DATA = reference.tiny_problem()
CONFIGS = Path(__file__).parents[1] / "configs/algorithm"

# Equal local steps: what the released code and the cached direction take for granted.
SETTINGS = {
    "equal": ({"local_steps": 3}, {}),
    "by-size": ({"local_steps": 3}, {"weighting": "samples"}),
    "clipped": ({"local_steps": 3, "client_clip_norm": 0.3}, {}),
    "cosine": ({"local_steps": 3, "lr_schedule": Cosine()}, {}),
    "side-by-side": ({"local_steps": 2, "clients_at_once": 3, "lr_schedule": Cosine(0.2)}, {}),
}
every_setting = pytest.mark.parametrize("setting", SETTINGS)


def init_args(name, **changes):
    """The arguments in a method's YAML, with some changed."""
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return {**config["model"]["algorithm"]["init_args"], **changes}


def arguments(setting):
    """What the reference must be told of a setting, and the schedule's factor."""
    work, options = SETTINGS[setting]
    more = {"clip_norm": work.get("client_clip_norm")}
    if options.get("weighting") == "samples":
        more["weights"] = {i: len(y) for i, (_, y) in DATA.items()}
    schedule = work.get("lr_schedule", lambda r, rounds: 1.0)
    return work["local_steps"], more, lambda lr: lambda r: lr * schedule(r, 4)


def assert_same(recorder, trace, atol=1e-10):
    assert len(recorder.x) == len(trace.x) == 4
    for ours, theirs in zip(recorder.x, trace.x, strict=True):
        for key in theirs:
            torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=atol)


# -- the released code ---------------------------------------------------------------


class Tokens(nn.Module):
    """A ViT's pieces, each with sides that the released code reads in its own way.

    A kernel (3, 1), whose scale is sqrt(3) by its own sides and 1 flattened; one (1, 1) with more
    outputs than inputs, where it is the other way round; a class token and a position embedding,
    each a batch of one matrix; two stacked matrices; tall and wide layers; a norm.
    """

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, (3, 1))
        self.wide = nn.Conv2d(2, 5, 1, bias=False)
        self.token = nn.Parameter(torch.zeros(1, 1, 5))
        self.position = nn.Parameter(torch.zeros(1, 9, 5))
        self.norm = nn.LayerNorm(5)
        self.mix = nn.Parameter(torch.zeros(2, 5, 2))
        self.tall = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)
        draw = torch.Generator().manual_seed(3)
        self.double()
        for p in self.parameters():
            p.data = 0.4 * torch.randn(p.shape, generator=draw, dtype=torch.float64) + (p.ndim < 2)

    def forward(self, x):
        tokens = self.wide(self.conv(x)).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.position
        mixed = torch.einsum("btd,hdo->btho", self.norm(tokens), self.mix).flatten(2)
        return self.head(torch.tanh(self.tall(torch.tanh(mixed))).mean(1))


def gradient(x, batch):
    """The gradient of the mean cross-entropy of ``Tokens`` at x."""
    inputs, labels = batch
    leaves = {name: p.detach().clone().requires_grad_() for name, p in x.items()}
    logits = torch.func.functional_call(Tokens(), leaves, (inputs,))
    loss = -logits.log_softmax(1)[torch.arange(len(labels)), labels].mean()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def official(setting, folder, **changes):
    work, options = SETTINGS[setting]
    algorithm = FedMuon(**init_args("fedmuon_official", lr=0.02, rest_lr=0.01, **changes))
    return federate(algorithm, DATA, folder, network=Tokens, **work, **options)[0]


@every_setting
def test_official_equals_the_released_code(setting, tmp_path):
    recorder = official(setting, tmp_path, ns_dtype=None)
    steps, more, scheduled = arguments(setting)
    x0 = {name: p.detach() for name, p in Tokens().named_parameters()}
    trace = reference.fedmuon_official(
        x0, gradient, recorder.rounds, lr=scheduled(0.01), alpha=2.0, gamma=0.5, K=steps, **more
    )
    assert_same(recorder, trace)
    assert min(float(p.abs().max()) for p in trace.state[-1]["m"].values()) > 0.01
    for name, mine in (("m", "alignment.delta_g"), ("momentum", "state_averaging.momentum_buffer")):
        for ours, theirs in zip(recorder.state, trace.state, strict=True):
            factor = -1 / steps if name == "m" else 1.0  # Delta_g = -m / K, for rates alike
            rates = [2.0 if p.ndim >= 2 and name == "m" else 1.0 for p in theirs[name].values()]
            for a, b, rate in zip(ours[mine], theirs[name].values(), rates, strict=True):
                torch.testing.assert_close(a, factor / rate * b, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        ({"scale": "spectral"}, {"conv.weight", "wide.weight"}),
        ({"matrix_view": "flatten"}, {"mix"}),
    ],
)
def test_official_readings_change_what_they_name_and_nothing_else(change, moved, tmp_path):
    # After one local step of one round, before parameters act on each other.
    run = partial(federate, data=DATA, network=Tokens, rounds=1, cohort=1, local_steps=1)
    args = init_args("fedmuon_official", ns_dtype=None)
    (a, _), (b, _) = (
        run(FedMuon(**{**args, **c}), folder=tmp_path / str(len(c))) for c in ({}, change)
    )
    assert {n for n in a.x[0] if not torch.equal(a.x[0][n], b.x[0][n])} == moved


def test_official_in_bfloat16_is_near(tmp_path):
    # Its iteration has 8 bits: directions are off by about 1%, some by more.
    exact = official("equal", tmp_path / "a", ns_dtype=None).x
    rounded = official("equal", tmp_path / "b").x
    for name in exact[0]:
        start = dict(Tokens().named_parameters())[name].detach()
        moved = (exact[-1][name] - start).norm()
        assert 0 < (rounded[-1][name] - exact[-1][name]).norm() < 0.2 * moved


# -- options of the optimisers ---------------------------------------------------------------


def test_as_matrix_last_two():
    for shape, expected in [
        ((4, 3), (4, 3)),
        ((2, 4, 3), (2, 4, 3)),
        ((4, 3, 2, 2), (4, 12)),
        ((2, 2, 4, 3, 2), (2, 2, 4, 3, 2)),
    ]:
        tensor = torch.randn(shape)
        assert as_matrix(tensor, 0, "last_two").shape == expected
        stacked = tensor.expand(5, *shape)
        assert as_matrix(stacked, 1, "last_two").shape == (5, *expected)


@pytest.mark.parametrize("client_axis", [False, True])
def test_muon_reads_tensors_as_it_is_told(client_axis):
    shapes = {"kernel": (6, 2, 3, 1), "stack": (2, 4, 3)}
    scales = {"kernel": math.sqrt(3), "stack": math.sqrt(4 / 3)}
    for name, shape in shapes.items():
        p = nn.Parameter(torch.zeros((3, *shape) if client_axis else shape, dtype=torch.float64))
        g = torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=p.dtype)
        p.grad = g.clone()
        Muon(
            [p],
            lr=1.0,
            scale="spectral_unflattened",
            matrix_view="last_two",
            client_axis=client_axis,
        ).step()
        matrices = g.reshape(-1, 6, 6) if name == "kernel" else g.reshape(-1, 4, 3)
        wanted = [-scales[name] * newton_schulz((1 - 0.95**2) * m) for m in matrices]
        torch.testing.assert_close(p.detach(), torch.stack(wanted).reshape(p.shape))
    with pytest.raises(ValueError, match="matrix_view must be flatten or last_two, got 'all'"):
        Muon([nn.Parameter(torch.zeros(2, 2))], matrix_view="all")


def test_the_orthogonaliser_gets_its_options():
    common = {"ns_steps": 7, "ns_eps": 0.5, "ns_dtype": "float64"}
    for kind in (FedMuon, LocalMuon):
        muon = kind(0.1, **common).local._muon.keywords["orthogonalizer"]
        assert muon == Orthogonalizer(steps=7, eps=0.5, dtype="float64")
        muon = kind(0.1, orthogonalizer="svd", svd_rtol=0.3).local._muon.keywords["orthogonalizer"]
        assert muon == Orthogonalizer("svd", rtol=0.3)
        with pytest.raises(ValueError, match="rtol must be null, or in"):
            kind(0.1, svd_rtol=0.3)
        with pytest.raises(ValueError, match="eps must be positive, got 0"):
            kind(0.1, ns_eps=0.0)


def test_local_muon_hands_on_every_argument():
    args = {
        "lr": 0.3,
        "rest_lr": 0.2,
        "beta": 0.7,
        "nesterov": True,
        "momentum_form": "ema",
        "orthogonalizer": "newton_schulz",
        "ns_steps": 3,
        "ns_coefficients": (1.5, -0.5, 0.0),
        "ns_dtype": "float64",
        "ns_eps": 1e-3,
        "svd_rtol": None,
        "scale": "rms",
        "matrix_view": "last_two",
        "weight_decay": 0.4,
        "rest_optimizer": None,
        "rest_betas": (0.5, 0.6),
        "rest_eps": 1e-4,
        "rest_patterns": ["a"],
        "matrix_patterns": ["b"],
        "server": partial(SGD, lr=0.5),
    }
    assert list(args) == list(inspect.signature(LocalMuon).parameters)
    local, full = LocalMuon(**args), FedMuon(**args, alpha=0.0, average_momentum=False)
    assert local.mechanisms == full.mechanisms == []
    assert local.server is full.server
    mine, theirs = (dict(vars(m.local)) for m in (local, full))
    muon, same_muon = mine.pop("_muon"), theirs.pop("_muon")
    assert muon.keywords == same_muon.keywords
    assert {0.3, 0.7, True, "rms", "last_two", 0.4} < set(muon.keywords.values())
    rest, same_rest = (vars(rule.pop("_rest")) for rule in (mine, theirs))
    assert rest == same_rest
    assert rest["keywords"].items() >= {"betas": (0.5, 0.6), "eps": 1e-4}.items()
    assert mine == theirs
    other = LocalMuon(0.3, rest_optimizer=SGD).local
    assert vars(other._rest)["kind"] is SGD


def test_a_rest_that_couples_elements_trains_one_client_at_a_time(tmp_path):
    method = partial(FedMuon, 0.05, rest_optimizer=torch.optim.Adafactor)
    alone = federate(method(), DATA, tmp_path, rounds=1)[0].x[-1]
    assert all(p.isfinite().all() for p in alone.values())
    with pytest.raises(ConfigError, match="clients_at_once=2: the local optimiser couples"):
        federate(method(), DATA, tmp_path, rounds=1, clients_at_once=2)


def test_matrix_patterns_choose_the_matrices(tmp_path):
    by_matrix = FedMuon(0.05, 0.02, matrix_patterns=["^conv"])
    by_rest = FedMuon(0.05, 0.02, rest_patterns=["^fc"])
    a, b = (federate(m, DATA, tmp_path)[0].x[-1] for m in (by_matrix, by_rest))
    assert all(torch.equal(a[n], b[n]) for n in a)
    with pytest.raises(ConfigError, match=r"FedMuon: matrix_patterns: 'fc.bias' is found in no"):
        federate(FedMuon(0.05, matrix_patterns=["fc.bias"]), DATA, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rest_lr": 0.0}, "rest_lr=0.0: must be positive"),
        ({"rest_optimizer": torch.optim.LBFGS}, "rest_optimizer=LBFGS needs a closure"),
        ({"rest_optimizer": print}, "rest_optimizer must be a torch.optim class"),
        (
            {"rest_lr": 0.2, "rest_optimizer": partial(SGD, lr=0.1)},
            r"set by `rest_lr` \(now 0.2\), not inside `rest_optimizer` \(lr=0.1\)",
        ),
        (
            {"rest_betas": (0.8, 0.95), "rest_optimizer": SGD},
            r"rest_betas=\(0.8, 0.95\) and rest_eps=1e-10 are AdamW's",
        ),
        ({"momentum_ratio": 0.0}, r"momentum_ratio=0.0: must be in \(0, 1\]"),
        ({"momentum_ratio": 1.5}, r"momentum_ratio=1.5: must be in \(0, 1\]"),
        (
            {"momentum_ratio": 0.5, "average_momentum": False},
            "momentum_ratio=0.5: no momentum is sent with average_momentum=False",
        ),
        ({"error_feedback": True}, "nothing is lost without a momentum_ratio"),
        (
            {"send_direction": False, "server": partial(SGD, lr=0.7)},
            r"send_direction=False needs plain averaging \(server: null\)",
        ),
    ],
)
def test_refuses(arguments, said):
    with pytest.raises(ValueError, match=said):
        FedMuon(0.1, **arguments)


# -- low-rank momentum ---------------------------------------------------------------

matrices = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31))


def drawn(rows, cols, seed):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=rng, dtype=torch.float64)


@given(matrices, st.floats(0.01, 1))
@settings(deadline=None)
def test_factors_are_smaller_or_the_matrix_itself(drawing, ratio):
    rows, cols, _ = drawing
    m = drawn(*drawing)
    low = LowRank(ratio, [m.shape])
    sent = low.compress([m])
    (back,) = low.restore(sent)
    if len(sent) == 1:
        assert sent[0] is m
        return
    numbers = sum(t.numel() for t in sent)
    rank = truncation_rank(rows, cols, ratio)
    assert numbers == rank * (rows + cols + 1) < rows * cols
    assert numbers <= max(ratio * rows * cols, rows + cols + 1) + 1e-9
    # Eckart and Young: nothing of this rank is nearer.
    s = torch.linalg.svdvals(m)
    assert (m - back).square().sum().item() == pytest.approx(
        s[rank:].square().sum().item(), abs=1e-12
    )
    torch.testing.assert_close(back, reference.truncate(m, ratio), rtol=0, atol=1e-9)


@given(matrices, st.floats(0.01, 1))
@settings(deadline=None)
def test_rank_one_matrices_arrive_whole(drawing, ratio):
    rows, cols, seed = drawing
    m = drawn(rows, 1, seed) @ drawn(1, cols, seed + 1)
    low = LowRank(ratio, [m.shape])
    torch.testing.assert_close(low.restore(low.compress([m]))[0], m, rtol=0, atol=1e-12)


@given(matrices)
@settings(deadline=None)
def test_ratio_one_sends_the_matrix(drawing):
    m = drawn(*drawing)
    assert LowRank(1, [m.shape]).compress([m])[0] is m


def test_ranks_of_the_released_code_and_its_slip():
    # int(rho m n / (m + n + 1)): layer1 of ResNet-18, its stem (0 there), and nothing to save.
    assert truncation_rank(64, 576, 0.05) == int(0.05 * 64 * 576 / 641) == 2
    assert truncation_rank(64, 27, 0.05) == 1
    assert truncation_rank(1, 100, 0.05) is None
    assert truncation_rank(64, 64, 1) is None
    assert truncation_rank(64, 64, 0.999) == 31


def test_batches_and_matrices_that_are_not_finite_stay_apart():
    shapes = [torch.Size([4, 5]), torch.Size([2, 6, 4]), torch.Size([1, 3])]
    low = LowRank(0.5, shapes)
    assert low.ranks == [1, 1, None]
    rng = torch.Generator().manual_seed(0)
    one = [torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes]
    bad = [t.clone().index_fill_(-1, torch.tensor(0), torch.inf) for t in one]
    together = [torch.stack(pair) for pair in zip(bad, one, strict=True)]
    for alone, both in zip(
        low.restore(low.compress(one)), low.restore(low.compress(together)), strict=True
    ):
        torch.testing.assert_close(both[1], alone)
        assert not both[0].isfinite().all()


def test_ratio_one_is_fedmuon_bit_for_bit(tmp_path):
    plain = federate(FedMuon(0.05), DATA, tmp_path)[0]
    for feedback in (False, True):
        low = FedMuon(0.05, momentum_ratio=1.0, error_feedback=feedback)
        recorder = federate(low, DATA, tmp_path)[0]
        assert all(torch.equal(recorder.x[-1][n], p) for n, p in plain.x[-1].items())


@pytest.mark.parametrize("at_once", [1, 3])
def test_error_feedback_loses_nothing(at_once, tmp_path):
    # What the clients sent in all rounds, and still hold, is their momentum, summed up.
    sums = {"sent": {}, "whole": {}}

    class Watched(FedMuon):
        def end(self, run):
            whole = [m.clone() for m in run.get_state("momentum_buffer", self.local.matrices)]
            uploads = super().end(run)
            for key, tensors in (
                ("whole", whole),
                ("sent", uploads["momentum_averaging"].tensors),
            ):
                for c, client in enumerate(run.clients):
                    old = sums[key].get(client, [torch.zeros(())] * 2)
                    sums[key][client] = [a + t[c] for a, t in zip(old, tensors, strict=True)]
            return uploads

    method = Watched(0.05, momentum_ratio=0.3, error_feedback=True)
    _, module = federate(method, DATA, tmp_path, clients_at_once=at_once)
    assert len(sums["sent"]) > 3
    for client, sent in sums["sent"].items():
        held = module.server.store.load([client], torch.device("cpu"))["momentum_residual"]
        for s, w, h in zip(sent, sums["whole"][client], held, strict=True):
            torch.testing.assert_close(s + h[0], w, rtol=0, atol=1e-12)
            assert h.abs().max() > 1e-3


def test_low_rank_follows_the_view_of_matrices(tmp_path):
    method = FedMuon(0.02, momentum_ratio=0.5, scale="spectral_unflattened", matrix_view="last_two")
    recorder, _ = federate(method, DATA, tmp_path, network=Tokens)
    shapes = [tuple(t.shape) for t in recorder.state[-1]["momentum_averaging.momentum"]]
    # The token (1 x 5) whole, the position (9 x 5) at rank 1; mix, two of 5 x 2; the convolutions,
    # 2 x 3 whole and 5 x 2; tall 6 x 4 and head 3 x 6.
    assert shapes == [
        *((1, 1, 5), (1, 9, 1), (1, 1), (1, 1, 5)),
        *((2, 5, 1), (2, 1), (2, 1, 2)),
        (2, 3),
        *((5, 1), (1,), (1, 2)),
        *((6, 1), (1,), (1, 4)),
        *((3, 1), (1,), (1, 6)),
    ]


# -- the direction that is not sent ---------------------------------------------------------------


def cached(**more):
    return FedMuon(0.05, 0.02, orthogonalizer="svd", send_direction=False, **more)


@every_setting
@pytest.mark.parametrize("align_rest", [True, False])
def test_cached_equals_fedmuon(align_rest, setting, tmp_path):
    work, options = SETTINGS[setting]
    method = cached(align_rest=align_rest)
    recorder, _ = federate(method, DATA, tmp_path, network=TinyAtX0, **work, **options)
    _, more, scheduled = arguments(setting)
    trace = reference.fedmuon(
        X0,
        GRADIENT,
        recorder.rounds,
        lr=scheduled(0.05),
        rest_lr=scheduled(0.02),
        betas=(0.9, 0.95),
        eps=1e-10,
        align_rest=align_rest,
        **more,
    )
    assert_same(recorder, trace)


class TinyAtX0(TinyNet):
    """The tiny network at the reference's x^0."""

    def __init__(self):
        super().__init__()
        self.double().load_state_dict(X0)


def test_cached_stands_still_after_a_round_without_a_rate(tmp_path):
    # eta = 0 in round 1: Delta_g is 0 after it, not 0 / 0.
    class Pause:
        horizon = False

        def __call__(self, r, rounds):
            return float(r != 1)

        def describe(self):
            return {}

    a, b = (
        federate(m, DATA, tmp_path, lr_schedule=Pause())[0].x
        for m in (cached(), FedMuon(0.05, 0.02, orthogonalizer="svd"))
    )
    assert all(torch.equal(a[0][n], a[1][n]) for n in a[0])
    for n in a[-1]:
        torch.testing.assert_close(a[-1][n], b[-1][n], rtol=0, atol=1e-10)


def test_cached_needs_equal_steps(tmp_path):
    with pytest.raises(
        ConfigError, match=r"FedMuon: send_direction=False needs model\.local_steps: with"
    ):
        federate(cached(), DATA, tmp_path, local_epochs=1)


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("cohort", [2, 5])
def test_cached_sends_the_last_model_to_those_who_missed_it(cohort, at_once, tmp_path):
    recorder, _ = federate(
        cached(), DATA, tmp_path, rounds=5, cohort=cohort, clients_at_once=at_once
    )
    weights, matrices = 8 * (18 + 24 + 3), 8 * (18 + 24)
    before = None
    missed = []
    for members, row in zip(recorder.rounds, recorder.report, strict=True):
        behind = 0 if before is None else len(members.keys() - before.keys())
        down = cohort * (weights + matrices) + behind * weights
        assert row["comm/down_mb"] == pytest.approx(down / 1e6, rel=1e-12)
        assert row["comm/up_mb"] == pytest.approx(cohort * (weights + matrices) / 1e6, rel=1e-12)
        before = members
        missed.append(behind)
    assert set(missed[1:]) == {0} if cohort == 5 else len(set(missed[1:])) > 1


def test_the_variants_describe_themselves():
    plain, low = FedMuon(0.1).describe(), FedMuon(0.1, momentum_ratio=0.1).describe()
    assert plain != low
    sgd = FedMuon(0.1, rest_optimizer=partial(SGD, momentum=0.9)).describe()
    assert sgd["rest_optimizer"] == {"call": "torch.optim.sgd.SGD", "momentum": 0.9}
