"""Main effects of FedMuon's three switches, from the runs of `make ablation`.

    python benchmarks/effects.py runs/ablation/mnist5k --section mnist5k-effects

An effect is the mean over the four variants with a switch on, minus that over the four with it off,
seed by seed (data, cohorts and x^0 of a seed are the same for all); interval and p are Student's t
over the seeds, with Holm's correction for the three.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
from scipy import stats

from fedmuon_pl.compare import summary
from fedmuon_pl.compare.compare_command import replace_section
from fedmuon_pl.compare.runs import RunData, read_runs

PAGE = Path(__file__).resolve().parent.parent / "docs" / "ablation.md"
SWITCHES = ("orthogonalise", "align", "average momentum")


def name(on: tuple[bool, ...]) -> str:
    """The variant's name in the plan."""
    parts = ["muon" if on[0] else "sgd", *(["align"] if on[1] else [])]
    return "+".join([*parts, *(["average"] if on[2] else [])])


def last(runs: list[RunData], metric: str) -> dict[tuple[str, int], float]:
    """The last round's measurement by variant and seed."""
    return {(r.method, r.seed): summary.last(r, metric) for r in runs}


def effects(values: dict[tuple[str, int], float]) -> str:
    """The table."""
    seeds = sorted({seed for _, seed in values})
    rows, ps = [], []
    for i, switch in enumerate(SWITCHES):
        sides = {
            side: [on for on in itertools.product((False, True), repeat=3) if on[i] is side]
            for side in (False, True)
        }
        per_seed = np.array(
            [
                np.mean([values[name(on), s] for on in sides[True]])
                - np.mean([values[name(on), s] for on in sides[False]])
                for s in seeds
            ]
        )
        mean, error = per_seed.mean(), stats.sem(per_seed)
        half = stats.t.ppf(0.975, len(seeds) - 1) * error
        ps.append(float(stats.ttest_1samp(per_seed, 0.0).pvalue))
        rows.append((switch, mean, mean - half, mean + half, ps[-1]))
    order = np.argsort(ps)
    holm = np.maximum.accumulate([min(1.0, (3 - k) * ps[j]) for k, j in enumerate(order)])
    adjusted = dict(zip(order.tolist(), holm.tolist(), strict=True))
    lines = [
        "| switch | effect | 95 % interval | p | p (Holm) |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {switch} | {mean:+.4f} | {low:+.4f} to {high:+.4f} | {p:.3f} | {adjusted[i]:.3f} |"
        for i, (switch, mean, low, high, p) in enumerate(rows)
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs")
    parser.add_argument("--metric", default="test/acc")
    parser.add_argument("--section")
    options = parser.parse_args()
    text = effects(last(read_runs([options.runs])[0], options.metric))
    print(text)
    if options.section:
        replace_section(PAGE, options.section, text)
