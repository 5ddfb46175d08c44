"""Feature skew: clients see the same kinds of things in different ways."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..seeding import numpy_rng

__all__ = ["ChannelGain", "FeatureSkew", "Rotation"]

_AT_ONCE = 4096  # images that are changed together: bounds the memory


class FeatureSkew(ABC):
    """A fixed change of all images of a client, drawn for each client by the partition's seed."""

    @abstractmethod
    def draw(self, clients: int, channels: int, rng: np.random.Generator) -> npt.NDArray[Any]:
        """What each client's images undergo, ``(clients, numbers)``."""

    @abstractmethod
    def change(self, images: Tensor, how: Tensor) -> Tensor:
        """The changed images.

        Args:
            images: uint8, ``(n, C, H, W)``.
            how: Each image's row of :meth:`draw`, ``(n, numbers)``, float64.
        """

    def __call__(
        self, images: Tensor, owners: npt.NDArray[np.integer[Any]], clients: int, seed: int
    ) -> Tensor:
        """All images, each as its client sees it.

        Args:
            images: uint8, ``(n, C, H, W)``.
            owners: Each image's client, ``(n,)``; a negative one leaves the image as it is.
            clients: The number of clients.
            seed: The partition's seed.
        """
        rng = numpy_rng(seed, "feature skew")
        drawn = torch.from_numpy(np.asarray(self.draw(clients, images.shape[1], rng), np.float64))
        out = images.clone()
        held = torch.from_numpy(np.flatnonzero(np.asarray(owners) >= 0))
        whose = torch.from_numpy(np.asarray(owners, np.int64))
        for part in torch.split(held, _AT_ONCE):
            out[part] = self.change(images[part], drawn[whose[part]])
        return out

    def describe(self) -> dict[str, Any]:
        """Name and settings, for fingerprints."""
        return {"name": type(self).__name__, **vars(self)}


class Rotation(FeatureSkew):
    """Each client's images are turned by one of some angles, each as likely.

    Four angles, 0, 90, 180 and 270, are the rotated MNIST of Ghosh et al. (arXiv 2006.04088,
    section 6.2; there clients are divided over them evenly). Multiples of 90 degrees are exact;
    others are interpolated bilinearly, black where nothing was.

    Args:
        angles: Degrees, counter-clockwise.

    Raises:
        ValueError: If there is no angle, or when called with a quarter turn of an oblong image.
    """

    def __init__(self, angles: Sequence[float] = (0, 90, 180, 270)) -> None:
        if not angles:
            raise ValueError("angles is empty: give at least one")
        self.angles = [float(a) for a in angles]

    def draw(self, clients: int, channels: int, rng: np.random.Generator) -> npt.NDArray[Any]:
        """The angle of each client."""
        return np.array(self.angles)[rng.integers(0, len(self.angles), (clients, 1))]

    def change(self, images: Tensor, how: Tensor) -> Tensor:
        """See :class:`FeatureSkew`."""
        out = torch.empty_like(images)
        for angle in sorted(set(how[:, 0].tolist())):
            these = how[:, 0] == angle
            out[these] = _turned(images[these], angle)
        return out


def _turned(images: Tensor, angle: float) -> Tensor:
    height, width = images.shape[-2:]
    if angle % 180 == 0 or (angle % 90 == 0 and height == width):
        return images.rot90(int(angle // 90), (-2, -1))
    if angle % 90 == 0:
        raise ValueError(f"angles holds {angle}: images of {height} x {width} do not fit then")
    # Where each pixel comes from: its place turned back, in pixels from the middle.
    a = torch.deg2rad(torch.tensor(angle, dtype=torch.float64))
    y = torch.arange(height, dtype=torch.float64)[:, None] - (height - 1) / 2
    x = torch.arange(width, dtype=torch.float64)[None] - (width - 1) / 2
    from_x, from_y = a.cos() * x - a.sin() * y, a.sin() * x + a.cos() * y
    grid = torch.stack([2 * from_x / width, 2 * from_y / height], -1).float()
    turned = F.grid_sample(
        images.float(), grid.expand(len(images), -1, -1, -1), align_corners=False
    )
    return turned.round_().clamp_(0, 255).to(torch.uint8)


class ChannelGain(FeatureSkew):
    """Each client's camera: every colour channel is brighter or darker by a factor of its own.

    No paper's benchmark; for three channels it is a colour cast, for one a brightness.

    Args:
        strength: Factors are uniform on ``1 - strength .. 1 + strength``; in (0, 1].

    Raises:
        ValueError: If ``strength`` is outside (0, 1].
    """

    def __init__(self, strength: float = 0.5) -> None:
        if not 0 < strength <= 1:
            raise ValueError(f"strength={strength}: must be in (0, 1]")
        self.strength = strength

    def draw(self, clients: int, channels: int, rng: np.random.Generator) -> npt.NDArray[Any]:
        """The factors of each client, ``(clients, channels)``."""
        return rng.uniform(1 - self.strength, 1 + self.strength, (clients, channels))

    def change(self, images: Tensor, how: Tensor) -> Tensor:
        """See :class:`FeatureSkew`."""
        bright = images.float() * how.float()[:, :, None, None]
        return bright.round_().clamp_(0, 255).to(torch.uint8)
