"""What the commands share: their parser, their errors and the terminal."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from ..errors import ConfigError

__all__ = [
    "CommandParser",
    "comparison_arguments",
    "guarded",
    "number",
    "parsed",
    "positive",
    "terminal",
    "write",
]


class CommandParser(argparse.ArgumentParser):
    """One sentence for a bad command line, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong and exits with 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def guarded(name: str, work: Callable[[], int]) -> int:
    """Turns an expected error into one sentence and code 2."""
    try:
        return work()
    except (ConfigError, OSError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.filename or ''}: {error.strerror}".lstrip(": ")
        print(f"fedmuon {name}: {text}", file=sys.stderr)
        return 2


def parsed(parser: argparse.ArgumentParser, args: Sequence[str]) -> argparse.Namespace | int:
    """The arguments, or the code with which argparse would exit."""
    try:
        return parser.parse_args(args)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2


def terminal() -> Console:
    """Standard output; tables into a file or pipe are not squeezed into 80 columns."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=140)
    return console


def positive(text: str) -> int:
    """A whole number from 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"should be a number from 1, not {text!r}")
    return value


def number(text: str) -> float:
    """A finite number, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"should be a number, not {text!r}")
    return value


def write(path: Path, text: str) -> None:
    """Writes a text file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def comparison_arguments(parser: argparse.ArgumentParser) -> None:
    """What is compared, and how: the same for ``fedmuon compare`` and ``fedmuon report``."""
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run folders, or folders of runs")
    parser.add_argument(
        "--target",
        type=number,
        metavar="X",
        help="also the rounds, bytes and seconds until the validation metric first reaches X",
    )
    parser.add_argument(
        "--against",
        metavar="METHOD",
        help="test the others against this one only (default: all pairs)",
    )
    parser.add_argument(
        "--all-trials",
        action="store_true",
        help="compare every grid point (default: each method's best on validation data)",
    )
    parser.add_argument(
        "--metric", default="acc", help="acc for val/acc and test/acc, loss, ... (default: acc)"
    )
