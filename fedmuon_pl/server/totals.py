"""What a round has received so far: sums, counts and bytes. Memory does not follow the cohort."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from ..algorithms.base import LocalRun, Upload
from ..clients import Tensors, nbytes
from ..errors import NonFiniteUpdate
from ..pytrees import all_finite, sent
from .aggregate import RunningMean
from .diagnostics import RoundDiagnostics
from .state import ClientStore

__all__ = ["RoundTotals"]


class RoundTotals:
    """Takes in one block of clients after the other.

    Args:
        buffers: The global model's buffers that clients send, by name.
        exchanged: Everything of the global model that is sent, both ways.
        weight: A client's weight in the averages, by its id.
        on_nonfinite: Whether an update that is not finite stops the run or is left out.
        diagnostics: Measures the updates.
        store: Keeps the accepted clients' state.

    Attributes:
        sums: Weighted sums of displacements, buffers and uploads.
        counters: The largest value of every integer buffer.
        up: Bytes sent by clients.
        down: Bytes sent to clients.
        steps: Local steps made.
        accepted: Clients whose update counts.
        dropped: Clients whose update was left out.
    """

    def __init__(
        self,
        buffers: Mapping[str, Tensor],
        exchanged: Tensors,
        weight: Callable[[int], int],
        on_nonfinite: Literal["stop", "drop"],
        diagnostics: RoundDiagnostics,
        store: ClientStore,
    ) -> None:
        self.buffers = buffers
        self._floats = [n for n, b in buffers.items() if b.is_floating_point()]
        self._exchanged = nbytes(exchanged)
        self._weight = weight
        self._on_nonfinite = on_nonfinite
        self.diagnostics = diagnostics
        self.store = store
        self.start()

    def start(self) -> None:
        """Forgets the last round."""
        self.sums = RunningMean()
        self.counters: dict[str, Tensor] = {}
        self.up = self.down = self.steps = self.accepted = self.dropped = 0
        self.store.discard()
        self.diagnostics.start()

    def tally(self) -> list[int]:
        """All counts, to be added up over the processes."""
        return [self.up, self.down, self.steps, self.accepted, self.dropped]

    def take_tally(self, totals: list[int]) -> None:
        """The counts of all processes."""
        self.up, self.down, self.steps, self.accepted, self.dropped = totals

    @torch.no_grad()
    def receive_full_gradients(self, round: int, clients: list[int], gradients: Tensors) -> None:
        """Adds a block's gradients at x^r over the clients' whole data, ``(C, *shape)``.

        Raises:
            NonFiniteUpdate: If one is not finite and the policy is to stop.
        """
        weights = [self._weight(c) for c in clients]
        table = torch.stack([all_finite(g) for g in gradients])
        for c, (client, finite) in enumerate(zip(clients, table.all(0).tolist(), strict=True)):
            if not finite:
                if self._on_nonfinite == "stop":
                    raise NonFiniteUpdate(
                        f"round {round}, client {client}: the gradient over its whole data at x^r "
                        f"is infinite or not-a-number"
                    )
                weights[c] = 0
        self.sums.add("full_gradient", gradients, weights)
        self.up += len(clients) * nbytes([g[0] for g in gradients])

    @torch.no_grad()
    def receive(
        self,
        run: LocalRun,
        uploads: Mapping[str, Upload],
        losses: Tensor,
        buffers: Mapping[str, Tensor],
    ) -> None:
        """Adds one block of clients.

        Args:
            run: The finished local run of C clients.
            uploads: What the method sends beside the displacement.
            losses: Training losses, ``(K, C)``.
            buffers: The clients' buffers, each ``(C, *shape)``.

        Raises:
            NonFiniteUpdate: If a client's loss, weights, buffers or other uploads are not finite
                and the policy is to stop.
        """
        displacement = run.displacement()
        sound = self._sound(buffers, uploads, losses)
        measured = self.diagnostics.measure(displacement, losses, sound)
        weights = [self._weight(c) for c in run.clients]
        for c, client in enumerate(run.clients):
            if not measured.finite[c]:
                self._refuse(run, client, losses[:, c])
                weights[c] = 0
        ones = [int(w > 0) for w in weights]
        self.sums.add("displacement", displacement, weights)
        self.sums.add("buffers", [buffers[n] for n in self._floats], weights)
        for name, upload in uploads.items():
            self.sums.add(name, upload.tensors, weights if upload.by_weight else ones)
        self.diagnostics.add(measured, weights)
        accepted = [c for c, one in enumerate(ones) if one]
        if accepted:
            whole = len(accepted) == len(ones)
            some = slice(None) if whole else sent(torch.tensor(accepted), losses.device)
            for name in self.buffers.keys() - set(self._floats):
                self._count(name, buffers[name][some])
            if run.client_state:
                state = {k: [t[some] for t in v] for k, v in run.client_state.items()}
                self.store.put([run.clients[c] for c in accepted], state)
        model = len(run.clients) * self._exchanged
        self.up += model + sum(nbytes(u.payload()) for u in uploads.values())
        self.down += model + run.received
        self.steps += run.steps * len(run.clients)
        self.accepted += len(accepted)

    def _sound(
        self, buffers: Mapping[str, Tensor], uploads: Mapping[str, Upload], losses: Tensor
    ) -> Tensor:
        """Whether what each client sends is finite, beside its weights, ``(C,)``.

        Float buffers only where the global model's are.
        """
        found = [all_finite(t) for upload in uploads.values() for t in upload.tensors]
        if self._floats:
            theirs = torch.cat([buffers[n].unsqueeze(1).flatten(1) for n in self._floats], 1)
            ours = torch.cat([self.buffers[n].flatten() for n in self._floats])
            found.append((theirs.isfinite() | ~ours.isfinite()).all(1))
        if not found:
            return torch.ones_like(losses[0], dtype=torch.bool)
        return torch.stack(found).all(0)

    def _refuse(self, run: LocalRun, client: int, losses: Tensor) -> None:
        bad = (~losses.isfinite()).nonzero()
        if len(bad):
            k = int(bad[0])
            what = f"the training loss became {losses[k].item()} at local step {k + 1}"
        else:
            what = (
                "weights, buffers or other uploads were infinite or not-a-number after the last "
                "local step"
            )
        if self._on_nonfinite == "stop":
            raise NonFiniteUpdate(
                f"round {run.round}, client {client}: {what} of {run.steps}; lower the learning "
                f"rate, or set server.on_nonfinite=drop to leave such updates out"
            )
        self.dropped += 1

    def _count(self, name: str, values: Tensor) -> None:
        top = values.amax(0)
        known = self.counters.get(name)
        self.counters[name] = top if known is None else torch.maximum(known, top)
