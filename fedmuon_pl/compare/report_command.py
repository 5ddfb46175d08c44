"""The command ``fedmuon report``: 0, or 2 with one sentence on stderr for a bad request."""

import argparse
import sys
import textwrap
from pathlib import Path

from ..errors import ConfigError
from .compare_command import finished_runs
from .comparison import compare_runs
from .console import CommandParser, comparison_arguments, guarded, parsed
from .report_page import write_report

__all__ = ["report_main"]


def _report_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="fedmuon report",
        description=textwrap.fill(
            "Writes one HTML page about finished runs, which opens from disk without a network: "
            "curves by rounds, bytes and time, every seed's final value, what is significant, "
            "diagnostics, the partition, what differs between the methods, and where they ran. "
            "Beside it every figure as PNG, PDF and SVG, and the tables."
        ),
        epilog=(
            "examples:\n"
            "  fedmuon report runs/mnist5k -o report\n"
            "  fedmuon report runs/mnist5k -o report --target 0.9 --against fedavg\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    comparison_arguments(parser)
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="where to write it")
    parser.add_argument("--title", default="", help="the page's title")
    parser.add_argument(
        "--no-partition",
        action="store_true",
        help="do not draw who holds what, which loads the data",
    )
    return parser


def report_main(args: list[str]) -> int:
    """``fedmuon report RUNS... -o DIR``."""
    options = parsed(_report_parser(), args)
    if isinstance(options, int):
        return options
    return guarded("report", lambda: _report(options))


def _report(options: argparse.Namespace) -> int:
    data, problems = finished_runs(options.runs, options.metric)
    for problem in problems:
        print(f"left out {problem}", file=sys.stderr)
    output = Path(options.output)
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is no folder")
    found = compare_runs(
        data,
        metric=options.metric,
        target=options.target,
        against=options.against,
        all_trials=options.all_trials,
    )
    page = write_report(
        found,
        output,
        left_out=problems,
        partition=not options.no_partition,
        title=options.title,
    )
    print(page)
    return 0
