"""Mechanisms that several methods share."""

import torch

from ..clients import Tensors
from .base import LocalRun, Mechanism, Setting, Upload
from .local import MuonRule

__all__ = ["Alignment", "CachedAlignment", "MomentumAveraging"]


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

    Raises:
        ValueError: If alpha is outside [0, 1).
    """

    name = "alignment"

    def __init__(self, alpha: float, only_matrices_of: MuonRule | None = None) -> None:
        super().__init__()
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha={alpha}: must be in [0, 1)")
        self.alpha = alpha
        self._only = only_matrices_of

    def setup(self, setting: Setting) -> None:
        """Sets Delta_g to zero."""
        every = list(range(len(setting.x)))
        self.indices = every if self._only is None else self._only.matrices
        self.server_state = {"delta_g": setting.zeros(self.indices)}

    def local_scale(self, index: int) -> float:
        """(1 - alpha) where the pull acts."""
        return 1 - self.alpha if index in self.indices else 1.0

    def begin(self, run: LocalRun) -> None:
        """The pull of one step, the same for every step of the round."""
        weights = [-self.alpha * run.lr[i] for i in self.indices]
        pull = torch._foreach_mul(self.delta_g(run), weights)
        run.memory[self.name] = [run.x[i] for i in self.indices], pull

    def delta_g(self, run: LocalRun) -> Tensors:
        """Delta_g^r as the clients have it."""
        return self.server_state["delta_g"]

    def after_step(self, run: LocalRun) -> None:
        """Subtracts eta alpha Delta_g from the weights."""
        x, pull = run.memory[self.name]
        torch._foreach_add_(x, pull)

    def end(self, run: LocalRun) -> Upload | None:
        """The clients' directions; the server derives them from the displacements."""
        direction = run.direction()
        return Upload([direction[i] for i in self.indices], sent=False)

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """The new Delta_g."""
        self.replace("delta_g", mean)


class CachedAlignment(Alignment):
    """Alignment whose clients derive Delta_g from the x^{r-1} that they kept; it is not sent.

    Under plain averaging of clients that all make K steps, ``x^r - x^{r-1}`` is the mean
    displacement, and so ``Delta_g^r = -(x^r - x^{r-1}) / (K eta_{r-1})``, to rounding. (The reviews
    of arXiv 2510.27403 ask for it; its released code, github.com/junkangLiu0/FedMuon, sends it.)

    What a deployment needs: storage for x^{r-1} on the clients, K and the schedule, and that the
    client took part in round r-1, for only then was it sent x^{r-1}. Every other client of the
    cohort is sent x^{r-1} beside x^r, as many bytes as Delta_g, and saves nothing. Bytes are
    counted so: with all clients in every round Delta_g costs nothing at all, with a tenth of them
    about a tenth of it is saved. (That all clients follow every round's broadcast would not help:
    N downloads a round instead of S.) In round 0 Delta_g is 0 and nobody needs it. A client whose
    update was dropped as not finite counts as one that was not there.

    Args:
        alpha: Weight of the shared direction, in [0, 1).
        only_matrices_of: As in :class:`Alignment`.

    Raises:
        ValueError: If alpha is outside [0, 1); in ``setup``, if K may differ between clients. That
            the server averages plainly is for the caller to see to.
    """

    client_state = ("took_part",)

    def setup(self, setting: Setting) -> None:
        """x^{-1} is nothing, and the sum of its etas 0."""
        super().setup(setting)
        if setting.local_steps is None:
            raise ValueError(
                "send_direction=False needs model.local_steps: with local_epochs clients make "
                "different numbers of steps, and Delta_g cannot be derived from x^r - x^{r-1}"
            )
        self._steps = setting.local_steps
        # On the CPU, since they are read as numbers.
        etas = [torch.zeros((), dtype=torch.float64) for _ in self.indices]
        self.server_state = {"previous": setting.zeros(self.indices), "sum_eta": etas}

    def client_state_like(self, name: str, setting: Setting) -> Tensors:
        """The client's last round, counted from 1."""
        return [torch.zeros((), dtype=torch.int64)]

    def begin(self, run: LocalRun) -> None:
        """Also finds out who holds x^{r-1}."""
        super().begin(run)
        (last,) = run.client_state["took_part"]
        self._behind = int((last != run.round).sum())
        self._x0, self._lr = run.x0, run.lr

    def delta_g(self, run: LocalRun) -> Tensors:
        """-(x^r - x^{r-1}) / (K eta_{r-1}), and 0 where eta was 0."""
        moved = torch._foreach_sub([run.x0[i] for i in self.indices], self.server_state["previous"])
        inverse = [-1 / float(s) if s > 0 else 0.0 for s in self.server_state["sum_eta"]]
        return list(torch._foreach_mul(moved, inverse))

    def download(self) -> Tensors:
        """x^{r-1}."""
        return self.server_state["previous"]

    def receivers(self, run: LocalRun) -> int:
        """The clients that did not take part in round r-1."""
        return self._behind

    def end(self, run: LocalRun) -> None:
        """Nothing to send; the clients keep x^r."""
        (last,) = run.client_state["took_part"]
        run.client_state["took_part"] = [torch.full_like(last, run.round + 1)]

    def server_direction(self, displacement: Tensors) -> Tensors:
        """Keeps x^r, which will be the x^{r-1} of the next round."""
        self.replace("previous", [self._x0[i] for i in self.indices])
        etas = [self._steps * self._lr[i] for i in self.indices]
        self.replace("sum_eta", [torch.tensor(eta, dtype=torch.float64) for eta in etas])
        return displacement


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
