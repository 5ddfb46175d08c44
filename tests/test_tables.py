"""The reading of runs, and tables of them."""

import csv
import math
import re
import statistics
from pathlib import Path

import pytest
import yaml
from fake_runs import LR, example, write_run

from fedmuon_pl.compare import fairness, names, render, runs, summary

# -- reading runs -----------------------------------------------------------------------------


def test_runs_are_read_from_any_folder_above(tmp_path: Path) -> None:
    write_run(tmp_path, "fedmuon", 1, [0.1, 0.2])
    write_run(tmp_path, "fedavg", 0, [0.1, 0.2], experiment="other")
    write_run(tmp_path, "fedmuon@lr=0.1", 0, [0.1, 0.2])
    found, problems = runs.read_runs([tmp_path, tmp_path / "toy", tmp_path / "toy/fedmuon-s1"])
    assert not problems
    assert [(run.experiment, run.method, run.seed) for run in found] == [
        ("other", "fedavg", 0),
        ("toy", "fedmuon", 1),
        ("toy", "fedmuon@lr=0.1", 0),
    ]
    assert found[1].config["data.batch_size"] == 32
    assert list(found[1].metrics["val/acc"]) == [0.1, 0.2]


def test_names_come_from_the_config_then_from_the_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedmuon", 1, [0.1], config={"method": "mine"})
    assert runs.read_runs([folder])[0][0].method == "mine"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config |= {"method": None, "experiment": None, "seed_everything": True}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (run,), _ = runs.read_runs([folder])
    assert (run.experiment, run.method, run.seed) == ("toy", "fedmuon", 1)
    (folder / "config.yaml").unlink()
    assert runs.read_runs([folder])[0][0].method == "fedmuon"
    (tmp_path / "toy/odd").mkdir()
    (folder / "metrics.csv").rename(tmp_path / "toy/odd/metrics.csv")
    assert "neither config.yaml nor the folder's name" in str(runs.read_runs([tmp_path])[1][0])


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("metrics.csv", "", "metrics.csv is empty"),
        ("metrics.csv", "round,val/acc\n", "metrics.csv has no round yet"),
        ("metrics.csv", "epoch,val/acc\n0,1\n", "starts with column 'epoch', not 'round'"),
        (
            "metrics.csv",
            "round,val/acc\n0,high\n",
            "holds something that is no number in 'val/acc'",
        ),
        ("metrics.csv", "round,val/acc\n0,1\n0,1\n", "the rounds in metrics.csv are not 0, 1, 2"),
        ("metrics.csv", "round,val/acc\n0,1\n2,1\n", "the rounds in metrics.csv are not 0, 1, 2"),
        ("metrics.csv", "round,val/acc\n0,1\n1,1,1\n", "metrics.csv is not a readable table"),
        ("metrics.csv", "round,val/acc\n0,1\n", "done says 2 rounds, but metrics.csv holds 1"),
        ("config.yaml", "a: [", "config.yaml is not valid YAML"),
        ("config.yaml", "[1]", "config.yaml should hold keys and values, not a list"),
        ("done", None, "not finished: it has 2 of 2 rounds and no done file"),
        ("done", "{", "not finished: it has 2 of 2 rounds and no done file"),
    ],
)
def test_a_bad_run_is_named_and_left_out(
    tmp_path: Path, name: str, text: str | None, reason: str
) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1, 0.2])
    folder = write_run(tmp_path, "fedmuon", 0, [0.1, 0.2])
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    found, (problem,) = runs.read_runs([tmp_path])
    assert [run.method for run in found] == ["fedavg"]
    assert problem.folder == folder
    assert reason in problem.reason


def test_unfinished_runs_can_be_asked_for(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1], done=False)
    (run,), problems = runs.read_runs([tmp_path], finished_only=False)
    assert not problems
    assert not run.done


def test_the_same_run_twice_counts_once(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "fedavg", 0, [0.1])
    write_run(tmp_path / "b", "fedavg", 0, [0.2])
    found, (problem,) = (
        runs.read_runs([tmp_path, tmp_path / "nowhere"])[0],
        runs.read_runs([tmp_path])[1],
    )
    assert [run.metrics["val/acc"][0] for run in found] == [0.1]
    assert "the same run (toy, fedavg, seed 0) is also in" in problem.reason
    assert "no such folder" in runs.read_runs([tmp_path / "nowhere"])[1][0].reason
    (tmp_path / "empty").mkdir()
    assert "there is no run in it" in runs.read_runs([tmp_path / "empty"])[1][0].reason


def test_what_makes_a_comparison_unfair_is_said(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path, "fedavg", seed, [0.1, 0.2])
        write_run(tmp_path, "fedmuon", seed, [0.1, 0.2], config={"model.algorithm.class_path": "Z"})
    assert fairness.differences(runs.read_runs([tmp_path])[0]) == []
    write_run(tmp_path, "scaffold", 0, [0.1], config={
        "data.batch_size": 64, "server.clients_per_round": 5, "model.local_steps": 20,
    })  # fmt: skip
    notes = fairness.differences(runs.read_runs([tmp_path])[0])
    for key in ("data.batch_size", "server.clients_per_round", "model.local_steps"):
        assert any(f"not the same data, cohort or budget, {key}:" in note for note in notes), key
    assert "toy: not the same seeds: [0, 1] in fedavg, fedmuon; [0] in scaffold" in notes
    assert "toy: not the same rounds: 2 in fedavg, fedmuon; 1 in scaffold" in notes
    assert any("64 in scaffold" in note for note in notes)


def test_seeds_of_one_method_must_be_one_method(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1])
    write_run(tmp_path, "fedavg", 1, [0.1], config={"model.algorithm.init_args": {"lr": 0.5}})
    (note,) = fairness.differences(runs.read_runs([tmp_path])[0])
    assert note == f"toy, fedavg: its seeds differ in {LR}: 0.1 in seed 0; 0.5 in seed 1"


@pytest.mark.parametrize(
    ("owner", "there", "note"),
    [
        ("fedmuon_pl.Scaffold", 0.0, ""),  # its default
        ("fedmuon_pl.Scaffold", 0.01, "0.0 in seed 0; 0.01 in seed 1"),
        ("fedmuon_pl.Gone", 0.0, "(absent) in seed 0; 0.0 in seed 1"),
        ("elsewhere.Scaffold", 0.0, "(absent) in seed 0; 0.0 in seed 1"),
    ],
)
def test_an_argument_that_an_older_version_had_not_is_its_default(
    tmp_path: Path, owner: str, there: float, note: str
) -> None:
    for seed, init_args in ((0, {"lr": 0.1}), (1, {"lr": 0.1, "weight_decay": there})):
        algorithm = {"class_path": owner, "init_args": init_args}
        write_run(tmp_path, "scaffold", seed, [0.1], config={"model.algorithm": algorithm})
    key = "model.algorithm.init_args.weight_decay"
    start = f"toy, scaffold: its seeds differ in {key}: "
    assert fairness.differences(runs.read_runs([tmp_path])[0]) == [start + note] * bool(note)


def test_progress_stands_a_file_that_is_being_written(tmp_path: Path) -> None:
    assert runs.progress(tmp_path) == (0, None)
    (tmp_path / "metrics.csv").write_text("round,val/acc,x\n0,0.5,1\n1,,1\n2,0.7")
    assert runs.progress(tmp_path) == (2, 0.5)


# -- tables -----------------------------------------------------------------------------------


def test_the_numbers_of_a_table(tmp_path: Path) -> None:
    table = summary.summarise(example(tmp_path), target=0.9)
    assert list(table["method"]) == ["fedmuon", "fedavg"]
    first, second = (row for _, row in table.iterrows())
    values = [0.90, 0.92, 0.97]
    assert second["seeds"] == (0, 1, 2)
    assert second["test_mean"] == pytest.approx(sum(values) / 3 - 0.01, abs=1e-12)
    assert second["test_sd"] == pytest.approx(math.sqrt(0.0013), abs=1e-12)  # n - 1 below
    assert second["test_sd"] == pytest.approx(statistics.stdev(values), abs=1e-12)
    assert second["val_mean"] == pytest.approx(0.93, abs=1e-12)
    assert second["best_val_mean"] == pytest.approx((0.95 + 0.95 + 0.97) / 3, abs=1e-12)
    # Seeds 0 and 1 are best in their second round, seed 2 in its last.
    assert second["test_at_best_mean"] == pytest.approx((0.94 + 0.94 + 0.96) / 3, abs=1e-12)
    # Trapezoids over two rounds: (0.5 / 2 + 0.95 + last / 2) / 2.
    assert second["area_mean"] == pytest.approx((0.25 + 0.95 + 0.93 / 2) / 2, abs=1e-12)
    assert (second["rounds_to_target_mean"], second["rounds_to_target_n"]) == (2.0, 3)
    assert (second["mb_to_target_mean"], second["seconds_to_target_mean"]) == (4.0, 0.5)
    assert (first["rounds_to_target_mean"], first["mb_to_target_mean"]) == (1.0, 3.0)
    assert (second["total_mb_mean"], first["total_mb_mean"]) == (6.0, 9.0)
    assert second["seconds_mean"] == 0.75
    assert second["rounds_mean"] == 3
    assert second["worst10_n"] == 0


def test_tables_are_as_long_as_what_they_describe(tmp_path: Path) -> None:
    read = example(tmp_path)
    rounds, table = summary.round_table(read), summary.run_table(read)
    assert len(rounds) == 2 * 3 * 3
    assert list(rounds.columns[:4]) == ["experiment", "method", "seed", "round"]
    assert rounds.groupby(["method", "seed"])["val/acc"].last()["fedavg", 1] == 0.92
    assert len(table) == 6
    assert table["conditions"].nunique() == 1
    assert set(summary.QUANTITIES) <= set(table.columns)
    assert not set(summary.TARGETS) & set(table.columns)
    assert summary.round_table([]).empty


def test_the_worst_tenth_is_that_of_the_last_round(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "fedavg", 0, [0.5, 0.6])
    lines = (folder / "metrics.csv").read_text().splitlines()
    lines = [f"{lines[0]},client/acc_worst10", f"{lines[1]},0.3", f"{lines[2]},0.2"]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    read = runs.read_runs([tmp_path])[0]
    assert summary.run_table(read)["worst10"].tolist() == [0.2]
    (table,) = render.grids(summary.summarise(read))
    assert "worst 10 %" in table.heads
    assert "0.2000" in table.rows[0]


def test_a_target_that_only_some_seeds_reach(tmp_path: Path) -> None:
    _, table = render.grids(summary.summarise(example(tmp_path), target=0.96), target=0.96)
    assert table.title == "toy: to val acc 0.96"
    assert list(table.rows[1]) == ["FedAvg", "3", "3.0 (1/3)", "6.0 (1/3)", "0.8 (1/3)"]
    _, table = render.grids(summary.summarise(example(tmp_path / "b"), target=2.0), target=2.0)
    assert list(table.rows[0]) == ["FedMuon", "3", "-", "-", "-"]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_stat_is_the_sample_statistic(n: int) -> None:
    values = [0.1 * i * i for i in range(n)]
    stat = summary.Stat.of([*values, math.nan])
    mean = sum(values) / n
    assert stat.n == n
    assert stat.mean == pytest.approx(mean)
    if n == 1:
        assert math.isnan(stat.sd)
        assert stat.text(2, 1) == "0.00"
    else:
        assert stat.sd == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1)))
    diverged = summary.Stat.of([1.0, math.inf])
    assert (diverged.n, diverged.text(2, 2)) == (2, "nan")
    assert summary.Stat.of([math.nan]).text(2, 1) == "-"


def test_rows_are_sorted_by_final_test_accuracy(tmp_path: Path) -> None:
    finals = {"a": 0.3, "b": 0.9, "c": 0.6, "d": 0.6}
    for method, final in finals.items():
        write_run(tmp_path, method, 0, [0.99, final], test_shift=0.0)
    write_run(tmp_path, "e", 0, [0.99, math.nan])
    read = runs.read_runs([tmp_path])[0]
    assert list(summary.summarise(read)["method"]) == ["b", "c", "d", "a", "e"]
    by_loss = summary.summarise(read, metric="loss")
    assert by_loss["val_mean"][0] == pytest.approx(0.1)
    assert by_loss["best_val_mean"][0] == pytest.approx(0.01)


def test_a_final_value_is_of_the_last_round_or_none(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.5, 0.6, math.nan])
    read = runs.read_runs([tmp_path])[0]
    assert summary.summarise(read)["test_n"][0] == 0
    assert summary.unmeasured(read)[1] == (
        "toy/fedavg-s0: test/acc was last measured in round 2 of 3, so that its final value is "
        "left out"
    )


def test_the_markdown_table_word_for_word(tmp_path: Path) -> None:
    tables = render.grids(summary.summarise(example(tmp_path), target=0.9), target=0.9)
    lines = render.to_markdown(tables[:1]).splitlines()
    assert [re.sub(" +", " ", line) for line in (lines[0], *lines[2:4])] == [
        "| method | seeds | test acc | val acc | best val acc | mean val | sent MB | seconds |",
        "| FedMuon | 3 | 0.9300 ± 0.0361 | 0.9400 ± 0.0361 | 0.9400 ± 0.0361 | 0.8625 ± 0.0090 "
        "| 9.0 | 0.8 |",
        "| FedAvg | 3 | 0.9200 ± 0.0361 | 0.9300 ± 0.0361 | 0.9567 ± 0.0115 | 0.8325 ± 0.0090 "
        "| 6.0 | 0.8 |",
    ]
    assert re.fullmatch(r"\| -+ \|( -+: \|){7}", lines[1])
    assert len({len(line) for line in lines[:4]}) == 1
    assert "over the seeds 0, 1, 2, after 3 rounds" in lines[5]
    both = render.to_markdown(tables)
    assert both.startswith("### toy\n")
    assert re.search(r"\| FedAvg +\| +3 \| 2.0 ± 0.0 \| 4.0 ± 0.0 \| 0.5 ± 0.0 \|", both)


def test_latex_is_booktabs_with_its_letters_escaped(tmp_path: Path) -> None:
    text = render.latex_table(["a_b", "50 %"], [["x & y", "1 ± 2"], ["{z}^", "-"]])
    assert text.splitlines() == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"a\_b & 50 \% \\",
        r"\midrule",
        r"x \& y & 1 $\pm$ 2 \\",
        r"\{z\}\textasciicircum{} & - \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    whole = render.to_latex(render.grids(summary.summarise(example(tmp_path))))
    assert whole.startswith("% needs \\usepackage{booktabs}\n\\begin{table}\n")
    assert r"\caption{toy. Mean $\pm$ sample standard deviation" in whole
    assert r"FedMuon & 3 & 0.9300 $\pm$ 0.0361" in whole


def test_csv_has_full_precision(tmp_path: Path) -> None:
    table = summary.summarise(example(tmp_path))
    (fedmuon, fedavg) = csv.DictReader(render.to_csv(table).splitlines())
    assert fedmuon["method"] == "fedmuon"
    assert float(fedavg["test_sd"]) == table["test_sd"][1]
    assert fedavg["test_n"] == "3"
    assert fedavg["seeds"] == "0 1 2"


def test_names_are_as_in_papers() -> None:
    assert names.display_name("local_muon") == "Local Muon"
    assert names.display_name("mine@lr=0.1,b=2") == "mine (lr=0.1, b=2)"
