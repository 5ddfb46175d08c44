"""How the engine runs on a machine: blocks of clients, their random streams, what "auto" means."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .clients import (
    ClientStack,
    Forward,
    channels_last_fault,
    convolution_kernels,
    nbytes,
    random_state_kept,
    side_by_side_fault,
)
from .data.partition import IntArray
from .errors import ConfigError
from .hardware import keep_freed_memory

if TYPE_CHECKING:
    from .module import FederatedModule

__all__ = [
    "blocks",
    "channels_last",
    "client_memory",
    "clients_at_once",
    "enough_memory",
    "even_blocks",
    "free_memory",
    "gpu_settings",
    "keep_freed_memory",
    "seed_forward",
]


def blocks(
    batches: Mapping[int, list[IntArray]], at_once: int
) -> Iterator[tuple[list[int], list[list[IntArray]]]]:
    """Clients with equal step counts and batch shapes together, up to ``at_once`` of them.

    Args:
        batches: The samples of each client's steps.
        at_once: The most clients of a block.

    Yields:
        The clients of a block, and their batches.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for client, steps in batches.items():
        group = alike.setdefault(tuple(map(len, steps)), [])
        group.append(client)
        if len(group) == at_once:
            yield list(group), [batches[c] for c in group]
            group.clear()
    for group in alike.values():
        if group:
            yield list(group), [batches[c] for c in group]


def seed_forward(seed: int, device: torch.device) -> None:
    """Starts the random stream of a block's forwards.

    As torch.manual_seed, but without the other devices, which cost 3 ms a call.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


def clients_at_once(module: "FederatedModule", device: torch.device) -> int:
    """How many clients train side by side.

    ``auto``: one on a CPU; on an accelerator the whole cohort or, where that does not fit into the
    free memory, the fewest even blocks that do. One where the forward draws random numbers (as
    dropout does), or cannot run side by side. A resumed run keeps its number.

    Raises:
        ConfigError: If more than one was asked for and that is impossible.
    """
    asked = module.clients_at_once
    # An even share; one that unequal work makes larger trains in more blocks.
    cohort = -(-module.server.cohort_size // module.trainer.world_size)
    if asked == 1 or cohort == 1 or (asked == "auto" and device.type == "cpu"):
        return 1
    fault: str | None

    def loss(network: Forward, batch: Any) -> Tensor:  # noqa: ANN401
        with module.trainer.precision_plugin.forward_context():
            return module.task.loss(network, batch)

    if module.algorithm.local.elementwise:
        fault = side_by_side_fault(module.network, loss, _few_samples(module, 2))
    else:
        fault = "the local optimiser couples the elements of a tensor"
    if asked != "auto":
        if fault is None:
            return min(asked, cohort)
        raise ConfigError(f"model.clients_at_once={asked}: {fault}; use 1")
    if fault is not None:
        return 1
    before = module.server.restored_engine
    if before.get("device") == device.type and before.get("clients_at_once", cohort + 1) <= cohort:
        return int(before["clients_at_once"])  # the free memory may differ, results should not
    free = free_memory(device)
    if free is None:
        return cohort
    fits = even_blocks(cohort, free // client_memory(module))
    if module.trainer.world_size == 1:
        return fits
    least = torch.tensor(fits, device=device)  # the same on every GPU, the fullest one too
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def even_blocks(cohort: int, most: int) -> int:
    """The size of the fewest blocks of at most ``most`` clients that a cohort is cut into evenly.

    A cohort of 100 of which 60 fit trains as 50 and 50; what little does not fit costs a block.
    """
    number = -(-cohort // max(1, min(most, cohort)))
    return -(-cohort // number)


def free_memory(device: torch.device) -> int | None:
    """Bytes that new tensors may take there, a tenth left alone; None where nobody can tell."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free + cached) * 9 // 10


def client_memory(module: "FederatedModule") -> int:
    """About how many bytes one more client side by side takes.

    Twice what a forward of a whole batch keeps for its backward, measured on one client (a backward
    holds as much again where it is widest), and eight times the trained weights: themselves,
    their gradient, two moments, a step's direction, what is uploaded, and the displacement in
    float64.
    """
    network = module.network
    stack = ClientStack(network, 1)
    weights = nbytes(stack.x)
    own = {t.untyped_storage().data_ptr() for t in (*network.parameters(), *stack.x)}
    kept: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    batch = _few_samples(module, 1, module.data.batch_size)
    with (
        random_state_kept(stack.x[0].device),
        torch.autograd.graph.saved_tensors_hooks(note, lambda t: t),
    ):
        module.losses(stack, batch)
    return 2 * sum(kept.values()) + 8 * weights


@contextmanager
def enough_memory(clients: int) -> Iterator[None]:
    """Says what to do when so many clients side by side run out of memory.

    Raises:
        ConfigError: In the place of torch's error.
    """
    try:
        yield
    except RuntimeError as e:
        # The second is what cuDNN and cuBLAS say.
        if not isinstance(e, torch.OutOfMemoryError) and "ALLOC_FAILED" not in str(e):
            raise
        fewer = (
            f"set model.clients_at_once={clients // 2}" if clients > 1 else "lower data.batch_size"
        )
        raise ConfigError(
            f"out of memory with {clients} client{'s' * (clients > 1)} side by side; {fewer} "
            "(the run can be resumed so)"
        ) from e


def gpu_settings(device: torch.device) -> dict[str, Any]:
    """What may change the last bits of a result on a GPU; nothing elsewhere."""
    if device.type != "cuda":
        return {}
    return {
        "gpu": torch.cuda.get_device_name(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": [torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark],
    }


def channels_last(module: "FederatedModule", x: Tensor, at_once: int) -> bool:
    """Whether the clients' convolutions run channels last.

    ``auto``: yes on a CPU in float32, where a step of LeNet took 0.80 to 0.87 of the time with AVX2
    and ResNet-18's the same time (0.77 on a machine with AVX-512), and on CUDA in half precision,
    whose tensor cores want it; no in float64, for which
    oneDNN has no kernels; no where one step of the network fails in that layout. Never side by
    side, where a convolution becomes a grouped one.

    Args:
        module: What is trained.
        x: One of its parameters, on its device.
        at_once: How many clients train side by side.
    """
    if at_once > 1 or module.channels_last is False:
        return False
    if module.channels_last is True:
        return True
    half = str(module.trainer.precision) in ("bf16-mixed", "bf16-true", "16-true")
    pays = half if x.is_cuda else x.is_cpu and x.dtype != torch.float64
    if not pays or not convolution_kernels(module.network):
        return False
    with module.trainer.precision_plugin.forward_context():
        few = _few_samples(module, 1)
        return channels_last_fault(module.network, module.task.loss, few) is None


def _few_samples(module: "FederatedModule", clients: int, batch: int = 4) -> Any:  # noqa: ANN401
    """A batch ``(clients, batch, ...)`` for a trial, of the first client's data."""
    client, wanted = int(module.server.candidates[0]), clients * batch
    samples = torch.from_numpy(module.data.partition[client][:wanted].astype("int64"))
    indices = samples.repeat(wanted)[:wanted].view(clients, batch)
    return module.data.gather(indices.to(module.device))
