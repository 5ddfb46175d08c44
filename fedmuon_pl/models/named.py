"""Any classifier of timm or of torchvision by its name, with weights from a local file."""

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .library import FromLibrary, first_line, fit_weights, optional, read_weights

__all__ = ["Timm", "Torchvision"]


class Timm(FromLibrary):
    """A network of timm by name, such as ``swin_tiny_patch4_window7_224``.

    ``timm.list_models()`` lists the names. Nothing is downloaded: those that point to a hub are
    refused, and weights come from a file. Where timm can read the file of a model's first release,
    with names of its own, so does this; position embeddings are fitted to another image size.

    Args:
        name: Of the architecture; a tag of pretrained weights behind a dot chooses its variant, not
            the weights.
        num_classes: Number of logits. Where the file has another number, the head starts at random
            and a warning names what was not loaded.
        pretrained_file: Weights, see :func:`~fedmuon_pl.models.library.read_weights`; random if
            None.
        options: More arguments of the architecture, such as ``img_size``, ``in_chans`` or
            ``drop_path_rate``.

    Raises:
        ConfigError: If timm is not installed, the name or an option is unknown, or the file is
            missing or does not fit.
        ValueError: If there is no class.

    Source: R. Wightman, "PyTorch Image Models", github.com/huggingface/pytorch-image-models.
    """

    def __init__(
        self,
        name: str,
        num_classes: int = 10,
        pretrained_file: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        _check_classes(num_classes)
        timm = optional("timm", f"Timm({name})")
        if not timm.is_model(name):
            raise ConfigError(_unknown("timm", name, timm.list_models()))
        net = _build(
            f"timm's {name}",
            lambda: timm.create_model(
                name, pretrained=False, num_classes=num_classes, **(options or {})
            ),
        )
        if pretrained_file is not None:
            weights = read_weights(pretrained_file)
            translate = getattr(sys.modules[type(net).__module__], "checkpoint_filter_fn", None)
            if translate is not None:
                weights = _build(
                    f"{pretrained_file} does not fit timm's {name}: it",
                    lambda: translate(weights, net),
                )
            fit_weights(net, weights, num_classes, pretrained_file)
        super().__init__(net)


class Torchvision(FromLibrary):
    """A classifier of ``torchvision.models`` by name, such as ``resnet18``.

    Nothing is downloaded; weights come from a file, such as those that torchvision's pages offer.
    GoogLeNet and Inception v3 need ``options: {aux_logits: false}``, since in training they give
    more than logits.

    Args:
        name: As ``torchvision.models.list_models`` has it.
        num_classes: See :class:`Timm`.
        weights_file: Weights, see :func:`~fedmuon_pl.models.library.read_weights`; random if None.
        options: More arguments of the architecture, such as ``image_size`` of ``vit_b_16``.

    Raises:
        ConfigError: If the name or an option is unknown, or the file is missing or does not fit.
        ValueError: If there is no class.

    Source: TorchVision, github.com/pytorch/vision.
    """

    def __init__(
        self,
        name: str,
        num_classes: int = 10,
        weights_file: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        _check_classes(num_classes)
        import torchvision  # here, for the sake of the networks that do without

        known = torchvision.models.list_models(module=torchvision.models)
        if name not in known:
            raise ConfigError(_unknown("torchvision", name, known))
        net = _build(
            f"torchvision's {name}",
            lambda: torchvision.models.get_model(
                name, weights=None, num_classes=num_classes, **(options or {})
            ),
        )
        if weights_file is not None:
            fit_weights(net, read_weights(weights_file), num_classes, weights_file)
        super().__init__(net)


def _check_classes(num_classes: int) -> None:
    if num_classes < 1:
        raise ValueError(f"num_classes={num_classes}: must be at least 1")


def _unknown(library: str, name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{library} has no classifier {name!r}{hint}"


def _build(what: str, make: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Calls it, and makes one sentence of what it has against its arguments."""
    try:
        made = make()
    except (TypeError, ValueError, AssertionError, RuntimeError, KeyError, AttributeError) as e:
        fault = f"{what} cannot be made: {first_line(e)}"
    else:
        return made
    raise ConfigError(fault)  # outside of `except`: what caused it says less
