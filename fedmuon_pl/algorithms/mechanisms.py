"""Mechanisms that several methods share."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..clients import Tensors, alike
from .base import LocalRule, LocalRun, Mechanism, Setting, Upload
from .local import MuonRule, below_one

__all__ = ["Alignment", "CachedAlignment", "StateAveraging"]


class Alignment(Mechanism):
    """Mixes every local step with the shared global direction of the last round.

    A step is ``x <- x - eta [(1 - alpha) O + alpha Delta_g]``, with O the local rule's direction,
    and at the round's end ``Delta_g = -sum_i w_i (x_i^{K_i} - x^r) / sum_k eta_{i,k}`` per
    parameter, from the clients' displacements, never from the server's move (FedMuon,
    arXiv 2510.27403). Delta_g starts at 0, and the first round's steps are scaled by (1 - alpha)
    all the same.

    Args:
        alpha: Weight of the shared direction, in [0, 1).
        only_matrices_of: The local rule, if parameters outside its matrices are to be left alone;
            None to align every parameter.
        shrink: Whether the local direction has the weight (1 - alpha), else 1.

    Raises:
        ValueError: If alpha is outside [0, 1).
    """

    name = "alignment"

    def __init__(
        self, alpha: float, only_matrices_of: MuonRule | None = None, shrink: bool = True
    ) -> None:
        super().__init__()
        self.alpha = below_one("alpha", alpha)
        self._only = only_matrices_of
        self._shrink = shrink

    def setup(self, setting: Setting) -> None:
        """Sets Delta_g to zero."""
        every = list(range(len(setting.x)))
        self.indices = every if self._only is None else self._only.matrices
        self.server_state = {"delta_g": setting.zeros(self.indices)}

    def local_scale(self, index: int) -> float:
        """(1 - alpha) where the pull acts."""
        return 1 - self.alpha if self._shrink and index in self.indices else 1.0

    def begin(self, run: LocalRun) -> None:
        """The pull of one step, the same for every step of the round."""
        weights = [-self.alpha * run.lr[i] for i in self.indices]
        x = [run.x[i] for i in self.indices]
        pull = list(torch._foreach_mul(self.delta_g(run), weights))
        run.memory[self.name] = x, [alike(p, t) for p, t in zip(pull, x, strict=True)]

    def delta_g(self, run: LocalRun) -> Tensors:
        """Delta_g^r as the clients have it."""
        return self.server_state["delta_g"]

    def after_step(self, run: LocalRun) -> None:
        """Subtracts eta alpha Delta_g from the weights."""
        x, pull = run.memory[self.name]
        torch._foreach_add_(x, pull)

    def end(self, run: LocalRun) -> Upload | None:
        """The clients' directions; the server derives them from the displacements."""
        direction = run.direction()
        return Upload([direction[i] for i in self.indices], sent=False)

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """The new Delta_g."""
        self.replace("delta_g", mean)


class CachedAlignment(Alignment):
    """Alignment whose clients derive Delta_g from the x^{r-1} that they kept; it is not sent.

    Under plain averaging of clients that all make K steps, ``x^r - x^{r-1}`` is the mean
    displacement, and so ``Delta_g^r = -(x^r - x^{r-1}) / (K eta_{r-1})``, to rounding. (The reviews
    of arXiv 2510.27403 ask for it; its released code, github.com/junkangLiu0/FedMuon, sends it.)

    What a deployment needs: storage for x^{r-1} on the clients, K and the schedule, and that the
    client took part in round r-1, for only then was it sent x^{r-1}. Every other client of the
    cohort is sent x^{r-1} beside x^r, as many bytes as Delta_g, and saves nothing. Bytes are
    counted so: with all clients in every round Delta_g costs nothing at all, with a tenth of them
    about a tenth of it is saved. (That all clients follow every round's broadcast would not help:
    N downloads a round instead of S.) In round 0 Delta_g is 0 and nobody needs it. A client whose
    update was dropped as not finite counts as one that was not there.

    Args:
        alpha: Weight of the shared direction, in [0, 1).
        only_matrices_of: As in :class:`Alignment`.

    Raises:
        ValueError: If alpha is outside [0, 1); in ``setup``, if K may differ between clients. That
            the server averages plainly is for the caller to see to.
    """

    client_state = ("took_part",)

    def setup(self, setting: Setting) -> None:
        """x^{-1} is nothing, and the sum of its etas 0."""
        super().setup(setting)
        if setting.local_steps is None:
            raise ValueError(
                "send_direction=False needs model.local_steps: with local_epochs clients make "
                "different numbers of steps, and Delta_g cannot be derived from x^r - x^{r-1}"
            )
        self._steps, self._x = setting.local_steps, setting.x
        # On the CPU, since they are read as numbers.
        etas = [torch.zeros((), dtype=torch.float64) for _ in self.indices]
        self.server_state = {"previous": setting.zeros(self.indices), "sum_eta": etas}

    def client_state_like(self, name: str, setting: Setting) -> Tensors:
        """The client's last round, counted from 1."""
        return [torch.zeros((), dtype=torch.int64)]

    def begin(self, run: LocalRun) -> None:
        """Also finds out who holds x^{r-1}."""
        super().begin(run)
        (last,) = run.client_state["took_part"]
        self._behind = int((last != run.round).sum())

    def delta_g(self, run: LocalRun) -> Tensors:
        """-(x^r - x^{r-1}) / (K eta_{r-1}), and 0 where eta was 0."""
        # Not run.x0, which of layers that stay local is each client's own.
        moved = torch._foreach_sub(
            [self._x[i] for i in self.indices], self.server_state["previous"]
        )
        inverse = [-1 / float(s) if s > 0 else 0.0 for s in self.server_state["sum_eta"]]
        return list(torch._foreach_mul(moved, inverse))

    def download(self) -> Tensors:
        """x^{r-1}."""
        return self.server_state["previous"]

    def receivers(self, run: LocalRun) -> int:
        """The clients that did not take part in round r-1."""
        return self._behind

    def end(self, run: LocalRun) -> None:
        """Nothing to send; the clients keep x^r."""
        (last,) = run.client_state["took_part"]
        run.client_state["took_part"] = [torch.full_like(last, run.round + 1)]

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """Nothing has come."""

    def server_direction(self, displacement: Tensors) -> Tensors:
        """Keeps x^r, which will be the x^{r-1} of the next round."""
        self.replace("previous", [self._x[i] for i in self.indices])
        etas = [self._steps * self.lr[i] for i in self.indices]
        self.replace("sum_eta", [torch.tensor(eta, dtype=torch.float64) for eta in etas])
        return displacement


class StateAveraging(Mechanism):
    """Clients start from the cohort's averaged optimiser state instead of an empty one.

    With Theta the named states of the local optimiser: ``Theta_i^{r,0} = Thetabar^r`` and
    ``Thetabar^{r+1} = sum_i w_i Theta_i^{r,K_i}``. Muon's momentum makes it FedMuon's mechanism
    (arXiv 2510.27403), a preconditioner FedPAC's (arXiv 2602.19271), Adam's second moment
    FedAdamW's and FedLADA's.

    What a moment must be divided by is averaged with it, one number each: a warm-started moment of
    Adam's is corrected for all steps behind it, not for those of its round alone, so that one
    client that starts from its own states is as if it had never stopped. For the optimisers of
    :mod:`fedmuon_pl.optim` that is the weight of the gradients in it, exact however many steps each
    client makes; for torch's the count of steps, exact where all make equally many. States that are
    not named start anew every round.

    Args:
        rule: The local rule whose optimisers keep the states.
        states: Their names in the optimiser's state, such as ``"momentum_buffer"``; ``"gram"``
            also stands for ``"gram_0"``, ``"gram_1"`` and so on. Parameters without such a state
            are left alone.
        only_matrices_of: As in :class:`Alignment`.
        copies: States that start from the mean of another, by name, and are not averaged.
        start: Thetabar^0, in every element.
        block_means: Whether only the mean of each tensor's elements is sent, both ways.

    Raises:
        ValueError: In ``setup``, if no optimiser keeps a named state, it means nothing to another
            client (SOAP's second moment, in a basis of its own), or an optimiser that cannot fill
            in the rest of its state would have to: of torch's Adam, for one, all or nothing can be
            averaged, as both moments share one count. Also for ``copies`` or ``start`` where the
            optimiser corrects a bias.
    """

    name = "state_averaging"

    def __init__(
        self,
        rule: LocalRule,
        states: Sequence[str],
        only_matrices_of: MuonRule | None = None,
        *,
        copies: Mapping[str, str] | None = None,
        start: float = 0.0,
        block_means: bool = False,
    ) -> None:
        super().__init__()
        self._rule = rule
        self._only = only_matrices_of
        self._names = [re.compile(rf"{re.escape(name)}(_\d+)?") for name in states]
        self._states = list(states)
        self._copies = dict(copies or {})
        self._start = start
        self._block_means = block_means

    def setup(self, setting: Setting) -> None:
        """Sets every averaged state to its start."""
        self._indices: dict[str, list[int]] = {}
        self._shapes: dict[str, list[torch.Size]] = {}
        self._numbers: dict[str, list[int]] = {}
        self.server_state = {}
        found: dict[str, set[str]] = {}
        for kind, index, state in self._rule.state_like(setting):
            if self._only is not None and index not in self._only.matrices:
                continue
            found.setdefault(kind.__name__, set()).update(state)
            wanted = [key for key in state if any(n.fullmatch(key) for n in self._names)]
            for key in wanted:
                self._indices.setdefault(key, []).append(index)
                self._shapes.setdefault(key, []).append(state[key].shape)
                shape = () if self._block_means else state[key].shape
                value = state[key].new_full(shape, self._start)
                self.server_state.setdefault(key, []).append(value)
            for key in self._numbers_of(kind, state, wanted) if wanted else ():
                self._numbers.setdefault(key, []).append(index)
        for name, pattern in zip(self._states, self._names, strict=True):
            if not any(map(pattern.fullmatch, self._indices)):
                have = "; ".join(f"{k}: {sorted(v)}" for k, v in found.items())
                raise ValueError(f"no local optimiser keeps a state {name!r} ({have})")
        if self._numbers and (self._copies or self._start != 0):
            raise ValueError("copies and start are for optimisers without bias correction")
        for key in self._numbers:
            # In the weights' dtype, as all that is averaged: the sum's last bits follow how many
            # processes there are.
            self.server_state[key] = [setting.x[0].new_zeros(())]

    def _numbers_of(self, kind: type, state: Mapping[str, Any], wanted: Sequence[str]) -> set[str]:
        """Names of the weights or step counts that belong to the wanted states."""
        own: Mapping[str, str] | None = getattr(kind, "weights", None)
        if own is not None:
            bases = {re.sub(r"_\d+$", "", key) for key in wanted}
            if bases - set(own):
                raise ValueError(
                    f"{kind.__name__} cannot start from an averaged {min(bases - set(own))!r}; it "
                    f"can from {', '.join(own)}"
                )
            numbers = {own[key] for key in bases} & set(state)
            lacking = {number.removesuffix("_weight") for number in numbers} - bases
            if lacking:  # the largest second moment, as old as one that starts anew
                raise ValueError(
                    f"{kind.__name__} cannot start from {wanted} without {sorted(lacking)}"
                )
            return numbers
        counts = {k for k, v in state.items() if not isinstance(v, Tensor) or v.ndim == 0}
        missing = set(state) - counts - set(wanted)
        if missing:
            raise ValueError(
                f"{kind.__name__} cannot start from {wanted} without {sorted(missing)}: name all "
                f"of them, or take an optimiser that can, such as fedmuon_pl.optim.adamw.AdamW"
            )
        return counts - set(wanted)

    def begin(self, run: LocalRun) -> None:
        """Theta_i^{r,0} = Thetabar^r."""
        numbers = {key: float(self.server_state[key][0]) for key in self._numbers}
        if numbers and not any(numbers.values()):
            return  # before the first mean each optimiser makes its own state
        for key, indices in self._indices.items():
            pairs = zip(self.server_state[key], self._shapes[key], strict=True)
            values = [value.expand(shape) for value, shape in pairs]
            for name in (key, *(copy for copy, source in self._copies.items() if source == key)):
                run.set_state(name, indices, values)
        for key, number in numbers.items():
            run.set_number(key, self._numbers[key], number)

    def end(self, run: LocalRun) -> Upload:
        """Theta_i^{r,K_i}; the numbers follow from K_i, which the server knows."""
        tensors = [t for key, ids in self._indices.items() for t in run.get_state(key, ids)]
        if self._block_means:
            tensors = [t.reshape(len(t), -1).mean(1) for t in tensors]
        numbers = [run.get_number(key, ids) for key, ids in self._numbers.items()]
        return Upload([*tensors, *numbers], sent=tensors)

    def aggregate(self, mean: Tensors, cohort_size: int) -> None:
        """The new Thetabar."""
        parts = iter(mean)
        for key in [*self._indices, *self._numbers]:
            self.replace(key, [next(parts) for _ in self.server_state[key]])
