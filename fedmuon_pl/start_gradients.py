"""Gradients at x^r that some methods ask for, beside those of the local steps."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .clients import ClientStack, Tensors, random_state_kept
from .engine import blocks, seed_forward
from .pytrees import sent
from .seeding import derive
from .server.callback import RoundPlan

if TYPE_CHECKING:
    from .module import FederatedModule

__all__ = ["StartGradients"]


class StartGradients:
    """What a mechanism gets that asks for ``full_gradient`` or ``anchor_gradient``.

    Nothing of it leaves a trace in a run: random numbers, buffers and weights are as without it.

    Args:
        module: Whose stack and data are used; an anchor stack is made when it is first needed.
        capacity: The most clients that train side by side.
        channels_last: As of the module's stack.
    """

    def __init__(self, module: "FederatedModule", capacity: int, channels_last: bool) -> None:
        self._module = module
        self._capacity = capacity
        self._channels_last = channels_last
        self._anchor: ClientStack | None = None

    def cohort(self, plan: RoundPlan) -> None:
        """The first of two exchanges: mechanisms get the cohort's mean gradient over all data."""
        module = self._module
        for clients, gradients in self._by_block(plan, plan.share):
            module.server.totals.receive_full_gradients(plan.round, clients, gradients)
        mean = module.server.mean_full_gradient(module.trainer)
        for mechanism in module.algorithm.mechanisms:
            if mechanism.full_gradient == "cohort":
                mechanism.cohort_gradient(mean)

    def of_clients(self, plan: RoundPlan, clients: list[int]) -> Tensors:
        """Each client's gradient over its whole data, ``(C, *shape)``, in the order of clients."""
        parts = list(self._by_block(plan, clients))
        found = [c for block, _ in parts for c in block]
        order = sent(torch.tensor([found.index(c) for c in clients]), self._module.device)
        return [torch.cat(g)[order] for g in zip(*(g for _, g in parts), strict=True)]

    def _by_block(self, plan: RoundPlan, clients: list[int]) -> Iterator[tuple[list[int], Tensors]]:
        """Gradients over whole data, block by block.

        Computed in batches of about the training's size, as equal as can be (BatchNorm normalises
        with the statistics of a batch), averaged by their samples; samples are not augmented.
        """
        module = self._module
        stack, data, seed = module.stack, module.data, module.seed
        order = {c: data.client_samples(c, round=plan.round, seed=seed) for c in clients}
        for block, batches in blocks(order, self._capacity):
            stack.resize(len(block))
            stack.load(plan.x0, plan.buffers)
            stack.zero_grad()
            seed_forward(derive(seed, "full_gradient", plan.round, *block), module.device)
            total = sum(map(len, batches[0]))
            for step in zip(*batches, strict=True):
                indices = sent(np.stack(step), module.device)
                loss = module.losses(stack, data.gather(indices))
                (loss.sum() * (len(step[0]) / total)).backward()  # type: ignore[no-untyped-call]
            yield block, [g.detach().clone() for g in stack.gradients()]

    def anchor(self, plan: RoundPlan, clients: int) -> ClientStack:
        """A second stack, which stays at x^r."""
        if self._anchor is None:
            self._anchor = ClientStack(self._module.network, self._capacity, self._channels_last)
        self._anchor.resize(clients)
        self._anchor.load(plan.x0, plan.buffers)
        return self._anchor

    def of_batch(self, anchor: ClientStack, data: Any) -> Tensors:  # noqa: ANN401
        """A batch's gradient at x^r; the step's own forward then draws the same random numbers."""
        with random_state_kept(self._module.device):
            loss = self._module.losses(anchor, data)
        anchor.zero_grad()
        loss.sum().backward()  # type: ignore[no-untyped-call]
        return anchor.gradients()
