"""The global model's accuracy as the clients would find it."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..data.datamodule import FederatedDataModule
from ..data.partition import Partition
from ..data.sampling import evaluated_clients

if TYPE_CHECKING:
    from ..tasks import Task

__all__ = ["ClientAccuracy", "present_classes"]


def present_classes(labels: Tensor, classes: int) -> Tensor:
    """Which classes have a sample, ``(classes,)``."""
    return torch.bincount(labels.cpu(), minlength=classes) > 0


class ClientAccuracy:
    """Per-class test accuracy weighted by each client's label shares.

    Classes without a test sample say nothing, nor clients that have no others.
    """

    def __init__(self) -> None:
        self._shares: tuple[Partition, Tensor] | None = None

    def __call__(
        self, data: FederatedDataModule, task: "Task", by_class: Tensor
    ) -> dict[str, float]:
        """Mean over the clients, and over the worst tenth of them, by tag.

        Args:
            data: Whose partition and test set they are.
            task: Says the class of a test sample.
            by_class: The accuracy of each class, ``(classes,)``.
        """
        partition = data.partition
        if self._shares is None or self._shares[0] is not partition:  # once: it follows N
            present = present_classes(task.classes(data.splits.test), len(by_class))
            clients = evaluated_clients(partition.clients_with_data)
            shares = torch.from_numpy(data.label_shares(clients, present.numpy()))
            self._shares = partition, shares[shares.sum(1) > 0]
        accuracy = (self._shares[1] @ by_class.double().cpu()).sort().values
        if not len(accuracy):
            return {}
        worst = accuracy[: math.ceil(len(accuracy) / 10)]
        return {
            "client/acc_mean": float(accuracy.mean()),
            "client/acc_worst10": float(worst.mean()),
        }
