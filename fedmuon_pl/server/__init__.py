"""The server's side of a round, as Lightning callbacks."""

from .callback import FederatedServer
from .personal import PersonalEvaluation
from .roundlog import RoundLog

__all__ = ["FederatedServer", "PersonalEvaluation", "RoundLog"]
