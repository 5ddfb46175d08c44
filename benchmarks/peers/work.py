"""The one fixed piece of work every contestant does.

Everything random (data split, client choice, batch order, initial weights) is a pure
function of fixed seeds, so the contestants do the same arithmetic and their accuracies
must agree up to rounding.
"""

import functools
import itertools
import json
import os
import tempfile
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

CACHE = os.environ.get("PEERS_CACHE", os.path.join(tempfile.gettempdir(), "peers_cache"))
N_TEST = 297


@dataclass(frozen=True)
class Work:
    name: str
    steps: int  # K local steps
    rounds: int  # measured rounds; one more warm-up round comes first
    clients: int = 100  # N
    cohort: int = 10  # S
    batch: int = 50
    lr: float = 0.05
    alpha: float = 0.1  # Dirichlet


WORKS = {
    # real digits, LeNet-5, the full K = 20
    "lenet": Work("lenet", steps=20, rounds=10),
    # CIFAR shape, ResNet-18 + GroupNorm: K = 2 instead of 20, to fit a 2-core machine
    "resnet": Work("resnet", steps=2, rounds=2),
    # of the harness itself
    "toy": Work("toy", steps=2, rounds=1),
}


def get_work(name):
    return WORKS[name]


# ---------------------------------------------------------------- data
def _digits():
    from sklearn.datasets import load_digits

    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32)[:, None] / 16
    x = F.interpolate(x, size=(28, 28), mode="bilinear", align_corners=False)
    p = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    return x[p], torch.tensor(d.target)[p]


def _random_cifar(n=50000 + N_TEST):
    """Random images, stored once and memory-mapped so processes share the pages."""
    path = os.path.join(CACHE, f"cifar_like_{n}.npy")
    if not os.path.exists(path):
        os.makedirs(CACHE, exist_ok=True)
        x = np.random.default_rng(0).standard_normal((n, 3, 32, 32), dtype=np.float32)
        np.save(path + ".tmp.npy", x)
        os.replace(path + ".tmp.npy", path)
    x = torch.from_numpy(np.load(path, mmap_mode="c"))
    return x, torch.from_numpy(np.random.default_rng(1).integers(0, 10, n))


@functools.lru_cache(None)
def data(name):
    """(x_train, y_train, x_test, y_test)"""
    x, y = _random_cifar() if name == "resnet" else _digits()
    return x[N_TEST:], y[N_TEST:], x[:N_TEST], y[:N_TEST]


@functools.lru_cache(None)
def parts(name):
    """Dirichlet(alpha) over clients per class; nobody is left empty."""
    w, rng = get_work(name), np.random.default_rng(2)
    y = data(name)[1].numpy()
    out = [[] for _ in range(w.clients)]
    for c in range(10):
        idx = rng.permutation(np.flatnonzero(y == c))
        cut = (np.cumsum(rng.dirichlet([w.alpha] * w.clients)) * len(idx)).astype(int)[:-1]
        for o, part in zip(out, np.split(idx, cut), strict=True):
            o.extend(part.tolist())
    for o in out:
        if not o:
            o.append(max(out, key=len).pop())
    return [np.array(o) for o in out]


def cohort(name, rnd):
    w = get_work(name)
    return np.random.default_rng([3, rnd]).choice(w.clients, w.cohort, replace=False).tolist()


def client_indices(name, rnd, cid):
    """K*B samples of one client in this round's order, wrapping around if it owns fewer."""
    w = get_work(name)
    own = np.random.default_rng([4, rnd, cid]).permutation(parts(name)[cid])
    return np.resize(own, w.steps * w.batch)


def client_batches(name, rnd, cid):
    """These samples themselves."""
    x, y = data(name)[:2]
    idx = torch.from_numpy(client_indices(name, rnd, cid))
    return x[idx], y[idx]


# ---------------------------------------------------------------- models
class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.f1, self.f2, self.f3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.max_pool2d(F.relu(self.c2(x)), 2).flatten(1)
        return self.f3(F.relu(self.f2(F.relu(self.f1(x)))))


def make_model(name):
    torch.manual_seed(0)
    if name != "resnet":
        return LeNet()
    import torchvision

    m = torchvision.models.resnet18(num_classes=10, norm_layer=lambda c: nn.GroupNorm(32, c))
    m.conv1, m.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    return m


cached_model = functools.lru_cache(None)(make_model)


def local_sgd(model, x, y, w):
    opt = torch.optim.SGD(model.parameters(), lr=w.lr)
    model.train()
    for xb, yb in zip(x.split(w.batch), y.split(w.batch), strict=True):
        opt.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        opt.step()


@torch.no_grad()
def evaluate(model, name):
    _, _, x, y = data(name)
    model.eval()
    return float((model(x).argmax(1) == y).float().mean())


# ---------------------------------------------------------------- stop-watch
class Clock:
    """Marks the end of every round; round 0 is the warm-up."""

    def __init__(self):
        self.t0 = float(os.environ.get("PEERS_T0", time.time()))
        self.marks, self.acc, self.extra = [], [], {}

    def start(self):
        self.marks.append(time.time())

    def round_done(self, acc):
        self.marks.append(time.time())
        self.acc.append(round(acc, 4))

    def report(self, **kw):
        m = self.marks
        secs = [b - a for a, b in itertools.pairwise(m)]
        print(
            "RESULT "
            + json.dumps(
                dict(
                    startup_s=m[0] - self.t0,
                    warmup_s=secs[0],
                    rounds_s=secs[1:],
                    window=[m[1], m[-1]],
                    acc=self.acc,
                    **self.extra,
                    **kw,
                )
            ),
            flush=True,
        )
