"""Plans whose points are proposed, plans on a cluster, and what each method was given."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fake_runs import LR, PROJECT, make_plan, write_run

from fedmuon_pl.compare import compare_runs, read_runs, slurm
from fedmuon_pl.compare.compare_command import compare_main
from fedmuon_pl.compare.execute import execute
from fedmuon_pl.compare.grid import best_points
from fedmuon_pl.compare.plan import Plan, PlanError
from fedmuon_pl.compare.plan_file import parse_plan
from fedmuon_pl.compare.search import execute_search, propose
from fedmuon_pl.compare.sweep_command import sweep_main
from fedmuon_pl.compare.trials import choose_trials

RANGE = {"low": 0.01, "high": 1.0, "log": True}


def searched(**changes: object) -> Plan:
    algorithms = {name: {"search": {LR: RANGE}} for name in ("fedavg", "scaffold")}
    search = {"trials": 7, "batch": 3}
    return make_plan(**{"algorithms": algorithms, "search": search, **changes})


# -- Optuna -----------------------------------------------------------------------------------


def test_a_search_gives_every_method_the_same_trials_and_goes_on(here: Path) -> None:
    pytest.importorskip("optuna")
    plan = searched()
    batches: list[int] = []
    outcomes = execute_search(plan, "runs", 2, on_batch=lambda r: batches.append(len(r)), poll=0.02)
    assert batches == [6, 6, 2]  # two algorithms, batches of three, three and one
    assert {outcome.status for outcome in outcomes} == {"done"}
    data, _ = read_runs(["runs"])
    results = best_points([o.run for o in outcomes], data, plan.choose)
    assert [(result.algorithm, len(result.trials)) for result in results] == [
        ("fedavg", 7),
        ("scaffold", 7),
    ]
    for result in results:
        rates = [trial.point[LR] for trial in result.trials]
        assert all(0.01 <= rate <= 1 for rate in rates)
        assert result.best is not None
        # The fake accuracy falls with the distance from 0.1.
        assert result.best.point[LR] == min(rates, key=lambda rate: abs(rate - 0.1))
    names = {outcome.run.name for outcome in outcomes}
    again = execute_search(plan, "runs", 2, poll=0.02)
    assert {outcome.run.name for outcome in again} == names
    assert {outcome.status for outcome in again} == {"skipped"}
    other = execute_search(searched(search={"trials": 1, "seed": 1}), "else", 2, poll=0.02)
    assert not {outcome.run.name for outcome in other} & names


def test_a_failed_point_is_known_as_such(here: Path) -> None:
    pytest.importorskip("optuna")
    plan = searched()
    (entry, _) = plan.entries
    results = [({LR: 0.5}, None), ({LR: 0.1}, 0.9), ({LR: 0.2}, 0.8)]
    assert plan.search is not None
    points = propose(entry, plan.search, results, 2)
    assert points == propose(entry, plan.search, results, 2)
    assert points != propose(entry, plan.search, results, 2, salt="other")
    assert len({point[LR] for point in points}) == 2


def test_a_search_by_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    content = {
        **{"experiments": ["toy"], "seeds": [0], "search": {"trials": 2, "sampler": "random"}},
        "algorithms": {name: {"search": {LR: RANGE}} for name in ("fedavg", "scaffold")},
    }
    (here / "configs/plan/mine.yaml").write_text(yaml.safe_dump(content))
    assert sweep_main(["mine", "--dry-run"]) == 0
    assert "0 runs and 4 points to be proposed, nothing was started" in capsys.readouterr().out
    assert sweep_main(["mine", "--write-tuned", "configs/tuned"]) == 0
    output = capsys.readouterr().out
    assert "FedAvg: 2 trials (lr " in output
    assert (here / "configs/tuned/toy/scaffold.yaml").exists()
    assert sweep_main(["mine", "--slurm", "array"]) == 2
    assert "is a search, whose runs are not known" in capsys.readouterr().err


def test_a_search_without_optuna_says_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(PlanError, match=r"needs Optuna: pip install 'fedmuon_pl\[optuna\]'"):
        execute_search(searched(), "runs", poll=0.02)


# -- some runs, and a cluster -----------------------------------------------------------------


def test_only_some_runs_of_a_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(seeds=[0, 1])
    (outcome,) = execute(plan, "runs", only=["toy/fedavg-s1"], poll=0.02)
    assert (outcome.run.seed, outcome.status) == (1, "done")
    with pytest.raises(PlanError, match="plan p has no run toy/fedavg-s2"):
        execute(plan, "runs", only=["toy/fedavg-s2"], poll=0.02)
    args = ["--experiment", "toy", "--algorithm", "fedavg", "--seed", "0", "1"]
    assert sweep_main([*args, "--only", "toy/fedavg-s0"]) == 0
    output = capsys.readouterr().out
    assert "✓ toy/fedavg-s0" in output
    assert "seeds" not in output  # no table of what is not all there


def test_an_array_says_what_a_cluster_needs(here: Path) -> None:
    plan = make_plan(
        seeds=[0, 1, 2], jobs=2, threads=4, slurm={"time": "01:00:00", "requeue": True}
    )
    script, units = slurm.write_array(plan, plan.runs("runs"), "array", ["a plan", "--seed", "0"])
    assert units.read_text().split() == ["toy/fedavg-s0", "toy/fedavg-s1", "toy/fedavg-s2"]
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    for line in ("array=0-2%2", "cpus-per-task=4", "time=01:00:00", "requeue", "job-name=p"):
        assert f"#SBATCH --{line}" in lines
    headers = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert headers == list(range(1, len(headers) + 1))  # Slurm stops reading at the first command
    assert "sweep 'a plan' --seed 0 --jobs 1 --only" in lines[-1]
    assert subprocess.run(["bash", "-n", script]).returncode == 0


def test_a_task_of_the_array_does_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["--experiment", "digits", "--algorithm", "fedavg", "--seed", "0", "1"]
    args += ["--set", "trainer.max_epochs=1", "--set", "trainer.enable_progress_bar=false"]
    assert sweep_main([*args, "--slurm", "some where"]) == 0
    assert f"sbatch {tmp_path}/some where/command-line.sbatch" in capsys.readouterr().out
    done = subprocess.run(
        ["bash", "some where/command-line.sbatch"],
        env={**os.environ, "SLURM_ARRAY_TASK_ID": "1", "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.parent.name for path in tmp_path.rglob("done")] == ["fedavg-s1"]


# -- what each method was given ---------------------------------------------------------------


def points(root: Path) -> None:
    for seed in (0, 1):
        write_run(root, "fedavg@lr=0.1", seed, [0.5, 0.7], test_shift=-0.2)
        write_run(root, "fedavg@lr=1", seed, [0.9, 0.6], test_shift=0.3)  # best on the test set
        write_run(root, "scaffold@lr=0.1", seed, [0.5])
        write_run(root, "fedmuon", seed, [0.5, 0.65])
    write_run(root, "fedavg@lr=9", 0, [0.5, 0.9])  # its other seed failed


def test_only_what_validation_data_chose_is_compared(tmp_path: Path) -> None:
    points(tmp_path)
    runs, _ = read_runs([tmp_path])
    kept, said = choose_trials(runs)
    assert [(run.method, run.folder.name) for run in kept] == [
        ("fedavg", "fedavg@lr=0.1-s0"),
        ("fedavg", "fedavg@lr=0.1-s1"),
        ("fedmuon", "fedmuon-s0"),
        ("fedmuon", "fedmuon-s1"),
        ("scaffold", "scaffold@lr=0.1-s0"),
        ("scaffold", "scaffold@lr=0.1-s1"),
    ]
    assert said["toy"] == [
        "FedAvg: 3 trials (lr=0.1; lr=1; lr=9 without seed 1); chosen by val acc after the last "
        "round, seeds 0, 1: lr=0.1.",
        "SCAFFOLD: 1 trial (lr=0.1); chosen by val acc after the last round, seeds 0, 1: lr=0.1.",
        "Not the same number of trials: FedAvg 3, FedMuon 1, SCAFFOLD 1.",
    ]
    (one,) = compare_runs(runs, all_trials=True)
    assert len(one.summary) == 5
    assert one.given == ()


def test_the_commands_choose_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points(tmp_path)
    assert compare_main([str(tmp_path), "--format", "markdown"]) == 0
    output = capsys.readouterr().out
    assert "- Not the same number of trials: FedAvg 3, FedMuon 1, SCAFFOLD 1." in output
    assert "lr=9 " not in output.partition("Given:")[0]
    assert compare_main([str(tmp_path), "--format", "markdown", "--all-trials"]) == 0
    assert "| FedAvg (lr=9)" in capsys.readouterr().out
    for seed in (0, 1):
        folder = tmp_path / f"toy/fedavg@lr=0.1-s{seed}"
        (folder / "done").unlink()
    _, said = choose_trials(read_runs([tmp_path])[0])
    assert "chosen by val acc after the last round, seeds 0, 1: lr=1." in said["toy"][0]


def test_runs_that_the_points_were_tried_for_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tuning trials beside the reported runs, with a seed of their own."""
    for rate, acc in ((0.1, 0.9), (1, 0.95)):
        write_run(tmp_path, f"fedavg@lr={rate}", 10, [0.5, acc])
    for seed in (0, 1):
        write_run(tmp_path, "fedavg", seed, [0.5, 0.7])
        write_run(tmp_path, "fedmuon", seed, [0.5, 0.65])
    kept, said = choose_trials(read_runs([tmp_path])[0])
    assert [run.folder.name for run in kept] == [
        "fedavg-s0", "fedavg-s1", "fedmuon-s0", "fedmuon-s1"
    ]  # fmt: skip
    assert said["toy"] == [
        "FedAvg: as it is, seeds 0, 1; its 2 other points have seed 10 and are left out."
    ]
    # The first point without its seed, and the other of one seed: no point has them all.
    other = tmp_path / "other"
    write_run(other, "fedavg@lr=0.1", 0, [0.5, 0.7])
    write_run(other, "fedavg@lr=1", 1, [0.5, 0.7])
    assert compare_main([str(other)]) == 2
    said_so = capsys.readouterr().err
    assert "toy: nothing is left. FedAvg: 2 trials, none of which went well" in said_so


def test_a_choice_by_loss_takes_the_smallest() -> None:
    content = {"name": "p", "experiments": ["toy"], "algorithms": ["fedavg"], "seeds": [0]}
    for metric, mode in (("val/loss", "min"), ("val/acc", "max"), ("val/perplexity", "min")):
        assert parse_plan({**content, "choose": {"metric": metric}}).choose.mode == mode
    for metric, mode in (("val/loss", "max"), ("val/acc", "min")):
        with pytest.raises(PlanError, match=rf"choose\.mode is {mode}, which takes the worst by"):
            parse_plan({**content, "choose": {"metric": metric, "mode": mode}})
    own = parse_plan({**content, "choose": {"metric": "val/rmsd", "mode": "min"}})
    assert own.choose.mode == "min"


def test_what_did_not_finish_is_in_the_tables(
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = (
        "experiments: [toy]\nalgorithms: {fedavg: null, scaffold: {set: {fail: 1}}}\nseeds: [0]\n"
    )
    (here / "configs/plan/mine.yaml").write_text(plan)
    assert sweep_main(["mine"]) == 1
    sentence = "scaffold-s0 did not finish: fedmuon: round 0, client 3: the loss is nan"
    assert f"- {sentence}" in (here / "runs/toy/compare/table.md").read_text()
    assert f"% note: {sentence}" in (here / "runs/toy/compare/table.tex").read_text()
    capsys.readouterr()
    assert compare_main(["runs/toy", "--format", "markdown"]) == 0
    assert "- left out scaffold-s0: not finished: it has" in capsys.readouterr().out
    # One run of a plan, and no other.
    for more in ([], ["--slurm", "array"]):
        assert sweep_main(["mine", "--only", "toy/fedavg-s0", "--dry-run", *more]) == 0
        said = capsys.readouterr().out
        assert "fedavg-s0" in said
        assert "scaffold" not in said
    assert sweep_main(["mine", "--only", "toy/fedavg-s0", "--slurm", "array"]) == 0
    assert (here / "array/mine.units").read_text().split() == ["toy/fedavg-s0"]
    assert sweep_main(["mine", "--only", "toy/nobody-s0", "--dry-run"]) == 2
    assert sweep_main(["mine", "--rounds", "3", "--set", "trainer.max_epochs=5"]) == 2
    assert "--rounds 3: --set gives trainer.max_epochs too" in capsys.readouterr().err
