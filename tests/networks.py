"""Tiny networks, each with one thing that could go wrong side by side: (B, 1, 4, 4) to 3 logits."""

from functools import partial

import torch
from torch import nn

# No bias before a norm: its gradient is rounding noise, which Adam would blow up to full steps.
_CONV = partial(nn.Conv2d, 1, 4, 3, bias=False)


def _sequence(*layers):
    return nn.Sequential(_CONV(), *layers, nn.Flatten(), nn.Linear(16, 3))


def batch_norm():
    return _sequence(nn.BatchNorm2d(4), nn.ReLU())


def group_norm():
    return _sequence(nn.GroupNorm(2, 4), nn.ReLU())


def dropout_off():
    return _sequence(nn.Tanh(), nn.Dropout(0.0))


def in_place():
    return _sequence(nn.ReLU(inplace=True))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 8), nn.Linear(8, 3)
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x.flatten(1))))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.spare = nn.Linear(16, 3), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(x.flatten(1))


class OwnBuffer(nn.Module):
    """Sets its buffer to a new tensor in every forward, and uses it."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 3)
        self.register_buffer("running", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.running = 0.5 * self.running + 0.5 * x.mean()
        return self.head(x.flatten(1) - self.running)


class Everything(nn.Module):
    """All of it at once."""

    def __init__(self):
        super().__init__()
        self.norm, self.tied, self.frozen = batch_norm()[:2], Tied(), Frozen()
        self.unused, self.own = Unused(), OwnBuffer()
        self.mix = nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(16, 3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        logits = self.tied(x) + self.frozen(x) + self.unused(x) + self.own(x)
        return self.scale * logits + self.mix(self.norm(x))


NETWORKS = {
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "dropout_off": dropout_off,
    "in_place": in_place,
    "tied": Tied,
    "frozen": Frozen,
    "unused": Unused,
    "own_buffer": OwnBuffer,
    "everything": Everything,
}
