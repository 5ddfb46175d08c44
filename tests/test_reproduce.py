"""Reproductions: what they check, how long they say they take, and the table at their end."""

import dataclasses
import json
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from fedmuon_pl import CIFAR100, IID, FashionMNIST, TinyImageNet
from fedmuon_pl.cli import main
from fedmuon_pl.compare import reproduce_command
from fedmuon_pl.compare.cost import estimate, estimate_apart
from fedmuon_pl.compare.execute import Outcome
from fedmuon_pl.compare.reproduction import beside, build, load_reproduction
from fedmuon_pl.compare.runs import RunData
from fedmuon_pl.data.generate import GENERATORS, generate
from fedmuon_pl.errors import ConfigError

PROJECT = Path(__file__).resolve().parent.parent
SHIPPED = sorted(path.stem for path in (PROJECT / "configs" / "reproduce").glob("*.yaml"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Never the user's own."""
    monkeypatch.setenv("FEDMUON_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_full_target_is_as_published(name):
    """Parameter count and settings; and everything that a run needs can be built."""
    reproduction = load_reproduction(name)
    assert reproduction.check() > 0
    for case in reproduction.cases:
        runs = reproduction.case_plan(case).runs()
        assert len(runs) == len(reproduction.plan.entries) * 3
        for entry in reproduction.plan.entries:
            mine = [run.settings for run in runs if run.method == entry.label]
            assert mine == [mine[0]] * 3  # seeds are no setting: one is built for all
            build("algorithm", mine[0])
        assert all(run.settings["seed_everything"] == 0 for run in runs)  # the flag wins over it
        assert {run.seed for run in runs} == {0, 1, 2}
        x = torch.zeros(2, *reproduction.input_shape, device="meta")
        network = build("network", runs[0].settings, "meta")
        classes = runs[0].settings["model.task.init_args.num_classes"]
        assert network(x).shape == (2, classes)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("network", {"parameters": 5, "input": [1, 28, 28], "test_samples": 9}, "has 61,706 weig"),
        ("expected", {"model.local_steps": 6}, "has model.local_steps=5, and 6 is expected"),
        ("cases", {"a": {"published": {}}}, "case a: experiment is missing"),
        (
            "cases",
            {"a": {"experiment": "fashion_lmo", "published": {"fedprox": 3}}},
            "has a number for fedprox, which the plan does not run",
        ),
        (
            "cases",
            {"a": {"experiment": "fashion_lmo", "published": {"fedmuon": "90"}}},
            r"fedmuon should be \[mean, spread\] in percent, not 90",
        ),
        (
            "cases",
            {"a": {"experiment": "fashion_lmo", "notes": {"fedprox": "x"}}},
            "case a has a note on fedprox, which the plan does not run",
        ),
        ("cases", {}, "cases should not be empty"),
        ("sauce", "", "unknown key 'sauce'; allowed are title, source"),
        ("notes", {"fedprox": "x"}, "a note on fedprox, which the plan does not run"),
        ("comparable", "no", "comparable should be true or false, not 'no'"),
        ("source", None, "source is missing"),
    ],
)
def test_what_a_reproduction_must_not_say(tmp_path, key, value, sentence):
    content = yaml.safe_load((PROJECT / "configs" / "reproduce" / "lmo.yaml").read_text())
    content[key] = value
    if value is None:
        del content[key]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=sentence):
        load_reproduction(path).check()


@pytest.mark.parametrize("name", [name for name in SHIPPED if not name.startswith("lmo")])
def test_baselines_decay_as_much_as_the_papers(name):
    """FedAvg's 0.001 for every client that makes SGD steps, 0.01 for AdamW and Muon."""
    reproduction = load_reproduction(name)
    for run in reproduction.case_plan(reproduction.cases[0], seeds=[0]).runs():
        decays = {v for key, v in run.settings.items() if key.endswith("weight_decay")}
        adaptive = "muon" in run.method or "adamw" in run.method
        no_decay = run.method == "fedlada"  # by its paper
        assert decays == (set() if no_decay else {0.01 if adaptive else 0.001}), run.method


def written_run(folder, method, seed, rate, acc):
    return RunData(
        folder=folder,
        experiment="e",
        method=method,
        seed=seed,
        config={"model.algorithm.init_args.lr": rate},
        metrics=pd.DataFrame({"round": [0, 1], "val/acc": [0.9, 0.8], "test/acc": [0.1, acc]}),
        done=True,
    )


def test_a_table_says_what_failed_and_what_differs(tmp_path):
    reproduction = dataclasses.replace(load_reproduction("lmo"), unlike=["scaffold", "fedavg_adam"])
    case, other = reproduction.cases
    runs = [
        written_run(tmp_path, "fedavg_momentum", 0, 0.1, 0.87),
        written_run(tmp_path, "fedavg_momentum", 1, 0.1, 0.89),
        written_run(tmp_path, "fedmuon_lmo", 0, 0.01, 0.8),
        written_run(tmp_path, "scaffold", 0, 0.01, 0.82),
    ]
    nan = "round 3, client 1: the training loss became nan"
    failed = {"fedmuon_lmo": {1: nan}, "fedavg_adam": {0: nan, 1: nan}}
    grid, notes = beside(reproduction, case, runs, failed)
    rows = {row[0]: list(row[1:]) for row in grid.rows}
    heads = ["method", "lr", "seeds", "ours", "chosen round", "published", "difference"]
    assert grid.heads == heads
    # Validation would have chosen the first round.
    momentum = ["0.1", "2", "88.00 ± 1.41", "10.00 ± 0.00", "86.00 ± 1.00", "+2.00"]
    assert rows["FedAvg (momentum)"] == momentum
    # The survivor alone is no mean to compare, and a method that always fails keeps its row.
    assert rows["FedMuon-LMO"] == ["0.01", "1 of 2", "80.00", "10.00", "89.50 ± 0.50", "-"]
    assert rows["FedAvg (Adam)"] == ["-", "0 of 2", "-", "-", "79.70 ± 1.00", "-"]
    # The published number is of another variant.
    assert rows["SCAFFOLD"] == ["0.01", "1", "82.00", "10.00", "80.30 ± 1.50", "-"]
    assert f"FedMuon-LMO, seed 1, did not finish: {nan}" in notes
    assert sum("FedAvg (Adam), seed" in note for note in notes) == 2
    assert any(note.startswith("SCAFFOLD: plain SGD steps") for note in notes)
    # Some of it in one column only.
    there = "FedAvg (momentum): at the second best of its rates, as the best diverged"
    said = {
        c: [note[: len(there)] for note in beside(reproduction, c, runs)[1]] for c in (case, other)
    }
    assert there not in said[case]
    assert there in said[other]
    # Shorter runs are not compared.
    grid, _ = beside(reproduction, case, runs, failed, "Shorter.")
    assert grid.heads == heads[:-1]
    assert grid.caption.startswith("Shorter. Test accuracy")
    # Numbers of another task are shown, and never subtracted.
    mini = load_reproduction("mini")
    grid, _ = beside(mini, mini.cases[0], [written_run(tmp_path, "fedavg", 0, 0.1, 0.8)])
    assert grid.heads[-1] == "published"
    assert {len(row) for row in grid.rows} == {6}


def test_what_is_not_in_the_published_table_and_not_tuned_is_said(tmp_path):
    reproduction = load_reproduction("cifar100-resnet18")
    runs = [written_run(tmp_path, name, 0, 0.1, 0.5) for name in ("fedavg", "feddyn", "fedcm")]
    _, notes = beside(reproduction, reproduction.cases[0], runs)
    assert "not in the published table, and at one rate, not tuned: FedCM, FedDyn" in notes
    assert not [n for n in beside(load_reproduction("lmo"), case_of("lmo"), [])[1] if "tuned:" in n]


def case_of(name):
    return load_reproduction(name).cases[0]


def test_rounds_are_put_so_that_the_last_is_evaluated():
    reproduction = load_reproduction("cifar100-resnet18")
    case = reproduction.cases[0]
    assert reproduction.case_plan(case).runs()[0].settings["trainer.check_val_every_n_epoch"] == 10
    for rounds, every in ((25, 5), (20, 10), (7, 7), (13, 1)):
        run = reproduction.case_plan(case, rounds=rounds).runs()[0]
        assert run.rounds == run.settings["trainer.max_epochs"] == rounds
        assert run.settings["trainer.check_val_every_n_epoch"] == every
        assert f"--trainer.max_epochs={rounds}" in run.command
        evaluated = f"--trainer.check_val_every_n_epoch={every}" in run.command
        assert evaluated is (every != 10)
    with pytest.raises(ConfigError, match="so that its last round would not be evaluated"):
        reproduction.case_plan(case, set={"trainer.max_epochs": 25}).runs()


def test_the_whole_path_at_toy_size(tmp_path, capsys, monkeypatch, forked):
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "lmo", "--smoke", "--root", "r", "-o", "out"]
    assert main([*words, "--only", "fedavg_momentum", "fedmuon", "--jobs", "2"]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"61,706 weights and \d+ settings of the full runs are as they should be", shown
    )
    assert re.search(r"4 runs: about .* and at most 0\.\d GB of disk in r/lmo-smoke", shown)
    page = (tmp_path / "out" / "lmo-smoke.md").read_text()
    assert page.count("these numbers say nothing") == 3  # above, and with both tables
    assert re.search(
        r"\| FedAvg \(momentum\) +\| +0.1 \| +1 \| +\S+ \| +\S+ \| 86.00 ± 1.00 \|\n", page
    ), page
    # A published number that was not run again still stands there; a method without either not.
    assert re.search(r"\| FedMuon-LMO +\| +- \| +0 \| +- \| +- \| 89.50 ± 0.50 \|\n", page)
    assert re.search(r"\| FedMuon +\| +0.0032 \| +1 \| +\d+\.\d+ \| +\d+\.\d+ \| +- \|\n", page)
    assert "Made by `fedmuon reproduce lmo --smoke` at" in page
    latex = (tmp_path / "out" / "lmo-smoke.tex").read_text()
    assert r"\toprule" in latex
    assert "these numbers say nothing" in latex
    for case in ("dir0.1", "dir10"):
        assert (tmp_path / "out" / f"lmo-smoke-{case}.png").is_file()
        assert f"lmo-smoke-{case}.png" in page
    # Once more: everything is finished, nothing runs, the same page.

    def written():
        return sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "r").rglob("metrics.csv"))

    before = written()
    assert len(before) == 4
    assert main([*words, "--only", "fedavg_momentum", "fedmuon"]) == 0
    assert before == sorted(
        (p, p.stat().st_mtime_ns) for p in (tmp_path / "r").rglob("metrics.csv")
    )
    assert (tmp_path / "out" / "lmo-smoke.md").read_text() == page
    # One column and one method: what was finished before stays on the page.
    assert main([*words, "--only", "fedmuon", "--case", "dir10"]) == 0
    assert (tmp_path / "out" / "lmo-smoke.md").read_text() == page
    # So does a seed that only another call had, and a stopped call writes what there is.
    one = [*words, "--only", "fedmuon", "--case", "dir10"]
    assert main([*one, "--seed", "7"]) == 0
    more = (tmp_path / "out" / "lmo-smoke.md").read_text()
    assert re.search(r"\| FedMuon +\| +0.0032 \| +2 \|", more)
    assert main(one) == 0
    assert (tmp_path / "out" / "lmo-smoke.md").read_text() == more
    monkeypatch.setattr(
        reproduce_command,
        "execute",
        lambda plan, root, *_: [Outcome(run, "waiting") for run in plan.runs(root)],
    )
    (tmp_path / "out" / "lmo-smoke.md").unlink()
    assert main(words) == 130
    assert (tmp_path / "out" / "lmo-smoke.md").read_text() == more


def test_data_that_are_missing_are_said_once_and_nothing_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "cifar100-resnet18", "--data", "nowhere", "-o", "out"]) == 2
    said = capsys.readouterr().err
    assert re.search("reproduction cifar100-resnet18: .*nowhere.*cifar-100-python", said), said
    assert said.count("\n") == 1
    assert "or add --download (make: DOWNLOAD=1)" in said
    assert not list(tmp_path.iterdir())


def test_data_are_fetched_before_anything_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def fetch(*args, **kwargs):
        asked.append(kwargs["download"])
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.CIFAR100", fetch)
    assert main(["reproduce", "cifar100-resnet18", "--download", "--data", "x"]) == 2
    assert asked == [True]
    assert "CIFAR100 could not be fetched: no network" in capsys.readouterr().err
    assert main(["reproduce", "tiny-imagenet-swin", "--download"]) == 2
    assert "its data cannot be fetched" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing"], "there is no reproduction 'nothing': .* there are reproduce/cifar100"),
        (["lmo", "--case", "dir3"], "has no case dir3; it has dir0.1, dir10"),
        (["lmo", "--only", "sgd"], "has no method sgd; it has fedavg_momentum, "),
        (["lmo", "--parity"], "reproduction lmo has no parity settings"),
        (["lmo", "--rounds", "0"], "--rounds: should be a number from 1, not '0'"),
    ],
)
def test_a_bad_command_gets_one_sentence(capsys, tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *words]) == 2
    said = capsys.readouterr().err
    assert re.search(sentence, said), said
    assert said.count("\n") == 1


def test_what_no_method_takes_gets_one_sentence():
    settings = {"model.algorithm.class_path": "FedAvg", "model.algorithm.init_args.mu": 1}
    with pytest.raises(
        ConfigError, match=r"^model\.algorithm cannot be made of .* 'mu' is not acc"
    ):
        build("algorithm", settings)


def test_the_estimate_counts_what_clients_keep(tmp_path):
    """At most two states of each of 16 clients and 11 rounds of 8; a state is as large as x."""
    reproduction = load_reproduction("lmo-public")
    plan = reproduction.case_plan(reproduction.cases[0], seeds=[0])
    runs = {run.method: run for run in plan.runs(tmp_path)}
    found = {
        label: estimate([run], reproduction.input_shape, 0, 1).bytes for label, run in runs.items()
    }
    states = (2 * 16 + 11 * 8) * 4 * 61706
    assert found["fedavg_momentum"] == found["local_muon"] == found["fedmuon_lmo"]
    assert found["scaffold"] == found["fedavg_momentum"]
    fixed = found["fedavg_momentum"] - states
    assert fixed == 2 * 3 * 4 * 61706  # two checkpoints
    numbers = (2 * 16 + 11 * 8) * 2 * 8  # the weights of both moments
    assert found["fedavg_adam"] == fixed + 2 * states + numbers


def test_the_estimate_counts_what_is_left(tmp_path):
    reproduction = load_reproduction("lmo")
    case = reproduction.cases[0]

    def cost(**changes):
        plan = reproduction.case_plan(case, **changes)
        return estimate(plan.runs(tmp_path), reproduction.input_shape, 0, 1)

    entries = {entry.label: entry for entry in reproduction.plan.entries}
    one = cost(seeds=[0], entries=[entries["fedavg_momentum"]])

    def rest(cost, evaluations):  # of 5,000 validation images in batches of 32, and the start
        return evaluations * 5000 / 32 * cost.forward + 5

    # 1,000 rounds, 8 clients, 5 steps each, 100 evaluations.
    assert one.seconds == pytest.approx(40_000 * one.step + rest(one, 100))
    muon = cost(seeds=[0, 1], entries=[entries["local_muon"]])
    steps = 80_000 * (muon.step + muon.orthogonalise)
    assert muon.seconds == pytest.approx(steps + 2 * rest(muon, 100))
    # Two checkpoints a run; SCAFFOLD's variates of 16 clients twice, and of 11 rounds with 8 each.
    scaffold = cost(seeds=[0], entries=[entries["scaffold"]])
    assert scaffold.bytes - one.bytes == (2 * 16 + 11 * 8) * 4 * 61706
    run = reproduction.case_plan(case, seeds=[0], entries=[entries["scaffold"]]).runs(tmp_path)[0]
    run.folder.mkdir(parents=True)
    rows = "".join(f"{r},0.5\n" for r in range(750))
    (run.folder / "metrics.csv").write_text("round,val/acc\n" + rows)
    left = cost(seeds=[0], entries=[entries["scaffold"]])
    assert left.seconds == pytest.approx(10_000 * left.step + rest(left, 25))


def test_a_gpu_is_left_to_the_runs_after_the_estimate(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # not so in the other process
    reproduction = load_reproduction("mini")
    runs = reproduction.case_plan(reproduction.cases[0], seeds=[0]).runs(tmp_path)
    cost = estimate_apart(runs[:1], reproduction.input_shape, 10, 1)
    assert cost.device == "cpu"
    assert cost.seconds > 0


@pytest.mark.parametrize(
    ("kind", "shape", "classes"),
    [
        (CIFAR100, (3, 32, 32), 100),
        (TinyImageNet, (3, 64, 64), 200),
        (FashionMNIST, (1, 28, 28), 10),
    ],
)
def test_generated_files_are_read_by_the_real_loader(tmp_path, kind, shape, classes):
    assert set(GENERATORS) == {"CIFAR100", "TinyImageNet", "FashionMNIST"}
    generate(kind.__name__, tmp_path)
    verify = {} if kind is TinyImageNet else {"verify": False}
    data = kind(clients=2, partition=IID(), root=str(tmp_path), **verify)
    train, test = data.read()
    assert train.inputs.shape[1:] == test.inputs.shape[1:] == shape
    assert set(train.labels.tolist()) == set(test.labels.tolist()) == set(range(classes))
    assert train.num_classes == classes
    if verify:  # they are not the known files, and are taken for them only when told to
        with pytest.raises(ConfigError):
            kind(clients=2, partition=IID(), root=str(tmp_path)).read()
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    generate(kind.__name__, tmp_path)
    assert stamps == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}


def test_test_images_are_cropped_only_on_demand(tmp_path):
    generate("FashionMNIST", tmp_path)

    def test_set(**kwargs):
        data = FashionMNIST(
            clients=2, partition=IID(), root=str(tmp_path), verify=False, val_size=10, **kwargs
        )
        data.setup()
        return data.splits, data.describe()

    plain, _ = test_set()
    cropped, said = test_set(test_crop=4)
    again, _ = test_set(test_crop=4)
    assert said["test_crop"] == 4
    assert torch.equal(cropped.test[0], again.test[0])
    assert torch.equal(cropped.val[0], plain.val[0])
    assert torch.equal(cropped.train[0], plain.train[0])
    padded = torch.nn.functional.pad(plain.test[0], (4, 4, 4, 4))
    moved = 0
    for one, wide in zip(cropped.test[0], padded, strict=True):
        windows = wide.unfold(1, 28, 1).unfold(2, 28, 1)  # (1, 9, 9, 28, 28)
        same = (windows == one[:, None, None]).all(-1).all(-1).nonzero()
        assert len(same) >= 1
        moved += same[0, 1:].tolist() != [4, 4]
    assert moved > 80  # of 100; one in 81 stays
    with pytest.raises(ConfigError, match=r"data\.test_crop=-1: must not be negative"):
        test_set(test_crop=-1)


def test_the_environment_of_every_run_is_named(tmp_path):
    from fedmuon_pl.compare.reproduce_command import _parser, _record

    options = _parser().parse_args(["lmo", "--seed", "1", "2", "--rounds", "7"])
    folders = []
    for i, commit in enumerate(("a" * 40, "b" * 40 + "+", None, "a" * 40)):
        folder = tmp_path / str(i)
        folder.mkdir()
        start = {
            "commit": commit,
            "processor": "P",
            "cores": 2,
            "cuda": ["G"],
            "packages": {"torch": "2"},
        }
        (folder / "environment.json").write_text(json.dumps([start]))
        folders.append(folder)
    said = _record(folders, options)
    assert f"at commit {'a' * 40}, {'b' * 40}+, unknown on P, 2 cores, G, torch 2." in said
    assert "`fedmuon reproduce lmo --rounds 7`" in said
