"""Low-rank momentum: truncated singular value decompositions in both directions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..clients import Tensors
from ..optim.orthogonalize import as_matrix
from .base import LocalRun, Mechanism, Setting, Upload
from .local import MuonRule

__all__ = ["LowRank", "LowRankMomentumAveraging", "truncation_rank"]


def truncation_rank(rows: int, cols: int, ratio: float) -> int | None:
    """The rank at which a matrix's factors have about ``ratio`` times its entries.

    U (rows, r), r singular values and V (cols, r) are r (rows + cols + 1) numbers, so that
    r = max(1, int(ratio rows cols / (rows + cols + 1))), as in the released code of FedMuon but
    for the maximum: there, a small matrix got rank 0, and its momentum was lost.

    Args:
        rows: Rows of the matrix.
        cols: Columns of the matrix.
        ratio: In (0, 1].

    Returns:
        The rank, or None where the matrix itself is to be sent: at ratio 1, and where the factors
        would be no smaller.
    """
    rank = max(1, int(ratio * (rows * cols) / (rows + cols + 1)))
    return None if ratio == 1 or rank * (rows + cols + 1) >= rows * cols else rank


class LowRank:
    """Truncated SVD of a list of matrices, each either factored or left as it is.

    Args:
        ratio: Size of the factors over that of the matrix, in (0, 1], see :func:`truncation_rank`.
        shapes: The matrices' shapes ``(..., rows, cols)``, without client axis.

    Raises:
        ValueError: If the ratio is out of range.
    """

    def __init__(self, ratio: float, shapes: Sequence[torch.Size]) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"momentum_ratio={ratio}: must be in (0, 1], or null")
        self.ranks = [truncation_rank(s[-2], s[-1], ratio) for s in shapes]

    def compress(self, matrices: Sequence[Tensor]) -> Tensors:
        """What is sent of matrices ``(*batch, rows, cols)``, one after the other.

        Three tensors U ``(*batch, rows, r)``, S ``(*batch, r)`` and V^T ``(*batch, r, cols)``, or
        one where a matrix is sent as it is. The best approximation of rank r in the Frobenius
        norm. A matrix that is not finite gives S of not-a-number, and the others are as ever.
        """
        sent: Tensors = []
        for rank, matrix in zip(self.ranks, matrices, strict=True):
            if rank is None:
                sent.append(matrix)
                continue
            # LAPACK would refuse the whole batch for one matrix that is not finite.
            finite = matrix.isfinite().all(-1).all(-1, keepdim=True)
            u, s, vh = torch.linalg.svd(matrix.where(finite.unsqueeze(-1), 0), full_matrices=False)
            s = s[..., :rank].where(finite, torch.nan)
            sent += [u[..., :rank].contiguous(), s, vh[..., :rank, :].contiguous()]
        return sent

    def restore(self, sent: Sequence[Tensor]) -> Tensors:
        """The matrices that :meth:`compress` stands for."""
        parts = iter(sent)
        return [
            next(parts) if rank is None else next(parts) * next(parts).unsqueeze(-2) @ next(parts)
            for rank in self.ranks
        ]


class LowRankMomentumAveraging(Mechanism):
    """Momentum averaging with truncated SVDs, denoted C, in the place of the momenta.

    ``Mbar^{r+1} = C(sum_i w_i C(M_i^{r,K_i}))``: clients send factors up, the server averages what
    they stand for, and sends factors of the mean down. The released code of FedMuon (arXiv
    2510.27403, github.com/junkangLiu0/FedMuon, ``update_FedMuon_SVD``) truncates on the way up
    only and broadcasts the mean, of up to S times that rank, whole.

    With error feedback each sender adds what it could not send the last time, and keeps what it
    cannot send now, ``sent = C(M + e), e <- M + e - sent``: a residual e_i on every client and one
    on the server (Seide et al., "1-bit SGD", Interspeech 2014; in this form PowerSGD, Vogels et
    al., arXiv 1905.13727, Algorithm 2). A client keeps its residual until it takes part again; in
    a large population it is then many rounds old, and adds stale momentum, so that error feedback
    is off by default. This is not EF21 (arXiv 2106.05203), which compresses differences to a copy
    of each client's last message that the server keeps.

    Args:
        rule: The local rule whose matrices carry the momentum.
        ratio: Size of the factors over that of the momentum, in (0, 1], see
            :func:`truncation_rank`.
        error_feedback: Whether residuals are kept.

    Raises:
        ValueError: If the ratio is out of range.
    """

    name = "momentum_averaging"

    def __init__(self, rule: MuonRule, ratio: float, error_feedback: bool = False) -> None:
        super().__init__()
        self._rule = rule
        LowRank(ratio, [])  # the range, before anything is set up
        self._ratio = ratio
        self._feedback = error_feedback
        if error_feedback:
            self.client_state = ("momentum_residual",)

    def setup(self, setting: Setting) -> None:
        """Sets Mbar and the residuals to zero."""
        zeros = setting.zeros(self._rule.matrices)
        self._shapes, self._dtypes = [z.shape for z in zeros], [z.dtype for z in zeros]
        matrices = self._as_matrices(zeros, 0)
        self._low = LowRank(self._ratio, [m.shape for m in matrices])
        factors = [torch.zeros_like(t) for t in self._low.compress(matrices)]
        self.server_state = {"momentum": factors}
        if self._feedback:
            self.server_state["residual"] = zeros

    def client_state_like(self, name: str, setting: Setting) -> Tensors:
        """e_i of the matrices."""
        return [setting.x[i] for i in self._rule.matrices]

    def download(self) -> Tensors:
        """The factors of Mbar."""
        return self.server_state["momentum"]

    def begin(self, run: LocalRun) -> None:
        """M_i^{r,0} = Mbar^r."""
        momentum = self._low.restore(self.server_state["momentum"])
        values = [m.view(s) for m, s in zip(momentum, self._shapes, strict=True)]
        run.set_state("momentum_buffer", self._rule.matrices, values)

    def end(self, run: LocalRun) -> Upload:
        """C(M_i^{r,K_i}), as factors."""
        momentum = run.get_state("momentum_buffer", self._rule.matrices)
        residual = run.client_state.get("momentum_residual")
        sent, restored, left = self._send(momentum, residual, client_axis=1)
        if self._feedback:
            run.client_state["momentum_residual"] = left
        return Upload(restored, sent=sent)

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """The new Mbar."""
        momentum = [m.to(dtype) for m, dtype in zip(mean, self._dtypes, strict=True)]
        sent, _, left = self._send(momentum, self.server_state.get("residual"), client_axis=0)
        self.replace("momentum", sent)
        if self._feedback:
            self.replace("residual", left)

    def _send(
        self, momentum: Tensors, residual: Tensors | None, client_axis: int
    ) -> tuple[Tensors, Tensors, Tensors]:
        """C(M + e) as sent and as restored, and the new e."""
        whole = momentum if residual is None else list(torch._foreach_add(momentum, residual))
        sent = self._low.compress(self._as_matrices(whole, client_axis))
        restored = [m.view_as(w) for m, w in zip(self._low.restore(sent), whole, strict=True)]
        return sent, restored, list(torch._foreach_sub(whole, restored))

    def _as_matrices(self, tensors: Tensors, batch_axes: int) -> Tensors:
        return [as_matrix(t, batch_axes, self._rule.matrix_view) for t in tensors]
