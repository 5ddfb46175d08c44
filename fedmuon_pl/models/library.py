"""Networks of other libraries: what is common to them, and weights from a local file."""

import importlib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError

__all__ = ["FromLibrary", "first_line", "fit_weights", "optional", "read_weights"]


def optional(name: str, needed_by: str) -> Any:  # noqa: ANN401
    """Imports a module of a library of the extra ``models``.

    Args:
        name: The module, such as ``timm.models``.
        needed_by: What needs it, for the message.

    Raises:
        ConfigError: If the library is not installed.
    """
    library = name.partition(".")[0]
    if importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"{needed_by} needs {library}, which is not installed: "
            f"pip install 'fedmuon_pl[models]' (or {library} alone)"
        )
    return importlib.import_module(name)


class FromLibrary(nn.Module):
    """A network of another library, which lies in ``net`` and is called as it is.

    Args:
        net: The network.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(B, channels, height, width)`` to logits ``(B, num_classes)``."""
        return self.net(x)  # type: ignore[no-any-return]


def read_weights(file: str | Path) -> dict[str, Tensor]:
    """The tensors of a local file by name; nothing in it is executed and nothing is fetched.

    ``.safetensors``, or what ``torch.save`` wrote: a ``state_dict``, or a dict that holds one under
    ``state_dict`` or ``model``. The prefix ``module.`` of ``DataParallel`` is dropped.

    Args:
        file: The file.

    Raises:
        ConfigError: If there is no such file, or it holds no named tensors.
    """
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"there is no file {path} of weights; nothing is downloaded")
    held: Any = None
    try:
        if path.suffix == ".safetensors":
            held = optional("safetensors.torch", f"{path}").load_file(path)
        else:
            held = torch.load(path, map_location="cpu", weights_only=True)
        fault = ""
    except ConfigError:
        raise
    except Exception as e:
        fault = f"{path} cannot be read as weights: {first_line(e)}"
    if fault:  # outside of `except`: what caused it says less
        raise ConfigError(fault)
    for key in ("state_dict", "model"):
        if isinstance(held, dict) and isinstance(held.get(key), dict):
            held = held[key]
    if not isinstance(held, dict) or not held:
        raise ConfigError(f"{path} holds no weights by name")
    other = [name for name, t in held.items() if not isinstance(t, Tensor)]
    if other:
        raise ConfigError(f"{path} holds no weights by name: {other[0]!r} is no tensor")
    return {str(name).removeprefix("module."): t for name, t in held.items()}


def fit_weights(
    net: nn.Module, weights: dict[str, Tensor], num_classes: int, file: str | Path
) -> None:
    """Loads weights into a network, all but a head of another number of classes.

    An entry belongs to such a head if its first axis counts the network's classes, and the file
    has another number there, or lacks the entry. It keeps its random weights, and a warning names
    it. Everything else must fit exactly.

    Args:
        net: The network; it is changed in place.
        weights: Tensors by the network's names.
        num_classes: The network's number of classes.
        file: Where the weights are from, for messages.

    Raises:
        ConfigError: If anything but the head does not fit; the network is then as it was.
    """
    own = net.state_dict()
    new, missing, unlike = [], [], []
    for name, t in own.items():
        given = weights.get(name)
        counts_classes = t.ndim > 0 and t.shape[0] == num_classes
        if given is not None and given.shape == t.shape:
            continue
        if counts_classes and (given is None or given.shape[1:] == t.shape[1:]):
            new.append(name)
        elif given is None:
            missing.append(name)
        else:
            unlike.append(f"{name} is {tuple(given.shape)} there and {tuple(t.shape)} here")
    faults = [f"it lacks {_some(missing)}"] if missing else []
    unknown = [name for name in weights if name not in own]
    faults += [f"the network has no {_some(unknown)}"] if unknown else []
    faults += [_some(unlike)] if unlike else []
    if faults:
        raise ConfigError(f"{file} does not fit this network: {'; '.join(faults)}")
    net.load_state_dict({n: t for n, t in weights.items() if n not in new}, strict=False)
    if new:
        counts = sorted({weights[n].shape[0] for n in new if n in weights})
        there = " and ".join(map(str, counts)) or "no"
        warnings.warn(
            f"{file} has a head of {there} classes, not {num_classes}: {_some(new, 8)} were not "
            f"loaded and start at random",
            stacklevel=2,
        )


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def first_line(error: BaseException) -> str:
    """What an error says, without what follows."""
    return str(error).strip().partition("\n")[0].rstrip(". ") or type(error).__name__
