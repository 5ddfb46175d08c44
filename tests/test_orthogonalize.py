"""Orthogonalisation: closed forms, properties, precision, and the published coefficients."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedmuon_pl.optim import orthogonalize, polynomials
from fedmuon_pl.optim.orthogonalize import Orthogonalizer, as_matrix, newton_schulz, polar_svd
from fedmuon_pl.optim.polynomials import POLAR_EXPRESS, QUINTIC, polar_express_coefficients

# arXiv 2505.16932, Algorithm 1, as printed (before its division by the safety factor 1.01).
PUBLISHED = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
]
# Square, wide and tall, small and large enough for the Gram form (rows >= 32, cols >= 2.5 rows).
SHAPES = [(1, 1), (3, 7), (7, 3), (16, 150), (10, 84), (84, 10), (40, 120), (120, 40), (48, 48)]
VARIANTS = [
    Orthogonalizer(),
    Orthogonalizer("polar_express"),
    Orthogonalizer("svd"),
    Orthogonalizer(steps=3, coefficients=(1.875, -1.25, 0.375)),
]

seeds = st.integers(0, 2**31)
shapes = st.sampled_from(SHAPES)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def orthogonal(n: int, seed: int) -> Tensor:
    return torch.linalg.qr(randn(n, n, seed=seed))[0]


def scalar(x, schedule):
    for a, b, c in schedule:
        x = a * x + b * x**3 + c * x**5
    return x


# ---------------------------------------------------------------- coefficients


def test_polar_express_agrees_with_the_published_list():
    ours = np.array(polar_express_coefficients(8, safety=1.0))
    np.testing.assert_allclose(ours[:6], PUBLISHED[:6], rtol=1e-13)
    # The seventh interval is 2e-3 wide, so that the solve of either side loses digits.
    np.testing.assert_allclose(ours, PUBLISHED, rtol=1e-9)


def test_polar_express_literals_are_what_the_solver_gives():
    np.testing.assert_allclose(POLAR_EXPRESS, polar_express_coefficients(8), rtol=1e-10)
    scaled = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in PUBLISHED[:-1]]
    np.testing.assert_allclose(POLAR_EXPRESS, [*scaled, PUBLISHED[-1]], rtol=1e-9)


@given(st.floats(1e-3, 0.98))
def test_minimax_quintic_equioscillates(low):
    a, b, c = polynomials._minimax_quintic(low, 1.0)
    inner = np.sqrt(np.sort(np.roots([5 * c, 3 * b, a]).real))
    x = np.array([low, *inner, 1.0])
    assert np.all(np.diff(x) > 0)
    error = 1 - scalar(x, [(a, b, c)])
    np.testing.assert_allclose(error, error[0] * np.array([1, -1, 1, -1]), atol=1e-12)
    assert error[0] > 0


@pytest.mark.parametrize("lower", [1e-6, 1e-4, 1e-2, 0.3])
def test_polar_express_without_safety_converges(lower):
    x = np.geomspace(lower, 1, 10_001)
    y = scalar(x, polar_express_coefficients(12, lower, safety=1.0))
    np.testing.assert_allclose(y, 1, atol=1e-9)


def test_polar_express_cushion_keeps_large_singular_values_up():
    """Without a cushion, the first step presses some value of [0.02, 1] to almost nothing."""
    x = np.geomspace(0.02, 1, 10_001)
    lowest = [
        float((scalar(x, polar_express_coefficients(1, cushion=k)) / x).min())
        for k in (0.0, 0.02407327424182761)
    ]
    assert lowest[0] < 0.02
    assert lowest[1] > 0.23


@pytest.mark.parametrize(
    "bad", [{"steps": 0}, {"lower": 0.0}, {"lower": 1.0}, {"safety": 0.9}, {"cushion": 1.0}]
)
def test_polar_express_refuses(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
        polar_express_coefficients(**{"steps": 3, **bad})


@pytest.mark.parametrize(
    ("schedule", "low", "bounds"),
    [
        ([QUINTIC] * 5, 1e-2, (0.68, 1.14)),
        ([QUINTIC] * 5, 1e-3, (0.47, 1.21)),
        ([QUINTIC] * 10, 1e-3, (0.68, 1.14)),
        (POLAR_EXPRESS[:5], 1e-2, (0.87, 1.13)),
        (POLAR_EXPRESS[:5], 1e-3, (0.84, 1.13)),
        (POLAR_EXPRESS, 1e-3, (1 - 1e-14, 1 + 1e-14)),
    ],
)
def test_documented_ranges(schedule, low, bounds):
    y = scalar(np.geomspace(low, 1, 100_001), schedule)
    assert bounds[0] < y.min() < bounds[0] + 0.02
    assert bounds[1] - 0.02 < y.max() < bounds[1]


# ---------------------------------------------------------------- Newton-Schulz


@settings(deadline=None)
@given(shapes, seeds, st.integers(1, 8), st.sampled_from([[QUINTIC], list(POLAR_EXPRESS)]))
def test_singular_values_follow_the_scalar_iteration(shape, seed, steps, triples):
    m = randn(*shape, seed=seed)
    s = torch.linalg.svdvals(m) / (m.norm() + 1e-7)
    expected = scalar(s, (triples * 8 if len(triples) == 1 else triples)[:steps])
    coefficients = triples[0] if len(triples) == 1 else triples
    found = newton_schulz(m, steps, coefficients)
    torch.testing.assert_close(
        torch.linalg.svdvals(found), expected.abs().sort(descending=True)[0], rtol=0, atol=1e-10
    )
    u, _, vh = torch.linalg.svd(m, full_matrices=False)
    torch.testing.assert_close(found, (u * expected) @ vh, rtol=0, atol=1e-10)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_gram_form_is_the_same_iteration(steps, batch):
    x = randn(*batch, 40, 120)
    x = x / x.norm()
    schedule = [POLAR_EXPRESS[t] for t in range(steps)]
    direct = orthogonalize._iterate(x, schedule)
    torch.testing.assert_close(orthogonalize._iterate_gram(x, schedule), direct, rtol=0, atol=1e-11)
    assert orthogonalize._gram_pays(x)


def test_a_short_sequence_of_coefficients_repeats_its_last():
    m, other = randn(6, 9), (1.5, -0.5, 0.0)
    assert torch.equal(newton_schulz(m, 4, [QUINTIC]), newton_schulz(m, 4, QUINTIC))
    assert torch.equal(
        newton_schulz(m, 4, [QUINTIC, other]), newton_schulz(m, 4, [QUINTIC, other, other, other])
    )
    assert torch.equal(
        newton_schulz(m, 2, [other, QUINTIC, QUINTIC]), newton_schulz(m, 2, [other, QUINTIC])
    )


@settings(deadline=None)
@given(shapes, seeds, st.floats(1e-4, 1e4))
def test_positive_scaling_changes_nothing(shape, seed, factor):
    m = randn(*shape, seed=seed)
    torch.testing.assert_close(
        newton_schulz(factor * m, eps=1e-30), newton_schulz(m, eps=1e-30), rtol=0, atol=1e-10
    )
    torch.testing.assert_close(polar_svd(factor * m), polar_svd(m), rtol=0, atol=1e-8)


@settings(deadline=None)
@given(shapes, seeds)
def test_orthogonal_equivariance(shape, seed):
    rows, cols = shape
    m, left, right = randn(rows, cols, seed=seed), orthogonal(rows, 1), orthogonal(cols, 2)
    for method, atol in ((newton_schulz, 1e-10), (polar_svd, 1e-8)):
        torch.testing.assert_close(
            method(left @ m @ right), left @ method(m) @ right, rtol=0, atol=atol
        )


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("rows", [255, 256, 259, 511, 512, 515])
def test_symmetric_products_by_blocks(rows, batch):
    rng = torch.Generator().manual_seed(rows)
    x = torch.randn(*batch, rows, 40, dtype=torch.float64, generator=rng)
    plus = torch.randn(*batch, rows, rows, dtype=torch.float64, generator=rng)
    plus = plus + plus.mT
    found = orthogonalize.symmetric_product(x, x.mT)
    torch.testing.assert_close(found, x @ x.mT, rtol=0, atol=1e-12)
    if rows >= 256:  # below the diagonal are copies
        assert torch.equal(found[..., 200:, :100], found[..., :100, 200:].mT)
    found = orthogonalize.symmetric_product(x, x.mT, plus, beta=-0.5, alpha=3.0)
    torch.testing.assert_close(found, 3 * x @ x.mT - 0.5 * plus, rtol=0, atol=1e-11)
    # Blocks are written in place, which autograd cannot follow.
    leaf = x.clone().requires_grad_()
    found = orthogonalize.symmetric_product(leaf, leaf.mT)
    found.sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(leaf.grad, 2 * x.sum(-2, keepdim=True).expand_as(x))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("orthogonalizer", VARIANTS, ids=str)
def test_zero_in_zero_out(shape, dtype, orthogonalizer):
    out = orthogonalizer(torch.zeros(2, *shape, dtype=dtype))
    assert torch.equal(out, torch.zeros(2, *shape, dtype=dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("orthogonalizer", VARIANTS, ids=str)
def test_batch_equals_loop(shape, orthogonalizer):
    m = randn(2, 3, *shape)
    m[0, 1] *= 1e3  # each has a norm of its own
    m[1, 2] = 0
    loop = torch.stack([torch.stack([orthogonalizer(x) for x in row]) for row in m])
    torch.testing.assert_close(orthogonalizer(m), loop, rtol=0, atol=1e-12)
    assert torch.equal(orthogonalizer(m[:1, :1]), orthogonalizer(m[0, 0])[None, None])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 3, 4)])
@pytest.mark.parametrize("orthogonalizer", VARIANTS, ids=str)
def test_empty(shape, orthogonalizer):
    assert orthogonalizer(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_follows_the_float64_run_and_bfloat16_does_not(shape):
    m = randn(*shape, dtype=torch.float32)
    exact = newton_schulz(m, dtype=torch.float64)
    assert exact.dtype == torch.float32
    torch.testing.assert_close(newton_schulz(m), exact, rtol=0, atol=1e-5)
    half = newton_schulz(m, dtype=torch.bfloat16)
    assert half.dtype == torch.float32
    if min(shape) > 1:
        assert (half - exact).abs().max() > 1e-3


@pytest.mark.parametrize("orthogonalizer", VARIANTS, ids=str)
@pytest.mark.parametrize("shape", [(16, 150), (3, 40, 120), (84, 10)])
def test_autocast_changes_no_bit(orthogonalizer, shape):
    m = randn(*shape, dtype=torch.float32)
    outside = orthogonalizer(m)
    with torch.autocast("cpu", torch.bfloat16):
        inside = orthogonalizer(m)
        assert torch.is_autocast_enabled("cpu")
    assert inside.dtype == torch.float32
    assert torch.equal(inside, outside)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (40, 120)])
def test_layout_does_not_matter_and_the_input_is_left_alone(shape):
    m = randn(*shape)
    strided, before = m.mT.contiguous().mT, m.clone()
    torch.testing.assert_close(newton_schulz(strided), newton_schulz(m), rtol=0, atol=1e-12)
    assert torch.equal(m, before)


def test_newton_schulz_has_a_gradient():
    m = randn(4, 6).requires_grad_()
    assert torch.autograd.gradcheck(newton_schulz, m)


@pytest.mark.parametrize(("shape", "steps"), [((3,), 5), ((3, 3), -1)])
def test_newton_schulz_refuses(shape, steps):
    with pytest.raises(ValueError, match="2 or more axes and steps >= 0, got shape"):
        newton_schulz(torch.zeros(shape), steps)


# ---------------------------------------------------------------- the exact polar factor


def test_polar_svd_closed_forms():
    diagonal = torch.diag(torch.tensor([3.0, -2.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(polar_svd(diagonal), diagonal.sign())
    u, v = randn(4), randn(6, seed=1)
    torch.testing.assert_close(
        polar_svd(torch.outer(u, v)), torch.outer(u / u.norm(), v / v.norm())
    )
    q = orthogonal(5, 3)
    torch.testing.assert_close(polar_svd(7 * q), q)


@pytest.mark.parametrize("shape", SHAPES)
def test_polar_svd_is_a_partial_isometry(shape):
    polar = polar_svd(randn(*shape))
    torch.testing.assert_close(polar @ polar.mT @ polar, polar, rtol=0, atol=1e-12)


def test_polar_svd_leaves_the_null_space_out():
    """A batch of 32 through a 120 x 784 layer: rank 32, in every precision."""
    m = randn(120, 32) @ randn(32, 784, seed=1)
    for dtype in (torch.float64, torch.float32):
        s = torch.linalg.svdvals(polar_svd(m.to(dtype)))
        torch.testing.assert_close(s[:32], torch.ones(32, dtype=dtype), rtol=0, atol=1e-4)
        assert s[32:].max() < 1e-4
    torch.testing.assert_close(polar_svd(m.float()).double(), polar_svd(m), rtol=0, atol=1e-4)


def test_polar_svd_without_a_cut_has_unit_directions_in_the_null_space_too():
    g = torch.Generator().manual_seed(0)
    m = torch.randn(12, 3, generator=g) @ torch.randn(3, 20, generator=g)
    whole, cut = polar_svd(m, 0.0), polar_svd(m)
    torch.testing.assert_close(torch.linalg.svdvals(whole), torch.ones(12))
    torch.testing.assert_close(torch.linalg.svdvals(cut), torch.tensor([1.0] * 3 + [0.0] * 9))
    torch.testing.assert_close(whole @ m.mT, cut @ m.mT)  # the same where there is a gradient
    assert torch.linalg.norm(polar_svd(torch.zeros(2, 4, 5), 0.0)[1]) == pytest.approx(2.0)


def test_polar_svd_cuts_at_rtol():
    m = torch.diag(torch.tensor([1.0, 1e-3, 1e-7], dtype=torch.float64))
    kept = {1e-10: 3, 1e-5: 2, 1e-2: 1}
    for rtol, rank in kept.items():
        assert polar_svd(m, rtol).trace().item() == pytest.approx(rank)
    assert polar_svd(m).trace().item() == pytest.approx(3)
    assert polar_svd(m.float()).trace().item() == pytest.approx(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_through_float32(dtype):
    m = randn(8, 12, dtype=torch.float32).to(dtype)
    assert torch.equal(polar_svd(m), polar_svd(m.float()).to(dtype))


# ---------------------------------------------------------------- Orthogonalizer, as_matrix


def test_orthogonalizer_calls_what_it_names():
    m = randn(6, 9, dtype=torch.float32)
    triple = (1.5, -0.5, 0.0)
    assert torch.equal(Orthogonalizer()(m), newton_schulz(m))
    assert torch.equal(
        Orthogonalizer(steps=3, coefficients=triple, eps=1e-3, dtype="float64")(m),
        newton_schulz(m, 3, triple, 1e-3, torch.float64),
    )
    assert torch.equal(
        Orthogonalizer("polar_express", steps=7)(m), newton_schulz(m, 7, POLAR_EXPRESS)
    )
    assert torch.equal(Orthogonalizer("svd", rtol=0.3)(m), polar_svd(m, 0.3))
    double = Orthogonalizer("svd", dtype="float64")(m)
    assert double.dtype == torch.float32
    assert torch.equal(double, polar_svd(m.double()).float())


def test_orthogonalizer_is_frozen_and_hashable():
    a = Orthogonalizer(coefficients=[1.5, -0.5, 0.0])  # type: ignore[arg-type]
    assert a == Orthogonalizer(coefficients=(1.5, -0.5, 0.0))
    assert hash(a) == hash(Orthogonalizer(coefficients=(1.5, -0.5, 0.0)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"method": "qr"}, "method"),
        ({"steps": -1}, "steps"),
        ({"coefficients": (1.0, 2.0)}, "coefficients"),
        ({"coefficients": QUINTIC, "method": "polar_express"}, "coefficients"),
        ({"dtype": "float16"}, "dtype"),
        ({"dtype": "bfloat16", "method": "svd"}, "dtype"),
        ({"rtol": 1e-5}, "rtol"),
        ({"rtol": -1.0, "method": "svd"}, "rtol"),
        ({"eps": 0.0}, "eps"),
        ({"eps": float("nan")}, "eps"),
    ],
)
def test_orthogonalizer_refuses(fields, name):
    with pytest.raises(ValueError, match=f"^Orthogonalizer: {name} must be .*got ") as error:
        Orthogonalizer(**fields)
    assert repr(fields[name]) in str(error.value)


def test_as_matrix():
    conv = randn(8, 2, 3, 3)
    assert torch.equal(as_matrix(conv), conv.reshape(8, 18))
    assert as_matrix(conv).data_ptr() == conv.data_ptr()
    assert as_matrix(randn(5, 8, 2, 3, 3), 1).shape == (5, 8, 18)
    assert as_matrix(randn(5, 8, 2), 1).shape == (5, 8, 2)
    position = randn(1, 7, 4)  # tokens x width, no row of 28
    assert torch.equal(as_matrix(position), position[0])
    assert torch.equal(as_matrix(position.expand(5, 1, 7, 4), 1), position.expand(5, 7, 4))
    assert as_matrix(randn(1, 3, 2, 2)).shape == (1, 12)  # a convolution of one output
    with pytest.raises(ValueError, match=r"behind 1 batch axes, got shape \(5, 8\)"):
        as_matrix(randn(5, 8), 1)


def test_a_matrix_that_is_not_finite_spoils_no_other():
    batch = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = polar_svd(batch)
    batch[1, 2, 3] = float("inf")
    polar = polar_svd(batch)
    assert polar[1].isnan().all()
    assert torch.equal(polar[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize(
    ("schedule", "bound"),
    [([QUINTIC] * 5, 3e-3), (list(POLAR_EXPRESS), 3e-3), ([QUINTIC] * 9, 1e-2)],
)
@pytest.mark.parametrize("lowest", [0, -2, -8, None])
def test_gram_form_in_float32_stays_close_to_the_plain_one_in_float64(schedule, bound, lowest):
    """Spectral norm of the difference; docs/orthogonalisation.md has the measured ones."""
    u, v = orthogonal(48, 1), orthogonal(150, 2)[:, :48]
    s = torch.zeros(48, dtype=torch.float64)
    if lowest is None:
        s[:8] = 1
    else:
        s = torch.logspace(0, lowest, 48, dtype=torch.float64)
    x = (u * s) @ v.mT
    x = x / x.norm()
    exact = orthogonalize._iterate(x, schedule)
    found = orthogonalize._iterate_gram(x.float(), schedule).double()
    assert torch.linalg.matrix_norm(found - exact, 2) < bound
