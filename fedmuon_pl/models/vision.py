"""Small image networks."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MLP", "LeNet", "ResNet8", "ResNet18"]

Norm = Literal["group", "batch", "released"]


class LeNet(nn.Module):
    """LeNet-5 with ReLU and pooling of 2 x 2 (LeCun et al., 1998, with averages).

    61,706 weights for ``1 x 28 x 28`` inputs and 10 classes.

    Args:
        in_channels: Channels of the images.
        image_size: Height and width of the images, at least 12 and a multiple of 4.
        num_classes: Number of logits.
        pooling: ``"max"`` or ``"average"``, after each of the two convolutions.

    Raises:
        ValueError: For another size of images or pooling.
    """

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int = 28,
        num_classes: int = 10,
        pooling: Literal["max", "average"] = "max",
    ) -> None:
        super().__init__()
        if pooling not in ("max", "average"):
            raise ValueError(f"pooling={pooling!r}: use 'max' or 'average'")
        self.pooling = pooling
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
        x = self._pooled(self.conv2(self._pooled(self.conv1(x)))).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))  # type: ignore[no-any-return]

    def _pooled(self, x: Tensor) -> Tensor:
        if self.pooling == "average":
            return F.avg_pool2d(F.relu(x), 2)
        return F.relu(_halve(x))  # the maximum first: the same, on a quarter of the values


def _halve(x: Tensor) -> Tensor:
    """The maximum of every 2 x 2 of ``(..., H, W)``, H and W even: ``(..., H / 2, W / 2)``.

    PyTorch's pooling on a CPU looks up where each maximum was, which only a gradient needs, and
    was four fifths of LeNet's evaluation.
    """
    if torch.is_grad_enabled():
        return F.max_pool2d(x, 2)
    x = torch.maximum(x[..., ::2, :], x[..., 1::2, :])
    return torch.maximum(x[..., ::2], x[..., 1::2])


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


class _ResNet(nn.Module):
    """A residual network of basic blocks: a 3 x 3 stem, stages of equal channels, one linear layer.

    Every stage but the first halves the image.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        norm: Norm,
        groups: int,
        channels: Sequence[int],
        blocks_per_stage: int,
        stem_stride: int,
    ) -> None:
        super().__init__()
        if norm not in ("group", "batch", "released"):
            raise ValueError(f"norm={norm!r}: use 'group', 'batch' or 'released'")
        first = channels[0]
        if norm == "group" and (groups < 1 or first % groups):
            raise ValueError(f"groups={groups}: must divide {first}")
        inner = groups if norm == "group" else 0
        self.conv1 = nn.Conv2d(in_channels, first, 3, stem_stride, padding=1, bias=False)
        self.norm1 = _norm(first, 2 if norm == "released" else inner)
        blocks = []
        for before, after in pairwise((first, *channels)):
            stride = 1 if before == after else 2
            blocks.append(_Block(before, after, stride, inner))
            blocks += [_Block(after, after, 1, inner) for _ in range(blocks_per_stage - 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(B, in_channels, height, width)`` to logits ``(B, num_classes)``."""
        x = self.blocks(F.relu(self.norm1(self.conv1(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class ResNet18(_ResNet):
    """ResNet-18 for small images: a 3 x 3 stem of stride 1 and no max pooling.

    11,220,132 weights for 3 channels and 100 classes, whichever the norm. Four stages of two basic
    blocks with 64, 128, 256 and 512 channels; 1 x 1 convolutions where a shortcut changes shape;
    the mean over the pixels, then one linear layer. Weights start as torch's layers do.

    Args:
        in_channels: Channels of the images.
        num_classes: Number of logits.
        norm: ``"group"`` is GroupNorm with ``groups`` groups; ``"batch"`` is BatchNorm;
            ``"released"`` is what the released FedMuon code runs: GroupNorm of 2 groups behind the
            stem and BatchNorm elsewhere.
        groups: Groups of ``"group"``, a divisor of 64. That clients of different classes want
            GroupNorm is Hsieh et al.'s finding (arXiv 1910.00189).

    Raises:
        ValueError: For an unknown norm, or groups that do not divide the channels.

    Source: K. He et al., arXiv 1512.03385, table 1 and figure 5; a 3 x 3 stem for small images as
    in their section 4.2.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 100,
        norm: Norm = "group",
        groups: int = 2,
    ) -> None:
        super().__init__(in_channels, num_classes, norm, groups, (64, 128, 256, 512), 2, 1)


class ResNet8(_ResNet):
    """A ResNet for a CPU: three stages of one basic block with 16, 32 and 64 channels.

    The CIFAR family of He et al. (arXiv 1512.03385, section 4.2) at n = 1 (6n + 2 layers), but with
    1 x 1 convolutions where a shortcut changes shape. 77,754 weights for 1 channel and 10 classes.

    Args:
        in_channels: Channels of the images.
        num_classes: Number of logits.
        norm: See :class:`ResNet18`.
        groups: See :class:`ResNet18`; a divisor of 16.
        stem_stride: 2 makes it about four times as fast, and less accurate.

    Raises:
        ValueError: See :class:`ResNet18`.
    """

    def __init__(
        self,
        in_channels: int = 1,
        num_classes: int = 10,
        norm: Norm = "group",
        groups: int = 2,
        stem_stride: int = 1,
    ) -> None:
        super().__init__(in_channels, num_classes, norm, groups, (16, 32, 64), 1, stem_stride)


class _Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, before: int, channels: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(channels, groups)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = _norm(channels, groups)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != channels:
            convolution = nn.Conv2d(before, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, _norm(channels, groups))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def _norm(channels: int, groups: int) -> nn.Module:
    """GroupNorm of so many groups; BatchNorm for none."""
    return nn.GroupNorm(groups, channels) if groups else nn.BatchNorm2d(channels)
