"""Plans, their runs, and what came of them; for notebooks, with DataFrames in and out.

Example::

    from fedmuon_pl import compare

    runs, left_out = compare.read_runs(["runs/mnist5k"])
    rounds = compare.round_table(runs)                # a row per run and round
    table = compare.run_table(runs, target=0.9)       # a row per run
    methods = compare.method_table(table)             # a row per method, over its seeds
    pairs = compare.paired_differences(table, "test") # paired by seed, with intervals
    compare.draw_curves(runs, "curves")
"""

import importlib
from typing import Any

_EXPORTS = {
    "Comparison": "comparison",
    "RunData": "runs",
    "compare_runs": "comparison",
    "curve": "figures",
    "differences": "fairness",
    "draw_curves": "figures",
    "draw_diagnostics": "figures",
    "draw_finals": "figures",
    "method_table": "summary",
    "paired_differences": "paired",
    "read_runs": "runs",
    "round_table": "summary",
    "run_table": "summary",
    "settings": "fairness",
    "statements": "paired",
    "summarise": "summary",
    "write_report": "report_page",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Imports a public name when it is asked for: the commands start without pandas."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
