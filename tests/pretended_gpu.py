"""A GPU for machines without one: CPU tensors that say they are on it, and nothing may mix the two.

What would raise on a GPU raises here (two devices in one operation, ``numpy()`` of a tensor that is
there), and what would wait for it is counted: values that Python reads, copies to the CPU, and from
it where its memory is not pinned, shapes that depend on values, decompositions that check whether
they converged. Not pretended: its numbers (TF32, autocast), kernels, random streams, memory, nor,
under ``vmap``, what a network makes without saying where.
"""

from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch
import torch._dynamo  # torch imports it within an operation, too late: it wants its own torch.cuda
from torch._functorch import vmap as functorch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_COPIES = {"aten::copy_", "aten::_to_copy"}
_INDEXING = {"aten::index", "aten::index_put_", "aten::index_put"}
# Operations in which a number of the CPU is no operand like the others.
_STRICT = {"aten::stack", "aten::cat"}
# Operations that cannot end before the GPU has computed their operands.
_WAITING = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::_linalg_eigh",
    "aten::_linalg_svd",
    "aten::_unique2",
    "aten::bincount",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
_waits = Counter()
_vmaps = [0]


def _refused(self, *_):
    raise TypeError("can't convert cuda:0 device type tensor to numpy")


class OnGPU(torch.Tensor):
    """A tensor of the pretended GPU: the memory is the CPU's, the word is not."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    numpy = __array__ = _refused

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def get_device(self):
        return 0

    def to(self, *args, **kwargs):
        if args and isinstance(args[0], torch.Tensor):
            args = args[0].device, args[0].dtype, *args[1:]
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            return torch.ops.aten._to_copy(
                self,
                dtype=dtype,
                device=device,
                non_blocking=non_blocking,
                memory_format=memory_format,
            )
        kwargs = {} if memory_format is None else {"memory_format": memory_format}
        return super().to(self.dtype if dtype is None else dtype, **kwargs)

    def cpu(self, *args):
        return self.to("cpu")

    def cuda(self, *args, **kwargs):
        return self

    def tolist(self):
        return self.cpu().tolist()

    def __deepcopy__(self, memo):
        copied = memo.get(id(self))
        if copied is None:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            copied.__dict__.update(self.__dict__)
            memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol):  # a file is read again with map_location
        with torch._C._DisableTorchDispatch():
            plain = self.detach().as_subclass(torch.Tensor)
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)


def _placed(t, on_gpu):
    if not isinstance(t, torch.Tensor) or isinstance(t, OnGPU) == on_gpu:
        return t
    if on_gpu:
        return torch.Tensor._make_subclass(OnGPU, t)
    return t.as_subclass(torch.Tensor)


def _run(func, args, kwargs):
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    name = func._schema.name
    there = [t for t in tensors if isinstance(t, OnGPU)]
    here = [t for t in tensors if not isinstance(t, OnGPU) and (t.dim() or name in _STRICT)]
    if name in _INDEXING and isinstance(args[0], OnGPU):  # by indices of either
        here = [t for t in here if all(t is not i for i in args[1])]
    if there and here and name not in _COPIES:
        shapes = ", ".join(str(tuple(t.shape)) for t in here)
        raise RuntimeError(f"all tensors must be on the same device: {name}, of the CPU's {shapes}")
    device = kwargs.get("device")
    on_gpu = bool(there) if device is None else torch.device(device).type == "cuda"
    if device is not None:
        kwargs = {**kwargs, "device": _CPU}
    if name == "aten::copy_":
        on_gpu = isinstance(args[0], OnGPU)
    # Here torch itself, in C++, may have asked for the device of the memory.
    if name.startswith("aten::new_") or name.endswith("_like"):
        on_gpu = bool(there)
    if _vmaps[0] and (there or not tensors):
        on_gpu = True
    if _waits_for_it(name, args, kwargs, there, on_gpu):
        _waits[name] += 1
    with torch._C._DisableTorchDispatch():
        out = func(*args, **kwargs)
        same = {id(t) for t in tensors}
        return tree_map(lambda t: t if id(t) in same else _placed(t, on_gpu), out)


def _waits_for_it(name, args, kwargs, there, on_gpu):
    if name in _COPIES:
        source = args[1] if name == "aten::copy_" else args[0]
        if isinstance(source, OnGPU):
            return not on_gpu
        ahead = kwargs.get("non_blocking") or (name == "aten::copy_" and True in args[2:])
        return on_gpu and not (ahead and getattr(source, "pinned", False))
    if name in _INDEXING and there:  # by a mask, or by indices that are first sent there
        return any(i is not None and (i.dtype == torch.bool or not _is_there(i)) for i in args[1])
    return bool(there) and name in _WAITING


def _is_there(index):
    return isinstance(index, OnGPU)


class _Everywhere(TorchDispatchMode):
    """Makes new tensors on the pretended GPU where they are asked for, and looks at all others."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _is_the_gpu(word):
    return isinstance(word, str | torch.device) and torch.device(word).type == "cuda"


class _FromPython(TorchFunctionMode):
    """What torch would do in C++ by itself, where it knows of no pretended GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func is torch.Tensor.pin_memory:
            copied = args[0].clone()
            copied.pinned = True
            return copied
        if func is torch.Tensor.cuda:
            return args[0].to(DEVICE)
        if func is torch.Tensor.to:
            words = [DEVICE if _is_the_gpu(word) else word for word in args[1:]]
            if words and isinstance(words[0], torch.Tensor):
                words[:1] = words[0].device, words[0].dtype
            if _is_the_gpu(device):
                kwargs["device"] = DEVICE
            return func(args[0], *words, **kwargs)
        if func not in (torch.tensor, torch.as_tensor, torch.asarray) or device is None:
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": None}).to(device)


@contextmanager
def _counted(nesting, *args):
    _vmaps[0] += 1
    try:
        with nesting(*args) as level:
            yield level
    finally:
        _vmaps[0] -= 1


@contextmanager
def pretended_gpu():
    """``torch.cuda`` has one device; yields the counter of what waits for it."""
    _waits.clear()
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    nothing = mock.Mock(return_value=None)
    replaced = {
        "_lazy_init": nothing,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": nothing,
        "synchronize": nothing,
        "empty_cache": nothing,
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": nothing,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "get_device_name": lambda device=None: "a pretended GPU",
        "is_bf16_supported": lambda: True,
        "get_device_capability": lambda device=None: (8, 0),
        "mem_get_info": lambda device=None: (2**34, 2**34),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": nothing,
        "max_memory_allocated": lambda device=None: 2**20,
        "device": lambda device: ExitStack(),
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
            if hasattr(torch.optim.Optimizer, name):
                stack.enter_context(mock.patch.object(torch.optim.Optimizer, name, nothing))
        nesting = functorch.vmap_increment_nesting
        counted = partial(_counted, nesting)
        stack.enter_context(mock.patch.object(functorch, "vmap_increment_nesting", counted))
        stack.enter_context(_Everywhere())
        stack.enter_context(_FromPython())
        try:
            yield _waits
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(before)
