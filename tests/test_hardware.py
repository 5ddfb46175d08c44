"""What a process does with its memory, and what a local step does not ask the machine."""

import os
import subprocess
import sys

import pytest
import torch

from fedmuon_pl import hardware
from fedmuon_pl.algorithms.base import Setting
from fedmuon_pl.algorithms.local import TorchRule

# Twelve tensors of 24 MiB, which a plain glibc maps by themselves and gives back.
FREE = """
import resource, sys, torch
from pathlib import Path
from fedmuon_pl.hardware import keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20
done = keep_freed_memory() if sys.argv[1] == "keep" else None
before = resident()
def touch():
    [torch.ones(6 * 2**20) for _ in range(12)]
touch()
print(done, resident() - before)
"""


def freed(how, **environment):
    """What ``keep_freed_memory`` said, and the MiB that a process still holds of 288 freed ones."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "GLIBC_TUN"))}
    run = subprocess.run(
        [sys.executable, "-c", FREE, how],
        check=True,
        capture_output=True,
        text=True,
        env={**clean, **environment},
    )
    done, kept = run.stdout.split()
    return done, int(kept)


@pytest.mark.skipif(
    not hasattr(os, "confstr") or "CS_GNU_LIBC_VERSION" not in os.confstr_names,
    reason="another C library",
)
def test_freed_memory_is_kept():
    done, kept = freed("keep")
    assert done == "True"
    assert kept > 250
    assert freed("leave")[1] < 50


@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.check=0"}],
)
def test_what_the_user_has_said_of_malloc_stays(environment):
    assert freed("keep", **environment)[0] == "False"


def test_another_c_library_is_left_alone(monkeypatch):
    for name in [n for n in os.environ if n.startswith(("MALLOC_", "GLIBC_TUN"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda _: object())
    assert hardware.keep_freed_memory() is False


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adamax", "ASGD"])
def test_a_step_does_not_ask_which_accelerator_there_is(name, monkeypatch):
    """Lightning has torch ask NVML for it, which took eight times as long as the step."""
    x = [torch.ones(3)]
    rule = TorchRule(0.1, getattr(torch.optim, name))
    rule.setup(Setting(["x"], x, 1))
    leaf = torch.ones(3, requires_grad=True)
    leaf.grad = torch.ones(3)
    plain_leaf = leaf.detach().clone().requires_grad_()
    plain_leaf.grad = torch.ones(3)
    (member,) = rule.build([leaf], client_axis=False)
    with monkeypatch.context() as patched:

        def ask(*_, **__):
            raise AssertionError("asked")

        patched.setattr(torch.accelerator, "current_accelerator", ask)
        patched.setattr(torch.cuda, "is_available", ask)
        member.optimizer.step()
    plain = getattr(torch.optim, name)([plain_leaf], lr=0.1)
    plain.step()
    torch.testing.assert_close(leaf, plain_leaf)
