"""The execution of plans; the process that is started is ``fake_runs.FAKE``."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from fake_runs import LR, PROJECT, make_plan, rows_of, write_run

from fedmuon_pl.compare import execute as execution
from fedmuon_pl.compare import plan
from fedmuon_pl.compare.execute import execute
from fedmuon_pl.compare.inspection import inspect
from fedmuon_pl.compare.plan_file import parse_plan
from fedmuon_pl.compare.sweep_command import sweep_main
from fedmuon_pl.hardware import gpus


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
OURS = {"data.class_path": "fedmuon_pl.data.fashion.FashionMNIST"}
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
        # Of our own classes it is known what an argument is that a run's version had not.
        (OURS, {}, {**OURS, "data.init_args.verify": True}, ""),
        (OURS, {}, {**OURS, "data.init_args.verify": False}, "verify is not set there and false"),
        (OURS, {}, {**OURS, "data.init_args.val_size": 5000}, ""),
        (OURS, {}, {**OURS, "data.init_args.val_size": 100}, "val_size is not set there and 100"),
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


@pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").is_dir(), reason="they are seen there")
def test_gpus_are_found_where_only_the_tool_of_the_driver_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []
    tool.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho 'GPU 1: A (UUID: y)'\n")
    tool.chmod(0o755)
    assert gpus() == ["0", "1"]
    tool.write_text("#!/bin/sh\necho 'no driver'\nexit 9\n")
    assert gpus() == []


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
import fake_runs
from fedmuon_pl.compare import plan
from fedmuon_pl.compare.sweep_command import sweep_main
plan.LAUNCHER = (sys.executable, {fake!r}, "fit")
plan._find_config = fake_runs.find_here
sys.exit(sweep_main(["mine", "--jobs", "2"]))
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


# -- forks of one process that has imported everything ------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every run is a new process")
@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="not beside GPUs")
def test_warm_runs_are_what_new_processes_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedmuon_pl.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from fedmuon_pl import FedAvg\n\n\nclass Mine(FedAvg):\n"
        "    def __init__(self, lr: float):\n        super().__init__(lr)\n"
        "        if lr == 7:\n            raise ValueError('seven is no rate')\n"
    )
    (tmp_path / "configs/algorithm").mkdir(parents=True)
    (tmp_path / "configs/algorithm/mine.yaml").write_text(
        "model:\n  algorithm:\n    class_path: mine.Mine\n    init_args: {lr: 0.1}\n"
    )
    lr = {"model.algorithm.init_args.lr": 7}
    content = {
        "name": "warm",
        "experiments": ["digits"],
        "algorithms": {"fedmuon": None, "mine": None, "bad": {"config": "mine", "set": lr}},
        "seeds": [3],
        "set": {"trainer.max_epochs": 2},
    }
    started: list[str] = []
    original = execution.Starter.start

    def start(self: execution.Starter, args: list[str], *rest: object) -> object:
        started.append(args[0])
        return original(self, args, *rest)

    monkeypatch.setattr(execution.Starter, "start", start)
    outcomes = {o.run.algorithm: o for o in execute(parse_plan(content), "runs", jobs=2)}
    assert started == ["fit"] * 3
    assert {name: o.status for name, o in outcomes.items()} == {
        "fedmuon": "done", "mine": "done", "bad": "failed",
    }  # fmt: skip
    assert "seven is no rate" in outcomes["bad"].reason
    records = json.loads((tmp_path / "runs/digits/fedmuon-s3/environment.json").read_text())
    assert records[0]["command"][:2] == ["__main__.py", "fit"]
    assert records[0]["planned"]["server.clients_per_round"] == 5
    # The same in this process.
    words = ["-c", "base", "-c", "experiment/digits", "-c", "algorithm/fedmuon"]
    flags = ["--seed_everything=3", "--trainer.max_epochs=2", "--threads=1"]
    assert main(["fit", *words, *flags, "--trainer.default_root_dir=here"]) == 0
    warm, here = (
        [
            {k: v for k, v in row.items() if not k.startswith("time/")}
            for row in rows_of(tmp_path / root / "digits/fedmuon-s3")
        ]
        for root in ("runs", "here")
    )
    assert warm == here


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every run is a new process")
def test_the_process_that_starts_runs_can_be_lost(tmp_path: Path) -> None:
    env = dict(os.environ, OMP_NUM_THREADS="1")
    with (tmp_path / "log").open("ab") as log, execution.Starter({}) as starter:
        run = starter.start(["--version"], log, env)
        assert run.wait() == 0
        assert re.fullmatch(r"\d+\.\d+\.\d+\n", (tmp_path / "log").read_text())
        assert starter._process is not None
        starter._process.kill()
        starter._process.wait()
        with pytest.raises(OSError, match=r"process that starts runs has ended|Broken pipe"):
            starter.start(["--version"], log, env)
