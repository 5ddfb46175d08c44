"""Plans: what they resolve to, and what is refused."""

import sys
from pathlib import Path

import pytest
from fake_runs import LR, METHODS, PROJECT, make_plan

from fedmuon_pl.compare import plan
from fedmuon_pl.compare.plan import PlanError
from fedmuon_pl.compare.plan_file import load_plan


def test_a_plan_resolves_to_commands_and_folders(here: Path) -> None:
    tuned = here / "configs" / "tuned" / "toy" / "fedavg.yaml"
    tuned.parent.mkdir(parents=True)
    tuned.write_text("model: {algorithm: {init_args: {lr: 1e-1}}}\n")
    toy = make_plan(
        algorithms={"fedavg": {"tuned": True}, "big": {"config": "fedavg", "set": {LR: 0.5}}},
        seeds=[3, 4],
        set={"trainer": {"max_epochs": 7}},
    )
    first, second, third, fourth = toy.runs("out")
    assert first.command[3:] == (
        *("-c", "base", "-c", "experiment/toy", "-c", "algorithm/fedavg", "-c", "tuned/toy/fedavg"),
        "--trainer.max_epochs=7",
        "--trainer.default_root_dir=out",
        "--experiment=toy",
        "--method=fedavg",
        "--seed_everything=3",
    )
    assert first.folder == Path("out/toy/fedavg-s3")
    assert first.log == Path("out/toy/logs/fedavg-s3.log")
    assert first.rounds == 7
    assert first.settings[LR] == 0.1  # 1e-1 is a number
    assert [run.folder.name for run in (second, third, fourth)] == ["big-s3", "fedavg-s4", "big-s4"]
    assert f"--{LR}=0.5" in second.command
    assert "tuned/toy/fedavg" not in second.command


def test_the_real_launcher_is_the_package() -> None:
    assert list(plan.LAUNCHER) == [sys.executable, "-m", "fedmuon_pl", "fit"]


def test_grid_points_are_readable_in_folder_names(here: Path) -> None:
    grid = {
        LR: [0.1, 1e-5],
        "model.algorithm.init_args.server_lr": [-1, True],
        "model.algorithm.init_args.kind": ["a b/c"],
    }
    names = [run.method for run in make_plan(algorithms={"fedadam": {"grid": grid}}).runs()]
    assert names[0] == "fedadam@lr=0.1,server_lr=-1,kind=a-b-c"
    assert names[3] == "fedadam@lr=1e-05,server_lr=true,kind=a-b-c"
    assert len(set(names)) == 4
    assert plan._point_name({"a.lr": 1, "b.lr": 2, "x": 3}) == "a.lr=1,b.lr=2,x=3"
    point = make_plan(algorithms={"fedadam": {"grid": grid}}).runs()[0].point
    assert point[LR] == 0.1


def test_two_points_with_one_folder_are_refused(here: Path) -> None:
    toy = make_plan(algorithms={"fedavg": {"grid": {"model.x": ["a b", "a/b"]}}})
    with pytest.raises(PlanError, match="two of its runs would write to runs/toy/fedavg@x=a-b-s0"):
        toy.runs()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"algoritms": ["a"]}, "unknown key 'algoritms' (did you mean algorithms?); allowed are n"),
        ({"choose": {"metrik": "val/acc"}}, "unknown key 'metrik' (did you mean metric?)"),
        ({"algorithms": {"a": {"grids": {}}}}, "algorithm a: unknown key 'grids' (did you mean gr"),
        ({"choose": {"metric": "test/acc"}}, "choose.metric is test/acc, but nothing is chosen on"),
        ({"choose": {"metric": "client/test_acc"}}, "nothing is chosen on test data"),
        ({"choose": {"metric": "client/personal_acc_mean"}}, "nothing is chosen on test data"),
        ({"choose": {"mode": "most"}}, "choose.mode should be max or min, not 'most'"),
        ({"choose": {"at": "first"}}, "choose.at should be last or best, not 'first'"),
        ({"choose": "val/acc"}, "choose should map metric, mode, at, not 'val/acc'"),
        ({"experiments": None}, "experiments should be a list of names, not None"),
        ({"experiments": "toy"}, "experiments should be a list of names, not 'toy'"),
        ({"seeds": [0, 0]}, "seeds has 0 more than once"),
        ({"seeds": [-1]}, "seeds should be 0 or more, not -1"),
        ({"seeds": [True]}, "seeds should be a list of whole numbers, not [True]"),
        ({"jobs": 0}, "jobs should be auto or a number from 1, not 0"),
        ({"threads": "two"}, "threads should be a number from 1, not 'two'"),
        ({"tuned": "yes please"}, "tuned should be true, false or auto, not 'yes please'"),
        ({"algorithms": []}, "algorithms should be a list of names, not []"),
        ({"algorithms": 3}, "algorithms should be a list of names, or map names to grid, search,"),
        (
            {"algorithms": {"a": 3}},
            "should map grid, search, set, config, tuned, not be 3",
        ),
        ({"algorithms": {"a/b": None}}, "'a/b' is not a name for an algorithm"),
        ({"algorithms": {"a": {"grid": {"x": 1}}}}, "grid x should be a list of values, not 1"),
        ({"algorithms": {"a": {"grid": {"x": [1, 1]}}}}, "grid x has a value more than once"),
        (
            {"algorithms": {"a": {"grid": {"x.y": [1, 2]}}}, "set": {"x": {"y": 3}}},
            "a has x.y both in grid and in set",
        ),
        ({"set": [1]}, "set should map dotted keys to values, not [1]"),
        ({"name": "a b"}, "name should be a word, not 'a b'"),
        ({"root": 1}, "root should be a folder, not 1"),
        ({"search": 3}, "search should map trials and more of trials, sampler, batch, seed, not 3"),
        ({"search": {"trials": 0}}, "search.trials should be a number from 1, not 0"),
        ({"search": {"trials": 1, "sampler": "x"}}, "search.sampler should be tpe or random, not"),
        (
            {"algorithms": {"a": {"search": {"x": 1}}}},
            "x should be {low, high, log} or {choices}",
        ),
        (
            {"algorithms": {"a": {"search": {"x": {"low": 0, "high": 1, "log": True}}}}},
            "search x should have 0 < low < high, not 0 and 1",
        ),
        (
            {"algorithms": {"a": {"search": {"x": {"choices": [1]}}}}},
            "search x: choices should be a list of values, not [1]",
        ),
        (
            {"algorithms": {"a": {"search": {"x": {"choices": [1, 2]}}}}},
            "a is searched, but the plan has no search: trials",
        ),
        (
            {"algorithms": {"a": {"search": {"x": {"choices": [1, 2]}}, "grid": {"y": [1]}}}},
            "algorithm a has both a grid and a search",
        ),
        ({"slurm": "gpu"}, "slurm should map dotted keys to values, not 'gpu'"),
    ],
)
def test_a_bad_plan_gets_one_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlanError) as error:
        make_plan(**changes)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_unequal_trials_need_a_word(here: Path) -> None:
    algorithms = {"fedavg": {"grid": {LR: [1, 2, 3]}}, "scaffold": {"grid": {LR: [1, 2]}}}
    with pytest.raises(
        PlanError, match="same number of trials, but they have fedavg 3, scaffold 2"
    ):
        make_plan(algorithms=algorithms)
    assert len(make_plan(algorithms=algorithms, unequal_trials=True).runs()) == 5
    with pytest.raises(PlanError, match="fedavg 3, scaffold 1"):
        make_plan(algorithms={**algorithms, "scaffold": None})


def test_missing_configurations_are_named_before_anything_runs(here: Path) -> None:
    with pytest.raises(PlanError, match="plan p: there is no configuration 'experiment/tyo'"):
        make_plan(experiments=["tyo"]).runs()
    with pytest.raises(PlanError, match="no configuration 'algorithm/fedavgg'"):
        make_plan(algorithms=["fedavgg"]).runs()
    with pytest.raises(PlanError, match=r"there is no configs/tuned/toy/fedavg\.yaml; tune it"):
        make_plan(tuned=True).runs()


def test_a_plan_is_found_as_a_file_then_by_its_name(here: Path) -> None:
    text = "experiments: [toy]\nalgorithms: [fedavg]\nseeds: [0]\n"
    named = here / "configs" / "plan" / "mine.yaml"
    named.write_text(text)
    assert load_plan("mine").name == "mine"
    assert load_plan("plan/mine").seeds == [0]
    (here / "mine").write_text(text.replace("[0]", "[5]"))
    assert load_plan("mine").seeds == [5]
    with pytest.raises(PlanError, match="there is no plan 'yours': there is no configuration"):
        load_plan("yours")
    named.write_text("experiments: [toy\n")
    with pytest.raises(PlanError, match=r"the plan cannot be read: .*mine\.yaml is not valid YAML"):
        load_plan(named)


@pytest.mark.parametrize("name", ["quickstart", "tune_mnist5k"])
def test_the_shipped_plans_are_valid(name: str) -> None:
    shipped = load_plan(PROJECT / "configs" / "plan" / f"{name}.yaml")
    assert [entry.label for entry in shipped.entries] == list(METHODS)
    assert shipped.experiments == ["mnist5k"]
    if name == "quickstart":
        assert all(entry.tuned and not entry.grid for entry in shipped.entries)
        assert shipped.seeds == [0, 1, 2]
    else:
        assert {len(entry.points()) for entry in shipped.entries} == {6}
        assert not set(shipped.seeds) & {0, 1, 2}
        assert shipped.root != "runs"


@pytest.mark.parametrize("path", sorted((PROJECT / "configs" / "plan").glob("*.yaml")))
def test_every_shipped_plan_finds_what_it_runs(path: Path) -> None:
    assert load_plan(path).runs()
