"""The choice of a grid point, and the files of what was chosen."""

import re
from pathlib import Path

import pytest
import yaml
from fake_runs import LR, make_plan, write_run

from fedmuon_pl.compare import grid, plan, runs


def grid_plan(**changes: object) -> plan.Plan:
    algorithms = {
        "fedavg": {"grid": {LR: [0.01, 0.1, 1.0]}},
        "scaffold": {"grid": {LR: [0.01, 0.1, 1.0]}},
    }
    return make_plan(**{"algorithms": algorithms, "seeds": [0, 1], **changes})


def write_grid(root: Path, toy: plan.Plan, curves: dict[str, list[float]]) -> list[plan.Run]:
    planned = toy.runs(root)
    for run in planned:
        if curve := curves.get(run.folder.name, [0.2, 0.3]):
            write_run(root, run.method, run.seed, curve, test_shift=0.5 - curve[-1])
    return planned


def test_the_best_point_is_of_the_mean_over_all_seeds(here: Path) -> None:
    toy = grid_plan()
    planned = write_grid(
        here / "runs",
        toy,
        {
            "fedavg@lr=0.01-s0": [0.9, 0.7],
            "fedavg@lr=0.01-s1": [0.9, 0.7],
            "fedavg@lr=0.1-s0": [0.5, 0.95],
            "fedavg@lr=0.1-s1": [0.5, 0.55],
            "fedavg@lr=1.0-s0": [0.99, 0.99],  # its other seed did not finish
            "fedavg@lr=1.0-s1": [],
        },
    )
    read = runs.read_runs([here / "runs"])[0]
    fedavg, scaffold = grid.best_points(planned, read, toy.choose)
    assert fedavg.best is not None
    assert fedavg.best.point == {LR: 0.1}
    assert fedavg.best.score == pytest.approx(0.75)
    assert fedavg.edges == ()
    assert [trial.score for trial in fedavg.trials][2] is None
    assert scaffold.best is not None
    assert scaffold.best.point == {LR: 0.01}  # the first of equals
    assert scaffold.edges == (LR,)
    best_round, _ = grid.best_points(planned, read, plan.Choose(at="best"))
    assert best_round.best is not None
    assert best_round.best.point == {LR: 0.01}
    lowest, _ = grid.best_points(planned, read, plan.Choose(mode="min"))
    assert lowest.best is not None
    assert lowest.best.point == {LR: 0.01}

    record = grid.grid_markdown([fedavg, scaffold], toy)
    assert "| **lr 0.1**" in record
    assert re.search(r"lr 1.0 +\| +0.9900 \(1/2\) \|", record)
    assert "SCAFFOLD on toy: the best lr is at the edge of its grid" in record


def test_tuned_files_are_nested_yaml_with_their_history(here: Path) -> None:
    toy = make_plan(
        algorithms={"fedadam": {"grid": {LR: [0.1, 1], "model.algorithm.init_args.tau": [1e-3]}}},
        seeds=[0, 1],
    )
    planned = write_grid(here / "runs", toy, {"fedadam@lr=1,tau=0.001-s0": [0.8, 0.9]})
    results = grid.best_points(planned, runs.read_runs([here / "runs"])[0], toy.choose)
    written = grid.write_tuned(results, toy, "configs/tuned")
    assert written == [Path("configs/tuned/toy/fedadam.yaml"), Path("configs/tuned/toy/p.md")]
    text = written[0].read_text()
    assert yaml.safe_load(text) == {"model": {"algorithm": {"init_args": {"lr": 1, "tau": 0.001}}}}
    comment = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    assert "fedmuon sweep p --write-tuned" in comment
    assert "2 trials, seeds 0, 1:" in comment
    assert f"{LR}: 0.1, 1\n" in comment
    assert "Best val/acc (max, last round): 0.6000 ± 0.4243." in comment
    assert "**lr 1, tau 0.001**" in written[1].read_text()
    assert make_plan(algorithms=["fedadam"], tuned=True).runs()[0].settings[LR] == 1
