"""The FedMuon of Takezawa et al.: control variates in front of the orthogonalisation."""

from collections.abc import Sequence

import torch

from ..clients import Tensors
from ..optim.muon import Scale
from ..optim.orthogonalize import Orthogonalizer
from .base import Algorithm, LocalRun, Mechanism, Setting, Upload
from .fedmuon import DType, Method
from .kept_state import KeptState
from .local import LMORule, positive

__all__ = ["FedMuonLMO", "MomentumVariates", "ServerShare"]


class MomentumVariates(Mechanism):
    """The control variates C (server) and C_i (client) of the momentum.

    The local rule's momentum M_i is corrected by C - C_i in every step; after the last one
    ``C_i <- M_i``, and the server adds ``(1/n) sum_{i in S} (C_i^+ - C_i)``, n clients in all,
    never weighted by size. All start at 0.

    Args:
        keep_momentum: Whether M_i goes on where it ended, which is C_i, else starts from 0.
    """

    name = "momentum_variates"
    client_state = ("c_i",)

    def __init__(self, keep_momentum: bool) -> None:
        super().__init__()
        self.keep_momentum = keep_momentum

    def setup(self, setting: Setting) -> None:
        """Sets C to zero."""
        self.population = setting.population
        self.server_state = {"c": setting.zeros()}

    def begin(self, run: LocalRun) -> None:
        """Places C - C_i, and M_i if it is kept."""
        every, c_i = range(len(run.x)), run.client_state["c_i"]
        correction = torch._foreach_neg(c_i)
        torch._foreach_add_(correction, self.server_state["c"])
        run.set_state("correction", every, correction, per_client=True)
        if self.keep_momentum:
            run.set_state("momentum_buffer", every, c_i, per_client=True)

    def end(self, run: LocalRun) -> Upload:
        """The change of C_i; the new C_i stays with the client."""
        momentum = run.get_state("momentum_buffer", range(len(run.x)))
        change = list(torch._foreach_sub(momentum, run.client_state["c_i"]))
        run.client_state["c_i"] = momentum
        return Upload(change, by_weight=False)

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """Adds (S/n) times the mean change to C."""
        share = cohort_size / self.population
        for c, m in zip(self.server_state["c"], mean, strict=True):
            c.add_(m * share)


class ServerShare(Mechanism):
    """The server moves by S/n of the mean displacement: who was not sampled has not moved.

    Args:
        server_lr: In the place of S/n; None for S/n.
    """

    name = "server_share"

    def __init__(self, server_lr: float | None) -> None:
        super().__init__()
        self.server_lr = None if server_lr is None else positive("server_lr", server_lr)

    def setup(self, setting: Setting) -> None:
        """Learns n."""
        self.population = setting.population

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """Learns S."""
        share = cohort_size / self.population
        self._rate = share if self.server_lr is None else self.server_lr

    def server_direction(self, displacement: Tensors) -> Tensors:
        """S/n of the mean displacement."""
        return [d * self._rate for d in displacement]


class FedMuonLMO(Algorithm):
    """FedMuon with bias-corrected LMO (Takezawa et al., arXiv 2509.26337, Algorithm 1).

    A method of its own; :class:`~fedmuon_pl.FedMuon` is that of arXiv 2510.27403. A local step::

        M_i <- (1 - alpha) M_i + alpha g
        x   <- x + eta lmo(M_i - C_i + C)

    with ``lmo(G) = -U V^T`` for a matrix and ``-G / ||G||_2`` for other tensors; see
    :class:`MomentumVariates` for C and C_i, :class:`ServerShare` for the server. A client's first
    local step in every round thus follows an estimate of the mean momentum. Clients keep state: it
    is for few clients that come back often. Without ``control_variates`` C_i and C stay
    0: the Local Muon of the public reproduction below.

    Checked against a public reproduction (github.com/HiraNayak/FedMuon), which keeps M_i between
    the rounds, takes the exact polar factor and alpha = 0.9.

    Args:
        lr: eta, of every parameter.
        alpha: Weight of the newest gradient, in (0, 1].
        keep_momentum: Whether M_i goes on where it ended in the client's last round.
        control_variates: Whether C - C_i is added.
        server_lr: Rate of the server on the mean displacement; None for the paper's S/n.
        orthogonalizer: ``"newton_schulz"``, ``"polar_express"`` or ``"svd"``.
        ns_steps: Iterations T of the first two; 0 is ``-G / ||G||_F``.
        ns_coefficients: Of Newton-Schulz; the quintic of Jordan et al. if None.
        ns_dtype: What the iteration is computed in; the weights' own if None.
        svd_rtol: Singular values below this share of the largest give 0, for ``"svd"`` only; None
            and 0 as in :func:`fedmuon_pl.optim.orthogonalize.polar_svd`. With 0 a step is not the
            same on another machine or side by side.
        scale: Step scale of a matrix, ours; the paper has ``"none"``.
        rest_patterns: Names of matrices that are treated as vectors.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        alpha: float = 0.1,
        keep_momentum: bool = True,
        control_variates: bool = True,
        server_lr: float | None = None,
        orthogonalizer: Method = "newton_schulz",
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] | None = None,
        ns_dtype: DType | None = None,
        svd_rtol: float | None = None,
        scale: Scale = "none",
        rest_patterns: Sequence[str] = (),
    ) -> None:
        lmo = Orthogonalizer(
            orthogonalizer,
            steps=ns_steps,
            coefficients=ns_coefficients,
            dtype=ns_dtype,
            rtol=svd_rtol,
        )
        rule = LMORule(lr, alpha, lmo, scale, rest_patterns)
        mechanisms: list[Mechanism] = []
        if control_variates:
            mechanisms.append(MomentumVariates(keep_momentum))
        elif keep_momentum:
            mechanisms.append(KeptState(rule))
        super().__init__(rule, [*mechanisms, ServerShare(server_lr)])
