"""Networks, none of which downloads; any ``torch.nn.Module`` can be named in their place."""

from .lora import LoRA
from .named import Timm, Torchvision
from .vision import MLP, LeNet, ResNet8, ResNet18
from .vit import DeiTTiny6, SwinTiny, ViT

__all__ = [
    "MLP",
    "DeiTTiny6",
    "LeNet",
    "LoRA",
    "ResNet8",
    "ResNet18",
    "SwinTiny",
    "Timm",
    "Torchvision",
    "ViT",
]
