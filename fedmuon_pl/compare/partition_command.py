"""``fedmuon partition``: who holds what, as a table and a picture."""

import sys
from pathlib import Path

from jsonargparse import Namespace
from rich.console import Console

from ..arguments import ConfigName, Parser, root_cause
from ..data import catalogue  # noqa: F401  (so that a configuration can name them)
from ..data.datamodule import FederatedDataModule
from ..errors import FedMuonError
from .partition_report import partition_figure, partition_table

__all__ = ["load_data", "partition_main"]

_IGNORED = ("seed_everything", "trainer", "model", "server", "method", "threads", "ckpt_path")


def _parser() -> Parser:
    parser = Parser(
        prog="fedmuon partition",
        description="Class counts of every client: a table, and a picture. "
        "Example: fedmuon partition -c base -c experiment/mnist5k",
    )
    parser.add_argument("-c", "--config", action=ConfigName, help="A file or a short name.")
    parser.add_subclass_arguments(FederatedDataModule, "data", required=True)
    parser.add_argument("--experiment", type=str, default="default", help="Names the folder.")
    parser.add_argument("-o", "--output", type=str | None, help="Picture; runs/E/partition.png.")
    parser.add_argument("--rows", type=int, default=20, help="Clients listed in the table.")
    for key in _IGNORED:
        # A run's configuration has more than data; the rest does not matter here.
        parser.add_argument(f"--{key}", type=dict | int | str | None, help="==SUPPRESS==")
    return parser


def load_data(config: Path) -> FederatedDataModule:
    """The data module of a saved ``config.yaml``, set up, with its partition.

    Raises:
        ValueError: If the configuration names no data, or they are not there.
    """
    parser = _parser()
    parser.exit_on_error = False
    try:
        data = parser.instantiate(parser.parse_args(["-c", str(config)])).data
        data.setup()
    except Exception as e:
        raise ValueError(str(root_cause(e))) from e
    return data  # type: ignore[no-any-return]


def partition_main(args: list[str]) -> int:
    """Prints class counts per client and writes a picture.

    Args:
        args: The command line after ``partition``.

    Returns:
        The exit status: 0, or 2 after one sentence on the standard error.
    """
    parser = _parser()
    config = parser.parse_args(args)
    try:
        return _show(parser, config)
    except (FedMuonError, ValueError) as e:
        print(f"fedmuon: {root_cause(e)}", file=sys.stderr)
        return 2


def _show(parser: Parser, config: Namespace) -> int:
    data = parser.instantiate(config).data
    data.setup()
    labels, classes = data.splits.labels, data.splits.num_classes
    title = f"{config.experiment}: {len(data.partition)} clients, {type(data.partitioner).__name__}"
    Console().print(partition_table(data.partition, labels, classes, max_rows=config.rows))
    path = Path(config.output or Path("runs") / config.experiment / "partition.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    partition_figure(data.partition, labels, classes, path, title=title)
    print(f"picture: {path}")
    return 0
