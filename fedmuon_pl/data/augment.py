"""Augmentation of training images: planned by the client's random stream, done on the device."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Augmentation", "CropFlip"]


class Augmentation(ABC):
    """Changes each training image by numbers drawn for it beforehand; evaluation never sees it."""

    @abstractmethod
    def plan(self, rng: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
        """Whatever is random about n images, one row each, ``(n, numbers)``.

        Args:
            rng: The stream of (seed, round, client, step).
            n: Images.
        """

    @abstractmethod
    def __call__(self, images: Tensor, plan: Tensor) -> Tensor:
        """The changed images; nothing here is random.

        Args:
            images: As they are stored, before normalisation, ``(n, C, H, W)``.
            plan: Of :meth:`plan`, on the images' device.
        """

    def describe(self) -> dict[str, Any]:
        """Name and settings, for fingerprints."""
        return {"name": type(self).__name__, **vars(self)}


class CropFlip(Augmentation):
    """Zero-padding, a random crop of the original size, then a random horizontal flip.

    The usual training transform of CIFAR: He et al. (arXiv 1512.03385, section 4.2), who pad by 4
    and flip half of the images; ``RandomCrop(32, padding=4)`` and ``RandomHorizontalFlip()`` of
    torchvision. As there, padding is black, since it comes before normalisation.

    Args:
        padding: Pixels on each side; the crop's corner is uniform on 0..2 padding, both ways.
        flip: Whether half of the images are mirrored.

    Raises:
        ValueError: If ``padding`` is negative.
    """

    def __init__(self, padding: int = 4, flip: bool = True) -> None:
        if padding < 0:
            raise ValueError(f"padding={padding}: must not be negative")
        self.padding = padding
        self.flip = flip

    def plan(self, rng: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
        """Top, left and flip of each image, ``(n, 3)``."""
        corners = rng.integers(0, 2 * self.padding, (n, 2), endpoint=True)
        flips = rng.integers(0, 2, (n, 1)) if self.flip else np.zeros((n, 1), np.int64)
        return np.concatenate([corners, flips], axis=1)

    def __call__(self, images: Tensor, plan: Tensor) -> Tensor:
        """See :class:`Augmentation`."""
        n, channels, height, width = images.shape
        padded = F.pad(images, (self.padding,) * 4)
        rows = plan[:, 0, None] + torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device)
        mirrored = plan[:, 2, None] == 1
        columns = plan[:, 1, None] + torch.where(mirrored, width - 1 - columns, columns)
        pixels = rows[:, :, None] * padded.shape[-1] + columns[:, None]
        picked = padded.flatten(2).gather(2, pixels.view(n, 1, -1).expand(-1, channels, -1))
        return picked.view_as(images)
