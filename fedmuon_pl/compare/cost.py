"""How long a plan's runs will take and how much disk, from one measured step."""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

from ..arguments import root_cause
from ..errors import ConfigError
from .plan import Run
from .reproduction import build
from .runs import progress

__all__ = ["Cost", "client_states", "estimate", "estimate_apart"]

_REPEATS = 3
_START = 5.0  # seconds from the command to the first round, with one of two slow cores


@dataclass(frozen=True)
class Cost:
    """An estimate.

    Attributes:
        seconds: Of all runs one after the other.
        bytes: On disk.
        step: Seconds of one local step without orthogonalisation.
        orthogonalise: Seconds that orthogonalising all matrices adds to it, by the slowest method.
        forward: Seconds of one batch in an evaluation.
        device: What it was measured on.
    """

    seconds: float
    bytes: int
    step: float
    orthogonalise: float
    forward: float
    device: str


def estimate(
    runs: Sequence[Run], input_shape: Sequence[int], test_samples: int, threads: int
) -> Cost:
    """Measures a step of the first run's network and multiplies.

    Counted are the local steps, the orthogonalisation of those that do it, the evaluations on
    validation and test images, and five seconds for the start of each run; not passes over a
    client's whole data (Mime), nor that runs side by side slow each other, nor what a GPU gains by
    clients side by side. Disk: two checkpoints a run, and the files of client state for the methods
    that keep one (:func:`client_states`).

    Args:
        runs: Of one network, with the same ``batch_size`` and with ``local_steps``; rounds that are
            finished are not counted.
        input_shape: Of one input.
        test_samples: In the test set.
        threads: Of each run on a CPU.

    Raises:
        ConfigError: If a run does not say its local steps.
    """
    import torch
    import torch.nn.functional as F

    from ..algorithms.base import Setting
    from ..clients import nbytes
    from ..optim.orthogonalize import Orthogonalizer, as_matrix

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        settings = runs[0].settings
        network = build("network", settings).to(device)
        parameters = [p for p in network.parameters() if p.requires_grad]
        batch = int(settings["data.init_args.batch_size"])
        x = torch.randn(batch, *input_shape, device=device)
        y = torch.zeros(batch, dtype=torch.long, device=device)

        def step() -> None:
            gradients = torch.autograd.grad(F.cross_entropy(network(x), y), parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-1e-6)

        def orthogonalise(polar: Orthogonalizer) -> None:
            for p in parameters:
                if p.ndim > 1:
                    polar(as_matrix(p.detach()))

        def evaluate() -> None:
            with torch.no_grad():
                network(x)

        one, forward = (_seconds(work, device) for work in (step, evaluate))
        more = {"none": 0.0}
        for run in runs:
            method, steps = _method(run)
            if method not in more:
                more[method] = _seconds(
                    partial(orthogonalise, Orthogonalizer(method, steps)), device
                )
    finally:
        torch.set_num_threads(before)
    weights = sum(p.numel() for p in network.parameters())
    seconds, size = 0.0, 0
    kept: dict[str, int] = {}  # bytes a client; building a method takes longer than all the rest
    for run in runs:
        rounds = max(0, (run.rounds or 0) - progress(run.folder)[0])
        if "model.local_steps" not in run.settings:
            raise ConfigError(f"{run.name}: a reproduction needs model.local_steps")
        cohort = int(run.settings["server.clients_per_round"])
        local = cohort * int(run.settings["model.local_steps"])
        a_step = one + more[_method(run)[0]]
        every = int(run.settings.get("trainer.check_val_every_n_epoch", 1))
        held_out = float(run.settings.get("data.init_args.val_size", 0))
        evaluated = test_samples + (held_out if held_out >= 1 else 0)
        seconds += rounds * (local * a_step + evaluated / batch * forward / every)
        seconds += _START if rounds else 0.0
        size += 2 * 3 * 4 * weights
        clients = int(run.settings["data.init_args.clients"])
        if run.method not in kept:
            try:
                algorithm = build("algorithm", run.settings)
                algorithm.setup(Setting.of(network, clients, local // cohort))
            except ValueError as error:
                raise ConfigError(f"{run.name}: {root_cause(error)}") from None
            kept[run.method] = sum(map(nbytes, algorithm.client_state_like().values()))
        size += kept[run.method] * client_states(clients, cohort, run.rounds or 1)
    return Cost(seconds, size, one, max(more.values()), forward, str(device))


def estimate_apart(*args: Any) -> Cost:  # noqa: ANN401
    """:func:`estimate`; where there is a GPU in a process that ends, and leaves it to the runs."""
    import torch

    if not torch.cuda.is_available():
        return estimate(*args)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(estimate, *args).result()


def _method(run: Run) -> tuple[Any, int]:
    """By what it orthogonalises, and in how many steps."""
    arguments = "model.algorithm.init_args"
    method = run.settings.get(f"{arguments}.orthogonalizer", "none")
    return method, int(run.settings.get(f"{arguments}.ns_steps", 0))


def client_states(clients: int, cohort: int, rounds: int) -> int:
    """How many clients' states lie on disk at most.

    The latest of all clients, those that the best checkpoint keeps, and 11 rounds: 10 until the
    next sweep, and what the last checkpoint names besides (where a file system has no holes,
    several times as much).

    Args:
        clients: N.
        cohort: S.
        rounds: Of the run.
    """
    return min(rounds * cohort, 2 * clients + 11 * cohort)


def _seconds(work: Callable[[], None], device: object) -> float:
    """The median of some repetitions, after one that does not count."""
    import torch

    taken = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        work()
        if str(device) != "cpu":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])
