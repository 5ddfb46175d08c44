"""What a federated method is made of, and how the engine drives it.

A method is a composition of three kinds of parts:

- a **local rule** (:class:`LocalRule`): the optimiser that makes a client's local steps;
- **mechanisms** (:class:`Mechanism`): what is sent beside the weights and how it acts on the
  client (a drift correction, a shared direction, a shared momentum) and on the server;
- a **server rule**: a :class:`torch.optim.Optimizer` that takes the pseudo-gradient, the negative
  weighted mean of the clients' displacements.

All tensors of a client carry a leading client axis: a block of C clients trains side by side, and
nothing here may mix them. Lists of tensors follow the order of the trainable parameters.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..clients import ClientStack, Tensors

__all__ = [
    "Algorithm",
    "LocalRule",
    "LocalRun",
    "Mechanism",
    "Member",
    "ServerRule",
    "Setting",
    "Upload",
    "plain",
    "plain_average",
]

ServerRule = Callable[[Iterable[Tensor]], Optimizer]
"""Builds the server optimiser over the global parameters."""


def plain_average(params: Iterable[Tensor]) -> Optimizer:
    """The server rule of FedAvg: x <- x + mean displacement."""
    return torch.optim.SGD(params, lr=1.0)


@dataclass(frozen=True)
class Setting:
    """What a method is told once, before the first round.

    Attributes:
        names: Names of the trainable parameters.
        x: The global parameters, each of ``shape``; only shape, dtype and device may be used.
        population: N, the clients that can be sampled (those that have data).
    """

    names: list[str]
    x: Tensors
    population: int

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
        x0: x^r, the broadcast weights, without client axis.
        x: The clients' weights ``(C, *shape)``, changed in place by every step.
        lr: The learning rate eta of each parameter in this round, not yet scaled by (1 - alpha).
        members: The local optimisers.
        steps: Local steps done so far, K_i at the end; equal for the clients of a block.
        memory: For a mechanism to keep things from :meth:`Mechanism.begin` to
            :meth:`Mechanism.end`, under its own name.
        client_state: Per-client state by name, each tensor ``(C, *any)``: what was loaded before
            ``begin`` for each name in :attr:`Mechanism.client_state`; what a mechanism puts back
            in ``end`` is kept if the client's update is accepted.
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
    _displacement: Tensors | None = None

    def displacement(self) -> Tensors:
        """x_i^{K_i} - x^r of every client, ``(C, *shape)``; only after the last step."""
        if self._displacement is None:
            self._displacement = list(torch._foreach_sub(self.x, self.x0))
        return self._displacement

    def displacement_per_rate(self) -> Tensors:
        """(x_i^{K_i} - x^r) / sum_k eta_{i,k}, and 0 where that sum is 0; ``(C, *shape)``."""
        total = [self.steps * lr for lr in self.lr]
        inverse = [1 / s if s > 0 else 0.0 for s in total]
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
    """

    name: str
    client_state: tuple[str, ...] = ()

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

    def begin(self, run: LocalRun) -> None:
        """Before the first local step of a block."""

    def correct(self, run: LocalRun, gradients: Tensors) -> None:
        """Between backward and the local step; changes ``gradients``, ``(C, *shape)``, in place."""

    def after_step(self, run: LocalRun) -> None:
        """After each local step; may change ``run.x`` in place."""

    def end(self, run: LocalRun) -> Upload | None:
        """After the last local step: what goes to the server."""
        return None

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


class Algorithm:
    """A federated method: a local rule, mechanisms and a server rule.

    Args:
        local: The local rule.
        mechanisms: In the order in which their hooks run.
        server: The server rule; plain averaging if None.

    Raises:
        ValueError: If two mechanisms have the same name.
    """

    def __init__(
        self,
        local: LocalRule,
        mechanisms: Sequence[Mechanism] = (),
        server: ServerRule | None = None,
    ) -> None:
        self.local = local
        self.mechanisms = list(mechanisms)
        self.server = server or plain_average
        names = [m.name for m in self.mechanisms]
        if len(set(names)) != len(names):
            raise ValueError(f"two mechanisms of one method have the same name: {names}")

    _arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: ANN401
        """Remembers the arguments, for :meth:`describe`."""
        self = super().__new__(cls)
        bound = inspect.signature(cls.__init__).bind(self, *args, **kwargs)
        bound.apply_defaults()
        self._arguments = {k: v for k, v in bound.arguments.items() if k != "self"}
        return self

    @property
    def name(self) -> str:
        """The method's name in messages and fingerprints."""
        return type(self).__name__

    def describe(self) -> dict[str, Any]:
        """Name and arguments in plain values, for the fingerprint of a run."""
        return {"algorithm": self.name, **{k: plain(v) for k, v in self._arguments.items()}}

    def setup(self, setting: Setting) -> None:
        """Allocates the method's state; called once, when the model is on its device."""
        self.setting = setting
        self.local.setup(setting)
        self.rates = self.local.rates(setting)
        scales = [1.0] * len(setting.x)
        for mechanism in self.mechanisms:
            mechanism.setup(setting)
            scales = [s * mechanism.local_scale(i) for i, s in enumerate(scales)]
        self._scales = scales
        self._built: dict[tuple[int, ...], list[Member]] = {}

    def server_optimizer(self, params: Iterable[Tensor]) -> Optimizer:
        """The server optimiser over the global parameters."""
        return self.server(params)

    def begin(
        self,
        stack: ClientStack,
        x0: Tensors,
        *,
        round: int,
        clients: list[int],
        lr_factor: float = 1.0,
        client_state: Mapping[str, Tensors] | None = None,
    ) -> LocalRun:
        """Starts a block whose stack already holds x^r.

        Args:
            stack: Holds x^r in every slice.
            x0: The global parameters, which must not change during the block.
            round: The round r.
            clients: The ids of the block's clients.
            lr_factor: The schedule's factor on every rate.
            client_state: The clients' state by name, each tensor ``(C, *any)``.
        """
        members = self._members(stack)
        lr = [rate * lr_factor for rate in self.rates]
        for optimizer, indices in members:
            optimizer.state.clear()
            first = 0
            for group in optimizer.param_groups:
                i = indices[first]
                group["lr"] = lr[i] * self._scales[i]
                first += len(group["params"])
        axis = stack.clients > 1
        run = LocalRun(round, clients, x0, stack.x, lr, members, axis)
        run.client_state.update(client_state or {})
        for mechanism in self.mechanisms:
            mechanism.begin(run)
        return run

    def _members(self, stack: ClientStack) -> list[Member]:
        if not self.local.elementwise:
            if stack.clients > 1:
                raise ValueError(
                    f"{self.name}: its local optimiser couples the elements of a tensor, so that "
                    f"clients cannot train side by side; set clients_at_once=1"
                )
            # One that we do not know may keep something beside its state; it is built anew.
            return self.local.build(stack.leaves, client_axis=False)
        key = tuple(id(leaf) for leaf in stack.leaves)
        if key not in self._built:
            self._built[key] = self.local.build(stack.leaves, stack.clients > 1)
        return self._built[key]

    def correct(self, run: LocalRun, gradients: Tensors) -> None:
        """Applies every mechanism's correction to the gradients, in place."""
        for mechanism in self.mechanisms:
            mechanism.correct(run, gradients)

    def step(self, run: LocalRun) -> None:
        """One local step from the gradients, and what follows it."""
        for optimizer, _ in run.members:
            optimizer.step()
        run.steps += 1
        for mechanism in self.mechanisms:
            mechanism.after_step(run)

    def end(self, run: LocalRun) -> dict[str, Upload]:
        """The uploads of the block beside the displacements, by mechanism."""
        uploads = {m.name: m.end(run) for m in self.mechanisms}
        return {name: upload for name, upload in uploads.items() if upload is not None}

    def aggregate(self, means: Mapping[str, Tensors], cohort_size: int) -> Tensors:
        """New server state of every mechanism, and what the server steps along.

        Args:
            means: The averaged uploads by mechanism, and the mean ``"displacement"``; in float64.
            cohort_size: S, the clients whose updates were accepted.
        """
        direction = means["displacement"]
        for mechanism in self.mechanisms:
            if mechanism.name in means:
                mechanism.aggregate(means[mechanism.name], cohort_size)
            direction = mechanism.server_direction(direction)
        return direction

    def download(self) -> Tensors:
        """What a client receives beside x^r and the buffers."""
        return [t for m in self.mechanisms for t in m.download()]

    def client_state_like(self) -> dict[str, Tensors]:
        """Shapes of the per-client state by name; empty for a method without any."""
        return {
            key: m.client_state_like(key, self.setting)
            for m in self.mechanisms
            for key in m.client_state
        }

    def state_dict(self) -> dict[str, dict[str, Tensors]]:
        """The server state: lists of tensors by mechanism and name."""
        return {m.name: dict(m.server_state) for m in self.mechanisms if m.server_state}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensors]]) -> None:
        """Restores :meth:`state_dict` after :meth:`setup`.

        Raises:
            ValueError: If the state is not one of this method, or a shape differs.
        """
        own = self.state_dict()
        if {k: set(v) for k, v in own.items()} != {k: set(v) for k, v in state.items()}:
            raise ValueError(f"{self.name}: the saved state has {_keys(state)}, not {_keys(own)}")
        for key, entries in own.items():
            for name, tensors in entries.items():
                saved = state[key][name]
                if [t.shape for t in saved] != [t.shape for t in tensors]:
                    raise ValueError(f"{self.name}: the saved {key}.{name} has other shapes")
                for mine, theirs in zip(tensors, saved, strict=True):
                    mine.copy_(theirs)


def plain(value: Any) -> Any:  # noqa: ANN401
    """A constructor argument as numbers, strings, lists and dicts."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [plain(v) for v in value]
    if isinstance(value, partial):
        # The CLI's factories carry the class among the arguments.
        kinds: list[Any] = [a for a in value.args if isinstance(a, type)] or [value.func]
        return {"call": plain(kinds[0]), **{k: plain(v) for k, v in value.keywords.items()}}
    if isinstance(value, Algorithm):
        return value.describe()
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _keys(state: Mapping[str, Mapping[str, Tensors]]) -> list[str]:
    return sorted(f"{key}.{name}" for key, entries in state.items() for name in entries)
