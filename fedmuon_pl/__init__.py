"""Federated optimisation on PyTorch Lightning, with FedMuon at its heart."""

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "Algorithm": "algorithms",
    "FedACG": "algorithms",
    "FedAdagrad": "algorithms",
    "FedAdam": "algorithms",
    "FedAdamW": "algorithms",
    "FedAvg": "algorithms",
    "FedAvgM": "algorithms",
    "FedBN": "algorithms",
    "FedCM": "algorithms",
    "FedDyn": "algorithms",
    "FedLADA": "algorithms",
    "FedMuon": "algorithms",
    "FedMuonLMO": "algorithms",
    "FedNova": "algorithms",
    "FedPAC": "algorithms",
    "FedProx": "algorithms",
    "FedYogi": "algorithms",
    "LocalMuon": "algorithms",
    "Mime": "algorithms",
    "MimeLite": "algorithms",
    "MuLoCo": "algorithms",
    "Scaffold": "algorithms",
    "ServerMuon": "algorithms",
    "Classification": "tasks",
    "LanguageModelling": "tasks",
    "Task": "tasks",
    "FederatedModule": "module",
    "FederatedServer": "server",
    "PersonalEvaluation": "server",
    "FederatedDataModule": "data.datamodule",
    "Splits": "data.datamodule",
    "FashionMNIST": "data.fashion",
    "MNIST5k": "data.digits",
    "SklearnDigits": "data.digits",
    "IID": "data.partition",
    "DirichletByClass": "data.partition",
    "DirichletByClient": "data.partition",
    "AdamW": "optim.adamw",
    "Muon": "optim.muon",
    "SOAP": "optim.soap",
}

__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Imports a public name when it is asked for: the command line starts without torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
