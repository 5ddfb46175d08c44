"""The command line's parser: short names of configurations, and one sentence for a mistake."""

import difflib
import inspect
import re
from typing import Any, NoReturn

from jsonargparse import ActionConfigFile
from pytorch_lightning.cli import LightningArgumentParser

from . import models
from .algorithms.base import Algorithm
from .configuration import find_config
from .data.datamodule import FederatedDataModule
from .data.feature_skew import FeatureSkew
from .data.partition import Partitioner
from .schedules import Schedule
from .tasks import Task

__all__ = ["ConfigName", "Parser", "root_cause"]

# By the argument that takes it: of which class the named one should be.
_KINDS: dict[str, type] = {
    "algorithm": Algorithm,
    "data": FederatedDataModule,
    "feature_skew": FeatureSkew,
    "lr_schedule": Schedule,
    "partition": Partitioner,
    "task": Task,
}


class ConfigName(ActionConfigFile):
    """``-c NAME``: a file, or a short name (see :func:`fedmuon_pl.configuration.find_config`)."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: Any = None) -> None:  # noqa: ANN401
        """Resolves the name."""
        try:
            path = str(find_config(str(values)))
        except FileNotFoundError as e:
            parser.error(str(e))
        super().__call__(parser, cfg, path, option_string)  # type: ignore[no-untyped-call]


class Parser(LightningArgumentParser):
    """A parser that says what is wrong in one sentence, without fifty lines of usage above it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints the sentence and exits with status 2."""
        if not self.exit_on_error:  # a parser inside another, which says where it happened
            super().error(message, ex)
        text = " ".join(message.split())
        text = re.sub(r'^Parser key "?([\w.]+)"?: ', r"\1: ", text)
        unknown = re.search(r"unrecognized arguments: (--[\w.+]+)", text)
        if unknown:
            text = f"there is no option {unknown[1]}{self._near(unknown[1])}"
        text = _named(text) or text
        self.exit(2, f"fedmuon: {text} (see fedmuon COMMAND --help)\n")

    def _near(self, option: str) -> str:
        parsers = [self, *(p for a in self._actions for p in _parsers(a))]
        options = {o for p in parsers for a in p._actions for o in a.option_strings}
        close = difflib.get_close_matches(option, sorted(options), 1)
        return f"; did you mean {close[0]}?" if close else ""


def _named(text: str) -> str | None:
    """Of a class that there is not, which there are; of an argument too many or too few, which."""
    refused = re.search(r"class_path '(\S+)': Option '(\w+)' is not accepted", text)
    if refused:
        return f"{refused[1].rpartition('.')[2]} has no argument {refused[2]}"
    missing = re.search(r"class_path '(\S+)': the following arguments are required: ([\w.]+)", text)
    if missing:
        return f"{missing[1].rpartition('.')[2]} needs the argument {missing[2]}"
    wrong = re.search(r"dot import path string: (\S+)", text)
    if wrong is None:
        return None
    keys = re.findall(r'^([\w.]+):|Parser key "([\w.]+)":', text[: wrong.start()])
    key = next(k for k in keys[-1] if k) if keys else ""
    kind = key.rpartition(".")[2]
    if kind == "network":
        names = list(models.__all__)
    elif kind in _KINDS:
        names = [c.__name__ for c in _subclasses(_KINDS[kind]) if not inspect.isabstract(c)]
    else:
        return None
    return f"{key}={wrong[1]} is none of {', '.join(sorted(set(names)))}"


def _parsers(action: Any) -> list[Any]:  # noqa: ANN401
    """The parsers of a subcommand action."""
    choices = getattr(action, "choices", None)
    return (
        [p for p in choices.values() if hasattr(p, "_actions")] if isinstance(choices, dict) else []
    )


def _subclasses(kind: type) -> list[type]:
    found: list[type] = kind.__subclasses__()
    return [*found, *(c for sub in found for c in _subclasses(sub))]


def root_cause(error: BaseException) -> BaseException:
    """What a chain of errors began with: the sentence that names the argument."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error
