"""Every method, through the real engine, against its float64 reference written from the paper.

A new method is one row of METHODS: how the engine builds it, and the reference with its arguments.
"""

from functools import partial

import pytest
import reference
import torch
from federation import TinyNet, federate

from fedmuon_pl import (
    FedACG,
    FedAdagrad,
    FedAdam,
    FedAdamW,
    FedAvg,
    FedAvgM,
    FedCM,
    FedDyn,
    FedLADA,
    FedMuon,
    FedMuonLMO,
    FedNova,
    FedProx,
    FedYogi,
    LocalMuon,
    MuLoCo,
    Scaffold,
    ServerMuon,
)
from fedmuon_pl.schedules import Cosine

SGD = torch.optim.SGD
X0, GRADIENT, DATA = reference.tiny_problem()
NEWTON_SCHULZ = reference.newton_schulz
MUON = {"lr": 0.05, "rest_lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-10}
MULOCO = {
    "lr": 0.05,
    "beta": 0.9,
    "nesterov": False,
    "scale": "operator",
    "betas": (0.9, 0.99),
    "outer_lr": 0.9,
    "outer_momentum": 0.8,
}


def muon(kind=FedMuon, **kwargs):
    settings = {"lr": 0.05, "rest_lr": 0.02, "orthogonalizer": "svd", **kwargs}
    return partial(kind, **settings)


# name: (algorithm, reference, its arguments, server state by the engine's name and the reference's)
METHODS = {
    "fedavg": (partial(FedAvg, 0.3), reference.fedavg, {"lr": 0.3}),
    "fedavg-momentum": (
        partial(FedAvg, 0.1, partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.01)),
        reference.fedavg,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "fedavg-server-lr": (
        partial(FedAvg, 0.3, server=partial(SGD, lr=0.7)),
        reference.fedavg,
        {"lr": 0.3, "server_lr": 0.7},
    ),
    "fedavg-adamw": (
        partial(FedAvg, 0.02, partial(torch.optim.AdamW, weight_decay=0.1)),
        reference.fedavg_adamw,
        {"lr": 0.02, "weight_decay": 0.1},
    ),
    "fedavgm": (
        partial(FedAvgM, 0.3, server_lr=0.5, server_momentum=0.8),
        reference.fedavgm,
        {"lr": 0.3, "server_lr": 0.5, "beta": 0.8},
    ),
    "fedadam": (
        partial(FedAdam, 0.3, server_lr=0.03),
        reference.fedadam,
        {"lr": 0.3, "server_lr": 0.03},
    ),
    "fedyogi": (
        partial(FedYogi, 0.3, server_lr=0.03),
        reference.fedyogi,
        {"lr": 0.3, "server_lr": 0.03},
    ),
    "fedadagrad": (
        partial(FedAdagrad, 0.3, server_lr=0.03, beta1=0.9),
        reference.fedadagrad,
        {"lr": 0.3, "server_lr": 0.03, "beta1": 0.9},
    ),
    "fedprox": (partial(FedProx, 0.3, mu=0.5), reference.fedprox, {"lr": 0.3, "mu": 0.5}),
    "feddyn": (
        partial(FedDyn, 0.2, alpha=0.3),
        reference.feddyn,
        {"lr": 0.2, "alpha": 0.3, "population": 5},
        {"dynamic_regularisation.h": "h"},
    ),
    "fednova": (
        partial(FedNova, 0.1, momentum=0.9, nesterov=True),
        reference.fednova,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    "fedcm": (
        partial(FedCM, 0.3, alpha=0.2),
        reference.fedcm,
        {"lr": 0.3, "alpha": 0.2},
        {"client_momentum.delta": "delta"},
    ),
    "fedacg": (
        partial(FedACG, 0.2, lam=0.7, beta=0.1),
        reference.fedacg,
        {"lr": 0.2, "lam": 0.7, "beta": 0.1},
        {"accelerated_start.momentum": "momentum"},
    ),
    "scaffold": (
        partial(Scaffold, 0.3),
        reference.scaffold,
        {"lr": 0.3, "population": 5},
        {"control_variates.c": "c"},
    ),
    "scaffold-server-lr": (
        partial(Scaffold, 0.2, server_lr=0.6),
        reference.scaffold,
        {"lr": 0.2, "server_lr": 0.6, "population": 5},
        {"control_variates.c": "c"},
    ),
    "local_muon": (muon(LocalMuon), reference.local_muon, MUON),
    "local_muon-decay": (
        muon(LocalMuon, weight_decay=0.1, momentum_form="ema", nesterov=True, scale="rms"),
        reference.local_muon,
        {**MUON, "weight_decay": 0.1, "ema": True, "nesterov": True, "scale": "rms"},
    ),
    "fedmuon": (
        muon(),
        reference.fedmuon,
        MUON,
        {"alignment.delta_g": "delta_g", "momentum_averaging.momentum": "momentum"},
    ),
    "fedmuon-newton-schulz": (
        muon(orthogonalizer="newton_schulz"),
        reference.fedmuon,
        {**MUON, "orthogonalize": NEWTON_SCHULZ},
    ),
    "fedmuon-options": (
        muon(
            alpha=0.3,
            beta=0.8,
            nesterov=True,
            momentum_form="ema",
            scale="spectral",
            weight_decay=0.1,
            align_rest=False,
        ),
        reference.fedmuon,
        {
            **MUON,
            "alpha": 0.3,
            "beta": 0.8,
            "nesterov": True,
            "ema": True,
            "scale": "spectral",
            "weight_decay": 0.1,
            "align_rest": False,
        },
    ),
    "fedmuon-no-averaging": (
        muon(average_momentum=False),
        reference.fedmuon,
        {**MUON, "average_momentum": False},
    ),
    "fedmuon-no-alignment": (muon(alpha=0.0), reference.fedmuon, {**MUON, "alpha": 0.0}),
    "fedmuon-head-in-rest": (
        muon(rest_patterns=["^fc"]),
        reference.fedmuon,
        {**MUON, "matrix": lambda name, p: p.ndim >= 2 and not name.startswith("fc")},
    ),
    "fedmuon_lmo": (
        partial(FedMuonLMO, 0.05, alpha=0.3, orthogonalizer="svd"),
        reference.fedmuon_lmo,
        {"lr": 0.05, "alpha": 0.3, "population": 5},
        {"momentum_variates.c": "c"},
    ),
    "fedmuon_lmo-options": (
        partial(
            FedMuonLMO,
            0.05,
            alpha=0.9,
            keep_momentum=False,
            server_lr=0.8,
            scale="operator",
            rest_patterns=["^fc"],
        ),
        reference.fedmuon_lmo,
        {
            "lr": 0.05,
            "alpha": 0.9,
            "population": 5,
            "keep_momentum": False,
            "server_lr": 0.8,
            "orthogonalize": NEWTON_SCHULZ,
            "scale": "operator",
            "matrix": lambda name, p: p.ndim >= 2 and not name.startswith("fc"),
        },
    ),
    "fedmuon_lmo-no-iteration": (
        partial(FedMuonLMO, 0.05, ns_steps=0),
        reference.fedmuon_lmo,
        {"lr": 0.05, "population": 5, "orthogonalize": partial(NEWTON_SCHULZ, steps=0)},
    ),
    "server_muon": (
        partial(ServerMuon, 0.3, server_lr=0.2, rest_server_lr=0.7, orthogonalizer="svd"),
        reference.server_muon,
        {"lr": 0.3, "server_lr": 0.2, "rest_server_lr": 0.7, "beta": 0.9, "rest_beta": 0.0},
    ),
    "server_muon-options": (
        partial(
            ServerMuon,
            0.2,
            server_lr=0.1,
            rest_server_lr=0.4,
            beta=0.8,
            nesterov=True,
            scale="rms",
            weight_decay=0.1,
            rest=partial(SGD, momentum=0.8, nesterov=True),
            optimizer=partial(SGD, momentum=0.5),
        ),
        reference.server_muon,
        {
            "lr": 0.2,
            "server_lr": 0.1,
            "rest_server_lr": 0.4,
            "beta": 0.8,
            "nesterov": True,
            "scale": "rms",
            "server_decay": 0.1,
            "orthogonalize": NEWTON_SCHULZ,
            "momentum": 0.5,
        },
    ),
    "server_muon-adamw": (
        partial(
            ServerMuon,
            0.3,
            rest_server_lr=0.02,
            momentum_form="ema",
            rest=partial(torch.optim.AdamW, betas=(0.8, 0.9), weight_decay=0.0),
            orthogonalizer="svd",
        ),
        reference.server_muon,
        {
            "lr": 0.3,
            "server_lr": 0.05,
            "rest_server_lr": 0.02,
            "beta": 0.9,
            "ema": True,
            "rest_betas": (0.8, 0.9),
        },
    ),
    "muloco": (
        partial(MuLoCo, 0.05, orthogonalizer="svd"),
        reference.muloco,
        {**MULOCO, "rest_lr": 0.05},
    ),
    "muloco-options": (
        partial(
            MuLoCo,
            0.05,
            0.02,
            beta=0.8,
            nesterov=True,
            momentum_form="ema",
            scale="rms",
            weight_decay=0.1,
            server_lr=0.7,
            server_momentum=0.5,
            server_nesterov=False,
        ),
        reference.muloco,
        {
            **MULOCO,
            "rest_lr": 0.02,
            "beta": 0.8,
            "nesterov": True,
            "ema": True,
            "scale": "rms",
            "weight_decay": 0.1,
            "orthogonalize": NEWTON_SCHULZ,
            "outer_lr": 0.7,
            "outer_momentum": 0.5,
            "outer_nesterov": False,
        },
    ),
    "muloco-stateless": (
        partial(MuLoCo, 0.05, orthogonalizer="svd", keep_state=False),
        reference.muloco,
        {**MULOCO, "rest_lr": 0.05, "keep_state": False},
    ),
    "fedlada": (
        partial(FedLADA, 0.02, alpha=0.4),
        reference.fedlada,
        {"lr": 0.02, "alpha": 0.4},
        {"alignment.delta_g": "g_a", "second_moment_averaging.v": "v"},
    ),
    "fedlada-adam": (
        partial(FedLADA, 0.02, alpha=0.4, beta1=0.8, beta2=0.95, eps=1e-3, amsgrad=False),
        reference.fedlada,
        {"lr": 0.02, "alpha": 0.4, "betas": (0.8, 0.95), "eps": 1e-3, "amsgrad": False},
        {"second_moment_averaging.v": "v"},
    ),
    "fedadamw": (
        partial(FedAdamW, 0.02, weight_decay=0.1),
        reference.fedadamw,
        {"lr": 0.02, "weight_decay": 0.1},
        {"alignment.delta_g": "delta", "carried_decay.d": "d"},
    ),
    "fedadamw-full": (
        partial(
            FedAdamW,
            0.02,
            alpha=0.3,
            beta1=0.8,
            beta2=0.9,
            eps=1e-3,
            weight_decay=0.1,
            second_moment="full",
            shrink_local=True,
        ),
        reference.fedadamw,
        {
            "lr": 0.02,
            "alpha": 0.3,
            "betas": (0.8, 0.9),
            "eps": 1e-3,
            "weight_decay": 0.1,
            "block_mean": lambda name, v: v,
            "shrink_local": True,
        },
        {"second_moment_averaging.v": "v", "carried_decay.d": "d"},
    ),
}

# How much work the clients do, and how the engine is run.
SETTINGS = {
    "equal": ({"local_steps": 3}, {}),
    "unequal": ({"local_epochs": 2}, {}),
    "by-size": ({"local_epochs": 1}, {"weighting": "samples"}),
    "clipped": ({"local_steps": 3, "client_clip_norm": 0.3}, {}),
    "cosine": ({"local_epochs": 1, "lr_schedule": Cosine(0.1)}, {}),
    "side-by-side": ({"local_epochs": 2, "clients_at_once": 3}, {"weighting": "samples"}),
}


class X0Net(TinyNet):
    """The tiny network at the reference's x^0."""

    def __init__(self):
        super().__init__()
        self.double().load_state_dict(X0)


def run(name, setting, folder):
    algorithm = METHODS[name][0]()
    work, options = SETTINGS[setting]
    recorder, _ = federate(algorithm, DATA, folder, network=X0Net, **work, **options)
    return recorder


def expected(name, setting, rounds):
    _, method, arguments, *_ = METHODS[name]
    work, options = SETTINGS[setting]
    arguments = dict(arguments)
    if options.get("weighting") == "samples":
        arguments["weights"] = {i: len(y) for i, (_, y) in DATA.items()}
    if "client_clip_norm" in work:
        arguments["clip_norm"] = work["client_clip_norm"]
    if "lr_schedule" in work:
        for key in {"lr", "rest_lr"} & set(arguments):
            arguments[key] = scheduled(arguments[key], work["lr_schedule"], len(rounds))
    return method(X0, GRADIENT, rounds, **arguments)


def scheduled(lr, schedule, total):
    return lambda r: lr * schedule(r, total)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", METHODS)
def test_method_equals_its_reference(name, setting, tmp_path):
    recorder = run(name, setting, tmp_path)
    trace = expected(name, setting, recorder.rounds)
    assert len(recorder.x) == 4
    assert all(len(cohort) == 3 for cohort in recorder.rounds)
    if setting in ("unequal", "side-by-side"):
        steps = {len(batches) for cohort in recorder.rounds for batches in cohort.values()}
        assert len(steps) > 1
    for ours, theirs in zip(recorder.x, trace.x, strict=True):
        for key in theirs:
            torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-10)
    for mine, theirs in METHODS[name][3].items() if len(METHODS[name]) > 3 else ():
        for ours, reference_state in zip(recorder.state, trace.state, strict=True):
            for tensor, value in zip(ours[mine], reference_state[theirs].values(), strict=False):
                torch.testing.assert_close(tensor, value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_method_in_float32(name, tmp_path):
    # Four rounds of three steps: rounding has grown to about 1e-6 by then; 1e-4 leaves room for
    # the few steps where a small singular value turns its vectors.
    algorithm = METHODS[name][0]()
    data = {i: (x.float(), y) for i, (x, y) in DATA.items()}

    class Float(X0Net):
        def __init__(self):
            super().__init__()
            self.float()

    recorder, _ = federate(
        algorithm, data, tmp_path, network=Float, trainer_kwargs={"precision": "32-true"}
    )
    doubles = [
        {i: [(x.double(), y) for x, y in batches] for i, batches in cohort.items()}
        for cohort in recorder.rounds
    ]
    trace = expected(name, "equal", doubles)
    for key, value in trace.x[-1].items():
        torch.testing.assert_close(recorder.x[-1][key].double(), value, rtol=0, atol=1e-4)


def test_reference_and_engine_differ_when_the_rate_does(tmp_path):
    # The comparison above can fail.
    recorder = run("fedavg", "equal", tmp_path)
    trace = reference.fedavg(X0, GRADIENT, recorder.rounds, lr=0.3001)
    difference = max((recorder.x[-1][k] - v).abs().max() for k, v in trace.x[-1].items())
    assert difference > 1e-6
