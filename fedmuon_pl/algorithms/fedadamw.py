"""FedAdamW: local AdamW with a shared second moment and a shared direction."""

from typing import Literal

import torch

from ..clients import Tensors
from .base import Algorithm, LocalRun, Mechanism, ServerRule, Setting, Upload
from .local import AdamRule
from .mechanisms import Alignment, SecondMomentAveraging

__all__ = ["CarriedDecay", "FedAdamW"]


class CarriedDecay(Mechanism):
    """What the shared second moment still lacks: its bias is corrected by 1 - d beta2^k.

    With K steps in each of the earlier rounds d is ``beta2^(r K)``, so that t of
    ``1 - beta2^t`` counts the steps of all rounds. In general ``d <- d sum_i w_i beta2^{K_i}``,
    which keeps 1 - d the sum of all weights of squared gradients in vbar.

    Args:
        beta2: Decay of the second moment.
    """

    name = "carried_decay"

    def __init__(self, beta2: float) -> None:
        super().__init__()
        self._beta2 = beta2

    def setup(self, setting: Setting) -> None:
        """Sets d to 1."""
        one = torch.ones((), dtype=torch.float64, device=setting.x[0].device)
        self.server_state = {"d": [one]}

    def begin(self, run: LocalRun) -> None:
        """The first moment is new, the second goes on."""
        run.set_option("carried", (1.0, float(self.server_state["d"][0])))

    def end(self, run: LocalRun) -> Upload:
        """beta2^{K_i}, which is known to the server."""
        d = self.server_state["d"][0]
        return Upload([d.new_full((len(run.clients),), self._beta2**run.steps)], sent=False)

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """The new d."""
        self.server_state["d"][0].mul_(mean[0])


class FedAdamW(Algorithm):
    """FedAdamW (Liu et al., arXiv 2510.27486).

    A client starts from ``m = 0`` and ``v = vbar``; its k-th local step is, with t counting the
    steps of all rounds::

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        x <- x - eta (mhat / (sqrt(vhat) + eps) + alpha Delta + lambda x)
        mhat = m / (1 - beta1^k),  vhat = v / (1 - beta2^t)

    and at the round's end ``Delta = -sum_i w_i (x_i - x^r) / (K_i eta)`` and vbar is the mean of
    the clients' v, of which only block means are sent; both are 0 at first. The paper prints
    ``- lambda x``, which would let weights grow; here they decay. Its blocks for Transformers
    follow the Hessian's structure; here a block is a parameter.

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
        rule = AdamRule(lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
        shared = SecondMomentAveraging(block_means=second_moment == "block_mean")
        super().__init__(rule, [*align, shared, CarriedDecay(beta2)], server)
