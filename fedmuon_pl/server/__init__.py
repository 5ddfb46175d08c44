"""The server's side of a round, as Lightning callbacks."""

from .callback import FederatedServer
from .roundlog import RoundLog

__all__ = ["FederatedServer", "RoundLog"]
