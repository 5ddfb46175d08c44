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
    "ClientParallel": "parallel",
    "FederatedServer": "server",
    "PersonalEvaluation": "server",
    "FederatedDataModule": "data.datamodule",
    "Splits": "data.datamodule",
    "ImageDataModule": "data.images",
    "CIFAR10": "data.cifar",
    "CIFAR100": "data.cifar",
    "EMNIST": "data.emnist",
    "FashionMNIST": "data.fashion",
    "ImageFolder": "data.folders",
    "MNIST5k": "data.digits",
    "Npz": "data.npz",
    "SVHN": "data.svhn",
    "SklearnDigits": "data.digits",
    "TinyImageNet": "data.folders",
    "ClassesPerClient": "data.label_skew",
    "DirichletByClass": "data.partition",
    "DirichletByClient": "data.partition",
    "AdamW": "optim.adamw",
    "DirichletLMO": "data.label_skew",
    "DirichletReleasedCode": "data.label_skew",
    "IID": "data.partition",
    "Natural": "data.size_skew",
    "QuantitySkew": "data.size_skew",
    "Shards": "data.label_skew",
    "ChannelGain": "data.feature_skew",
    "CropFlip": "data.augment",
    "Rotation": "data.feature_skew",
    "Muon": "optim.muon",
    "SOAP": "optim.soap",
}

__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Imports a public name when it is asked for: the command line starts without torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
