"""What is done on a GPU, on one that is pretended: the same numbers as on the CPU, few waits."""

import itertools
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from cli_runs import (
    ALGORITHMS,
    COHORT,
    CONFIGS,
    FLAGS,
    OWN_IMAGES,
    arguments,
    evaluate,
    load,
    patched,
)
from pretended_gpu import DEVICE, OnGPU, pretended_gpu

from fedmuon_pl import FederatedModule
from fedmuon_pl.cli import main

METHODS = sorted(path.stem for path in (CONFIGS / "algorithm").glob("*.yaml"))
GPU = ("--trainer.accelerator", "cuda", "--trainer.devices", "1")
ONE_AT_A_TIME = ("--model.clients_at_once", "1")


def trained(algorithm, root, *flags, rounds=2):
    """A run's folder, of a run whose last round is evaluated."""
    last = ("--trainer.check_val_every_n_epoch", str(rounds))
    assert main(arguments("fit", algorithm, root, *last, *flags, rounds=rounds)) == 0
    return Path(root) / "digits" / f"{algorithm}-s0"


def weights(folder):
    return load(folder / "checkpoints/last.ckpt")["state_dict"]


def assert_same_weights(one, other, tolerance=0.0):
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance)


def at_once(folder):
    return yaml.safe_load((folder / "config.yaml").read_text())["model"]["clients_at_once"]


# -- the pretended GPU itself ---------------------------------------------------------------


def test_two_devices_do_not_mix():
    here = torch.ones(3)
    with pretended_gpu():
        there = here.to(DEVICE)
        assert isinstance(there, OnGPU)
        assert there.device == (there * 2).device == torch.zeros(2, device=DEVICE).device == DEVICE
        for mixed in (
            lambda: here + there,
            lambda: torch.stack([here, there]),
            lambda: F.linear(here, there.view(1, 3)),
            lambda: torch._foreach_add([there], [here]),
            lambda: torch.stack([there[0], torch.tensor(1.0)]),
            lambda: here[torch.zeros(1, dtype=torch.long, device=DEVICE)],
            lambda: there.index_put_((torch.tensor([0]),), here[:1]),
        ):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        assert (there + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]  # numbers may
        assert there[torch.tensor([0, 2])].device == DEVICE  # and indices
        back = there.cpu()
        assert type(back) is torch.Tensor
        back += 1
        assert there.sum().item() == 3
        here.copy_(there * 2)
    assert here.tolist() == [2.0, 2.0, 2.0]
    assert not torch.cuda.is_available() or torch.cuda.get_device_name() != "a pretended GPU"


def test_it_learns_as_the_cpu_does():
    def train(device):
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten()).to(device)
        stacked = {n: torch.stack([p.detach()] * 2) for n, p in network.named_parameters()}
        leaves = {n: torch.nn.Parameter(p) for n, p in stacked.items()}
        optimizer = torch.optim.AdamW(leaves.values(), lr=0.1)
        x, y = torch.randn(2, 5, 1, 4, 4).to(device), torch.arange(10).view(2, 5).remainder(8)

        def loss(p, x, y):
            return F.cross_entropy(torch.func.functional_call(network, p, (x,)), y)

        for _ in range(3):
            optimizer.zero_grad()
            torch.vmap(loss)(leaves, x, y.to(device)).sum().backward()
            assert all(p.grad.device == device for p in leaves.values())
            optimizer.step()
        return [p.detach().cpu() for p in leaves.values()]

    with pretended_gpu():
        there = train(DEVICE)
    for one, other in zip(train(torch.device("cpu")), there, strict=True):
        assert torch.equal(one, other)


def test_what_waits_is_counted():
    with pretended_gpu() as waits:
        t = torch.ones(3, device=DEVICE)
        for counted in (
            t.cpu,
            t.tolist,
            t.nonzero,
            (t > 0).all().item,
            lambda: float(t[0]),
            lambda: t[t > 0],
            lambda: t[[0, 2]],
            lambda: t[torch.tensor([0])],
            lambda: torch.linalg.svd(t.view(1, 3)),
            lambda: torch.ones(2).to(DEVICE),
            lambda: torch.ones(2).to(DEVICE, non_blocking=True),
            lambda: torch.tensor([1.0], device=DEVICE),
            lambda: t.copy_(torch.ones(3)),
        ):
            before = waits.total()
            counted()
            assert waits.total() == before + 1
        before = waits.total()
        torch.zeros(3).pin_memory().to(DEVICE, non_blocking=True)
        torch.ones(3, device=DEVICE)[t.long()] = 0.0
        (t.view(1, 3) @ t).square_().add(1)
        assert waits.total() == before


# -- runs ---------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", METHODS)
def test_every_method_is_the_same_on_a_gpu(algorithm, tmp_path):
    with pretended_gpu():
        gpu = trained(algorithm, tmp_path / "gpu", *GPU)
    assert at_once(gpu) == COHORT  # by default side by side
    same = ("--model.clients_at_once", str(COHORT))
    assert_same_weights(gpu, trained(algorithm, tmp_path / "cpu", *same))
    state = load(gpu / "checkpoints/last.ckpt")
    tensors = [t for t in torch.utils._pytree.tree_leaves(state) if isinstance(t, torch.Tensor)]
    assert tensors
    assert {type(t) for t in tensors} == {torch.Tensor}


@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        ("fedmuon", ONE_AT_A_TIME),
        ("scaffold", ("-c", "callbacks/personal")),
        ("fedbn", (*FLAGS["fedbn"], "-c", "callbacks/personal")),
        ("mime", ONE_AT_A_TIME),
        ("fedmuon", ("--server.on_nonfinite", "drop", "--model.client_clip_norm", "0.1")),
    ],
)
def test_what_a_run_can_be_asked_for_is_the_same_on_a_gpu(algorithm, flags, tmp_path):
    with pretended_gpu():
        gpu = trained(algorithm, tmp_path / "gpu", *GPU, *flags)
    same = ("--model.clients_at_once", str(at_once(gpu)), "--model.channels_last", "false")
    assert_same_weights(gpu, trained(algorithm, tmp_path / "cpu", *flags, *same))


@pytest.mark.parametrize(
    ("network", "skew"),
    [
        ("LeNet, init_args: {image_size: 12, in_channels: 3, num_classes: 5}", "Rotation"),
        ("ResNet8, init_args: {in_channels: 3, num_classes: 5, norm: batch}", "ChannelGain"),
        ("ViT, init_args: {image_size: 12, patch_size: 4, num_classes: 5, depth: 1}", "Rotation"),
    ],
)
def test_images_are_augmented_and_skewed_on_a_gpu(network, skew, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    parts = {"train": 60, "test": 20}
    pixels = {f"x_{k}": rng.integers(0, 256, (n, 3, 12, 12), np.uint8) for k, n in parts.items()}
    np.savez("mine.npz", **pixels, **{f"y_{k}": np.arange(n) % 5 for k, n in parts.items()})
    text = OWN_IMAGES.format(network=network, skew=skew, partition="IID", rounds=2)
    Path("mine.yaml").write_text(text)

    def run(root, *flags):
        configs = ("-c", "base", "-c", "mine.yaml", "-c", "algorithm/fedavg")
        quiet = ("--trainer.enable_progress_bar", "false", "--threads", "1")
        assert main(["fit", *configs, *quiet, "--trainer.default_root_dir", root, *flags]) == 0
        return Path(root, "mine/fedavg-s0")

    with counted_rounds() as rounds:
        gpu = run("gpu", *GPU)
    assert rounds == [2 // at_once(gpu) + 1] * 2  # for a block and at the end, not for each batch
    same = ("--model.clients_at_once", str(at_once(gpu)), "--model.channels_last", "false")
    # Attention and BatchNorm have other kernels there.
    assert_same_weights(gpu, run("cpu", "--trainer.accelerator", "cpu", *same), 1e-5)


def test_a_run_goes_on_on_a_gpu_and_is_evaluated_there(tmp_path):
    with pretended_gpu():
        folder = trained("scaffold", tmp_path / "a", *GPU, rounds=2)
        goes_on = (*GPU, "--ckpt_path", "last")
        assert main(arguments("fit", "scaffold", tmp_path / "a", *goes_on, rounds=3)) == 0
        straight = trained("scaffold", tmp_path / "b", *GPU, rounds=3)
        there = evaluate("test", folder, "last", *GPU)
    assert_same_weights(folder, straight)
    here = evaluate("test", folder, "last")
    assert here == {name: pytest.approx(value, rel=1e-6) for name, value in there.items()}


# What a block waits for besides: its state goes to disk; a count that was averaged, or that its one
# client has kept, is read.
MORE = {"scaffold": 1, "fedbn": 1, "fedpac_adamw": 1, "muloco": 1}
ALONE = {"muloco": 1}


@contextmanager
def counted_rounds():
    """The waits of each round's training step."""
    rounds = []

    def count(step):
        def counting(*args):
            before = waits.total()
            step(*args)
            rounds.append(waits.total() - before)

        return counting

    with pretended_gpu() as waits, patched(FederatedModule, "training_step", count):
        yield rounds


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "fedbn", "fedpac_adamw", "muloco"])
def test_a_round_waits_once_a_block_and_once_at_its_end(algorithm, tmp_path):
    """However many steps: for a block's losses, norms and soundness, and for the row."""
    for steps, blocks in itertools.product((2, 5), (1, COHORT)):
        flags = ("--model.local_steps", str(steps))
        flags += ("--model.clients_at_once", str(COHORT // blocks))
        with counted_rounds() as rounds:
            trained(algorithm, tmp_path / f"{steps}-{blocks}", *GPU, *flags)
        more = MORE.get(algorithm, 0) + (ALONE.get(algorithm, 0) if blocks == COHORT else 0)
        assert rounds == [blocks * (1 + more) + 1] * 2


@pytest.mark.parametrize("algorithm", ["local_soap", "fedmuon_lowrank", "mime"])
def test_a_step_waits_for_nothing_where_a_block_does(algorithm, tmp_path):
    """Decompositions of a block's first step or last, gradients over whole data."""
    found = []
    for steps in (2, 5):
        with counted_rounds() as rounds:
            trained(algorithm, tmp_path / str(steps), *GPU, "--model.local_steps", str(steps))
        found.append(rounds)
    assert found[0] == found[1]
