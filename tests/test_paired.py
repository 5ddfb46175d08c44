"""Paired differences between methods."""

import math
import statistics
from pathlib import Path

import pytest
from fake_runs import write_run

from fedmuon_pl.compare import paired, runs, summary
from fedmuon_pl.errors import ConfigError


def paired_table(values: dict[str, list[float]]) -> object:
    import pandas as pd

    return pd.DataFrame(
        {"experiment": "toy", "method": method, "seed": seed, "test": value}
        for method, own in values.items()
        for seed, value in enumerate(own)
    )


def test_a_paired_interval_is_students() -> None:
    # With two degrees of freedom F(t) = 1/2 + t / (2 sqrt(2 + t^2)), so that the 95 % quantile is
    # 0.95 sqrt(2 / (1 - 0.95^2)) and p = 1 - |t| / sqrt(2 + t^2).
    ds = [0.02, 0.03, 0.07]
    base = [0.5, 0.9, 0.7]  # what a seed does to both cancels
    table = paired_table({"a": [x + d for x, d in zip(base, ds, strict=True)], "b": base})
    (row,) = paired.paired_differences(table).itertuples()
    mean, sd = sum(ds) / 3, statistics.stdev(ds)
    t = mean / (sd / math.sqrt(3))
    half = 0.95 * math.sqrt(2 / (1 - 0.95**2)) * sd / math.sqrt(3)
    assert (row.method, row.other, row.n, row.reason) == ("a", "b", 3, "")
    assert row.mean == pytest.approx(mean, abs=1e-12)
    assert (row.low, row.high) == pytest.approx((mean - half, mean + half), abs=1e-10)
    assert row.t == pytest.approx(t, abs=1e-9)
    assert row.p == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-10)
    assert row.p_holm == row.p
    assert not row.significant
    # One degree of freedom: p = 1 - 2/pi arctan |t|.
    table = paired_table({"a": [0.5, 0.6], "b": [0.45, 0.4]})
    (row,) = paired.paired_differences(table).itertuples()
    assert row.t == pytest.approx(0.125 / 0.075)
    assert row.p == pytest.approx(1 - 2 / math.pi * math.atan(row.t), abs=1e-10)


def test_holm_steps_down() -> None:
    # 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.04 x 1; none below the one before it.
    assert paired.holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert paired.holm([0.6, 0.7]) == [1.0, 1.0]
    adjusted = paired.holm([math.nan, 0.02])
    assert math.isnan(adjusted[0])
    assert adjusted[1] == 0.02
    assert paired.holm([]) == []


def test_only_what_can_be_tested_is() -> None:
    import pandas as pd

    def reason(a: list[float], b: list[float]) -> str:
        (row,) = paired.paired_differences(paired_table({"a": a, "b": b})).itertuples()
        assert math.isnan(row.p)
        assert not row.significant
        return str(row.reason)

    assert reason([0.5], [0.4]) == "one seed in common"
    assert reason([0.5, 0.6], [0.4, 0.5]) == "the same difference in every seed"
    assert reason([0.5, 0.6], [0.5, 0.6]) == "no difference in every seed"
    assert reason([0.5, 0.6], [0.5, math.inf]) == "a seed has no finite value"
    assert reason([0.5, 0.6], [0.5, math.nan]) == "a seed has no finite value"
    table = paired_table({"a": [0.5, 0.6], "b": [0.4, 0.3]})
    table.loc[table["method"] == "b", "seed"] += 5
    (row,) = paired.paired_differences(table).itertuples()
    assert (row.n, row.reason) == (0, "no seed in common")
    assert paired.paired_differences(pd.DataFrame(table[:0])).empty


def test_runs_under_other_conditions_are_not_compared_silently(tmp_path: Path) -> None:
    for seed, acc in enumerate((0.5, 0.7, 0.6)):
        write_run(tmp_path, "fedavg", seed, [acc])
        write_run(tmp_path, "fedmuon", seed, [acc + 0.1 * seed + 0.1])
        write_run(tmp_path, "scaffold", seed, [acc**2], config={"data.batch_size": 64})
        folder = write_run(tmp_path, "fedadam", seed, [acc**3])
        (folder / "config.yaml").unlink()
    pairs = paired.paired_differences(summary.run_table(runs.read_runs([tmp_path])[0]))
    reasons = {frozenset((row.method, row.other)): row.reason for row in pairs.itertuples()}
    assert reasons[frozenset(("fedavg", "fedmuon"))] == ""
    other = "not the same data, cohort or budget"
    assert reasons[frozenset(("fedavg", "scaffold"))] == other
    assert reasons[frozenset(("fedmuon", "scaffold"))] == other
    assert reasons[frozenset(("fedavg", "fedadam"))] == other
    assert pairs[pairs["reason"] == other]["mean"].isna().all()
    said = paired.statements(pairs, "test acc")
    assert f"Not tested ({other}): " in said[-1]
    for name in ("fedmuon", "fedavg"):
        for seed in range(3):
            (tmp_path / f"toy/{name}-s{seed}/config.yaml").unlink()
    pairs = paired.paired_differences(summary.run_table(runs.read_runs([tmp_path])[0]))
    assert "no config.yaml to tell whether they compare" in set(pairs["reason"])


def test_what_is_significant_is_said_in_words() -> None:
    steady = {
        "fedmuon": [0.901, 0.902, 0.903],
        "fedavg": [0.8, 0.802, 0.801],
        "scaffold": [0.8, 0.799, 0.803],
    }
    pairs = paired.paired_differences(paired_table(steady))
    lines = paired.statements(pairs, "test acc")
    assert lines[0] == (
        "test acc, at the 5 % level over 3 pairs (paired t, Holm): FedMuon is better than FedAvg "
        "and SCAFFOLD."
    )
    assert lines[1] == "Not significant: FedAvg and SCAFFOLD."
    assert lines[2].startswith("3 seeds are few (2 degrees of freedom): only large and steady")
    lower = paired.statements(pairs, "test loss", high=False)[0]
    assert "FedAvg is better than FedMuon; SCAFFOLD is better than FedMuon." in lower
    noisy = paired_table({"a": [0.5, 0.9, 0.1, 0.4, 0.6], "b": [0.6, 0.5, 0.4, 0.4, 0.7]})
    (line,) = paired.statements(paired.paired_differences(noisy), "test acc")
    assert line.endswith("no difference is significant.")
    alone = paired.statements(paired.paired_differences(paired_table({"a": [1], "b": [0]})), "x")
    assert alone[-1] == "One seed cannot tell a difference from luck: run more seeds."
    assert paired.statements(pairs[:0], "x") == []


def test_one_reference_needs_less_adjustment() -> None:
    values = {"a": [0.5, 0.61, 0.7], "b": [0.4, 0.5, 0.62], "c": [0.3, 0.42, 0.5]}
    table = paired_table(values)
    pairs = paired.paired_differences(table, against="c")
    assert list(zip(pairs["method"], pairs["other"], strict=True)) == [("a", "c"), ("b", "c")]
    assert (pairs["p_holm"] <= 2 * pairs["p"] + 1e-12).all()
    with pytest.raises(ConfigError, match="no method d among a, b, c"):
        paired.paired_differences(table, against="d")
