"""Every method, through the real engine, against its float64 reference written from the paper.

A new method is one row of METHODS: how the engine builds it, and the reference with its arguments.
"""

from functools import partial

import pytest
import reference
import torch
from federation import TinyNet, federate

from fedmuon_pl import (
    SOAP,
    AdamW,
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
    FedPAC,
    FedProx,
    FedYogi,
    LocalMuon,
    Mime,
    MimeLite,
    MuLoCo,
    Scaffold,
    ServerMuon,
)
from fedmuon_pl.algorithms.base import Algorithm, Mechanism, Member
from fedmuon_pl.algorithms.local import TorchRule
from fedmuon_pl.algorithms.mechanisms import StateAveraging
from fedmuon_pl.schedules import Cosine

SGD = torch.optim.SGD
X0, GRADIENT, DATA = reference.tiny_problem()
NEWTON_SCHULZ = reference.newton_schulz
MUON = {"lr": 0.05, "rest_lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-10}
# The 8 inputs of the last layer are more than a few batches span: the basis of what they leave out
# would be anyone's. So would be the sign of what is 0 but for rounding, with a small eps.
SOAPS = {"eps": 1e-4, "precondition_frequency": 2, "max_precond_dim": 4}
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
    "fedavg-kept-momentum": (
        partial(
            FedAvg, 0.1, partial(SGD, momentum=0.9), server=partial(SGD, lr=0.5), keep_state=True
        ),
        reference.fedavg,
        {"lr": 0.1, "momentum": 0.9, "server_lr": 0.5, "keep_state": True},
    ),
    "fedavg-kept-adamw": (
        partial(FedAvg, 0.02, partial(AdamW, weight_decay=0.1), keep_state=True),
        reference.fedavg_adamw,
        {"lr": 0.02, "weight_decay": 0.1, "keep_state": True},
    ),
    "fedavgm": (
        partial(FedAvgM, 0.3, server_lr=0.5, server_momentum=0.8),
        reference.fedavgm,
        {"lr": 0.3, "server_lr": 0.5, "beta": 0.8},
    ),
    "fedavgm-nesterov": (
        partial(FedAvgM, 0.3, server_lr=0.5, server_momentum=0.8, server_nesterov=True),
        reference.fedavgm,
        {"lr": 0.3, "server_lr": 0.5, "beta": 0.8, "server_nesterov": True},
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
    "feddyn-decay": (
        partial(FedDyn, 0.2, alpha=0.3, weight_decay=0.1),
        reference.feddyn,
        {"lr": 0.2, "alpha": 0.3, "population": 5, "weight_decay": 0.1},
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
    "fedcm-decay": (
        partial(FedCM, 0.3, alpha=0.2, weight_decay=0.1),
        reference.fedcm,
        {"lr": 0.3, "alpha": 0.2, "weight_decay": 0.1},
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
    "scaffold-decay": (
        partial(Scaffold, 0.2, weight_decay=0.1),
        reference.scaffold,
        {"lr": 0.2, "population": 5, "weight_decay": 0.1},
        {"control_variates.c": "c"},
    ),
    "scaffold-momentum": (
        partial(Scaffold, 0.1, weight_decay=0.1, momentum=0.8),
        reference.scaffold,
        {"lr": 0.1, "population": 5, "weight_decay": 0.1, "momentum": 0.8},
        {"control_variates.c": "c"},
    ),
    "scaffold-option-i": (
        partial(Scaffold, 0.2, option="I", weight_decay=0.1),
        reference.scaffold,
        {"lr": 0.2, "population": 5, "data": DATA, "weight_decay": 0.1},
        {"control_variates.c": "c"},
    ),
    "mime": (
        partial(Mime, 0.3, beta=0.8, weight_decay=0.05),
        reference.mime,
        {"data": DATA, "lr": 0.3, "beta": 0.8, "weight_decay": 0.05},
        {"global_momentum.momentum": "momentum"},
    ),
    "mime-classic": (
        partial(Mime, 0.1, momentum_form="classic", server=partial(SGD, lr=0.7)),
        reference.mime,
        {"data": DATA, "lr": 0.1, "ema": False, "server_lr": 0.7},
    ),
    "mimelite": (
        partial(MimeLite, 0.3, weight_decay=0.05),
        reference.mimelite,
        {"data": DATA, "lr": 0.3, "weight_decay": 0.05},
        {"global_momentum.momentum": "momentum"},
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
        {"alignment.delta_g": "delta_g", "state_averaging.momentum_buffer": "momentum"},
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
    "fedmuon-not-orthogonal": (
        muon(orthogonalizer="none"),
        reference.fedmuon,
        {**MUON, "orthogonalize": lambda m: m},
        {"alignment.delta_g": "delta_g", "state_averaging.momentum_buffer": "momentum"},
    ),
    "fedmuon-low-rank": (
        muon(momentum_ratio=0.3, weight_decay=0.1),
        reference.fedmuon,
        {**MUON, "ratio": 0.3, "weight_decay": 0.1},
    ),
    "fedmuon-low-rank-feedback": (
        muon(momentum_ratio=0.3, error_feedback=True),
        reference.fedmuon,
        {**MUON, "ratio": 0.3, "error_feedback": True},
    ),
    "fedmuon-rest-sgd": (
        muon(
            weight_decay=0.1,
            rest_lr=0.1,
            rest_optimizer=partial(SGD, momentum=0.8, weight_decay=0.05),
        ),
        reference.fedmuon,
        {**MUON, "rest_lr": 0.1, "weight_decay": 0.1, "rest_sgd": (0.8, 0.05)},
    ),
    "fedmuon-head-in-rest": (
        muon(rest_patterns=["^fc"]),
        reference.fedmuon,
        {**MUON, "matrix": lambda name, p: p.ndim >= 2 and not name.startswith("fc")},
    ),
    "fedpac_adamw": (
        partial(FedPAC, 0.02, partial(AdamW, weight_decay=0.1)),
        reference.fedpac,
        {
            "lr": 0.02,
            "optimizer": reference.adam(),
            "averaged": ("v",),
            "weight_decay": 0.1,
        },
        {"alignment.delta_g": "delta_g", "state_averaging.exp_avg_sq": "v"},
    ),
    "fedpac-server-lr": (
        # Without a large eps, m over a v that has seen one gradient knows no bound.
        partial(FedPAC, 0.02, partial(AdamW, eps=0.1), 0.3, ["exp_avg"], partial(SGD, lr=0.7)),
        reference.fedpac,
        {
            "lr": 0.02,
            "optimizer": reference.adam(eps=0.1),
            "averaged": ("m",),
            "alpha": 0.3,
            "weight_decay": 0.01,
            "server_lr": 0.7,
        },
        {"state_averaging.exp_avg": "m"},
    ),
    "aligned_adamw": (
        partial(FedPAC, 0.02, averaged=["exp_avg", "exp_avg_sq"]),
        reference.fedpac,
        {
            "lr": 0.02,
            "optimizer": reference.adam(),
            "averaged": ("m", "v"),
            "weight_decay": 0.01,
        },
        {"state_averaging.exp_avg": "m", "state_averaging.exp_avg_sq": "v"},
    ),
    "aligned_sgd": (
        partial(FedPAC, 0.1, partial(SGD, momentum=0.95), averaged=["momentum_buffer"]),
        reference.fedpac,
        {"lr": 0.1, "optimizer": reference.heavy_ball(0.95), "averaged": ("momentum",)},
        {"alignment.delta_g": "delta_g", "state_averaging.momentum_buffer": "momentum"},
    ),
    "local_soap": (
        partial(FedAvg, 0.01, partial(SOAP, **SOAPS, weight_decay=0.1)),
        reference.fedpac,
        {
            "lr": 0.01,
            "optimizer": reference.soap(eps=1e-4, frequency=2, longest=4),
            "averaged": (),
            "alpha": 0.0,
            "weight_decay": 0.1,
        },
    ),
    "local-soap-at-once": (
        partial(FedAvg, 0.01, partial(SOAP, **SOAPS, weight_decay=0, skip_first=False)),
        reference.fedpac,
        {
            "lr": 0.01,
            "optimizer": reference.soap(eps=1e-4, frequency=2, longest=4, skip_first=False),
            "averaged": (),
            "alpha": 0.0,
        },
    ),
    "fedpac_soap": (
        partial(FedPAC, 0.01, partial(SOAP, **SOAPS), averaged=["gram"]),
        reference.fedpac,
        {
            "lr": 0.01,
            "optimizer": reference.soap(eps=1e-4, frequency=2, longest=4),
            "averaged": ("gram",),
            "weight_decay": 0.01,
        },
        {"alignment.delta_g": "delta_g"},
    ),
    "fedpac-soap-at-once": (
        partial(
            FedPAC,
            0.01,
            partial(SOAP, **SOAPS, skip_first=False, betas=(0.9, 0.8)),
            averaged=["gram"],
            server=partial(SGD, lr=0.7),
        ),
        reference.fedpac,
        {
            "lr": 0.01,
            "optimizer": reference.soap(
                (0.9, 0.8), eps=1e-4, frequency=2, longest=4, skip_first=False
            ),
            "averaged": ("gram",),
            "weight_decay": 0.01,
            "server_lr": 0.7,
        },
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
    "fedmuon_lmo-without-variates": (
        partial(FedMuonLMO, 0.05, alpha=0.3, control_variates=False, orthogonalizer="svd"),
        reference.fedmuon_lmo,
        {"lr": 0.05, "alpha": 0.3, "population": 5, "control_variates": False},
    ),
    "fedmuon_lmo-fresh": (
        partial(FedMuonLMO, 0.05, keep_momentum=False, control_variates=False, server_lr=0.7),
        reference.fedmuon_lmo,
        {
            "lr": 0.05,
            "population": 5,
            "keep_momentum": False,
            "control_variates": False,
            "server_lr": 0.7,
            "orthogonalize": NEWTON_SCHULZ,
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
        {"alignment.delta_g": "g_a", "state_averaging.max_exp_avg_sq": "v"},
    ),
    "fedlada-adam": (
        partial(FedLADA, 0.02, alpha=0.4, beta1=0.8, beta2=0.95, eps=1e-3, amsgrad=False),
        reference.fedlada,
        {"lr": 0.02, "alpha": 0.4, "betas": (0.8, 0.95), "eps": 1e-3, "amsgrad": False},
        {"state_averaging.exp_avg_sq": "v"},
    ),
    "fedadamw": (
        partial(FedAdamW, 0.02, weight_decay=0.1),
        reference.fedadamw,
        {"lr": 0.02, "weight_decay": 0.1},
        {"alignment.delta_g": "delta", "state_averaging.exp_avg_sq_weight": "v_weight"},
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
        {
            "state_averaging.exp_avg_sq": "v",
            "state_averaging.exp_avg_sq_weight": "v_weight",
        },
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


# A method's options are tried in two settings, which have unequal work, weights by size, a schedule
# and clients side by side between them.
CASES = [
    (name, setting)
    for name in METHODS
    for setting in (("cosine", "side-by-side") if "-" in name else SETTINGS)
]


@pytest.mark.parametrize(("name", "setting"), CASES)
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


def test_torchs_adam_goes_on_with_its_one_count(tmp_path):
    # Its count is a float32 number: exact for equal work.
    averaged = ["exp_avg", "exp_avg_sq"]
    algorithm = FedPAC(0.02, torch.optim.Adam, averaged=averaged)
    recorder, _ = federate(algorithm, DATA, tmp_path, network=X0Net, clients_at_once=3)
    arguments = {"optimizer": reference.adam(), "averaged": ("m", "v")}
    trace = reference.fedpac(X0, GRADIENT, recorder.rounds, lr=0.02, **arguments)
    for ours, theirs in zip(recorder.x, trace.x, strict=True):
        for key in theirs:
            torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("optimizer", "averaged", "message"),
    [
        (AdamW, ["momentum_buffer"], "no local optimiser keeps a state 'momentum_buffer'.*exp_avg"),
        (SGD, ["momentum_buffer"], "no local optimiser keeps a state"),
        (torch.optim.AdamW, ["exp_avg"], r"AdamW cannot start.*without \['exp_avg_sq'\]"),
        # In the eigenbasis of one client it means nothing to another.
        (SOAP, ["exp_avg_sq"], "SOAP cannot start from an averaged 'exp_avg_sq'; it can from exp_"),
        (
            partial(AdamW, amsgrad=True),
            ["max_exp_avg_sq"],
            r"AdamW cannot start from \['max_exp_avg_sq'\] without \['exp_avg_sq'\]",
        ),
        (SOAP, ["basis"], "SOAP cannot start from an averaged 'basis'"),
    ],
)
def test_states_that_cannot_be_averaged(optimizer, averaged, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        federate(FedPAC(0.02, optimizer, averaged=averaged), DATA, tmp_path, network=X0Net)


@pytest.mark.parametrize("averaged", [["exp_avg_sq"], ["exp_avg_sq", "max_exp_avg_sq"]])
def test_the_largest_second_moment_is_divided_by_its_weight(averaged, tmp_path):
    # Every gradient is 1, and so is every step over lr.
    class Constant(Mechanism):
        name = "constant"

        def correct(self, run, gradients):
            for g in gradients:
                g.fill_(1.0)

    amsgrad = partial(AdamW, amsgrad=True, eps=0.0, weight_decay=0.0)
    base = FedPAC(0.1, amsgrad, alpha=0.0, averaged=averaged)
    algorithm = Algorithm(base.local, [Constant(), *base.mechanisms])
    recorder, _ = federate(algorithm, DATA, tmp_path, network=X0Net, local_epochs=1)
    mean = 0.0
    for r, cohort in enumerate(recorder.rounds):
        mean += 0.1 * sum(map(len, cohort.values())) / len(cohort)
        for key, value in recorder.x[r].items():
            torch.testing.assert_close(X0[key] - value, torch.full_like(value, mean))


def test_states_that_one_number_cannot_correct(tmp_path):
    class Groups(TorchRule):
        def build(self, leaves, client_axis):
            groups = [
                {"params": [leaf], "betas": (0.9, beta)}
                for leaf, beta in zip(leaves[:2], (0.9, 0.99), strict=True)
            ]
            rest = {"params": list(leaves[2:])}
            return [Member(AdamW([*groups, rest], lr=self.lr), list(range(len(leaves))))]

    rule = Groups(0.02, AdamW)
    for averaging, message in (
        (
            StateAveraging(rule, ["exp_avg_sq"]),
            "exp_avg_sq_weight differs between parameter groups",
        ),
        (StateAveraging(rule, ["exp_avg_sq"], start=1.0), "start are for optimisers without bias"),
    ):
        with pytest.raises(ValueError, match=message):
            federate(Algorithm(rule, [averaging]), DATA, tmp_path, network=X0Net)


def test_one_client_that_shares_all_states_never_stopped(tmp_path):
    # 4 rounds of 3 steps are 12 steps of torch's AdamW on the same batches.
    algorithm = FedPAC(0.02, alpha=0.0, averaged=["exp_avg", "exp_avg_sq"])
    recorder, _ = federate(algorithm, {0: DATA[0]}, tmp_path, network=X0Net, cohort=1)
    network = X0Net()
    optimizer = torch.optim.AdamW(network.parameters(), 0.02)
    for cohort in recorder.rounds:
        for inputs, labels in cohort[0]:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(inputs), labels).backward()
            optimizer.step()
    for key, value in network.named_parameters():
        torch.testing.assert_close(recorder.x[-1][key], value.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in METHODS if "-" not in name])
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
