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
