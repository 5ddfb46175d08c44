"""FedAvg, SCAFFOLD, Mime and MimeLite in plain torch, from the papers' pseudocode, on digits.

    python benchmarks/independent.py

Nothing of fedmuon_pl is used: the same network, sizes and rates as experiment/digits, other draws.
What both show is no fault of either (docs/methods.md). Sources: arXiv 1602.05629, Algorithm 1;
1910.06378, Algorithm 1; 2008.03606, Algorithm 1.
"""

import statistics
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

CLIENTS, STEPS, BATCH = 20, 5, 16
Weights = list[Tensor]


class Digits:
    """Training data dealt to the clients by Dirichlet(0.5) per class, and 359 test samples."""

    def __init__(self) -> None:
        data, rng = load_digits(), np.random.default_rng(0)
        self.x = torch.tensor(data.data, dtype=torch.float32).sub_(4.884).div_(6.017)
        self.y = torch.tensor(data.target)
        order = rng.permutation(len(self.y))
        self.test, train = order[:359], order[718:]
        self.clients: list[np.ndarray] = []
        while min(map(len, self.clients), default=0) == 0:
            parts: list[list[int]] = [[] for _ in range(CLIENTS)]
            for label in range(10):
                mine = rng.permutation(train[data.target[train] == label])
                shares = rng.dirichlet([0.5] * CLIENTS)
                cuts = (np.cumsum(shares) * len(mine)).astype(int)[:-1]
                for part, dealt in zip(parts, np.split(mine, cuts), strict=True):
                    part.extend(dealt)
            self.clients = [np.array(part) for part in parts]

    def batches(self, client: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """STEPS batches out of permutations of the client's samples."""
        mine = self.clients[client]
        repeats = STEPS * BATCH // len(mine) + 1
        walk = np.concatenate([rng.permutation(mine) for _ in range(repeats)])
        yield from (walk[k * BATCH : (k + 1) * BATCH] for k in range(STEPS))


def forward(w: Weights, x: Tensor) -> Tensor:
    """64-64-32-10, ReLU."""
    hidden = F.relu(F.linear(F.relu(F.linear(x, w[0], w[1])), w[2], w[3]))
    return F.linear(hidden, w[4], w[5])


def run(method: str, lr: float, seed: int, cohort: int, beta: float, rounds: int) -> float:
    """Test accuracy after the last round, 0 if the weights are not finite."""
    data, rng = Digits(), np.random.default_rng(seed)
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(a, b) for a, b in ((64, 64), (64, 32), (32, 10))]
    x = [p.detach() for layer in layers for p in layer.parameters()]
    c, m = ([torch.zeros_like(p) for p in x] for _ in range(2))
    c_i = [[torch.zeros_like(p) for p in x] for _ in range(CLIENTS)]

    def gradient(w: Weights, samples: np.ndarray) -> Weights:
        leaves = [p.detach().requires_grad_() for p in w]
        loss = F.cross_entropy(forward(leaves, data.x[samples]), data.y[samples])
        return list(torch.autograd.grad(loss, leaves))

    for _ in range(rounds):
        chosen = rng.choice(CLIENTS, cohort, replace=False)
        full = {i: gradient(x, data.clients[i]) for i in chosen}
        mean_full = [sum(g) / cohort for g in zip(*full.values(), strict=True)]
        ends, changes = [], []
        for i in chosen:
            y = x
            for samples in data.batches(i, rng):
                g = gradient(y, samples)
                if method.startswith("scaffold"):
                    g = [a - own + all_ for a, own, all_ in zip(g, c_i[i], c, strict=True)]
                if method == "mime":
                    at_x = gradient(x, samples)
                    g = [a - b + f for a, b, f in zip(g, at_x, mean_full, strict=True)]
                if method.startswith("mime"):
                    g = [(1 - beta) * a + beta * b for a, b in zip(g, m, strict=True)]
                y = [p - lr * a for p, a in zip(y, g, strict=True)]
            ends.append(y)
            new = full[i]
            if method == "scaffold":  # option II
                four = zip(c_i[i], c, x, y, strict=True)
                new = [own - all_ + (p - q) / (STEPS * lr) for own, all_, p, q in four]
            changes.append([a - b for a, b in zip(new, c_i[i], strict=True)])
            c_i[i] = new
        x = [sum(p) / cohort for p in zip(*ends, strict=True)]
        deltas = zip(*changes, strict=True)
        c = [a + sum(change) / CLIENTS for a, change in zip(c, deltas, strict=True)]
        m = [(1 - beta) * a + beta * b for a, b in zip(mean_full, m, strict=True)]
    if not all(p.isfinite().all() for p in x):
        return 0.0
    right = forward(x, data.x[data.test]).argmax(1) == data.y[data.test]
    return float(right.float().mean())


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| method | lr | clients | beta | rounds | test accuracy | seeds |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for method, lr, cohort, beta, rounds in [
        ("fedavg", 0.1, 5, 0.0, 20),
        ("fedavg", 0.3, 5, 0.0, 20),
        ("fedavg", 0.3, 20, 0.0, 20),
        ("scaffold", 0.1, 5, 0.0, 20),
        ("scaffold", 0.3, 5, 0.0, 20),
        ("scaffold", 0.3, 20, 0.0, 20),
        ("scaffold_i", 0.3, 5, 0.0, 20),
        ("scaffold_i", 0.3, 20, 0.0, 20),
        ("mime", 0.3, 5, 0.9, 20),
        ("mime", 0.3, 5, 0.5, 20),
        ("mime", 0.3, 5, 0.0, 20),
        ("mimelite", 0.3, 5, 0.9, 20),
        ("mimelite", 0.3, 5, 0.5, 20),
        ("fedavg", 0.3, 5, 0.0, 60),
        ("mime", 0.3, 5, 0.9, 60),
        ("mimelite", 0.3, 5, 0.9, 60),
    ]:
        values = [run(method, lr, seed, cohort, beta, rounds) for seed in (0, 1, 2)]
        each = ", ".join(f"{value:.3f}" for value in values)
        mean = statistics.mean(values)
        print(
            f"| {method} | {lr} | {cohort} | {beta} | {rounds} | {mean:.3f} | {each} |", flush=True
        )
