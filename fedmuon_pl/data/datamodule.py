"""Data of a federation: who holds what, batches by index, evaluation in large batches."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import ConfigError
from ..pytrees import map_tensors, sent
from ..seeding import numpy_rng
from .batches import Batches, OneRound
from .partition import IntArray, Partition, Partitioner
from .partition_cache import cached_partition
from .sampling import local_batches
from .size_skew import Natural

__all__ = ["FederatedDataModule", "Splits"]


_GATHERED = 1024
"""Samples that are gathered at a time, for one or for several local steps."""


@dataclass
class Splits:
    """A data set in three parts, each a pytree of tensors whose first axis is the samples.

    Attributes:
        train: What clients train on, n samples.
        val: A held-out part of the training data; whatever is chosen is chosen by it.
        test: The test set; never used to choose.
        labels: What a partitioner skews by, one integer for each training sample, ``(n,)``.
        num_classes: Labels are below it.
        writers: Who each training sample is from, ``(n,)``, for :class:`Natural`; None if unknown.
    """

    train: Any
    val: Any
    test: Any
    labels: IntArray
    num_classes: int
    writers: IntArray | None = None


class FederatedDataModule(LightningDataModule):
    """A data set, its partition over clients, and the clients' batches.

    A subclass says in :meth:`load` what the data are. Everything drawn here is a function of its
    arguments: the partition of its own seed, batches of (run seed, round, client).

    Args:
        clients: How many clients hold the training data, N.
        partition: Which client holds which samples.
        partition_seed: The partition's own seed; the run's seed does not change it.
        batch_size: B, samples in a local step.
        eval_batch_size: Samples in an evaluation batch; changes speed and memory only. If None,
            1000, or 250 on a CPU, where they stay in the caches and LeNet takes half the time.

    Raises:
        ConfigError: If a number is below 1, or the data cannot be partitioned so.
    """

    def __init__(
        self,
        clients: int,
        partition: Partitioner,
        partition_seed: int = 0,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("clients", clients), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"data.{name}={value}: must be at least 1")
        if eval_batch_size is not None and eval_batch_size < 1:
            raise ConfigError(f"data.eval_batch_size={eval_batch_size}: must be at least 1")
        self.clients = clients
        self.partitioner = partition
        self.partition_seed = partition_seed
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self._partition: Partition | None = None

    @abstractmethod
    def load(self) -> Splits:
        """The data; called once in a process. Nothing may be downloaded unasked."""

    def make_partition(self, splits: Splits) -> Partition:
        """Who holds what; override for data that come with their own clients."""
        column: IntArray | None = splits.labels
        if isinstance(self.partitioner, Natural):
            column = splits.writers
            if column is None:
                raise ValueError(
                    f"Natural needs to know writers, and {type(self).__name__} has none"
                )
        assert column is not None
        return cached_partition(self.partitioner, column, self.clients, self.partition_seed)

    def prepare_data(self) -> None:
        """Downloads, if that is asked for, in one process on each machine before any loads."""
        if getattr(self, "download", False):
            self.load()

    def setup(self, stage: str | None = None) -> None:
        """Loads and partitions; a second call does nothing."""
        if self._partition is not None:
            return
        self.splits = self.load()
        try:
            self._partition = self.make_partition(self.splits)
        except ValueError as e:
            raise ConfigError(f"data.partition: {e}") from None

    @property
    def partition(self) -> Partition:
        """Who holds what; only after :meth:`setup`."""
        if self._partition is None:
            raise RuntimeError("setup() has not been called")
        return self._partition

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Moves all data to a device, and floating-point ones to the weights' dtype, for good."""

        def move(t: Tensor) -> Tensor:
            return t.to(device, dtype if t.is_floating_point() else t.dtype)

        for name in ("train", "val", "test"):
            setattr(self.splits, name, tree_map(move, getattr(self.splits, name)))

    def prepare(self, batch: Any) -> Any:  # noqa: ANN401
        """What the network gets of a stored batch, in training and evaluation: the same here."""
        return batch

    def gather(self, indices: Tensor) -> Any:  # noqa: ANN401
        """The training samples at ``indices`` of any shape: tensors ``(*indices.shape, ...)``."""
        return self.prepare(self._stored(indices))

    def _stored(self, indices: Tensor) -> Any:  # noqa: ANN401
        flat = indices.flatten()  # copies whole samples: t[indices] took 3 to 6 times as long

        def take(t: Tensor) -> Tensor:
            return t.index_select(0, flat).view(*indices.shape, *t.shape[1:])

        return map_tensors(take, self.splits.train)

    @property
    def augments(self) -> bool:
        """Whether :meth:`augmented` changes anything; override both."""
        return False

    def augmented(
        self,
        batch: Any,  # noqa: ANN401
        clients: Sequence[int],
        *,
        round: int,
        step: int,
        seed: int,
    ) -> Any:  # noqa: ANN401
        """A stored batch as some clients see it in one local step, where :attr:`augments` is true.

        Args:
            batch: Tensors ``(C, B, ...)``, before :meth:`prepare`.
            clients: The clients' ids.
            round: The round.
            step: The local step, below K.
            seed: The run's seed.

        Returns:
            Tensors ``(C, B, ...)``; a client's part may depend on nothing but the seed, the round,
            the client, the step and its samples.
        """
        return batch

    def local_data(
        self,
        batches: list[list[IntArray]],
        clients: Sequence[int],
        device: torch.device,
        *,
        round: int,
        seed: int,
    ) -> Iterator[Any]:
        """The data of a block's local steps, one after the other, each ``(C, B, ...)``.

        Several small steps are gathered at once.

        Args:
            batches: ``batches[c][k]`` are the samples of client c in step k.
            clients: The clients' ids.
            device: Where the data lie.
            round: The round.
            seed: The run's seed.
        """
        plain = not self.augments
        steps = [np.stack(step) for step in zip(*batches, strict=True)]
        first = 0
        while first < len(steps):
            ends = np.cumsum([s.size for s in steps[first:]])
            together = max(1, int((ends <= _GATHERED).sum()))
            chosen = steps[first : first + together]
            indices = sent(np.concatenate([s.ravel() for s in chosen]), device)
            data = self.gather(indices) if plain else self._stored(indices)
            for k, (step, end) in enumerate(zip(chosen, ends, strict=False), first):
                part = map_tensors(partial(_part, step.shape, int(end) - step.size, int(end)), data)
                if not plain:
                    part = self.augmented(part, clients, round=round, step=k, seed=seed)
                    part = self.prepare(part)
                yield part
            first += together

    def client_batches(
        self,
        client: int,
        *,
        round: int,
        seed: int,
        steps: int | None,
        epochs: int | None,
        drop_last: bool,
    ) -> list[IntArray]:
        """Sample indices of a client's local steps in a round, batch by batch."""
        return local_batches(
            self.partition[client],
            self.batch_size,
            rng=numpy_rng(seed, "batches", round, client),
            steps=steps,
            epochs=epochs,
            drop_last=drop_last,
        )

    def client_samples(self, client: int, *, round: int, seed: int) -> list[IntArray]:
        """All of a client's sample indices, shuffled, in batches of almost equal size."""
        samples = self.partition[client]
        order = numpy_rng(seed, "full_gradient", round, client).permutation(samples)
        return np.array_split(order, math.ceil(len(order) / self.batch_size))

    def client_split(self, client: int, split: Literal["val", "test"]) -> Any:  # noqa: ANN401
        """A client's own samples of the validation split or the test set, like those of it.

        None, as here, where there is one for everybody; override where a client has a part of its
        own or sees it in its own way. See :class:`~fedmuon_pl.server.PersonalEvaluation`.
        """
        return None

    def seen_by(self, client: int, split: Literal["val", "test"], chosen: Tensor) -> Any:  # noqa: ANN401
        """Samples of the validation split or the test set as a client would see them, stored.

        The same for everybody, as here, unless the clients' inputs differ by themselves.

        Args:
            client: Its id.
            split: Which.
            chosen: A mask or indices of samples, on the data's device.
        """
        return tree_map(lambda t: t[chosen], getattr(self.splits, split))

    def label_shares(
        self, clients: Sequence[int] | IntArray, present: np.ndarray | None = None
    ) -> np.ndarray:
        """The share of each class in the clients' data, ``(clients, classes)``; rows sum to 1.

        With ``present`` ``(classes,)`` only of those classes; 0 for a client that has none of them.
        """
        labels, classes = self.splits.labels, self.splits.num_classes
        counts = np.stack(
            [np.bincount(labels[self.partition[c]], minlength=classes) for c in clients]
        )
        if present is not None:
            counts[:, ~present] = 0
        return counts / np.maximum(counts.sum(1, keepdims=True), 1)  # type: ignore[no-any-return]

    def describe(self) -> dict[str, Any]:
        """Plain values that say which data and partition this is, for fingerprints."""
        return {
            "name": type(self).__name__,
            "clients": self.clients,
            "partition": self.partition.digest(),
            "batch_size": self.batch_size,
        }

    def train_dataloader(self) -> OneRound:
        """One batch: the round."""
        return OneRound()

    def val_dataloader(self) -> list[Batches]:
        """The validation split, and during ``fit`` the test set for its curve."""
        batches = [self._batches(self.splits.val)]
        if self.trainer is None or self.trainer.state.fn != "validate":
            batches.append(self._batches(self.splits.test))
        return batches

    def test_dataloader(self) -> Batches:
        """The test set."""
        return self._batches(self.splits.test)

    def _batches(self, data: Any) -> Batches:  # noqa: ANN401
        """This process's part of an evaluation."""
        trainer = self.trainer
        rank, ranks = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
        return Batches(data, self.evaluated_at_once(), self.prepare, rank, ranks)

    def evaluated_at_once(self) -> int:
        """The samples in an evaluation batch."""
        if self.eval_batch_size is not None:
            return self.eval_batch_size
        trainer = self.trainer
        return 250 if trainer is None or trainer.strategy.root_device.type == "cpu" else 1000


def _part(shape: tuple[int, ...], first: int, end: int, t: Tensor) -> Tensor:
    """Samples from ``first`` to before ``end``, their axis as ``shape``."""
    return t[first:end].view(*shape, *t.shape[1:])
