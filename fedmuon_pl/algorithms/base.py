"""What a federated method is made of, and how the engine drives it.

A method is a composition of three kinds of parts:

- a **local rule** (:class:`LocalRule`): the optimiser that makes a client's local steps;
- **mechanisms** (:class:`Mechanism`): what is sent beside the weights and how it acts on the
  client (a drift correction, a shared direction, a shared momentum) and on the server;
- a **server rule**: a :class:`torch.optim.Optimizer` that takes the pseudo-gradient: the negative
  weighted mean of the clients' displacements, unless a mechanism puts another direction in its
  place.

The first two are defined in :mod:`fedmuon_pl.algorithms.parts`.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..clients import ClientStack, Tensors, nbytes
from ..pytrees import plain
from .parts import LocalRule, LocalRun, Mechanism, Member, Setting, Upload

__all__ = [
    "Algorithm",
    "LocalRule",
    "LocalRun",
    "Mechanism",
    "Member",
    "ServerRule",
    "Setting",
    "Upload",
    "plain_average",
]

ServerRule = Callable[[Iterable[Tensor]], Optimizer]
"""Builds the server optimiser over the global parameters."""


def plain_average(params: Iterable[Tensor]) -> Optimizer:
    """The server rule of FedAvg: x <- x + mean displacement."""
    return torch.optim.SGD(params, lr=1.0)


class Algorithm:
    """A federated method: a local rule, mechanisms and a server rule.

    Args:
        local: The local rule.
        mechanisms: In the order in which their hooks run.
        server: The server rule; plain averaging if None.

    Raises:
        ValueError: If two mechanisms have the same name, or one that the server uses itself.
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
        if len({*names, "displacement", "buffers"}) != len(names) + 2:
            raise ValueError(f"mechanisms need names of their own, not {names}")

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
        return {"name": self.name, **{k: plain(v) for k, v in self._arguments.items()}}

    def setup(self, setting: Setting) -> None:
        """Allocates the method's state; called once, when the model is on its device."""
        self.setting = setting
        self.local.setup(setting)
        self.rates = self.local.rates(setting)
        scales = [1.0] * len(setting.x)
        for mechanism in self.mechanisms:
            mechanism.setup(setting)
            scales = [s * mechanism.local_scale(i) for i, s in enumerate(scales)]
            if mechanism.stays_local and mechanism is not self.mechanisms[0]:
                # The others must find the client's own start, and no displacement.
                raise ValueError(f"{mechanism.name} must be the first of the mechanisms")
        asks = [m.name for m in self.mechanisms if m.full_gradient or m.anchor_gradient]
        if asks and self.stays_local():
            # They are taken at the global model, which is not where such a client is.
            raise ValueError(
                f"{self.mechanisms[0].name} cannot be combined with {asks[0]}, which asks for "
                f"gradients at x^r: every client has an x^r of its own"
            )
        self._scales = scales
        self._built: dict[tuple[int, ...], tuple[list[Member], list[list[dict[str, Any]]]]] = {}

    def asks_for(self, kind: Literal["client", "cohort", "anchor"]) -> bool:
        """Whether a mechanism needs a full gradient of that kind, or anchor gradients."""
        if kind == "anchor":
            return any(m.anchor_gradient for m in self.mechanisms)
        return any(m.full_gradient == kind for m in self.mechanisms)

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
        members = self.members(stack)
        lr = [rate * lr_factor for rate in self.rates]
        for optimizer, indices in members:
            first = 0
            for group in optimizer.param_groups:
                i = indices[first]
                group["lr"] = lr[i] * self._scales[i]
                first += len(group["params"])
        axis = stack.clients > 1
        run = LocalRun(round, clients, x0, stack.x, lr, members, axis)
        run.client_state.update(client_state or {})
        run.buffers = stack.buffers
        for mechanism in self.mechanisms:
            mechanism.begin(run)
        run.received = sum(m.receivers(run) * nbytes(m.download()) for m in self.mechanisms)
        return run

    def members(self, stack: ClientStack) -> list[Member]:
        """Fresh local optimisers over a stack; they are built once for each of its sizes.

        Raises:
            ValueError: If the local rule cannot train clients side by side, or an argument of an
                optimiser makes no sense.
        """
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
            built = self.local.build(stack.leaves, stack.clients > 1)
            self._built[key] = built, [group_options(optimizer) for optimizer, _ in built]
        members, options = self._built[key]
        for (optimizer, _), groups in zip(members, options, strict=True):
            optimizer.state.clear()
            for group, as_built in zip(optimizer.param_groups, groups, strict=True):
                for added in group.keys() - as_built.keys() - {"params"}:
                    del group[added]
                group.update(deepcopy(as_built))  # some count their steps there
        return members

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

    def release(self, run: LocalRun) -> None:
        """Forgets what the block's optimisers hold; the next block may be of another size."""
        for optimizer, _ in run.members:
            optimizer.state.clear()

    def aggregate(
        self, means: Mapping[str, Tensors], cohort_size: int, lr_factor: float = 1.0
    ) -> Tensors:
        """New server state of every mechanism, and what the server steps along.

        Args:
            means: The averaged uploads by mechanism, and the mean ``"displacement"``; in float64.
            cohort_size: S, the clients whose updates were accepted.
            lr_factor: As in :meth:`begin`.
        """
        direction = means["displacement"]
        lr = [rate * lr_factor for rate in self.rates]
        for mechanism in self.mechanisms:
            mechanism.lr = lr
            mechanism.aggregate(means.get(mechanism.name, []), cohort_size)
            direction = mechanism.server_direction(direction)
        return direction

    def client_state_like(self) -> dict[str, Tensors]:
        """Shapes of the per-client state by name; empty for a method without any."""
        return {
            key: m.client_state_like(key, self.setting)
            for m in self.mechanisms
            for key in m.client_state
        }

    def stays_local(self) -> frozenset[str]:
        """Names of the parameters and buffers that are never averaged, sent or received."""
        return frozenset().union(*(m.stays_local for m in self.mechanisms))

    def personalise(
        self, x: Tensors, buffers: Mapping[str, Tensor], state: Mapping[str, Tensors]
    ) -> None:
        """Turns the global model into the clients' own ones, see :meth:`Mechanism.personalise`."""
        for mechanism in self.mechanisms:
            mechanism.personalise(x, buffers, state)

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


def _keys(state: Mapping[str, Mapping[str, Tensors]]) -> list[str]:
    return sorted(f"{key}.{name}" for key, entries in state.items() for name in entries)


def group_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What an optimiser's groups hold beside their parameters."""
    return [
        {key: deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
