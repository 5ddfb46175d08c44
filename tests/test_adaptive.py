"""AdaptiveServer against the formulas of arXiv 2003.00295, written in NumPy."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from fedmuon_pl.optim.adaptive import AdaptiveServer

KINDS = ["adam", "yogi", "adagrad"]


def reference(x, deltas, kind, lr, betas, tau, bias_correction):
    b1, b2 = betas
    m, v = np.zeros_like(x), np.full_like(x, tau * tau)
    for t, d in enumerate(deltas, start=1):
        m = b1 * m + (1 - b1) * d
        if kind == "adagrad":
            v = v + d**2
        elif kind == "yogi":
            v = v - (1 - b2) * d**2 * np.sign(v - d**2)
        else:
            v = b2 * v + (1 - b2) * d**2
        m_hat, v_hat = m, v
        if bias_correction:
            m_hat = m / (1 - b1**t)
            v_hat = v if kind == "adagrad" else v / (1 - b2**t)
        x = x + lr * m_hat / (np.sqrt(v_hat) + tau)
    return x


def walk(params, optimizer, deltas) -> None:
    for step in deltas:
        for p, d in zip(params, step, strict=True):
            p.grad = -d.clone()
        optimizer.step()


def some_deltas(shapes, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        [0.1 * torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        for _ in range(steps)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias_correction", [False, True])
@settings(deadline=None, max_examples=50)
@given(
    deltas=hnp.arrays(
        np.float64, st.tuples(st.integers(1, 6), st.just(3)), elements=st.floats(-10, 10)
    ),
    lr=st.floats(0, 2),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    tau=st.floats(1e-6, 1),
)
def test_matches_the_formulas(kind, bias_correction, deltas, lr, betas, tau):
    start = np.array([1.0, -2.0, 0.5])
    p = nn.Parameter(torch.tensor(start))
    optimizer = AdaptiveServer([p], kind, lr, betas, tau, bias_correction)
    walk([p], optimizer, [[torch.tensor(d)] for d in deltas])
    expected = reference(start, deltas, kind, lr, betas, tau, bias_correction)
    # Where √v is a difference of nearly equal numbers (yogi), its last digits are rounding.
    np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-7, atol=1e-9)


def test_first_steps_by_hand():
    """tau = 1, betas = (0.5, 0.5), lr = 1, displacement 2, from x = 0."""
    root = {"adam": 2.5**0.5, "yogi": 3.0**0.5, "adagrad": 5.0**0.5}
    for kind, denominator in root.items():
        p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = AdaptiveServer([p], kind, 1.0, (0.5, 0.5), 1.0)
        walk([p], optimizer, [[torch.full((1,), 2.0, dtype=torch.float64)]])
        assert p.item() == pytest.approx(1 / (denominator + 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_displacement_changes_nothing(kind, bias_correction, dtype):
    p = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = AdaptiveServer([p], kind, 1.0, tau=1e-12, bias_correction=bias_correction)
    walk([p], optimizer, [[torch.zeros(4, dtype=dtype)]] * 5)
    assert torch.equal(p, torch.ones(4, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias_correction", [False, True])
def test_resume_is_exact_and_state_is_plain(kind, bias_correction):
    shapes = [(4, 3), (5,), ()]
    deltas = some_deltas(shapes, 8)

    def fresh():
        params = [nn.Parameter(torch.ones(s, dtype=torch.float64)) for s in shapes]
        return params, AdaptiveServer(params, kind, 0.3, bias_correction=bias_correction)

    whole, optimizer = fresh()
    walk(whole, optimizer, deltas)
    params, optimizer = fresh()
    walk(params, optimizer, deltas[:3])
    file = io.BytesIO()
    torch.save({"x": [p.data for p in params], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    params = [nn.Parameter(x) for x in saved["x"]]
    optimizer = AdaptiveServer(params)
    optimizer.load_state_dict(saved["optimizer"])
    walk(params, optimizer, deltas[3:])
    for a, b in zip(params, whole, strict=True):
        assert torch.equal(a, b)
    assert optimizer.state[params[0]]["step"] == 8


def test_groups_closure_and_missing_gradients():
    a, b, c = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(3))
    optimizer = AdaptiveServer(
        [{"params": [a, c]}, {"params": [b], "kind": "adagrad", "lr": 0.5, "tau": 0.1}]
    )
    d = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)

    def closure():
        assert torch.is_grad_enabled()
        a.grad = b.grad = -d
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert optimizer.step() is None
    zero, two = np.zeros(3), [d.numpy()] * 2
    np.testing.assert_allclose(
        a.detach().numpy(), reference(zero, two, "adam", 0.01, (0.9, 0.99), 1e-3, False)
    )
    np.testing.assert_allclose(
        b.detach().numpy(), reference(zero, two, "adagrad", 0.5, (0.9, 0.99), 0.1, False)
    )
    assert torch.equal(c, torch.zeros(3, dtype=torch.float64))
    assert c not in optimizer.state


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kind": "sgd"}, "kind must be one of .*got 'sgd'"),
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"tau": 0.0}, "tau must be positive, got 0.0"),
        ({"tau": float("nan")}, "tau must be positive, got nan"),
    ],
)
def test_refuses_arguments(options, text):
    with pytest.raises(ValueError, match=f"^AdaptiveServer: {text}"):
        AdaptiveServer([nn.Parameter(torch.zeros(2))], **options)


def test_refuses_complex_and_sparse():
    with pytest.raises(ValueError, match="complex parameters are not supported"):
        AdaptiveServer([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients are not supported"):
        AdaptiveServer(embedding.parameters()).step()
