"""Networks that need no download; any ``torch.nn.Module`` can be named in their place."""

from .vision import MLP, LeNet, ResNet8, ResNet18

__all__ = ["MLP", "LeNet", "ResNet8", "ResNet18"]
