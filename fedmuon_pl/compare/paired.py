"""Is a difference between two methods more than luck? Paired by seed, with intervals.

Runs with the same seed share data, cohorts, batches and x^0, so that the difference of two methods
is taken within each seed: what a seed does to both cancels. The interval and the test are Student's
paired t with n - 1 degrees of freedom. The p values of all pairs of an experiment are adjusted by
Holm (1979), "A simple sequentially rejective multiple test procedure", Scand. J. Statist. 6, which
holds the error of the whole family whatever the pairs' dependence.
"""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .names import display_name
from .summary import Stat

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

__all__ = ["FEW", "holm", "paired_differences", "statements", "t_interval"]

FEW = 5
"""With fewer seeds than this a statement says how little they can show."""

COLUMNS = (
    "experiment", "method", "other", "n", "mean", "sd", "low", "high", "t", "p", "p_holm",
    "significant", "reason",
)  # fmt: skip


def t_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Student's interval of a mean, and the two-sided p of the mean being 0.

    Args:
        values: Finite differences, one a seed, at least two that are not all equal.
        confidence: Such as 0.95.

    Returns:
        Low, high, p.
    """
    from scipy.stats import t as student  # type: ignore[import-untyped,unused-ignore]

    stat = Stat.of(values)
    error = stat.sd / math.sqrt(stat.n)
    half = float(student.ppf((1 + confidence) / 2, stat.n - 1)) * error
    p = 2 * float(student.sf(abs(stat.mean / error), stat.n - 1))
    return stat.mean - half, stat.mean + half, p


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values; NaN stays and does not count.

    The i-th smallest of m is multiplied by m - i + 1, and is no less than the one before it and no
    more than 1.
    """
    adjusted = [math.nan] * len(values)
    known = sorted((value, i) for i, value in enumerate(values) if not math.isnan(value))
    top = 0.0
    for rank, (value, i) in enumerate(known):
        top = max(top, min(1.0, value * (len(known) - rank)))
        adjusted[i] = top
    return adjusted


def paired_differences(
    table: "pd.DataFrame",
    value: str = "test",
    *,
    against: str | None = None,
    confidence: float = 0.95,
) -> "pd.DataFrame":
    """Differences between methods, within each seed.

    Args:
        table: A row per run, with ``experiment``, ``method``, ``seed`` and the value. Where it has
            ``conditions`` (see :func:`~fedmuon_pl.compare.summary.run_table`), two methods whose
            runs of a seed were made under different ones are not tested.
        value: The column to compare.
        against: Only pairs with this method, which is then the second; all pairs by default. Fewer
            pairs need less adjustment: say which before you look.
        confidence: Of the interval, which is each pair's own, not adjusted; Holm's level is
            1 - confidence.

    Returns:
        A row per experiment and pair: ``n`` seeds, ``mean`` and ``sd`` of method - other, the
        interval ``low`` to ``high``, ``t``, ``p``, ``p_holm``, ``significant`` (p_holm at most
        1 - confidence), and the ``reason`` where nothing was tested.

    Raises:
        ConfigError: If no run is of the method ``against``.
    """
    import pandas as pd

    if against is not None and against not in set(table["method"]):
        names = ", ".join(dict.fromkeys(table["method"]))
        raise ConfigError(f"there is no method {against} among {names}")
    frames = []
    for experiment, own in table.groupby("experiment", sort=False):
        methods = list(dict.fromkeys(own["method"]))
        if against is None:
            pairs = list(itertools.combinations(methods, 2))
        elif against in methods:
            pairs = [(name, against) for name in methods if name != against]
        else:
            continue
        rows = [
            {"experiment": experiment, **_pair(own, value, *pair, confidence)} for pair in pairs
        ]
        for row, adjusted in zip(rows, holm([row["p"] for row in rows]), strict=True):
            row["p_holm"] = adjusted
            row["significant"] = adjusted <= 1 - confidence + 1e-12
        frames.append(pd.DataFrame(rows, columns=list(COLUMNS)))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(COLUMNS))


def _pair(
    table: "pd.DataFrame", value: str, method: str, other: str, confidence: float
) -> dict[str, Any]:
    one, two = (table[table["method"] == name].set_index("seed") for name in (method, other))
    seeds = sorted(set(one.index) & set(two.index))
    raw = [float(one[value][seed]) - float(two[value][seed]) for seed in seeds]
    differences = [d for d in raw if math.isfinite(d)]
    stat = Stat.of(differences)
    row: dict[str, Any] = {
        **{"method": method, "other": other, "n": stat.n, "mean": stat.mean, "sd": stat.sd},
        **dict.fromkeys(("low", "high", "t", "p"), math.nan),
    }
    if "conditions" in table and any(
        one["conditions"][seed] != two["conditions"][seed] for seed in seeds
    ):
        row |= dict.fromkeys(("mean", "sd"), math.nan)
        return {**row, "reason": "not the same data, cohort or budget"}
    if "conditions" in table and any(not one["conditions"][seed] for seed in seeds):
        row |= dict.fromkeys(("mean", "sd"), math.nan)
        return {**row, "reason": "no config.yaml to tell whether they compare"}
    if len(differences) < len(raw):
        return {**row, "reason": "a seed has no finite value"}
    if stat.n < 2:
        return {**row, "reason": "one seed in common" if stat.n else "no seed in common"}
    if stat.sd <= 1e-12 * max(1.0, abs(stat.mean)):
        same = "no difference" if abs(stat.mean) <= 1e-12 else "the same difference"
        return {**row, "reason": f"{same} in every seed"}
    low, high, p = t_interval(differences, confidence)
    t = stat.mean / (stat.sd / math.sqrt(stat.n))
    return {**row, "low": low, "high": high, "t": t, "p": p, "reason": ""}


def statements(
    pairs: "pd.DataFrame", name: str, *, high: bool = True, confidence: float = 0.95
) -> list[str]:
    """What one experiment's paired differences say, in plain words.

    Args:
        pairs: The rows of one experiment, as of :func:`paired_differences`.
        name: What was compared, such as ``test acc``.
        high: Whether more is better.
        confidence: As given there.
    """
    if pairs.empty:
        return []
    tested = pairs[pairs["p"].notna()]
    level = f"{100 * (1 - confidence):.3g} %"
    lines = []
    if len(tested):
        count = f"{len(tested)} pair{'s' if len(tested) > 1 else ''}"
        found = tested[tested["significant"].astype(bool)]
        by_winner: dict[str, list[str]] = {}
        for row in found.itertuples():
            wins = (row.mean > 0) == high
            winner, loser = (row.method, row.other) if wins else (row.other, row.method)
            by_winner.setdefault(str(winner), []).append(display_name(str(loser)))
        better = "; ".join(
            f"{display_name(winner)} is better than {_and(losers)}"
            for winner, losers in by_winner.items()
        )
        head = f"{name}, at the {level} level over {count} (paired t, Holm)"
        lines.append(f"{head}: {better}." if better else f"{head}: no difference is significant.")
        if better and len(found) < len(tested):
            rest = [
                f"{display_name(str(row.method))} and {display_name(str(row.other))}"
                for row in tested[~tested["significant"].astype(bool)].itertuples()
            ]
            lines.append(f"Not significant: {'; '.join(rest)}.")
        fewest = int(tested["n"].min())
        if fewest < FEW:
            lines.append(
                f"{fewest} seeds are few ({fewest - 1} degree{'s' if fewest > 2 else ''} of "
                "freedom): only large and steady differences can show, and what is not significant "
                "is not shown to be equal."
            )
    for reason, rows in pairs[pairs["p"].isna()].groupby("reason", sort=False):
        names = [
            f"{display_name(str(row.method))} and {display_name(str(row.other))}"
            for row in rows.itertuples()
        ]
        lines.append(f"Not tested ({reason}): {'; '.join(names)}.")
    if not len(tested) and (pairs["reason"] == "one seed in common").any():
        lines.append("One seed cannot tell a difference from luck: run more seeds.")
    return lines


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
