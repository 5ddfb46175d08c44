"""FedMuon and Local Muon: orthogonalised momentum on the clients."""

from collections.abc import Sequence
from typing import Literal

from ..optim.orthogonalize import Orthogonalizer
from .base import Algorithm, ServerRule
from .local import MuonRule
from .mechanisms import Alignment, StateAveraging

__all__ = ["FedMuon", "LocalMuon"]

Method = Literal["newton_schulz", "polar_express", "svd", "none"]
DType = Literal["float32", "bfloat16", "float64"]


class FedMuon(Algorithm):
    """FedMuon (Liu et al., "FedMuon", arXiv 2510.27403, Algorithm 2).

    For a matrix-shaped parameter x, client i, round r, K times::

        M_i^{r,k}   = beta M_i^{r,k-1} + g_i^{r,k}             M_i^{r,0} = Mbar^r
        O           = U V^T of M_i^{r,k}
        x_i^{r,k+1} = x_i^{r,k} - eta [(1 - alpha) O + alpha Delta_g^r]

    and at the round's end, with the clients' weights w_i::

        Delta_g^{r+1} = -sum_i w_i (x_i^{r,K} - x^r) / (K eta)
        x^{r+1}       = x^r + sum_i w_i (x_i^{r,K} - x^r)
        Mbar^{r+1}    = sum_i w_i M_i^{r,K}

    The rest (biases, gains of norms) takes AdamW directions, its state reset every round, with its
    own rate in the same formula, (1 - alpha) and Delta_g included. Orthogonalisation, alignment
    and momentum averaging are three independent switches: ``alpha=0, average_momentum=False`` is
    Local Muon, and ``orthogonalizer="none"`` makes its steps SGD's with momentum. The defaults are
    the paper's equations; the paper's released code departs from them (EMA momentum, Nesterov,
    ``scale="spectral"`` without flattening convolutions).

    Args:
        lr: eta of the matrices.
        rest_lr: eta of the rest.
        alpha: Weight of the shared direction Delta_g, in [0, 1).
        beta: Momentum.
        average_momentum: Whether clients start from the averaged momentum, else from zero.
        nesterov: Whether the orthogonalised matrix looks ahead: g + beta M.
        momentum_form: ``"classic"`` as above, or ``"ema"``: beta M + (1 - beta) g.
        orthogonalizer: ``"newton_schulz"``, ``"polar_express"`` (arXiv 2505.16932), ``"svd"``, or
            ``"none"``: O = M, which leaves SGD with momentum in FedMuon's frame.
        ns_steps: Iterations of the first two.
        ns_coefficients: Of Newton-Schulz; the quintic of Jordan et al. if None.
        ns_dtype: What the iteration is computed in; the weights' own if None.
        scale: Step scale of a matrix (rows x cols, convolutions flattened): ``"none"``,
            ``"spectral"`` sqrt(max(1, rows/cols)), ``"rms"`` 0.2 sqrt(max(rows, cols)).
        align_rest: Whether Delta_g also pulls the rest; if not, the rest takes full steps.
        weight_decay: Decoupled; x shrinks by (1 - alpha) eta weight_decay a step.
        rest_betas: AdamW's betas for the rest.
        rest_eps: AdamW's epsilon for the rest.
        rest_patterns: Regular expressions of names of matrices that belong to the rest, such as
            embeddings and heads.
        server: Server rule on the pseudo-gradient; plain averaging if None.
    """

    def __init__(
        self,
        lr: float,
        rest_lr: float = 1e-3,
        alpha: float = 0.5,
        beta: float = 0.95,
        average_momentum: bool = True,
        nesterov: bool = False,
        momentum_form: Literal["classic", "ema"] = "classic",
        orthogonalizer: Method = "newton_schulz",
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] | None = None,
        ns_dtype: DType | None = None,
        scale: Literal["none", "spectral", "rms"] = "none",
        align_rest: bool = True,
        weight_decay: float = 0.0,
        rest_betas: tuple[float, float] = (0.9, 0.95),
        rest_eps: float = 1e-10,
        rest_patterns: Sequence[str] = (),
        server: ServerRule | None = None,
    ) -> None:
        rule = MuonRule(
            lr=lr,
            rest_lr=rest_lr,
            beta=beta,
            nesterov=nesterov,
            momentum_form=momentum_form,
            orthogonalizer=Orthogonalizer(
                orthogonalizer, steps=ns_steps, coefficients=ns_coefficients, dtype=ns_dtype
            ),
            scale=scale,
            weight_decay=weight_decay,
            rest_betas=rest_betas,
            rest_eps=rest_eps,
            rest_patterns=rest_patterns,
        )
        # alpha = 0 needs no mechanism: nothing is sent, and the steps are the plain ones.
        align = [Alignment(alpha, None if align_rest else rule)] if alpha != 0 else []
        average = [StateAveraging(rule, ["momentum_buffer"])] if average_momentum else []
        super().__init__(rule, [*align, *average], server)


class LocalMuon(FedMuon):
    """Local Muon: Muon on every client from zero momentum, then the mean.

    FedMuon without alignment and momentum averaging; the baseline of arXiv 2510.27403. See
    :class:`FedMuon` for the arguments.

    Args:
        lr: eta of the matrices.
        rest_lr: eta of the rest.
        beta: Momentum.
        nesterov: Whether the orthogonalised matrix looks ahead.
        momentum_form: ``"classic"`` or ``"ema"``.
        orthogonalizer: ``"newton_schulz"``, ``"polar_express"``, ``"svd"`` or ``"none"``.
        ns_steps: Iterations of the first two.
        ns_coefficients: Of Newton-Schulz; the quintic of Jordan et al. if None.
        ns_dtype: What the iteration is computed in; the weights' own if None.
        scale: Step scale of a matrix.
        weight_decay: Decoupled.
        rest_betas: AdamW's betas for the rest.
        rest_eps: AdamW's epsilon for the rest.
        rest_patterns: Names of matrices that belong to the rest.
        server: Server rule on the pseudo-gradient; plain averaging if None.
    """

    def __init__(
        self,
        lr: float,
        rest_lr: float = 1e-3,
        beta: float = 0.95,
        nesterov: bool = False,
        momentum_form: Literal["classic", "ema"] = "classic",
        orthogonalizer: Method = "newton_schulz",
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] | None = None,
        ns_dtype: DType | None = None,
        scale: Literal["none", "spectral", "rms"] = "none",
        weight_decay: float = 0.0,
        rest_betas: tuple[float, float] = (0.9, 0.95),
        rest_eps: float = 1e-10,
        rest_patterns: Sequence[str] = (),
        server: ServerRule | None = None,
    ) -> None:
        super().__init__(
            lr=lr,
            rest_lr=rest_lr,
            alpha=0.0,
            beta=beta,
            average_momentum=False,
            nesterov=nesterov,
            momentum_form=momentum_form,
            orthogonalizer=orthogonalizer,
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
            ns_dtype=ns_dtype,
            scale=scale,
            weight_decay=weight_decay,
            rest_betas=rest_betas,
            rest_eps=rest_eps,
            rest_patterns=rest_patterns,
            server=server,
        )
