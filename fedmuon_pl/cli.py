"""The command ``fedmuon``: Lightning's ``fit``, ``validate`` and ``test``, and our own commands."""

import atexit
import gc
import os
import sys
from collections.abc import Callable

__all__ = ["command", "main"]

HELP = """usage: fedmuon COMMAND ...

Federated optimisation on PyTorch Lightning: run, compare and reproduce.

commands:
  fit        train: fedmuon fit -c base -c experiment/mnist5k -c algorithm/fedmuon
  validate   evaluate a checkpoint on the validation split: ... --ckpt_path best
  test       evaluate a checkpoint on the test set: ... --ckpt_path last
  partition  show who holds what: fedmuon partition -c base -c experiment/mnist5k
  sweep      run a plan of experiments x algorithms x grids x seeds: fedmuon sweep quickstart
  compare    tables, paired tests and curves of finished runs: fedmuon compare runs/mnist5k
  report     the same as one HTML page with all figures: fedmuon report runs/mnist5k -o report
  reproduce  a published table, ours beside theirs: fedmuon reproduce cifar100-resnet18 --smoke
  heatmap    map of a sweep over two settings: fedmuon heatmap runs/sensitivity -o map

`fedmuon COMMAND --help` says more. A configuration (-c) is a file, or a short name that is looked
up in ./configs and then among those of the package; later ones win, and flags win over all.

--trainer.devices auto shares a round's clients over processes, as many as there are cores; on
several nodes: --trainer.num_nodes 2, by torchrun, by srun, or with MASTER_ADDR, MASTER_PORT and
NODE_RANK set. The number of processes changes no result, at equal --threads.

An error gets one sentence; with FEDMUON_DEBUG=1 in the environment, training shows where it began.
"""


def command(args: list[str] | None = None) -> int:
    """Runs one command in a process of its own, which is to end when it returns.

    As :func:`main`, with less work for the collector of reference cycles: what is imported, most of
    a million objects, stays to the end. Collecting among them took a tenth of the imports' time,
    and two seconds of the interpreter's end.
    """
    gc.disable()
    atexit.register(gc.freeze)  # the first to register is the last to run
    return main(args, _imported)


def _imported() -> None:
    gc.freeze()
    gc.enable()


def main(args: list[str] | None = None, imported: Callable[[], None] = lambda: None) -> int:
    """Runs one command.

    Args:
        args: The command line without the program's name; ``sys.argv`` if None.
        imported: Is called when all that the command needs is imported.

    Returns:
        The exit status: 0, or 2 after one sentence on the standard error.
    """
    args = sys.argv[1:] if args is None else list(args)
    if not args or args[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if args[0] == "--version":
        from . import __version__

        print(__version__)
        return 0
    # Classes of the working folder can be named, as with `python -m fedmuon_pl`; not under -P.
    if not sys.flags.safe_path and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    command, rest = args[0], args[1:]
    run: Callable[[list[str]], int]
    # Each command is imported when it is asked for: only training needs Lightning.
    if command in ("fit", "validate", "test"):
        from .training import train_main

        imported()
        return train_main(args)
    if command == "partition":
        from .compare.partition_command import partition_main as run
    elif command == "heatmap":
        from .compare.heatmap import heatmap_main as run
    elif command == "sweep":
        from .compare.sweep_command import sweep_main as run
    elif command == "reproduce":
        from .compare.reproduce_command import reproduce_main as run
    elif command == "compare":
        from .compare.compare_command import compare_main as run
    elif command == "report":
        from .compare.report_command import report_main as run
    else:
        print(f"fedmuon: no command {command!r}; see fedmuon --help", file=sys.stderr)
        return 2
    imported()
    return run(rest)
