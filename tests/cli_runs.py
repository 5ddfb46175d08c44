"""Runs the real command line on digits, in this process, and reads what a run leaves behind."""

import csv
import functools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from fedmuon_pl.cli import main
from fedmuon_pl.compare.plan import LAUNCHER
from fedmuon_pl.data.datamodule import FederatedDataModule
from fedmuon_pl.errors import NonFiniteUpdate
from fedmuon_pl.server.callback import FederatedServer
from fedmuon_pl.server.state import ClientStore
from fedmuon_pl.server.totals import RoundTotals
from fedmuon_pl.training import FederatedCLI

CONFIGS = Path(__file__).parents[1] / "configs"
ALGORITHMS = ("fedadam", "fedavg", "fedmuon", "local_muon", "scaffold")
# These keep the same state as others and differ in a formula only.
VARIANTS = {"fedyogi", "fedadagrad", "fedprox", "local_adamw", "local_soap", "fedpac_adamw"}
VARIANTS |= {"aligned_sgd", "fedmuon_official"}
EVERY_ALGORITHM = sorted({p.stem for p in (CONFIGS / "algorithm").glob("*.yaml")} - VARIANTS)
FLAGS = {
    # With these rates the accuracy goes up and down: best.ckpt is not last.ckpt.
    **{name: ("--model.algorithm.lr", "1.0") for name in ("fedavg", "scaffold")},
    "fedbn": ("--model.task.init_args.network.init_args.batch_norm", "true"),
}
OWN_IMAGES = """
experiment: mine
server: {{clients_per_round: 2}}
model:
  task:
    class_path: Classification
    init_args: {{network: {{class_path: {network}}}, num_classes: 5}}
  local_steps: 2
data:
  class_path: Npz
  init_args:
    path: mine.npz
    val_size: 10
    augment: {{class_path: CropFlip, init_args: {{padding: 2}}}}
    feature_skew: {{class_path: {skew}}}
    clients: 4
    partition: {{class_path: {partition}}}
    batch_size: 4
trainer: {{max_epochs: {rounds}}}
"""
ROUNDS = 4
STOP = 2
COHORT = 5
STEPS = 3


def arguments(command, algorithm, root, *flags, rounds=ROUNDS):
    """A command line; later flags win."""
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
    return [
        command,
        *("-c", "base", "-c", "experiment/digits", "-c", f"algorithm/{algorithm}"),
        *("--threads", "1", "--trainer.accelerator", "cpu", "--model.local_steps", str(STEPS)),
        *("--trainer.max_epochs", str(rounds), "--trainer.default_root_dir", str(root)),
        *quiet,
        *FLAGS.get(algorithm, ()),
        *flags,
    ]


def fit(algorithm, root, *flags, rounds=ROUNDS, seed=0):
    """Trains, and returns the run's folder."""
    assert main(arguments("fit", algorithm, root, *flags, rounds=rounds)) == 0
    return Path(root) / "digits" / f"{algorithm}-s{seed}"


# -- watching a run ---------------------------------------------------------------


@dataclass
class Seen:
    """What the clients got to see, by round."""

    folder: Path | None = None
    stopped: Path | None = None
    x0: dict = field(default_factory=dict)
    cohorts: dict = field(default_factory=dict)
    batches: dict = field(default_factory=dict)


@contextmanager
def patched(owner, name, wrap):
    """Replaces a method by ``wrap(original)`` for a while."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrap(original)))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def watched():
    """Records cohorts, batches and x^r of every round that is opened meanwhile."""
    seen = Seen()

    def open_round(original):
        def call(self, trainer, module):
            plan = original(self, trainer, module)
            seen.x0[plan.round] = [x.clone() for x in plan.x0]
            seen.cohorts[plan.round] = list(plan.clients)
            return plan

        return call

    def client_batches(original):
        def call(self, client, **kwargs):
            batches = original(self, client, **kwargs)
            seen.batches[kwargs["round"], client] = np.stack(batches).tolist()
            return batches

        return call

    with (
        patched(FederatedServer, "open_round", open_round),
        patched(FederatedDataModule, "client_batches", client_batches),
    ):
        yield seen


def trainer_of(args):
    """Runs a command and returns the Trainer that did it."""
    made = []

    def init(original):
        def call(self, args):
            made.append(self)
            original(self, args)

        return call

    with patched(FederatedCLI, "__init__", init):
        assert main(args) == 0
    return made[0].trainer


def evaluate(command, folder, name, *flags):
    """Evaluates a checkpoint anew, through the command line."""
    algorithm, root = folder.name.rsplit("-s", 1)[0], folder.parents[1]
    trainer = trainer_of(arguments(command, algorithm, root, "--ckpt_path", name, *flags))
    return {k: float(v) for k, v in trainer.callback_metrics.items()}


def straight_and_stopped(algorithm, root):
    """A whole run, and what its root held in the middle of round STOP: what a kill leaves.

    The latter lies in the run's own place, the former beside it.
    """
    left = Path(f"{root}-left")

    def copy(_):
        shutil.copytree(root, left)

    with watched() as seen, interrupted(STOP, act=copy):
        folder = fit(algorithm, root)
    whole = Path(root).rename(f"{root}-whole")
    left.rename(root)
    seen.folder, seen.stopped = whole / folder.relative_to(root), folder
    return seen


class Interruption(BaseException):
    """Stands for a kill, in this process."""


@contextmanager
def interrupted(round, blocks=2, act=None):
    """Raises, or acts, in the middle of a round: after some blocks of its clients were received."""
    received = []

    def receive(original):
        def call(self, run, *args):
            original(self, run, *args)
            received.append(run.round)
            if received.count(round) == blocks:
                if act is None:
                    raise Interruption
                act(run)

        return call

    with patched(RoundTotals, "receive", receive):
        yield


# -- processes of their own ---------------------------------------------------------------

# A fresh interpreter, not a fork of this one, imports everything once and is the parent of all.
_PROCESSES = multiprocessing.get_context("forkserver")
# What a run imports only when it needs it is imported there too.
_LATE = ["sklearn.datasets", "matplotlib.backends.backend_agg", "matplotlib.image"]
_LATE += ["fedmuon_pl.compare.partition_report", "tensorboard.plugins.hparams.plugin_data_pb2"]
_PROCESSES.set_forkserver_preload(["fedmuon_pl.training", "cli_runs", *_LATE])


def in_a_process(function, *args):
    """Calls a function of this module in a new process; returns the exit status."""
    process = _PROCESSES.Process(target=function, args=args)
    process.start()
    process.join()
    return process.exitcode


def run_main(args):
    """The command as a process."""
    sys.exit(main(args))


def run_main_until_killed(args, round):
    """The same, with SIGKILL for the whole process group in the middle of a round."""
    os.setsid()

    def kill(_):
        os.killpg(os.getpgrp(), signal.SIGKILL)

    with interrupted(round, act=kill):
        main(args)


def run_several(args, stderr, env=(), act=None, round=1):
    """The same with its standard error in a file, and something done in the middle of a round."""
    os.setsid()
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.environ.update(env)
    with nullcontext() if act is None else interrupted(round, blocks=1, act=ACTS[act]):
        sys.exit(main(args))


class ForkedRun:
    """In place of ``subprocess.Popen`` for the runs of a sweep: see fixture ``forked``."""

    def __init__(self, command, *, stdin, stdout, stderr, env, start_new_session):
        assert tuple(command[:4]) == LAUNCHER
        assert (stdin, stderr, start_new_session) == (subprocess.DEVNULL, subprocess.STDOUT, True)
        args = command[3:], stdout.name, dict(env), os.getcwd()
        self._process = _PROCESSES.Process(target=_run_of_a_sweep, args=args)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    poll = returncode.fget

    def wait(self):
        self._process.join()
        return self.returncode


def _run_of_a_sweep(args, log, env, folder):
    os.setsid()
    os.chdir(folder)
    sys.path.insert(0, folder)  # as `python -m` does
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.exit(main(args))


def _rank():
    return int(os.environ.get("LOCAL_RANK", "0"))


def _kill_rank_1(_):
    if _rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_rank_0(_):
    if _rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def _fail_rank_1(run):
    if _rank() == 1:
        raise NonFiniteUpdate(f"round {run.round}, client 7: the training loss became nan")


def _terminate(_):
    os.kill(os.getpid(), signal.SIGTERM)


ACTS = {
    "kill rank 1": _kill_rank_1,
    "kill rank 0": _kill_rank_0,
    "fail rank 1": _fail_rank_1,
    "terminate": _terminate,
}


# -- reading a run ---------------------------------------------------------------


def rows(folder, times=False):
    """``metrics.csv`` as text, without what depends on the clock."""
    with (folder / "metrics.csv").open(newline="") as f:
        return [
            {k: v for k, v in row.items() if times or not k.startswith("time/")}
            for row in csv.DictReader(f)
        ]


def events(folder, times=False):
    """The rounds' scalars of all files that TensorBoard would read; each may be there once.

    By (tag, step). What a run shows beside its curves (``fedmuon_pl.tensorboard``) is left out.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    out = {}
    for path in sorted(folder.glob("*tfevents*")):
        for raw in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(raw)
            for value in event.summary.value:
                key = value.tag, event.step
                assert key not in out, f"{key} is there twice"
                out[key] = value
    beside = ("by_kb/", "by_ms/", "final/") if times else ("by_kb/", "by_ms/", "final/", "time/")
    return {
        key: value.simple_value
        for key, value in out.items()
        if value.HasField("simple_value") and not key[0].startswith(beside)
    }


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def checkpoint(folder, name="last"):
    """A checkpoint without clock and places, per-client state by content."""
    saved = load(folder / "checkpoints" / f"{name}.ckpt")
    for state in saved["callbacks"].values():
        state.pop("dirpath", None)
        # Lightning does not restore it, and nothing reads it.
        state.pop("current_score", None)
        for key in ("best_model_path", "kth_best_model_path", "last_model_path"):
            if key in state:
                state[key] = Path(state[key]).name
        if "best_k_models" in state:
            state["best_k_models"] = {Path(k).name: v for k, v in state["best_k_models"].items()}
    for row in saved["callbacks"]["RoundLog"]["history"]:
        for key in [k for k in row if k.startswith("time/")]:
            del row[key]
    server = saved["callbacks"]["FederatedServer"]
    index = server["clients"]["index"]
    if "control_variates" in server["algorithm"]:
        server["clients"] = client_state(folder, server)
    else:
        server["clients"] = {c: checksum for c, _, _, checksum in index.tolist()}
    return saved


def client_state(folder, server):
    """SCAFFOLD's control variates by client, as tensors."""
    clients = server["clients"]["index"][:, 0].tolist()
    store = ClientStore(
        folder / "client_state", {"c_i": server["algorithm"]["control_variates"]["c"]}
    )
    store.load_state_dict(server["clients"], folder / "client_state")
    return {c: store.load([c], torch.device("cpu")) for c in clients}


def difference(a, b, at="checkpoint"):
    """Where two nested values first differ, bit for bit; None if they do not."""
    if type(a) is not type(b):
        return f"{at}: {type(a)} and {type(b)}"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{at}: {list(a)} and {list(b)}"
        return next((d for k in a if (d := difference(a[k], b[k], f"{at}.{k}"))), None)
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{at}: {len(a)} and {len(b)} entries"
        pairs = enumerate(zip(a, b, strict=True))
        return next((d for i, (x, y) in pairs if (d := difference(x, y, f"{at}[{i}]"))), None)
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return None if same else f"{at}: {a} and {b}"
    return None if a == b or (a != a and b != b) else f"{at}: {a!r} and {b!r}"


def assert_same_run(folder, other, rounds=ROUNDS):
    """Weights, all state, curves and events are those of the other run, and it is finished."""
    for name in ("last", "best"):
        found = difference(checkpoint(folder, name), checkpoint(other, name))
        assert found is None, f"{name}.ckpt: {found}"
    assert rows(folder) == rows(other)
    assert [row["round"] for row in rows(folder)] == [str(r) for r in range(rounds)]
    assert events(folder) == events(other)
    assert {step for _, step in events(folder)} == set(range(rounds))
    assert (folder / "done").is_file()
