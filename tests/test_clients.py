"""The client stack: what one client computes does not depend on the clients beside it."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from networks import NETWORKS, OwnBuffer, batch_norm
from torch import nn

from fedmuon_pl.clients import (
    ClientStack,
    clip_per_client,
    persistent_buffers,
    side_by_side_fault,
    trainable,
)

CLIENTS = 3


def loss(network, batch):
    inputs, labels = batch
    return F.cross_entropy(network(inputs), labels)


def batches(clients=CLIENTS, shift=3.0):
    """Inputs whose mean differs from client to client."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(clients, 6, 1, 4, 4, generator=rng)
    x += shift * torch.arange(clients).view(-1, 1, 1, 1, 1)
    return x, torch.randint(0, 3, (clients, 6), generator=rng)


def state(network):
    return [p.detach() for p in trainable(network).values()], dict(network.named_buffers())


def side_by_side(network, batch):
    """Gradients and buffers of one step from different weights, and these weights."""
    stack = ClientStack(network, len(batch[0]))
    stack.load(*state(network))
    for i, x in enumerate(stack.x):
        x.add_(0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(i)))
    weights = [x.clone() for x in stack.x]
    stack.losses(loss, batch).sum().backward()
    return stack.gradients(), stack.buffers, weights


def bare(network, weights, c, batch):
    """The same for one client with nothing of ours but the network."""
    model = deepcopy(network).train()
    with torch.no_grad():
        for p, w in zip(trainable(model).values(), weights, strict=True):
            p.copy_(w[c])
    loss(model, (batch[0][c], batch[1][c])).backward()
    return [
        torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(model).values()
    ], dict(model.named_buffers())


@pytest.mark.parametrize("name", NETWORKS)
def test_gradient_of_one_step_in_float32(name):
    torch.manual_seed(0)
    network, batch = NETWORKS[name](), batches()
    gradients, buffers, weights = side_by_side(network, batch)
    assert gradients[0].shape == (CLIENTS, *weights[0].shape[1:])
    for c in range(CLIENTS):
        expected, expected_buffers = bare(network, weights, c, batch)
        for mine, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(mine[c], theirs, rtol=1e-5, atol=1e-6)
        for key, value in expected_buffers.items():
            torch.testing.assert_close(buffers[key][c], value, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(gradients[0][0], gradients[0][1], rtol=0.1, atol=1e-3)
    assert side_by_side_fault(network, loss, tuple(t[:2] for t in batch)) is None


@pytest.mark.parametrize("name", ["batch_norm", "own_buffer"])
def test_buffers_start_anew_with_every_load(name):
    network, (x, y) = NETWORKS[name](), batches()
    stack = ClientStack(network, 2)
    seen = []
    for size, take in ((1, slice(0, 1)), (2, slice(0, 2)), (1, slice(2, 3)), (1, slice(0, 1))):
        stack.resize(size)
        runs = []
        for _ in range(2):
            stack.load(*state(network))
            for key, value in network.named_buffers():
                assert all(torch.equal(stack.buffers[key][c], value) for c in range(size))
            for _ in range(3):
                stack.losses(loss, (x[take], y[take]))
            runs.append({k: b.clone() for k, b in stack.buffers.items()})
        assert all(torch.equal(runs[1][k], b) for k, b in runs[0].items())
        seen.append(runs[0])
    for key, value in network.named_buffers():
        assert torch.equal(seen[0][key], seen[3][key])
        assert not torch.equal(seen[0][key][0], value)


def test_network_is_never_changed():
    network = NETWORKS["everything"]()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    for clients in (1, 2):
        stack = ClientStack(network, clients)
        stack.load(*state(network))
        stack.losses(loss, batches(clients)).sum().backward()
        with torch.no_grad():
            torch._foreach_add_(stack.x, 1.0)
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())


def test_one_client_is_a_view_of_slice_0():
    network = batch_norm()
    stack = ClientStack(network, 3)
    stack.resize(1)
    stack.load(*state(network))
    for leaf, stacked in zip(stack.leaves, stack.x, strict=True):
        assert leaf.data_ptr() == stacked.data_ptr()
        assert leaf.shape == stacked.shape[1:]
    before = [x.data_ptr() for x in stack.x]
    stack.resize(3)
    stack.resize(2)
    assert [x.data_ptr() for x in stack.x] == before


@pytest.mark.parametrize("clients", [0, 3])
def test_a_stack_has_room_for_its_capacity(clients):
    with pytest.raises(ValueError, match="cannot hold"):
        ClientStack(nn.Linear(2, 2), 2).resize(clients)
    with pytest.raises(ValueError, match="capacity"):
        ClientStack(nn.Linear(2, 2), 0)


def test_only_saved_buffers_are_part_of_the_model():
    network = OwnBuffer()
    network.register_buffer("cache", torch.zeros(2), persistent=False)
    assert list(persistent_buffers(network)) == ["running"]


class Tokens(nn.Module):
    def __init__(self, padding, keyword=False):
        super().__init__()
        self.embed = nn.Embedding(9, 4, padding_idx=padding)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.keyword = keyword

    def forward(self, x):
        tokens = (2 * x).long().abs().flatten(1) % 9
        embedded = self.embed(input=tokens) if self.keyword else self.embed(tokens)
        return self.head(torch.tanh(embedded)).mean(1)[:, :3]


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("padding", [None, 0])
def test_padding_has_no_gradient_side_by_side_either(padding, keyword):
    # torch.vmap's rule for embeddings forgets padding_idx for all clients but the first.
    torch.manual_seed(0)
    network, batch = Tokens(padding, keyword), batches(shift=0.0)
    assert ((2 * batch[0]).long() == 0).any()
    gradients, _, weights = side_by_side(network, batch)
    for c in range(CLIENTS):
        expected, _ = bare(network, weights, c, batch)
        torch.testing.assert_close(gradients[0][c], expected[0], rtol=1e-5, atol=1e-6)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.rnn(x[:, 0])[0][:, -1])


class Double(torch.autograd.Function):
    """Its rule for vmap is wrong: the derivative is 2 alone and 3 side by side."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x, factor):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return ctx.factor * g, None

    @staticmethod
    def vmap(info, dims, x, factor):
        return Double.apply(x, 3.0), dims[0]


class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return Double.apply(self.head(x.flatten(1)), 2.0)


@pytest.mark.parametrize(
    ("network", "fault"),
    [
        (nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 3)), "random numbers"),
        (Recurrent(), "cannot run side by side"),
        (Wrong(), "gradient of head.weight"),
    ],
    ids=["dropout", "lstm", "wrong-rule"],
)
def test_faults_side_by_side_are_found(network, fault):
    random, before = torch.get_rng_state(), [p.clone() for p in network.parameters()]
    found = side_by_side_fault(network, loss, batches(2))
    assert found is not None
    assert fault in found
    assert "\n" not in found
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(p, q) for p, q in zip(network.parameters(), before, strict=True))


def test_clipping_is_per_client():
    rng = torch.Generator().manual_seed(0)
    gradients = [torch.randn(3, *shape, generator=rng) for shape in ((2, 2), (5,), ())]
    for g in gradients:
        g[0] *= 100
        g[1] *= 1e-3
    expected = []
    for c in range(3):
        one = [nn.Parameter(torch.zeros_like(g[c])) for g in gradients]
        for p, g in zip(one, gradients, strict=True):
            p.grad = g[c].clone()
        nn.utils.clip_grad_norm_(one, 0.5)
        expected.append([p.grad for p in one])
    clip_per_client(gradients, 0.5)
    for c in range(3):
        for mine, theirs in zip(gradients, expected[c], strict=True):
            torch.testing.assert_close(mine[c], theirs, rtol=1e-6, atol=1e-7)


def test_modules_keep_the_mode_they_are_in():
    # A user who freezes BatchNorm by eval() means it, also on the clients.
    network = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
    network[0].eval()
    stack = ClientStack(network, 2)
    assert [m.training for m in stack.shell] == [False, True]
