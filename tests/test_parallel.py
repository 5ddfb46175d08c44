"""Clients over processes and nodes: the number of processes changes nothing but the time."""

import multiprocessing
import os
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_runs import (
    CONFIGS,
    arguments,
    checkpoint,
    difference,
    in_a_process,
    rows,
    run_main_until_killed,
    run_several,
)
from federation import federate
from lightning_fabric.plugins.environments.lightning import find_free_network_port
from pytorch_lightning import Callback
from reference import tiny_problem
from torchmetrics import SumMetric

from fedmuon_pl import Classification, FedAvg
from fedmuon_pl.cli import main
from fedmuon_pl.data.batches import Batches
from fedmuon_pl.data.digits import SklearnDigits
from fedmuon_pl.data.partition import IID
from fedmuon_pl.data.sampling import local_batches, local_work
from fedmuon_pl.hardware import cores
from fedmuon_pl.models import MLP
from fedmuon_pl.parallel import ClientParallel, processes_threads
from fedmuon_pl.server.reduce import shares

# Rates as they are, small evaluation batches so that every process has some, two rounds or four.
EVALUATE = ["--data.init_args.eval_batch_size", "64"]
EPOCHS = ["--model.local_steps", "null", "--model.local_epochs", "1"]  # clients' work differs
METHODS = {"fedavg": EPOCHS, "fedmuon": [], "scaffold": EPOCHS, "mime": [], "fedadamw": EPOCHS}
METHODS = {k: v for k, v in METHODS.items() if (CONFIGS / f"algorithm/{k}.yaml").is_file()}


def run(algorithm, root, processes, *flags, rounds=4, **how):
    """Trains with some processes; returns status, the run's folder and what it said."""
    root.mkdir(parents=True, exist_ok=True)
    number = ["--trainer.devices", str(processes)]
    args = arguments("fit", algorithm, root, *EVALUATE, *number, *flags, rounds=rounds)
    log = root / f"stderr-{processes}"
    status = in_a_process(run_several, args, log, *how.values())
    return status, root / "digits" / f"{algorithm}-s0", log.read_text()


def assert_equal(folder, other):
    """Weights, all state and curves, to the last bit."""
    a, b = checkpoint(folder), checkpoint(other)
    assert a["callbacks"]["FederatedServer"]["engine"].pop("processes") > 0
    assert b["callbacks"]["FederatedServer"]["engine"].pop("processes") > 0
    for saved in (a, b):  # how many batches rank 0 has seen
        del saved["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    assert difference(a, b) is None
    assert rows(folder) == rows(other)
    assert len(rows(folder)) > 1
    assert (folder / "done").is_file()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs of one process, each trained once."""
    done = {}

    def get(algorithm, *flags, rounds=4):
        key = (algorithm, *flags, rounds)
        if key not in done:
            root = tmp_path_factory.mktemp(algorithm)
            status, done[key], said = run(algorithm, root, 1, *flags, rounds=rounds)
            assert status == 0, said
        return done[key]

    return get


# -- the same run -------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", METHODS)
def test_any_number_of_processes_gives_the_same_run(algorithm, alone, tmp_path):
    """Five clients over two, and over three processes; fedavg and scaffold with unequal work."""
    flags = METHODS[algorithm]
    for processes in (2, 3):
        status, folder, said = run(algorithm, tmp_path / str(processes), processes, *flags)
        assert (status, said) == (0, said)
        assert_equal(folder, alone(algorithm, *flags))
    server = checkpoint(folder)["callbacks"]["FederatedServer"]
    assert server["engine"]["processes"] == 3
    assert server["engine"]["threads"] == 1
    config = (folder / "config.yaml").read_text()
    assert "strategy: clients" in config
    assert "devices: 3" in config


@pytest.mark.parametrize("algorithm", ["scaffold", "fedmuon_cached"])
def test_a_process_may_have_no_client(algorithm, alone, tmp_path):
    one = ["--server.clients_per_round", "1"]
    status, folder, said = run(algorithm, tmp_path, 2, *one)
    assert status == 0, said
    assert "1 of 2 processes have nothing to train: a round has 1 clients" in said
    assert_equal(folder, alone(algorithm, *one))


def test_two_nodes(alone, tmp_path):
    """One process on each "node", which only share the network and the folder."""
    port = str(find_free_network_port())
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    args = arguments(
        "fit", "scaffold", tmp_path, *EVALUATE, *EPOCHS, "--trainer.num_nodes", "2", rounds=4
    )
    context = multiprocessing.get_context("forkserver")
    nodes = [
        context.Process(
            target=run_several, args=(args, tmp_path / f"node{n}", {**env, "NODE_RANK": str(n)})
        )
        for n in range(2)
    ]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()
    said = [(tmp_path / f"node{n}").read_text() for n in range(2)]
    assert [node.exitcode for node in nodes] == [0, 0], said
    assert_equal(tmp_path / "digits/scaffold-s0", alone("scaffold", *EPOCHS))


class Normed(torch.nn.Module):
    """With buffers that are averaged, and one that counts."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.fc = torch.nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(torch.tanh(self.norm(self.conv(x))).flatten(1))


def test_python_buffers_and_weights_by_size(tmp_path):
    """The Trainer of a script, in a process that has trained before: x, buffers and tags."""
    data = tiny_problem()[2]
    runs = []
    for kwargs in (
        {},
        {"devices": 2, "strategy": ClientParallel()},
        {"devices": 3, "strategy": "clients"},
    ):
        recorder, learner = federate(
            FedAvg(0.05),
            data,
            tmp_path,
            network=Normed,
            local_epochs=2,
            weighting="samples",
            trainer_kwargs={**kwargs, "precision": "32-true"},
        )
        for report in recorder.report:
            for key in [k for k in report if k.startswith("time/")]:
                del report[key]
        runs.append(
            (recorder.report, {k: v.clone() for k, v in learner.network.state_dict().items()})
        )
    assert difference(runs[1], runs[0]) is None
    assert difference(runs[2], runs[0]) is None
    assert runs[0][1]["norm.num_batches_tracked"] > 0


def test_each_process_measures_its_own_clients(alone, tmp_path):
    """Ten clients over two and three processes: no metric waits for another client's."""
    personal = ["-c", "callbacks/personal", "--trainer.callbacks.fine_tune_epochs", "1"]
    for processes in (2, 3):
        status, folder, said = run("fedavg", tmp_path / str(processes), processes, *personal)
        assert status == 0, said
        assert_equal(folder, alone("fedavg", *personal))
    assert 0 < float(rows(folder)[-1]["client/personal_acc_mean"]) < 1


class Counting(Classification):
    """Also counts the samples that are evaluated, by a metric that is a sum and no ratio."""

    def metrics(self):
        metrics = super().metrics()
        metrics.add_metrics({"samples": SumMetric()})
        return metrics

    def evaluate(self, network, batch, metrics):
        super().evaluate(network, batch, metrics)
        metrics["samples"].update(len(batch[1]))


class Evaluated(Callback):
    def __init__(self):
        self.values = []

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            metrics = trainer.callback_metrics.items()
            self.values.append({k: float(v) for k, v in metrics if k.startswith(("val/", "test/"))})


@pytest.mark.parametrize("size", [None, 64])
def test_what_is_measured_does_not_depend_on_the_processes(size, tmp_path):
    """With the default there are two batches of each split, so that a third process has none."""
    measured = []
    for processes in (1, 2, 3):
        several = {"devices": processes, "strategy": "clients"} if processes > 1 else {}
        how = {**several, "limit_val_batches": None, "num_sanity_val_steps": 0}
        seen = Evaluated()
        data = SklearnDigits(10, IID(), batch_size=8, eval_batch_size=size)
        task = Counting(lambda: MLP(), num_classes=10)
        settings = {"rounds": 2, "callbacks": [seen], "trainer_kwargs": how}
        federate(FedAvg(0.1), data, tmp_path, task=task, **settings)
        measured.append(seen.values)
    assert len(measured[0]) == 2
    assert measured[0][0]["val/samples"] == len(data.splits.val[1])
    assert measured[0][0]["test/samples"] == len(data.splits.test[1])
    assert measured[1] == measured[0]
    assert measured[2] == measured[0]


# -- what ends a run --------------------------------------------------------------------------


def test_a_killed_process_ends_the_run_and_any_number_resumes_it(alone, tmp_path):
    """kill -9 of rank 1 of 2; then one process, killed; then three finish: as if nothing was."""
    status, folder, said = run("scaffold", tmp_path, 2, *EPOCHS, env=(), act="kill rank 1", round=1)
    assert status == 2
    assert "fedmuon: process 1 of 0..1 was ended by SIGKILL in round 1" in said
    assert "resume with --ckpt_path last" in said
    assert "Traceback" not in said
    again = [*EPOCHS, "--ckpt_path", "last"]
    alone_args = arguments("fit", "scaffold", tmp_path, *EVALUATE, *again)
    assert in_a_process(run_main_until_killed, alone_args, 2) < 0
    status, folder, said = run("scaffold", tmp_path, 3, *again)
    assert status == 0, said
    assert "another engine" not in said
    assert_equal(folder, alone("scaffold", *EPOCHS))


def test_an_error_in_another_process_is_the_runs_error(tmp_path):
    status, _, said = run("fedavg", tmp_path, 2, env=(), act="fail rank 1", round=1)
    assert status == 2
    assert "fedmuon: round 1, client 7: the training loss became nan" in said
    assert "Traceback" not in said


def test_sigterm_stops_all_at_the_rounds_end(alone, tmp_path):
    status, folder, said = run("fedavg", tmp_path, 2, *EPOCHS, env=(), act="terminate", round=2)
    assert status == 0, said
    assert not (folder / "done").exists()
    assert checkpoint(folder)["callbacks"]["FederatedServer"]["rounds_done"] == 2
    status, folder, said = run("fedavg", tmp_path, 2, *EPOCHS, "--ckpt_path", "last")
    assert status == 0, said
    assert_equal(folder, alone("fedavg", *EPOCHS))


def test_no_process_outlives_a_killed_command(tmp_path):
    args = arguments("fit", "fedavg", tmp_path, "--trainer.devices", "3")
    process = multiprocessing.get_context("forkserver").Process(
        target=run_several, args=(args, tmp_path / "stderr", (), "kill rank 0", 1)
    )
    process.start()
    process.join()
    assert process.exitcode == -9
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and group(process.pid):
        time.sleep(0.05)
    assert group(process.pid) == []


def group(pgid):
    """The processes of a process group that are not zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == pgid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


# -- the plan -----------------------------------------------------------------------------


def test_shares():
    clients, work = [10, 11, 12, 13, 14], [5, 9, 1, 7, 3]
    # By hand: 9 -> rank 0; 7 -> 1; 5 -> 1 (7 < 9); 3 -> 0; 1 -> 0 (12 = 12, lower rank).
    assert shares(clients, work, 2) == [[11, 12, 14], [10, 13]]
    assert shares(clients, work, 1) == [clients]
    assert shares([4], [2], 3) == [[4], [], []]
    rng = np.random.default_rng(0)
    for ranks in (2, 3, 7):
        work = rng.integers(1, 100, 40).tolist()
        placed = shares(list(range(40)), work, ranks)
        assert Counter(c for mine in placed for c in mine) == Counter(range(40))
        loads = [sum(work[c] for c in mine) for mine in placed]
        best = max(max(work), sum(work) / ranks)
        assert max(loads) <= (4 / 3 - 1 / (3 * ranks)) * best + max(work) / 3


@pytest.mark.parametrize("samples", [1, 4, 9])
@pytest.mark.parametrize("how", [{"steps": 3}, {"epochs": 2}, {"epochs": 2, "drop_last": True}])
def test_work_is_the_samples_of_the_batches(samples, how):
    how = {"steps": None, "epochs": None, "drop_last": False, **how}
    batches = local_batches(np.arange(samples), 4, rng=np.random.default_rng(0), **how)
    assert local_work(samples, 4, **how) == sum(map(len, batches))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_evaluation_is_shared_out_without_repeats(ranks):
    data = torch.arange(35)
    parts = [list(Batches(data, 10, rank=rank, ranks=ranks)) for rank in range(ranks)]
    assert all(
        len(Batches(data, 10, rank=r, ranks=ranks)) == len(parts[r]) >= 1 for r in range(ranks)
    )
    assert torch.cat([b for part in parts for b in part]).sort().values.equal(data)
    whole = [b.tolist() for b in Batches(data, 10)]
    assert all(b.tolist() in whole for part in parts for b in part if len(b))


def test_processes_and_threads(monkeypatch):
    monkeypatch.setattr("fedmuon_pl.parallel.cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert processes_threads(None, None, 100) == (8, 1)
    assert processes_threads(3, None, 10) == (3, 1)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert processes_threads(None, None, None) == (8, 1)
    assert processes_threads(None, None, 3) == (3, 2)  # cores that no client could use
    assert processes_threads(None, 2, 100) == (4, 2)
    assert processes_threads(2, None, 100) == (2, 4)
    assert processes_threads(2, 3, 100) == (2, 3)
    assert processes_threads(None, 16, 100) == (1, 16)
    assert processes_threads(1, None, 10) == (1, torch.get_num_threads())
    assert cores() == len(os.sched_getaffinity(0))


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}
MISTAKES = {
    "torchrun": (
        TORCHRUN,
        [],
        "torchrun has started 4 processes, 2 on each node, but "
        "trainer.devices=1 and trainer.num_nodes=1.* use trainer.devices=2 and "
        "trainer.num_nodes=2",
    ),
    "nodes": ({}, ["--trainer.num_nodes=2"], "num_nodes=2: start the command on every node"),
    "none": ({}, ["--trainer.devices=0"], "trainer.devices=0 cannot .* a number of processes"),
    "list": ({}, ["--trainer.devices=0,1"], "trainer.devices=0,1: on a CPU"),
    "batchnorm": ({}, ["--trainer.sync_batchnorm=true"], "sync_batchnorm=True cannot be used"),
    "ddp": ({}, ["--trainer.strategy=ddp_spawn", "--trainer.devices=2"], "use trainer.strategy=cl"),
    "single": ({}, ["--trainer.strategy=single_device", "--trainer.devices=2"], "leave it at auto"),
    "limit": ({}, ["--trainer.limit_val_batches=3", "--trainer.devices=2"], "limit_val_batches=3 "),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_typical_mistakes(name, tmp_path, monkeypatch, capfd):
    env, flags, sentence = MISTAKES[name]
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    assert main(arguments("fit", "fedavg", tmp_path, *flags)) == 2
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("fedmuon: ")
    assert re.search(sentence, said), said
    assert not list(tmp_path.rglob("*.ckpt"))
