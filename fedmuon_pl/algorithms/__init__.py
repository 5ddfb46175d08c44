"""Federated methods, one file each; :mod:`fedmuon_pl.algorithms.base` is their interface."""

from .base import Algorithm
from .fedadam import FedAdam
from .fedavg import FedAvg
from .fedmuon import FedMuon, LocalMuon
from .scaffold import Scaffold

__all__ = ["Algorithm", "FedAdam", "FedAvg", "FedMuon", "LocalMuon", "Scaffold"]
