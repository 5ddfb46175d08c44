"""The networks against what is known of them: weights counted by hand, a forward written out."""

import pytest
import torch
import torch.nn.functional as F

from fedmuon_pl.clients import ClientStack
from fedmuon_pl.models import LeNet, ResNet18


def weights(network, axes=0):
    return sum(p.numel() for p in network.parameters() if p.ndim >= axes)


def test_lenet_has_the_weights_of_1998():
    assert weights(LeNet()) == 61_706


@pytest.mark.parametrize("pooling", ["max", "average"])
def test_lenet_is_pooled_relu_with_and_without_a_gradient(pooling):
    torch.manual_seed(0)
    network = LeNet(in_channels=3, image_size=12, num_classes=5, pooling=pooling).double()
    pool = F.max_pool2d if pooling == "max" else F.avg_pool2d
    x = torch.randn(7, 3, 12, 12, dtype=torch.float64)
    x[:, :, ::3] = -1.0  # flat places, where all of a maximum's four are equal
    h = pool(F.relu(network.conv1(x)), 2)
    h = pool(F.relu(network.conv2(h)), 2).flatten(1)
    written = network.fc3(F.relu(network.fc2(F.relu(network.fc1(h)))))
    weights = list(network.parameters())
    want = torch.autograd.grad(written.square().sum(), weights)
    ours = network(x)
    assert torch.equal(ours, written)
    for a, b in zip(torch.autograd.grad(ours.square().sum(), weights), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(network(x), written)


@pytest.mark.parametrize("norm", ["group", "batch", "released"])
def test_resnet18_has_the_weights_of_the_released_one(norm):
    network = ResNet18(num_classes=100, norm=norm)
    assert weights(network) == 11_220_132
    assert weights(network, axes=2) == 11_210_432
    buffers = dict(network.named_buffers())
    floats = sum(b.numel() for b in buffers.values() if b.is_floating_point())
    counters = sum(not b.is_floating_point() for b in buffers.values())
    # 20 norms; the stem's has 64 channels.
    expected = {"group": (0, 0), "batch": (9_600, 20), "released": (9_472, 19)}[norm]
    assert (floats, counters) == expected


def test_released_norms_are_group_norm_of_2_behind_the_stem_and_batch_norm_elsewhere():
    network = ResNet18(norm="released")
    assert isinstance(network.norm1, torch.nn.GroupNorm)
    assert (network.norm1.num_groups, network.norm1.num_channels) == (2, 64)
    kinds = [type(m) for m in network.blocks.modules() if "Norm" in type(m).__name__]
    assert kinds == [torch.nn.BatchNorm2d] * 19


@pytest.mark.parametrize(("norm", "groups"), [("group", 2), ("group", 32), ("batch", 2)])
def test_resnet18_forward_written_out(norm, groups):
    torch.manual_seed(0)
    network = ResNet18(num_classes=5, norm=norm, groups=groups).double()
    state = {n: torch.randn_like(p) * 0.1 for n, p in network.named_parameters()}
    with torch.no_grad():
        for name, p in network.named_parameters():
            p.copy_(state[name])

    def normed(x, name):
        gain, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        if norm == "group":
            y = x.unflatten(1, (groups, -1))
            axes = (2, 3, 4)
        else:
            y, axes = x, (0, 2, 3)
        mean = y.mean(axes, keepdim=True)
        y = (y - mean) / ((y - mean).square().mean(axes, keepdim=True) + 1e-5).sqrt()
        return y.reshape(x.shape) * gain.view(-1, 1, 1) + bias.view(-1, 1, 1)

    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    y = F.relu(normed(F.conv2d(x, state["conv1.weight"], padding=1), "norm1"))
    for i in range(8):
        stride, at = (2 if i in (2, 4, 6) else 1), f"blocks.{i}"
        z = F.conv2d(y, state[f"{at}.conv1.weight"], stride=stride, padding=1)
        z = F.relu(normed(z, f"{at}.norm1"))
        z = normed(F.conv2d(z, state[f"{at}.conv2.weight"], padding=1), f"{at}.norm2")
        if stride == 2:
            y = F.conv2d(y, state[f"{at}.shortcut.0.weight"], stride=2)
            y = normed(y, f"{at}.shortcut.1")
        y = F.relu(y + z)
    expected = y.mean((2, 3)) @ state["head.weight"].T + state["head.bias"]
    assert expected.shape == (3, 5)
    torch.testing.assert_close(network(x), expected, rtol=1e-9, atol=1e-9)


def test_resnet18_in_channels_last_is_the_same_network():
    torch.manual_seed(0)
    network = ResNet18(num_classes=4)
    batch = (torch.randn(1, 2, 3, 8, 8), torch.randint(0, 4, (1, 2)))
    gradients = []
    for channels_last in (False, True):
        stack = ClientStack(network, 1, channels_last=channels_last)
        loss = stack.losses(lambda net, b: F.cross_entropy(net(b[0]), b[1]), batch)
        loss.sum().backward()
        gradients.append(torch.cat([g.flatten() for g in stack.gradients()]))
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert error < 1e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"norm": "layer"}, "norm='layer'"), ({"groups": 3}, "groups=3: must divide 64")],
)
def test_resnet18_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        ResNet18(**arguments)
