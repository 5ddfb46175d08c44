"""What a round shows beside accuracy: drift, agreement and shape of the clients' updates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..clients import Tensors
from ..optim.orthogonalize import symmetric_product

__all__ = ["Measured", "RoundDiagnostics", "orthogonality"]


@dataclass
class Measured:
    """One block of C clients: plain numbers, fetched from the device once."""

    finite: list[bool]
    loss: list[float]
    squared_norm: list[float]
    cosine: list[float]


class RoundDiagnostics:
    """A few numbers of every client, and the last round's direction.

    They are summed exactly (``math.fsum``), so that neither the clients' order nor the number of
    processes changes a digit.

    The tags, w_i being the client weights, D_i the displacements and D their weighted mean:

    - ``train/loss``: weighted mean of each client's mean training loss over its local steps;
    - ``fed/client_drift``: sqrt(sum_i w_i ||D_i - D||^2), how far the clients part;
    - ``fed/update_norm``: ||x^{r+1} - x^r||;
    - ``fed/alignment``: weighted mean cosine of D_i with the previous round's D (0 at first);
    - ``fed/orthogonality``: see :func:`orthogonality`.

    Args:
        x: The global parameters, for shapes.
    """

    def __init__(self, x: Tensors) -> None:
        self._previous = [torch.zeros_like(t) for t in x]
        self.start()

    def start(self) -> None:
        """Before the first client of a round."""
        self.rows: list[tuple[int, float, float, float]] = []
        """Of each client: weight, loss, squared norm, cosine."""

    def measure(self, displacement: Tensors, losses: Tensor, sound: Tensor) -> Measured:
        """Measures a block, and waits for a GPU once.

        Args:
            displacement: Each ``(C, *shape)``.
            losses: ``(K, C)``.
            sound: Whether all else that a client sends is finite, ``(C,)``.
        """
        rows = [t.unsqueeze(1).flatten(1) for t in displacement]  # a parameter may be a scalar
        # In float64: drift is a small difference of large squares.
        wide = {"dim": 1, "dtype": torch.float64}
        norms = torch.stack([torch.linalg.vector_norm(t, **wide) for t in rows])
        dots = torch.stack([t @ p.flatten() for t, p in zip(rows, self._previous, strict=True)])
        mine = norms.square().sum(0)
        other = torch.stack([torch.linalg.vector_norm(p) for p in self._previous]).double()
        scale = mine.sqrt() * torch.linalg.vector_norm(other)
        cosine = torch.where(scale > 0, dots.double().sum(0) / scale.clamp(min=1e-300), 0.0)
        mean = losses.double().mean(0)
        finite = mean.isfinite() & mine.isfinite() & sound
        table = torch.stack([finite.to(mean), mean, mine, cosine]).tolist()
        return Measured([flag > 0 for flag in table[0]], *table[1:])

    def add(self, measured: Measured, weights: Sequence[int]) -> None:
        """Adds a block; clients of weight 0 are left out."""
        for c, w in enumerate(weights):
            if w:
                row = measured.loss[c], measured.squared_norm[c], measured.cosine[c]
                self.rows.append((w, *row))

    def summary(self, mean: Tensors, before: Tensors, after: Tensors) -> dict[str, float]:
        """The round's tags; remembers the direction for the next round.

        Args:
            mean: D, in float64.
            before: x^r.
            after: x^{r+1}.
        """
        moved = torch.stack(list(torch._foreach_norm(torch._foreach_sub(after, before))))
        shapes = [orthogonality(m) for m in mean if m.ndim >= 2]
        figures = [torch.stack([m.square().sum() for m in mean]).sum(), moved.norm()]
        figures += [torch.stack(shapes).mean()] if shapes else []
        squared, update, *shape = torch.stack([f.double() for f in figures]).tolist()
        for previous, m in zip(self._previous, mean, strict=True):
            previous.copy_(m)
        total = sum(w for w, *_ in self.rows)
        loss, squares, cosine = (
            math.fsum(row[0] * row[i] for row in self.rows) / total for i in (1, 2, 3)
        )
        return {
            "train/loss": loss,
            "fed/client_drift": max(squares - squared, 0.0) ** 0.5,
            "fed/update_norm": update,
            "fed/alignment": cosine,
            "fed/orthogonality": shape[0] if shape else 0.0,
        }

    def state_dict(self) -> dict[str, Any]:
        """The last round's direction."""
        return {"previous": list(self._previous)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        for mine, theirs in zip(self._previous, state["previous"], strict=True):
            mine.copy_(theirs)


def orthogonality(update: Tensor) -> Tensor:
    """How equal the singular values s of a matrix are: (sum s^2)^2 / (rank_max sum s^4).

    1 for a multiple of a (semi-)orthogonal matrix, 1 / min(rows, cols) for rank one, 0 for zero.
    A convolution ``(out, in, kh, kw)`` is the matrix ``(out, in kh kw)``.
    """
    m = update.flatten(1).float()
    if m.shape[0] > m.shape[1]:
        m = m.T
    peak = m.abs().max()
    m = m / torch.where(peak > 0, peak, 1.0)
    gram = symmetric_product(m, m.T)
    squares = m.shape[0] * gram.square().sum()
    return gram.trace().square() / torch.where(peak > 0, squares, 1.0)
