"""Your own arrays: one .npz file with a training and a test part."""

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from .arrays import Arrays
from .images import ImageDataModule

__all__ = ["Npz"]


class Npz(ImageDataModule):
    """``x_train``, ``y_train``, ``x_test``, ``y_test`` and, optionally, ``writer`` of one file.

    ``x_*`` are uint8, normalised by channel with what the training images measure, or floats, used
    as float32 as they are: images ``(n, C, H, W)``, or ``(n, H, W)``, or features ``(n, d)``, which
    become ``(n, 1, 1, d)``. ``y_*`` are integers from 0, ``(n,)``. ``writer`` says who each
    training sample is from, integers ``(n_train,)``, for ``data.partition=Natural``. Make it with
    ``numpy.savez("mine.npz", x_train=..., ...)``; pickled objects are refused.

    Args:
        path: The file.
        channels_last: The images are ``(n, H, W, C)``.
        **kwargs: Those of :class:`ImageDataModule`.

    Raises:
        ConfigError: If the file is missing or does not hold that, or a size does not fit.
    """

    def __init__(self, path: str, channels_last: bool = False, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(**kwargs)
        self.path = path
        self.channels_last = channels_last

    def read(self) -> tuple[Arrays, Arrays]:
        """See the class."""
        path = Path(self.path).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"data.path={path} is not there: make it with numpy.savez(path, x_train=..., "
                f"y_train=..., x_test=..., y_test=...)"
            )
        try:
            with np.load(path, allow_pickle=False) as archive:
                tables = {name: archive[name] for name in archive.files}
            y, y_test = (_integers(name, tables[name]) for name in ("y_train", "y_test"))
            x, x_test = (_images(name, tables[name]) for name in ("x_train", "x_test"))
            if (x.dtype.kind, x.shape[1:]) != (x_test.dtype.kind, x_test.shape[1:]):
                raise ValueError(
                    f"x_train is {x.dtype} {x.shape[1:]} and x_test {x_test.dtype} "
                    f"{x_test.shape[1:]}; they should be alike"
                )
            classes = int(max(y.max(), y_test.max())) + 1
            writer = _integers("writer", tables["writer"]) if "writer" in tables else None
            return (
                Arrays(self._channels_first(x), y, classes, writer),
                Arrays(self._channels_first(x_test), y_test, classes),
            )
        except KeyError as e:
            raise ConfigError(f"data.path={path} has no array {e.args[0].split()[0]}") from None
        except Exception as e:  # a damaged archive shows as any of ten exceptions
            raise ConfigError(f"data.path={path} cannot be used: {e}") from None

    def _channels_first(self, x: Any) -> Any:  # noqa: ANN401
        if x.ndim == 4 and self.channels_last:
            x = x.transpose(0, 3, 1, 2)
        elif x.ndim == 3:
            x = x[:, None]
        elif x.ndim == 2:
            x = x[:, None, None]
        return np.ascontiguousarray(x)


def _images(name: str, x: Any) -> Any:  # noqa: ANN401
    if x.dtype != np.uint8 and not np.issubdtype(x.dtype, np.floating):
        raise ValueError(f"{name} must be uint8 or floats, got {x.dtype}")
    return x if x.dtype == np.uint8 else x.astype(np.float32)


def _integers(name: str, y: Any) -> Any:  # noqa: ANN401
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer) or not y.size:
        raise ValueError(f"{name} must be integers of shape (n,), got {y.dtype} of shape {y.shape}")
    return y.astype(np.int64)
