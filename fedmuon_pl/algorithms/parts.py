"""The parts that a method is composed of; :mod:`fedmuon_pl.algorithms.base` puts them together.

All tensors of a client carry a leading client axis: a block of C clients trains side by side, and
nothing here may mix them. Lists of tensors follow the order of the trainable parameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..clients import Tensors, batch_norm_state, persistent_buffers, random_state_kept, trainable

__all__ = ["LocalRule", "LocalRun", "Mechanism", "Member", "Setting", "Upload"]


@dataclass(frozen=True)
class Setting:
    """What a method is told once, before the first round.

    Attributes:
        names: Names of the trainable parameters.
        x: The global parameters, each of ``shape``: x^r until the server has stepped, but something
            else at the setup of a resumed run.
        population: N, the clients that can be sampled (those that have data).
        local_steps: K, if all clients make this number of steps in every round; None if theirs may
            differ.
        buffers: The global model's buffers by name.
        batch_norm: Names of the parameters and buffers that belong to BatchNorm layers.
    """

    names: list[str]
    x: Tensors
    population: int
    local_steps: int | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    batch_norm: frozenset[str] = frozenset()

    @classmethod
    def of(cls, network: nn.Module, population: int, local_steps: int | None = None) -> Self:
        """What there is to say of a network."""
        params = trainable(network)
        x = [p.detach() for p in params.values()]
        buffers = persistent_buffers(network)
        names = batch_norm_state(network)
        return cls(list(params), x, population, local_steps, buffers, names)

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

    def state_like(self, setting: Setting) -> Iterator[tuple[type, int, dict[str, Any]]]:
        """What the optimisers keep: (their class, a parameter's index, its state by name).

        Of the states only names, kinds and shapes mean anything; they come from one step of every
        optimiser from zero weights with zero gradients, without a client axis.
        """
        leaves = [torch.zeros_like(x, requires_grad=True) for x in setting.x]
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)
        for optimizer, indices in self.build(leaves, client_axis=False):
            with torch.no_grad(), random_state_kept(leaves[0].device):
                optimizer.step()
            for i in indices:
                state = optimizer.state.get(leaves[i], {})
                yield type(optimizer), i, {k: v for k, v in state.items() if v is not None}


class Upload(NamedTuple):
    """What a mechanism sends from each client of a block to the server, to be averaged.

    Attributes:
        tensors: Each ``(C, *any)``.
        by_weight: Average with the round's client weights (the default) or uniformly.
        sent: What a deployment would send, for counting bytes: True for the tensors themselves,
            False for nothing, where the server can derive them from the displacement, or what it
            can restore them from, each ``(C, *any)``, such as low-rank factors.
    """

    tensors: Tensors
    by_weight: bool = True
    sent: bool | Tensors = True

    def payload(self) -> Tensors:
        """What is sent, each ``(C, *any)``."""
        if isinstance(self.sent, bool):
            return self.tensors if self.sent else []
        return self.sent


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
        client_axis: Whether the leaves of the optimisers have the client axis (C > 1).
        steps: Local steps done so far, K_i at the end; equal for the clients of a block.
        received: Bytes that the block's clients were sent beside x^r and the buffers.
        memory: For a mechanism to keep things from :meth:`Mechanism.begin` to
            :meth:`Mechanism.end`, under its own name.
        client_state: Per-client state by name, each tensor ``(C, *any)``: what was loaded before
            ``begin`` for each name in :attr:`Mechanism.client_state`; what a mechanism puts back
            in ``end`` is kept if the client's update is accepted.
        full_gradient: The gradient of each client's loss over its whole data at x^r,
            ``(C, *shape)``, where a mechanism asks for it (:attr:`Mechanism.full_gradient`).
        anchor_gradient: The gradient at x^r of the batch of this step, ``(C, *shape)``, in
            :meth:`Mechanism.correct`, where one asks for it (:attr:`Mechanism.anchor_gradient`).
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
    received: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    client_state: dict[str, Tensors] = field(default_factory=dict)
    full_gradient: Tensors | None = None
    anchor_gradient: Tensors | None = None
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

    def set_state(
        self, key: str, indices: Sequence[int], values: Sequence[Tensor], per_client: bool = False
    ) -> None:
        """Places optimiser state before the first step.

        Args:
            key: The optimiser's name for it, such as ``"momentum_buffer"``.
            indices: Which parameters.
            values: One tensor for each, without a client axis.
            per_client: Whether the values are ``(C, *shape)`` instead, one for each client.
        """
        for i, value in zip(indices, values, strict=True):
            optimizer, leaf = self._leaf(i)
            if not per_client:
                axis = (len(self.clients),) if self.client_axis else ()
                value = value.expand((*axis, *value.shape))
            elif not self.client_axis:
                value = value[0]
            like = leaf if value.shape == leaf.shape else value  # in layout: fused kernels need it
            optimizer.state[leaf][key] = torch.empty_like(like, dtype=value.dtype).copy_(value)

    def get_state(self, key: str, indices: Sequence[int]) -> Tensors:
        """Reads optimiser state as ``(C, *any)`` views; weight-like zeros where there is none."""
        out = []
        for i in indices:
            optimizer, leaf = self._leaf(i)
            value = optimizer.state[leaf].get(key)
            value = torch.zeros_like(leaf, requires_grad=False) if value is None else value
            out.append(value if self.client_axis else value.unsqueeze(0))
        return out

    def set_number(self, key: str, indices: Sequence[int], value: float | Tensor) -> None:
        """Places a state that is one number, of all clients of the block or ``(C,)`` of each.

        A tensor, as torch's optimisers keep it, or as it is where the optimiser has ``weights``.
        """
        if isinstance(value, Tensor) and not self.client_axis:
            value = float(value[0])
        for i in indices:
            optimizer, leaf = self._leaf(i)
            own = hasattr(optimizer, "weights")
            number = value if own else torch.tensor(value, dtype=torch.float32).to(leaf.device)
            optimizer.state[leaf][key] = number

    def get_number(self, key: str, indices: Sequence[int]) -> Tensor:
        """Reads such a state of each client, ``(C,)`` in float64; 0 where there is none.

        Raises:
            ValueError: If it is not the same for all these parameters.
        """
        found = [self._leaf(i) for i in indices]
        values = [optimizer.state[leaf].get(key, 0.0) for optimizer, leaf in found]
        if len({v for v in values if isinstance(v, float)}) > 1:
            raise ValueError(f"{key} differs between parameter groups: give them the same betas")
        value: Any = values[0]
        if not isinstance(value, Tensor):  # so that a GPU is not waited for
            value = torch.full((), value, dtype=torch.float64, device=found[0][1].device)
        return value.to(torch.float64).expand(len(self.clients))  # type: ignore[no-any-return]

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
        full_gradient: Asks for a pass over each client's whole data at x^r before its local steps.
            ``"client"``: the result is in :attr:`LocalRun.full_gradient`. ``"cohort"``: the whole
            cohort makes its pass before any local step, and the mean comes to
            :meth:`cohort_gradient`.
        anchor_gradient: Asks for a second gradient of every batch, at x^r, with the same random
            numbers (dropout), in :attr:`LocalRun.anchor_gradient`.
        stays_local: Names of the parameters and buffers that the clients keep for themselves:
            never averaged, sent or received. Set in :meth:`setup`, by a method's first mechanism
            only.
        lr: As :attr:`LocalRun.lr`, set before :meth:`aggregate` in every process.
    """

    name: str
    client_state: tuple[str, ...] = ()
    full_gradient: Literal["client", "cohort"] | None = None
    anchor_gradient: bool = False
    stays_local: frozenset[str] = frozenset()
    lr: list[float]

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

    def cohort_gradient(self, mean: Tensors) -> None:
        """Before the first local step of a round, with ``full_gradient = "cohort"``.

        Args:
            mean: sum_i w_i grad f_i(x^r) over the cohort, in float64.
        """

    def receivers(self, run: LocalRun) -> int:
        """How many receive :meth:`download`: all, unless some hold it. After :meth:`begin`."""
        return len(run.clients)

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
        """Before the local step; changes ``gradients``, ``(C, *shape)`` of any layout, in place."""

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
            mean: The mean over the cohort of what :meth:`end` returned, in float64; empty if that
                was nothing.
            cohort_size: S, the clients whose updates were accepted.
        """

    def server_direction(self, displacement: Tensors) -> Tensors:
        """After :meth:`aggregate`: what the server steps along, in place of the mean displacement.

        Args:
            displacement: sum_i w_i (x_i^{K_i} - x^r), in float64, not to be changed in place.
        """
        return displacement
