"""Federated methods, one file each; :mod:`fedmuon_pl.algorithms.base` is their interface."""

from .base import Algorithm
from .fedacg import FedACG
from .fedadamw import FedAdamW
from .fedavg import FedAvg
from .fedbn import FedBN
from .fedcm import FedCM
from .feddyn import FedDyn
from .fedlada import FedLADA
from .fedmuon import FedMuon, LocalMuon
from .fedmuon_lmo import FedMuonLMO
from .fednova import FedNova
from .fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from .fedpac import FedPAC
from .fedprox import FedProx
from .mime import Mime, MimeLite
from .muloco import MuLoCo
from .scaffold import Scaffold
from .server_muon import ServerMuon

__all__ = [
    "Algorithm",
    "FedACG",
    "FedAdagrad",
    "FedAdam",
    "FedAdamW",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedCM",
    "FedDyn",
    "FedLADA",
    "FedMuon",
    "FedMuonLMO",
    "FedNova",
    "FedPAC",
    "FedProx",
    "FedYogi",
    "LocalMuon",
    "Mime",
    "MimeLite",
    "MuLoCo",
    "Scaffold",
    "ServerMuon",
]
