"""FedBN: batch normalisation that stays on the client."""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..clients import Tensors
from .base import Algorithm, LocalRun, Mechanism, ServerRule, Setting
from .local import OptimizerFactory, TorchRule

__all__ = ["FedBN", "LocalLayers"]


class LocalLayers(Mechanism):
    """Layers that every client keeps for itself: never averaged, sent or received.

    A client that takes part for the first time starts them where the global model has them, which
    is x^0 for good; later it goes on from where its last round ended. Their displacement is zero
    for the server and for other mechanisms, before which this one stands: to FedProx their x^r is
    the client's own start, and SCAFFOLD's control variates or FedMuon's shared direction are zero
    there (and still count as sent); optimiser state that is averaged, as FedMuon's momentum, is
    averaged of these layers too. Methods that ask for gradients at x^r (SCAFFOLD's option I, Mime)
    are refused. Any other can be made personal::

        base = FedMuon(lr=0.02)
        Algorithm(base.local, [LocalLayers(), *base.mechanisms], base.server)

    Args:
        batch_norm: Whether BatchNorm layers stay local: gains, biases, running statistics and
            their counters (FedBN, arXiv 2102.07623).
        patterns: Regular expressions; whatever has a name that matches one stays local too: a head
            (FedPer, arXiv 1912.00818), or with ``"."`` everything, which is training alone.

    Raises:
        ValueError: In :meth:`setup`, if there is no such layer; at once, if a pattern is no regular
            expression.
    """

    name = "local_layers"
    client_state = ("own_layers",)

    def __init__(self, batch_norm: bool = True, patterns: Sequence[str] = ()) -> None:
        super().__init__()
        self.batch_norm = batch_norm
        self.patterns = list(patterns)
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as e:
                raise ValueError(f"patterns: {pattern!r} is no regular expression: {e}") from e

    def setup(self, setting: Setting) -> None:
        """Finds the layers."""
        names = [*setting.names, *setting.buffers]
        chosen = set(setting.batch_norm.intersection(names)) if self.batch_norm else set()
        if self.batch_norm and not chosen:
            raise ValueError("the network has no BatchNorm layer that could stay local")
        for pattern in self.patterns:
            matches = {n for n in names if re.search(pattern, n)}
            if not matches:
                raise ValueError(f"patterns: {pattern!r} matches no parameter or buffer")
            chosen |= matches
        self.stays_local = frozenset(chosen)
        self._indices = [i for i, n in enumerate(setting.names) if n in chosen]
        self._buffers = {n: b for n, b in setting.buffers.items() if n in chosen}

    def client_state_like(self, name: str, setting: Setting) -> Tensors:
        """Whether the client has layers of its own yet, its parameters, its buffers."""
        x = [setting.x[i] for i in self._indices]
        return [torch.zeros((), dtype=torch.bool), *x, *self._buffers.values()]

    def _own(self, x: Tensors, buffers: Mapping[str, Tensor]) -> Tensors:
        return [*(x[i] for i in self._indices), *(buffers[n] for n in self._buffers)]

    def personalise(
        self, x: Tensors, buffers: Mapping[str, Tensor], state: Mapping[str, Tensors]
    ) -> None:
        """Puts in the layers of the clients that have some."""
        has, *values = state["own_layers"]
        for mine, value in zip(self._own(x, buffers), values, strict=True):
            mine.copy_(torch.where(_along(has, mine), value, mine))

    def begin(self, run: LocalRun) -> None:
        """Each client starts from its own layers."""
        self.personalise(run.x, run.buffers, run.client_state)
        run.x0 = list(run.x0)  # the list was the server's
        for i in self._indices:
            run.x0[i] = run.x[i].clone()

    def end(self, run: LocalRun) -> None:
        """Takes the layers out of the client's model; nothing is sent."""
        own = [t.clone() for t in self._own(run.x, run.buffers)]
        start = self._own(run.x0, self._buffers)
        sound = torch.ones(len(run.clients), dtype=torch.bool, device=run.x[0].device)
        for t, s in zip(own, start, strict=True):
            sound &= (t.isfinite() | ~s.isfinite()).unsqueeze(1).flatten(1).all(1)
        run.client_state["own_layers"] = [torch.ones_like(sound), *own]
        for i in self._indices:
            run.x[i].copy_(run.x0[i])
        # The server sees nothing of these layers; it refuses the client for a weight that it sees.
        run.x[0].masked_fill_(_along(~sound, run.x[0]), torch.nan)


class FedBN(Algorithm):
    """FedBN: FedAvg whose BatchNorm layers stay on the clients (Li et al., arXiv 2102.07623).

    Algorithm 1: gain, bias, running mean and variance of every BatchNorm layer
    are the client's own, all else is averaged as in FedAvg. There all clients take part in every
    round; here a client that was not drawn keeps its layers, and one never drawn has those of x^0.
    The authors' code (github.com/med-air/FedBN) and microsoft/PersonalizedFL choose by ``"bn"`` in
    the name, TsingZ0/PFLlib the parameters so and no buffer is ever averaged; here the layer's
    class decides, which also finds a ResNet's ``downsample.1``.

    The global model's BatchNorm layers are those of x^0 for good, so that ``val/acc``,
    ``test/acc`` and ``client/acc_mean``, which measure the global model, say little: use
    :class:`~fedmuon_pl.server.PersonalEvaluation`, and choose by ``client/personal_val_acc``.

    Args:
        lr: Local learning rate eta.
        optimizer: Any optimiser of ``torch.optim`` that needs no closure; ``lr`` sets its rate, and
            another one inside it is refused.
        server: Server rule on the pseudo-gradient; plain averaging if None.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        lr: float,
        optimizer: OptimizerFactory = torch.optim.SGD,
        server: ServerRule | None = None,
    ) -> None:
        super().__init__(TorchRule(lr, optimizer), [LocalLayers()], server)


def _along(clients: Tensor, t: Tensor) -> Tensor:
    """One value for each client ``(C,)``, to broadcast with ``(C, *shape)``."""
    return clients.view(-1, *[1] * (t.ndim - 1))
