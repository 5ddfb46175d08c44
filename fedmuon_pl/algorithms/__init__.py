"""Federated methods, one file each; :mod:`fedmuon_pl.algorithms.base` is their interface."""

from .base import Algorithm
from .fedacg import FedACG
from .fedavg import FedAvg
from .fedbn import FedBN
from .fedcm import FedCM
from .feddyn import FedDyn
from .fedmuon import FedMuon, LocalMuon
from .fednova import FedNova
from .fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from .fedprox import FedProx
from .scaffold import Scaffold

__all__ = [
    "Algorithm",
    "FedACG",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedCM",
    "FedDyn",
    "FedMuon",
    "FedNova",
    "FedProx",
    "FedYogi",
    "LocalMuon",
    "Scaffold",
]
