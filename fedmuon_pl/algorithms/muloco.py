"""MuLoCo: DiLoCo with Muon as the inner optimiser."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch

from ..optim.adamw import AdamW
from ..optim.muon import Scale
from ..optim.orthogonalize import Orthogonalizer
from .base import Algorithm
from .fedmuon import DType, Method
from .kept_state import KeptState
from .local import MuonRule, below_one, positive

__all__ = ["MuLoCo"]


class MuLoCo(Algorithm):
    """MuLoCo (Therien et al., arXiv 2505.23725): local Muon, Nesterov SGD on the server.

    With psi minus the mean displacement: ``u <- server_momentum u + psi``,
    ``x <- x - server_lr (psi + server_momentum u)``, the outer step of DiLoCo (Douillard et al.,
    arXiv 2311.08105), whose rates are 0.7 and 0.9. The inner optimiser is Muon on the matrices and
    AdamW on the rest. A worker keeps its inner state from round to round, only its weights are
    replaced; ``keep_state=False`` starts it anew, for clients that cannot keep any.

    The defaults are those of the authors' code for two workers (github.com/facebookresearch/MuLoCo,
    torchtitan/config/diloco/2x_4gpu_muloco.py). Its outer rates grow with the workers: 0.7 and 0.6
    for one, 0.9 and 0.8 for two, 1.0 and 0.9 for sixteen. Not default here: it decays weights, by
    an amount that follows the number of steps; its Newton-Schulz has other coefficients in each of
    five iterations; and heads and embeddings belong to its rest (``rest_patterns``). Their
    single-worker package (github.com/bentherien/muloco-1) takes beta 0.95 and rest_betas
    (0.9, 0.95).

    Args:
        lr: eta of the matrices.
        rest_lr: eta of the rest; None for ``lr``, as in the authors' code.
        beta: Momentum of the inner Muon.
        nesterov: Whether the inner Muon looks ahead.
        momentum_form: ``"classic"`` or ``"ema"``.
        orthogonalizer: ``"newton_schulz"``, ``"polar_express"`` or ``"svd"``.
        ns_steps: Iterations of the first two.
        ns_coefficients: Of Newton-Schulz; the quintic of Jordan et al. if None.
        ns_dtype: What the iteration is computed in; the weights' own if None.
        scale: Step scale of a matrix; the authors' ``spectral_norm`` is ``"operator"``,
            sqrt(rows / cols).
        weight_decay: Decoupled, matrices and rest.
        rest_betas: AdamW's betas for the rest.
        rest_eps: AdamW's epsilon for the rest.
        rest_patterns: Names of matrices that belong to the rest.
        server_lr: Outer learning rate.
        server_momentum: Outer momentum.
        server_nesterov: Whether the outer momentum is Nesterov's.
        keep_state: Whether clients keep the inner optimiser's state.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        rest_lr: float | None = None,
        beta: float = 0.9,
        nesterov: bool = False,
        momentum_form: Literal["classic", "ema"] = "classic",
        orthogonalizer: Method = "newton_schulz",
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] | None = None,
        ns_dtype: DType | None = None,
        scale: Scale = "operator",
        weight_decay: float = 0.0,
        rest_betas: tuple[float, float] = (0.9, 0.99),
        rest_eps: float = 1e-8,
        rest_patterns: Sequence[str] = (),
        server_lr: float = 0.9,
        server_momentum: float = 0.8,
        server_nesterov: bool = True,
        keep_state: bool = True,
    ) -> None:
        rule = MuonRule(
            lr=lr,
            rest_lr=lr if rest_lr is None else rest_lr,
            beta=beta,
            nesterov=nesterov,
            momentum_form=momentum_form,
            orthogonalizer=Orthogonalizer(
                orthogonalizer, steps=ns_steps, coefficients=ns_coefficients, dtype=ns_dtype
            ),
            scale=scale,
            weight_decay=weight_decay,
            rest_patterns=rest_patterns,
            rest_optimizer=partial(
                AdamW, betas=rest_betas, eps=rest_eps, weight_decay=weight_decay
            ),
        )
        outer = partial(
            torch.optim.SGD,
            lr=positive("server_lr", server_lr),
            momentum=below_one("server_momentum", server_momentum),
            nesterov=server_nesterov,
        )
        super().__init__(rule, [KeptState(rule)] if keep_state else [], outer)
