"""FedPAC: any local optimiser with an averaged preconditioner and a shared direction."""

from collections.abc import Sequence

from ..optim.adamw import AdamW
from .base import Algorithm, ServerRule
from .local import OptimizerFactory, TorchRule
from .mechanisms import Alignment, StateAveraging

__all__ = ["FedPAC"]


class FedPAC(Algorithm):
    """FedPAC (Liu et al., "Taming Preconditioner Drift", arXiv 2602.19271).

    With P_Theta(g) the direction that the local optimiser makes of a gradient, Theta its averaged
    states, client i, round r, K times::

        x_i^{r,k+1} = x_i^{r,k} - eta [(1 - alpha) P_Theta(g_i^{r,k}) + alpha Delta_g]

    from ``Theta_i^{r,0} = Thetabar^r``, and at the round's end, with the clients' weights w_i::

        Delta_g^{r+1}  = -sum_i w_i (x_i^{r,K} - x^r) / (K eta)
        x^{r+1}        = x^r + sum_i w_i (x_i^{r,K} - x^r)
        Thetabar^{r+1} = sum_i w_i Theta_i^{r,K}

    The paper's beta is alpha here, its g_G is Delta_g. FedMuon is the same frame around Muon, its
    momentum averaged (:class:`fedmuon_pl.algorithms.fedmuon.FedMuon`).

    What Theta is, the paper leaves to the optimiser; its released code averages SOAP's gradient
    statistics (L, R), Sophia's Hessian diagonal and Muon's momentum, and starts every other state,
    SOAP's and Sophia's first moment among them, anew each round. By this reading AdamW's Theta is
    ``exp_avg_sq``; with ``["exp_avg", "exp_avg_sq"]`` the whole optimiser is shared, and with
    SGD's ``["momentum_buffer"]`` the frame is tried without a preconditioner. (``exp_avg`` alone is
    possible and no good: m over a v that has seen one gradient knows no bound.) Moments are
    corrected for all steps behind them (see
    :class:`fedmuon_pl.algorithms.mechanisms.StateAveraging`); the code's FedAdamW instead takes the
    global count for both, so that its first moment, which starts at 0, is too small at first.

    Args:
        lr: eta.
        optimizer: The local optimiser; its weight decay, if decoupled, shrinks x by (1 - alpha) eta
            weight_decay a step, as in the released code.
        alpha: Weight of the shared direction, in [0, 1).
        averaged: Names of the averaged states in the optimiser's state; none to start anew.
        server: Server rule on the pseudo-gradient; plain averaging if None.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        optimizer: OptimizerFactory = AdamW,
        alpha: float = 0.5,
        averaged: Sequence[str] = ("exp_avg_sq",),
        server: ServerRule | None = None,
    ) -> None:
        rule = TorchRule(lr, optimizer)
        align = [Alignment(alpha)] if alpha != 0 else []
        average = [StateAveraging(rule, averaged)] if averaged else []
        super().__init__(rule, [*align, *average], server)
