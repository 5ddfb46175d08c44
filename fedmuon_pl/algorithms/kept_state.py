"""Local optimisers that go on where the client's last round ended."""

from typing import Any

import torch
from torch import Tensor

from ..clients import Tensors, random_state_kept
from ..pytrees import all_finite
from .base import LocalRule, LocalRun, Mechanism, Setting, Upload, group_options

__all__ = ["KeptState"]


class KeptState(Mechanism):
    """A client keeps its local optimiser's state from round to round; only x is replaced.

    The inner optimisers of DiLoCo (arXiv 2311.08105) and MuLoCo (arXiv 2505.23725) are kept so.
    Nothing of it is sent. A client that takes part for the first time starts from an empty state.
    It is for few clients that come back often: a state is as old as the client's last round.

    Args:
        rule: The local rule whose optimisers keep the state.

    Raises:
        ValueError: In ``setup``, if the optimisers keep nothing, or not all that they keep is
            tensors of the parameters' shapes and dtypes that start at zero and weights of them
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
                elif key != "step" and _alike(value, setting.x[index]):
                    self._tensors.setdefault(key, []).append(index)
                else:
                    raise ValueError(
                        f"clients cannot keep the state {key!r} of {kind.__name__}; they can of "
                        f"torch.optim.SGD, fedmuon_pl.optim.adamw.AdamW and Muon"
                    )
        if not self._tensors:
            raise ValueError("the local optimiser keeps no state; SGD does with momentum")
        with torch.no_grad(), random_state_kept(setting.x[0].device):
            self._try(setting)

    def _try(self, setting: Setting) -> None:
        """Whether a step from zeros is one from no state, and all that changes is state."""
        generator = torch.Generator().manual_seed(0)
        draws = [torch.randn(2, *x.shape, generator=generator).to(x) for x in setting.x]
        ends = []
        for placed in (False, True):
            leaves = [torch.empty_like(d[0]).copy_(d[0]).requires_grad_() for d in draws]
            members = self._rule.build(leaves, client_axis=False)
            run = LocalRun(0, [0], setting.x, leaves, [], members, False)
            before = [group_options(optimizer) for optimizer, _ in members]
            if placed:
                zeros = [t.unsqueeze(0) for t in self._like(setting)]
                run.client_state["optimizer_state"] = zeros
                self.begin(run)
            for leaf, (_, gradient) in zip(leaves, draws, strict=True):
                leaf.grad = torch.empty_like(leaf).copy_(gradient)
            torch.manual_seed(0)
            for optimizer, _ in members:
                optimizer.step()
            if [group_options(optimizer) for optimizer, _ in members] != before:
                raise ValueError("the local optimiser counts in its groups, not in its state")
            ends.append([leaf.detach() for leaf in leaves])
        if not all(map(torch.equal, *ends)):
            raise ValueError("the local optimiser's state does not start at zero (dampening?)")

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
        numbers: list[Any] = list(values)
        if numbers and not run.client_axis:
            numbers = torch.cat(numbers).tolist()  # a GPU is waited for once
        for (key, indices), number in zip(self._numbers.items(), numbers, strict=True):
            run.set_number(key, indices, number)

    def end(self, run: LocalRun) -> Upload:
        """Keeps it; the upload, of no bytes, is finite where the state is."""
        tensors = [t for key, ids in self._tensors.items() for t in run.get_state(key, ids)]
        numbers = [run.get_number(key, ids) for key, ids in self._numbers.items()]
        run.client_state["optimizer_state"] = [*tensors, *numbers]
        sound = torch.stack([all_finite(t) for t in tensors]).all(0)
        check = torch.zeros_like(sound, dtype=tensors[0].dtype).masked_fill(~sound, torch.nan)
        return Upload([check], by_weight=False, sent=False)


def _alike(value: Any, x: Tensor) -> bool:  # noqa: ANN401
    return isinstance(value, Tensor) and value.shape == x.shape and value.dtype == x.dtype
