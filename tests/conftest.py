import functools
import sys

import pytest

LONG = ("parallel", "packaging", "reproduce", "docs", "search", "benchmarks")
LONG += ("resume", "logging", "determinism")  # these share runs


def pytest_collection_modifyitems(items):
    """Files with long tests first, so that no worker ends with one when the other has nothing."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)


@pytest.fixture(autouse=True)
def _one_thread():
    """The same numbers on every machine."""
    import torch  # not above: xdist's own process needs none

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _each_picture_once():
    """A run's picture of its partition takes longer than a small run trains: drawn once for all."""
    pages = sys.modules.get("fedmuon_pl.tensorboard")
    if pages is None or hasattr(pages._partition_picture, "__wrapped__"):
        return
    drawn, draw = {}, pages._partition_picture

    @functools.wraps(draw)
    def picture(partition, labels, classes):
        key = partition.digest(), labels.tobytes(), classes
        if key not in drawn:
            drawn[key] = draw(partition, labels, classes)
        return drawn[key]

    pages._partition_picture = picture


@pytest.fixture
def forked(monkeypatch):
    """The runs of a sweep are forks of a process that has imported everything, not new ones.

    Each has a session, a log and an exit status of its own, as before; a start costs a tenth.
    """
    import subprocess
    from types import SimpleNamespace

    from cli_runs import ForkedRun

    names = {"DEVNULL": subprocess.DEVNULL, "STDOUT": subprocess.STDOUT, "Popen": ForkedRun}
    monkeypatch.setattr("fedmuon_pl.compare.execute.subprocess", SimpleNamespace(**names))
    monkeypatch.setenv("FEDMUON_COLD_START", "1")


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Gives an algorithm's run on digits that nothing disturbed; each is trained once."""
    import torch
    from cli_runs import straight_and_stopped

    runs = {}

    def run(algorithm):
        if algorithm not in runs:
            torch.set_num_threads(1)
            root = tmp_path_factory.mktemp(algorithm) / "runs"
            runs[algorithm] = straight_and_stopped(algorithm, root)
        return runs[algorithm]

    return run


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder with the configurations of a small project and the fake command."""
    from fake_runs import FAKE, METHODS, find_here

    from fedmuon_pl.compare import plan

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
