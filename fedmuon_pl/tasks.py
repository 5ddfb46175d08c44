"""A task: a network, a loss and metrics. Nothing else in the project knows what a batch holds."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from .clients import Forward
from .errors import ConfigError
from .pytrees import plain
from .seeding import derive

__all__ = ["Classification", "LanguageModelling", "NetworkFactory", "Task"]

NetworkFactory = Callable[[], nn.Module]
"""A network class, a partial of one, or any function that makes a network."""


class Task(ABC):
    """What the clients learn.

    A batch is any pytree of tensors whose first axis is the samples.

    Args:
        network: Makes the network, x^0, under a random stream of its own; or a module, used as it
            is (with pretrained weights, say).
    """

    def __init__(self, network: NetworkFactory | nn.Module) -> None:
        self._network = network

    def build_network(self, seed: int) -> nn.Module:
        """The network at x^0: the same for every method and partition with the same seed."""
        if isinstance(self._network, nn.Module):
            return self._network
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "init"))
            return self._network()

    def describe(self) -> dict[str, Any]:
        """Name, settings and the network's arguments, for the fingerprint of a run."""
        settings = {k: v for k, v in vars(self).items() if isinstance(v, int | float | str)}
        if isinstance(self._network, nn.Module):  # as it is; its text has what its layers are
            network: Any = hashlib.sha256(repr(self._network).encode()).hexdigest()
        else:
            network = _without_files(plain(self._network))
        return {"name": type(self).__name__, "network": network, **settings}

    def check(self, num_classes: int) -> None:  # noqa: B027
        """Refuses data that the task cannot take; called before training.

        Args:
            num_classes: The number of classes of the data.

        Raises:
            ConfigError: In one sentence.
        """

    @abstractmethod
    def loss(self, network: Forward, batch: Any) -> Tensor:  # noqa: ANN401
        """The mean loss of one client's batch, a scalar."""

    @abstractmethod
    def metrics(self) -> MetricCollection:
        """Fresh metrics of one evaluation; each becomes a tag, such as ``val/loss``."""

    @abstractmethod
    def evaluate(self, network: Forward, batch: Any, metrics: MetricCollection) -> None:  # noqa: ANN401
        """Adds one evaluation batch to the metrics of :meth:`metrics`."""

    def class_metric(self) -> MulticlassAccuracy | None:
        """Accuracy of each class by itself, where the task has classes; see ``client/acc_mean``."""
        return None

    def classes(self, batch: Any) -> Tensor:  # noqa: ANN401
        """The class of each sample of a batch, ``(B,)``, where the task has classes.

        Raises:
            NotImplementedError: If it has none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no classes")


def _without_files(value: Any) -> Any:  # noqa: ANN401
    """Without where weights are read from: a file may be moved between two starts of a run."""
    if not isinstance(value, dict):
        return value
    return {k: _without_files(v) for k, v in value.items() if not k.endswith("file")}


def _mean() -> MeanMetric:
    """A mean in float64: the same digits however the batches are shared out.

    Of all batches: by default torchmetrics leaves those out that are not a number.
    """
    metric = MeanMetric(nan_strategy=float("nan"))
    metric.set_dtype(torch.float64)
    return metric


class Classification(Task):
    """One label for each input: batches are ``(inputs (B, ...), labels (B,))``.

    Args:
        network: See :class:`Task`; maps inputs to logits ``(B, classes)``.
        num_classes: The number of classes.
        label_smoothing: Of the training loss, in [0, 1); evaluation does not smooth.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        network: NetworkFactory | nn.Module,
        num_classes: int = 10,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(network)
        if num_classes < 2:
            raise ValueError(f"num_classes={num_classes}: a classification needs at least 2")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing={label_smoothing}: must be in [0, 1)")
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing

    def check(self, num_classes: int) -> None:
        """The data must have as many classes as the task."""
        if num_classes != self.num_classes:
            raise ConfigError(
                f"model.task has num_classes={self.num_classes}, but the data have {num_classes}"
            )

    def loss(self, network: Forward, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy."""
        inputs, labels = batch
        return F.cross_entropy(network(inputs), labels, label_smoothing=self.label_smoothing)

    def metrics(self) -> MetricCollection:
        """``acc`` and ``loss``, both means over samples."""
        accuracy = MulticlassAccuracy(self.num_classes, average="micro")
        return MetricCollection({"acc": accuracy, "loss": _mean()}, compute_groups=False)

    def class_metric(self) -> MulticlassAccuracy:
        """The share of each class that is recognised, ``(classes,)``."""
        return MulticlassAccuracy(self.num_classes, average="none")

    def classes(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The labels."""
        return batch[1]

    def evaluate(
        self, network: Forward, batch: tuple[Tensor, Tensor], metrics: MetricCollection
    ) -> None:
        """See :class:`Task`."""
        inputs, labels = batch
        logits = network(inputs)
        metrics["loss"].update(F.cross_entropy(logits, labels), weight=len(labels))
        metrics["acc"].update(logits, labels)
        if "class_acc" in metrics:
            metrics["class_acc"].update(logits, labels)


class LanguageModelling(Task):
    """Next-token prediction: batches are token sequences ``(B, length)``, integers.

    Args:
        network: See :class:`Task`; maps tokens ``(B, length - 1)`` to logits
            ``(B, length - 1, vocabulary)``.
        vocabulary: The number of tokens.
        ignore_index: A token that is never a target, such as padding.
    """

    def __init__(
        self, network: NetworkFactory | nn.Module, vocabulary: int, ignore_index: int = -100
    ) -> None:
        super().__init__(network)
        self.vocabulary = vocabulary
        self.ignore_index = ignore_index

    def _forward(self, network: Forward, batch: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits, targets, their number without ignored ones, and the mean loss over these."""
        logits, targets = network(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        count = (targets != self.ignore_index).sum()
        total = F.cross_entropy(logits, targets, ignore_index=self.ignore_index, reduction="sum")
        # A batch of nothing but ignored tokens has the loss 0, not 0/0.
        return logits, targets, count, total / count.clamp(min=1)

    def loss(self, network: Forward, batch: Tensor) -> Tensor:
        """Mean cross-entropy over the targets."""
        return self._forward(network, batch)[-1]

    def metrics(self) -> MetricCollection:
        """``acc`` and ``loss`` in nats, both means over target tokens."""
        accuracy = MulticlassAccuracy(
            self.vocabulary, average="micro", ignore_index=self.ignore_index
        )
        return MetricCollection({"acc": accuracy, "loss": _mean()}, compute_groups=False)

    def evaluate(self, network: Forward, batch: Tensor, metrics: MetricCollection) -> None:
        """See :class:`Task`."""
        logits, targets, count, loss = self._forward(network, batch)
        metrics["loss"].update(loss, weight=count)
        metrics["acc"].update(logits, targets)
