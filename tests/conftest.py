import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """The same numbers on every machine."""
    torch.set_num_threads(1)
