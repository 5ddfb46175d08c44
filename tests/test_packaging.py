"""What a user installs: the wheel with its configurations, and what the README says."""

import gc
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import reference
import torch
from federation import federate
from test_methods import DATA, GRADIENT, X0, X0Net

from fedmuon_pl.cli import main

PROJECT = Path(__file__).resolve().parents[1]
README = (PROJECT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_wheel_carries_the_configurations(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    subprocess.run([*build, PROJECT], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for path in (PROJECT / "configs").rglob("*.yaml"):
        assert f"fedmuon_pl/configs/{path.relative_to(PROJECT / 'configs')}" in names
    assert "fedmuon_pl/py.typed" in names
    for path in (PROJECT / "fedmuon_pl/compare/page").iterdir():  # the report's page, its licence
        assert f"fedmuon_pl/compare/page/{path.name}" in names
    assert not any(name.startswith(("tests", "configs")) for name in names)
    # A clean environment that has the dependencies, but not this project, and an empty folder.
    venv, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    (site,) = (venv / "lib").glob("python*/site-packages")
    torch_home = Path(torch.__file__).parents[1]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    subprocess.run([*pip, "--quiet", "--target", site, wheel], check=True, capture_output=True)
    # A path added by code, unlike by PYTHONPATH, comes after the wheel; its .pth files stay unread.
    (site / "dependencies.pth").write_text(f"{torch_home}\n")
    run = [python, "-m", "fedmuon_pl", "fit", "-c", "base", "-c", "experiment/mnist5k"]
    flags = ["-c", "algorithm/fedmuon", "--trainer.max_epochs=1", "--threads=1"]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*run, *flags], cwd=empty, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (empty / "runs/mnist5k/fedmuon-s0/done").is_file()
    where = "import fedmuon_pl; print(fedmuon_pl.__file__)"
    file = subprocess.run(
        [python, "-c", where], cwd=empty, env=env, check=True, capture_output=True, text=True
    ).stdout
    assert str(site) in file


def test_readme_quickstart_makes_table_picture_and_events(tmp_path, monkeypatch, capsys, forked):
    commands = [line.split("#")[0].split() for line in blocks("bash")[0].splitlines()]
    assert commands == [["make", "quickstart"], ["make", "test"]]
    # The second is what runs this test; the first runs here, shortened by the Makefile's own means.
    # What make calls is a note of its words; the command itself runs in this process.
    venv, words = tmp_path / "venv", tmp_path / "words"
    (venv / "bin").mkdir(parents=True)
    (venv / ".installed").touch()
    (venv / "bin/fedmuon").write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {words}\n")
    (venv / "bin/fedmuon").chmod(0o755)
    short = ["ROUNDS=1", "SEEDS=0", f"RUNS={tmp_path}", f"VENV={venv}"]
    done = subprocess.run(
        ["make", "-C", PROJECT, "quickstart", *short], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.chdir(PROJECT)
    (command,) = entry_points(group="console_scripts", name="fedmuon")
    assert command.load()(words.read_text().splitlines()) == 0
    shown = capsys.readouterr().out
    folder = tmp_path / "mnist5k"
    for method in ("fedmuon", "local_muon", "fedavg", "scaffold", "fedadam"):
        assert (folder / f"{method}-s0" / "done").is_file()
        assert re.search(rf"\b{method}\b", shown)
    assert (folder / "compare" / "curves.png").stat().st_size > 10_000
    assert f"tensorboard --logdir {folder}" in shown


def test_readme_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = blocks("bash")[1].strip().splitlines()
    targets = set(re.findall(r"^([a-z-]+):.*##", (PROJECT / "Makefile").read_text(), re.M))
    ran = 0
    for line in lines:
        program, *args = line.split("#")[0].split()
        if program == "make":
            assert args[0] in targets
            continue
        assert program == "fedmuon"
        if args[0] in ("fit", "test"):
            args += ["--trainer.max_epochs=2", "--trainer.enable_progress_bar=false"]
        assert main(args) == 0, line
        ran += 1
    assert ran == 5


def test_readme_names_files_that_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (PROJECT / target).exists(), target
    for word in re.findall(r"`((?:fedmuon_pl|tests|configs|docs)/[\w/.]*)`", README):
        assert (PROJECT / word).exists(), word


@pytest.fixture
def _collected():
    """What an example defines ends with its test: short names find two classes of one name."""
    yield
    gc.collect()


@pytest.mark.usefixtures("_collected")
def test_readme_method_equals_its_reference(tmp_path):
    # The example is the whole method: it is run, and compared with the paper's formula.
    names = {}
    exec(blocks("python")[0], names)
    recorder, _ = federate(names["FedProx"](lr=0.3, mu=0.5), DATA, tmp_path, network=X0Net)
    trace = reference.fedprox(X0, GRADIENT, recorder.rounds, lr=0.3, mu=0.5)
    for ours, theirs in zip(recorder.x, trace.x, strict=True):
        for key in theirs:
            torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-10)


@pytest.mark.parametrize("path", sorted(PROJECT.glob("docs/*.md")))
def test_docs_name_files_that_exist(path):
    for word in re.findall(r"`(tests/[\w/.]+|server/[\w/.]+)`", path.read_text()):
        assert (PROJECT / word).exists() or (PROJECT / "fedmuon_pl" / word).exists(), word
