"""Muon and parameter routing: closed forms, parity with torch, the client axis, the interface."""

import copy
import io
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedmuon_pl.optim.muon import Muon, step_scale
from fedmuon_pl.optim.orthogonalize import Orthogonalizer, as_matrix, newton_schulz, polar_svd
from fedmuon_pl.optim.routing import matrix_share, split_parameters

SVD = Orthogonalizer("svd")
TALL, WIDE, GRAM, CONV, TALL_CONV = (12, 5), (5, 12), (40, 120), (8, 2, 3, 3), (32, 2, 3, 3)
SHAPES = [TALL, WIDE, GRAM, CONV, TALL_CONV]
OPTIONS = [
    {"ema": ema, "nesterov": nesterov, "weight_decay": wd, "scale": scale}
    for ema, nesterov, (wd, scale) in itertools.product(
        (True, False), (True, False), ((0.0, "none"), (0.1, "spectral"), (0.1, "rms"))
    )
]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def parameters(*shapes, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(randn(*s, seed=i, dtype=dtype)) for i, s in enumerate(shapes)]


def give_gradients(params, step: int) -> None:
    for i, p in enumerate(params):
        p.grad = randn(*p.shape, seed=1000 * step + i + 500, dtype=p.dtype)


def reference(x: Tensor, grads, lr, beta, nesterov, ema, wd, scale, orthogonalize) -> Tensor:
    """The docstring's formulas for one parameter, in plain tensor arithmetic."""
    momentum = torch.zeros_like(x)
    for g in grads:
        rate = 1 - beta if ema else 1
        momentum = beta * momentum + rate * g
        u = rate * g + beta * momentum if nesterov else momentum
        u = u.reshape(len(u), -1)
        rows, cols = u.shape
        s = {
            "none": 1.0,
            "spectral": math.sqrt(max(1, rows / cols)),
            "rms": 0.2 * math.sqrt(max(rows, cols)),
        }[scale]
        x = x - lr * wd * x - lr * s * orthogonalize(u).reshape(x.shape)
    return x


# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("orthogonalizer", [Orthogonalizer(), SVD], ids=["ns", "svd"])
def test_matches_the_formulas(options, orthogonalizer):
    params = parameters(*SHAPES)
    start = [p.detach().clone() for p in params]
    optimizer = Muon(params, lr=0.03, momentum=0.9, orthogonalizer=orthogonalizer, **options)
    grads: list[list[Tensor]] = []
    for step in range(4):
        give_gradients(params, step)
        grads.append([p.grad.clone() for p in params])
        optimizer.step()
    for i, (p, x) in enumerate(zip(params, start, strict=True)):
        expected = reference(
            x,
            [g[i] for g in grads],
            0.03,
            0.9,
            options["nesterov"],
            options["ema"],
            options["weight_decay"],
            options["scale"],
            newton_schulz if orthogonalizer.method == "newton_schulz" else polar_svd,
        )
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-9)


def test_known_matrices():
    """First step from x = 0 with the exact polar factor: x = -lr * s * U V^T."""
    cases = [
        (torch.diag(torch.tensor([4.0, -0.5])), torch.diag(torch.tensor([1.0, -1.0]))),
        (torch.tensor([[3.0], [4.0]]), math.sqrt(2) * torch.tensor([[0.6], [0.8]])),
        (torch.tensor([[3.0, 4.0]]), torch.tensor([[0.6, 0.8]])),
        (torch.zeros(3, 2), torch.zeros(3, 2)),
    ]
    for gradient, direction in cases:
        p = nn.Parameter(torch.zeros_like(gradient))
        p.grad = gradient
        Muon([p], lr=0.1, orthogonalizer=SVD).step()
        torch.testing.assert_close(p.detach(), -0.1 * direction)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [(CONV, 1.0), (TALL_CONV, math.sqrt(32 / 18)), ((4, 3), math.sqrt(4 / 3)), ((3, 4), 1.0)],
)
def test_spectral_scale_is_of_the_flattened_matrix(shape, expected):
    p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    p.grad = randn(*shape)
    Muon([p], lr=1.0, orthogonalizer=SVD, scale="spectral").step()
    s = torch.linalg.svdvals(as_matrix(p.detach()))
    torch.testing.assert_close(s, torch.full_like(s, expected))
    torch.testing.assert_close(
        p.detach().norm().item(), expected * math.sqrt(min(as_matrix(p).shape))
    )


@pytest.mark.parametrize("shape", [(64, 64), (32, 256), (256, 32), (64, 16, 3, 3)])
def test_rms_scale(shape):
    for orthogonalizer, rtol in ((SVD, 1e-9), (Orthogonalizer(), 0.15)):
        p = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        p.grad = randn(*shape)
        Muon([p], lr=1.0, orthogonalizer=orthogonalizer, scale="rms").step()
        assert p.detach().square().mean().sqrt().item() == pytest.approx(0.2, rel=rtol)


def test_step_scale():
    assert [step_scale(32, 18, k) for k in ("none", "spectral", "rms")] == [
        1.0,
        math.sqrt(32 / 18),
        0.2 * math.sqrt(32),
    ]
    assert step_scale(18, 32, "spectral") == 1.0


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(SHAPES), st.floats(0, 0.99), st.booleans(), st.integers(0, 10_000))
def test_classic_and_ema_give_one_direction(shape, beta, nesterov, seed):
    pair = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for _ in range(2)]
    optimizers = [
        Muon([p], momentum=beta, nesterov=nesterov, ema=ema, orthogonalizer=SVD)
        for p, ema in zip(pair, (True, False), strict=True)
    ]
    for step in range(3):
        g = randn(*shape, seed=seed + step)
        for p, optimizer in zip(pair, optimizers, strict=True):
            p.grad = g.clone()
            optimizer.step()
    torch.testing.assert_close(pair[0], pair[1], rtol=0, atol=1e-9)
    classic, ema = (o.state[p]["momentum_buffer"] for p, o in zip(pair, optimizers, strict=True))
    torch.testing.assert_close((1 - beta) * ema, classic)


# ---------------------------------------------------------------- parity with torch


@pytest.mark.parametrize("shape", [(10, 84), (84, 120), (120, 84), (64, 64), (1, 7), (30, 200)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("scale", "adjust"), [("spectral", "original"), ("rms", "match_rms_adamw")], ids=["orig", "rms"]
)
def test_parity_with_torch(shape, nesterov, scale, adjust):
    ours, theirs = (nn.Parameter(randn(*shape, dtype=torch.float32)) for _ in range(2))
    common = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    bfloat16 = Orthogonalizer(dtype="bfloat16")
    a = Muon([ours], scale=scale, orthogonalizer=bfloat16, **common)
    b = torch.optim.Muon([theirs], adjust_lr_fn=adjust, **common)
    for step in range(5):
        g = randn(*shape, seed=step + 7, dtype=torch.float32)
        ours.grad, theirs.grad = g.clone(), g.clone()
        a.step()
        b.step()
        torch.testing.assert_close(
            a.state[ours]["momentum_buffer"], b.state[theirs]["momentum_buffer"], rtol=0, atol=0
        )
    # Both do the same bfloat16 operations; only the product with lr and scale rounds differently.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- memory layouts


@pytest.mark.parametrize("clients", [None, 1, 3])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("ema", [True, False])
@pytest.mark.parametrize("scale", ["none", "spectral", "spectral_unflattened", "rms"])
@pytest.mark.parametrize("view", ["flatten", "last_two"])
def test_kernels_that_lie_channels_last_make_the_same_steps(clients, nesterov, ema, scale, view):
    """Also where (out, in, kh, kw) and (out, kh, kw, in) are of one shape; they stay so."""
    shapes = [(6, 3, 3, 3), (5, 4, 2, 3), (40, 6, 5, 4), (8, 1, 5, 5), (4, 7, 1, 1), (7, 9)]
    axis = () if clients is None else (clients,)
    plain = parameters(*[(*axis, *s) for s in shapes])
    moved = [nn.Parameter(channels_last(p.detach(), len(axis))) for p in plain]
    options = {"nesterov": nesterov, "ema": ema, "scale": scale, "matrix_view": view}
    options |= {"lr": 0.05, "weight_decay": 0.1, "client_axis": bool(axis)}
    optimizers = [Muon(params, **options) for params in (plain, moved)]
    strides = [p.stride() for p in moved]
    for step in range(3):
        give_gradients(plain, step)
        for p, q in zip(plain, moved, strict=True):
            q.grad = channels_last(p.grad, len(axis))
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(plain, moved, strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-9)
        a, b = (o.state[x]["momentum_buffer"] for o, x in zip(optimizers, (p, q), strict=True))
        torch.testing.assert_close(b, a, rtol=0, atol=1e-12)
    assert [p.stride() for p in moved] == strides
    assert not moved[0].is_contiguous()


def channels_last(t: Tensor, axes: int) -> Tensor:
    """A kernel behind so many axes, with its channels last in memory."""
    if t.ndim - axes != 4:
        return t.clone()
    return t.movedim(axes + 1, -1).contiguous().movedim(-1, axes + 1)


# ---------------------------------------------------------------- clients and batches


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("clients", [1, 4])
@pytest.mark.parametrize("orthogonalizer", [Orthogonalizer(), SVD], ids=["ns", "svd"])
def test_client_axis_equals_separate_optimizers(dtype, atol, clients, orthogonalizer):
    options = {"lr": 0.05, "weight_decay": 0.1, "orthogonalizer": orthogonalizer}
    stacked = parameters(*[(clients, *s) for s in SHAPES], dtype=dtype)
    single = [[nn.Parameter(p.detach()[c].clone()) for p in stacked] for c in range(clients)]
    together = Muon(stacked, client_axis=True, **options)
    apart = [Muon(params, **options) for params in single]
    for step in range(4):
        give_gradients(stacked, step)
        for c, optimizer in enumerate(apart):
            for p, q in zip(single[c], stacked, strict=True):
                p.grad = (10.0**c * q.grad)[c].clone()
            optimizer.step()
        for q in stacked:  # clients of very different gradient norms must not share one
            q.grad *= torch.tensor([10.0**c for c in range(clients)], dtype=dtype).view(
                -1, *[1] * (q.ndim - 1)
            )
        together.step()
    for c in range(clients):
        for p, q in zip(single[c], stacked, strict=True):
            if clients == 1:
                assert torch.equal(q[c], p)
            torch.testing.assert_close(q[c], p, rtol=0, atol=atol)


@pytest.mark.parametrize("client_axis", [False, True])
def test_batching_equal_shapes_changes_nothing(client_axis):
    shapes = [WIDE, TALL, WIDE, (5, 3, 2, 2), TALL, GRAM, GRAM]
    results = []
    for batch in (True, False, None):
        params = parameters(*[(3, *s) if client_axis else s for s in shapes])
        optimizer = Muon(params, client_axis=client_axis, batch_equal_shapes=batch)
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
        results.append(params)
    for batched, looped, default in zip(*results, strict=True):
        torch.testing.assert_close(batched, looped, rtol=0, atol=1e-12)
        torch.testing.assert_close(default, looped, rtol=0, atol=1e-12)


def test_batching_keeps_dtypes_apart():
    params = [nn.Parameter(randn(*WIDE, dtype=d)) for d in (torch.float32, torch.float64)]
    for p in params:
        p.grad = torch.ones_like(p)
    Muon(params, batch_equal_shapes=True).step()
    assert [p.dtype for p in params] == [torch.float32, torch.float64]


def test_autocast_changes_no_bit():
    results = []
    for enabled in (False, True):
        params = parameters(*SHAPES, dtype=torch.float32)
        optimizer = Muon(params, weight_decay=0.1)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for step in range(3):
                give_gradients(params, step)
                optimizer.step()
        results.append(params)
    for inside, outside in zip(*results, strict=True):
        assert torch.equal(inside, outside)


def test_channels_last_weights():
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(randn(*CONV).to(memory_format=layout))
        optimizer = Muon([p])
        for step in range(3):
            p.grad = randn(*CONV, seed=step + 1).to(memory_format=layout)
            optimizer.step()
        assert p.is_contiguous(memory_format=layout)
        results.append(p)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


# ---------------------------------------------------------------- the optimiser's interface


def test_zero_gradient_stays_finite_and_only_decays():
    (p,) = parameters(WIDE)
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    Muon([p], lr=0.5, weight_decay=0.1).step()
    assert torch.equal(p, before * (1 - 0.5 * 0.1))


def test_momentum_can_be_placed_before_and_read_after():
    (p,) = parameters(WIDE)
    optimizer = Muon([p], momentum=0.5, nesterov=False, orthogonalizer=SVD)
    assert not optimizer.state[p]
    warm = randn(*WIDE, seed=9)
    optimizer.state[p]["momentum_buffer"] = warm.clone()
    before, p.grad = p.detach().clone(), randn(*WIDE, seed=10)
    optimizer.step()
    expected = 0.5 * warm + 0.5 * p.grad
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], expected)
    torch.testing.assert_close(p.detach(), before - 0.02 * polar_svd(expected))


def test_no_gradient_is_skipped():
    a, b = parameters(WIDE, TALL)
    a.grad, before = torch.ones_like(a), b.detach().clone()
    optimizer = Muon([a, b], weight_decay=0.1)
    optimizer.step()
    assert torch.equal(b, before)
    assert list(optimizer.state) == [a]
    Muon([b]).step()


def test_groups_have_their_own_options():
    a, b = parameters(WIDE, WIDE)
    b.data.copy_(a.data)
    before = a.detach().clone()
    optimizer = Muon([{"params": [a]}, {"params": [b], "lr": 0.04, "scale": "rms"}], lr=0.02)
    a.grad = b.grad = randn(*WIDE, seed=3)
    optimizer.step()
    torch.testing.assert_close(
        (b - before).detach(), 2 * 0.2 * math.sqrt(12) * (a - before).detach()
    )
    optimizer.param_groups[0]["lr"] = 0.0  # as a scheduler does
    before = a.detach().clone()
    optimizer.step()
    assert torch.equal(a, before)


def test_closure():
    (p,) = parameters(WIDE)
    optimizer = Muon([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    start = p.detach().square().sum()
    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[0] == start.item()
    assert losses == sorted(losses, reverse=True)
    assert Muon(parameters(WIDE)).step() is None


def test_resume_is_exact_and_state_is_plain():
    def run(first: int, last: int, params, optimizer) -> None:
        for step in range(first, last):
            give_gradients(params, step)
            optimizer.step()

    whole = parameters(*SHAPES)
    run(0, 6, whole, Muon(whole, lr=0.05))
    params = parameters(*SHAPES)
    optimizer = Muon(params, lr=0.05)
    run(0, 3, params, optimizer)
    file = io.BytesIO()
    torch.save({"x": [p.data for p in params], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = [nn.Parameter(x) for x in saved["x"]]
    optimizer = Muon(resumed, lr=1.0)
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.05
    run(3, 6, resumed, optimizer)
    for a, b in zip(resumed, whole, strict=True):
        assert torch.equal(a, b)


def test_copies_keep_everything():
    (p,) = parameters((2, *WIDE))
    optimizer = Muon([p], client_axis=True, orthogonalizer=SVD, batch_equal_shapes=True)
    clone = copy.deepcopy(optimizer)
    assert (clone.client_axis, clone.orthogonalizer, clone.batch_equal_shapes) == (True, SVD, True)
    q = clone.param_groups[0]["params"][0]
    p.grad = randn(2, *WIDE)
    q.grad = p.grad.clone()
    optimizer.step()
    clone.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -0.1}, "lr must be at least 0, got -0.1"),
        ({"lr": float("nan")}, "lr must be at least 0, got nan"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"momentum": -0.1}, r"momentum must be in \[0, 1\), got -0.1"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1.0"),
        (
            {"scale": "max"},
            "scale must be one of none, spectral, rms, operator, spectral_unflattened, got 'max'",
        ),
    ],
)
def test_refuses_arguments(options, text):
    with pytest.raises(ValueError, match=f"^Muon: {text}"):
        Muon(parameters(WIDE), **options)


def test_refuses_what_is_no_matrix():
    with pytest.raises(ValueError, match=r"got shape \(10,\); give this one to .*AdamW"):
        Muon(parameters(WIDE, (10,)))
    with pytest.raises(ValueError, match=r"behind the client axis, got shape \(4, 10\)"):
        Muon(parameters((4, 10)), client_axis=True)
    optimizer = Muon(parameters(WIDE))
    with pytest.raises(ValueError, match=r"\(10,\)"):
        optimizer.add_param_group({"params": parameters((10,))})
    assert len(optimizer.param_groups) == 1


def test_refuses_complex_and_sparse():
    with pytest.raises(ValueError, match="complex parameters are not supported"):
        Muon([nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64))])
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients are not supported"):
        Muon(embedding.parameters()).step()


# ---------------------------------------------------------------- routing


NAMED = {
    "embed.weight": torch.Size([20, 8]),
    "embed.bias": torch.Size([8]),
    "conv.weight": torch.Size([4, 3, 3, 3]),
    "scale": torch.Size([]),
    "head.weight": torch.Size([10, 8]),
}


def test_split_parameters():
    matrices, rest = split_parameters(NAMED)
    assert matrices == ["embed.weight", "conv.weight", "head.weight"]
    assert rest == ["embed.bias", "scale"]
    matrices, rest = split_parameters(NAMED, ["^embed", "head"])
    assert matrices == ["conv.weight"]
    assert rest == ["embed.weight", "embed.bias", "scale", "head.weight"]
    assert split_parameters(NAMED, ["bias"])[1] == ["embed.bias", "scale"]
    assert split_parameters({}) == ([], [])


def test_split_parameters_by_the_matrices_names():
    matrices, rest = split_parameters(NAMED, (), ["conv", "^embed"])
    assert matrices == ["embed.weight", "conv.weight"]
    assert rest == ["embed.bias", "scale", "head.weight"]
    # A pattern for the rest has the last word.
    assert split_parameters(NAMED, ["^embed"], ["conv", "^embed"])[0] == ["conv.weight"]
    with pytest.raises(ValueError, match="matrix_patterns: 'scale' is found in no name of a mat"):
        split_parameters(NAMED, (), ["scale"])
    with pytest.raises(ValueError, match=r"matrix_patterns: '\(conv' is no regular expression"):
        split_parameters(NAMED, (), ["(conv"])


def test_split_parameters_refuses():
    with pytest.raises(ValueError, match=r"'\(head' is no regular expression"):
        split_parameters(NAMED, ["(head"])
    with pytest.raises(ValueError, match="'classifier' is found in no parameter's name"):
        split_parameters(NAMED, ["head", "classifier"])


def test_matrix_share():
    assert matrix_share(NAMED) == pytest.approx(348 / 357)
    assert matrix_share(NAMED, ["embed", "head"]) == pytest.approx(108 / 357)
    assert matrix_share({}) == 0.0


def test_resnet18_is_almost_all_matrices():
    models = pytest.importorskip("torchvision.models")
    shapes = {name: p.shape for name, p in models.resnet18().named_parameters()}
    assert matrix_share(shapes) > 0.99
    matrices, rest = split_parameters(shapes)
    assert len(matrices) == 21
    assert all(len(shapes[name]) == 1 for name in rest)
