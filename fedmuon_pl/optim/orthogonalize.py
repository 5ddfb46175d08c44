"""Orthogonalisation of matrices: Newton-Schulz, Polar Express and the exact polar factor.

Every function takes matrices of shape ``(..., rows, cols)``; the leading axes are a batch (clients,
or parameters of one shape) whose members never mix. With the singular value decomposition
``M = U diag(s) V^T``, each of them returns ``U diag(f(s)) V^T``; the exact polar factor has f = 1.

Measured: the range of f over singular values s of at least 0.01 and 0.001 times the Frobenius norm,
and the largest spectral norm of the difference between a float32 or bfloat16 run and the float64
run of the same method, over random, rank 8 and ill-conditioned (1e4) matrices of 10 to 120 rows:

=================  ============  ============  =======  ========
method, steps      s >= 0.01     s >= 0.001    float32  bfloat16
=================  ============  ============  =======  ========
newton_schulz, 5   0.68 to 1.13  0.47 to 1.20  1e-3     0.5
newton_schulz, 10  0.68 to 1.13  0.68 to 1.13
polar_express, 5   0.87 to 1.12  0.85 to 1.12  2e-4     0.8
polar_express, 8   1 +- 1e-15    1 +- 2e-15    2e-4     1.2
svd                1             1             1e-3
=================  ============  ============  =======  ========

The iterations' float32 errors lie almost wholly in directions with s near 0, which are lifted along
with their rounding; entry by entry they stay below 5e-5. That of svd grows as 1 / smallest s kept.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NoReturn, cast

import torch
from torch import Tensor

from fedmuon_pl.optim.polynomials import POLAR_EXPRESS, QUINTIC, Triple

__all__ = [
    "MatrixView",
    "Orthogonalizer",
    "as_matrix",
    "autocast_off",
    "newton_schulz",
    "polar_svd",
    "symmetric_product",
]

MatrixView = Literal["flatten", "last_two"]
"""How a tensor of more than 2 axes is read, see :func:`as_matrix`."""


def autocast_off(device_type: str) -> contextlib.AbstractContextManager[object]:
    """A context without autocast; free of cost where autocast is not on (the usual case)."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def newton_schulz(
    matrix: Tensor,
    steps: int = 5,
    coefficients: Triple | Sequence[Triple] = QUINTIC,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Approximate polar factor by X <- a X + b (X X^T) X + c (X X^T)^2 X.

    X starts as ``matrix`` divided by its own Frobenius norm, so that all singular values lie in
    [0, 1], and each step applies the odd polynomial (a, b, c) to them. Zero gives zero. A norm
    near ``eps`` or below starts the iteration lower and so gives a smaller result.

    Args:
        matrix: Shape ``(..., rows, cols)``; leading axes are a batch.
        steps: Number of iterations; 0 only divides by the norm.
        coefficients: One (a, b, c) for every step, or a sequence of them: step t uses the t-th,
            and the last is repeated.
        eps: Added to the norm.
        dtype: What the iteration is computed in; the input's own where None. On CUDA, float32
            products follow ``torch.backends.cuda.matmul``, which by default does not use TF32.

    Returns:
        Same shape and dtype as ``matrix``.

    Raises:
        ValueError: If ``matrix`` has fewer than 2 axes, or ``steps`` is below 0.

    Source: Jordan et al., Muon (2024); N. Higham, Functions of Matrices (2008), chapter 8.
    """
    if matrix.ndim < 2 or steps < 0:
        raise ValueError(
            "newton_schulz needs a tensor of 2 or more axes and steps >= 0, got shape "
            f"{tuple(matrix.shape)} and steps={steps}"
        )
    if matrix.numel() == 0:
        return matrix.clone()
    single = isinstance(coefficients[0], float | int)
    triples = [cast(Triple, coefficients)] if single else cast(Sequence[Triple], coefficients)
    schedule = [triples[min(t, len(triples) - 1)] for t in range(steps)]
    with autocast_off(matrix.device.type):
        x = _one_batch_axis(matrix if dtype is None else matrix.to(dtype))
        tall = x.shape[-2] > x.shape[-1]
        if tall:  # the products X X^T then have the smaller side
            x = x.mT
        x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + eps)
        x = _iterate_gram(x, schedule) if steps and _gram_pays(x) else _iterate(x, schedule)
        if tall:
            x = x.mT
        return x.reshape(matrix.shape).to(matrix.dtype)


def _one_batch_axis(x: Tensor) -> Tensor:
    """``(batch, rows, cols)``, or ``(rows, cols)`` where the batch is one matrix.

    One client is then computed as without a client axis, bit for bit, and with less overhead.
    """
    if x.ndim == 2:
        return x
    batch, shape = math.prod(x.shape[:-2]), x.shape[-2:]
    return x.reshape(shape) if batch == 1 else x.reshape(batch, *shape)


def _iterate(x: Tensor, schedule: Sequence[Triple]) -> Tensor:
    """The iteration as written; x of shape (rows, cols) or (batch, rows, cols)."""
    addmm = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in schedule:
        gram = symmetric_product(x, x.mT)
        polynomial = symmetric_product(gram, gram, gram, beta=b, alpha=c)
        x = addmm(x, polynomial, x, beta=a)
    return x


def symmetric_product(
    left: Tensor, right: Tensor, plus: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """``left @ right``, or ``alpha left @ right + beta plus``, where it is known to be symmetric.

    From 256 rows on only its blocks on and above the diagonal are computed, on a CPU. Products then
    took, with AVX-512, 0.70 (256 x 2304, 512 x 4608), 0.84 (256 x 256) and 0.67 (512 x 512) of the
    time; with AVX2 the copies took what is saved of 256 rows. Of fewer rows they take more.

    ``left`` is ``(rows, any)``, ``right`` ``(any, rows)``, the result and ``plus``, which has to be
    symmetric, ``(rows, rows)``; or all with a batch before. Without ``plus`` alpha is 1.
    """
    rows, addmm = left.shape[-2], torch.addmm if left.ndim == 2 else torch.baddbmm
    if rows < 256 or not _blocks_pay(left):
        if plus is None:
            return left @ right
        return addmm(plus, left, right, beta=beta, alpha=alpha)
    if plus is None:
        plus, beta = left.new_zeros(()), 0.0  # beta = 0: not read
    product = left.new_empty(*left.shape[:-1], rows)
    plus = plus.expand_as(product)
    for low, high in pairwise(rows * i // 4 for i in range(5)):
        band = slice(low, high), slice(low, None)
        addmm(
            plus[..., *band],
            left[..., low:high, :],
            right[..., low:],
            beta=beta,
            alpha=alpha,
            out=product[..., *band],
        )
        # torch transposes whole matrices blockwise, and slices element by element.
        product[..., high:, low:high] = product[..., low:high, high:].contiguous().mT.contiguous()
    return product


def _blocks_pay(x: Tensor) -> bool:
    """Where :func:`symmetric_product` works by blocks; they are written in place: no gradients."""
    graph = torch.is_grad_enabled() and x.requires_grad
    return x.is_cpu and x.dtype in _BLAS and not graph


def _iterate_gram(x: Tensor, schedule: Sequence[Triple]) -> Tensor:
    """The same iteration for wide x, mostly on the (rows, rows) side.

    All factors are polynomials of G = X X^T and commute: with H_t = a I + b G_t + c G_t^2, the
    next Gram matrix is H_t G_t H_t, and the result is the product of the H_t times X.

    Squaring squares the condition number, and each step multiplies small values, with their
    rounding, by a. So X and G are formed anew after every 3 steps, but not within the usual 5 of
    the quintic (a = 3.4), whose float32 error then is up to 1e-3 in spectral norm and with the
    restart 7e-5. Polar Express has up to 2e-3, without restarts 0.1.
    ``docs/orthogonalisation.md`` has the errors by condition number.

    Source: arXiv 2505.16932, appendix F, Algorithm 4 (restarts as proposed there).
    """
    together = 5 if len(schedule) <= 5 and max(a for a, _, _ in schedule) <= 4 else 3
    for start in range(0, len(schedule), together):
        block = schedule[start : start + together]
        gram = symmetric_product(x, x.mT)
        product: Tensor | None = None
        for t, (a, b, c) in enumerate(block):
            factor = symmetric_product(gram, gram, gram, beta=b, alpha=c)
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            product = factor if product is None else symmetric_product(product, factor)
            if t + 1 < len(block):
                gram = symmetric_product(factor, symmetric_product(gram, factor))
        assert product is not None
        x = product @ x
    return x


def _gram_pays(x: Tensor) -> bool:
    """Whether :func:`_iterate_gram` is the faster form; measured on a CPU, 1 and 2 threads.

    It was 1.5 times as fast for 120 x 400, 2.3 for 64 x 576, 2.7 for 256 x 2304, and slower where
    rows are few. Not for half precision, whose rounding the detour would amplify.
    """
    rows, cols = x.shape[-2:]
    wide = rows >= 32 and 2 * cols >= 5 * rows
    return wide and x.is_cpu and x.dtype in _BLAS


def polar_svd(matrix: Tensor, rtol: float | None = None) -> Tensor:
    """Exact polar factor U V^T over the singular values above ``rtol`` times the largest.

    The others contribute 0, as they do in effect in :func:`newton_schulz`: over the null space,
    U V^T is whatever the LAPACK at hand returns. Zero gives zero (but see ``rtol``).

    Args:
        matrix: Shape ``(..., rows, cols)``; leading axes are a batch.
        rtol: Relative cut. None: 1e-10 for float64, 1e-5 for float32 and half precisions (which
            are computed in float32). 0: no cut, as in code that calls an SVD plainly; where the
            matrix lacks rank, as the gradient of a wide layer does by small batches, the step then
            holds arbitrary unit directions, also of a zero matrix.

    Returns:
        Same shape and dtype as ``matrix``; not-a-number throughout for a matrix with an entry that
        is not finite, which says nothing about the others of the batch.
    """
    with autocast_off(matrix.device.type):
        x = matrix if matrix.dtype in (torch.float32, torch.float64) else matrix.float()
        x = _one_batch_axis(x)
        if rtol is None:
            rtol = 1e-10 if x.dtype == torch.float64 else 1e-5
        # LAPACK would refuse the whole batch for one matrix that is not finite.
        finite = x.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        x, wide = x.where(finite, 0), x.shape[-2] < x.shape[-1]
        u, s, vh = torch.linalg.svd(x.mT if wide else x, full_matrices=False)  # tall is faster
        if wide:
            u, vh = vh.mT, u.mT
        if rtol > 0:
            u = u * (s > rtol * s[..., :1]).unsqueeze(-2)
        polar: Tensor = (u @ vh).where(finite, torch.nan)
        return polar.reshape(matrix.shape).to(matrix.dtype)


@dataclass(frozen=True)
class Orthogonalizer:
    """A method of orthogonalisation with its options; call it on ``(..., rows, cols)``.

    Args:
        method: ``newton_schulz``, ``polar_express``, ``svd``, or ``none``: the matrix itself, which
            makes Muon SGD with momentum (the switch of an ablation).
        steps: Iterations of the first two, 0 for the matrix over its Frobenius norm; the others
            do not use it.
        coefficients: (a, b, c) of every step, for ``newton_schulz`` only. None: :data:`QUINTIC`.
        dtype: What is computed in. None: the input's dtype. Muon in its released form, and
            ``torch.optim.Muon``, use bfloat16; that is for GPUs.
        rtol: For ``svd`` only, see :func:`polar_svd`.
        eps: Added to the Frobenius norm, see :func:`newton_schulz`.

    Raises:
        ValueError: If a field has a value out of range, or one that ``method`` would ignore.
    """

    method: Literal["newton_schulz", "polar_express", "svd", "none"] = "newton_schulz"
    steps: int = 5
    coefficients: tuple[float, float, float] | None = None
    dtype: Literal["float32", "bfloat16", "float64"] | None = None
    rtol: float | None = None
    eps: float = 1e-7

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        abc = self.coefficients
        if abc is not None:  # a list, as YAML gives it, has no hash
            object.__setattr__(self, "coefficients", tuple(abc))
        svd = self.method == "svd"
        if self.method not in _METHODS:
            self._refuse("method", f"one of {', '.join(_METHODS)}")
        if self.steps < 0:
            self._refuse("steps", "at least 0")
        if abc is not None and (self.method != "newton_schulz" or len(abc) != 3):
            self._refuse("coefficients", "null, or (a, b, c) with the method newton_schulz")
        if self.method == "none" and self.dtype is not None:
            self._refuse("dtype", "null with the method none")
        if self.dtype not in (None, *_DTYPES) or (svd and self.dtype == "bfloat16"):
            self._refuse("dtype", "null, float32, float64 or (not for svd) bfloat16")
        if self.rtol is not None and not (svd and 0 <= self.rtol < 1):
            self._refuse("rtol", "null, or in [0, 1) with the method svd")
        if not self.eps > 0:
            self._refuse("eps", "positive")

    def _refuse(self, field: str, wanted: str) -> NoReturn:
        raise ValueError(
            f"Orthogonalizer: {field} must be {wanted}, got {getattr(self, field)!r} "
            f"(method {self.method!r})"
        )

    def __call__(self, matrix: Tensor) -> Tensor:
        """Orthogonalise ``matrix``, shape ``(..., rows, cols)``; same shape and dtype out."""
        if self.method == "none":
            return matrix
        dtype = None if self.dtype is None else _DTYPES[self.dtype]
        if self.method == "svd":
            x = matrix if dtype is None else matrix.to(dtype)
            return polar_svd(x, self.rtol).to(matrix.dtype)
        if self.method == "polar_express":
            return newton_schulz(matrix, self.steps, POLAR_EXPRESS, self.eps, dtype)
        return newton_schulz(matrix, self.steps, self.coefficients or QUINTIC, self.eps, dtype)


_BLAS = (torch.float32, torch.float64)  # of fast products on every CPU
_METHODS = ("newton_schulz", "polar_express", "svd", "none")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def as_matrix(tensor: Tensor, batch_axes: int = 0, view: MatrixView = "flatten") -> Tensor:
    """The matrix that a parameter is for Muon: ``(out, in, kh, kw)`` as ``(out, in * kh * kw)``.

    Args:
        tensor: Shape ``(*batch, out, in, ...)``.
        batch_axes: How many leading axes are a batch, such as 1 for a client axis.
        view: What becomes of other tensors of more than 2 axes. ``flatten``: the same, the matrix
            ``(out, in * ...)``, but for ``(1, tokens, width)``, a position embedding or class
            token, which is the matrix ``(tokens, width)`` and not one long row. (The kernel of an
            ``nn.Conv1d`` of one output has that shape, too, and is read alike.) ``last_two``: they
            are matrices of their last two axes, the axes before count as a batch: a position
            embedding is one matrix, and stacked experts are one matrix each. This is what the code
            of Muon (Jordan et al., 2024) and that of FedMuon do.

    Returns:
        Shape ``(*batch, out, in * ...)`` or, for ``last_two``, ``(*batch, ..., rows, cols)``; a
        view where the memory layout allows it.

    Raises:
        ValueError: If fewer than 2 axes are left behind the batch.
    """
    if tensor.ndim - batch_axes < 2:
        raise ValueError(
            f"a matrix needs 2 or more axes behind {batch_axes} batch axes, got shape "
            f"{tuple(tensor.shape)}"
        )
    if view == "last_two" and tensor.ndim - batch_axes != 4:
        return tensor
    if tensor.ndim - batch_axes == 3 and tensor.shape[batch_axes] == 1:
        return tensor.squeeze(batch_axes)
    return tensor.flatten(batch_axes + 1)
