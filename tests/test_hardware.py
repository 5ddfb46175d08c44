"""What a process does with its memory, and what a local step does not ask the machine."""

import os
import subprocess
import sys

import pytest
import torch

from fedmuon_pl import hardware
from fedmuon_pl.algorithms.base import Setting
from fedmuon_pl.algorithms.local import TorchRule

# Three tensors of 40 MiB at a time, which a plain glibc gives back and asks for again.
CYCLES = """
import ctypes, resource, sys, torch
from fedmuon_pl.hardware import keep_freed_memory

done = keep_freed_memory() if sys.argv[1] == "keep" else None
def cycle():
    [torch.ones(10 * 2**20) for _ in range(3)]
for _ in range(3):
    cycle()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    cycle()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(done, faults, ctypes.CDLL(None).mallopt(-3, 2**30))
"""


def cycles(how, **environment):
    """What ``keep_freed_memory`` said, how many pages were asked for, and whether 1 GiB is taken."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "GLIBC_TUN"))}
    run = subprocess.run(
        [sys.executable, "-c", CYCLES, how],
        check=True,
        capture_output=True,
        text=True,
        env={**clean, **environment},
    )
    done, faults, large = run.stdout.split()
    return done, int(faults), large == "1"


@pytest.mark.skipif(not hasattr(os, "confstr"), reason="not a POSIX system")
def test_freed_memory_is_kept_and_used_again():
    if "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
        pytest.skip("another C library")
    done, kept, large = cycles("keep")
    assert done == "True"
    if not large:
        pytest.skip("a glibc that maps blocks of 32 MiB by themselves whatever it is told")
    assert kept < cycles("leave")[1] / 10


@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.check=0"}],
)
def test_what_the_user_has_said_of_malloc_stays(environment):
    assert cycles("keep", **environment)[0] == "False"


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
