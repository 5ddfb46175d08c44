"""Channels last and gathering change the speed and nothing else."""

from functools import partial

import numpy as np
import pytest
import torch
from federation import ClientLists, federate
from torch import nn

from fedmuon_pl import FedAvg, FedMuon, FedPAC, MuLoCo, Scaffold
from fedmuon_pl.clients import ClientStack, convolution_kernels

CONVOLUTION = {"FedAvg": lambda: FedAvg(0.1), "FedMuon": lambda: FedMuon(0.05)}
CONVOLUTION["SCAFFOLD"] = lambda: Scaffold(0.1)
CONVOLUTION["Adam"] = lambda: FedAvg(0.01, torch.optim.Adam)
MOMENTS = {"optimizer": torch.optim.AdamW, "averaged": ("exp_avg", "exp_avg_sq"), "alpha": 0.5}
CONVOLUTION["FedPAC, torch's AdamW"] = lambda: FedPAC(0.01, **MOMENTS)
KEPT = {"optimizer": partial(torch.optim.SGD, momentum=0.9), "keep_state": True}
CONVOLUTION["kept momentum"] = lambda: FedAvg(0.1, **KEPT)
CONVOLUTION["MuLoCo"] = lambda: MuLoCo(0.01, keep_state=True)
# Its kernel reads the memory of weights, gradients and moments side by side.
FUSED = partial(torch.optim.Adam, lr=0.1, fused=True)
CONVOLUTION["fused server"] = lambda: FedAvg(0.1, server=FUSED)


def make_data(clients=4, channels=3, samples=8):
    g = torch.Generator().manual_seed(0)
    return {
        c: (
            torch.randn(samples, channels, 8, 8, generator=g),
            torch.randint(0, 3, (samples,), generator=g),
        )
        for c in range(clients)
    }


def network():
    # No bias before a norm: its gradient is rounding, which AdamW would blow up.
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Tanh(),
        nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip


class Viewing(nn.Module):
    """What older code does: a view of a convolution's output, which its layout may forbid."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(144, 3)

    def forward(self, x):
        return self.head(self.conv(x).view(len(x), -1))


@pytest.mark.parametrize("method", CONVOLUTION)
def test_channels_last_gives_the_same_rounds(tmp_path, method):
    weights = []
    for channels_last in (False, True):
        algorithm = CONVOLUTION[method]()
        strides = []

        def step(run, own=algorithm.step, strides=strides):
            kernel = run.members[0].optimizer.param_groups[0]["params"][0]
            strides.append((kernel.grad.stride(), kernel.stride()))
            own(run)

        algorithm.step = step
        recorder, learner = federate(
            algorithm,
            make_data(),
            tmp_path,
            network=network,
            channels_last=channels_last,
        )
        assert learner.engine()["channels_last"] is channels_last
        kernel = learner.stack.leaves[0]
        assert kernel.is_contiguous(memory_format=torch.channels_last) is channels_last
        assert all(of_gradient == of_kernel for of_gradient, of_kernel in strides)
        assert strides
        assert learner.network[0].weight.is_contiguous()  # the global model's own layout
        weights.append(recorder.x[-1])
    for name, expected in weights[0].items():
        torch.testing.assert_close(weights[1][name], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("precision", "build", "at_once", "expected"),
    [
        ("32-true", network, 1, True),
        ("bf16-mixed", network, 1, True),
        ("64-true", network, 1, False),  # no kernels
        ("32-true", network, 2, False),  # a grouped convolution
        ("32-true", Viewing, 1, False),  # would fail
        ("32-true", lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), 1, False),
    ],
)
def test_auto_chooses_the_layout(tmp_path, precision, build, at_once, expected):
    before = torch.get_rng_state()
    recorder, learner = federate(
        FedAvg(0.1),
        make_data(),
        tmp_path,
        network=build,
        rounds=1,
        clients_at_once=at_once,
        trainer_kwargs={"precision": precision},
    )
    assert learner.engine()["channels_last"] is expected
    assert all(torch.isfinite(x).all() for x in recorder.x[0].values())
    assert torch.equal(torch.get_rng_state(), before)


def test_asked_for_it_fails_as_torch_says(tmp_path):
    run = {"network": Viewing, "rounds": 1, "channels_last": True}
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        federate(FedAvg(0.1), make_data(), tmp_path, **run)


def test_only_plain_convolutions_change():
    class Standardised(nn.Conv2d):
        pass

    net = nn.Sequential(nn.Conv2d(3, 4, 3), Standardised(4, 4, 3), nn.Conv1d(4, 4, 3))
    frozen = nn.Conv2d(4, 4, 3).requires_grad_(False)
    net.append(frozen)
    assert convolution_kernels(net) == ["0.weight"]
    assert convolution_kernels(nn.Conv2d(1, 1, 1)) == ["weight"]
    stack = ClientStack(net, 1, channels_last=True)
    for leaf, p in zip(stack.leaves, [p for p in net.parameters() if p.requires_grad], strict=True):
        assert torch.equal(leaf, p)
        assert leaf.data_ptr() in {x.data_ptr() for x in stack.x}


@pytest.mark.parametrize("channels", [1, 3])
def test_strides_say_channels_last_even_for_one_channel(channels):
    """Torch chooses by the strides alone, where one channel makes both layouts contiguous."""
    stack = ClientStack(nn.Conv2d(channels, 4, 3), 1, channels_last=True)
    kernel = stack.leaves[0]
    assert kernel.stride() == (9 * channels, 1, 3 * channels, channels)
    out = stack.shell(torch.randn(2, channels, 6, 6))
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert not out.is_contiguous()


def test_steps_are_gathered_in_pieces(monkeypatch):
    """Every step's data are its samples, whatever is gathered together."""
    data = ClientLists(make_data(2, samples=20))
    data.setup()
    rng = np.random.default_rng(0)
    sizes = [5, 5, 3, 9, 1]
    batches = [[rng.integers(0, 40, n) for n in sizes] for _ in range(2)]
    inputs, labels = data.splits.train
    for limit in (1, 13, 20, 1000):
        monkeypatch.setattr("fedmuon_pl.data.datamodule._GATHERED", limit)
        steps = list(data.local_data(batches, [0], torch.device("cpu"), round=0, seed=0))
        assert len(steps) == len(sizes)
        for k, (x, y) in enumerate(steps):
            for c in range(2):
                assert torch.equal(x[c], inputs[torch.from_numpy(batches[c][k])])
                assert torch.equal(y[c], labels[torch.from_numpy(batches[c][k])])


def test_batches_of_any_kind_are_gathered():
    data = ClientLists(make_data(2))
    data.setup()
    inputs, labels = data.splits.train
    data.splits.train = {"pixels": inputs, "more": [labels]}
    batches = [[np.array([3, 1]), np.array([0, 2])]]
    steps = list(data.local_data(batches, [0], torch.device("cpu"), round=0, seed=0))
    assert torch.equal(steps[1]["pixels"], inputs[[0, 2]][None])
    assert torch.equal(steps[0]["more"][0], labels[[3, 1]][None])
