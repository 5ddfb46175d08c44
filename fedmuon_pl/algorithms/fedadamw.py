"""FedAdamW: local AdamW with a shared second moment and a shared direction."""

from functools import partial
from typing import Literal

from ..optim.adamw import AdamW
from .base import Algorithm, ServerRule
from .local import TorchRule
from .mechanisms import Alignment, StateAveraging

__all__ = ["FedAdamW"]


class FedAdamW(Algorithm):
    """FedAdamW (Liu et al., arXiv 2510.27486).

    A client starts from ``m = 0`` and ``v = vbar``; its k-th local step is, with t counting the
    steps of all rounds::

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        x <- x - eta (mhat / (sqrt(vhat) + eps) + alpha Delta + lambda x)
        mhat = m / (1 - beta1^k),  vhat = v / (1 - beta2^t)

    (at unequal K_i, 1 - beta2^t is the weight of the gradients in v, averaged with it, see
    :class:`~fedmuon_pl.optim.adamw.AdamW`), and at the round's end
    ``Delta = -sum_i w_i (x_i - x^r) / (K_i eta)`` and vbar is the mean of the clients' v, of which
    only block means are sent; both are 0 at first. The paper prints ``- lambda x``, which would let
    weights grow; here they decay. Its blocks for Transformers follow the Hessian's structure; here
    a block is a parameter.

    The authors' code (github.com/junkangLiu0/FedAdamW) differs: it sends all of v
    (``second_moment="full"``), counts t at a constant number of steps a round, and divides m too
    by 1 - beta1^t, so that a round's first steps are small. A later version scales the rate by
    1 - alpha, the decay not (``shrink_local``).

    Args:
        lr: Local learning rate eta.
        alpha: Weight of the shared direction Delta, in [0, 1).
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to sqrt(vhat).
        weight_decay: lambda, decoupled.
        second_moment: ``"block_mean"``, the mean of each parameter's v, or ``"full"``.
        shrink_local: Whether the Adam direction has the weight 1 - alpha.
        server: Server rule on the pseudo-gradient; plain averaging if None.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        alpha: float = 0.5,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        second_moment: Literal["block_mean", "full"] = "block_mean",
        shrink_local: bool = False,
        server: ServerRule | None = None,
    ) -> None:
        if second_moment not in ("block_mean", "full"):
            raise ValueError(f"second_moment={second_moment}: use 'block_mean' or 'full'")
        # alpha = 0 needs no mechanism: nothing is sent, and the steps are the plain ones.
        align = [Alignment(alpha, shrink=shrink_local)] if alpha != 0 else []
        decay = weight_decay / (1 - alpha) if shrink_local else weight_decay
        optimizer = partial(AdamW, betas=(beta1, beta2), eps=eps, weight_decay=decay)
        rule = TorchRule(lr, optimizer)
        means = second_moment == "block_mean"
        shared = StateAveraging(rule, ["exp_avg_sq"], block_means=means)
        super().__init__(rule, [*align, shared], server)
