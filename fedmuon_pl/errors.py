"""Errors that a user can mend: one clear sentence each, shown by the CLI without a traceback."""

__all__ = ["ConfigError", "FedMuonError", "NonFiniteUpdate", "ProcessLost"]


class FedMuonError(Exception):
    """Base of the project's own errors."""


class ConfigError(FedMuonError, ValueError):
    """Settings that do not make sense, or do not fit each other or a checkpoint."""


class NonFiniteUpdate(FedMuonError, RuntimeError):
    """A client's loss, weights or buffers became infinite or not-a-number."""


class ProcessLost(FedMuonError, RuntimeError):
    """Another process of the run has ended, or cannot be reached any more."""
