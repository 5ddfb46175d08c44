"""FedMuon and Local Muon: orthogonalised momentum on the clients."""

from collections.abc import Sequence
from typing import Literal

from ..optim.muon import Scale
from ..optim.orthogonalize import MatrixView, Orthogonalizer
from .base import Algorithm, Mechanism, ServerRule
from .local import MuonRule, OptimizerFactory
from .lowrank import LowRankMomentumAveraging
from .mechanisms import Alignment, CachedAlignment, StateAveraging

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
    the paper's equations; the paper's released code departs from them
    (github.com/junkangLiu0/FedMuon): ``configs/algorithm/fedmuon_official.yaml`` is that.
    Two more options save traffic: ``momentum_ratio``
    (:class:`~fedmuon_pl.algorithms.lowrank.LowRankMomentumAveraging`, ``fedmuon_lowrank.yaml``) and
    ``send_direction`` (:class:`~fedmuon_pl.algorithms.mechanisms.CachedAlignment`,
    ``fedmuon_cached.yaml``).

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
        ns_eps: Added to the Frobenius norm that the iteration divides by.
        svd_rtol: Singular values below this share of the largest give 0, for ``"svd"`` only; 1e-10
            in float64 and 1e-5 in float32 if None.
        scale: Step scale of a matrix (rows x cols, convolutions flattened): ``"none"``,
            ``"spectral"`` sqrt(max(1, rows/cols)), ``"rms"`` 0.2 sqrt(max(rows, cols)), or
            ``"spectral_unflattened"``, the released code's: ``"spectral"`` with a convolution's
            rows and cols read from its kernel's sides.
        matrix_view: Tensors of three, five or more axes: ``"flatten"``, the first axis against all
            others but (1, tokens, width) as tokens x width, or ``"last_two"``, the released code's:
            a batch of matrices of the last two.
        align_rest: Whether Delta_g also pulls the rest; if not, the rest takes full steps.
        weight_decay: Decoupled; x shrinks by (1 - alpha) eta weight_decay a step. With
            ``rest_optimizer`` of the matrices only.
        rest_optimizer: Optimiser of the rest with its own weight decay, such as SGD with momentum;
            AdamW if None. ``rest_lr`` sets its rate.
        rest_betas: AdamW's betas for the rest.
        rest_eps: AdamW's epsilon for the rest.
        rest_patterns: Regular expressions of names of matrices that belong to the rest, such as
            embeddings and heads.
        matrix_patterns: If there are any, only what matches one of these is a matrix.
        momentum_ratio: Share of its size at which averaged momentum is sent, up and down, as
            low-rank factors; whole if None.
        error_feedback: Whether what the factors lose is added to the next ones.
        send_direction: Whether Delta_g is sent; if not, clients derive it from the x^{r-1} that
            they kept, which takes equal local steps and plain averaging.
        server: Server rule on the pseudo-gradient; plain averaging if None.

    Raises:
        ValueError: If an argument is out of range, or would be ignored for another one.
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
        ns_eps: float = 1e-7,
        svd_rtol: float | None = None,
        scale: Scale = "none",
        matrix_view: MatrixView = "flatten",
        align_rest: bool = True,
        weight_decay: float = 0.0,
        rest_optimizer: OptimizerFactory | None = None,
        rest_betas: tuple[float, float] = (0.9, 0.95),
        rest_eps: float = 1e-10,
        rest_patterns: Sequence[str] = (),
        matrix_patterns: Sequence[str] = (),
        momentum_ratio: float | None = None,
        error_feedback: bool = False,
        send_direction: bool = True,
        server: ServerRule | None = None,
    ) -> None:
        if momentum_ratio is not None and not average_momentum:
            raise ValueError(
                f"momentum_ratio={momentum_ratio}: no momentum is sent with average_momentum=False"
            )
        if error_feedback and momentum_ratio is None:
            raise ValueError("error_feedback=True: nothing is lost without a momentum_ratio")
        if not send_direction and server is not None:
            raise ValueError(
                "send_direction=False needs plain averaging (server: null): under another server "
                "rule Delta_g cannot be derived from x^r - x^{r-1}"
            )
        rule = MuonRule(
            lr=lr,
            rest_lr=rest_lr,
            beta=beta,
            nesterov=nesterov,
            momentum_form=momentum_form,
            orthogonalizer=Orthogonalizer(
                orthogonalizer,
                steps=ns_steps,
                coefficients=ns_coefficients,
                dtype=ns_dtype,
                rtol=svd_rtol,
                eps=ns_eps,
            ),
            scale=scale,
            matrix_view=matrix_view,
            weight_decay=weight_decay,
            rest_optimizer=rest_optimizer,
            rest_betas=rest_betas,
            rest_eps=rest_eps,
            rest_patterns=rest_patterns,
            matrix_patterns=matrix_patterns,
        )
        mechanisms: list[Mechanism] = []
        if alpha != 0:  # else nothing is sent, and the steps are the plain ones
            kind = Alignment if send_direction else CachedAlignment
            mechanisms.append(kind(alpha, None if align_rest else rule))
        if momentum_ratio is not None:
            mechanisms.append(LowRankMomentumAveraging(rule, momentum_ratio, error_feedback))
        elif average_momentum:
            mechanisms.append(StateAveraging(rule, ["momentum_buffer"], only_matrices_of=rule))
        super().__init__(rule, mechanisms, server)


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
        ns_eps: Added to the Frobenius norm that the iteration divides by.
        svd_rtol: Relative cut of singular values, for ``"svd"`` only; 0 for none.
        scale: Step scale of a matrix.
        matrix_view: How tensors of three, five or more axes are read.
        weight_decay: Decoupled.
        rest_optimizer: Optimiser of the rest; AdamW if None.
        rest_betas: AdamW's betas for the rest.
        rest_eps: AdamW's epsilon for the rest.
        rest_patterns: Names of matrices that belong to the rest.
        matrix_patterns: If there are any, only what matches one of these is a matrix.
        server: Server rule on the pseudo-gradient; plain averaging if None.

    Raises:
        ValueError: If an argument is out of its range.
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
        ns_eps: float = 1e-7,
        svd_rtol: float | None = None,
        scale: Scale = "none",
        matrix_view: MatrixView = "flatten",
        weight_decay: float = 0.0,
        rest_optimizer: OptimizerFactory | None = None,
        rest_betas: tuple[float, float] = (0.9, 0.95),
        rest_eps: float = 1e-10,
        rest_patterns: Sequence[str] = (),
        matrix_patterns: Sequence[str] = (),
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
            ns_eps=ns_eps,
            svd_rtol=svd_rtol,
            scale=scale,
            matrix_view=matrix_view,
            weight_decay=weight_decay,
            rest_optimizer=rest_optimizer,
            rest_betas=rest_betas,
            rest_eps=rest_eps,
            rest_patterns=rest_patterns,
            matrix_patterns=matrix_patterns,
            server=server,
        )
