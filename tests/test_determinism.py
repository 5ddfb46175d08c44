"""One seed, one result: whatever the process, what ran before, or other random draws."""

import gc
import hashlib
import random
import tempfile

import numpy as np
import pytest
import torch
from cli_runs import (
    ALGORITHMS,
    COHORT,
    ROUNDS,
    STEPS,
    arguments,
    assert_same_run,
    checkpoint,
    difference,
    fit,
    in_a_process,
    load,
    patched,
    rows,
    run_main,
    trainer_of,
    watched,
)
from federation import federate

from fedmuon_pl import Classification, FedAvg, FederatedModule, FedMuon, Scaffold
from fedmuon_pl.data.datamodule import FederatedDataModule
from fedmuon_pl.server.callback import FederatedServer
from fedmuon_pl.server.totals import RoundTotals


def state_hash(folder):
    """Of weights and server optimiser."""
    saved = load(folder / "checkpoints/last.ckpt")
    digest = hashlib.sha256()
    states = [saved["state_dict"], *(s["state"] for s in saved["optimizer_states"])]
    for state in states:
        for key, value in state.items():
            tensors = value.values() if isinstance(value, dict) else [value]
            for t in tensors:
                digest.update(f"{key} ".encode())
                digest.update(t.numpy().tobytes() if torch.is_tensor(t) else repr(t).encode())
    return digest.hexdigest()


def test_two_processes_equal_this_one(finished, tmp_path):
    algorithm = "fedmuon"
    here = finished(algorithm).folder
    hashes = set()
    for i in range(2):
        root = tmp_path / str(i)
        assert in_a_process(run_main, arguments("fit", algorithm, root)) == 0
        there = root / "digits" / f"{algorithm}-s0"
        hashes.add(state_hash(there))
        assert_same_run(there, here)
    # And a second one here, after whatever ran before.
    finished("scaffold")
    again = fit(algorithm, tmp_path / "again")
    assert_same_run(again, here)
    assert hashes == {state_hash(here)} == {state_hash(again)}


def test_a_method_changes_neither_cohorts_nor_batches_nor_x0(finished):
    runs = [finished(algorithm) for algorithm in ALGORITHMS]
    first = runs[0]
    assert sorted(first.cohorts) == list(range(ROUNDS))
    assert all(len(set(c)) == COHORT for c in first.cohorts.values())
    assert len({tuple(c) for c in first.cohorts.values()}) > 1
    assert sorted(first.batches) == sorted((r, c) for r, cs in first.cohorts.items() for c in cs)
    assert all(np.shape(b) == (STEPS, 16) for b in first.batches.values())
    for run in runs[1:]:
        assert run.cohorts == first.cohorts
        assert run.batches == first.batches
        assert difference(run.x0[0], first.x0[0]) is None
        assert difference(run.x0[1], first.x0[1]) is not None
    assert len({state_hash(run.folder) for run in runs}) == len(runs)


def test_what_each_seed_changes(finished, tmp_path):
    base = finished("fedavg")

    def run(name, *flags, seed=0):
        with watched() as seen:
            seen.folder = fit("fedavg", tmp_path / name, *flags, rounds=2, seed=seed)
        return seen

    def digest(seen):
        server = load(seen.folder / "checkpoints/last.ckpt")["callbacks"]["FederatedServer"]
        return server["fingerprint"]["data"]["partition"]

    run_seed = run("run", "--seed_everything", "1", seed=1)
    assert digest(run_seed) == digest(base)
    assert run_seed.cohorts[0] != base.cohorts[0]
    assert run_seed.cohorts[1] != base.cohorts[1]
    assert difference(run_seed.x0[0], base.x0[0]) is not None
    both = set(run_seed.batches) & set(base.batches)
    assert both
    assert all(run_seed.batches[key] != base.batches[key] for key in both)

    partition_seed = run("partition", "--data.partition_seed", "1")
    assert digest(partition_seed) != digest(base)
    assert partition_seed.cohorts == {r: base.cohorts[r] for r in range(2)}
    assert difference(partition_seed.x0[0], base.x0[0]) is None


class Noisy(torch.nn.Sequential):
    """A network whose forward draws random numbers."""

    def __init__(self):
        super().__init__(
            torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
        )


def disturb():
    """What other code may do to the global generators."""
    for _ in range(3):
        torch.rand(5)
        np.random.random(5)
        random.random()
    seed = random.randrange(2**31)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def disturbed(original):
    def call(self, *args, **kwargs):
        disturb()
        result = original(self, *args, **kwargs)
        disturb()
        return result

    return call


def test_global_generators_do_not_matter(finished, tmp_path):
    # Before the run, between construction and training, between rounds, clients and batches.
    random.seed(123)
    disturb()
    with (
        patched(FederatedModule, "__init__", disturbed),
        patched(FederatedDataModule, "setup", disturbed),
        patched(FederatedDataModule, "client_batches", disturbed),
        patched(FederatedServer, "open_round", disturbed),
        patched(RoundTotals, "receive", disturbed),
        patched(FederatedModule, "validation_step", disturbed),
    ):
        folder = fit("fedmuon", tmp_path)
    assert_same_run(folder, finished("fedmuon").folder)


def test_global_generators_do_not_matter_with_dropout(tmp_path):
    rng = torch.Generator().manual_seed(0)
    data = {
        i: (
            torch.randn(6, 1, 4, 4, generator=rng, dtype=torch.float64),
            torch.randint(3, (6,), generator=rng),
        )
        for i in range(4)
    }

    def train(algorithm, seed=0):
        recorder, _ = federate(
            algorithm, data, tmp_path, rounds=2, task=Classification(Noisy, 3), seed=seed
        )
        return recorder.x

    first = train(FedAvg(0.1))
    random.seed(5)
    disturb()
    before = torch.get_rng_state()
    with patched(RoundTotals, "receive", disturbed):
        again = train(FedAvg(0.1))
    assert difference(first, again) is None
    # Another method in between, and the global generator is left as it was.
    torch.set_rng_state(before)
    train(Scaffold(0.1))
    train(FedMuon(0.1))
    assert torch.equal(before, torch.get_rng_state())
    assert difference(first, train(FedAvg(0.1))) is None
    assert difference(first, train(FedAvg(0.1), seed=1)) is not None


def test_evaluating_twice_gives_equal_numbers(finished, tmp_path):
    folder = finished("fedmuon").folder
    root = folder.parents[1]
    files = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for command in ("validate", "test"):
        trainer = trainer_of(arguments(command, "fedmuon", root, "--ckpt_path", "last"))
        module, data = trainer.lightning_module, trainer.datamodule
        weights = {k: v.clone() for k, v in module.state_dict().items()}
        results = [{k: float(v) for k, v in trainer.callback_metrics.items()}]
        for _ in range(2):
            disturb()
            getattr(trainer, command)(module, data, verbose=False)
            results.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        assert results[0]
        assert results[0] == results[1] == results[2]
        assert difference(weights, dict(module.state_dict())) is None
    # Small evaluation batches sum in another order; nothing else changes.
    small = ("--data.eval_batch_size", "7", "--ckpt_path", "last")
    anew = trainer_of(arguments("test", "fedmuon", root, *small)).callback_metrics
    assert {k: float(v) for k, v in anew.items()} == {
        k: pytest.approx(v, rel=1e-5) for k, v in results[0].items()
    }
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == files


@pytest.mark.parametrize("algorithm", ["scaffold", "fedmuon"])
def test_fast_dev_run_is_one_real_round(algorithm, finished, tmp_path, monkeypatch):
    work, temporary = tmp_path / "work", tmp_path / "tmp"
    work.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    flags = ("--trainer.fast_dev_run", "true")
    with watched() as seen:
        trainer = trainer_of(arguments("fit", algorithm, "runs", *flags))
    straight = finished(algorithm)
    assert seen.cohorts == {0: straight.cohorts[0]}
    assert trainer.global_step == 1
    x = [p.detach() for p in trainer.lightning_module.network.parameters()]
    assert difference(x, straight.x0[1]) is None
    server = next(c for c in trainer.callbacks if isinstance(c, FederatedServer))
    assert len(server.store) == (COHORT if algorithm == "scaffold" else 0)
    assert list(work.rglob("*")) == []
    # The clients' state lies in a temporary folder, which goes with the run.
    del trainer, server
    seen.folder = None
    gc.collect()
    assert list(temporary.rglob("*")) == []


def test_a_python_run_leaves_no_files_without_asking(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = {i: (torch.randn(4, 1, 4, 4).double(), torch.arange(4) % 3) for i in range(4)}
    federate(FedMuon(0.1), data, tmp_path, rounds=1)
    assert {p.name for p in tmp_path.iterdir()} <= {"done"}


def test_curves_are_text_with_all_digits(finished):
    # Equal text means equal numbers: every cell reads back to the same float64.
    for row in rows(finished("fedadam").folder):
        assert all(
            v == str(int(v)) if k == "round" else v == repr(float(v)) for k, v in row.items()
        )
    assert checkpoint(finished("fedadam").folder)["global_step"] == ROUNDS
