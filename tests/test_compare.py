"""Plans, their execution, and the reading, tabulating and drawing of runs.

The runs are synthetic folders, and the process that a plan starts is a small script that writes
what a real one would: nothing here trains.
"""

import csv
import io
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fedmuon_pl.compare import execute as execution
from fedmuon_pl.compare import (
    fairness,
    figures,
    grid,
    names,
    paired,
    plan,
    render,
    runs,
    style,
    summary,
)
from fedmuon_pl.compare.compare_command import compare_main
from fedmuon_pl.compare.execute import execute
from fedmuon_pl.compare.inspection import inspect
from fedmuon_pl.compare.plan import PlanError
from fedmuon_pl.compare.plan_file import load_plan, parse_plan
from fedmuon_pl.compare.sweep_command import sweep_main
from fedmuon_pl.compare.sweep_view import SweepView
from fedmuon_pl.errors import ConfigError

PROJECT = Path(__file__).resolve().parents[1]
METHODS = ("fedmuon", "local_muon", "fedavg", "scaffold", "fedadam")
LR = "model.algorithm.init_args.lr"

# A stand-in for `fedmuon fit`: a round every --pace seconds, a checkpoint after each, `done` after
# the last. `--fail` ends it after its first round, `--crash-early` before the first checkpoint.
FAKE = """
import json, os, pathlib, signal, sys, time
flags = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--") and "=" in a)
configs = [b for a, b in zip(sys.argv, sys.argv[1:]) if a == "-c"]
rounds = int(flags.get("trainer.max_epochs", 4))
folder = pathlib.Path(flags["trainer.default_root_dir"], flags["experiment"],
                      f"{flags['method']}-s{flags['seed_everything']}")
last = folder / "checkpoints" / "last.ckpt"
resume = flags.get("ckpt_path") == "last"
if folder.exists() and not resume:
    sys.exit(f"error: there is a run in {folder}")
if resume and not last.exists():
    sys.exit("error: no checkpoint")
stopped = []
signal.signal(signal.SIGTERM, lambda *a: stopped.append(1))
folder.mkdir(parents=True, exist_ok=True)
lr = float(flags.get("model.algorithm.init_args.lr", 0.1))
(folder / "config.yaml").write_text(json.dumps({
    "experiment": flags["experiment"], "method": flags["method"],
    "seed_everything": int(flags["seed_everything"]), "trainer": {"max_epochs": rounds},
    "model": {"local_steps": 10, "algorithm": {
        "class_path": "fedmuon_pl.algorithms." + configs[2].split("/")[1],
        "init_args": {"lr": lr}}}}))
(folder / "environment.json").write_text(json.dumps([
    {"planned": json.loads(os.environ.get("FEDMUON_PLANNED", "null"))}]))
if "crash-early" in flags:
    print("training starts", flush=True)
    print("Traceback", "ValueError: it broke at once", sep="\\n", file=sys.stderr)
    sys.exit(1)
start = int(last.read_text()) if resume else 0
table = folder / "metrics.csv"
lines = ["round,val/acc,test/acc,time/round_s"]
if resume:
    lines = table.read_text().splitlines()[: start + 1]
table.write_text("\\n".join(lines) + "\\n")
last.parent.mkdir(exist_ok=True)
print("threads", os.environ["OMP_NUM_THREADS"], "from", start, flush=True)
print("gpu", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
for r in range(start, rounds):
    time.sleep(float(flags.get("pace", 0)))
    acc = 1 - abs(lr - 0.1) - 0.5 ** (r + 1)
    with table.open("a") as f:
        f.write(f"{r},{acc},{acc - 0.01},0.5\\n")
    last.write_text(str(r + 1))
    if "fail" in flags:
        print("| 0/4 clients\\r| 1/4 clientsfedmuon: \x1b[1mround 0, client 3: the loss is nan",
              file=sys.stderr)
        print("see the log")
        sys.exit(2)
    if stopped:
        sys.exit(0)
(folder / "done").write_text(json.dumps({"rounds": rounds}))
"""


def write_run(
    root: Path,
    method: str,
    seed: int,
    curve: list[float],
    *,
    experiment: str = "toy",
    config: dict | None = None,
    done: bool = True,
    test_shift: float = -0.01,
    mb: float = 2.0,
) -> Path:
    """A run's folder as the engine leaves it, with ``curve`` as ``val/acc``."""
    folder = root / experiment / f"{method}-s{seed}"
    folder.mkdir(parents=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["round", "val/acc", "val/loss", "test/acc", "comm/total_mb", "time/round_s"]
        )
        for r, acc in enumerate(curve):
            writer.writerow([r, acc, 1 - acc, acc + test_shift, mb * (r + 1), 0.25])
    content = {
        "seed_everything": seed,
        "experiment": experiment,
        "method": method,
        "trainer": {"max_epochs": len(curve)},
        "model": {
            "local_steps": 10,
            "algorithm": {"class_path": "x.Y", "init_args": {"lr": 0.1}},
        },
        "data": {"batch_size": 32, "num_clients": 100},
        "server": {"clients_per_round": 10},
    }
    for key, value in (config or {}).items():
        place = content
        *sections, leaf = key.split(".")
        for section in sections:
            place = place[section]
        place[leaf] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    if done:
        (folder / "done").write_text(json.dumps({"rounds": len(curve)}))
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with the configurations of a small project and the fake command."""
    for name in ("base", "experiment/toy", "experiment/other", "plan/unused"):
        path = tmp_path / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("trainer: {max_epochs: 4}\n" if name.startswith("experiment") else "{}\n")
    for name in METHODS:
        path = tmp_path / "configs" / "algorithm" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"model:\n  algorithm:\n    class_path: {name}\n")
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "LAUNCHER", (sys.executable, str(script), "fit"))
    monkeypatch.setattr(plan, "_find_config", find_here)
    return tmp_path


def find_here(name: str) -> Path:
    """The rule of ``fedmuon_pl.configuration.find_config`` for this folder only."""
    path = Path("configs", f"{name}.yaml")
    if not path.is_file():
        raise FileNotFoundError(f"there is no configuration {name!r}")
    return path


def make_plan(**changes: object) -> plan.Plan:
    content = {
        "name": "p",
        "experiments": ["toy"],
        "algorithms": ["fedavg"],
        "seeds": [0],
        **changes,
    }
    return parse_plan({key: value for key, value in content.items() if value is not None})


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# -- plans ------------------------------------------------------------------------------------


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


# -- execution --------------------------------------------------------------------------------


def test_runs_are_done_once_and_then_skipped(here: Path) -> None:
    toy = make_plan(algorithms=["fedavg", "scaffold"], seeds=[0, 1], threads=3)
    events: list[execution.Event] = []
    outcomes = execute(toy, "runs", 2, events.append, poll=0.02)
    assert [outcome.status for outcome in outcomes] == ["done"] * 4
    assert [outcome.run.name for outcome in outcomes] == [
        "toy/fedavg-s0",
        "toy/scaffold-s0",
        "toy/fedavg-s1",
        "toy/scaffold-s1",
    ]
    assert len(rows_of(here / "runs/toy/fedavg-s1")) == 4
    log = (here / "runs/toy/logs/fedavg-s0.log").read_text()
    assert "threads 3 from 0" in log
    assert "--seed_everything=0" in log
    kinds = [event.kind for event in events if event.run.name == "toy/fedavg-s0"]
    assert (kinds[0], kinds[-1]) == ("started", "done")
    assert events[-1].rounds == 4
    assert events[-1].value == pytest.approx(1 - 0.5**4)

    before = (here / "runs/toy/fedavg-s0/metrics.csv").stat().st_mtime_ns
    again = execute(toy, "runs", 2, poll=0.02)
    assert [outcome.status for outcome in again] == ["skipped"] * 4
    assert (here / "runs/toy/fedavg-s0/metrics.csv").stat().st_mtime_ns == before


def test_a_half_done_run_is_resumed_and_more_rounds_go_on(here: Path) -> None:
    toy = make_plan()
    execute(toy, "runs", poll=0.02)
    folder = here / "runs/toy/fedavg-s0"
    whole = (folder / "metrics.csv").read_text()
    (folder / "checkpoints/last.ckpt").write_text("2")  # killed in its fourth round
    (folder / "metrics.csv").write_text("".join(whole.splitlines(keepends=True)[:4]))
    (folder / "done").unlink()
    assert inspect(toy.runs("runs")[0]) == ("resume", "")
    assert execute(toy, "runs", poll=0.02)[0].status == "done"
    assert (folder / "metrics.csv").read_text() == whole
    assert "from 2" in (here / "runs/toy/logs/fedavg-s0.log").read_text()

    longer = make_plan(set={"trainer.max_epochs": 6})
    assert inspect(longer.runs("runs")[0])[0] == "resume"
    assert execute(longer, "runs", poll=0.02)[0].status == "done"
    assert len(rows_of(folder)) == 6
    # The table would show six rounds where four are planned.
    assert inspect(toy.runs("runs")[0]) == (
        "blocked",
        "runs/toy/fedavg-s0 was made with other settings (it has 6 rounds, and the plan 4); "
        "move it away",
    )


def test_done_needs_both_the_marker_and_the_last_row(here: Path) -> None:
    toy = make_plan()
    execute(toy, "runs", poll=0.02)
    folder = here / "runs/toy/fedavg-s0"
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(lines[:-1]) + lines[-1].rstrip())  # torn
    assert inspect(toy.runs("runs")[0])[0] == "resume"
    (folder / "metrics.csv").write_text("".join(lines))
    assert inspect(toy.runs("runs")[0])[0] == "finished"
    (folder / "done").write_text('{"rounds": ')
    assert inspect(toy.runs("runs")[0])[0] == "resume"


def test_only_remains_of_a_run_are_cleared(here: Path) -> None:
    run = make_plan().runs("runs")[0]
    run.folder.mkdir(parents=True)
    assert inspect(run)[0] == "new"
    (run.folder / "thesis.txt").write_text("years of work")
    assert inspect(run) == ("blocked", "runs/toy/fedavg-s0 is no run's folder; move it away")
    assert execute(make_plan(), "runs", poll=0.02)[0].status == "failed"
    assert (run.folder / "thesis.txt").exists()
    (run.folder / "thesis.txt").unlink()

    (run.folder / "events.out.tfevents.1").write_text("")
    assert inspect(run)[0] == "remains"
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints/round3.ckpt").write_text("3")
    state, reason = inspect(run)
    assert state == "blocked"
    assert "unfinished and has no checkpoints/last.ckpt" in reason
    (run.folder / "checkpoints/round3.ckpt").unlink()
    assert execute(make_plan(), "runs", poll=0.02)[0].status == "done"
    assert not (run.folder / "events.out.tfevents.1").exists()


def test_a_failed_run_has_a_reason_and_stops_no_other(here: Path) -> None:
    algorithms = {
        "fedavg": {"set": {"fail": 1}},
        "scaffold": {"set": {"crash-early": 1}},
        "fedadam": None,
    }
    toy = make_plan(algorithms=algorithms)
    failed, crashed, fine = execute(toy, "runs", 1, poll=0.02)
    assert (failed.status, crashed.status, fine.status) == ("failed", "failed", "done")
    assert failed.reason == "fedmuon: round 0, client 3: the loss is nan"
    assert crashed.reason == "ValueError: it broke at once"
    # Mended, both go on: one from its checkpoint, the other from nothing.
    mended = execute(make_plan(algorithms=list(algorithms)), "runs", 1, poll=0.02)
    assert [outcome.status for outcome in mended] == ["done", "done", "skipped"]
    assert "from 1" in failed.run.log.read_text()


def test_a_killed_run_says_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(plan, "LAUNCHER", (sys.executable, "-c", killed))
    assert execute(make_plan(), "runs", poll=0.02)[0].reason == "killed by SIGKILL"
    monkeypatch.setattr(plan, "LAUNCHER", (sys.executable, "-c", "pass"))
    assert execute(make_plan(), "runs", poll=0.02)[0].reason == "it ended after 0 of 4 rounds"
    monkeypatch.setattr(plan, "LAUNCHER", ("/no/such/python",))
    assert "No such file" in execute(make_plan(), "runs", poll=0.02)[0].reason


@pytest.mark.parametrize(
    ("key", "there", "planned"),
    [
        ("model.client_clip_norm", 1.0, None),
        ("model.algorithm.init_args.rest_betas", [0.9, 0.95], [0.9, 0.999]),
        ("trainer.precision", "32-true", "64-true"),
    ],
)
def test_no_setting_that_decides_is_overlooked(
    here: Path, key: str, there: object, planned: object
) -> None:
    same, other = make_plan(set={key: there}), make_plan(set={key: planned})
    execute(same, "runs", poll=0.02)
    path = here / "runs/toy/fedavg-s0/config.yaml"
    saved = yaml.safe_load(path.read_text())
    inner = saved
    *folders, name = key.split(".")
    for folder in folders:
        inner = inner[folder]
    inner[name] = there
    path.write_text(yaml.safe_dump(saved))
    assert inspect(same.runs("runs")[0])[0] == "finished"
    state, reason = inspect(other.runs("runs")[0])
    assert state == "blocked"
    assert f"{key} is " in reason


def test_seeds_and_settings_of_a_plan_can_be_replaced(here: Path) -> None:
    plan_file = "experiments: [toy]\nalgorithms: [fedavg]\nseeds: [0, 1]\n"
    (here / "configs/plan/mine.yaml").write_text(plan_file)
    assert sweep_main(["mine", "--seed", "5", "5", "--set", "trainer.max_epochs=2"]) == 0
    runs_made = sorted(p.parent.name for p in (here / "runs/toy").glob("*/done"))
    assert runs_made == ["fedavg-s5"]
    assert json.loads((here / "runs/toy/fedavg-s5/done").read_text())["rounds"] == 2
    assert sweep_main(["mine", "--seed", "6", "--rounds", "3"]) == 0
    assert json.loads((here / "runs/toy/fedavg-s6/done").read_text())["rounds"] == 3


def test_a_setting_of_the_command_line_does_not_lose_silently(here: Path, capsys) -> None:
    for own in ("grid: {pace: [0]}", "set: {pace: 0}"):
        entry = f"experiments: [toy]\nalgorithms: {{fedavg: {{{own}}}}}\nseeds: [0]\n"
        (here / "configs/plan/mine.yaml").write_text(entry)
        assert sweep_main(["mine", "--set", "pace=1"]) == 2
        said = capsys.readouterr().err
        assert "--set pace: plan mine gives fedavg a value of its own" in said


def test_an_old_result_does_not_stand_for_new_settings(here: Path) -> None:
    execute(make_plan(set={LR: 0.1}), "runs", poll=0.02)
    assert inspect(make_plan(set={LR: "1e-1"}).runs("runs")[0])[0] == "finished"
    outcome = execute(make_plan(set={LR: 0.2}), "runs", poll=0.02)[0]
    assert outcome.status == "failed"
    assert outcome.reason == (
        f"runs/toy/fedavg-s0 was made with other settings ({LR} is 0.1 there and 0.2 in the plan); "
        "move it away"
    )
    other = make_plan(set={LR: 0.1, "model.algorithm.class_path": "Scaffold"}).runs("runs")[0]
    assert "class_path is fedavg there and Scaffold" in inspect(other)[1]
    same = make_plan(set={LR: 0.1, "model.algorithm.class_path": "a.b.fedavg"}).runs("runs")[0]
    assert inspect(same)[0] == "finished"
    assert f"{LR} is 0.1 there and not set in the plan" in inspect(make_plan().runs("runs")[0])[1]


ROTATION = {"class_path": "fedmuon_pl.data.feature_skew.Rotation", "init_args": {"degrees": 90}}
SKEW = {"data.init_args.feature_skew.class_path": "Rotation"}
FASHION = {"data.class_path": "FashionMNIST", "data.init_args.root": "a/b"}
TOY = {**FASHION, "data.init_args.verify": False}
FOLDERS = {"data.class_path": "ImageFolder", "data.init_args.root": "photos/a"}


@pytest.mark.parametrize(
    ("before", "saved", "after", "words"),
    [
        # The key is null there: nothing of it is written down under the plan's dotted keys.
        ({}, {"augment": None}, {"data.init_args.augment.class_path": "CropFlip"},
         "data.init_args.augment is null there and CropFlip in the plan"),
        ({}, {"augment": None}, {"data.init_args.augment": None}, ""),
        (None, {"augment": None}, {"data.init_args.augment.class_path": "CropFlip"}, "augment is"),
        # And the other way round.
        (SKEW, {"feature_skew": ROTATION}, {}, "feature_skew.class_path is Rotation there and not"),
        (SKEW, {"feature_skew": ROTATION}, SKEW, ""),
        (SKEW, {"feature_skew": ROTATION}, {"data.init_args.feature_skew": None}, "and null in"),
        (None, {"feature_skew": ROTATION}, {"data.init_args.feature_skew": None}, "and null in"),
        ({"data.init_args.test_crop": 4}, {"test_crop": 4}, {}, "test_crop is 4 there and not set"),
        # Where files lie whose hashes are checked says nothing; of other data it says which.
        (FASHION, {"root": "/x/a/b"}, {**FASHION, "data.init_args.root": "c"}, ""),
        (TOY, {"root": "/x/a/b"}, {**TOY, "data.init_args.root": "c"}, "root is a/b there and c"),
        (TOY, {"root": "/x/a/b"}, FASHION, "there and not set in the plan"),
        (FOLDERS, {"root": "/x/photos/a"}, {**FOLDERS, "data.init_args.root": "photos/b"},
         "root is photos/a there and photos/b in the plan"),
        ({"data.init_args.path": "a/x.npz"}, {"path": "/x/a/x.npz"},
         {"data.init_args.path": "a/y.npz"}, "path is a/x.npz there and a/y.npz in the plan"),
        # Speed is free, and what another version did not know.
        ({}, {"eval_batch_size": 1000}, {"data.init_args.eval_batch_size": 500}, ""),
        ({}, {}, {"data.init_args.new_option": 0.0}, ""),
        ({}, {}, {"data.init_args.new_option": 0.1}, "new_option is not set there and 0.1 in the"),
        ({}, {"channels_last": False}, {"data.init_args.channels_last": True}, "channels_last is"),
        # A null over a class, and no null any more.
        ({"data.init_args.augment": None}, {"augment": None},
         {"data.init_args.augment.class_path": "CropFlip"}, "augment is null there and CropFlip"),
        # Two classes of one name are two.
        ({"model.x.class_path": "torch.optim.AdamW"}, {}, {"model.x.class_path": "mine.AdamW"},
         "model.x.class_path is torch.optim.AdamW there and mine.AdamW in the plan"),
        ({"model.x.class_path": "torch.optim.AdamW"}, {}, {"model.x.class_path": "AdamW"}, ""),
    ],
)  # fmt: skip
def test_a_finished_run_with_other_settings_is_seen(here, before, saved, after, words) -> None:
    folder = write_run(Path("runs"), "fedavg", 0, [0.5] * 4)
    content = yaml.safe_load((folder / "config.yaml").read_text())
    content["model"]["algorithm"]["class_path"] = "fedavg"
    content["data"] = {"class_path": before and before.get("data.class_path"), "init_args": saved}
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    if before is not None:
        planned = {"model.algorithm.class_path": "fedavg", **before}
        (folder / "environment.json").write_text(json.dumps([{"planned": planned}]))
    state, reason = inspect(make_plan(set=after).runs("runs")[0])
    assert state == ("blocked" if words else "finished"), reason
    assert words in reason


def test_a_start_by_hand_does_not_hide_what_was_planned(here: Path) -> None:
    key = "data.init_args.test_crop"
    execute(make_plan(set={key: 4}), "runs", poll=0.02)
    path = here / "runs/toy/fedavg-s0/environment.json"
    starts = json.loads(path.read_text())
    path.write_text(json.dumps([*starts, {"first_round": 2}]))
    assert inspect(make_plan(set={key: 4}).runs("runs")[0])[0] == "finished"
    assert f"{key} is 4 there and not set" in inspect(make_plan().runs("runs")[0])[1]


def test_a_null_takes_a_class_away_and_a_class_a_null() -> None:
    settings: dict[str, object] = {}
    plan.lay_over(settings, {"a.b": None, "a.c": 1})
    plan.lay_over(settings, {"a.b.class_path": "X", "a.b.init_args.y": 2})
    assert settings == {"a.c": 1, "a.b.class_path": "X", "a.b.init_args.y": 2}
    plan.lay_over(settings, {"a.b": None})
    assert settings == {"a.c": 1, "a.b": None}


def test_two_sweeps_do_not_write_into_one_folder(here: Path) -> None:
    run = make_plan().runs("runs")[0]
    log = execution._open_log(run)
    assert log is not None
    with log:
        outcome = execute(make_plan(), "runs", poll=0.02)[0]
    assert outcome.reason == "another process is at this run"
    assert execute(make_plan(), "runs", poll=0.02)[0].status == "done"


def test_at_most_jobs_run_at_a_time(here: Path) -> None:
    toy = make_plan(seeds=list(range(5)), set={"pace": 0.02})
    running: set[str] = set()
    most = 0

    def watch(event: execution.Event) -> None:
        nonlocal most
        if event.kind == "started":
            running.add(event.run.name)
        elif event.kind == "done":
            running.remove(event.run.name)
        most = max(most, len(running))

    execute(toy, "runs", 2, watch, poll=0.02)
    assert most == 2


@pytest.mark.parametrize(
    ("visible", "settings", "wanted"),
    [
        ("0,2", {}, {"gpu 0", "gpu 2"}),  # a run has a GPU to itself
        ("3", {}, {"gpu 3"}),
        ("0,2", {"trainer.devices": 2}, {"gpu 0,2"}),  # the run itself spreads
        ("0,2", {"trainer.accelerator": "cpu"}, {"gpu 0,2"}),
        ("", {}, {"gpu"}),
    ],
)
def test_runs_side_by_side_have_a_gpu_each(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    settings: dict[str, object],
    wanted: set[str],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    toy = make_plan(seeds=[0, 1, 2, 3], set={"pace": 0.02, **settings})
    execute(toy, "runs", 2, poll=0.02)
    logs = [run.log.read_text() for run in toy.runs("runs")]
    lines = {line.strip() for log in logs for line in log.splitlines() if line.startswith("gpu")}
    assert lines == wanted


def test_an_error_of_the_viewer_leaves_no_child(here: Path) -> None:
    pids: list[int] = []
    start = execution.subprocess.Popen

    def remember(*args: object, **kwargs: object) -> object:
        process = start(*args, **kwargs)
        pids.append(process.pid)
        return process

    def broken(event: execution.Event) -> None:
        raise RuntimeError("no display")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution.subprocess, "Popen", remember)
        with pytest.raises(RuntimeError, match="no display"):
            execute(make_plan(set={"pace": 10}), "runs", 1, broken, poll=0.02)
    (pid,) = pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


SWEEP = """
import sys
sys.path[:0] = [{project!r}, {tests!r}]
import test_compare
from fedmuon_pl.compare import plan
plan.LAUNCHER = (sys.executable, {fake!r}, "fit")
plan._find_config = test_compare.find_here
sys.exit(test_compare.sweep_main(["mine", "--jobs", "2"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_the_children_and_the_same_command_goes_on(here: Path, number: int) -> None:
    (here / "configs/plan/mine.yaml").write_text(
        "experiments: [toy]\nalgorithms: [fedavg]\nseeds: [0, 1, 2]\n"
        "set: {trainer.max_epochs: 12, pace: 0.1}\n"
    )
    script = SWEEP.format(
        project=str(PROJECT), tests=str(PROJECT / "tests"), fake=str(here / "fake.py")
    )
    command = [sys.executable, "-c", script]
    sweep = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=here
    )
    tables_ = [here / f"runs/toy/fedavg-s{seed}/metrics.csv" for seed in (0, 1)]
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not all(
        path.exists() and len(path.read_text().splitlines()) > 3 for path in tables_
    ):
        time.sleep(0.02)
    sweep.send_signal(number)
    output, _ = sweep.communicate(timeout=30)
    assert sweep.returncode == 130, output
    assert output.count("Stopping: what runs ends with its round") == 1
    assert "Stopped: 0 of 3 runs are finished; the same command goes on." in output
    assert output.count("■ toy/fedavg-s") == 2
    assert not (here / "runs/toy/fedavg-s2").exists()
    sizes = [path.stat().st_size for path in tables_]
    time.sleep(0.3)
    assert [path.stat().st_size for path in tables_] == sizes  # nobody writes any more
    again = subprocess.run(command, capture_output=True, text=True, cwd=here, timeout=300)
    assert again.returncode == 0, again.stdout + again.stderr
    for path in (*tables_, here / "runs/toy/fedavg-s2/metrics.csv"):
        assert [row["round"] for row in rows_of(path.parent)] == [str(r) for r in range(12)]


def test_a_child_that_does_not_listen_is_killed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('deaf', flush=True); time.sleep(60)"
    )
    monkeypatch.setattr(plan, "LAUNCHER", (sys.executable, "-c", deaf))
    run = make_plan().runs("runs")[0]
    sent = []

    def interrupt(event: execution.Event) -> None:
        if event.kind == "started":
            deadline = time.monotonic() + 20
            while "deaf\n" not in run.log.read_text() and time.monotonic() < deadline:
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)
            sent.append(time.monotonic())

    before = signal.getsignal(signal.SIGINT)
    outcome = execute(make_plan(), "runs", 1, interrupt, grace=0.3, poll=0.02)[0]
    assert outcome.status == "stopped"
    assert 0.3 <= time.monotonic() - sent[0] < 10
    assert signal.getsignal(signal.SIGINT) is before


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


def test_progress_stands_a_file_that_is_being_written(tmp_path: Path) -> None:
    assert runs.progress(tmp_path) == (0, None)
    (tmp_path / "metrics.csv").write_text("round,val/acc,x\n0,0.5,1\n1,,1\n2,0.7")
    assert runs.progress(tmp_path) == (2, 0.5)


# -- tables -----------------------------------------------------------------------------------


def example(tmp_path: Path) -> list[runs.RunData]:
    """Two methods, whose numbers are easy to work out by hand."""
    for seed, last in enumerate((0.90, 0.92, 0.97)):
        write_run(tmp_path, "fedavg", seed, [0.5, 0.95, last])
        write_run(tmp_path, "fedmuon", seed, [0.91, 0.8, last + 0.01], mb=3.0)
    return runs.read_runs([tmp_path])[0]


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


# -- paired differences -----------------------------------------------------------------------


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


# -- choosing ---------------------------------------------------------------------------------


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


# -- figures ----------------------------------------------------------------------------------


def synthetic(root: Path, rounds: int = 50, seeds: int = 3) -> None:
    """Curves like those of the quickstart."""
    import numpy as np

    shape = {"fedmuon": (0.97, 5), "local_muon": (0.945, 7), "fedavg": (0.93, 12),
             "scaffold": (0.87, 14), "fedadam": (0.85, 16)}  # fmt: skip
    for i, (method, (top, tau)) in enumerate(shape.items()):
        for seed in range(seeds):
            rng = np.random.default_rng([i, seed])
            r = np.arange(1, rounds + 1)
            wobble = rng.normal(0, 0.012, rounds) * (1 + 2 * np.exp(-r / 10)) * (1 + i / 4)
            acc = 0.1 + (top - 0.1) * (1 - np.exp(-r / tau)) + wobble + rng.normal(0, 0.004)
            curve = np.clip(acc, 0.05, 0.995).round(4).tolist()
            mb = 4.9 if method in ("scaffold", "fedmuon") else 2.45
            write_run(root, method, seed, curve, test_shift=-0.008, mb=mb)


def test_a_curve_is_mean_and_band_over_rounds_that_all_seeds_have(tmp_path: Path) -> None:
    nan = math.nan
    for seed, values in enumerate(([0.1, nan, 0.3], [0.3, 0.9, 0.5], [0.2, 0.1, 1.0])):
        write_run(tmp_path, "fedavg", seed, values)
    read = runs.read_runs([tmp_path])[0]
    frame = figures.curve(read, "val/acc")
    assert frame["x"].tolist() == [1, 3]
    assert frame["mean"].tolist() == pytest.approx([0.2, 0.6])
    assert frame["low"].tolist() == [0.1, 0.3]
    assert frame["high"].tolist() == [0.3, 1.0]
    sd = figures.curve(read, "val/acc", "comm/total_mb", "sd")
    assert sd["x"].tolist() == [2.0, 6.0]
    assert sd["high"][2] - sd["mean"][2] == pytest.approx(statistics.stdev([0.3, 0.5, 1.0]))
    assert figures.curve(read, "no/such").empty


def test_pictures_are_written_and_not_blank(tmp_path: Path) -> None:
    from matplotlib.image import imread

    synthetic(tmp_path, rounds=6, seeds=2)
    read = runs.read_runs([tmp_path])[0]
    png, pdf, svg = figures.draw_curves(read, tmp_path / "out/curves")
    assert pdf.read_bytes().startswith(b"%PDF")
    assert "FedMuon</text>" in svg.read_text()  # text stays text
    picture = imread(png)[..., :3]
    assert picture.shape[1] > 1000
    for method in METHODS:
        colour = [int(style.method_style(method)[0][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(picture - colour).max(axis=-1) < 0.02).sum() > 100, method
    figures.draw_curves(read[:1], tmp_path / "out/one", band="sd", metric="loss")
    with pytest.raises(ValueError, match="no run has val/ppl or test/ppl"):
        figures.draw_curves(read, tmp_path / "out/none", metric="ppl")


def test_a_colour_belongs_to_a_name() -> None:
    fixed = {style.method_style(method) for method in METHODS}
    assert len(fixed) == len(METHODS)
    assert style.method_style("fedmuon") == ("#D55E00", "-")
    assert style.method_style("mine") == style.method_style("mine")
    assert style.method_style("mine")[1] != "-"
    many = [f"method{i}" for i in range(12)]
    styles = style.distinct_styles(many)
    assert len({repr(look) for look in styles.values()}) == len(many)
    assert all(styles[name][0] == style.method_style(name)[0] for name in many)


# -- commands ---------------------------------------------------------------------------------


def test_sweep_shows_and_writes_the_comparison(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "configs/plan/mine.yaml").write_text(
        "experiments: [toy, other]\nalgorithms: [fedavg, fedmuon]\nseeds: [0, 1]\n"
    )
    assert sweep_main(["mine", "--jobs", "2"]) == 0
    output = capsys.readouterr().out
    assert "✓ toy/fedmuon-s1" in output
    assert "round 4/4" in output
    assert "TensorBoard: tensorboard --logdir runs/other" in output
    assert "Tables and curves: runs/toy/compare" in output
    for experiment in ("toy", "other"):
        folder = here / "runs" / experiment / "compare"
        found = {path.name for path in folder.iterdir() if "tfevents" not in path.name}
        assert len(list(folder.glob("events.out.tfevents.*"))) == 1
        assert found == {
            *("table.md", "table.tex", "table.csv", "runs.csv", "pairs.csv"),
            *("curves.png", "curves.pdf", "curves.svg"),
        }
        assert "| FedMuon |" in (folder / "table.md").read_text()
    assert sweep_main(["mine"]) == 0
    assert capsys.readouterr().out.count("already finished") == 8


def test_sweep_without_a_plan_does_the_named_runs(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = here / "configs/tuned/toy/fedavg.yaml"
    tuned.parent.mkdir(parents=True)
    tuned.write_text("{}\n")
    args = ["--experiment", "toy", "--algorithm", "fedavg", "scaffold", "--seed", "4", "5"]
    assert sweep_main([*args, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert output.count("-c tuned/toy/fedavg") == 2  # where there is one
    assert "tuned/toy/scaffold" not in output
    assert sweep_main([*args, "--root", "out"]) == 0
    output = capsys.readouterr().out
    assert "✓ toy/scaffold-s5" in output
    assert "TensorBoard: tensorboard --logdir out/toy" in output
    assert not (here / "out/toy/compare").exists()  # the comparison is the plans'


def test_sweep_dry_run_starts_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "configs/plan/mine.yaml").write_text(
        "experiments: [toy]\nalgorithms: [fedavg]\nseeds: [0]\n"
    )
    assert sweep_main(["mine", "--dry-run", "--root", "elsewhere"]) == 0
    output = capsys.readouterr().out
    assert "start   toy/fedavg-s0" in output
    assert "--trainer.default_root_dir=elsewhere" in output
    assert not (here / "elsewhere").exists()


def test_sweep_over_a_grid_chooses_and_compares_only_the_chosen(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "configs/plan/tune.yaml").write_text(
        f"experiments: [toy]\nseeds: [7]\nroot: runs/tune\n"
        f"algorithms:\n  fedavg: {{grid: {{{LR}: [0.05, 0.1, 0.4]}}}}\n"
        f"  scaffold: {{grid: {{{LR}: [0.05, 0.1, 0.4]}}}}\n"
    )
    assert sweep_main(["tune", "--write-tuned", "configs/tuned"]) == 0
    output = capsys.readouterr().out
    assert "**lr 0.1**" in output
    tuned = yaml.safe_load((here / "configs/tuned/toy/scaffold.yaml").read_text())
    assert tuned == {"model": {"algorithm": {"init_args": {"lr": 0.1}}}}
    table = (here / "runs/tune/toy/compare/table.md").read_text()
    assert "| FedAvg " in table
    assert "lr=" not in table
    assert (here / "runs/tune/toy/compare/grid.md").exists()


def test_sweep_reports_failures_at_the_end(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "configs/plan/mine.yaml").write_text(
        "experiments: [toy]\nseeds: [0]\nalgorithms: {fedavg: {}, fedadam: {set: {fail: 1}}}\n"
    )
    assert sweep_main(["mine"]) == 1
    output = capsys.readouterr().out
    assert (
        "1 of 2 runs failed:\n  toy/fedadam-s0: fedmuon: round 0, client 3: the loss is nan"
        in output
    )
    assert "log: runs/toy/logs/fedadam-s0.log" in output
    assert "FedAvg" in output


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["nothing"], "fedmuon sweep: there is no plan 'nothing'"),
        (["mine", "--jobs", "0"], "fedmuon sweep: argument --jobs: should be a number from 1, not"),
        (["mine", "--job"], "fedmuon sweep: argument --jobs: expected one argument"),
        (["mine", "--seeds", "3"], "fedmuon sweep: unrecognized arguments: --seeds 3"),
        (
            ["mine", "--write-tuned", "x"],
            "fedmuon sweep: plan mine has no grid, so that --write-tu",
        ),
        ([], "fedmuon sweep: name a plan, or --experiment and --algorithm"),
        (["--experiment", "toy"], "fedmuon sweep: name a plan, or --experiment and --algorithm"),
        (["mine", "--algorithm", "fedavg"], "fedmuon sweep: name a plan, or --experiment and --al"),
        (["mine", "--set", "lr"], "fedmuon sweep: --set takes KEY=VALUE, such as trainer.max_"),
    ],
)
def test_a_bad_sweep_command_gets_one_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], args: list[str], sentence: str
) -> None:
    (here / "configs/plan/mine.yaml").write_text(
        "experiments: [toy]\nalgorithms: [fedavg]\nseeds: [0]\n"
    )
    assert sweep_main(args) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(sentence)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_compare_prints_writes_and_fills_a_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    synthetic(tmp_path, rounds=5, seeds=2)
    write_run(tmp_path, "fedprox", 0, [0.1], done=False)
    readme = tmp_path / "README.md"
    readme.write_text(
        "before\n<!-- results:a -->\nold\n<!-- /results -->\nbetween\n"
        "<!-- results:b -->\nkept\n<!-- /results -->\nafter\n"
    )
    args = [str(tmp_path / "toy"), "-o", str(tmp_path / "out"), "--target", "0.2"]
    assert compare_main([*args, "--markdown", str(readme), "--section", "a"]) == 0
    captured = capsys.readouterr()
    assert "toy: to val acc 0.2" in captured.out
    assert "fedprox-s0: not finished: it has 1 of 1 rounds" in captured.err
    assert (tmp_path / "out/curves.png").stat().st_size > 10_000
    text = readme.read_text()
    assert text.startswith("before\n<!-- results:a -->\n\n| method")
    assert "old" not in text
    assert text.endswith("between\n<!-- results:b -->\nkept\n<!-- /results -->\nafter\n")
    assert compare_main([*args, "--markdown", str(readme), "--section", "a"]) == 0
    assert readme.read_text() == text


@pytest.mark.parametrize("form", ["markdown", "latex", "csv"])
def test_standard_output_is_the_format_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    example(tmp_path)
    write_run(tmp_path, "fedprox", 0, [0.1], done=False)
    args = [str(tmp_path), "--format", form, "--against", "fedavg", "-o", str(tmp_path / "out")]
    assert compare_main(args) == 0
    captured = capsys.readouterr()
    assert "left out " in captured.err
    assert "Tables and curves: " in captured.err
    if form == "csv":
        assert len(list(csv.DictReader(captured.out.splitlines()))) == 3 - 1
        assert "Not tested (the same difference in every seed)" in captured.err
    elif form == "latex":
        assert captured.out.count(r"\begin{tabular}") == 2
        assert "% Not tested (the same difference in every seed): FedMuon and FedAvg." in (
            captured.out
        )
    else:
        assert "| FedMuon − FedAvg |" in captured.out  # noqa: RUF001
        assert "the same difference in every seed |" in captured.out
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"table.tex", "runs.csv", "pairs.csv"} <= written
    with (tmp_path / "out/runs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6


def test_settings_are_only_those_that_differ(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1])
    write_run(tmp_path, "fedavg", 1, [0.1], config={"data.batch_size": 64})
    write_run(tmp_path, "fedmuon", 0, [0.1], config={"model.algorithm.init_args": {"alpha": 0.5}})
    table = fairness.settings(runs.read_runs([tmp_path])[0])
    assert table.to_dict("index") == {
        "data.batch_size": {"fedavg": "32 | 64", "fedmuon": "32"},
        LR: {"fedavg": "0.1", "fedmuon": ""},
        "model.algorithm.init_args.alpha": {"fedavg": "", "fedmuon": "0.5"},
    }


def test_compare_says_what_is_not_fair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1])
    write_run(tmp_path, "fedmuon", 0, [0.2], config={"data.batch_size": 64})
    assert compare_main([str(tmp_path), "-o", str(tmp_path / "out")]) == 0
    note = "not the same data, cohort or budget, data.batch_size: 32 in fedavg; 64 in fedmuon"
    assert note in capsys.readouterr().out
    assert note in (tmp_path / "out/table.md").read_text()


def test_several_experiments_are_several_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1])
    write_run(tmp_path, "fedavg", 0, [0.2], experiment="other")
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:x -->\n<!-- /results -->\n")
    out = tmp_path / "out"
    args = [str(tmp_path), "-o", str(out), "--markdown", str(readme), "--section", "x"]
    assert compare_main(args) == 0
    assert (out / "toy/table.csv").exists()
    assert (out / "other/table.csv").exists()
    assert readme.read_text().index("### other") < readme.read_text().index("### toy")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["{}/nowhere"], "there is no folder"),
        (["{}/empty"], "there is no finished run in"),
        (["{}/r", "--target", "high"], "argument --target: should be a number, not 'high'"),
        (["{}/r", "--markdown", "x.md"], "--markdown FILE and --section NAME go together"),
        (["{}/r", "--markdown", "{}/a.md", "--section", "x"], "no line <!-- results:x -->"),
        (["{}/r", "--markdown", "{}/b.md", "--section", "x"], "no <!-- /results --> after"),
        (["{}/r", "--markdown", "{}/c.md", "--section", "x"], "c.md: No such file or directory"),
        (["{}/r", "--metric", "f1"], "no run has val/f1 or test/f1"),
        (["{}/r", "--against", "fedx"], "there is no method fedx among fedavg"),
        (["{}/r", "--format", "word"], "argument --format: invalid choice: 'word'"),
    ],
)
def test_a_bad_compare_command_gets_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], sentence: str
) -> None:
    write_run(tmp_path / "r", "fedavg", 0, [0.1])
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.md").write_text("nothing\n")
    (tmp_path / "b.md").write_text("<!-- results:x -->\n<!-- results:y -->\n<!-- /results -->\n")
    assert compare_main([arg.format(tmp_path) for arg in args]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("fedmuon compare: ")
    assert sentence in error


@pytest.mark.parametrize("main", [sweep_main, compare_main])
def test_help_has_an_example(main: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0  # type: ignore[operator]
    assert "examples:\n  fedmuon " in capsys.readouterr().out


def test_the_live_view_shows_what_runs(here: Path) -> None:
    from rich.console import Console

    planned = make_plan(seeds=[0, 1]).runs("runs")
    console = Console(force_terminal=True, width=100, record=True, file=io.StringIO())
    with SweepView(console, planned, "val/acc") as view:
        view(execution.Event("started", planned[0]))
        view(execution.Event("progress", planned[0], 2, 0.5))
        with console.capture() as capture:
            console.print(view._render())
        view(execution.Event("done", planned[0], 4, 0.75))
        view(execution.Event("failed", planned[1], 0, None, "error: [no] memory"))
    shown = capture.get()
    assert "toy/fedavg-s0" in shown
    assert "round 2/4" in shown
    assert "val/acc 0.5000" in shown
    assert "0 of 2 runs ended, about " in shown
    text = console.export_text()
    assert "round 4/4  val/acc 0.7500" in text
    assert "error: [no] memory" in text


def test_starting_needs_neither_torch_nor_pandas_nor_matplotlib() -> None:
    code = (
        "import sys, fedmuon_pl.compare.sweep_command, fedmuon_pl.compare.compare_command\n"
        "heavy = {'torch', 'pytorch_lightning', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT, check=False
    )
    assert done.returncode == 0, done.stderr
