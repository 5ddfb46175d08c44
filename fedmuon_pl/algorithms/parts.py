"""The parts that a method is composed of; :mod:`fedmuon_pl.algorithms.base` puts them together.

All tensors of a client carry a leading client axis: a block of C clients trains side by side, and
nothing here may mix them. Lists of tensors follow the order of the trainable parameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..clients import Tensors, batch_norm_state, persistent_buffers, trainable

__all__ = ["LocalRule", "LocalRun", "Mechanism", "Member", "Setting", "Upload"]


@dataclass(frozen=True)
class Setting:
    """What a method is told once, before the first round.

    Attributes:
        names: Names of the trainable parameters.
        x: The global parameters, each of ``shape``; only shape, dtype and device may be used.
        population: N, the clients that can be sampled (those that have data).
        buffers: The global model's buffers by name.
        batch_norm: Names of the parameters and buffers that belong to BatchNorm layers.
    """

    names: list[str]
    x: Tensors
    population: int
    buffers: dict[str, Tensor] = field(default_factory=dict)
    batch_norm: frozenset[str] = frozenset()

    @classmethod
    def of(cls, network: nn.Module, population: int) -> Self:
        """What there is to say of a network."""
        params = trainable(network)
        x = [p.detach() for p in params.values()]
        buffers = persistent_buffers(network)
        return cls(list(params), x, population, buffers, batch_norm_state(network))

    def zeros(self, indices: Iterable[int] | None = None) -> Tensors:
        """Zeros shaped like the chosen global parameters (all by default)."""
        chosen = range(len(self.x)) if indices is None else indices
        return [torch.zeros_like(self.x[i], requires_grad=False) for i in chosen]


class Member(NamedTuple):
    """One local optimiser and the parameters that it moves."""

    optimizer: Optimizer
    indices: list[int]


class LocalRule(ABC):
    """Builds the optimiser of the clients' local steps."""

    lr: float
    """The rule's principal learning rate, which is logged."""

    elementwise = True
    """Whether the rule is exact per client for C > 1 clients side by side."""

    def setup(self, setting: Setting) -> None:  # noqa: B027
        """Called once, before the first round."""

    @abstractmethod
    def rates(self, setting: Setting) -> list[float]:
        """The learning rate eta of each parameter, before schedule and scaling."""

    @abstractmethod
    def build(self, leaves: Sequence[Tensor], client_axis: bool) -> list[Member]:
        """Optimisers over the leaves, ``(C, *shape)`` with a client axis, else ``shape``.

        Every parameter belongs to exactly one member, and the parameters of one parameter group
        have the same rate.
        """


class Upload(NamedTuple):
    """What a mechanism sends from each client of a block to the server, to be averaged.

    Attributes:
        tensors: Each ``(C, *any)``.
        by_weight: Average with the round's client weights (the default) or uniformly.
        sent: Whether a deployment would have to send it; False where the server can derive it
            from the displacement (it then counts no bytes).
    """

    tensors: Tensors
    by_weight: bool = True
    sent: bool = True


@dataclass
class LocalRun:
    """One block of C clients in one round, as the mechanisms see it.

    Attributes:
        round: The round r, 0-based.
        clients: The ids of the block's clients, C of them.
        x0: x^r, the broadcast weights, without client axis; of a parameter that stays local, the
            clients' own start ``(C, *shape)``.
        x: The clients' weights ``(C, *shape)``, changed in place by every step.
        lr: The learning rate eta of each parameter in this round, not yet scaled by (1 - alpha).
        members: The local optimisers.
        steps: Local steps done so far, K_i at the end; equal for the clients of a block.
        memory: For a mechanism to keep things from :meth:`Mechanism.begin` to
            :meth:`Mechanism.end`, under its own name.
        client_state: Per-client state by name, each tensor ``(C, *any)``: what was loaded before
            ``begin`` for each name in :attr:`Mechanism.client_state`; what a mechanism puts back
            in ``end`` is kept if the client's update is accepted.
        buffers: The clients' buffers by name, each ``(C, *shape)``, changed by every forward.
    """

    round: int
    clients: list[int]
    x0: Tensors
    x: Tensors
    lr: list[float]
    members: list[Member]
    client_axis: bool
    steps: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    client_state: dict[str, Tensors] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    _displacement: Tensors | None = None

    def displacement(self) -> Tensors:
        """x_i^{K_i} - x^r of every client, ``(C, *shape)``; only after the last step."""
        if self._displacement is None:
            self._displacement = list(torch._foreach_sub(self.x, self.x0))
        return self._displacement

    def direction(self) -> Tensors:
        """-(x_i^{K_i} - x^r) / sum_k eta_{i,k}, and 0 where that sum is 0; ``(C, *shape)``."""
        total = [self.steps * lr for lr in self.lr]
        inverse = [-1 / s if s > 0 else 0.0 for s in total]
        return list(torch._foreach_mul(self.displacement(), inverse))

    def set_state(self, key: str, indices: Sequence[int], values: Sequence[Tensor]) -> None:
        """Places optimiser state, the same for every client, before the first step.

        Args:
            key: The optimiser's name for it, such as ``"momentum_buffer"``.
            indices: Which parameters.
            values: One tensor of ``shape`` for each.
        """
        for i, value in zip(indices, values, strict=True):
            optimizer, leaf = self._leaf(i)
            optimizer.state[leaf][key] = value.expand_as(leaf).clone()

    def get_state(self, key: str, indices: Sequence[int]) -> Tensors:
        """Reads optimiser state as ``(C, *shape)`` views; zeros where there is none."""
        out = []
        for i in indices:
            optimizer, leaf = self._leaf(i)
            value = optimizer.state[leaf].get(key)
            value = torch.zeros_like(leaf, requires_grad=False) if value is None else value
            out.append(value if self.client_axis else value.unsqueeze(0))
        return out

    def _leaf(self, index: int) -> tuple[Optimizer, Tensor]:
        for optimizer, indices in self.members:
            if index in indices:
                params = [p for group in optimizer.param_groups for p in group["params"]]
                return optimizer, params[indices.index(index)]
        raise KeyError(f"no local optimiser moves parameter {index}")


class Mechanism:
    """One mechanism of a method; every hook does nothing unless overridden.

    Attributes:
        name: Key of the mechanism's state, uploads and memory; unique within a method.
        client_state: Names of the per-client state that it keeps between rounds.
        server_state: What the server keeps and, unless :meth:`download` says otherwise, sends to
            the clients of the next round; saved in checkpoints.
        stays_local: Names of the parameters and buffers that the clients keep for themselves:
            never averaged, sent or received. Set in :meth:`setup`, by a method's first mechanism
            only.
    """

    name: str
    client_state: tuple[str, ...] = ()
    stays_local: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.server_state: dict[str, Tensors] = {}

    def setup(self, setting: Setting) -> None:
        """Allocates the server state; called once, before the first round."""

    def client_state_like(self, name: str, setting: Setting) -> Tensors:
        """Shapes of one per-client state, without client axis; it starts at zero."""
        return setting.x

    def download(self) -> Tensors:
        """What a client receives beside x^r; for counting bytes."""
        return [t for tensors in self.server_state.values() for t in tensors]

    def local_scale(self, index: int) -> float:
        """Factor on the local rule's learning rate for one parameter."""
        return 1.0

    def personalise(
        self, x: Tensors, buffers: Mapping[str, Tensor], state: Mapping[str, Tensors]
    ) -> None:
        """Turns the global model into the clients' own ones, in place.

        Args:
            x: The global parameters, once for each client: ``(C, *shape)``.
            buffers: The global buffers likewise, by name.
            state: The clients' state, as in :attr:`LocalRun.client_state`.
        """

    def begin(self, run: LocalRun) -> None:
        """Before the first local step of a block."""

    def correct(self, run: LocalRun, gradients: Tensors) -> None:
        """Between backward and the local step; changes ``gradients``, ``(C, *shape)``, in place."""

    def after_step(self, run: LocalRun) -> None:
        """After each local step; may change ``run.x`` in place."""

    def end(self, run: LocalRun) -> Upload | None:
        """After the last local step: what goes to the server."""
        return None

    def replace(self, name: str, values: Tensors) -> None:
        """Overwrites one entry of the server state, in place and in its own dtype."""
        for mine, value in zip(self.server_state[name], values, strict=True):
            mine.copy_(value)

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """At the round's end, before the server's step: new server state from the averaged upload.

        Args:
            mean: The mean over the cohort of what :meth:`end` returned, in float64.
            cohort_size: S, the clients whose updates were accepted.
        """

    def server_direction(self, displacement: Tensors) -> Tensors:
        """After :meth:`aggregate`: what the server steps along, in place of the mean displacement.

        Args:
            displacement: sum_i w_i (x_i^{K_i} - x^r), in float64, not to be changed in place.
        """
        return displacement
