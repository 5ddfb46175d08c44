"""Labelled images of a federation: kept as bytes on the device, made floats batch by batch."""

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..pytrees import sent
from ..seeding import numpy_rng
from .arrays import SPLIT_SEED, Arrays, stratified
from .augment import Augmentation, CropFlip
from .datamodule import FederatedDataModule, Splits
from .feature_skew import FeatureSkew

__all__ = ["ImageDataModule"]


class ImageDataModule(FederatedDataModule):
    """Images with an official training and an official test part.

    Validation is a fixed stratified part of the official training images, and so is what the
    clients hold if ``train_size`` is given; the validation part is the same for any ``train_size``.
    Bytes stay bytes on the device, and each batch is normalised by channel with :attr:`mean` and
    :attr:`std`; images that come as floats are used as they are.

    With ``feature_skew``, validation and test images undergo it too, each as if a client drawn by
    the partition's seed (by its share of the training data) had taken it: the global model is
    tested on the mixture that the clients hold.

    Args:
        train_size: How many training images the clients hold in all; null for all that are not
            held out.
        val_size: How many training images are held out for validation; below 1 it is a share.
        augment: Changes each training image at random; evaluation never sees it.
        feature_skew: Changes all images of a client in one way.
        test_crop: Crops test images too, at random out of so many pixels of padding, once and for
            all. Only for parity with numbers that were measured so: the released FedMuon code pads
            by 4 (and draws anew at each evaluation). Such an accuracy is noisy and too low.
        **kwargs: Those of :class:`FederatedDataModule`.

    Raises:
        ConfigError: If a size does not fit the data, or the files are missing or not the known
            ones.
    """

    mean: Sequence[float] | None = None
    """By channel, of pixels in 0..1; None to measure the official training images."""
    std: Sequence[float] | None = None
    """See :attr:`mean`."""

    def __init__(
        self,
        train_size: int | None = None,
        val_size: int | float = 5000,
        augment: Augmentation | None = None,
        feature_skew: FeatureSkew | None = None,
        test_crop: int = 0,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(**kwargs)
        if test_crop < 0:
            raise ConfigError(f"data.test_crop={test_crop}: must not be negative")
        self.train_size = train_size
        self.val_size = val_size
        self.augment = augment
        self.feature_skew = feature_skew
        self.test_crop = test_crop
        self._dtype = torch.get_default_dtype()

    @abstractmethod
    def read(self) -> tuple[Arrays, Arrays]:
        """The official training and test parts."""

    def load(self) -> Splits:
        """See the class."""
        train, test = self.read()
        n = len(train.labels)
        held_out = self.val_size if self.val_size >= 1 else round(self.val_size * n)
        size = n - int(held_out) if self.train_size is None else self.train_size
        try:
            val_ids, ids = stratified(train.labels, SPLIT_SEED, [int(held_out), size])
        except ValueError as e:
            raise ConfigError(
                f"data.train_size={self.train_size} and data.val_size={self.val_size}: {e}"
            ) from None
        mean, std = self.mean, self.std
        if mean is None or std is None:
            mean, std = _moments(train.inputs)
        self._exact = [
            torch.tensor(by_channel, dtype=torch.float64)[:, None, None] * 255
            for by_channel in (mean, std)
        ]
        self._moments = self._exact
        self._digest = _digest(train)

        def tensors(a: Arrays, ids: Any = slice(None)) -> tuple[Tensor, Tensor]:  # noqa: ANN401
            # Plain strides: those of an axis of length 1 are arbitrary in NumPy, and torch reads
            # a memory format out of them, which changes the last bits of a convolution.
            inputs = torch.from_numpy(a.inputs[ids]).clone(memory_format=torch.contiguous_format)
            return inputs, torch.from_numpy(a.labels[ids])

        test_images, test_labels = tensors(test)
        if self.test_crop:
            crop = CropFlip(self.test_crop, flip=False)
            plan = crop.plan(numpy_rng(self.partition_seed, "test crop"), len(test_images))
            test_images = crop(test_images, torch.from_numpy(plan))
        return Splits(
            tensors(train, ids),
            tensors(train, val_ids),
            (test_images, test_labels),
            train.labels[ids],
            train.num_classes,
            None if train.writers is None else train.writers[ids],
        )

    def setup(self, stage: str | None = None) -> None:
        """Loads, partitions and changes what a client sees; a second call does nothing."""
        done = self._partition is not None
        super().setup(stage)
        if not done and self.feature_skew is not None:
            self._skew(self.feature_skew)

    def _skew(self, skew: FeatureSkew) -> None:
        p, splits = self.partition, self.splits
        if splits.train[0].dtype != torch.uint8:
            raise ConfigError("data.feature_skew changes images of bytes; these are floats")
        if np.unique(p.indices).size < p.indices.size:
            raise ConfigError(
                "data.feature_skew needs a partition that gives no sample to two clients"
            )
        slots = np.repeat(np.arange(len(p)), p.sizes)
        owners = np.full(len(splits.labels), -1)
        owners[p.indices] = slots
        rng = numpy_rng(self.partition_seed, "feature skew of evaluation")
        self._unskewed = {"val": splits.val, "test": splits.test}
        for name in ("train", "val", "test"):
            images, labels = getattr(splits, name)
            whose = owners if name == "train" else rng.choice(slots, len(images))
            try:
                changed = skew(images, whose, len(p), self.partition_seed)
            except ValueError as e:
                raise ConfigError(f"data.feature_skew: {e}") from None
            setattr(splits, name, (changed, labels))

    def seen_by(
        self, client: int, split: Literal["val", "test"], chosen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :class:`FederatedDataModule`; with the client's own feature skew."""
        if self.feature_skew is None:
            return super().seen_by(client, split, chosen)  # type: ignore[no-any-return]
        images, labels = (t[chosen.cpu()] for t in self._unskewed[split])
        whose = np.full(len(images), client)
        seen = self.feature_skew(images, whose, len(self.partition), self.partition_seed)
        return seen.to(chosen.device), labels.to(chosen.device)

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """See :class:`FederatedDataModule`; bytes stay bytes."""
        super().place(device, dtype)
        self._dtype = dtype
        self._moments = [t.to(device, dtype) for t in self._exact]

    def prepare(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Floats, normalised by channel: images ``(..., C, H, W)``."""
        images, labels = batch
        if images.dtype != torch.uint8:
            return batch
        mean, std = (t.to(images.device, self._dtype) for t in self._moments)
        return images.to(self._dtype).sub_(mean).div_(std), labels

    @property
    def augments(self) -> bool:
        """See :class:`FederatedDataModule`."""
        return self.augment is not None

    def augmented(
        self,
        batch: tuple[Tensor, Tensor],
        clients: Sequence[int],
        *,
        round: int,
        step: int,
        seed: int,
    ) -> tuple[Tensor, Tensor]:
        """See :class:`FederatedDataModule`."""
        assert self.augment is not None
        images, labels = batch
        plans = [
            self.augment.plan(numpy_rng(seed, "augment", round, c, step), images.shape[1])
            for c in clients
        ]
        plan = sent(np.concatenate(plans), images.device)
        return self.augment(images.flatten(0, 1), plan).view_as(images), labels

    def describe(self) -> dict[str, Any]:
        """See :class:`FederatedDataModule`; with what else decides what the clients see."""
        return {
            **super().describe(),
            "images": self._digest,
            "train_size": self.train_size,
            "val_size": self.val_size,
            "augment": None if self.augment is None else self.augment.describe(),
            "feature_skew": None if self.feature_skew is None else self.feature_skew.describe(),
            "test_crop": self.test_crop,
        }


def _moments(images: np.ndarray) -> tuple[list[float], list[float]]:
    """Mean and standard deviation by channel of uint8 images, exactly, in units of 255."""
    mean, std = [], []
    if images.dtype != np.uint8:  # used as they are
        return [0.0] * images.shape[1], [1.0] * images.shape[1]
    values = np.arange(256) / 255
    for c in range(images.shape[1]):
        counts = np.zeros(256, np.int64)
        for start in range(0, len(images), 10_000):
            counts += np.bincount(images[start : start + 10_000, c].reshape(-1), minlength=256)
        share = counts / counts.sum()
        mean.append(float(share @ values))
        std.append(float(np.sqrt(share @ (values - mean[-1]) ** 2)) or 1.0)
    return mean, std


def _digest(arrays: Arrays) -> str:
    """SHA-256 (hex) of the labels and of a thousand images: tells data sets apart quickly."""
    some = np.ascontiguousarray(arrays.inputs[:: max(1, len(arrays.labels) // 1000)])
    state = hashlib.sha256(repr((arrays.inputs.shape, str(arrays.inputs.dtype))).encode())
    state.update(np.ascontiguousarray(arrays.labels, "<i8").data)
    state.update(some.astype(some.dtype.newbyteorder("<")).data)
    return state.hexdigest()
