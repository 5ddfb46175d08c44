"""Federated optimisers written from their papers' formulas, for checking the real engine.

Nothing here is fast and nothing is shared with ``fedmuon_pl``: plain loops over rounds, clients and
steps on dictionaries of float64 tensors, one client at a time, no ``torch.optim``, no
``torch.nn.Module``. An error in the engine and the same error here would have to be made twice, by
two people reading the same formula.

Conventions that hold for every method

* Round r counts from 0; ``x[r]`` of a trace is the global model *after* round r (the papers'
  x^{r+1}).
* A learning rate is a number or a function of the round, constant inside the round.
* A client's gradient is that of its batch loss. A method's correction is added to it first, the sum
  is clipped (if asked), then the optimiser adds its own coupled weight decay: the order of
  docs/design.md, "A round".
* w_i = 1/S over the round's cohort, or n_i / sum of n_j over the cohort when sample counts are
  given.
* K_i, the number of local steps, is the length of the client's list of batches and may differ
  between clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Params = dict[str, Tensor]
Batch = Any
Gradient = Callable[[Params, Batch], Params]
Rounds = list[dict[int, list[Batch]]]
Rate = float | Callable[[int], float]
Orthogonalize = Callable[[Tensor], Tensor]


@dataclass
class Trace:
    """What a method did: the global model and the server's state after each round.

    Attributes:
        x: x^1 .. x^R.
        state: One dictionary per round, e.g. ``{"c": Params, "c_i": {client: Params}}``.
    """

    x: list[Params] = field(default_factory=list)
    state: list[dict[str, Any]] = field(default_factory=list)

    def record(self, x: Params, **state: Any) -> None:
        """Append copies, so that nothing later can change the past."""
        self.x.append(copy(x))
        self.state.append(copy(state))


# --------------------------------------------------------------------------------------------------
# Arithmetic on dictionaries of tensors
# --------------------------------------------------------------------------------------------------


def copy(tree: Any) -> Any:
    """A deep copy of nested dictionaries of tensors."""
    if isinstance(tree, dict):
        return {key: copy(value) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, Tensor) else tree


def zeros(x: Params) -> Params:
    """The zero vector in the space of x."""
    return {name: torch.zeros_like(p) for name, p in x.items()}


def add(x: Params, y: Params, a: float = 1.0) -> Params:
    """x + a y."""
    return {name: x[name] + a * y[name] for name in x}


def subtract(x: Params, y: Params) -> Params:
    """x - y."""
    return add(x, y, -1.0)


def times(x: Params, a: float) -> Params:
    """a x."""
    return {name: a * p for name, p in x.items()}


def mean(vectors: dict[int, Params], w: dict[int, float]) -> Params:
    """The weighted mean over clients, sum_i w_i v_i (the weights sum to 1)."""
    total = zeros(next(iter(vectors.values())))
    for i, vector in vectors.items():
        total = add(total, vector, w[i])
    return total


def weighted(values: dict[int, Any], w: dict[int, float]) -> Any:
    """sum_i w_i values_i of numbers, tensors, or dictionaries of them."""
    first = next(iter(values.values()))
    if isinstance(first, dict):
        return {key: weighted({i: v[key] for i, v in values.items()}, w) for key in first}
    return sum(w[i] * v for i, v in values.items())


def mean_direction(
    x: Params, x_i: dict[int, Params], sum_eta: dict[int, float], w: dict[int, float]
) -> Params:
    """-sum_i w_i (x_i - x) / (sum of client i's etas); a client whose sum is 0 counts as 0."""
    return mean(
        {i: times(subtract(x, x_i[i]), 1 / sum_eta[i] if sum_eta[i] else 0.0) for i in x_i}, w
    )


def cohort_weights(
    cohort: dict[int, list[Batch]], weights: dict[int, int] | None
) -> dict[int, float]:
    """w_i over the round's cohort: uniform, or by sample count."""
    counts = {i: 1 if weights is None else weights[i] for i in cohort}
    return {i: n / sum(counts.values()) for i, n in counts.items()}


def at(rate: Rate, r: int) -> float:
    """The rate of round r."""
    return rate(r) if callable(rate) else rate


def clip(g: Params, clip_norm: float | None) -> Params:
    """g min(1, clip / (||g|| + 1e-6)), the norm over all parameters of this one client together."""
    if clip_norm is None:
        return g
    norm = math.sqrt(sum(float((p**2).sum()) for p in g.values()))
    return times(g, min(1.0, clip_norm / (norm + 1e-6)))


# --------------------------------------------------------------------------------------------------
# Orthogonalisation
# --------------------------------------------------------------------------------------------------


def polar_svd(G: Tensor, rtol: float = 1e-10) -> Tensor:
    """U V^T of G = U S V^T over the singular values above rtol * s_max; the others give 0."""
    U, s, Vh = torch.linalg.svd(G, full_matrices=False)
    if s[0] == 0:
        return torch.zeros_like(G)
    return U @ torch.diag((s > rtol * s[0]).to(G.dtype)) @ Vh


def newton_schulz(
    G: Tensor,
    steps: int = 5,
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
) -> Tensor:
    """The quintic iteration of Jordan et al. (2024, "Muon"), in float64 instead of bfloat16."""
    a, b, c = coefficients
    X = G / (torch.linalg.matrix_norm(G) + eps)
    transposed = G.shape[0] > G.shape[1]
    if transposed:
        X = X.T
    for _ in range(steps):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if transposed else X


def step_scale(rows: int, cols: int, scale: str) -> float:
    """The factor on an orthogonalised matrix; a convolution counts as (out, in*kh*kw)."""
    return {
        "none": 1.0,
        "spectral": math.sqrt(max(1.0, rows / cols)),
        "rms": 0.2 * math.sqrt(max(rows, cols)),
        "operator": math.sqrt(rows / cols),
    }[scale]


def direction(u: Tensor, orthogonalize: Orthogonalize, scale: str) -> Tensor:
    """scale * orthogonalize(u as a matrix), in u's own shape."""
    matrix = u.flatten(1)
    return (step_scale(*matrix.shape, scale) * orthogonalize(matrix)).reshape(u.shape)


def truncate(M: Tensor, ratio: float | None) -> Tensor:
    """M projected on its r leading left singular vectors: the best approximation of rank r.

    U, V^T and the singular values are r (m + n + 1) numbers, so r = int(ratio m n / (m + n + 1)),
    but at least 1 (main_FedMuon.py of github.com/junkangLiu0/FedMuon has no such minimum). M itself
    where that is no saving, and for a ratio of 1 or None.
    """
    matrix = M.flatten(1)
    m, n = matrix.shape
    rank = max(1, int((1.0 if ratio is None else ratio) * m * n / (m + n + 1)))
    if ratio in (None, 1) or rank * (m + n + 1) >= m * n:
        return M
    U = torch.linalg.svd(matrix)[0][:, :rank]
    return (U @ (U.T @ matrix)).reshape(M.shape)


def muon_momentum(
    M: Tensor, g: Tensor, beta: float, ema: bool, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """The new momentum and the matrix to orthogonalise.

    Classic: M <- beta M + g, look-ahead g + beta M.
    EMA: M <- beta M + (1-beta) g, look-ahead (1-beta) g + beta M.
    """
    fresh = (1 - beta) * g if ema else g
    M = beta * M + fresh
    return M, (fresh + beta * M if nesterov else M)


def is_matrix(name: str, p: Tensor) -> bool:
    """The default rule: two dimensions or more."""
    return p.ndim >= 2


# --------------------------------------------------------------------------------------------------
# Local optimisers
# --------------------------------------------------------------------------------------------------


def local_sgd(
    x: Params,
    gradient: Gradient,
    batches: list[Batch],
    *,
    lr: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    correct: Callable[[Params, Params], Params] = lambda g, x: g,
    velocity: Params | None = None,
) -> Params:
    """One client's SGD as PyTorch writes it, v = 0 at first, or ``velocity``, which is updated.

    v <- mu v + d, then x <- x - eta v, or x <- x - eta (d + mu v) with Nesterov;
    d = clip(correct(g, x)) + wd x, where ``correct`` is what a method does to the gradient at x.
    """
    v = zeros(x) if velocity is None else velocity
    for batch in batches:
        d = add(clip(correct(gradient(x, batch), x), clip_norm), x, weight_decay)
        v.update(add(d, v, momentum))
        x = add(x, add(d, v, momentum) if nesterov else v, -lr)
    return x


def adamw_direction(
    m: Tensor, v: Tensor, g: Tensor, k: int, betas: tuple[float, float], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Adam's moments after the k-th step (k = 1, 2, ...) and m_hat / (sqrt(v_hat) + eps)."""
    b1, b2 = betas
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    return m, v, (m / (1 - b1**k)) / (torch.sqrt(v / (1 - b2**k)) + eps)


# --------------------------------------------------------------------------------------------------
# FedAvg and adaptive servers
# --------------------------------------------------------------------------------------------------


def fedavg(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    server_lr: Rate = 1.0,
    keep_state: bool = False,
    clip_norm: float | None = None,
    weights: dict[int, int] | None = None,
) -> Trace:
    """FedAvg, McMahan et al., arXiv 1602.05629, Algorithm 1: the mean of the clients' models.

    The paper weights by n_i; the field (and this project by default) by 1/S. With server_lr 1 the
    mean of the models is x + mean of the displacements. ``keep_state``: a client's velocity goes on
    from round to round, as in github.com/HiraNayak/FedMuon; else it is 0 at first in each.
    """
    x, v_i, trace = copy(x0), {}, Trace()
    for r, cohort in enumerate(rounds):
        w = cohort_weights(cohort, weights)
        x_i = {}
        for i, batches in cohort.items():
            x_i[i] = local_sgd(
                x,
                gradient,
                batches,
                lr=at(lr, r),
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=weight_decay,
                clip_norm=clip_norm,
                velocity=v_i.setdefault(i, zeros(x)) if keep_state else None,
            )
        x = add(x, subtract(mean(x_i, w), x), at(server_lr, r))
        trace.record(x)
    return trace


def fedavg_adamw(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    server_lr: Rate = 1.0,
    keep_state: bool = False,
    clip_norm: float | None = None,
    weights: dict[int, int] | None = None,
) -> Trace:
    """FedAvg with local AdamW (arXiv 1711.05101, Algorithm 2), its state fresh every round unless
    ``keep_state``, when a client's moments and count go on."""
    x, kept, trace = copy(x0), {}, Trace()
    for r, cohort in enumerate(rounds):
        eta, w = at(lr, r), cohort_weights(cohort, weights)
        x_i = {}
        for i, batches in cohort.items():
            y = copy(x)
            m, v, k = kept.get(i, (zeros(x), zeros(x), 0))
            for batch in batches:
                k += 1
                g = clip(gradient(y, batch), clip_norm)
                for name in y:
                    m[name], v[name], step = adamw_direction(
                        m[name], v[name], g[name], k, betas, eps
                    )
                    y[name] = (1 - eta * weight_decay) * y[name] - eta * step
            x_i[i] = y
            if keep_state:
                kept[i] = (m, v, k)
        x = add(x, subtract(mean(x_i, w), x), at(server_lr, r))
        trace.record(x)
    return trace


def fedavgm(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    server_lr: Rate = 1.0,
    beta: float = 0.9,
    server_nesterov: bool = False,
    weights: dict[int, int] | None = None,
    **sgd: Any,
) -> Trace:
    """FedAvgM, Hsu et al., arXiv 1909.06335: m <- beta m + Delta, x <- x + server_lr m.

    The paper has server_lr 1 and weights n_i, and its experiments use Nesterov momentum; the plain
    form is the one it writes down. ``server_nesterov``: x <- x + server_lr (Delta + beta m).
    ``sgd`` goes to ``local_sgd``.
    """
    x, m, trace = copy(x0), zeros(x0), Trace()
    for r, cohort in enumerate(rounds):
        w = cohort_weights(cohort, weights)
        x_i = {
            i: local_sgd(x, gradient, batches, lr=at(lr, r), **sgd) for i, batches in cohort.items()
        }
        delta = subtract(mean(x_i, w), x)
        m = add(delta, m, beta)
        x = add(x, add(delta, m, beta) if server_nesterov else m, at(server_lr, r))
        trace.record(x, momentum=m)
    return trace


def _adaptive_server(
    second_moment: Callable[[Tensor, Tensor], Tensor],
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    server_lr: Rate,
    beta1: float,
    tau: float,
    weights: dict[int, int] | None,
    **sgd: Any,
) -> Trace:
    """Reddi et al., arXiv 2003.00295, Algorithm 2, the lines that the three methods share."""
    x, m, trace = copy(x0), zeros(x0), Trace()
    v = {name: torch.full_like(p, tau**2) for name, p in x0.items()}
    for r, cohort in enumerate(rounds):
        w = cohort_weights(cohort, weights)
        delta_i = {}
        for i, batches in cohort.items():
            delta_i[i] = subtract(local_sgd(x, gradient, batches, lr=at(lr, r), **sgd), x)
        delta = mean(delta_i, w)
        for name in x:
            m[name] = beta1 * m[name] + (1 - beta1) * delta[name]
            v[name] = second_moment(v[name], delta[name] ** 2)
            x[name] = x[name] + at(server_lr, r) * m[name] / (torch.sqrt(v[name]) + tau)
        trace.record(x, m=m, v=v)
    return trace


def fedadam(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    server_lr: Rate,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    weights: dict[int, int] | None = None,
    **sgd: Any,
) -> Trace:
    """FedAdam, arXiv 2003.00295, Algorithm 2: v <- beta2 v + (1-beta2) Delta^2.

    m = 0 and v = tau^2 at the start, no bias correction. (The paper allows any v >= tau^2; Flower
    starts at 0 and its later versions correct the bias; both differ from this.) ``sgd`` goes to
    ``local_sgd``.
    """

    def second_moment(v: Tensor, square: Tensor) -> Tensor:
        return beta2 * v + (1 - beta2) * square

    return _adaptive_server(
        second_moment,
        x0,
        gradient,
        rounds,
        lr=lr,
        server_lr=server_lr,
        beta1=beta1,
        tau=tau,
        weights=weights,
        **sgd,
    )


def fedyogi(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    server_lr: Rate,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    weights: dict[int, int] | None = None,
    **sgd: Any,
) -> Trace:
    """FedYogi, arXiv 2003.00295, Algorithm 2: v <- v - (1-beta2) Delta^2 sign(v - Delta^2).

    All else as FedAdam. (TensorFlow Federated's page prints sign(g - v), without the square.)
    """

    def second_moment(v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - beta2) * square * torch.sign(v - square)

    return _adaptive_server(
        second_moment,
        x0,
        gradient,
        rounds,
        lr=lr,
        server_lr=server_lr,
        beta1=beta1,
        tau=tau,
        weights=weights,
        **sgd,
    )


def fedadagrad(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    server_lr: Rate,
    beta1: float = 0.0,
    tau: float = 1e-3,
    weights: dict[int, int] | None = None,
    **sgd: Any,
) -> Trace:
    """FedAdagrad, arXiv 2003.00295, Algorithm 2: v <- v + Delta^2.

    The algorithm's line for m holds for all three methods; the paper's experiments set beta1 = 0
    here.
    """

    def second_moment(v: Tensor, square: Tensor) -> Tensor:
        return v + square

    return _adaptive_server(
        second_moment,
        x0,
        gradient,
        rounds,
        lr=lr,
        server_lr=server_lr,
        beta1=beta1,
        tau=tau,
        weights=weights,
        **sgd,
    )


# --------------------------------------------------------------------------------------------------
# Control variates
# --------------------------------------------------------------------------------------------------


def scaffold(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    population: int,
    server_lr: Rate = 1.0,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    clip_norm: float | None = None,
    weights: dict[int, int] | None = None,
    data: dict[int, Batch] | None = None,
) -> Trace:
    """SCAFFOLD, Karimireddy et al., arXiv 1910.06378, Algorithm 1, option II, plain SGD.

    With each client's whole ``data``, option I: c_i+ = grad f_i(x), with the decay in f_i.

    x_i <- x_i - eta (g - c_i + c);
    c_i+ = c_i - c + (x - x_i^{K_i}) / (sum of the etas really used);
    with momentum, v <- mu v + g - c_i + c and x_i <- x_i - eta v, each gradient counts in that sum
    as often as it moved x_i: at step k (from 1) of K, 1 + mu + ... + mu^{K-k} times;
    x <- x + server_lr sum_i w_i (x_i - x);  c <- c + (1/N) sum_{i in S} (c_i+ - c_i).

    c is never weighted: it stays the plain mean of all N clients' c_i (N = ``population``, the
    clients that can be sampled at all, whether or not they ever are). Clipping acts on the
    corrected gradient. Where the sum of the etas is 0 the formula says nothing and c_i stays.
    State: ``c``, and ``c_i`` of the clients seen so far (others are 0).
    """
    x, c, c_i, trace = copy(x0), zeros(x0), {}, Trace()
    for r, cohort in enumerate(rounds):
        eta, w = at(lr, r), cohort_weights(cohort, weights)
        x_i, c_new = {}, {}
        for i, batches in cohort.items():
            c_old = c_i.get(i, zeros(x))
            y, v, sum_eta = copy(x), zeros(x), 0.0
            for k, batch in enumerate(batches):
                g = clip(add(subtract(gradient(y, batch), c_old), c), clip_norm)
                v = add(add(g, y, weight_decay), v, momentum)
                y = add(y, v, -eta)
                sum_eta += eta * sum(momentum**j for j in range(len(batches) - k))
            x_i[i] = y
            c_new[i] = c_old
            if data is not None:
                c_new[i] = add(gradient(x, data[i]), x, weight_decay)
            elif sum_eta > 0:
                c_new[i] = add(subtract(c_old, c), subtract(x, y), 1 / sum_eta)
        x = add(x, subtract(mean(x_i, w), x), at(server_lr, r))
        for i in cohort:
            c = add(c, subtract(c_new[i], c_i.get(i, zeros(x))), 1 / population)
        c_i.update(c_new)
        trace.record(x, c=c, c_i=c_i)
    return trace


# --------------------------------------------------------------------------------------------------
# Muon
# --------------------------------------------------------------------------------------------------


def local_muon(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    rest_lr: Rate,
    beta: float = 0.95,
    ema: bool = False,
    nesterov: bool = False,
    scale: str = "none",
    orthogonalize: Orthogonalize = polar_svd,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    server_lr: Rate = 1.0,
    clip_norm: float | None = None,
    matrix: Callable[[str, Tensor], bool] = is_matrix,
    weights: dict[int, int] | None = None,
) -> Trace:
    """FedAvg with local Muon on the matrices, AdamW on the rest, both fresh every round.

    The baseline of arXiv 2510.27403 ("Local Muon"). Weight decay is decoupled in both groups and
    comes first.
    """
    x, trace = copy(x0), Trace()
    for r, cohort in enumerate(rounds):
        eta, rest_eta, w = at(lr, r), at(rest_lr, r), cohort_weights(cohort, weights)
        x_i = {}
        for i, batches in cohort.items():
            y, M, m, v = copy(x), zeros(x), zeros(x), zeros(x)
            for k, batch in enumerate(batches, start=1):
                g = clip(gradient(y, batch), clip_norm)
                for name in y:
                    if matrix(name, x0[name]):
                        M[name], u = muon_momentum(M[name], g[name], beta, ema, nesterov)
                        y[name] = y[name] * (1 - eta * weight_decay) - eta * direction(
                            u, orthogonalize, scale
                        )
                    else:
                        m[name], v[name], step = adamw_direction(
                            m[name], v[name], g[name], k, betas, eps
                        )
                        y[name] = y[name] * (1 - rest_eta * weight_decay) - rest_eta * step
            x_i[i] = y
        x = add(x, subtract(mean(x_i, w), x), at(server_lr, r))
        trace.record(x)
    return trace


def fedmuon(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    rest_lr: Rate,
    alpha: float = 0.5,
    beta: float = 0.95,
    ema: bool = False,
    nesterov: bool = False,
    scale: str = "none",
    orthogonalize: Orthogonalize = polar_svd,
    average_momentum: bool = True,
    align_rest: bool = True,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    rest_sgd: tuple[float, float] | None = None,
    ratio: float | None = None,
    error_feedback: bool = False,
    server_lr: Rate = 1.0,
    clip_norm: float | None = None,
    matrix: Callable[[str, Tensor], bool] = is_matrix,
    weights: dict[int, int] | None = None,
) -> Trace:
    """FedMuon, Liu et al., arXiv 2510.27403, Algorithm 2.

    Matrices, K_i times from M_i = M_bar (0 without ``average_momentum``):
        M_i <- beta M_i + g;  O = scale * orthogonalize(M_i)
        x_i <- x_i - eta [(1-alpha) O + alpha Delta_g]
    The rest: the same with AdamW's direction in the place of O and its own eta, moments fresh every
    round. With ``align_rest`` off Delta_g does not act on the rest, which then takes its full step:
    no (1-alpha) either. Decoupled decay comes first, x_i <- x_i (1 - (1-alpha) eta wd), with 1 in
    the place of (1-alpha) for such a rest. ``rest_sgd`` = (momentum mu, decay): the rest's
    direction is SGD's v <- mu v + g + decay x_i instead, and it has no decoupled decay.

    Server:
        Delta_g <- -sum_i w_i (x_i - x) / (sum_k eta_{i,k}), a client whose sum is 0 counts as 0,
            per parameter with the etas of its group;
        x <- x + server_lr sum_i w_i (x_i - x);  M_bar <- sum_i w_i M_i, matrices only.
    Delta_g comes from the clients' displacements (decay and the last pull included), whatever the
    server does with them. State: ``delta_g`` (every parameter, the rest also when it is not used)
    and, if averaged, ``momentum``.

    With a ``ratio``, C is ``truncate``: clients send C(M_i), and M_bar <- C(sum_i w_i C(M_i)). With
    error feedback whoever sends M sends C(M + e) and keeps e <- M + e - C(M + e), e = 0 at first,
    on each client until it takes part again (PowerSGD, arXiv 1905.13727, Algorithm 2).
    """
    x, delta_g, trace = copy(x0), zeros(x0), Trace()
    residual: dict[Any, Params] = {}

    def send(who: Any, M: Params) -> Params:
        whole = add(M, residual.get(who, zeros(M))) if error_feedback else M
        sent = {name: truncate(p, ratio) for name, p in whole.items()}
        residual[who] = subtract(whole, sent)
        return sent

    matrices = [name for name in x0 if matrix(name, x0[name])]
    M_bar = {name: torch.zeros_like(x0[name]) for name in matrices}
    for r, cohort in enumerate(rounds):
        eta = {name: at(lr if name in matrices else rest_lr, r) for name in x}
        pull = {name: alpha if name in matrices or align_rest else 0.0 for name in x}
        w = cohort_weights(cohort, weights)
        x_i, M_i, directions = {}, {}, {}
        for i, batches in cohort.items():
            y, M, m, v = copy(x), copy(M_bar), zeros(x), zeros(x)
            sum_eta = dict.fromkeys(x, 0.0)
            for k, batch in enumerate(batches, start=1):
                g = clip(gradient(y, batch), clip_norm)
                for name in y:
                    if name in matrices:
                        M[name], u = muon_momentum(M[name], g[name], beta, ema, nesterov)
                        step, decay = direction(u, orthogonalize, scale), weight_decay
                    elif rest_sgd is not None:
                        m[name] = rest_sgd[0] * m[name] + g[name] + rest_sgd[1] * y[name]
                        step, decay = m[name], 0.0
                    else:
                        m[name], v[name], step = adamw_direction(
                            m[name], v[name], g[name], k, betas, eps
                        )
                        decay = weight_decay
                    a, e = pull[name], eta[name]
                    decayed = y[name] * (1 - (1 - a) * e * decay)
                    y[name] = decayed - e * ((1 - a) * step + a * delta_g[name])
                    sum_eta[name] += e
            x_i[i], M_i[i] = y, send(i, M)
            directions[i] = {
                n: (x[n] - y[n]) / sum_eta[n] if sum_eta[n] else torch.zeros_like(x[n]) for n in x
            }
        delta_g = mean(directions, w)
        x = add(x, subtract(mean(x_i, w), x), at(server_lr, r))
        if average_momentum:
            M_bar = send("server", mean(M_i, w))
            trace.record(x, delta_g=delta_g, momentum=M_bar)
        else:
            trace.record(x, delta_g=delta_g)
    return trace


def fedmuon_official(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    alpha: float,
    gamma: float,
    K: int,
    beta: float = 0.98,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-10,
    ns_steps: int = 5,
    clip_norm: float | None = None,
    weights: dict[int, int] | None = None,
) -> Trace:
    """FedMuon as its authors' program runs it: github.com/junkangLiu0/FedMuon at f3972e2.

    ``update_FedMuon`` and ``apply_weights_FedLADA`` of main_FedMuon.py with ``muon_update`` and
    ``adam_update`` of muon.py, in their quantities and under their names (``alpha`` is a factor on
    the matrices' rate, ``gamma`` the paper's alpha, ``K`` the constant --K), but in float64 where
    the iteration is in bfloat16. Nothing of Delta_g's formula is in it:

    a step    M <- lerp(M, g, 1 - beta); u = lerp(g, M, beta); four axes become (out, -1), otherwise
              the last two are the matrix; Newton-Schulz; times sqrt(max(1, rows / cols)) with g's
              own last two axes; p <- p (1 - lr_g wd) - lr_g u, where lr_g = lr alpha (1 - gamma);
              fewer than two axes: Adam's direction, lr_g = lr (1 - gamma)
    then      p <- p + gamma lr / K m for every p
    server    D = mean of (p - x); x <- x + D; m <- D / lr; M <- mean of M

    The program has clip_norm 10. ``weights`` is not in it. State: ``m``, ``momentum``.
    """
    x, m, trace = copy(x0), zeros(x0), Trace()
    momentum = {name: torch.zeros_like(p) for name, p in x0.items() if p.ndim >= 2}
    for r, cohort in enumerate(rounds):
        lr_r, w = at(lr, r), cohort_weights(cohort, weights)
        deltas, buffers = {}, {}
        for i, batches in cohort.items():
            p, buf, exp_avg, exp_avg_sq = copy(x), copy(momentum), zeros(x), zeros(x)
            for step, batch in enumerate(batches, start=1):
                g = clip(gradient(p, batch), clip_norm)
                for name in p:
                    if p[name].ndim >= 2:
                        group_lr = lr_r * alpha * (1 - gamma)
                        buf[name] = torch.lerp(buf[name], g[name], 1 - beta)
                        u = torch.lerp(g[name], buf[name], beta)
                        if u.ndim == 4:
                            u = u.reshape(len(u), -1)
                        stack = [newton_schulz(a, ns_steps) for a in u.reshape(-1, *u.shape[-2:])]
                        rows, cols = g[name].shape[-2:]
                        update = torch.stack(stack) * max(1, rows / cols) ** 0.5
                    else:
                        group_lr = lr_r * (1 - gamma)
                        exp_avg[name] = torch.lerp(exp_avg[name], g[name], 1 - betas[0])
                        exp_avg_sq[name] = torch.lerp(exp_avg_sq[name], g[name] ** 2, 1 - betas[1])
                        first = exp_avg[name] / (1 - betas[0] ** step)
                        second = exp_avg_sq[name] / (1 - betas[1] ** step)
                        update = first / (second**0.5 + eps)
                    p[name] = p[name] * (1 - group_lr * weight_decay)
                    p[name] = p[name] - group_lr * update.reshape(p[name].shape)
                p = add(p, m, gamma * lr_r / K)
            deltas[i], buffers[i] = subtract(p, x), buf
        D = mean(deltas, w)
        x = add(x, D)
        m = times(D, 1 / lr_r if lr_r else 0.0)
        momentum = mean(buffers, w)
        trace.record(x, m=m, momentum=momentum)
    return trace


# --------------------------------------------------------------------------------------------------
# Proximal terms, dynamic regularisation, normalised averaging
# --------------------------------------------------------------------------------------------------


def fedprox(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    mu: float,
    server_lr: Rate = 1.0,
    weights: dict[int, int] | None = None,
    **sgd: Any,
) -> Trace:
    """FedProx, Li et al., arXiv 1812.06127, Algorithm 2: the client's loss plus (mu/2) ||y - x||^2.

    The paper solves that problem inexactly by any means; here, as everywhere in the field, by K_i
    steps of SGD on g + mu (y - x). It samples clients by p_k and averages plainly; here w_i.
    ``sgd`` goes to ``local_sgd``.
    """
    x, trace = copy(x0), Trace()
    for r, cohort in enumerate(rounds):
        w = cohort_weights(cohort, weights)

        def proximal(g: Params, y: Params, x: Params = x) -> Params:
            return add(g, subtract(y, x), mu)

        x_i = {
            i: local_sgd(x, gradient, batches, lr=at(lr, r), correct=proximal, **sgd)
            for i, batches in cohort.items()
        }
        x = add(x, subtract(mean(x_i, w), x), at(server_lr, r))
        trace.record(x)
    return trace


def feddyn(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    alpha: float,
    population: int,
    weights: dict[int, int] | None = None,
    **sgd: Any,
) -> Trace:
    """FedDyn, Acar et al., arXiv 2111.04263, Algorithm 1.

    Client: minimise L_i(y) - <l_i, y> + (alpha/2) ||y - x||^2, here by K_i steps of SGD on
    g - l_i + alpha (y - x);
    l_i <- l_i - alpha (x_i - x), an estimate of grad L_i(x_i), 0 at first.
    Server: h <- h - alpha (1/m) sum_{i in S} (x_i - x), m = ``population``;
    x <- sum_i w_i x_i - h / alpha.

    The paper's mean is plain. Its code also divides alpha by a client's relative size; with
    ``weights`` here only the mean of the models is weighted, h and l_i never. So h is always the
    plain mean of all m clients' l_i. State: ``h`` and ``l_i`` of the clients seen so far.
    """
    x, h, l_i, trace = copy(x0), zeros(x0), {}, Trace()
    for r, cohort in enumerate(rounds):
        w, x_i = cohort_weights(cohort, weights), {}
        for i, batches in cohort.items():
            l_old = l_i.get(i, zeros(x))

            def dynamic(g: Params, y: Params, l_old: Params = l_old, x: Params = x) -> Params:
                return add(subtract(g, l_old), subtract(y, x), alpha)

            x_i[i] = local_sgd(x, gradient, batches, lr=at(lr, r), correct=dynamic, **sgd)
            l_i[i] = add(l_old, subtract(x_i[i], x), -alpha)
            h = add(h, subtract(x_i[i], x), -alpha / population)
        x = add(mean(x_i, w), h, -1 / alpha)
        trace.record(x, h=h, l_i=l_i)
    return trace


def fedbn(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    local: Callable[[str], bool] = lambda name: name.startswith("norm"),
    statistics: Callable[[Params, Batch], Params] = lambda x, batch: {},
    s0: Params | None = None,
    clip_norm: float | None = None,
    weights: dict[int, int] | None = None,
) -> Trace:
    """FedBN, Li et al., arXiv 2102.07623, Algorithm 1: local SGD, and what is ``local`` is not
    averaged.

    ``statistics`` of a batch at x move the client's running ones, s <- 0.9 s + 0.1 statistics,
    from ``s0``. With all clients in every round this is the paper's; a client that was not drawn
    keeps what it has, one never drawn has x0 and s0. State: ``own`` and ``s`` of the clients seen.
    """
    x, own, s, trace = copy(x0), {}, {}, Trace()
    for r, cohort in enumerate(rounds):
        w, x_i = cohort_weights(cohort, weights), {}
        for i, batches in cohort.items():
            y = {**x, **own.get(i, {})}
            running = s.get(i, copy(s0 or {}))
            for batch in batches:
                running = add(times(running, 0.9), statistics(y, batch), 0.1)
                y = local_sgd(y, gradient, [batch], lr=at(lr, r), clip_norm=clip_norm)
            x_i[i], s[i] = y, running
            own[i] = {name: p for name, p in y.items() if local(name)}
        averaged = mean(x_i, w)
        x = {name: p if local(name) else averaged[name] for name, p in x.items()}
        trace.record(x, own=own, s=s)
    return trace


def fednova(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    momentum: float = 0.0,
    nesterov: bool = False,
    tau_eff: str = "normaliser",
    server_lr: Rate = 1.0,
    weights: dict[int, int] | None = None,
    **sgd: Any,
) -> Trace:
    """FedNova, Wang et al., arXiv 2007.07481, section 4.

    x <- x + tau_eff sum_i w_i (x_i - x) / ||a_i||_1.

    a_i holds the weight that each of the client's gradients has in its displacement (over eta):
    ones for SGD, (1 - rho^(K-k)) / (1 - rho) with momentum. Its sum is what K_i steps on a constant
    gradient of 1 would move.

    tau_eff: "normaliser" is sum_i w_i ||a_i||_1 (the authors' code when there is no proximal term),
    "steps" is sum_i w_i K_i (their code when there is one). Equal
    without momentum. The code ignores Nesterov in a_i; here a_i is right for it. The paper weights
    by n_i.
    """
    x, trace = copy(x0), Trace()
    for r, cohort in enumerate(rounds):
        w = cohort_weights(cohort, weights)
        d_i, a_i = {}, {}
        for i, batches in cohort.items():
            y = local_sgd(
                x, gradient, batches, lr=at(lr, r), momentum=momentum, nesterov=nesterov, **sgd
            )
            v, a_i[i] = 0.0, 0.0
            for _ in batches:
                v = momentum * v + 1
                a_i[i] += 1 + momentum * v if nesterov else v
            d_i[i] = times(subtract(y, x), 1 / a_i[i]) if a_i[i] else zeros(x)
        steps = {"normaliser": a_i, "steps": {i: len(batches) for i, batches in cohort.items()}}[
            tau_eff
        ]
        x = add(x, mean(d_i, w), at(server_lr, r) * sum(w[i] * steps[i] for i in cohort))
        trace.record(x)
    return trace


# --------------------------------------------------------------------------------------------------
# Server statistics used by the clients: Mime, FedCM, FedACG
# --------------------------------------------------------------------------------------------------


def mime(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    data: dict[int, Batch],
    lr: Rate,
    beta: float = 0.9,
    ema: bool = True,
    lite: bool = False,
    server_lr: Rate = 1.0,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    weights: dict[int, int] | None = None,
) -> Trace:
    """Mime with SGD momentum, Karimireddy et al., arXiv 2008.03606, Algorithm 1.

    c = sum_i w_i grad f_i(x) over each client's whole ``data``;  local step, m fixed during the
    round:
        g = grad f_i(y; z) - grad f_i(x; z) + c   (Mime)      g = grad f_i(y; z)   (MimeLite)
        y <- y - eta ((1-beta) g + beta m)
    then x <- x + server_lr sum_i w_i (y_i - x) and m <- (1-beta) c + beta m (with the c of this
    round's x).

    Choices: the paper's momentum is an EMA; with ``ema`` off it is g + beta m and m <- c + beta m,
    which is what fedjax's SGD does. The paper's means are plain; fedjax weights both by sample
    count, as ``weights`` does here. server_lr is fedjax's. ``weight_decay`` counts as part of f_i,
    so it is in c as well; the correction is clipped before the decay is added, c is not clipped.
    """
    x, m, trace = copy(x0), zeros(x0), Trace()
    fresh = 1 - beta if ema else 1.0
    for r, cohort in enumerate(rounds):
        eta, w = at(lr, r), cohort_weights(cohort, weights)
        c = mean({i: gradient(x, data[i]) for i in cohort}, w)
        y_i = {}
        for i, batches in cohort.items():
            y = copy(x)
            for batch in batches:
                g = gradient(y, batch)
                if not lite:
                    g = add(subtract(g, gradient(x, batch)), c)
                g = add(clip(g, clip_norm), y, weight_decay)
                y = add(y, add(times(g, fresh), m, beta), -eta)
            y_i[i] = y
        m = add(times(add(c, x, weight_decay), fresh), m, beta)
        x = add(x, subtract(mean(y_i, w), x), at(server_lr, r))
        trace.record(x, momentum=m, c=c)
    return trace


def mimelite(x0: Params, gradient: Gradient, rounds: Rounds, **arguments: Any) -> Trace:
    """MimeLite, arXiv 2008.03606, Algorithm 1: Mime without the correction of the gradients."""
    return mime(x0, gradient, rounds, lite=True, **arguments)


def fedcm(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    alpha: float = 0.1,
    server_lr: Rate = 1.0,
    weights: dict[int, int] | None = None,
    **sgd: Any,
) -> Trace:
    """FedCM, Xu et al., arXiv 2106.10874, Algorithm 2: y <- y - eta (alpha g + (1-alpha) Delta).

    Delta <- -sum_i w_i (x_i - x) / (K_i eta), the clients' mean direction per step, 0 at first;
    x <- x + server_lr sum_i w_i (x_i - x).
    The paper writes x <- x - eta_g Delta, so its eta_g is server_lr * K * eta; public code
    (FL-Simulator) has server_lr. The alpha here is the paper's; the FedMuon repository's flag is 1
    - alpha.
    """
    x, delta, trace = copy(x0), zeros(x0), Trace()
    for r, cohort in enumerate(rounds):
        eta, w = at(lr, r), cohort_weights(cohort, weights)

        def mix(g: Params, y: Params, delta: Params = delta) -> Params:
            return add(times(g, alpha), delta, 1 - alpha)

        x_i = {
            i: local_sgd(x, gradient, batches, lr=eta, correct=mix, **sgd)
            for i, batches in cohort.items()
        }
        delta = mean_direction(x, x_i, {i: eta * len(batches) for i, batches in cohort.items()}, w)
        x = add(x, subtract(mean(x_i, w), x), at(server_lr, r))
        trace.record(x, delta=delta)
    return trace


def fedacg(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    lam: float = 0.85,
    beta: float = 0.01,
    weights: dict[int, int] | None = None,
    **sgd: Any,
) -> Trace:
    """FedACG, Kim et al., arXiv 2201.03172, Algorithm 1: clients start from z = x + lam m.

    Local loss plus (beta/2) ||y - z||^2;  Delta = sum_i w_i (x_i - z);
    m <- lam m + Delta;  x <- x + m, which is sum_i w_i x_i. The paper's mean is plain.
    """
    x, m, trace = copy(x0), zeros(x0), Trace()
    for r, cohort in enumerate(rounds):
        w, z = cohort_weights(cohort, weights), add(x, m, lam)

        def proximal(g: Params, y: Params, z: Params = z) -> Params:
            return add(g, subtract(y, z), beta)

        x_i = {
            i: local_sgd(z, gradient, batches, lr=at(lr, r), correct=proximal, **sgd)
            for i, batches in cohort.items()
        }
        m = add(times(m, lam), subtract(mean(x_i, w), z))
        x = add(x, m)
        trace.record(x, momentum=m)
    return trace


# --------------------------------------------------------------------------------------------------
# Local adaptive methods with shared moments
# --------------------------------------------------------------------------------------------------


def fedlada(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    alpha: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-8,
    amsgrad: bool = True,
    server_lr: Rate = 1.0,
    clip_norm: float | None = None,
    weights: dict[int, int] | None = None,
) -> Trace:
    """FedLADA, Sun et al., arXiv 2308.00522, the third algorithm of section 3.

    Every round m = 0 and v = v_hat = v_bar (eps^2 before the first). Local step:
        m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2;  v_hat <- max(v_hat, v);
        y <- y - eta (alpha m / sqrt(v_hat) + (1-alpha) g_a)
    Server: g_a <- -sum_i w_i (x_i - x) / (K_i eta);  v_bar <- sum_i w_i v_hat_i;
    x <- x + server_lr sum_i w_i (x_i - x).

    The PDF was out of reach; this is fedbrew's reading of it ("AMSGrad, no bias correction, eps^2
    as the floor"). The FedAdamW repository writes Adam instead (``amsgrad`` off): v_hat is v, v_bar
    starts at 0, and eps is added to the root.
    """
    b1, b2 = betas
    x, g_a, trace = copy(x0), zeros(x0), Trace()
    v_bar = {name: torch.full_like(p, eps**2 if amsgrad else 0.0) for name, p in x0.items()}
    for r, cohort in enumerate(rounds):
        eta, w = at(lr, r), cohort_weights(cohort, weights)
        x_i, v_i = {}, {}
        for i, batches in cohort.items():
            y, m, v, v_hat = copy(x), zeros(x), copy(v_bar), copy(v_bar)
            for batch in batches:
                g = clip(gradient(y, batch), clip_norm)
                for name in y:
                    m[name] = b1 * m[name] + (1 - b1) * g[name]
                    v[name] = b2 * v[name] + (1 - b2) * g[name] ** 2
                    v_hat[name] = torch.maximum(v_hat[name], v[name]) if amsgrad else v[name]
                    root = torch.sqrt(v_hat[name]) + (0.0 if amsgrad else eps)
                    step = alpha * m[name] / root + (1 - alpha) * g_a[name]
                    y[name] = y[name] - eta * step
            x_i[i], v_i[i] = y, v_hat
        g_a = mean_direction(x, x_i, {i: eta * len(batches) for i, batches in cohort.items()}, w)
        v_bar = mean(v_i, w)
        x = add(x, subtract(mean(x_i, w), x), at(server_lr, r))
        trace.record(x, g_a=g_a, v=v_bar)
    return trace


def whole_tensor_mean(name: str, v: Tensor) -> Tensor:
    """One block per parameter: its mean, spread over the parameter's shape."""
    return v.mean().expand_as(v).clone()


def fedadamw(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    alpha: float = 0.5,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    block_mean: Callable[[str, Tensor], Tensor] = whole_tensor_mean,
    steps_per_round: int | None = None,
    shrink_local: bool = False,
    server_lr: Rate = 1.0,
    clip_norm: float | None = None,
    weights: dict[int, int] | None = None,
) -> Trace:
    """FedAdamW, Liu et al., arXiv 2510.27486, the local AdamW with aggregated second moments.

    Every round m = 0 and v = v_bar. Local step k = 1, 2, ... with t the step counted over all
    rounds:
        m_hat = m / (1 - b1^k);  v_hat = v / (1 - b2^t);
        y <- y - eta (m_hat / (sqrt(v_hat) + eps) + alpha Delta + wd y)
    Server: Delta <- -sum_i w_i (x_i - x) / (K_i eta);  v_bar <- sum_i w_i block_mean(v_i);  x as
    FedAvg.

    Choices: the printed "- lambda x" would grow the weights and is read as decoupled decay.
    ``block_mean``: the paper sends the mean of each block of a Hessian-like partition, its vision
    code all of v (pass the identity); here one block per parameter. b2^t = d b2^k, where d is b2 to
    the steps of the earlier rounds: d <- d b2^steps_per_round or, if that is None, d <- d sum_i w_i
    b2^{K_i}, so that 1 - d is what the weights in v_bar sum to; the paper has one constant K.
    ``shrink_local`` puts (1-alpha) before the Adam direction, as later versions of the code do and
    the paper does not.
    """
    x, delta, v_bar, d, trace = copy(x0), zeros(x0), zeros(x0), 1.0, Trace()
    local = 1 - alpha if shrink_local else 1.0
    b1, b2 = betas
    for r, cohort in enumerate(rounds):
        eta, w = at(lr, r), cohort_weights(cohort, weights)
        x_i, v_i = {}, {}
        for i, batches in cohort.items():
            y, m, v = copy(x), zeros(x), copy(v_bar)
            for k, batch in enumerate(batches, start=1):
                g = clip(gradient(y, batch), clip_norm)
                for name in y:
                    m[name] = b1 * m[name] + (1 - b1) * g[name]
                    v[name] = b2 * v[name] + (1 - b2) * g[name] ** 2
                    adam = (m[name] / (1 - b1**k)) / (torch.sqrt(v[name] / (1 - d * b2**k)) + eps)
                    y[name] = y[name] - eta * (
                        local * adam + alpha * delta[name] + weight_decay * y[name]
                    )
            x_i[i], v_i[i] = y, {name: block_mean(name, v[name]) for name in v}
        delta = mean_direction(x, x_i, {i: eta * len(batches) for i, batches in cohort.items()}, w)
        v_bar = mean(v_i, w)
        x = add(x, subtract(mean(x_i, w), x), at(server_lr, r))
        d *= (
            sum(w[i] * b2 ** len(batches) for i, batches in cohort.items())
            if steps_per_round is None
            else b2**steps_per_round
        )
        v_weight = {"": torch.tensor(1 - d, dtype=torch.float64)}
        trace.record(x, delta=delta, v=v_bar, v_weight=v_weight)
    return trace


# --------------------------------------------------------------------------------------------------
# FedPAC: an aligned frame around any optimiser
# --------------------------------------------------------------------------------------------------

State = dict[str, Any]
Step = Callable[[State, Tensor], tuple[State, Tensor | None]]
LocalOptimizer = tuple[Callable[[Tensor], State], Step]


def heavy_ball(beta: float) -> LocalOptimizer:
    """M <- beta M + g, which is also the direction."""

    def step(state: State, g: Tensor) -> tuple[State, Tensor]:
        M = beta * state["momentum"] + g
        return {"momentum": M}, M

    return lambda p: {"momentum": torch.zeros_like(p)}, step


def adam(betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> LocalOptimizer:
    """Adam's moments m and v, each with what its weights lack to 1; arXiv 1412.6980.

    E[m] = (1 - b1^s) E[g] after s steps from 0. The mean of several m, of clients that made s_i
    steps, has E[m] = (1 - sum_i w_i b1^{s_i}) E[g], and so on over the rounds: what is lacking is
    averaged with the moment.
    """
    b1, b2 = betas

    def step(state: State, g: Tensor) -> tuple[State, Tensor]:
        m = b1 * state["m"] + (1 - b1) * g
        v = b2 * state["v"] + (1 - b2) * g**2
        m_lacks, v_lacks = b1 * state["m_lacks"], b2 * state["v_lacks"]
        direction = m / (1 - m_lacks) / (torch.sqrt(v / (1 - v_lacks)) + eps)
        return {"m": m, "v": v, "m_lacks": m_lacks, "v_lacks": v_lacks}, direction

    def empty(p: Tensor) -> State:
        return {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "m_lacks": 1, "v_lacks": 1}

    return empty, step


def soap(
    betas: tuple[float, float] = (0.95, 0.95),
    eps: float = 1e-8,
    frequency: int = 10,
    longest: int = 10000,
    skip_first: bool = True,
) -> LocalOptimizer:
    """SOAP, Vyas et al., arXiv 2409.11321, Algorithms 3 and 4, for a tensor of any axes.

    P_a, the EMA of the unfoldings G_(a) G_(a)^T, for every axis a of a tensor that has at least two
    and where it is not longer than ``longest``. The first Q_a is P_a's eigenvectors, largest
    eigenvalue first; every ``frequency`` steps Q_a <- QR(P_a Q_a), its columns and V sorted by
    diag(Q_a^T P_a Q_a) before. ``skip_first``: the first gradient only enters P; else it steps in
    the basis of P as given, if something was, or of itself. epsilon stands beside the square root
    of the corrected V. State: ``gram``: P by axis, ``gram_count``: gradients in it; m, v and Q.
    """
    b1, b2 = betas

    def unfold(t: Tensor, axis: int) -> Tensor:
        return t.transpose(0, axis).reshape(t.shape[axis], -1)

    def along(t: Tensor, axis: int, matrix: Tensor) -> Tensor:
        """matrix @ the unfolding, folded again."""
        swapped = t.transpose(0, axis)
        return (matrix @ swapped.reshape(len(matrix), -1)).reshape(swapped.shape).transpose(0, axis)

    def turn(t: Tensor, Q: dict[int, Tensor], back: bool = False) -> Tensor:
        for axis, q in Q.items():
            t = along(t, axis, q if back else q.T)
        return t

    def eigenvectors(P: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(P)
        return vectors[:, torch.argsort(values, descending=True)]

    def step(state: State, g: Tensor) -> tuple[State, Tensor]:
        state = dict(state)

        def feed() -> None:
            state["gram"] = {
                a: b2 * P + (1 - b2) * unfold(g, a) @ unfold(g, a).T
                for a, P in state["gram"].items()
            }
            state["gram_count"] += 1

        fed = False
        if state["Q"] is None:
            if skip_first or state["gram_count"] == 0:
                feed()
                fed = True
            state["Q"] = {a: eigenvectors(P) for a, P in state["gram"].items()}
            if skip_first:
                return state, None
        state["t"] += 1
        Q, t = state["Q"], state["t"]
        state["m"] = b1 * state["m"] + (1 - b1) * g
        state["v"] = b2 * state["v"] + (1 - b2) * turn(g, Q) ** 2
        m_hat, v_hat = turn(state["m"], Q) / (1 - b1**t), state["v"] / (1 - b2**t)
        direction = turn(m_hat / (torch.sqrt(v_hat) + eps), Q, back=True)
        if not fed:
            feed()
        if t % frequency == 0:
            Q = dict(Q)
            for a, P in state["gram"].items():
                order = torch.argsort(torch.diag(Q[a].T @ P @ Q[a]), descending=True)
                state["v"] = state["v"].index_select(a, order)
                Q[a] = torch.linalg.qr(P @ Q[a][:, order])[0]
            state["Q"] = Q
        return state, direction

    def empty(p: Tensor) -> State:
        axes = [a for a, n in enumerate(p.shape) if p.ndim > 1 and n <= longest]
        gram = {a: torch.zeros(p.shape[a], p.shape[a], dtype=p.dtype) for a in axes}
        nothing = {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": 0, "Q": None}
        return {"gram": gram, "gram_count": 0, **nothing}

    return empty, step


def fedpac(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    optimizer: LocalOptimizer,
    averaged: tuple[str, ...],
    alpha: float = 0.5,
    weight_decay: float = 0.0,
    server_lr: Rate = 1.0,
    clip_norm: float | None = None,
    weights: dict[int, int] | None = None,
) -> Trace:
    """FedPAC, Liu et al., arXiv 2602.19271, its beta called alpha.

    K_i times from Theta_i = Theta_bar (what is not averaged from empty):
        y <- y (1 - (1-alpha) eta wd);  y <- y - eta [(1-alpha) P_Theta(g) + alpha Delta_g]
    Server: Delta_g <- -sum_i w_i (x_i - x) / (K_i eta);  Theta_bar <- sum_i w_i Theta_i;
    x <- x + server_lr sum_i w_i (x_i - x).
    An optimiser that makes no direction of a gradient (SOAP at first) does not decay either.
    """
    empty, local_step = optimizer
    x, delta_g, trace = copy(x0), zeros(x0), Trace()
    theta = {name: empty(p) for name, p in x0.items()}
    for r, cohort in enumerate(rounds):
        eta, w = at(lr, r), cohort_weights(cohort, weights)
        x_i, theta_i = {}, {}
        for i, batches in cohort.items():
            y, state = copy(x), copy(theta)
            for batch in batches:
                g = clip(gradient(y, batch), clip_norm)
                for name in y:
                    state[name], d = local_step(state[name], g[name])
                    if d is not None:
                        y[name] = y[name] * (1 - (1 - alpha) * eta * weight_decay)
                        y[name] = y[name] - eta * (1 - alpha) * d
                    y[name] = y[name] - eta * alpha * delta_g[name]
            x_i[i], theta_i[i] = y, state
        delta_g = mean_direction(
            x, x_i, {i: eta * len(batches) for i, batches in cohort.items()}, w
        )
        for name, p in x0.items():
            fresh = empty(p)
            theta[name] = {
                key: weighted({i: theta_i[i][name][key] for i in cohort}, w)
                if key.removesuffix("_lacks").removesuffix("_count") in averaged
                else fresh[key]
                for key in fresh
            }
        x = add(x, subtract(mean(x_i, w), x), at(server_lr, r))
        means = {key: {n: theta[n][key] for n in x0} for key in averaged}
        trace.record(x, delta_g=delta_g, **means)
    return trace


# --------------------------------------------------------------------------------------------------
# More Muon
# --------------------------------------------------------------------------------------------------


def fedmuon_lmo(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    population: int,
    alpha: float = 0.1,
    orthogonalize: Orthogonalize = polar_svd,
    scale: str = "none",
    keep_momentum: bool = True,
    control_variates: bool = True,
    server_lr: Rate | None = None,
    clip_norm: float | None = None,
    matrix: Callable[[str, Tensor], bool] = is_matrix,
    weights: dict[int, int] | None = None,
) -> Trace:
    """The other FedMuon, Takezawa et al., arXiv 2509.26337, Algorithm 1: C_i before the LMO.

    M_i <- (1-alpha) M_i + alpha g;  y <- y + eta lmo(M_i - C_i + C);  after K_i steps C_i <- M_i;
    C <- C + (1/n) sum_{i in S} (C_i_new - C_i);  x <- ((n-S)/n) x + (1/n) sum_{i in S} y_i.
    lmo(G) = -U V^T for matrices, -G / ||G||_2 for the rest, 0 of 0.

    That x is x + (S/n) (mean of y_i - x): ``server_lr`` None means S/n; with ``weights`` the mean
    is weighted, C never. n = ``population``. ``keep_momentum``: M_i lives on with the client (as a
    public reproduction has it; then M_i = C_i between rounds); off, M_i starts from 0. M, C and C_i
    are 0 at first. Without ``control_variates`` the step is along lmo(M_i): Local Muon.
    ``scale`` is ours, "none" is the paper.
    State: ``c``, ``c_i`` of the clients seen so far.
    """
    x, C, C_i, trace = copy(x0), zeros(x0), {}, Trace()
    for r, cohort in enumerate(rounds):
        eta, w = at(lr, r), cohort_weights(cohort, weights)
        y_i, C_new = {}, {}
        for i, batches in cohort.items():
            C_old = C_i.get(i, zeros(x))
            y, M = copy(x), copy(C_old) if keep_momentum else zeros(x)
            for batch in batches:
                M = add(times(M, 1 - alpha), clip(gradient(y, batch), clip_norm), alpha)
                G = add(subtract(M, C_old), C) if control_variates else M
                for name in y:
                    if matrix(name, x0[name]):
                        step = direction(G[name], orthogonalize, scale)
                    else:
                        norm = torch.linalg.vector_norm(G[name])
                        step = G[name] / norm if norm > 0 else torch.zeros_like(G[name])
                    y[name] = y[name] - eta * step
            y_i[i], C_new[i] = y, M
        for i in cohort:
            C = add(C, subtract(C_new[i], C_i.get(i, zeros(x))), 1 / population)
        C_i.update(C_new)
        rate = len(cohort) / population if server_lr is None else at(server_lr, r)
        x = add(x, subtract(mean(y_i, w), x), rate)
        trace.record(x, c=C, c_i=C_i)
    return trace


def server_muon(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    server_lr: Rate,
    rest_server_lr: Rate = 1.0,
    beta: float = 0.95,
    ema: bool = False,
    nesterov: bool = False,
    scale: str = "none",
    orthogonalize: Orthogonalize = polar_svd,
    rest_beta: float | None = None,
    rest_betas: tuple[float, float] | None = None,
    rest_eps: float = 1e-8,
    server_decay: float = 0.0,
    matrix: Callable[[str, Tensor], bool] = is_matrix,
    weights: dict[int, int] | None = None,
    **sgd: Any,
) -> Trace:
    """Local SGD, Muon at the server: orthogonalise after averaging instead of before it.

    No paper defines it; it is FedOpt (arXiv 2003.00295, Algorithm 1) with Muon as ServerOpt on the
    pseudo-gradient G = -Delta: M <- beta M + G;  x <- x - server_lr * scale * orthogonalize(M).
    (EF21-Muon, arXiv 2510.00643, also orthogonalises after averaging, with K = 1.) The rest takes
    the same momentum (``rest_beta``, None: beta) without orthogonalisation, at its own rate: x <- x
    - rest_server_lr * M, or Adam's direction if ``rest_betas`` are given. ``server_decay`` is
    decoupled, of the matrices. ``sgd`` goes to ``local_sgd``.
    """
    x, M, m, v, trace = copy(x0), zeros(x0), zeros(x0), zeros(x0), Trace()
    for r, cohort in enumerate(rounds):
        w = cohort_weights(cohort, weights)
        x_i = {
            i: local_sgd(x, gradient, batches, lr=at(lr, r), **sgd) for i, batches in cohort.items()
        }
        G = subtract(x, mean(x_i, w))
        for name in x:
            if matrix(name, x0[name]):
                M[name], u = muon_momentum(M[name], G[name], beta, ema, nesterov)
                x[name] = x[name] * (1 - at(server_lr, r) * server_decay)
                x[name] = x[name] - at(server_lr, r) * direction(u, orthogonalize, scale)
            elif rest_betas is not None:
                m[name], v[name], step = adamw_direction(
                    m[name], v[name], G[name], r + 1, rest_betas, rest_eps
                )
                x[name] = x[name] - at(rest_server_lr, r) * step
            else:
                decay = beta if rest_beta is None else rest_beta
                M[name], u = muon_momentum(M[name], G[name], decay, ema, nesterov)
                x[name] = x[name] - at(rest_server_lr, r) * u
        trace.record(x, momentum=M)
    return trace


def muloco(
    x0: Params,
    gradient: Gradient,
    rounds: Rounds,
    *,
    lr: Rate,
    rest_lr: Rate,
    beta: float = 0.95,
    ema: bool = False,
    nesterov: bool = True,
    scale: str = "rms",
    orthogonalize: Orthogonalize = polar_svd,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    outer_lr: Rate = 0.7,
    outer_momentum: float = 0.9,
    outer_nesterov: bool = True,
    keep_state: bool = True,
    clip_norm: float | None = None,
    matrix: Callable[[str, Tensor], bool] = is_matrix,
    weights: dict[int, int] | None = None,
) -> Trace:
    """MuLoCo, Therien et al., arXiv 2505.23725: DiLoCo (arXiv 2311.08105) with an inner Muon.

    Inner: K_i steps of Muon on the matrices, AdamW on the rest, decoupled decay first in both.
    Outer: psi = sum_i w_i (x - x_i);  u <- outer_momentum u + psi;
    x <- x - outer_lr (psi + outer_momentum u)   (Nesterov, as PyTorch writes it; else outer_lr u).

    ``keep_state``: in DiLoCo a worker keeps its inner optimiser's state (M, m, v and the step
    count) from round to round and only the parameters are reset to x; off, it starts afresh, as
    sampled clients of federated learning must. The inner momentum's form and the scale are those of
    whichever Muon one takes: arguments.
    """
    x, u, trace = copy(x0), zeros(x0), Trace()
    inner: dict[int, tuple[Params, Params, Params, int]] = {}
    for r, cohort in enumerate(rounds):
        eta, rest_eta, w = at(lr, r), at(rest_lr, r), cohort_weights(cohort, weights)
        x_i = {}
        for i, batches in cohort.items():
            y = copy(x)
            M, m, v, k = inner.get(i, (zeros(x), zeros(x), zeros(x), 0))
            for batch in batches:
                k += 1
                g = clip(gradient(y, batch), clip_norm)
                for name in y:
                    if matrix(name, x0[name]):
                        M[name], ahead = muon_momentum(M[name], g[name], beta, ema, nesterov)
                        y[name] = y[name] * (1 - eta * weight_decay) - eta * direction(
                            ahead, orthogonalize, scale
                        )
                    else:
                        m[name], v[name], step = adamw_direction(
                            m[name], v[name], g[name], k, betas, eps
                        )
                        y[name] = y[name] * (1 - rest_eta * weight_decay) - rest_eta * step
            x_i[i] = y
            if keep_state:
                inner[i] = (M, m, v, k)
        psi = subtract(x, mean(x_i, w))
        u = add(psi, u, outer_momentum)
        x = add(x, add(psi, u, outer_momentum) if outer_nesterov else u, -at(outer_lr, r))
        trace.record(x, momentum=u)
    return trace


# --------------------------------------------------------------------------------------------------
# A small problem to run all of this on
# --------------------------------------------------------------------------------------------------


def tiny_loss(x: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of conv(1->2, 3x3) -> tanh -> flatten(8) -> linear(8->3) on 1x4x4
    inputs."""
    inputs, labels = batch
    hidden = torch.tanh(torch.nn.functional.conv2d(inputs, x["conv.weight"])).flatten(1)
    logits = hidden @ x["fc.weight"].T + x["fc.bias"]
    log_p = logits - torch.logsumexp(logits, dim=1, keepdim=True)
    return -log_p[torch.arange(len(labels)), labels].mean()


def tiny_gradient(x: Params, batch: tuple[Tensor, Tensor]) -> Params:
    """The gradient of ``tiny_loss`` at x."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in x.items()}
    grads = torch.autograd.grad(tiny_loss(leaves, batch), list(leaves.values()))
    return dict(zip(leaves, grads, strict=True))


def tiny_problem() -> tuple[Params, Gradient, dict[int, tuple[Tensor, Tensor]]]:
    """Five clients with 12 to 20 samples each, different in size, inputs and labels; no draw
    depends on global state.

    Returns:
        x0 ("conv.weight" (2, 1, 3, 3), "fc.weight" (3, 8), "fc.bias" (3,)), the gradient, and
        client -> (inputs (n, 1, 4, 4) float64, labels (n,) int64).
    """
    generator = torch.Generator().manual_seed(20251)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x0 = {
        "conv.weight": 0.5 * normal(2, 1, 3, 3),
        "fc.weight": 0.4 * normal(3, 8),
        "fc.bias": 0.1 * normal(3),
    }
    prototypes = normal(3, 1, 4, 4)
    label_shares = [
        (0.8, 0.1, 0.1),
        (0.1, 0.8, 0.1),
        (0.1, 0.1, 0.8),
        (0.45, 0.45, 0.1),
        (0.34, 0.33, 0.33),
    ]
    data = {}
    for i, (n, shares) in enumerate(zip([12, 14, 16, 18, 20], label_shares, strict=True)):
        labels = torch.multinomial(torch.tensor(shares), n, replacement=True, generator=generator)
        shift = 0.5 * normal(1, 1, 4, 4)
        data[i] = (prototypes[labels] + shift + normal(n, 1, 4, 4), labels)
    return x0, tiny_gradient, data


def normalised(x: Params, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """BatchNorm (eps 1e-5) of the tiny problem's convolution, and the batch's mean and variance."""
    hidden = torch.nn.functional.conv2d(batch[0], x["conv.weight"])
    m = hidden.mean(dim=(0, 2, 3), keepdim=True)
    v = ((hidden - m) ** 2).mean(dim=(0, 2, 3), keepdim=True)
    gain, bias = (x[f"norm.{key}"].reshape(1, -1, 1, 1) for key in ("weight", "bias"))
    return gain * (hidden - m) / torch.sqrt(v + 1e-5) + bias, m.flatten(), v.flatten()


def norm_gradient(x: Params, batch: tuple[Tensor, Tensor]) -> Params:
    """The gradient of the tiny problem with BatchNorm in training mode before its tanh."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in x.items()}
    logits = torch.tanh(normalised(leaves, batch)[0]).flatten(1) @ leaves["fc.weight"].T
    logits = logits + leaves["fc.bias"]
    log_p = logits - torch.logsumexp(logits, dim=1, keepdim=True)
    loss = -log_p[torch.arange(len(batch[1])), batch[1]].mean()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def norm_statistics(x: Params, batch: tuple[Tensor, Tensor]) -> Params:
    """What a batch adds to the running statistics: its mean and its unbiased variance."""
    _, m, v = normalised(x, batch)
    n = 4 * len(batch[1])  # 2 x 2 positions of each sample
    return {"norm.running_mean": m, "norm.running_var": v * n / (n - 1)}


def norm_problem() -> tuple[Params, Params, dict[int, tuple[Tensor, Tensor]]]:
    """The tiny problem with BatchNorm: x0 with "norm.weight" and "norm.bias" (2,), the running
    statistics at first, and the same data."""
    x0, _, data = tiny_problem()
    norm = {
        "norm.weight": torch.tensor([1.2, 0.7], dtype=torch.float64),
        "norm.bias": torch.tensor([0.1, -0.3], dtype=torch.float64),
    }
    s0 = {
        "norm.running_mean": torch.zeros(2, dtype=torch.float64),
        "norm.running_var": torch.ones(2, dtype=torch.float64),
    }
    return {**x0, **norm}, s0, data
