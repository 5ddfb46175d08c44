import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """The same numbers on every machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Gives an algorithm's run on digits that nothing disturbed; each is trained once."""
    from cli_runs import straight_and_stopped

    runs = {}

    def run(algorithm):
        if algorithm not in runs:
            torch.set_num_threads(1)
            root = tmp_path_factory.mktemp(algorithm) / "runs"
            runs[algorithm] = straight_and_stopped(algorithm, root)
        return runs[algorithm]

    return run
