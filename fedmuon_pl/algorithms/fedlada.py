"""FedLADA: local AMSGrad with a shared second moment and an amended direction."""

from functools import partial

from ..optim.adamw import AdamW
from .base import Algorithm, ServerRule
from .local import TorchRule, positive
from .mechanisms import Alignment, StateAveraging

__all__ = ["FedLADA"]


class FedLADA(Algorithm):
    """FedLADA (Sun et al., arXiv 2308.00522), as fedbrew reads it (github.com/DadrasAli/fedbrew).

    The paper itself was not at hand. A client starts from ``m = 0`` and ``v = u = vbar``; a
    local step is::

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        u <- max(u, v)
        x <- x - eta (alpha m / sqrt(u) + (1 - alpha) g_a)

    and at the round's end ``g_a = -sum_i w_i (x_i - x^r) / (K_i eta)``, 0 at first, and
    ``vbar = sum_i w_i u_i``, eps^2 at first. No bias correction. The code released with FedAdamW
    (github.com/junkangLiu0/FedAdamW) has Adam in the place of AMSGrad, its gamma is 1 - alpha, and
    it decays weights by L2.

    Args:
        lr: Local learning rate eta.
        alpha: Weight of the client's own direction, in (0, 1].
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: The smallest sqrt(u).
        amsgrad: As above; False is the released code: u is v, vbar starts at 0, and eps is added
            to sqrt(u).
        server: Server rule on the pseudo-gradient; plain averaging if None.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        alpha: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        eps: float = 1e-8,
        amsgrad: bool = True,
        server: ServerRule | None = None,
    ) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha}: must be in (0, 1]")
        positive("eps", eps)
        optimizer = partial(
            AdamW,
            betas=(beta1, beta2),
            eps=0.0 if amsgrad else eps,
            weight_decay=0.0,
            amsgrad=amsgrad,
            bias_correction=False,
        )
        rule = TorchRule(lr, optimizer)
        if amsgrad:
            shared = StateAveraging(
                rule,
                ["max_exp_avg_sq"],
                copies={"exp_avg_sq": "max_exp_avg_sq"},
                start=eps**2,
            )
        else:
            shared = StateAveraging(rule, ["exp_avg_sq"])
        # alpha = 1 needs no direction: nothing is sent, and the steps are the plain ones.
        amend = [Alignment(1 - alpha)] if alpha != 1 else []
        super().__init__(rule, [*amend, shared], server)
