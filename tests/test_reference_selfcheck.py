"""The oracle is checked by itself: closed forms by hand, reductions between methods, invariants,
PyTorch's optimisers.

Q1 is the scalar toy of the field: one weight w, client i has loss (w - b_i)^2 / 2, so K steps of
SGD at rate eta give w_K = b_i + (1 - eta)^K (w - b_i).
"""

import inspect
import math

import pytest
import reference as ref
import torch

EXACT = {"rtol": 0, "atol": 1e-12}
BETAS, EPS = (0.9, 0.95), 1e-8


def scalar(value, shape=(1,)):
    return {"w": torch.full(shape, float(value), dtype=torch.float64)}


def q1(x, b):
    """A batch is the client's optimum b."""
    return {"w": x["w"] - b}


def linear(x, slope):
    """A batch is the constant gradient of a linear loss."""
    return {name: torch.full_like(p, slope) for name, p in x.items()}


def repeat(cohort, R, K):
    """R rounds in which client i sees its batch K (or K[i]) times."""
    steps = K if isinstance(K, dict) else dict.fromkeys(cohort, K)
    return [{i: [batch] * steps[i] for i, batch in cohort.items()} for _ in range(R)]


def values(trace):
    return [float(x["w"].reshape(())) for x in trace.x]


def same(a, b, **tolerance):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **(tolerance or EXACT))


def same_models(a, b, **tolerance):
    assert len(a.x) == len(b.x)
    for x, y in zip(a.x, b.x, strict=True):
        same(x, y, **tolerance)


COHORTS = [(0, 1, 2), (3, 4), (1, 3, 4), (0, 2), (2, 4, 1)]


def tiny_rounds(data, *, cohorts=COHORTS, steps=None, size=5, seed=7):
    """Partial participation, batches drawn at random; steps None gives the clients 2 to 4 of
    them."""
    generator = torch.Generator().manual_seed(seed)
    rounds = []
    for cohort in cohorts:
        batches = {}
        for i in cohort:
            inputs, labels = data[i]
            picks = [
                torch.randperm(len(labels), generator=generator)[:size]
                for _ in range(steps or 2 + i % 3)
            ]
            batches[i] = [(inputs[pick], labels[pick]) for pick in picks]
        rounds.append(batches)
    return rounds


@pytest.fixture(scope="module")
def tiny():
    return ref.tiny_problem()


@pytest.fixture(scope="module")
def sizes(tiny):
    return {i: len(labels) for i, (_, labels) in tiny[2].items()}


LR = {"lr": 0.1}
MUON = {"lr": 0.05, "rest_lr": 0.02, "betas": BETAS}
METHODS = {
    "fedavg": LR,
    "fedavg_adamw": {"lr": 0.01, "weight_decay": 0.0},
    "fedavgm": LR,
    "fedadam": {**LR, "server_lr": 0.05},
    "fedyogi": {**LR, "server_lr": 0.05},
    "fedadagrad": {**LR, "server_lr": 0.05},
    "scaffold": {**LR, "population": 5},
    "local_muon": MUON,
    "fedmuon": MUON,
    "fedmuon_official": {"lr": 0.05, "alpha": 0.5, "gamma": 0.5, "K": 3, "weight_decay": 0.0},
    "fedprox": {**LR, "mu": 0.5},
    "feddyn": {**LR, "alpha": 0.5, "population": 5},
    "fedbn": LR,
    "fednova": {**LR, "momentum": 0.5},
    "mime": {**LR, "data": None},
    "mimelite": {**LR, "data": None},
    "fedcm": LR,
    "fedacg": LR,
    "fedpac": {"lr": 0.01, "optimizer": ref.adam(), "averaged": ("v",)},
    "fedlada": {"lr": 0.01, "alpha": 0.5},
    "fedadamw": {"lr": 0.01, "weight_decay": 0.0},
    "fedmuon_lmo": {"lr": 0.01, "population": 5},
    "server_muon": {**LR, "server_lr": 0.05, "rest_server_lr": 0.8},
    "muloco": MUON,
}
SERVER_KEEPS_MOVING = {"fedavgm", "fedadam", "fedyogi", "feddyn", "fedacg", "server_muon", "muloco"}
every_method = pytest.mark.parametrize("name", METHODS)


def run(name, x0, gradient, rounds, data, **more):
    """The method with its arguments of the table, ``data`` where it wants each client's full
    batch."""
    args = {**METHODS[name], **{key: value for key, value in more.items() if key != "population"}}
    if "data" in args:
        args["data"] = data
    if "population" in args and "population" in more:
        args["population"] = more["population"]
    return getattr(ref, name)(x0, gradient, rounds, **args)


# ---------------------------------------------------------------------------------- the toy problem


def test_oracle_does_not_know_the_engine():
    source = inspect.getsource(ref)
    assert "import fedmuon" not in source
    assert "from fedmuon" not in source
    assert "torch.optim" not in source.split('"""', 2)[2]


def test_tiny_problem_is_deterministic_heterogeneous_and_float64(tiny, sizes):
    x0, _, data = tiny
    torch.manual_seed(0)
    again, _, data_again = ref.tiny_problem()
    same(x0, again)
    assert {n: tuple(p.shape) for n, p in x0.items()} == {
        "conv.weight": (2, 1, 3, 3),
        "fc.weight": (3, 8),
        "fc.bias": (3,),
    }
    assert sizes == {0: 12, 1: 14, 2: 16, 3: 18, 4: 20}
    for i, (inputs, labels) in data.items():
        assert inputs.shape == (sizes[i], 1, 4, 4)
        assert inputs.dtype == torch.float64
        assert torch.equal(inputs, data_again[i][0])
        assert torch.equal(labels, data_again[i][1])
    shares = torch.stack(
        [labels.bincount(minlength=3) / len(labels) for _, labels in data.values()]
    )
    assert (shares.max(0).values - shares.min(0).values > 0.3).all()


def test_tiny_gradient_is_the_slope_of_the_loss(tiny):
    x0, gradient, data = tiny
    g, h = gradient(x0, data[3]), 1e-6
    for name, p in x0.items():
        for j in range(p.numel()):
            step = torch.zeros(p.numel(), dtype=p.dtype)
            step[j] = h
            up = ref.tiny_loss({**x0, name: p + step.view_as(p)}, data[3])
            down = ref.tiny_loss({**x0, name: p - step.view_as(p)}, data[3])
            assert float(g[name].flatten()[j]) == pytest.approx(
                float(up - down) / (2 * h), abs=1e-8
            )


# ------------------------------------------------------------------------------------- every method


def flat(state):
    """A round's state without its nesting: {"c": {...}, "c_i": {0: {...}}} becomes {("c", name):
    tensor, ...}."""
    out = {}
    for key, value in state.items():
        inner = flat(value) if isinstance(value, dict) else {(): value}
        out.update({(key, *path): p for path, p in inner.items()})
    return out


@every_method
def test_inputs_stay_unchanged_and_the_trace_is_not_aliased(name, tiny):
    x0, gradient, data = tiny
    before, rounds = ref.copy(x0), tiny_rounds(data)
    inputs_before = {i: inputs.clone() for i, (inputs, _) in data.items()}
    trace = run(name, x0, gradient, rounds, data)
    same(x0, before)
    assert all(torch.equal(data[i][0], inputs_before[i]) for i in data)
    assert len(trace.x) == len(trace.state) == len(rounds)
    short = run(name, x0, gradient, rounds[:2], data)
    same_models(short, ref.Trace(trace.x[:2]))
    for mine, theirs in zip(short.state, trace.state[:2], strict=True):
        same(flat(mine), flat(theirs))


@every_method
def test_model_moves_and_stays_finite(name, tiny):
    x0, gradient, data = tiny
    trace = run(name, x0, gradient, tiny_rounds(data) * 4, data)
    for p in x0:
        assert not torch.equal(trace.x[0][p], x0[p])
        assert all(torch.isfinite(x[p]).all() for x in trace.x)


@every_method
def test_order_of_clients_and_scale_of_weights_do_not_matter(name, tiny, sizes):
    x0, gradient, data = tiny
    rounds = tiny_rounds(data)
    shuffled = [dict(reversed(cohort.items())) for cohort in rounds]
    plain = run(name, x0, gradient, rounds, data, weights=sizes)
    same_models(plain, run(name, x0, gradient, shuffled, data, weights=sizes))
    same_models(
        plain, run(name, x0, gradient, rounds, data, weights={i: 3 * n for i, n in sizes.items()})
    )
    equal = run(name, x0, gradient, rounds, data, weights=dict.fromkeys(data, 11))
    same_models(run(name, x0, gradient, rounds, data), equal)
    assert not torch.allclose(equal.x[-1]["fc.weight"], plain.x[-1]["fc.weight"], rtol=0, atol=1e-6)


@every_method
def test_clipping_is_used(name, tiny):
    x0, gradient, data = tiny
    rounds = tiny_rounds(data)
    free, loose = (
        run(name, x0, gradient, rounds, data),
        run(name, x0, gradient, rounds, data, clip_norm=1e6),
    )
    same_models(free, loose)
    tight = run(name, x0, gradient, rounds, data, clip_norm=0.05)
    assert not torch.allclose(free.x[-1]["fc.weight"], tight.x[-1]["fc.weight"], rtol=0, atol=1e-6)


@every_method
def test_identical_clients_are_one_client(name):
    three = run(
        name,
        scalar(3),
        q1,
        repeat({0: 1.0, 1: 1.0, 2: 1.0}, 4, 3),
        dict.fromkeys(range(3), 1.0),
        population=3,
    )
    same_models(three, run(name, scalar(3), q1, repeat({7: 1.0}, 4, 3), {7: 1.0}, population=1))


@every_method
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_optimum_of_all_clients_is_a_fixed_point(name, shape):
    trace = run(name, scalar(2, shape), q1, repeat({0: 2.0, 1: 2.0}, 5, 3), {0: 2.0, 1: 2.0})
    assert values(trace) == [2.0] * 5


@every_method
def test_a_schedule_that_is_constant_is_the_constant(name, tiny):
    x0, gradient, data = tiny
    rounds = tiny_rounds(data)
    rates = {key: value for key, value in METHODS[name].items() if key.endswith("lr")}
    scheduled = run(
        name, x0, gradient, rounds, data, **{key: lambda r, v=v: v for key, v in rates.items()}
    )
    same_models(run(name, x0, gradient, rounds, data), scheduled)


@every_method
def test_schedule_counts_rounds_from_zero(name):
    """With lr = 0 from round 1 on, clients stop moving; only a server's momentum may still act."""
    rates = {key: METHODS[name][key] for key in ("lr", "rest_lr") if key in METHODS[name]}
    stop = {key: lambda r, v=v: v if r == 0 else 0.0 for key, v in rates.items()}
    rounds, data = repeat({0: 1.0, 1: 5.0}, 3, 2), {0: 1.0, 1: 5.0}
    constant, stopped = (
        run(name, scalar(0), q1, rounds, data),
        run(name, scalar(0), q1, rounds, data, **stop),
    )
    assert values(constant)[0] == values(stopped)[0] != 0
    if name not in SERVER_KEEPS_MOVING:
        assert values(stopped)[0] == values(stopped)[1] == values(stopped)[2]


# ------------------------------------------------------------------------------------------- FedAvg


@pytest.mark.parametrize("cohort", [{2: 4.0}, {0: 1.0, 3: -2.0}, {0: 1.0, 1: 2.0, 2: 4.0}])
def test_fedavg_q1_closed_form(cohort):
    """Unequal steps, counts as weights, cohorts of 1, 2 and 3: the weights sum to 1 over each
    cohort."""
    eta, K, n, x = 0.3, {0: 1, 1: 2, 2: 3, 3: 5}, {0: 3, 1: 1, 2: 6, 3: 2}, 10.0
    trace = ref.fedavg(scalar(x), q1, repeat(cohort, 3, K), lr=eta, weights=n)
    total = sum(n[i] for i in cohort)
    for value in values(trace):
        x = sum(n[i] / total * (b + (1 - eta) ** K[i] * (x - b)) for i, b in cohort.items())
        assert value == pytest.approx(x, abs=1e-12)


def test_fedavg_server_lr_scales_the_pseudo_gradient():
    one = values(ref.fedavg(scalar(4), q1, repeat({0: 0.0, 1: 2.0}, 1, 2), lr=0.5))[0]
    half = values(ref.fedavg(scalar(4), q1, repeat({0: 0.0, 1: 2.0}, 1, 2), lr=0.5, server_lr=0.5))[
        0
    ]
    assert one == 1 + 0.25 * 3
    assert half == 4 + 0.5 * (one - 4)


@pytest.mark.parametrize(
    ("momentum", "nesterov", "decay"),
    [(0.0, False, 0.1), (0.9, False, 0.0), (0.9, False, 0.1), (0.8, True, 0.05)],
)
def test_local_sgd_is_torch_sgd(momentum, nesterov, decay, tiny):
    x0, gradient, data = tiny
    batches = tiny_rounds(data, cohorts=[(3,)], steps=6)[0][3]
    p = {n: v.clone().requires_grad_() for n, v in x0.items()}
    sgd = torch.optim.SGD(
        p.values(), lr=0.2, momentum=momentum, nesterov=nesterov, weight_decay=decay
    )
    for batch in batches:
        sgd.zero_grad()
        ref.tiny_loss(p, batch).backward()
        torch.nn.utils.clip_grad_norm_(p.values(), 0.3)
        sgd.step()
    mine = ref.local_sgd(
        x0,
        gradient,
        batches,
        lr=0.2,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=decay,
        clip_norm=0.3,
    )
    same(mine, {n: v.detach() for n, v in p.items()})


def test_local_adamw_is_torch_adamw_and_starts_afresh_every_round(tiny):
    x0, gradient, data = tiny
    rounds = tiny_rounds(data, cohorts=[(3,), (3,)], steps=5)
    p = {n: v.clone().requires_grad_() for n, v in x0.items()}
    trace = ref.fedavg_adamw(
        x0, gradient, rounds, lr=0.02, betas=BETAS, eps=1e-6, weight_decay=0.1, clip_norm=0.3
    )
    for r, cohort in enumerate(rounds):
        adamw = torch.optim.AdamW(p.values(), lr=0.02, betas=BETAS, eps=1e-6, weight_decay=0.1)
        for batch in cohort[3]:
            adamw.zero_grad()
            ref.tiny_loss(p, batch).backward()
            torch.nn.utils.clip_grad_norm_(p.values(), 0.3)
            adamw.step()
        same(trace.x[r], {n: v.detach() for n, v in p.items()})


def test_clip_is_per_client_and_global_over_parameters():
    g = {
        "a": torch.tensor([3.0], dtype=torch.float64),
        "b": torch.tensor([[4.0]], dtype=torch.float64),
    }
    clipped = ref.clip(g, 1.0)
    assert float(clipped["a"]) == pytest.approx(3 / (5 + 1e-6))
    assert float(clipped["b"]) == pytest.approx(4 / (5 + 1e-6))
    same(ref.clip(g, 100.0), g)
    same(ref.clip(g, None), g)


@pytest.mark.parametrize("by_size", [False, True])
def test_one_full_step_of_all_clients_is_gradient_descent(by_size, tiny, sizes):
    """On the mean of the client losses (uniform weights) or on the pooled loss (weights by
    size)."""
    x0, gradient, data = tiny
    rounds = [{i: [data[i]] for i in data}] * 4
    trace = ref.fedavg(x0, gradient, rounds, lr=0.5, weights=sizes if by_size else None)
    pooled = (torch.cat([d[0] for d in data.values()]), torch.cat([d[1] for d in data.values()]))
    x = ref.copy(x0)
    for r in range(4):
        if by_size:
            g = gradient(x, pooled)
        else:
            leaves = {n: p.clone().requires_grad_() for n, p in x.items()}
            loss = torch.stack([ref.tiny_loss(leaves, d) for d in data.values()]).mean()
            g = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        x = {n: p - 0.5 * g[n] for n, p in x.items()}
        same(trace.x[r], x)


# ------------------------------------------------------------------------------------------ servers


def test_fedavgm_without_momentum_is_fedavg(tiny, sizes):
    x0, gradient, data = tiny
    rounds, args = (
        tiny_rounds(data),
        {"lr": 0.3, "weight_decay": 0.01, "momentum": 0.5, "clip_norm": 0.4},
    )
    for server_lr in (1.0, 0.7):
        avg = ref.fedavg(x0, gradient, rounds, server_lr=server_lr, weights=sizes, **args)
        same_models(
            avg,
            ref.fedavgm(x0, gradient, rounds, beta=0.0, server_lr=server_lr, weights=sizes, **args),
        )


@pytest.mark.parametrize("nesterov", [False, True])
def test_fedavgm_is_server_sgd_on_the_pseudo_gradient(nesterov):
    x, m, eta, beta, lr = 6.0, 0.0, 0.25, 0.8, 0.5
    rounds = repeat({0: 1.0, 1: 3.0}, 5, 2)
    trace = ref.fedavgm(
        scalar(x), q1, rounds, lr=eta, beta=beta, server_lr=lr, server_nesterov=nesterov
    )
    p = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([p], lr=lr, momentum=beta, nesterov=nesterov)
    for r in range(5):
        p.grad = -((1 - eta) ** 2 - 1) * (p.detach() - 2)
        delta = ((1 - eta) ** 2 - 1) * (x - 2)
        m = beta * m + delta
        x += lr * (delta + beta * m if nesterov else m)
        sgd.step()
        assert values(trace)[r] == pytest.approx(x, abs=1e-12)
        assert float(p.detach()) == pytest.approx(x, abs=1e-12)
        assert float(trace.state[r]["momentum"]["w"]) == pytest.approx(m, abs=1e-12)


def test_adaptive_servers_first_two_rounds_by_hand():
    """One client, one step at eta = 1 on Q1 with b = 0: Delta = -x exactly. tau = 1/2, so v_0 =
    1/4."""
    rounds, args = repeat({0: 0.0}, 2, 1), {"lr": 1.0, "server_lr": 0.1, "tau": 0.5, "beta1": 0.9}
    second = {
        "fedadam": lambda v, d: 0.99 * v + 0.01 * d**2,
        "fedyogi": lambda v, d: v - 0.01 * d**2 * math.copysign(1, v - d**2),
        "fedadagrad": lambda v, d: v + d**2,
    }
    for name, rule in second.items():
        for start in (0.25, 3.0):  # Delta^2 below and above v_0: both signs of Yogi
            x, m, v = start, 0.0, 0.25
            trace = getattr(ref, name)(scalar(start), q1, rounds, **args)
            for r in range(2):
                delta = -x
                m = 0.9 * m + 0.1 * delta
                v = rule(v, delta)
                x += 0.1 * m / (math.sqrt(v) + 0.5)
                assert values(trace)[r] == pytest.approx(x, abs=1e-14)
                assert float(trace.state[r]["v"]["w"]) == pytest.approx(v, abs=1e-14)
                assert float(trace.state[r]["m"]["w"]) == pytest.approx(m, abs=1e-14)
    # Round 1 of FedAdam in plain numbers: m = -0.3, v = 0.2475 + 0.09 = 0.3375.
    first = values(ref.fedadam(scalar(3.0), q1, rounds, **args))[0]
    assert first == pytest.approx(3 - 0.03 / (math.sqrt(0.3375) + 0.5), abs=1e-14)


def test_yogi_equals_adam_where_its_v_does():
    """v - (1-b) D^2 sign(v - D^2) with v = D^2 leaves v; so does b v + (1-b) D^2."""
    args = {"lr": 1.0, "server_lr": 0.1, "tau": 2.0}
    rounds = repeat({0: 0.0}, 1, 1)
    same_models(
        ref.fedyogi(scalar(2.0), q1, rounds, **args), ref.fedadam(scalar(2.0), q1, rounds, **args)
    )


# ----------------------------------------------------------------------------------------- SCAFFOLD


def test_scaffold_first_round_is_fedavgs(tiny, sizes):
    x0, gradient, data = tiny
    rounds = tiny_rounds(data)
    for weights in (None, sizes):
        args = {
            "lr": 0.3,
            "weight_decay": 0.01,
            "clip_norm": 0.4,
            "server_lr": 0.8,
            "weights": weights,
        }
        a, b = (
            ref.scaffold(x0, gradient, rounds, population=5, **args),
            ref.fedavg(x0, gradient, rounds, **args),
        )
        same(a.x[0], b.x[0])
        for r in (1, 2):  # round 1 has new clients only: c alone makes the difference
            assert not torch.allclose(a.x[r]["fc.weight"], b.x[r]["fc.weight"])


def test_scaffold_q1_two_rounds_by_hand():
    """Unequal steps and a schedule: c_i = (x - x_i) / (K_i eta_r), c = (1/N) sum; round 2 pulls to
    b_i + c_i - c."""
    b, K, eta, x = {0: 1.0, 1: 5.0}, {0: 6, 1: 2}, [0.2, 0.1], 4.0
    trace = ref.scaffold(scalar(x), q1, repeat(b, 2, K), lr=lambda r: eta[r], population=4)
    c, c_i = 0.0, {0: 0.0, 1: 0.0}
    for r in range(2):
        target = {i: b[i] + c_i[i] - c for i in b}
        y = {i: target[i] + (1 - eta[r]) ** K[i] * (x - target[i]) for i in b}
        new = {i: c_i[i] - c + (x - y[i]) / (K[i] * eta[r]) for i in b}
        c += sum(new[i] - c_i[i] for i in b) / 4
        c_i, x = new, (y[0] + y[1]) / 2
        state = trace.state[r]
        assert values(trace)[r] == pytest.approx(x, abs=1e-12)
        assert float(state["c"]["w"]) == pytest.approx(c, abs=1e-12)
        assert {i: float(v["w"]) for i, v in state["c_i"].items()} == pytest.approx(c_i, abs=1e-12)
        if r == 0:
            assert float(state["c"]["w"]) == pytest.approx(0.5 * (c_i[0] + c_i[1]) / 2, abs=1e-12)


def test_scaffold_c_is_the_plain_mean_of_all_c_i(tiny, sizes):
    x0, gradient, data = tiny
    for population in (5, 8):
        for weights in (None, sizes):
            rounds = tiny_rounds(data)
            trace = ref.scaffold(
                x0, gradient, rounds, lr=0.2, population=population, weights=weights
            )
            seen = set()
            for r, state in enumerate(trace.state):
                seen |= set(COHORTS[r])
                assert set(state["c_i"]) == seen
                for name in x0:
                    total = sum(c_i[name] for c_i in state["c_i"].values())
                    torch.testing.assert_close(state["c"][name], total / population, **EXACT)
                for i in seen - set(COHORTS[r]):
                    same(state["c_i"][i], trace.state[r - 1]["c_i"][i])


def test_scaffold_converges_to_the_mean_where_fedavg_does_not():
    b, K = {0: 0.0, 1: 9.0}, {0: 1, 1: 5}
    rounds = repeat(b, 200, K)
    assert values(ref.scaffold(scalar(0), q1, rounds, lr=0.1, population=2))[-1] == pytest.approx(
        4.5, abs=1e-9
    )
    assert abs(values(ref.fedavg(scalar(0), q1, rounds, lr=0.1))[-1] - 4.5) > 1


def test_scaffold_c_i_is_the_mean_gradient_seen(tiny):
    """(x - x_K) / (K eta) + c_i - c is the mean of the client's own gradients along its path."""
    x0, gradient, data = tiny
    seen = {}

    def recording(x, batch):
        g = gradient(x, batch)
        seen.setdefault(id(batch), []).append(g)
        return g

    rounds = tiny_rounds(data)
    trace = ref.scaffold(x0, recording, rounds, lr=0.2, population=5)
    for r, cohort in enumerate(rounds):
        for i, batches in cohort.items():
            for name in x0:
                mean = torch.stack([seen[id(batch)][0][name] for batch in batches]).mean(0)
                torch.testing.assert_close(trace.state[r]["c_i"][i][name], mean, **EXACT)


# -------------------------------------------------------------------------------- orthogonalisation


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (5, 5), (1, 4), (4, 1)])
def test_polar_svd_is_the_polar_factor(shape):
    G = normal(*shape)
    polar = ref.polar_svd(G)
    small = polar @ polar.T if shape[0] <= shape[1] else polar.T @ polar
    torch.testing.assert_close(small, torch.eye(min(shape), dtype=G.dtype), **EXACT)
    P = polar.T @ G  # G = polar P with P symmetric and positive semi-definite
    torch.testing.assert_close(P, P.T, **EXACT)
    assert torch.linalg.eigvalsh(P).min() > -1e-12
    torch.testing.assert_close(polar @ P, G, **EXACT)
    torch.testing.assert_close(ref.polar_svd(7 * G), polar, **EXACT)


def test_polar_svd_leaves_the_null_space_out():
    low = normal(6, 2, seed=1) @ normal(2, 5, seed=2)
    polar = ref.polar_svd(low)
    s = torch.linalg.svdvals(polar)
    torch.testing.assert_close(s, torch.tensor([1.0, 1, 0, 0, 0], dtype=s.dtype), **EXACT)
    assert not ref.polar_svd(torch.zeros(3, 4, dtype=torch.float64)).any()
    diagonal = torch.diag(torch.tensor([1.0, 1e-4], dtype=torch.float64))
    assert ref.polar_svd(diagonal, rtol=1e-3)[1, 1] == 0
    assert ref.polar_svd(diagonal)[1, 1] == pytest.approx(1)


@pytest.mark.parametrize("shape", [(3, 8), (8, 3), (4, 4)])
def test_newton_schulz_acts_on_the_singular_values(shape):
    G = normal(*shape)
    U, s, Vh = torch.linalg.svd(G, full_matrices=False)
    t = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        t = 3.4445 * t - 4.7750 * t**3 + 2.0315 * t**5
    torch.testing.assert_close(ref.newton_schulz(G), U @ torch.diag(t) @ Vh, rtol=0, atol=1e-10)
    torch.testing.assert_close(ref.newton_schulz(G.T), ref.newton_schulz(G).T, rtol=0, atol=1e-10)
    assert not ref.newton_schulz(torch.zeros(shape, dtype=torch.float64)).any()
    cubic = ref.newton_schulz(G, steps=60, coefficients=(1.5, -0.5, 0.0))
    torch.testing.assert_close(cubic, ref.polar_svd(G), rtol=0, atol=1e-10)


def test_step_scale_reads_the_flattened_convolution():
    assert ref.step_scale(8, 2, "none") == 1
    assert ref.step_scale(8, 2 * 9, "spectral") == 1
    assert ref.step_scale(32, 2 * 9, "spectral") == math.sqrt(32 / 18)
    assert ref.step_scale(8, 2 * 9, "rms") == 0.2 * math.sqrt(18)
    assert ref.step_scale(64, 16, "rms") == 0.2 * 8
    kernel = normal(32, 2, 3, 3)
    expected = math.sqrt(32 / 18) * ref.polar_svd(kernel.reshape(32, 18)).reshape(32, 2, 3, 3)
    torch.testing.assert_close(ref.direction(kernel, ref.polar_svd, "spectral"), expected, **EXACT)


# --------------------------------------------------------------------------------------------- Muon


@pytest.mark.parametrize("scale", ["spectral", "rms"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_local_muon_is_torch_muon_up_to_bfloat16(scale, nesterov):
    """PyTorch's momentum is an EMA, its Newton-Schulz runs in bfloat16: close, not equal."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    x0, target = {"w": normal(6, 4)}, normal(6, 4, seed=3)
    p = x0["w"].clone().requires_grad_()
    adjust = {"spectral": "original", "rms": "match_rms_adamw"}[scale]
    muon = torch.optim.Muon(
        [p], lr=0.05, momentum=0.9, nesterov=nesterov, weight_decay=0.1, adjust_lr_fn=adjust
    )
    for _ in range(6):
        p.grad = p.detach() - target
        muon.step()
    args = {
        "ema": True,
        "nesterov": nesterov,
        "scale": scale,
        "orthogonalize": ref.newton_schulz,
        "beta": 0.9,
    }
    trace = ref.local_muon(
        x0, q1, repeat({0: target}, 1, 6), lr=0.05, rest_lr=0.0, weight_decay=0.1, **args
    )
    assert (trace.x[0]["w"] - p.detach()).norm() < 0.02 * (p.detach() - x0["w"]).norm()


@pytest.mark.parametrize("align_rest", [False, True])
def test_fedmuon_without_alignment_and_averaging_is_local_muon(align_rest, tiny, sizes):
    x0, gradient, data = tiny
    rounds = tiny_rounds(data)
    for ema, nesterov, scale, orthogonalize in [
        (False, False, "none", ref.polar_svd),
        (True, True, "spectral", ref.newton_schulz),
        (False, True, "rms", ref.polar_svd),
    ]:
        args = {
            **MUON,
            "ema": ema,
            "nesterov": nesterov,
            "scale": scale,
            "orthogonalize": orthogonalize,
            "weight_decay": 0.1,
            "clip_norm": 0.3,
            "weights": sizes,
            "server_lr": 0.9,
        }
        local = ref.local_muon(x0, gradient, rounds, **args)
        fed = ref.fedmuon(
            x0, gradient, rounds, alpha=0.0, average_momentum=False, align_rest=align_rest, **args
        )
        same_models(local, fed)
        assert not torch.allclose(
            ref.fedmuon(x0, gradient, rounds, alpha=0.0, **args).x[-1]["fc.weight"],
            fed.x[-1]["fc.weight"],
        )


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_fedmuon_closed_form_on_a_constant_slope(shape):
    """Direction 1 at every step: Delta_g = 1 - alpha^r, whatever K_i, weights and schedule; the
    rest alike."""
    alpha, K, n, eta = 0.3, {0: 2, 1: 5}, {0: 3, 1: 1}, [0.1, 0.4, 0.2, 0.05]
    rate = {"lr": lambda r: eta[r], "rest_lr": lambda r: eta[r]}
    trace = ref.fedmuon(
        scalar(7, shape),
        linear,
        repeat({0: 2.0, 1: 0.5}, 4, K),
        alpha=alpha,
        eps=0.0,
        weights=n,
        server_lr=0.5,
        **rate,
    )
    x, K_bar = 7.0, 0.75 * 2 + 0.25 * 5
    for r in range(4):
        step = (1 - alpha) + alpha * (1 - alpha**r)
        assert float(trace.state[r]["delta_g"]["w"].reshape(())) == pytest.approx(
            1 - alpha ** (r + 1), abs=1e-12
        )
        x -= 0.5 * eta[r] * K_bar * step
        assert values(trace)[r] == pytest.approx(x, abs=1e-12)


def test_fedmuon_delta_g_is_weighted_as_the_models():
    """Slopes of opposite sign: client i's direction is (1-alpha) sign_i + alpha Delta_g."""
    alpha, K, w, sign = 0.3, {0: 2, 1: 5}, {0: 0.75, 1: 0.25}, {0: 1.0, 1: -1.0}
    args = {"lr": 0.1, "rest_lr": 0.0, "alpha": alpha, "weights": {0: 3, 1: 1}}
    rounds = repeat({0: 2.0, 1: -0.5}, 4, K)
    trace = ref.fedmuon(scalar(0, (1, 1)), linear, rounds, average_momentum=False, **args)
    x, delta = 0.0, 0.0
    for r in range(4):
        step = {i: (1 - alpha) * sign[i] + alpha * delta for i in K}
        x -= 0.1 * sum(w[i] * K[i] * step[i] for i in K)
        delta = sum(w[i] * step[i] for i in K)
        assert values(trace)[r] == pytest.approx(x, abs=1e-12)
        assert float(trace.state[r]["delta_g"]["w"]) == pytest.approx(delta, abs=1e-12)


def test_fedmuon_groups_have_their_own_rate_and_the_rest_may_stay_unaligned():
    x0 = {"m": torch.zeros(1, 1, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}
    rounds, args = repeat({0: 1.0}, 3, 4), {"lr": 0.1, "rest_lr": 0.01, "alpha": 0.5, "eps": 0.0}
    on, off = (ref.fedmuon(x0, linear, rounds, align_rest=a, **args) for a in (True, False))
    for r in range(3):
        aligned = sum(1 - 0.5 ** (j + 1) for j in range(r + 1))
        assert float(on.x[r]["m"]) == pytest.approx(-0.4 * aligned) == float(off.x[r]["m"])
        assert float(on.x[r]["b"]) == pytest.approx(-0.04 * aligned)
        assert float(off.x[r]["b"]) == pytest.approx(
            -0.04 * (r + 1)
        )  # the full step, no (1 - alpha)


def test_fedmuon_by_pattern_a_matrix_can_belong_to_the_rest():
    x0 = {
        "m": torch.zeros(1, 1, dtype=torch.float64),
        "head": torch.zeros(1, 1, dtype=torch.float64),
    }
    args = {"lr": 0.1, "rest_lr": 0.01, "eps": 0.0, "matrix": lambda name, p: name == "m"}
    trace = ref.fedmuon(x0, linear, repeat({0: 1.0}, 2, 4), **args)
    assert set(trace.state[0]["momentum"]) == {"m"}
    assert float(trace.x[0]["head"]) == pytest.approx(-0.02)


@pytest.mark.parametrize("ema", [False, True])
def test_fedmuon_momentum_is_averaged_with_the_models_weights(ema):
    """A constant slope s gives M_i = beta^K M_bar + s (1 - beta^K) / (1 - beta), or s (1 - beta^K)
    as an EMA."""
    beta, K, n, slope = 0.8, {0: 2, 1: 5}, {0: 3, 1: 1}, {0: 2.0, 1: -0.5}
    trace = ref.fedmuon(
        scalar(0, (1, 1)), linear, repeat(slope, 3, K), beta=beta, ema=ema, weights=n, **MUON
    )
    M, w = 0.0, {0: 0.75, 1: 0.25}
    for r in range(3):
        gain = 1 if ema else 1 / (1 - beta)
        M = sum(w[i] * (beta ** K[i] * M + slope[i] * gain * (1 - beta ** K[i])) for i in K)
        assert float(trace.state[r]["momentum"]["w"]) == pytest.approx(M, abs=1e-12)


def test_fedmuon_weight_decay_is_decoupled_scaled_and_first():
    """From x = 10, one step: 10 (1 - (1-alpha) eta wd) - (1-alpha) eta, and the full rate for an
    unaligned rest."""
    x0 = {
        "m": torch.full((1, 1), 10.0, dtype=torch.float64),
        "b": torch.full((1,), 10.0, dtype=torch.float64),
    }
    args = {"lr": 0.2, "rest_lr": 0.1, "alpha": 0.25, "weight_decay": 0.5, "eps": 0.0}
    on, off = (
        ref.fedmuon(x0, linear, repeat({0: 1.0}, 2, 1), align_rest=a, **args) for a in (True, False)
    )
    assert float(on.x[0]["m"]) == pytest.approx(10 * (1 - 0.75 * 0.2 * 0.5) - 0.75 * 0.2, abs=1e-12)
    assert float(on.x[0]["b"]) == pytest.approx(10 * (1 - 0.75 * 0.1 * 0.5) - 0.75 * 0.1, abs=1e-12)
    assert float(off.x[0]["b"]) == pytest.approx(10 * (1 - 0.1 * 0.5) - 0.1, abs=1e-12)
    x1 = float(on.x[0]["m"])
    pull = (
        10 - x1
    ) / 0.2  # Delta_g is the whole displacement, decay included, and is not decayed itself
    assert float(on.x[1]["m"]) == pytest.approx(
        x1 * (1 - 0.075) - 0.15 - 0.25 * 0.2 * pull, abs=1e-12
    )


@pytest.mark.parametrize("nesterov", [False, True])
def test_fedmuon_classic_momentum_and_ema_orthogonalise_alike(nesterov, tiny):
    x0, gradient, data = tiny
    rounds = tiny_rounds(data)
    classic, ema = (
        ref.fedmuon(x0, gradient, rounds, ema=e, nesterov=nesterov, **MUON) for e in (False, True)
    )
    same_models(classic, ema, rtol=0, atol=1e-11)
    for c, e in zip(classic.state, ema.state, strict=True):
        for name in c["momentum"]:
            torch.testing.assert_close(
                (1 - 0.95) * c["momentum"][name], e["momentum"][name], **EXACT
            )


def test_fedmuon_eta_cancels(tiny):
    """D_{r+1} = (1 - alpha) D_loc + alpha D_r for constant eta and equal K (D: the move of the
    global model)."""
    x0, gradient, data = tiny
    alpha, eta, K = 0.4, 0.05, 3
    rounds, calls = tiny_rounds(data, steps=K), []

    def recording(G):
        calls.append(ref.polar_svd(G))
        return calls[-1]

    trace = ref.fedmuon(
        x0,
        gradient,
        rounds,
        lr=eta,
        rest_lr=eta,
        alpha=alpha,
        orthogonalize=recording,
        betas=BETAS,
        eps=EPS,
    )
    before, D, calls = x0, ref.zeros(x0), iter(calls)
    for r, cohort in enumerate(rounds):
        local = ref.zeros(x0)
        for _ in range(len(cohort) * K):
            for name in ("conv.weight", "fc.weight"):
                local[name] -= eta / len(cohort) * next(calls).reshape(x0[name].shape)
        move = ref.subtract(trace.x[r], before)
        for name in ("conv.weight", "fc.weight"):
            torch.testing.assert_close(
                move[name], (1 - alpha) * local[name] + alpha * D[name], **EXACT
            )
        for name in x0:  # and Delta_g is that move over K eta, for every parameter
            torch.testing.assert_close(
                trace.state[r]["delta_g"][name], -move[name] / (K * eta), **EXACT
            )
        before, D = trace.x[r], move


def test_fedmuon_official_by_hand():
    """Slope 1 everywhere: the directions are f, five steps of the quintic from 1, and Adam's 1. The
    pull of the second round is gamma / K of the first's move, times the rates' ratio. To 1e-5, as
    the iteration starts from u / (|u| + 1e-7) with u = 0.04 at first."""
    x0 = {"m": torch.zeros(1, 1, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}
    eta, K, gamma = [0.1, 0.04], 3, 0.25
    trace = ref.fedmuon_official(
        x0,
        linear,
        repeat({0: 1.0}, 2, K),
        lr=lambda r: eta[r],
        alpha=0.5,
        gamma=gamma,
        K=K,
        weight_decay=0.0,
        eps=0.0,
    )
    f = 1.0
    for _ in range(5):
        f = 3.4445 * f - 4.7750 * f**3 + 2.0315 * f**5
    for name, factor, size in (("m", 0.5, f), ("b", 1.0, 1.0)):
        first = -K * eta[0] * factor * (1 - gamma) * size
        second = -K * eta[1] * factor * (1 - gamma) * size + gamma * first * eta[1] / eta[0]
        assert float(trace.x[0][name]) == pytest.approx(first, abs=1e-5)
        assert float(trace.x[1][name]) == pytest.approx(first + second, abs=1e-5)
        assert float(trace.state[1]["m"][name]) == pytest.approx(second / eta[1], abs=1e-5)


@pytest.mark.parametrize(("ratio", "rank"), [(0.01, 1), (0.3, 1), (0.5, 1), (0.9, 2), (1, 3)])
def test_truncation_is_the_best_of_its_rank(ratio, rank):
    M = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    M = M if ratio < 0.9 else M.repeat(1, 1, 3)  # 3 x 24: 72 numbers, 28 a rank
    s = torch.linalg.svdvals(M.flatten(1))
    got = ref.truncate(M, ratio)
    assert got.shape == M.shape
    assert int(torch.linalg.matrix_rank(got.flatten(1))) == rank
    assert float(((M - got) ** 2).sum()) == pytest.approx(float((s[rank:] ** 2).sum()), abs=1e-12)


def test_fedmuon_with_truncation_of_rank_one_matrices_is_fedmuon(tiny):
    x0, gradient, data = tiny
    rounds = tiny_rounds(data)
    plain = ref.fedmuon(x0, gradient, rounds, **MUON)
    same_models(plain, ref.fedmuon(x0, gradient, rounds, ratio=1.0, error_feedback=True, **MUON))
    low, fed = (
        ref.fedmuon(x0, gradient, rounds, ratio=0.3, error_feedback=e, **MUON)
        for e in (False, True)
    )
    for trace in (low, fed):
        for state in trace.state:
            ranks = [
                int(torch.linalg.matrix_rank(M.flatten(1))) for M in state["momentum"].values()
            ]
            assert ranks == [1, 1]
    assert not torch.allclose(plain.x[-1]["fc.weight"], low.x[-1]["fc.weight"], rtol=0, atol=1e-6)
    assert not torch.allclose(fed.x[-1]["fc.weight"], low.x[-1]["fc.weight"], rtol=0, atol=1e-6)
    one = dict.fromkeys(["lr", "rest_lr"], 0.1)
    narrow = {"w": torch.zeros(1, 6, dtype=torch.float64)}
    same_models(
        *(ref.fedmuon(narrow, linear, repeat({0: 1.0}, 3, 2), ratio=q, **one) for q in (None, 0.2))
    )


def test_fedmuon_polar_factor_is_well_posed_on_the_tiny_problem(tiny):
    """The head's gradient has rank 2 of 3 (softmax rows sum to 0): nothing may lie near the cut at
    1e-10."""
    x0, gradient, data = tiny
    ratios = []

    def recording(G):
        s = torch.linalg.svdvals(G)
        ratios.extend((s / s[0]).tolist())
        return ref.polar_svd(G)

    ref.fedmuon(x0, gradient, tiny_rounds(data) * 2, orthogonalize=recording, **MUON)
    assert not [q for q in ratios if 1e-13 < q < 1e-4]


# --------------------------------------------------------------------------------- the second batch


def test_fedprox_without_mu_is_fedavg(tiny, sizes):
    x0, gradient, data = tiny
    rounds, args = (
        tiny_rounds(data),
        {"lr": 0.3, "weight_decay": 0.01, "momentum": 0.5, "clip_norm": 0.4},
    )
    for weights in (None, sizes):
        avg = ref.fedavg(x0, gradient, rounds, weights=weights, **args)
        same_models(avg, ref.fedprox(x0, gradient, rounds, mu=0.0, weights=weights, **args))


def test_fedprox_q1_closed_form():
    """g + mu (y - x) = (1 + mu) (y - y*), y* = (b + mu x) / (1 + mu)."""
    eta, mu, K, x, b = 0.2, 0.7, {0: 2, 1: 4}, 5.0, {0: 1.0, 1: -3.0}
    trace = ref.fedprox(scalar(x), q1, repeat(b, 3, K), lr=eta, mu=mu)
    for value in values(trace):
        star = {i: (b[i] + mu * x) / (1 + mu) for i in b}
        x = sum(star[i] + (1 - eta * (1 + mu)) ** K[i] * (x - star[i]) for i in b) / 2
        assert value == pytest.approx(x, abs=1e-12)


def test_feddyn_first_round_is_fedprox_pushed_on(tiny):
    """l_i = 0: the clients are FedProx's with mu = alpha; the server adds (1/m) sum (x_i - x) to
    their mean."""
    x0, gradient, data = tiny
    rounds = tiny_rounds(data)[:1]
    dyn = ref.feddyn(x0, gradient, rounds, lr=0.3, alpha=0.5, population=5)
    prox = ref.fedprox(x0, gradient, rounds, lr=0.3, mu=0.5)
    for name in x0:
        expected = prox.x[0][name] + len(rounds[0]) / 5 * (prox.x[0][name] - x0[name])
        torch.testing.assert_close(dyn.x[0][name], expected, **EXACT)


def test_feddyn_h_is_the_plain_mean_of_all_l_i(tiny, sizes):
    x0, gradient, data = tiny
    for weights in (None, sizes):
        trace = ref.feddyn(
            x0, gradient, tiny_rounds(data), lr=0.2, alpha=0.3, population=8, weights=weights
        )
        for state in trace.state:
            for name in x0:
                total = sum(l_i[name] for l_i in state["l_i"].values())
                torch.testing.assert_close(state["h"][name], total / 8, **EXACT)


def test_feddyn_converges_to_the_mean_and_its_l_i_to_the_gradients():
    b = {0: 0.0, 1: 9.0}
    trace = ref.feddyn(scalar(0), q1, repeat(b, 150, {0: 2, 1: 5}), lr=0.3, alpha=0.5, population=2)
    assert values(trace)[-1] == pytest.approx(4.5, abs=1e-8)
    assert float(trace.state[-1]["h"]["w"]) == pytest.approx(0, abs=1e-8)
    assert float(trace.state[-1]["l_i"][1]["w"]) == pytest.approx(4.5 - 9.0, abs=1e-8)


def test_feddyn_q1_two_rounds_by_hand():
    eta, alpha, K, x, b = 0.1, 0.5, {0: 2, 1: 3}, 4.0, {0: 1.0, 1: -3.0}
    trace = ref.feddyn(scalar(x), q1, repeat(b, 2, K), lr=eta, alpha=alpha, population=3)
    h, l_i = 0.0, {0: 0.0, 1: 0.0}
    for value in values(trace):
        y = {}
        for i in b:
            star = (b[i] + l_i[i] + alpha * x) / (1 + alpha)
            y[i] = star + (1 - eta * (1 + alpha)) ** K[i] * (x - star)
            l_i[i] -= alpha * (y[i] - x)
        h -= alpha / 3 * sum(y[i] - x for i in b)
        x = (y[0] + y[1]) / 2 - h / alpha
        assert value == pytest.approx(x, abs=1e-12)


def test_fedbn_without_local_layers_is_fedavg_and_with_all_is_training_alone(tiny, sizes):
    x0, gradient, data = tiny
    rounds = tiny_rounds(data)
    for weights in (None, sizes):
        avg = ref.fedavg(x0, gradient, rounds, lr=0.3, weights=weights, clip_norm=0.4)
        bn = ref.fedbn(x0, gradient, rounds, lr=0.3, weights=weights, clip_norm=0.4)
        same_models(avg, bn)
    alone = ref.fedbn(x0, gradient, rounds, lr=0.3, local=lambda name: True)
    same(alone.x[-1], x0)
    for i, own in alone.state[-1]["own"].items():
        batches = [batch for cohort in rounds for batch in cohort.get(i, [])]
        same(own, ref.local_sgd(x0, gradient, batches, lr=0.3))


def test_fedbn_q1_closed_form():
    """A shared weight and a local one, in separate losses, with running "statistics" b."""
    eta, K, b, n0 = 0.2, {0: 2, 1: 3, 2: 1}, {0: 1.0, 1: -3.0, 2: 5.0}, 4.0

    def gradient(x, batch):
        return {"w": x["w"] - batch, "norm": x["norm"] - 2 * batch}

    rounds = [{i: [b[i]] * K[i] for i in cohort} for cohort in ((0, 1), (1, 2), (0, 1))]
    trace = ref.fedbn(
        {**scalar(0), "norm": torch.full((1,), n0, dtype=torch.float64)},
        gradient,
        rounds,
        lr=eta,
        statistics=lambda x, batch: scalar(batch),
        s0=scalar(1),
    )
    x, steps = 0.0, dict.fromkeys(b, 0)
    for r, cohort in enumerate(rounds):
        x = sum(b[i] + (1 - eta) ** K[i] * (x - b[i]) for i in cohort) / 2
        assert values(trace)[r] == pytest.approx(x, abs=1e-12)
        assert float(trace.x[r]["norm"]) == n0
        for i in cohort:
            steps[i] += K[i]
        for i, own in trace.state[r]["own"].items():
            expected = 2 * b[i] + (1 - eta) ** steps[i] * (n0 - 2 * b[i])
            assert float(own["norm"]) == pytest.approx(expected, abs=1e-12)
            expected = b[i] + 0.9 ** steps[i] * (1 - b[i])
            assert float(trace.state[r]["s"][i]["w"]) == pytest.approx(expected, abs=1e-12)


def test_norm_problem_is_torch_batch_norm():
    x, s0, data = ref.norm_problem()
    inputs, labels = data[3]
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3, bias=False),
        torch.nn.BatchNorm2d(2),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 3),
    ).double()
    names = ["conv.weight", "norm.weight", "norm.bias", "fc.weight", "fc.bias"]
    with torch.no_grad():
        for p, name in zip(network.parameters(), names, strict=True):
            p.copy_(x[name])
    torch.nn.functional.cross_entropy(network(inputs), labels).backward()
    gradient = ref.norm_gradient(x, data[3])
    same(gradient, {n: p.grad for n, p in zip(names, network.parameters(), strict=True)})
    s = ref.add(ref.times(s0, 0.9), ref.norm_statistics(x, data[3]), 0.1)
    torch.testing.assert_close(s["norm.running_mean"], network[1].running_mean, **EXACT)
    torch.testing.assert_close(s["norm.running_var"], network[1].running_var, **EXACT)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_fednova_with_equal_steps_is_fedavg(momentum, nesterov, tiny, sizes):
    x0, gradient, data = tiny
    rounds = tiny_rounds(data, steps=3)
    args = {
        "lr": 0.2,
        "momentum": momentum,
        "nesterov": nesterov,
        "weight_decay": 0.01,
        "weights": sizes,
    }
    same_models(ref.fednova(x0, gradient, rounds, **args), ref.fedavg(x0, gradient, rounds, **args))


def test_fednova_normalises_by_the_weight_of_the_gradients():
    """On constant slopes every client's direction is its slope, whatever its steps and momentum."""
    slope, K, n, rho = {0: 2.0, 1: -1.0}, {0: 1, 1: 4}, {0: 3, 1: 1}, 0.5
    a = {0: 1.0, 1: 1 + 1.5 + 1.75 + 1.875}  # (1 - rho^j) / (1 - rho), summed
    mean = 0.75 * 2.0 - 0.25 * 1.0
    ahead = {0: 1.5, 1: 4 + rho * a[1]}  # Nesterov: 1 + rho (1 - rho^j) / (1 - rho), summed
    for tau, nesterov, steps in [
        ("normaliser", False, 0.75 * a[0] + 0.25 * a[1]),
        ("normaliser", True, 0.75 * ahead[0] + 0.25 * ahead[1]),
        ("steps", False, 0.75 * 1 + 0.25 * 4),
    ]:
        args = {"lr": 0.1, "momentum": rho, "nesterov": nesterov, "tau_eff": tau, "weights": n}
        trace = ref.fednova(scalar(0), linear, repeat(slope, 3, K), **args)
        assert values(trace) == pytest.approx(
            [-0.1 * steps * mean * (r + 1) for r in range(3)], abs=1e-12
        )


def test_fednova_fixed_point_is_near_the_weighted_mean_and_fedavgs_is_not():
    """Starting at FedAvg's fixed point: it stays there, FedNova leaves it for the mean, up to
    O(eta)."""
    rounds = repeat({0: 0.0, 1: 6.0}, 200, {0: 1, 1: 5})
    assert values(ref.fednova(scalar(5), q1, rounds, lr=0.01))[-1] == pytest.approx(3.0, abs=0.07)
    assert values(ref.fedavg(scalar(5), q1, rounds, lr=0.01))[-1] == pytest.approx(5.0, abs=0.07)


def test_mime_on_quadratics_of_equal_curvature_is_the_centralised_method():
    """The correction makes every client's gradient that of the mean loss, so drift is gone: K
    central steps."""
    b, eta, beta, K, x, m = {0: 1.0, 1: 5.0, 2: -3.0}, 0.1, 0.8, 4, 10.0, 0.0
    weights = {0: 1, 1: 2, 2: 1}  # the mean of b, so weighted, is 2
    trace = ref.mime(scalar(x), q1, repeat(b, 4, K), data=b, lr=eta, beta=beta, weights=weights)
    for r, value in enumerate(values(trace)):
        y = x
        for _ in range(K):
            y -= eta * ((1 - beta) * (y - 2.0) + beta * m)
        m = (1 - beta) * (x - 2.0) + beta * m
        x = y
        assert value == pytest.approx(x, abs=1e-12)
        assert float(trace.state[r]["momentum"]["w"]) == pytest.approx(m, abs=1e-12)


@pytest.mark.parametrize("name", ["mime", "mimelite"])
def test_mime_with_one_full_step_is_centralised_momentum(name, tiny):
    x0, gradient, data = tiny
    rounds = [{i: [data[i]] for i in data}] * 5
    trace = getattr(ref, name)(
        x0, gradient, rounds, data=data, lr=0.3, beta=0.9, ema=False, weight_decay=0.01
    )
    p = {n: v.clone().requires_grad_() for n, v in x0.items()}
    sgd = torch.optim.SGD(p.values(), lr=0.3, momentum=0.9, weight_decay=0.01)
    for x in trace.x:
        sgd.zero_grad()
        torch.stack([ref.tiny_loss(p, d) for d in data.values()]).mean().backward()
        sgd.step()
        same(x, {n: v.detach() for n, v in p.items()})


def test_mimelite_without_momentum_is_fedavg_and_mime_is_not(tiny, sizes):
    x0, gradient, data = tiny
    rounds, args = (
        tiny_rounds(data),
        {"lr": 0.3, "weight_decay": 0.01, "clip_norm": 0.4, "weights": sizes},
    )
    avg = ref.fedavg(x0, gradient, rounds, **args)
    same_models(avg, ref.mimelite(x0, gradient, rounds, data=data, beta=0.0, **args))
    mime = ref.mime(x0, gradient, rounds, data=data, beta=0.0, **args)
    assert not torch.allclose(mime.x[0]["fc.weight"], avg.x[0]["fc.weight"])


def test_fedcm_with_alpha_one_is_fedavg(tiny, sizes):
    x0, gradient, data = tiny
    rounds, args = (
        tiny_rounds(data),
        {"lr": 0.3, "weight_decay": 0.01, "clip_norm": 0.4, "weights": sizes},
    )
    same_models(
        ref.fedavg(x0, gradient, rounds, **args), ref.fedcm(x0, gradient, rounds, alpha=1.0, **args)
    )


def test_fedcm_closed_form_on_constant_slopes():
    """Delta is an EMA of the mean slope, whatever K_i, schedule and server rate."""
    slope, K, n, eta, alpha = {0: 2.0, 1: -1.0}, {0: 1, 1: 4}, {0: 3, 1: 1}, [0.1, 0.4, 0.2], 0.3
    trace = ref.fedcm(
        scalar(0),
        linear,
        repeat(slope, 3, K),
        lr=lambda r: eta[r],
        alpha=alpha,
        weights=n,
        server_lr=0.5,
    )
    x, delta = 0.0, 0.0
    for r in range(3):
        step = {i: alpha * slope[i] + (1 - alpha) * delta for i in slope}
        x -= 0.5 * eta[r] * (0.75 * 1 * step[0] + 0.25 * 4 * step[1])
        delta = alpha * 1.25 + (1 - alpha) * delta
        assert values(trace)[r] == pytest.approx(x, abs=1e-12)
        assert float(trace.state[r]["delta"]["w"]) == pytest.approx(delta, abs=1e-12)


def test_fedacg_without_its_two_parts_is_fedavg(tiny, sizes):
    x0, gradient, data = tiny
    rounds, args = (
        tiny_rounds(data),
        {"lr": 0.3, "weight_decay": 0.01, "clip_norm": 0.4, "weights": sizes},
    )
    same_models(
        ref.fedavg(x0, gradient, rounds, **args),
        ref.fedacg(x0, gradient, rounds, lam=0.0, beta=0.0, **args),
    )


def test_fedacg_q1_closed_form():
    eta, lam, beta, K, x, m, b = 0.2, 0.8, 0.5, 3, 5.0, 0.0, {0: 1.0, 1: -3.0}
    trace = ref.fedacg(scalar(x), q1, repeat(b, 4, K), lr=eta, lam=lam, beta=beta)
    for r, value in enumerate(values(trace)):
        z = x + lam * m
        star = {i: (b[i] + beta * z) / (1 + beta) for i in b}
        mean = sum(star[i] + (1 - eta * (1 + beta)) ** K * (z - star[i]) for i in b) / 2
        x, m = mean, mean - x
        assert value == pytest.approx(x, abs=1e-12)
        assert float(trace.state[r]["momentum"]["w"]) == pytest.approx(m, abs=1e-12)


@pytest.mark.parametrize("amsgrad", [True, False])
def test_fedlada_by_hand(amsgrad):
    b1, b2, eps, alpha, eta, K, b = (
        0.9,
        0.5,
        0.1,
        0.3,
        [0.05, 0.02],
        {0: 2, 1: 3},
        {0: 1.0, 1: -3.0},
    )
    args = {
        "lr": lambda r: eta[r],
        "alpha": alpha,
        "betas": (b1, b2),
        "eps": eps,
        "amsgrad": amsgrad,
    }
    trace = ref.fedlada(scalar(2), q1, repeat(b, 2, K), **args)
    x, v_bar, g_a = 2.0, eps**2 if amsgrad else 0.0, 0.0
    for r in range(2):
        y, hat, direction = {}, {}, {}
        for i in b:
            y[i], m, v, hat[i] = x, 0.0, v_bar, v_bar
            for _ in range(K[i]):
                g = y[i] - b[i]
                m = b1 * m + (1 - b1) * g
                v = b2 * v + (1 - b2) * g * g
                hat[i] = max(hat[i], v) if amsgrad else v
                root = math.sqrt(hat[i]) + (0 if amsgrad else eps)
                y[i] -= eta[r] * (alpha * m / root + (1 - alpha) * g_a)
            direction[i] = (x - y[i]) / (K[i] * eta[r])
        x, v_bar, g_a = (y[0] + y[1]) / 2, (hat[0] + hat[1]) / 2, (direction[0] + direction[1]) / 2
        assert values(trace)[r] == pytest.approx(x, abs=1e-12)
        assert float(trace.state[r]["v"]["w"]) == pytest.approx(v_bar, abs=1e-12)
        assert float(trace.state[r]["g_a"]["w"]) == pytest.approx(g_a, abs=1e-12)


def test_fedpac_with_nothing_shared_is_fedavg_adamw(tiny, sizes):
    x0, gradient, data = tiny
    args = {"lr": 0.02, "weight_decay": 0.1, "weights": sizes, "clip_norm": 0.5}
    rounds = tiny_rounds(data)
    a = ref.fedpac(x0, gradient, rounds, optimizer=ref.adam(), averaged=(), alpha=0.0, **args)
    same_models(a, ref.fedavg_adamw(x0, gradient, rounds, **args))


def test_fedpac_around_muons_momentum_is_fedmuon_without_orthogonalisation():
    x0, rounds = scalar(1.0, (2, 2)), repeat({0: 0.3, 1: -2.0}, 5, {0: 3, 1: 2})
    args = {"lr": 0.1, "weights": {0: 3, 1: 1}, "clip_norm": 1.5, "weight_decay": 0.1}
    ball = {"optimizer": ref.heavy_ball(0.9), "averaged": ("momentum",)}
    muon = {"rest_lr": 0.1, "beta": 0.9, "orthogonalize": lambda M: M}
    a, b = ref.fedpac(x0, q1, rounds, **ball, **args), ref.fedmuon(x0, q1, rounds, **muon, **args)
    same_models(a, b)
    for mine, theirs in zip(a.state, b.state, strict=True):
        same(mine["momentum"], theirs["momentum"])
        same(mine["delta_g"], theirs["delta_g"])


def test_fedpac_q1_closed_form():
    # Heavy ball on a linear loss: the average momentum of rounds of K steps is that of r K steps.
    slope, beta, eta, K = 2.0, 0.5, 0.1, 3
    rounds = repeat({0: slope, 1: slope}, 4, K)
    arguments = {"optimizer": ref.heavy_ball(beta), "averaged": ("momentum",), "alpha": 0.0}
    trace = ref.fedpac(scalar(1.0), linear, rounds, lr=eta, **arguments)
    momenta = [slope * (1 - beta**k) / (1 - beta) for k in range(1, 4 * K + 1)]
    expected = [1.0 - eta * sum(momenta[: K * r]) for r in range(1, 5)]
    assert values(trace) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("skip_first", [True, False])
def test_soap_on_a_diagonal_problem_is_adam(skip_first):
    # Diagonal gradients have the axes as eigenvectors; whatever their order, Adam is Adam.
    generator = torch.Generator().manual_seed(0)
    grads = [torch.diag(torch.randn(4, generator=generator, dtype=torch.float64)) for _ in range(7)]
    empty, step = ref.soap((0.9, 0.8), 1e-8, frequency=2, skip_first=skip_first)
    empty_adam, adam = ref.adam((0.9, 0.8), 1e-8)
    state, adam_state = empty(grads[0]), empty_adam(grads[0])
    for k, g in enumerate(grads):
        state, d = step(state, g)
        if k == 0 and skip_first:
            assert d is None
            continue
        adam_state, expected = adam(adam_state, g)
        torch.testing.assert_close(d, expected, **EXACT)


def test_soap_turns_with_the_coordinates():
    generator = torch.Generator().manual_seed(1)
    grads = torch.randn(6, 3, 3, generator=generator, dtype=torch.float64)
    u, w = torch.linalg.qr(grads[0])[0], torch.linalg.qr(grads[1])[0]
    empty, step = ref.soap(eps=1e-12, frequency=2)
    state, turned = empty(grads[0]), empty(grads[0])
    for g in grads:
        state, d = step(state, g)
        turned, e = step(turned, u @ g @ w)
        if d is not None:
            torch.testing.assert_close(e, u @ d @ w, rtol=0, atol=1e-9)


def test_fedadamw_first_round_is_fedavg_adamw(tiny, sizes):
    """No Delta, no v yet, and both count steps from 1."""
    x0, gradient, data = tiny
    args = {"lr": 0.02, "weight_decay": 0.1, "clip_norm": 0.3, "betas": BETAS, "weights": sizes}
    a = ref.fedadamw(x0, gradient, tiny_rounds(data), alpha=0.7, **args)
    b = ref.fedavg_adamw(x0, gradient, tiny_rounds(data), **args)
    same(a.x[0], b.x[0])
    assert not torch.allclose(a.x[1]["fc.weight"], b.x[1]["fc.weight"])


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize("block", [ref.whole_tensor_mean, lambda name, v: v])
def test_fedadamw_by_hand(block, shrink):
    b1, b2, eps, alpha, wd, eta, K = 0.9, 0.5, 0.1, 0.3, 0.2, 0.05, {0: 2, 1: 3}
    b = {0: torch.tensor([1.0, 4.0]).double(), 1: torch.tensor([-3.0, 0.0]).double()}
    args = {
        "lr": eta,
        "alpha": alpha,
        "betas": (b1, b2),
        "eps": eps,
        "weight_decay": wd,
        "block_mean": block,
    }
    x0 = {"w": torch.tensor([2.0, 3.0]).double()}
    trace = ref.fedadamw(x0, q1, repeat(b, 2, K), shrink_local=shrink, **args)
    x, v_bar, delta, d = x0["w"], torch.zeros(2).double(), torch.zeros(2).double(), 1.0
    for r in range(2):
        y, sent, direction = {}, {}, {}
        for i in b:
            y[i], m, v = x, torch.zeros(2).double(), v_bar
            for k in range(1, K[i] + 1):
                g = y[i] - b[i]
                m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
                adam = m / (1 - b1**k) / ((v / (1 - d * b2**k)).sqrt() + eps)
                y[i] = y[i] * (1 - eta * wd) - eta * (
                    (1 - alpha if shrink else 1) * adam + alpha * delta
                )
            sent[i] = v.mean().repeat(2) if block is ref.whole_tensor_mean else v
            direction[i] = (x - y[i]) / (K[i] * eta)
        x, v_bar, delta = (
            (y[0] + y[1]) / 2,
            (sent[0] + sent[1]) / 2,
            (direction[0] + direction[1]) / 2,
        )
        d *= (b2 ** K[0] + b2 ** K[1]) / 2
        same(trace.x[r], {"w": x})
        same(trace.state[r]["v"], {"w": v_bar})
        same(trace.state[r]["delta"], {"w": delta})


def test_fedadamw_corrects_the_bias_of_unequal_work():
    """With a constant gradient the corrected second moment is its square, whatever the K_i."""
    rounds = repeat({0: 2.0, 1: 2.0, 2: 2.0}, 4, {0: 1, 1: 4, 2: 9})
    trace = ref.fedadamw(scalar(0), linear, rounds, lr=0.1, weight_decay=0.0, betas=(0.0, 0.7))
    for state in trace.state:
        assert float(state["v"]["w"] / state["v_weight"][""]) == pytest.approx(4.0, abs=1e-12)


def test_fedadamw_counts_the_steps_of_all_rounds():
    """With one K for all, the decay is beta2^t."""
    args = {"lr": 0.1, "weight_decay": 0.0, "betas": (0.5, 0.7)}
    b = {0: 1.0, 1: -2.0}
    a = ref.fedadamw(scalar(3), q1, repeat(b, 3, 4), **args)
    same_models(a, ref.fedadamw(scalar(3), q1, repeat(b, 3, 4), steps_per_round=4, **args))
    assert [1 - float(s["v_weight"][""]) for s in a.state] == pytest.approx(
        [0.7**4, 0.7**8, 0.7**12]
    )


def test_fedmuon_lmo_without_the_lmo_is_scaffold():
    """alpha = 1, one step: M_i is the gradient at x, as SCAFFOLD's c_i; the server rate is S/n."""
    b = {0: normal(3, 4, seed=1), 1: normal(3, 4, seed=2), 2: normal(3, 4, seed=3)}
    cohorts = [(0, 1), (1, 2), (0, 2), (2, 1)]
    rounds = [{i: [b[i]] for i in cohort} for cohort in cohorts]
    lmo = ref.fedmuon_lmo(
        {"w": normal(3, 4)}, q1, rounds, lr=0.2, population=3, alpha=1.0, orthogonalize=lambda G: G
    )
    scaffold = ref.scaffold({"w": normal(3, 4)}, q1, rounds, lr=0.2, population=3, server_lr=2 / 3)
    same_models(lmo, scaffold)
    for mine, theirs in zip(lmo.state, scaffold.state, strict=True):
        same(flat(mine), flat(theirs))


def test_fedmuon_lmo_directions_are_unit_and_c_is_the_plain_mean(tiny, sizes):
    x0, gradient, data = tiny
    for keep in (True, False):
        args = {"lr": 0.01, "population": 8, "keep_momentum": keep, "weights": sizes}
        trace = ref.fedmuon_lmo(x0, gradient, tiny_rounds(data), **args)
        for state in trace.state:
            for name in x0:
                total = sum(c_i[name] for c_i in state["c_i"].values())
                torch.testing.assert_close(state["c"][name], total / 8, **EXACT)
    one = ref.fedmuon_lmo(x0, gradient, [{0: [data[0]]}], lr=0.01, population=1)
    moved = ref.subtract(x0, one.x[0])
    assert float(moved["fc.bias"].norm()) == pytest.approx(0.01, abs=1e-12)
    assert torch.linalg.svdvals(moved["conv.weight"].flatten(1)).tolist() == pytest.approx(
        [0.01] * 2, abs=1e-12
    )
    g = gradient(x0, data[0])["fc.bias"]
    torch.testing.assert_close(moved["fc.bias"], 0.01 * g / g.norm(), **EXACT)


@pytest.mark.parametrize("keep", [True, False])
def test_fedmuon_lmo_by_hand(keep):
    """1 x 1 matrices, lmo = -sign; slopes of opposite sign, S = 2 of n = 4."""
    slope, alpha, eta, x, C = {0: 3.0, 1: -1.0}, 0.25, 0.1, 0.0, 0.0
    args = {"lr": eta, "population": 4, "alpha": alpha, "keep_momentum": keep}
    trace = ref.fedmuon_lmo(scalar(0, (1, 1)), linear, repeat(slope, 4, 3), **args)
    C_i = {0: 0.0, 1: 0.0}
    for r in range(4):
        move, new = 0.0, {}
        for i in slope:
            M = C_i[i] if keep else 0.0
            for _ in range(3):
                M = (1 - alpha) * M + alpha * slope[i]
                move -= eta * math.copysign(1, M - C_i[i] + C)
            new[i] = M
        C += sum(new[i] - C_i[i] for i in slope) / 4
        C_i, x = new, x + move / 4
        assert values(trace)[r] == pytest.approx(x, abs=1e-12)
        assert float(trace.state[r]["c"]["w"]) == pytest.approx(C, abs=1e-12)


def test_server_muon_without_muon_is_fedavg(tiny, sizes):
    x0, gradient, data = tiny
    rounds, args = (
        tiny_rounds(data),
        {"lr": 0.3, "weight_decay": 0.01, "momentum": 0.5, "weights": sizes},
    )
    off = {"beta": 0.0, "server_lr": 0.7, "rest_server_lr": 0.7, "orthogonalize": lambda G: G}
    same_models(
        ref.fedavg(x0, gradient, rounds, server_lr=0.7, **args),
        ref.server_muon(x0, gradient, rounds, **off, **args),
    )
    on = {**off, "beta": 0.8}
    momentum = ref.fedavgm(x0, gradient, rounds, server_lr=0.7, beta=0.8, **args)
    same_models(momentum, ref.server_muon(x0, gradient, rounds, **on, **args))


def test_server_muon_orthogonalises_the_mean(tiny):
    x0, gradient, data = tiny
    rounds = tiny_rounds(data)
    trace = ref.server_muon(
        x0, gradient, rounds, lr=0.1, server_lr=0.05, beta=0.9, scale="rms", rest_beta=0.0
    )
    before = x0
    for cohort, x, state in zip(rounds, trace.x, trace.state, strict=True):
        for name in ("conv.weight", "fc.weight"):
            matrix = state["momentum"][name].flatten(1)
            step = 0.05 * 0.2 * math.sqrt(max(matrix.shape)) * ref.polar_svd(matrix)
            torch.testing.assert_close(x[name].flatten(1), before[name].flatten(1) - step, **EXACT)
        mean_move = ref.fedavg(before, gradient, [cohort], lr=0.1).x[0]["fc.bias"]
        torch.testing.assert_close(x["fc.bias"], mean_move, **EXACT)  # rest_beta 0: no momentum
        before = x


MULOCO = {**MUON, "weight_decay": 0.1, "nesterov": True, "scale": "rms", "clip_norm": 0.3}


def test_muloco_with_plain_outer_steps_is_local_muon(tiny, sizes):
    x0, gradient, data = tiny
    rounds = tiny_rounds(data)
    local = ref.local_muon(x0, gradient, rounds, weights=sizes, **MULOCO)
    outer = {"outer_lr": 1.0, "outer_momentum": 0.0, "keep_state": False}
    same_models(local, ref.muloco(x0, gradient, rounds, weights=sizes, **outer, **MULOCO))


def test_muloco_worker_keeps_its_inner_state(tiny):
    """One worker, plain outer steps: two rounds of K steps are one round of 2K."""
    x0, gradient, data = tiny
    batches = tiny_rounds(data, cohorts=[(2,)], steps=6)[0][2]
    outer = {"outer_lr": 1.0, "outer_momentum": 0.0}
    split = ref.muloco(x0, gradient, [{2: batches[:2]}, {2: batches[2:]}], **outer, **MULOCO)
    whole = ref.muloco(x0, gradient, [{2: batches}], **outer, **MULOCO)
    same(split.x[-1], whole.x[-1])
    fresh = ref.muloco(
        x0, gradient, [{2: batches[:2]}, {2: batches[2:]}], keep_state=False, **outer, **MULOCO
    )
    assert not torch.allclose(fresh.x[-1]["fc.weight"], whole.x[-1]["fc.weight"])


@pytest.mark.parametrize("nesterov", [True, False])
def test_muloco_outer_step_is_torch_sgd(nesterov):
    rounds = repeat({0: 1.0, 1: -2.0}, 4, 3)
    args = {
        "outer_lr": 0.7,
        "outer_momentum": 0.8,
        "outer_nesterov": nesterov,
        "keep_state": False,
        "eps": 0.0,
    }
    trace = ref.muloco(scalar(0), linear, rounds, lr=0.1, rest_lr=0.1, weights={0: 3, 1: 1}, **args)
    p = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([p], lr=0.7, momentum=0.8, nesterov=nesterov)
    for value in values(trace):
        p.grad = torch.full_like(p, 0.1 * 3 * (0.75 - 0.25))
        sgd.step()
        assert value == pytest.approx(float(p.detach()), abs=1e-12)
