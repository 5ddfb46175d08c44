"""Transformers for small images, built from timm's blocks (the extra ``models``)."""

from collections.abc import Sequence
from functools import partial

from torch import nn

from .library import FromLibrary, optional

__all__ = ["DeiTTiny6", "SwinTiny", "ViT"]


class ViT(FromLibrary):
    """A Vision Transformer with a class token; ViT-Tiny unless told otherwise.

    5,380,132 weights of ViT-Tiny for images of 32 x 32 in patches of 4 x 4 and 100 classes; its 12
    blocks of width 192 with 3 heads are those of DeiT-Ti. Trained from scratch, with timm's start:
    truncated normal of standard deviation 0.02 for the weights of linear layers and the position
    embedding, zero biases, 1e-6 for the class token, torch's own for the patches' convolution.

    For Muon, ``net.cls_token`` (1, 1, dim) and ``net.pos_embed`` (1, tokens, dim) are the matrices
    1 x dim and tokens x dim, as the released code of FedMuon takes them; ``rest_patterns:
    [cls_token, pos_embed]`` gives them to the rest's optimiser. ``attn.qkv`` is one matrix
    (3 dim, dim).

    Args:
        image_size: Height and width of the images, a multiple of ``patch_size``.
        patch_size: Height and width of a patch; there are (image_size / patch_size)^2 + 1 tokens.
        in_channels: Channels of the images.
        num_classes: Number of logits.
        dim: Width of a token, a multiple of ``heads``.
        depth: Number of blocks.
        heads: Attention heads of a block.
        mlp_ratio: Hidden width of a block's MLP over ``dim``.
        dropout: Of tokens, attention's output and the MLP, in [0, 1). What draws random numbers
            makes clients train one at a time.
        drop_path: Share at which the last block is skipped, rising linearly from 0 at the first
            (stochastic depth), in [0, 1).

    Raises:
        ConfigError: If timm is not installed.
        ValueError: If an argument does not fit.

    Source: A. Dosovitskiy et al., arXiv 2010.11929; H. Touvron et al., DeiT, arXiv 2012.12877,
    table 1. The network is ``timm.models.vision_transformer.VisionTransformer``, and names of
    parameters are its own behind ``net.``.
    """

    def __init__(
        self,
        image_size: int = 32,
        patch_size: int = 4,
        in_channels: int = 3,
        num_classes: int = 100,
        dim: int = 192,
        depth: int = 12,
        heads: int = 3,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        _check_sizes(image_size, patch_size, in_channels, num_classes)
        if dim < 1 or heads < 1 or dim % heads:
            raise ValueError(f"dim={dim}: must be a multiple of heads={heads}")
        if depth < 1:
            raise ValueError(f"depth={depth}: must be at least 1")
        _check_shares(dropout=dropout, drop_path=drop_path)
        timm = optional("timm.models.vision_transformer", "ViT")
        super().__init__(
            timm.VisionTransformer(
                img_size=image_size,
                patch_size=patch_size,
                in_chans=in_channels,
                num_classes=num_classes,
                embed_dim=dim,
                depth=depth,
                num_heads=heads,
                mlp_ratio=mlp_ratio,
                qkv_bias=True,
                pos_drop_rate=dropout,
                proj_drop_rate=dropout,
                drop_path_rate=drop_path,
                norm_layer=partial(nn.LayerNorm, eps=1e-6),
            )
        )


class DeiTTiny6(ViT):
    """The "ViT-Tiny" of the FedMuon paper: DeiT-Ti with 6 blocks instead of 12.

    2,710,948 weights for images of 32 x 32 and 100 classes, of which 2,695,296 are in parameters of
    two or more axes. Tiny-ImageNet's 64 x 64 keep patches of 4 x 4, which makes 257 tokens. There
    is no distillation token, as in the released code.

    Args:
        image_size: Height and width of the images, a multiple of 4.
        in_channels: Channels of the images.
        num_classes: Number of logits.

    Raises:
        ConfigError: If timm is not installed.
        ValueError: If an argument does not fit.

    Source: J. Liu et al., arXiv 2510.27403; ``models/DeiTTiny.py`` of
    github.com/junkangLiu0/FedMuon at f3972e2, which says depth 6 under the name ``deit_tiny``.
    """

    def __init__(self, image_size: int = 32, in_channels: int = 3, num_classes: int = 100) -> None:
        super().__init__(image_size, 4, in_channels, num_classes, depth=6)


class SwinTiny(FromLibrary):
    """Swin-T for small images: four stages of windowed attention, halving the side between them.

    27,574,318 weights for images of 32 x 32 in patches of 2 x 2, windows of 4 x 4 and 100 classes:
    sides of 16, 8, 4 and 2 patches, and a window never larger than the side. For 64 x 64, patches
    of 4 x 4 give the same sides. The Swin-T of 224 x 224 (patches of 4, windows of 7; 28,288,354
    weights for 1,000 classes) is ``Timm("swin_tiny_patch4_window7_224")``.

    For Muon, ``attn.relative_position_bias_table`` (offsets, heads) is a matrix; ``rest_patterns:
    [relative_position_bias_table]`` gives it to the rest's optimiser.

    Args:
        image_size: Height and width of the images, a multiple of ``patch_size`` such that each
            stage halves the side.
        patch_size: Height and width of a patch.
        window_size: Height and width of a window in patches; divides the side of each stage that is
            larger.
        in_channels: Channels of the images.
        num_classes: Number of logits.
        dim: Width of the first stage, a multiple of its heads; each stage doubles it.
        depths: Blocks of each stage.
        heads: Attention heads of each stage.
        dropout: After the patches, of attention's output and the MLP, in [0, 1).
        drop_path: Stochastic depth, as in :class:`ViT`; 0.2 in the paper, on ImageNet-1k.

    Raises:
        ConfigError: If timm is not installed.
        ValueError: If an argument does not fit.

    Source: Z. Liu et al., arXiv 2103.14030, section 3.3; the smaller patches and windows are a
    choice of this project. The network is ``timm.models.swin_transformer.SwinTransformer``.
    """

    def __init__(
        self,
        image_size: int = 32,
        patch_size: int = 2,
        window_size: int = 4,
        in_channels: int = 3,
        num_classes: int = 100,
        dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        heads: Sequence[int] = (3, 6, 12, 24),
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        _check_sizes(image_size, patch_size, in_channels, num_classes)
        if len(depths) != len(heads) or not depths:
            raise ValueError(f"depths={list(depths)}: as many stages as heads={list(heads)} has")
        side = image_size // patch_size
        for stage in range(len(depths)):
            if dim * 2**stage % heads[stage]:
                raise ValueError(
                    f"dim={dim}: stage {stage + 1} has {dim * 2**stage} channels, "
                    f"no multiple of its {heads[stage]} heads"
                )
            here = side // 2**stage
            if side % 2**stage or (here > window_size and here % window_size):
                raise ValueError(
                    f"image_size={image_size} and patch_size={patch_size} give {side} x {side} "
                    f"patches, which stage {stage + 1} cannot cut into windows of {window_size}"
                )
        _check_shares(dropout=dropout, drop_path=drop_path)
        timm = optional("timm.models.swin_transformer", "SwinTiny")
        super().__init__(
            timm.SwinTransformer(
                img_size=image_size,
                patch_size=patch_size,
                window_size=window_size,
                in_chans=in_channels,
                num_classes=num_classes,
                embed_dim=dim,
                depths=tuple(depths),
                num_heads=tuple(heads),
                proj_drop_rate=dropout,
                drop_path_rate=drop_path,
            )
        )


def _check_sizes(image_size: int, patch_size: int, in_channels: int, num_classes: int) -> None:
    for name, value in (("in_channels", in_channels), ("num_classes", num_classes)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    if patch_size < 1 or image_size < patch_size or image_size % patch_size:
        raise ValueError(f"image_size={image_size}: must be a multiple of patch_size={patch_size}")


def _check_shares(**shares: float) -> None:
    for name, value in shares.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value}: must be in [0, 1)")
