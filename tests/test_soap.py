"""SOAP: a float64 reference, the client axis, its options, and what is not finite."""

import copy

import pytest
import reference
import torch

from fedmuon_pl.optim.soap import SOAP, eigenbasis, merged_shape, power_step

SHAPES = [(5, 4), (4, 3, 3, 3), (6,), ()]
LR, DECAY, STEPS = 0.01, 0.1, 9


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(shape, steps=STEPS):
    return [randn(*shape, seed=100 + k) for k in range(steps)]


def trained(x, grads, **options):
    p = torch.nn.Parameter(x.clone())
    optimizer = SOAP([p], lr=LR, weight_decay=DECAY, precondition_frequency=3, **options)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    return p.detach(), optimizer.state[p]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("skip_first", [True, False])
def test_equals_the_reference(shape, skip_first):
    x, grads = randn(*shape), gradients(shape)
    eps, longest = 1e-4, 4  # the 5 rows of the matrix are more than its first gradient spans
    found, _ = trained(x, grads, eps=eps, max_precond_dim=longest, skip_first=skip_first)
    empty, step = reference.soap((0.95, 0.95), eps, 3, longest, skip_first)
    state, y = empty(x), x
    for g in grads:
        state, d = step(state, g)
        if d is not None:
            y = y * (1 - LR * DECAY) - LR * d
    torch.testing.assert_close(found, y, rtol=0, atol=1e-12)
    assert (found - x).abs().max() > LR


@pytest.mark.parametrize("options", [{}, {"merge_dims": True, "max_precond_dim": 36}], ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_clients_side_by_side_are_clients_alone(shape, options):
    x, grads = randn(3, *shape), gradients((3, *shape))
    together, state = trained(x, grads, client_axis=True, eps=1e-4, **options)
    if options and len(shape) > 1:
        assert state["gram_0"].shape == (3, 36, 36)
        return  # a first gradient has rank 3 of 36
    for c in range(3):
        alone, _ = trained(x[c], [g[c] for g in grads], eps=1e-4, **options)
        torch.testing.assert_close(together[c], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{"max_precond_dim": 2}, {"precondition_frequency": 1}])
def test_without_axes_to_turn_it_is_adamw(options):
    # No axis is short enough; or there is but one, which is not preconditioned.
    for shape in [(3, 4)] if "max_precond_dim" in options else [(7,), ()]:
        p, q = (torch.nn.Parameter(randn(*shape)) for _ in range(2))
        ours = SOAP([p], LR, weight_decay=DECAY, skip_first=False, **options)
        theirs = torch.optim.AdamW([q], LR, betas=(0.95, 0.95), weight_decay=DECAY)
        for g in gradients(shape):
            p.grad, q.grad = g.clone(), g.clone()
            ours.step()
            theirs.step()
        torch.testing.assert_close(p, q, rtol=0, atol=1e-14)


def test_turns_with_the_coordinates():
    # Rotating x and every gradient rotates the path: Adam alone does not do that.
    u, w = (torch.linalg.qr(randn(4, 4, seed=s)).Q for s in (1, 2))
    x, grads = randn(4, 4), gradients((4, 4))
    plain, _ = trained(x, grads, eps=1e-12)
    turned, _ = trained(u @ x @ w, [u @ g @ w for g in grads], eps=1e-12)
    torch.testing.assert_close(turned, u @ plain @ w, rtol=0, atol=1e-9)
    adam, _ = trained(x, grads, max_precond_dim=1)
    adam_turned, _ = trained(u @ x @ w, [u @ g @ w for g in grads], max_precond_dim=1)
    assert (adam_turned - u @ adam @ w).abs().max() > 0.1 * LR


def test_the_first_step_is_skipped_or_the_polar_factor():
    x, g = randn(4, 4), randn(4, 4, seed=5)
    assert torch.equal(trained(x, [g])[0], x)
    moved, state = trained(x, [g], skip_first=False)
    # With G = U S V^T the basis is (U, V), G' is S, and Adam's first step the sign of it.
    step = (x * (1 - LR * DECAY) - moved) / LR
    turned = state["basis_0"].T @ step @ state["basis_1"]
    torch.testing.assert_close(turned.diag().abs(), torch.ones(4).double(), rtol=0, atol=1e-6)


def test_a_placed_gram_is_the_first_basis():
    p = torch.nn.Parameter(randn(3, 3))
    optimizer = SOAP([p], skip_first=False)
    grams = [g @ g.T for g in (randn(3, 3, seed=1), randn(3, 3, seed=2))]
    optimizer.state[p].update(gram_0=grams[0].clone(), gram_1=grams[1].clone(), gram_weight=0.4)
    p.grad = randn(3, 3, seed=3)
    optimizer.step()
    state = optimizer.state[p]
    assert state["gram_weight"] == pytest.approx(0.95 * 0.4 + 0.05, abs=1e-15)
    for d, gram in enumerate(grams):
        q = state[f"basis_{d}"]
        eigenvalues = torch.linalg.eigvalsh(gram).flip(0)
        torch.testing.assert_close(q.T @ gram @ q, torch.diag(eigenvalues), rtol=0, atol=1e-12)
        fed = 0.95 * gram + 0.05 * (p.grad @ p.grad.T if d == 0 else p.grad.T @ p.grad)
        torch.testing.assert_close(state[f"gram_{d}"], fed, rtol=0, atol=1e-14)


def test_power_iteration_converges_to_the_eigenbasis():
    # Falling eigenvalues 5, 4, 3, 2, 1: the error falls by at least 4/5 a step.
    q = torch.linalg.qr(randn(5, 5)).Q
    gram = q @ torch.diag(torch.arange(5.0, 0, -1).double()) @ q.T
    basis = torch.eye(5).double()
    for _ in range(200):
        basis, _ = power_step(gram, basis)
    torch.testing.assert_close((q.T @ basis).abs(), torch.eye(5).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close((q.T @ eigenbasis(gram)).abs(), torch.eye(5).double())
    _, order = power_step(gram, q[:, [2, 0, 4, 1, 3]])
    assert order.tolist() == [1, 3, 0, 4, 2]


def test_a_client_that_is_not_finite_stays_alone():
    x, grads = randn(2, 4, 4), gradients((2, 4, 4))
    spoilt = [g.clone() for g in grads]
    spoilt[2][0, 1, 1] = torch.inf
    good, _ = trained(x, grads, client_axis=True)
    bad, _ = trained(x, spoilt, client_axis=True)
    assert torch.equal(bad[1], good[1])
    assert not bad[0].isfinite().any()


def test_state_survives_a_dictionary_and_a_copy():
    p = torch.nn.Parameter(randn(2, 4, 3))
    optimizer = SOAP([p], client_axis=True, precondition_frequency=2)
    for g in gradients((2, 4, 3), 4):
        p.grad = g
        optimizer.step()
    q = torch.nn.Parameter(p.detach().clone())
    again = SOAP([q], client_axis=True, precondition_frequency=2)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for g in gradients((2, 4, 3), 4):
        p.grad, q.grad = g.clone(), g.clone()
        optimizer.step()
        again.step()
    assert torch.equal(p, q)
    assert copy.deepcopy(optimizer).client_axis


def test_merged_shapes():
    assert merged_shape((64, 3, 3, 3), 1000) == (576, 3)
    assert merged_shape((64, 3, 3, 3), 10000) == (1728,)
    assert merged_shape((5, 4), 3) == (5, 4)
    assert merged_shape((1, 1), 3) == (1,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers in"),
        ({"shampoo_beta": 1.0}, "shampoo_beta must be in"),
        ({"precondition_frequency": 0}, "precondition_frequency must be at least 1"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        SOAP([torch.nn.Parameter(torch.zeros(2, 2))], **options)
