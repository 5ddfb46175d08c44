"""Small image networks."""

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MLP", "LeNet"]


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max pooling (LeCun et al., 1998).

    61,706 weights for ``1 x 28 x 28`` inputs and 10 classes.

    Args:
        in_channels: Channels of the images.
        image_size: Height and width of the images, at least 12 and a multiple of 4.
        num_classes: Number of logits.
    """

    def __init__(self, in_channels: int = 1, image_size: int = 28, num_classes: int = 10) -> None:
        super().__init__()
        side = image_size // 4 - 2
        if side < 1 or image_size % 4:
            raise ValueError(f"image_size={image_size}: LeNet needs a multiple of 4, at least 12")
        self.conv1 = nn.Conv2d(in_channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * side * side, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(B, in_channels, image_size, image_size)`` to logits ``(B, num_classes)``."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))  # type: ignore[no-any-return]


class MLP(nn.Sequential):
    """Fully connected layers with ReLU between them.

    Args:
        in_features: Inputs are flattened to this many features.
        hidden: Widths of the hidden layers.
        num_classes: Number of logits.
        batch_norm: Whether BatchNorm comes before each ReLU.
    """

    def __init__(
        self,
        in_features: int = 64,
        hidden: Sequence[int] = (64, 32),
        num_classes: int = 10,
        batch_norm: bool = False,
    ) -> None:
        widths = [in_features, *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for a, b in pairwise(widths):
            norm = [nn.BatchNorm1d(b)] if batch_norm else []
            layers += [nn.Linear(a, b), *norm, nn.ReLU()]
        super().__init__(*layers, nn.Linear(widths[-1], num_classes))
