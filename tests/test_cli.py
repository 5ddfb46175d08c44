"""The command line as a user meets it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fedmuon_pl.cli import main

DIGITS = ["-c", "base", "-c", "experiment/digits", "-c", "algorithm/fedavg"]
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(*args):
    """The exit status, also where argparse exits."""
    try:
        return main([str(a) for a in args])
    except SystemExit as stop:
        return stop.code


BAD = {
    "more clients than there are": (
        ["--server.clients_per_round=50"],
        "server.clients_per_round=50 must be between 1 and the 20 clients",
    ),
    "no client": (
        ["--server.clients_per_round=0.01"],
        "server.clients_per_round=0.01 of 20 clients rounds to no client",
    ),
    "fraction above 1": (["--server.clients_per_round=1.5"], "clients_per_round=1.5"),
    "alpha 0": (["--data.partition.init_args.alpha=0"], "alpha must be positive"),
    "alpha negative": (["--data.partition.init_args.alpha=-1"], "alpha must be positive"),
    "more clients than samples": (
        ["--data.clients=5000", "--data.partition=IID"],
        "data.partition: clients=5000 cannot each get one of the 1078 samples",
    ),
    "misspelt key": (
        ["--model.local_stepz=3"],
        "no option --model.local_stepz; did you mean --model.local_steps?",
    ),
    "misspelt argument": (["--model.algorithm.init_args.lrr=3"], "FedAvg has no argument lrr"),
    "missing argument": (["--data=Npz"], "fedmuon: Npz needs the argument path"),
    "unknown algorithm": (
        ["--model.algorithm=FedFoo"],
        "model.algorithm=FedFoo is none of FedACG, FedAdagrad, FedAdam, FedAdamW, FedAvg, ",
    ),
    "unknown data": (["--data=CIFAR"], "data=CIFAR is none of CIFAR10, CIFAR100, .*EMNIST, "),
    "unknown partition": (
        ["--data.init_args.partition=Dirichlet"],
        "partition=Dirichlet is none of .*ClassesPerClient, .*DirichletByClass, ",
    ),
    "unknown schedule": (
        ["--model.lr_schedule=Cos"],
        "lr_schedule=Cos is none of Constant, Cosine",
    ),
    "unknown network": (
        ["--model.task.init_args.network=LeNet9"],
        "network=LeNet9 is none of DeiTTiny6, LeNet, LoRA, MLP, ",
    ),
    "unknown task": (["--model.task=Classify"], "task=Classify is none of Classification, "),
    "not of digits": (
        ["--data.init_args.feature_skew=Rotation"],
        "SklearnDigits has no argument feature_skew",
    ),
    "momentum form": (
        ["-c", "algorithm/mime", "--model.algorithm.init_args.momentum_form=EMA"],
        "momentum_form",
    ),
    "unknown configuration": (["-c", "algorithm/fedfoo"], "'algorithm/fedfoo'; there are"),
    "no checkpoint to resume": (["--ckpt_path=last"], "there is no checkpoint runs"),
    "no such checkpoint": (["--ckpt_path=nowhere.ckpt"], "there is no checkpoint nowhere.ckpt"),
    "max_steps": (["--trainer.max_steps=5"], "trainer.max_steps=5 .* trainer.max_epochs"),
    "inside a round": (
        ["--trainer.val_check_interval=0.5"],
        "trainer.val_check_interval=0.5 .* trainer.check_val_every_n_epoch",
    ),
    "16-mixed": (["--trainer.precision=16-mixed"], "trainer.precision=16-mixed .* bf16-mixed"),
    "clipping": (["--trainer.gradient_clip_val=1"], r"gradient_clip_val=1(\.0)? .*client_clip"),
    "devices": (["--trainer.devices=0"], "trainer.devices=0 .* number of processes"),
    "nodes": (["--trainer.num_nodes=2"], "trainer.num_nodes=2: start the command on every node"),
    "strategy": (["--trainer.strategy=ddp"], "trainer.strategy=ddp "),
    "learning rate": (["--model.algorithm.init_args.lr=-1"], "lr=-1.0: must be positive"),
    "two rates": (
        ["--model.algorithm.init_args.optimizer.init_args.lr=0.5"],
        "learning rate is set by `lr`",
    ),
    "steps and epochs": (["--model.local_epochs=1"], "exactly one of model.local_steps"),
    "no steps": (["--model.local_steps=0"], "model.local_steps=0: must be at least 1"),
    "no rounds": (["--trainer.max_epochs=null"], "trainer.max_epochs=None .* rounds"),
    "server rate": (
        ["-c", "algorithm/fedadam", "--model.algorithm.init_args.tau=0"],
        "FedAdam: .*tau",
    ),
    "server momentum": (
        ["-c", "algorithm/fedavgm", "--model.algorithm.init_args.server_momentum=-1"],
        "server_momentum=-1.0: must be in",
    ),
    "momentum": (
        ["-c", "algorithm/fedmuon", "--model.algorithm.init_args.beta=1.5"],
        "FedMuon: .*momentum",
    ),
    "pattern": (
        ["-c", "algorithm/fedmuon", "--model.algorithm.init_args.rest_patterns=[hed]"],
        "FedMuon: .*hed",
    ),
    "classes": (
        ["--model.task.init_args.num_classes=12"],
        "num_classes=12, but the data have 10",
    ),
    "chosen on test data": (
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=test/acc"],
        "EarlyStopping monitors test/acc: nothing is chosen on test data",
    ),
    "negative seed": (["--seed_everything=-1"], "seed_everything: .*-1"),
    "no threads": (["--threads=0"], "threads=0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(name, capsys, tmp_path):
    args, sentence = BAD[name]
    assert call("fit", *DIGITS, *QUIET, *args) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    said = [line for line in lines if line.startswith("fedmuon: ")]
    assert len(said) == 1
    assert re.search(sentence, said[0])
    assert "Traceback" not in captured.err
    assert not list(tmp_path.rglob("metrics.csv"))


def test_divergence_names_round_client_and_step(capsys, tmp_path):
    assert call("fit", *DIGITS, *QUIET, "--model.algorithm.init_args.lr=1e30") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.fullmatch(
        r"fedmuon: round 0, client \d+: the training loss became \w+ at local step \d of 5; lower "
        r"the learning rate, or set server.on_nonfinite=drop to leave such updates out",
        said,
    )
    # Nothing was finished, so that the next try may use the same folder.
    assert call("fit", *DIGITS, *QUIET, "--trainer.max_epochs=1") == 0


def test_fit_test_validate(capsys):
    assert call("fit", *DIGITS, *QUIET, "--trainer.max_epochs=2") == 0
    capsys.readouterr()
    assert call("fit", *DIGITS, *QUIET, "--trainer.max_epochs=2") == 2
    assert "already holds a run: resume it with --ckpt_path last" in capsys.readouterr().err
    assert call("test", *DIGITS, *QUIET, "--ckpt_path=auto") == 2
    assert "there is no checkpoint auto" in capsys.readouterr().err
    for command in ("validate", "test"):
        assert call(command, *DIGITS, *QUIET) == 2
        assert f"{command} needs --ckpt_path" in capsys.readouterr().err
        assert call(command, *DIGITS, *QUIET, "--ckpt_path=best") == 0
        assert "acc" in capsys.readouterr().out
    # The saved configuration is enough to do the run again.
    saved = Path("runs/digits/fedavg-s0/config.yaml")
    assert call("fit", "-c", saved, *QUIET, "--trainer.default_root_dir=again") == 0
    first, second = (
        [line.rsplit(",", 2)[0] for line in Path(p).read_text().splitlines()]
        for p in ("runs/digits/fedavg-s0/metrics.csv", "again/digits/fedavg-s0/metrics.csv")
    )
    assert first == second


def test_saved_configuration_says_what_was_resolved():
    assert call("fit", *DIGITS, *QUIET, "--trainer.max_epochs=1", "--seed_everything=3") == 0
    config = yaml.safe_load(Path("runs/digits/fedavg-s3/config.yaml").read_text())
    assert config["seed_everything"] == 3
    assert config["model"]["clients_at_once"] == 1
    assert config["threads"] == 1
    assert config["model"]["algorithm"]["class_path"].endswith("FedAvg")


def test_print_config_composes_without_running(capsys, tmp_path):
    assert call("fit", *DIGITS, "--print_config") == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["trainer"]["max_epochs"] == 20
    assert config["model"]["algorithm"]["init_args"]["lr"] == 0.1
    assert not list(tmp_path.iterdir())


def test_a_path_wins_over_a_short_name(tmp_path):
    # ./algorithm/fedavg is a file of that very name; ./configs comes before the package's.
    (tmp_path / "configs" / "algorithm").mkdir(parents=True)
    (tmp_path / "algorithm").mkdir()
    text = (
        "method: {}\nmodel: {{algorithm: {{class_path: FedAvg, init_args: {{lr: 0.3, "
        "optimizer: torch.optim.SGD, server: null}}}}}}\n"
    )
    (tmp_path / "configs" / "algorithm" / "fedavg.yaml").write_text(text.format("local"))
    args = [*DIGITS, *QUIET, "--trainer.max_epochs=1"]
    assert call("fit", *args) == 0
    assert Path("runs/digits/local-s0").is_dir()
    (tmp_path / "algorithm" / "fedavg").write_text(text.format("path"))
    assert call("fit", *args) == 0
    assert Path("runs/digits/path-s0").is_dir()


@pytest.mark.parametrize("command", ["fit", "validate", "test", "partition", "sweep", "compare"])
def test_help(command, capsys):
    assert call(command, "--help") == 0
    assert "usage" in capsys.readouterr().out.lower()


def test_help_of_the_command_itself(capsys):
    assert call("--help") == 0
    text = capsys.readouterr().out
    for command in ("fit", "validate", "test", "partition", "sweep", "compare"):
        assert re.search(rf"^  {command} ", text, re.M)
    assert call("fitt") == 2
    assert "no command 'fitt'" in capsys.readouterr().err
    assert call("--version") == 0


def test_help_explains_a_method(capsys):
    assert call("fit", "--model.algorithm.help=FedMuon") == 0
    text = capsys.readouterr().out
    assert "Weight of the shared direction" in text


def test_partition_shows_table_and_picture(capsys, tmp_path):
    args = ["-c", "base", "-c", "experiment/digits", "--rows", "3"]
    assert call("partition", *args) == 0
    out = capsys.readouterr().out
    assert "20 clients, 0 without data; 1,078 of 1,078 samples used" in " ".join(out.split())
    assert (tmp_path / "runs/digits/partition.png").stat().st_size > 10_000
    assert call("partition", *args, "--data.clients=0") == 2
    assert capsys.readouterr().err == "fedmuon: data.clients=0: must be at least 1\n"


COLLECTED = """
import atexit, gc, sys
from unittest import mock
import fedmuon_pl.training

def end():
    print("at the end", gc.get_freeze_count() > 100_000, flush=True)

def train(args):
    print("in the command", gc.isenabled(), gc.get_freeze_count() > 100_000, flush=True)
    gc.unfreeze()  # as after a run in several processes
    return 3

atexit.register(end)
with mock.patch("fedmuon_pl.training.train_main", train):
    from fedmuon_pl.cli import command, main
    main(["fit"]), print("in a process of the user's", gc.get_freeze_count() > 0)
    sys.exit(command(["fit"]))
"""


def test_what_is_imported_is_not_collected():
    """Neither while the command runs nor at the end, and only in a process of its own."""
    words = [sys.executable, "-c", COLLECTED]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == [
        "in the command True False",
        "in a process of the user's False",
        "in the command True True",
        "at the end True",
    ]
