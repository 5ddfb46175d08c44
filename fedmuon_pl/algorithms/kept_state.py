"""Local optimisers that go on where the client's last round ended."""

from typing import Any

import torch
from torch import Tensor

from ..clients import Tensors
from .base import LocalRule, LocalRun, Mechanism, Setting

__all__ = ["KeptState"]


class KeptState(Mechanism):
    """A client keeps its local optimiser's state from round to round; only x is replaced.

    The inner optimisers of DiLoCo (arXiv 2311.08105) and MuLoCo (arXiv 2505.23725) are kept so.
    Nothing of it is sent. A client that takes part for the first time starts from an empty state.
    It is for few clients that come back often: a state is as old as the client's last round.

    Args:
        rule: The local rule whose optimisers keep the state.

    Raises:
        ValueError: In ``setup``, if the optimisers keep nothing, or not all of it is tensors of the
            parameters' shapes that start at zero and weights of them
            (:class:`fedmuon_pl.optim.adamw.AdamW` has such; torch's Adam has one count for all
            clients that train side by side).
    """

    name = "kept_state"
    client_state = ("optimizer_state",)

    def __init__(self, rule: LocalRule) -> None:
        super().__init__()
        self._rule = rule

    def setup(self, setting: Setting) -> None:
        """Finds the states."""
        self._tensors: dict[str, list[int]] = {}
        self._numbers: dict[str, list[int]] = {}
        for kind, index, state in self._rule.state_like(setting):
            weights = set(getattr(kind, "weights", {}).values())
            for key, value in state.items():
                if key in weights:
                    self._numbers.setdefault(key, []).append(index)
                elif key != "step" and _shape(value) == setting.x[index].shape:
                    self._tensors.setdefault(key, []).append(index)
                else:
                    raise ValueError(
                        f"clients cannot keep the state {key!r} of {kind.__name__}; they can of "
                        f"torch.optim.SGD, fedmuon_pl.optim.adamw.AdamW and Muon"
                    )
        if not self._tensors:
            raise ValueError("the local optimiser keeps no state; SGD does with momentum")
        if not self._starts_at_zero(setting):
            raise ValueError("the local optimiser's state does not start at zero (dampening?)")

    def _starts_at_zero(self, setting: Setting) -> bool:
        """Whether a step from a state of zeros is a step from no state."""
        generator = torch.Generator().manual_seed(0)
        gradients = [torch.randn(x.shape, generator=generator).to(x) for x in setting.x]
        ends = []
        for placed in (False, True):
            leaves = [torch.zeros_like(x, requires_grad=True) for x in setting.x]
            members = self._rule.build(leaves, client_axis=False)
            run = LocalRun(0, [0], setting.x, leaves, [], members, False)
            if placed:
                run.client_state = {
                    "optimizer_state": [t.unsqueeze(0) for t in self._like(setting)]
                }
                self.begin(run)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient.to(leaf).clone(memory_format=torch.preserve_format)
            for optimizer, _ in members:
                optimizer.step()
            ends.append([leaf.detach() for leaf in leaves])
        return all(map(torch.equal, *ends))

    def _like(self, setting: Setting) -> Tensors:
        zero = setting.x[0].new_zeros((), dtype=torch.float64)
        numbers = [zero.clone() for _ in self._numbers]
        return [t for ids in self._tensors.values() for t in setting.zeros(ids)] + numbers

    def client_state_like(self, name: str, setting: Setting) -> Tensors:
        """The optimisers' tensors, and one number for the weight of all first or second moments."""
        return self._like(setting)

    def begin(self, run: LocalRun) -> None:
        """Places what the client kept."""
        values = iter(run.client_state["optimizer_state"])
        for key, indices in self._tensors.items():
            run.set_state(key, indices, [next(values) for _ in indices], per_client=True)
        for key, indices in self._numbers.items():
            run.set_number(key, indices, next(values))

    def end(self, run: LocalRun) -> None:
        """Keeps it."""
        tensors = [t for key, ids in self._tensors.items() for t in run.get_state(key, ids)]
        numbers = [run.get_number(key, ids) for key, ids in self._numbers.items()]
        run.client_state["optimizer_state"] = [*tensors, *numbers]


def _shape(value: Any) -> torch.Size | None:  # noqa: ANN401
    return value.shape if isinstance(value, Tensor) else None
