"""Local rules: which optimiser makes a client's steps, with which learning rates."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..optim.lmo import LMO
from ..optim.muon import Muon, Scale
from ..optim.orthogonalize import MatrixView, Orthogonalizer
from ..optim.routing import split_parameters
from .base import LocalRule, Member, Setting

__all__ = ["ELEMENTWISE", "LMORule", "MuonRule", "OptimizerFactory", "TorchRule"]

OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer]
"""A ``torch.optim`` class, or a partial of one; its own ``lr`` must be left alone."""

ELEMENTWISE = frozenset(
    [
        "SGD",
        "Adam",
        "AdamW",
        "RMSprop",
        "Adagrad",
        "NAdam",
        "RAdam",
        "ASGD",
        "Adamax",
        "Rprop",
        "Adadelta",
    ]
)
"""Optimisers of ``torch.optim`` that treat each element on its own: exact for stacked clients."""

REST_ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-10}
"""The rest's AdamW in Muon's and FedMuon's released code."""


_GRAPH_CHECKS = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
"""Of torch's Adam and its kin: whether a CUDA graph is being recorded, which no engine here does.

Lightning has torch ask NVML for that, in every step: 0.4 ms where there is no GPU, as long as eight
steps of AdamW on LeNet's biases.
"""


def _nothing() -> None:
    """In the place of a check."""


class TorchRule(LocalRule):
    """Any optimiser of ``torch.optim``, made anew for every client and round.

    One of another class, too. Clients can train side by side if its class says ``elementwise =
    True``, or takes ``client_axis`` as :class:`fedmuon_pl.optim.muon.Muon` does.

    Args:
        lr: The learning rate eta of every parameter.
        optimizer: The optimiser's class or a partial of it, with its other arguments.
        prefix: Of both arguments' names, for messages.

    Raises:
        ValueError: If ``lr`` is not positive, the optimiser brings a rate of its own, or it needs
            a closure.
    """

    def __init__(
        self, lr: float, optimizer: OptimizerFactory = torch.optim.SGD, *, prefix: str = ""
    ) -> None:
        self.lr = positive(f"{prefix}lr", lr)
        kind, keywords = _unwrap(optimizer, f"{prefix}optimizer")
        signature = inspect.signature(kind).parameters
        # The command line fills in the default of the class, or of SGD, which it replaces.
        defaults = [inspect.signature(k).parameters.get("lr") for k in (kind, torch.optim.SGD)]
        if "lr" in keywords and keywords["lr"] not in [d.default for d in defaults if d]:
            raise ValueError(
                f"the local learning rate is set by `{prefix}lr` (now {lr}), not inside "
                f"`{prefix}optimizer` (lr={keywords['lr']})"
            )
        if kind.__name__ == "LBFGS":
            raise ValueError(
                f"{prefix}optimizer=LBFGS needs a closure, which local steps do not have"
            )
        self.kind: Callable[..., Optimizer] = kind
        self.keywords = {k: v for k, v in keywords.items() if k not in ("lr", "client_axis")}
        # Fixed, so that torch's defaults cannot change a result; Adam's fused kernels save most of
        # its overhead.
        if "foreach" in signature and not self.keywords.get("fused"):
            fused = kind.__name__ in ("Adam", "AdamW") and self.keywords.get("fused") is None
            if fused and self.keywords.get("foreach") is None:
                self.keywords["fused"] = True
            elif self.keywords.get("foreach") is None:
                self.keywords["foreach"] = True
        self._takes_axis = "client_axis" in signature
        self.elementwise = (
            self._takes_axis
            or getattr(kind, "elementwise", False)
            or (kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE)
        )

    def rates(self, setting: Setting) -> list[float]:
        """The same for every parameter."""
        return [self.lr] * len(setting.x)

    def build(self, leaves: Sequence[Tensor], client_axis: bool) -> list[Member]:
        """One optimiser over all parameters."""
        axis = {"client_axis": client_axis} if self._takes_axis else {}
        optimizer = self.kind(leaves, lr=self.lr, **self.keywords, **axis)
        for check in _GRAPH_CHECKS:
            if hasattr(optimizer, check):
                setattr(optimizer, check, _nothing)
        return [Member(optimizer, list(range(len(leaves))))]


class MuonRule(LocalRule):
    """Muon on the matrices, AdamW or another optimiser with a rate of its own on the rest.

    A parameter with two or more axes is a matrix; a convolution ``(out, in, kh, kw)`` is the
    matrix ``(out, in kh kw)``. The rest's optimiser starts anew for every client and round, AdamW's
    bias correction is counted from the round's first step.

    Args:
        lr: eta of the matrices.
        rest_lr: eta of the rest.
        beta: Momentum of Muon.
        nesterov: Whether Muon looks ahead.
        momentum_form: ``"classic"`` M <- beta M + g, or ``"ema"`` M <- beta M + (1 - beta) g.
        orthogonalizer: How the polar factor is computed.
        scale: Step scale of a matrix, see :class:`fedmuon_pl.optim.muon.Muon`.
        weight_decay: Decoupled, x <- x - lr weight_decay x before the step; of the matrices, and of
            the rest unless ``rest_optimizer`` brings its own.
        rest_betas: AdamW's.
        rest_eps: AdamW's.
        rest_patterns: Regular expressions; matrices whose name matches one belong to the rest.
        matrix_patterns: If there are any, only what matches one is a matrix.
        rest_optimizer: In the place of AdamW; ``rest_lr`` sets its rate.
        matrix_view: How tensors of more than two axes are read, see
            :func:`fedmuon_pl.optim.orthogonalize.as_matrix`.

    Raises:
        ValueError: If a rate is not positive, or ``rest_optimizer`` cannot be used or would ignore
            another argument.
    """

    def __init__(
        self,
        *,
        lr: float,
        rest_lr: float,
        beta: float,
        nesterov: bool,
        momentum_form: Literal["classic", "ema"],
        orthogonalizer: Orthogonalizer,
        scale: Scale,
        weight_decay: float,
        rest_betas: tuple[float, float] = (0.9, 0.95),
        rest_eps: float = 1e-10,
        rest_patterns: Sequence[str] = (),
        matrix_patterns: Sequence[str] = (),
        rest_optimizer: OptimizerFactory | None = None,
        matrix_view: MatrixView = "flatten",
    ) -> None:
        self.lr = positive("lr", lr)
        adamw: dict[str, Any] = {"betas": tuple(rest_betas), "eps": rest_eps}
        if rest_optimizer is not None and adamw != REST_ADAMW:
            raise ValueError(
                f"rest_betas={rest_betas} and rest_eps={rest_eps} are AdamW's; with rest_optimizer "
                f"leave them at {REST_ADAMW['betas']} and {REST_ADAMW['eps']}"
            )
        own = partial(torch.optim.AdamW, **adamw, weight_decay=weight_decay)
        self._rest = TorchRule(rest_lr, rest_optimizer or own, prefix="rest_")
        self.elementwise = self._rest.elementwise
        self._muon: Callable[..., Optimizer] = partial(
            Muon,
            lr=lr,
            momentum=beta,
            nesterov=nesterov,
            ema=is_ema(momentum_form),
            weight_decay=weight_decay,
            scale=scale,
            orthogonalizer=orthogonalizer,
            matrix_view=matrix_view,
        )
        self.matrix_view = matrix_view
        self.rest_patterns = list(rest_patterns)
        self.matrix_patterns = list(matrix_patterns)

    def setup(self, setting: Setting) -> None:
        """Decides which parameters are matrices."""
        self.matrices, self.rest = _split(setting, self.rest_patterns, self.matrix_patterns)

    def rates(self, setting: Setting) -> list[float]:
        """``lr`` for the matrices, ``rest_lr`` for the rest."""
        return [(self if i in self.matrices else self._rest).lr for i in range(len(setting.x))]

    def build(self, leaves: Sequence[Tensor], client_axis: bool) -> list[Member]:
        """Muon and the rest's optimiser; either is left out where it has nothing to move."""
        members = []
        if self.matrices:
            muon = self._muon([leaves[i] for i in self.matrices], client_axis=client_axis)
            members.append(Member(muon, self.matrices))
        if self.rest:
            (rest,) = self._rest.build([leaves[i] for i in self.rest], client_axis)
            members.append(Member(rest.optimizer, self.rest))
        return members


class LMORule(LocalRule):
    """:class:`~fedmuon_pl.optim.lmo.LMO` on every parameter: spectral for matrices, 2-norm else.

    Args:
        lr: eta of every parameter.
        alpha: Weight of the newest gradient in the momentum, in (0, 1].
        orthogonalizer: How the polar factor is computed.
        scale: Step scale of a matrix, see :class:`fedmuon_pl.optim.muon.Muon`.
        rest_patterns: Regular expressions; matrices whose name matches one take the 2-norm, of the
            whole tensor.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        alpha: float,
        orthogonalizer: Orthogonalizer,
        scale: Scale,
        rest_patterns: Sequence[str],
    ) -> None:
        self.lr = positive("lr", lr)
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha}: must be in (0, 1]")
        self._lmo = partial(LMO, alpha=alpha, orthogonalizer=orthogonalizer, scale=scale)
        self.rest_patterns = list(rest_patterns)

    def setup(self, setting: Setting) -> None:
        """Decides which parameters are matrices."""
        self.matrices, self.rest = _split(setting, self.rest_patterns)

    def rates(self, setting: Setting) -> list[float]:
        """The same for every parameter."""
        return [self.lr] * len(setting.x)

    def build(self, leaves: Sequence[Tensor], client_axis: bool) -> list[Member]:
        """One optimiser with a group of matrices and one of the rest, where there are any."""
        groups = [
            {"params": [leaves[i] for i in indices], "spectral": indices is self.matrices}
            for indices in (self.matrices, self.rest)
            if indices
        ]
        lmo = self._lmo(groups, lr=self.lr, client_axis=client_axis)
        return [Member(lmo, [*self.matrices, *self.rest])]


def _split(
    setting: Setting, rest_patterns: Sequence[str], matrix_patterns: Sequence[str] = ()
) -> tuple[list[int], list[int]]:
    """The indices of the matrices and of the rest."""
    shapes = {n: x.shape for n, x in zip(setting.names, setting.x, strict=True)}
    matrices, rest = split_parameters(shapes, rest_patterns, matrix_patterns)
    return [setting.names.index(n) for n in matrices], [setting.names.index(n) for n in rest]


def gradient_weights(steps: int, momentum: float, nesterov: bool = False) -> float:
    """|a|: what ``steps`` of SGD on a constant gradient of 1 move, in units of the rate.

    The sum of the weights that each gradient has in the displacement: ``steps`` without momentum
    (FedNova, arXiv 2007.07481, section 4).
    """
    velocity = total = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        total += 1 + momentum * velocity if nesterov else velocity
    return total


def is_ema(momentum_form: str) -> bool:
    """Whether momentum is an exponential moving average, (1 - beta) g + beta m, or g + beta m.

    Raises:
        ValueError: If it is neither ``"ema"`` nor ``"classic"``.
    """
    if momentum_form not in ("ema", "classic"):
        raise ValueError(f"momentum_form={momentum_form!r}: use 'ema' or 'classic'")
    return momentum_form == "ema"


def positive(name: str, value: float) -> float:
    """Returns the value.

    Raises:
        ValueError: If it is not a positive finite number.
    """
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}={value}: must be positive and finite")
    return value


def below_one(name: str, value: float) -> float:
    """Returns the value.

    Raises:
        ValueError: If it is not in [0, 1).
    """
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value}: must be in [0, 1)")
    return value


def not_negative(name: str, value: float) -> float:
    """Returns the value.

    Raises:
        ValueError: If it is negative or not finite.
    """
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}={value}: must be finite and not negative")
    return value


def _unwrap(factory: OptimizerFactory, key: str) -> tuple[type[Optimizer], dict[str, Any]]:
    """The optimiser's class and keywords out of a class, a partial, or a CLI factory."""
    keywords: dict[str, Any] = {}
    inner: Any = factory
    while isinstance(inner, partial):
        keywords = {**inner.keywords, **keywords}
        classes = [a for a in inner.args if isinstance(a, type) and issubclass(a, Optimizer)]
        inner = classes[0] if classes else inner.func
    if not (isinstance(inner, type) and issubclass(inner, Optimizer)):
        raise ValueError(f"{key} must be a torch.optim class or a partial of one, got {factory}")
    return inner, keywords
