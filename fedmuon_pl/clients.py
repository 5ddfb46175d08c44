"""One representation of simulated clients: tensors with a leading client axis.

The weights of the C clients that train side by side are tensors of shape ``(C, *param_shape)``.
With C = 1 a shell module, whose parameters are views of slice 0, runs the plain forward; with
C > 1 :func:`torch.vmap` runs the forward of all clients at once and one ordinary backward of the
summed losses gives every client its own gradient. Whatever comes after the gradient is written
once, for any C.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from .pytrees import map_tensors

__all__ = [
    "ClientStack",
    "Forward",
    "LossFunction",
    "Tensors",
    "alike",
    "batch_norm_state",
    "channels_last_fault",
    "clip_per_client",
    "convolution_kernels",
    "nbytes",
    "persistent_buffers",
    "random_state_kept",
    "side_by_side_fault",
    "trainable",
]

Tensors = list[Tensor]
"""Tensors in the order of the network's trainable parameters."""

Forward = Callable[..., Any]
"""The network as a function: call it as the module itself."""

LossFunction = Callable[[Forward, Any], Tensor]
"""``loss(network, batch)``: the mean loss of one client's batch, a scalar."""


def trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; tied ones are listed once."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


def persistent_buffers(network: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's state (BatchNorm statistics and the like), by name."""
    saved = network.state_dict(keep_vars=True)
    return {name: b for name, b in network.named_buffers() if name in saved}


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Their size in bytes."""
    return sum(t.numel() * t.element_size() for t in tensors)


def random_state_kept(device: torch.device) -> AbstractContextManager[None]:
    """A context after which the random streams of the CPU and of one device are as before."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def batch_norm_state(network: nn.Module) -> frozenset[str]:
    """Names of the parameters and buffers that belong to BatchNorm layers.

    The class of a layer decides, whatever it is called: a ResNet's ``downsample.1`` is one too.
    """
    return frozenset(
        f"{path}.{name}".lstrip(".")
        for path, module in network.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name in (*dict(module.named_parameters()), *dict(module.named_buffers()))
    )


def convolution_kernels(network: nn.Module) -> list[str]:
    """Names of the trained kernels of plain ``nn.Conv2d``.

    A subclass may do with its kernel what the layout in memory forbids, such as ``view``.
    """
    return [
        f"{name}.weight" if name else "weight"
        for name, module in network.named_modules()
        if type(module) is nn.Conv2d and module.weight.requires_grad
    ]


class ClientStack:
    """Weights and buffers of up to ``capacity`` clients, allocated once and refilled in place.

    Args:
        network: The global model; it is copied once, in the training or evaluation mode that each
            of its modules is in, and never changed from here. Frozen parameters are shared with
            it, not stacked.
        capacity: The most clients that train side by side, C.
        channels_last: Whether the kernels of ``nn.Conv2d`` lie in memory as (out, kh, kw, in),
            which makes the forward and the backward run in that layout. Shapes and values are the
            same, results agree up to rounding.

    Attributes:
        names: Names of the trainable parameters, the order of all tensor lists here.
        clients: How many clients the stack holds now; set by :meth:`resize`.
        x: The clients' weights, a list of ``(C, *shape)`` tensors.
        buffers: The clients' buffers by name, each ``(C, *shape)``.
        leaves: The leaf parameters to give to an optimiser: the shell's own, without a client
            axis, for C = 1, else the stacked ones.
    """

    def __init__(self, network: nn.Module, capacity: int, channels_last: bool = False) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 client, got {capacity}")
        self.capacity = capacity
        self.shell = deepcopy(network)
        own, theirs = dict(self.shell.named_parameters()), dict(network.named_parameters())
        for name, p in own.items():
            if not p.requires_grad:
                p.data = theirs[name].data
        self.names = list(trainable(self.shell))
        self._shell_leaves = [own[name] for name in self.names]
        kernels = set(convolution_kernels(self.shell)) if channels_last else set()
        self._storage = [_stacked(own[name], capacity, name in kernels) for name in self.names]
        self._buffer_storage = {n: _stacked(b, capacity) for n, b in self.shell.named_buffers()}
        # The shell's tensors become views of slice 0, so that C = 1 needs no copying at all.
        for p, storage in zip(self._shell_leaves, self._storage, strict=True):
            p.data = storage[0]
        self._homes: dict[str, tuple[dict[str, Tensor | None], str, Tensor]] = {}
        for name, storage in self._buffer_storage.items():
            path, _, key = name.rpartition(".")
            buffer = self.shell.get_buffer(name)
            buffer.data = storage[0]
            self._homes[name] = self.shell.get_submodule(path)._buffers, key, buffer
        if capacity > 1:
            for module in self.shell.modules():
                if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                    _cut_padding_gradient(module)
        self._by_size: dict[int, list[nn.Parameter]] = {}
        self.resize(capacity)

    def resize(self, clients: int) -> None:
        """Uses the first ``clients`` slices only; nothing is allocated or copied.

        Raises:
            ValueError: If that is less than one client or more than the capacity.
        """
        if not 1 <= clients <= self.capacity:
            raise ValueError(f"a stack of capacity {self.capacity} cannot hold {clients} clients")
        self.clients = clients
        if clients not in self._by_size:
            stacked = [nn.Parameter(s[:clients]) for s in self._storage]
            self._by_size[clients] = self._shell_leaves if clients == 1 else stacked
        self.leaves = self._by_size[clients]
        self.x = [s[:clients] for s in self._storage]
        self._own_buffers()

    def _own_buffers(self) -> None:
        """Forgets the buffers that a forward has replaced by new tensors."""
        self.buffers = {n: s[: self.clients] for n, s in self._buffer_storage.items()}
        for home, key, own in self._homes.values():
            home[key] = own

    @torch.no_grad()
    def load(self, x: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Gives every client the same weights and buffers (the broadcast)."""
        self._own_buffers()
        torch._foreach_copy_(self.x, list(x))
        for name, stacked in self.buffers.items():
            stacked.copy_(buffers[name])

    def losses(self, loss: LossFunction, batch: Any) -> Tensor:  # noqa: ANN401
        """The clients' batch losses, ``(C,)``, ready for one backward of their sum.

        Args:
            loss: ``loss(network, batch)`` of one client.
            batch: A pytree of tensors ``(C, B, ...)``.
        """
        if self.clients == 1:
            value = loss(self.shell, map_tensors(_first, batch)).unsqueeze(0)
            for name, (home, key, own) in self._homes.items():
                new = home[key]
                if new is not own and new is not None:  # the forward has set another tensor
                    self.buffers[name] = new.detach().unsqueeze(0)
            return value

        def one(params: dict[str, Tensor], buffers: dict[str, Tensor], sample: Any) -> Any:  # noqa: ANN401
            state = {**params, **buffers}

            def network(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                return functional_call(self.shell, state, args, kwargs)

            value = loss(network, sample)
            return value, {n: state[n].detach() for n, b in buffers.items() if state[n] is not b}

        params: dict[str, Tensor] = dict(zip(self.names, self.leaves, strict=True))
        mapped: tuple[Tensor, dict[str, Tensor]]
        # Attention's fused kernel for CPUs has no rule for vmap (torch 2.14); its plain form has.
        with sdpa_kernel(SDPBackend.MATH) if self.leaves[0].is_cpu else nullcontext():
            mapped = torch.vmap(one, randomness="different")(params, self.buffers, batch)
        self.buffers.update(mapped[1])
        return mapped[0]

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for p in self.leaves:
            p.grad = None

    def gradients(self) -> Tensors:
        """The gradients as ``(C, *shape)`` views of what the optimiser will read.

        A parameter that the forward did not use has a gradient of zero.
        """
        out = []
        for p in self.leaves:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            out.append(self.with_axis(p.grad))
        return out

    def with_axis(self, leaf_like: Tensor) -> Tensor:
        """A tensor shaped like a leaf as a view with the client axis."""
        return leaf_like.unsqueeze(0) if self.clients == 1 else leaf_like


def channels_last_fault(network: nn.Module, loss: LossFunction, batch: Any) -> str | None:  # noqa: ANN401
    """Why a network cannot run with channels last, in words; None if it can.

    One forward and backward are made. ``x.view(...)`` of a convolution's output is what fails.

    Args:
        network: The global model; it is not changed.
        loss: ``loss(network, batch)`` of one client.
        batch: A pytree of tensors ``(1, B, ...)``: a few samples of one client.
    """
    stack = ClientStack(network, 1, channels_last=True)
    with random_state_kept(stack.x[0].device):
        try:
            stack.losses(loss, batch).sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as e:
            why = str(e).partition("\n")[0].rstrip(". ")
            return f"the network's forward cannot run with channels last ({why})"
    return None


def side_by_side_fault(network: nn.Module, loss: LossFunction, batch: Any) -> str | None:  # noqa: ANN401
    """Why clients cannot train side by side on this network, in words; None if they can.

    Two clients make a forward and a backward one at a time, then side by side. Not every operation
    has a rule for :func:`torch.vmap`, and not every rule is right.

    Args:
        network: The global model; it is not changed.
        loss: ``loss(network, batch)`` of one client.
        batch: A pytree of tensors ``(2, B, ...)``: a few samples of each client.
    """
    x = [p.detach() for p in trainable(network).values()]
    buffers = dict(network.named_buffers())
    cuda = x[0].is_cuda
    with random_state_kept(x[0].device):
        before = torch.cuda.get_rng_state(x[0].device) if cuda else torch.get_rng_state()
        alone = ClientStack(network, 1)
        expected = []
        for c in range(2):
            alone.load(x, buffers)
            alone.zero_grad()
            alone.losses(loss, tree_map(lambda t, c=c: t[c : c + 1], batch)).sum().backward()  # type: ignore[no-untyped-call]
            expected.append(alone.gradients())
        after = torch.cuda.get_rng_state(x[0].device) if cuda else torch.get_rng_state()
    if not torch.equal(before, after):
        return (
            "the network's forward draws random numbers (dropout?), which would depend on the block"
        )
    both = ClientStack(network, 2)
    try:
        both.losses(loss, batch).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as e:
        why = str(e).partition("\n")[0].rstrip(". ")
        return f"the network's forward cannot run side by side ({why})"
    wanted = [torch.cat(pair) for pair in zip(*expected, strict=True)]
    # A wrong rule is off by far more; rounding, in TF32 and through BatchNorm too, by far less.
    slack = 1e-3 * float(torch.stack([w.norm() for w in wanted]).norm())
    for name, mine, theirs in zip(both.names, both.gradients(), wanted, strict=True):
        if float((mine - theirs).norm()) > 0.05 * float(theirs.norm()) + slack:
            return f"the gradient of {name} would differ from that of one client at a time"
    return None


def alike(one: Tensor, stacked: Tensor) -> Tensor:
    """A tensor that is to be added to ``(C, *shape)``, and broadcasts to it, step by step.

    For one client with its axis and in its memory layout, so that adding is one pass.
    """
    if len(stacked) > 1:
        return one
    return torch.empty_like(stacked[:1]).copy_(one)


def clip_per_client(gradients: Tensors, max_norm: float) -> None:
    """Scales each client's gradient to a global norm of at most ``max_norm``, in place.

    Args:
        gradients: Each ``(C, *shape)``.
        max_norm: As in :func:`torch.nn.utils.clip_grad_norm_`, whose epsilon of 1e-6 it shares.
    """
    if len(gradients[0]) == 1:  # fewer calls, and no copy where the layout is channels last
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return
    rows = [g.unsqueeze(1).flatten(1) for g in gradients]  # a parameter may be a scalar
    norms = torch.stack([torch.linalg.vector_norm(r, dim=1) for r in rows])
    factor = (max_norm / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for g in gradients:
        g.mul_(factor.view(-1, *[1] * (g.ndim - 1)))


def _cut_padding_gradient(module: nn.Embedding) -> None:
    """Does by hand what ``padding_idx`` does: under vmap its row gets a gradient (torch 2.14)."""
    padding, module.padding_idx = module.padding_idx, None

    def hook(_: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:  # noqa: ANN401
        ids = args[0] if args else kwargs["input"]
        return torch.where((ids == padding).unsqueeze(-1), out.detach(), out)

    module.register_forward_hook(hook, with_kwargs=True)


def _stacked(t: Tensor, capacity: int, channels_last: bool = False) -> Tensor:
    shape = list(t.shape)
    if channels_last:
        shape.append(shape.pop(1))
    new = torch.empty((capacity, *shape), dtype=t.dtype, device=t.device)
    if channels_last:
        # Not by `contiguous`, which leaves the strides of one input channel as they are; torch
        # chooses the layout by them.
        new = new.movedim(-1, 2)
    return new.copy_(t.detach())


def _first(t: Tensor) -> Tensor:
    return t[0]
