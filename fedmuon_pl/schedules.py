"""Learning-rate schedules: pure functions of the round, so that resuming needs no state."""

import math
from abc import ABC, abstractmethod

__all__ = ["Constant", "Cosine", "Schedule", "StepDecay"]


class Schedule(ABC):
    """The factor on every client learning rate in a round; constant within a round."""

    horizon = False
    """Whether the factor depends on the number of rounds of the whole run."""

    @abstractmethod
    def __call__(self, round: int, rounds: int) -> float:
        """The factor of round ``round`` (0-based) in a run of ``rounds`` rounds."""

    def describe(self) -> dict[str, object]:
        """Name and settings, for the fingerprint of a run."""
        return {"name": type(self).__name__, **vars(self)}


class Constant(Schedule):
    """The same learning rate in every round."""

    def __call__(self, round: int, rounds: int) -> float:
        """Always 1."""
        return 1.0


class Cosine(Schedule):
    """Half a cosine from 1 to ``final`` over the run (Loshchilov & Hutter, arXiv 1608.03983).

    ``final + (1 - final) (1 + cos(pi r / R)) / 2`` at round r; with ``final = 0`` this is the
    schedule of the FedMuon paper's experiments.

    Args:
        final: The factor that round R would have, in [0, 1].

    Raises:
        ValueError: If an argument is out of its range.
    """

    horizon = True

    def __init__(self, final: float = 0.0) -> None:
        if not 0 <= final <= 1:
            raise ValueError(f"Cosine(final={final}): must be in [0, 1]")
        self.final = final

    def __call__(self, round: int, rounds: int) -> float:
        """See the class."""
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * round / rounds))


class StepDecay(Schedule):
    """Multiplies the learning rate by ``factor`` every ``every`` rounds.

    Args:
        every: Rounds between two decays, at least 1.
        factor: What the rate is multiplied by, positive.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(self, every: int, factor: float = 0.5) -> None:
        if every < 1 or factor <= 0:
            raise ValueError(
                f"StepDecay(every={every}, factor={factor}): need every >= 1, factor > 0"
            )
        self.every = every
        self.factor = factor

    def __call__(self, round: int, rounds: int) -> float:
        """``factor ** (round // every)``."""
        return float(self.factor ** (round // self.every))
