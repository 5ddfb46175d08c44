"""Mechanisms that several methods share."""

from collections.abc import Sequence

import torch

from ..clients import Tensors
from .base import LocalRun, Mechanism, Setting, Upload
from .local import MuonRule

__all__ = ["Alignment", "MomentumAveraging", "SecondMomentAveraging"]


class Alignment(Mechanism):
    """Mixes every local step with the shared global direction of the last round.

    A step is ``x <- x - eta [(1 - alpha) O + alpha Delta_g]``, with O the local rule's direction,
    and at the round's end ``Delta_g = -sum_i w_i (x_i^{K_i} - x^r) / sum_k eta_{i,k}`` per
    parameter, from the clients' displacements, never from the server's move (FedMuon,
    arXiv 2510.27403). Delta_g starts at 0, and the first round's steps are scaled by (1 - alpha)
    all the same.

    Args:
        alpha: Weight of the shared direction, in [0, 1).
        only_matrices_of: The local rule, if parameters outside its matrices are to be left alone;
            None to align every parameter.
        shrink: Whether the local direction has the weight (1 - alpha), else 1.

    Raises:
        ValueError: If alpha is outside [0, 1).
    """

    name = "alignment"

    def __init__(
        self, alpha: float, only_matrices_of: MuonRule | None = None, shrink: bool = True
    ) -> None:
        super().__init__()
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha={alpha}: must be in [0, 1)")
        self.alpha = alpha
        self._only = only_matrices_of
        self._shrink = shrink

    def setup(self, setting: Setting) -> None:
        """Sets Delta_g to zero."""
        every = list(range(len(setting.x)))
        self.indices = every if self._only is None else self._only.matrices
        self.server_state = {"delta_g": setting.zeros(self.indices)}

    def local_scale(self, index: int) -> float:
        """(1 - alpha) where the pull acts."""
        return 1 - self.alpha if self._shrink and index in self.indices else 1.0

    def begin(self, run: LocalRun) -> None:
        """The pull of one step, the same for every step of the round."""
        weights = [-self.alpha * run.lr[i] for i in self.indices]
        pull = torch._foreach_mul(self.server_state["delta_g"], weights)
        run.memory[self.name] = [run.x[i] for i in self.indices], pull

    def after_step(self, run: LocalRun) -> None:
        """Subtracts eta alpha Delta_g from the weights."""
        x, pull = run.memory[self.name]
        torch._foreach_add_(x, pull)

    def end(self, run: LocalRun) -> Upload:
        """The clients' directions; the server derives them from the displacements."""
        direction = run.direction()
        return Upload([direction[i] for i in self.indices], sent=False)

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """The new Delta_g."""
        self.replace("delta_g", mean)


class MomentumAveraging(Mechanism):
    """Clients start from the cohort's averaged momentum instead of zero.

    ``M_i^{r,0} = Mbar^r``, and ``Mbar^{r+1} = sum_i w_i M_i^{r,K_i}``, ``Mbar^0 = 0`` (FedMuon,
    arXiv 2510.27403).

    Args:
        rule: The local rule whose matrices carry the momentum.
    """

    name = "momentum_averaging"

    def __init__(self, rule: MuonRule) -> None:
        super().__init__()
        self._rule = rule

    def setup(self, setting: Setting) -> None:
        """Sets Mbar to zero."""
        self.server_state = {"momentum": setting.zeros(self._rule.matrices)}

    def begin(self, run: LocalRun) -> None:
        """M_i^{r,0} = Mbar^r."""
        run.set_state("momentum_buffer", self._rule.matrices, self.server_state["momentum"])

    def end(self, run: LocalRun) -> Upload:
        """M_i^{r,K_i}."""
        return Upload(run.get_state("momentum_buffer", self._rule.matrices))

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """The new Mbar."""
        self.replace("momentum", mean)


class SecondMomentAveraging(Mechanism):
    """Clients start from the cohort's averaged second moment of Adam.

    ``v_i^{r,0} = vbar^r``, and ``vbar^{r+1} = sum_i w_i v_i^{r,K_i}``, or block by block the mean
    of that, one block per parameter.

    Args:
        keys: The local optimiser's names for what starts from vbar; the last of them is sent.
        start: vbar^0, in every element.
        block_means: Whether only the mean of each parameter's elements is sent, both ways.
    """

    name = "second_moment_averaging"

    def __init__(
        self, keys: Sequence[str] = ("exp_avg_sq",), start: float = 0.0, block_means: bool = False
    ) -> None:
        super().__init__()
        self._keys = list(keys)
        self._start = start
        self._block_means = block_means

    def setup(self, setting: Setting) -> None:
        """Sets vbar to its start."""
        shapes = [() if self._block_means else x.shape for x in setting.x]
        filled = [
            x.new_full(s, self._start, requires_grad=False)
            for x, s in zip(setting.x, shapes, strict=True)
        ]
        self.server_state = {"v": filled}

    def begin(self, run: LocalRun) -> None:
        """v_i^{r,0} = vbar^r."""
        for key in self._keys:
            run.set_state(key, range(len(run.x)), self.server_state["v"])

    def end(self, run: LocalRun) -> Upload:
        """v_i^{r,K_i}, or the mean of each of its blocks."""
        v = run.get_state(self._keys[-1], range(len(run.x)))
        return Upload([t.reshape(len(t), -1).mean(1) for t in v] if self._block_means else v)

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """The new vbar."""
        self.replace("v", mean)
