"""A run that was stopped anywhere and resumed is, bit for bit, the run that was not."""

import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from cli_runs import (
    ALGORITHMS,
    EVERY_ALGORITHM,
    ROUNDS,
    STEPS,
    STOP,
    Interruption,
    arguments,
    assert_same_run,
    checkpoint,
    client_state,
    difference,
    events,
    fit,
    in_a_process,
    interrupted,
    load,
    patched,
    rows,
    run_main_until_killed,
    watched,
)

from fedmuon_pl.cli import main
from fedmuon_pl.server.checkpointing import AtomicCheckpointIO
from fedmuon_pl.server.roundlog import prune_events
from fedmuon_pl.server.state import ClientStore, MissingClientState

LAST = ("--ckpt_path", "last")


def start_and_stop(algorithm, root, *flags, round=STOP, blocks=2):
    """A run that ends in the middle of a round; returns its folder."""
    with interrupted(round, blocks), pytest.raises(Interruption):
        main(arguments("fit", algorithm, root, *flags))
    return Path(root) / "digits" / f"{algorithm}-s0"


def contents(folder):
    """Of all files but those that a process is about to write."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.suffix != ".part"
    }


# -- stopped anywhere ---------------------------------------------------------------


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_stopped_in_a_round(algorithm, finished):
    straight = finished(algorithm)
    folder = straight.stopped
    assert not (folder / "done").exists()
    assert len(rows(folder)) == STOP
    assert load(folder / "checkpoints/last.ckpt")["epoch"] == STOP - 1
    with watched() as seen:
        fit(algorithm, folder.parents[1], *LAST)
    assert_same_run(folder, straight.folder)
    later = range(STOP, ROUNDS)
    assert seen.cohorts == {r: straight.cohorts[r] for r in later}
    assert seen.batches == {k: v for k, v in straight.batches.items() if k[0] in later}


@pytest.mark.parametrize("algorithm", ["fedmuon", "scaffold"])
def test_killed_in_a_round(algorithm, finished, tmp_path):
    args = arguments("fit", algorithm, tmp_path)
    assert in_a_process(run_main_until_killed, args, STOP) == -signal.SIGKILL
    folder = tmp_path / "digits" / f"{algorithm}-s0"
    assert not (folder / "done").exists()
    fit(algorithm, tmp_path, *LAST)
    assert_same_run(folder, finished(algorithm).folder)


def test_the_comparison_can_fail(finished, tmp_path):
    # One client's state lost, all else restored: SCAFFOLD's run is another one then.
    folder = start_and_stop("scaffold", tmp_path)
    state = ClientStore.load_state_dict

    def forget(original):
        def call(self, saved, *args):
            state(self, saved, *args)
            del self._index[next(c for c in self._index if c in cohort)]

        return call

    cohort = finished("scaffold").cohorts[STOP]
    with patched(ClientStore, "load_state_dict", forget):
        fit("scaffold", tmp_path, *LAST)
    with pytest.raises(AssertionError):
        assert_same_run(folder, finished("scaffold").folder)


@pytest.mark.parametrize("target", ["best.ckpt", "last.ckpt"])
def test_stopped_between_the_log_and_a_checkpoint(target, finished, tmp_path):
    # SCAFFOLD's best round is 1, where both are due: its row is logged and its client state
    # written, but not the checkpoint.
    def stop(original):
        def call(self, saved, path, *args, **kwargs):
            if saved["epoch"] == 1 and Path(path).name == target:
                raise Interruption
            original(self, saved, path, *args, **kwargs)

        return call

    with patched(AtomicCheckpointIO, "save_checkpoint", stop), pytest.raises(Interruption):
        main(arguments("fit", "scaffold", tmp_path))
    folder = tmp_path / "digits/scaffold-s0"
    assert len(rows(folder)) == 2
    assert load(folder / "checkpoints/last.ckpt")["epoch"] == 0
    fit("scaffold", tmp_path, *LAST)
    assert_same_run(folder, finished("scaffold").folder)


def test_stopped_before_the_first_checkpoint(finished, tmp_path):
    folder = start_and_stop("scaffold", tmp_path, round=0)
    fit("scaffold", tmp_path)
    assert_same_run(folder, finished("scaffold").folder)


def test_stopped_twice(finished, tmp_path):
    folder = start_and_stop("scaffold", tmp_path, round=1)
    start_and_stop("scaffold", tmp_path, *LAST, round=1, blocks=4)
    start_and_stop("scaffold", tmp_path, *LAST, round=3, blocks=1)
    fit("scaffold", tmp_path, *LAST)
    assert_same_run(folder, finished("scaffold").folder)


def test_stopped_between_two_validations(tmp_path):
    flags = ("--trainer.check_val_every_n_epoch", "2")
    straight = fit("fedavg", tmp_path / "straight", *flags)
    folder = start_and_stop("fedavg", tmp_path, *flags)
    fit("fedavg", tmp_path, *flags, *LAST)
    assert_same_run(folder, straight)


def test_sigterm_ends_at_the_round(finished, tmp_path):
    def terminate(server):
        # Without Lightning's handler the signal would end pytest.
        assert callable(signal.getsignal(signal.SIGTERM))
        os.kill(os.getpid(), signal.SIGTERM)

    with interrupted(STOP - 1, act=terminate), pytest.raises(SystemExit) as ended:
        sys.exit(main(arguments("fit", "fedmuon", tmp_path)))
    assert ended.value.code in (0, None)
    folder = tmp_path / "digits/fedmuon-s0"
    assert not (folder / "done").exists()
    # Lightning may give up the round's validation, and with it the round.
    assert len(rows(folder)) in (STOP - 1, STOP)
    fit("fedmuon", tmp_path, *LAST)
    assert_same_run(folder, finished("fedmuon").folder)


def test_a_preempted_slurm_job_ends_at_the_round_and_auto_goes_on(finished, tmp_path, monkeypatch):
    job = {"JOB_ID": 7, "JOB_NAME": "run", "NTASKS": 1, "NNODES": 1, "NODEID": 0}
    for name, value in {**job, "PROCID": 0, "LOCALID": 0, "NODELIST": "localhost"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    before = {s: signal.getsignal(s) for s in (signal.SIGUSR1, signal.SIGTERM)}
    auto = ("--ckpt_path", "auto")

    def warn(server):  # as `#SBATCH --signal=USR1@90` does
        os.kill(os.getpid(), signal.SIGUSR1)

    try:
        with interrupted(STOP - 1, act=warn), pytest.raises(SystemExit) as ended:
            sys.exit(main([*arguments("fit", "fedmuon", tmp_path), *auto]))
        assert ended.value.code in (0, None)
        folder = tmp_path / "digits/fedmuon-s0"
        assert not (folder / "done").exists()
        assert not list(tmp_path.rglob("hpc_ckpt*"))
        fit("fedmuon", tmp_path, *auto)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert_same_run(folder, finished("fedmuon").folder)


# -- from other checkpoints, in other places -------------------------------------------------------


def test_back_to_an_older_checkpoint(tmp_path):
    # SCAFFOLD's best round is 1 of 12. Round 10 sweeps the folder of per-client files.
    straight = fit("scaffold", tmp_path / "straight", rounds=12)
    folder = tmp_path / "run/digits/scaffold-s0"
    shutil.copytree(straight, folder)
    best = folder / "checkpoints/best.ckpt"
    r = load(best)["epoch"] + 1
    assert r < 5
    files = {p.name for p in (folder / "client_state").iterdir()}
    assert len(files) < 12
    fit("scaffold", tmp_path / "run", "--ckpt_path", str(best), rounds=12)
    assert_same_run(folder, straight, rounds=12)


def test_goes_on_in_another_folder(finished, tmp_path):
    old = start_and_stop("scaffold", tmp_path / "old")
    before = contents(old)
    path = str(old / "checkpoints/last.ckpt")
    new = fit("scaffold", tmp_path / "new", "--ckpt_path", path)
    assert contents(old) == before
    shutil.rmtree(old)
    assert_same_run(new, finished("scaffold").folder)


def test_a_moved_run_goes_on(finished, tmp_path):
    # fedavg's best round is before the stop: what is best so far must not be forgotten.
    old = start_and_stop("fedavg", tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    assert not old.exists()
    new = fit("fedavg", tmp_path / "new", *LAST)
    assert_same_run(new, finished("fedavg").folder)


def test_a_lost_best_is_said(tmp_path):
    old = start_and_stop("fedavg", tmp_path / "old")
    (old / "checkpoints/best.ckpt").unlink()
    (tmp_path / "old").rename(tmp_path / "new")
    with pytest.warns(UserWarning, match=r"best checkpoint so far, of .*old/.*is not there"):
        folder = fit("fedavg", tmp_path / "new", *LAST)
    assert load(folder / "checkpoints/best.ckpt")["epoch"] >= STOP


def test_the_same_folder_by_another_name(finished, tmp_path, monkeypatch):
    folder = start_and_stop("fedavg", tmp_path)
    monkeypatch.chdir(tmp_path)
    fit("fedavg", ".", *LAST)
    assert_same_run(folder, finished("fedavg").folder)


def test_a_torn_tail_is_mended(finished, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = start_and_stop("fedavg", tmp_path)
    with (folder / "metrics.csv").open("a") as f:
        f.write("3,0.1,0.2")
    (path,) = folder.glob("events.out.tfevents.*")
    whole = path.read_bytes()
    # Cuts through the last record, whatever part of it, and through the last round's first ones.
    for cut in (1, 5, 13, 40, 100, 400):
        path.write_bytes(whole[:-cut])
        prune_events(folder, ROUNDS)
        assert path.read_bytes() == whole[: path.stat().st_size]
        assert whole.startswith(path.read_bytes())
        assert 0 < len(whole) - path.stat().st_size < cut + 100
    fit("fedavg", tmp_path, *LAST)
    assert_same_run(folder, finished("fedavg").folder)
    # And TensorBoard's own reader, over all the files together.
    reader = EventAccumulator(str(folder))
    reader.Reload()
    tags = {tag for tag, _ in events(folder, times=True)}
    assert tags <= set(reader.Tags()["scalars"])
    for tag in tags:
        assert [e.step for e in reader.Scalars(tag)] == list(range(ROUNDS))


def test_a_finished_run_resumed_stays(finished, tmp_path):
    folder = tmp_path / "digits/fedavg-s0"
    shutil.copytree(finished("fedavg").folder, folder)
    fit("fedavg", tmp_path, *LAST)
    assert_same_run(folder, finished("fedavg").folder)
    assert json.loads((folder / "done").read_text())["rounds"] == ROUNDS


def test_a_finished_run_goes_on_to_more_rounds(finished, tmp_path):
    folder = fit("local_muon", tmp_path, rounds=2)
    assert json.loads((folder / "done").read_text())["rounds"] == 2
    fit("local_muon", tmp_path, *LAST)
    assert_same_run(folder, finished("local_muon").folder)
    assert json.loads((folder / "done").read_text())["rounds"] == ROUNDS


# -- what a checkpoint holds ---------------------------------------------------------------


def plain(value):
    if isinstance(value, dict):
        return all(isinstance(k, str | int) and plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.Tensor)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_checkpoint_is_plain(algorithm, finished):
    folder = finished(algorithm).folder
    paths = sorted((folder / "checkpoints").iterdir())
    assert [p.name for p in paths] == ["best.ckpt", "last.ckpt"]
    for path in paths:
        saved = torch.load(path, weights_only=True)
        for key in ("FederatedServer", "RoundLog"):
            assert plain(saved["callbacks"][key]), key
        assert "hyper_parameters" not in saved
    assert saved["global_step"] == ROUNDS
    assert saved["epoch"] == ROUNDS - 1


def test_client_state_follows_who_took_part(finished):
    seen = finished("scaffold")
    server = load(seen.folder / "checkpoints/last.ckpt")["callbacks"]["FederatedServer"]
    state = client_state(seen.folder, server)
    assert set(state) == {c for cohort in seen.cohorts.values() for c in cohort}
    # c = sum_i c_i / N, and no c_i is zero: all that is kept is what was learnt.
    for j, c in enumerate(server["algorithm"]["control_variates"]["c"]):
        rows = torch.stack([s["c_i"][j][0].double() for s in state.values()])
        assert rows.flatten(1).any(1).all()
        torch.testing.assert_close(rows.sum(0) / 20, c.double(), rtol=1e-4, atol=1e-6)


def test_missing_client_state_is_named(tmp_path, capsys):
    folder = start_and_stop("scaffold", tmp_path)
    shutil.rmtree(folder / "client_state")
    assert main(arguments("fit", "scaffold", tmp_path, *LAST)) == 2
    (message,) = refusals(capsys)
    assert "client_state" in message
    assert "missing" in message


# -- refusals ---------------------------------------------------------------


def refusals(capsys):
    return [x for x in capsys.readouterr().err.splitlines() if x.startswith("fedmuon: ")]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("-c", "algorithm/fedmuon", "--method", "fedavg"), ["algorithm", "FedAvg", "FedMuon"]),
        (("--data.partition_seed", "1"), ["data.partition"]),
        (("--data.batch_size", "8"), ["data.batch_size", "16", "8"]),
        (("--model.algorithm.lr", "0.5"), ["lr", "1.0", "0.5"]),
        (("--seed_everything", "1"), ["seed", "0", "1"]),
        (("--model.local_steps", "4"), ["local_steps", str(STEPS), "4"]),
        (("--model.task.label_smoothing", "0.1"), ["task.label_smoothing", "0.0", "0.1"]),
    ],
    ids=["method", "partition_seed", "batch_size", "lr", "seed", "local_steps", "task"],
)
def test_a_checkpoint_of_another_run_is_refused(flags, named, finished, tmp_path, capsys):
    folder = tmp_path / "digits/fedavg-s0"
    shutil.copytree(finished("fedavg").folder, folder)
    (folder / "done").unlink()
    before = contents(folder)
    path = folder / "checkpoints/last.ckpt"
    algorithm = "fedmuon" if "algorithm/fedmuon" in flags else "fedavg"
    flags = flags[2:] if algorithm == "fedmuon" else flags
    capsys.readouterr()
    assert main(arguments("fit", algorithm, tmp_path, "--ckpt_path", str(path), *flags)) == 2
    (message,) = refusals(capsys)
    assert all(word in message for word in [str(path), "does not fit", *named]), message
    after = contents(folder)
    assert before.items() <= after.items()
    # TensorBoard opens its file before anything else; it has nothing to show.
    assert all("tfevents" in name for name in after.keys() - before.keys())
    events(folder)


def test_a_schedule_over_the_run_needs_the_same_rounds(tmp_path, capsys):
    cosine = ("--model.lr_schedule", "Cosine")
    fit("fedavg", tmp_path, *cosine, rounds=1)
    capsys.readouterr()
    assert main(arguments("fit", "fedavg", tmp_path, *cosine, *LAST, rounds=2)) == 2
    (message,) = refusals(capsys)
    assert "rounds is 1 there and 2 here" in message


@pytest.mark.parametrize("command", ["test", "validate"])
def test_another_network_cannot_be_evaluated(command, finished, tmp_path, capsys):
    path = finished("fedmuon").folder / "checkpoints/last.ckpt"
    network = ("--model.task.network.hidden", "[16]", "--ckpt_path", str(path))
    assert main(arguments(command, "fedmuon", tmp_path, *network)) == 2
    (message,) = refusals(capsys)
    assert str(path) in message
    assert "network.1.weight" in message


def test_a_saved_configuration_is_the_run(finished, tmp_path):
    # config.yaml alone, in another place, gives the same run; it says what was resolved.
    straight = finished("fedadam").folder
    config = straight / "config.yaml"
    saved = yaml.safe_load(config.read_text())
    assert saved["model"]["clients_at_once"] == 1
    assert saved["threads"] == 1
    root = ("--trainer.default_root_dir", str(tmp_path))
    assert main(["fit", "-c", str(config), *root]) == 0
    assert_same_run(tmp_path / "digits/fedadam-s0", straight)
    engine = load(straight / "checkpoints/last.ckpt")["callbacks"]["FederatedServer"]["engine"]
    assert engine["clients_at_once"] == 1
    assert engine["threads"] == 1


def test_a_run_is_not_overwritten(finished, tmp_path, capsys):
    folder = tmp_path / "digits/fedavg-s0"
    shutil.copytree(finished("fedavg").folder, folder)
    before = contents(folder)
    assert main(arguments("fit", "fedavg", tmp_path)) == 2
    (message,) = refusals(capsys)
    assert str(folder) in message
    assert "--ckpt_path last" in message
    assert contents(folder) == before


# -- per-client state ---------------------------------------------------------------

LIKE = {
    "a": [torch.zeros(3, 2), torch.zeros(())],
    "b": [torch.zeros(3, dtype=torch.bfloat16)],
    "c": [torch.zeros(2, dtype=torch.float64)],  # where its size does not divide its place
}
CPU = torch.device("cpu")


def values(clients, mark):
    """State of some clients, different for every client and mark."""
    base = torch.tensor([100.0 * mark + c for c in clients])
    return {
        name: [(base.view(-1, *[1] * t.ndim) + torch.zeros(t.shape)).to(t.dtype) for t in tensors]
        for name, tensors in LIKE.items()
    }


def put(store, clients, mark):
    store.put(clients, values(clients, mark))
    store.commit(store.next_number())


def holds(store, marks):
    """Whether each client has the state of the mark named for it."""
    expected = [values([c], m) for c, m in marks.items()]
    found = [store.load([c], CPU) for c in marks]
    return difference(expected, found) is None


def test_store_starts_at_zero_and_keeps_dtypes(tmp_path):
    store = ClientStore(tmp_path / "s", LIKE)
    zero = store.load([5, 1], CPU)
    assert [t.shape for t in zero["a"]] == [(2, 3, 2), (2,)]
    assert not any(t.any() for tensors in zero.values() for t in tensors)
    assert not (tmp_path / "s").exists()
    put(store, [5, 1], 3)
    # In the order asked for, not the order kept, and beside a client without any.
    both = store.load([1, 7, 5], CPU)
    assert both["b"][0].dtype == torch.bfloat16
    assert both["a"][1].tolist() == [301.0, 0.0, 305.0]
    assert holds(store, {1: 3, 5: 3})


@pytest.mark.parametrize("clients", [[4], [4, 2]])
def test_store_takes_any_layout(tmp_path, clients):
    n = len(clients)
    like = {"m": [torch.zeros(2, 3, 4, 4), torch.zeros(2)], "k": [torch.zeros(())]}
    images = torch.randn(n * 2, 3, 4, 4).to(memory_format=torch.channels_last)
    state = {
        "m": [images.view(n, 2, 3, 4, 4), torch.randn(2, n).T],
        "k": [torch.tensor(3.0).expand(n)],
    }
    store = ClientStore(tmp_path, like)
    store.put(clients, state)
    store.commit(store.next_number())
    assert difference(state, store.load(clients, CPU)) is None
    loaded = store.load(clients, CPU)  # may be changed in place
    loaded["m"][0].zero_()
    assert difference(state["m"][1], loaded["m"][1]) is None
    assert difference(state, store.load(clients, CPU)) is None


def test_store_without_state_writes_nothing(tmp_path):
    store = ClientStore(tmp_path / "s", {})
    store.put([1, 2], {})
    assert store.load([1], CPU) == {}
    store.discard()
    store.commit(store.next_number())
    assert not (tmp_path / "s").exists()


def test_store_is_append_only(tmp_path):
    store = ClientStore(tmp_path, LIKE)
    known = {}
    for mark in range(6):
        put(store, [mark, mark + 1, 9], mark)
        now = contents(tmp_path)
        assert known.items() < now.items()
        known = now


def test_store_pending_is_given_up_or_committed(tmp_path):
    store = ClientStore(tmp_path, LIKE)
    put(store, [1, 2], 0)
    store.put([2], values([2], 1))
    store.discard()
    assert holds(store, {1: 0, 2: 0})
    store.put([2], values([2], 1))
    store.commit(store.next_number())
    assert holds(store, {1: 0, 2: 1})


def test_store_writes_as_it_is_given_and_leaves_nothing(tmp_path):
    """Memory does not follow the cohort: the state lies on disk before the commit."""
    store = ClientStore(tmp_path, LIKE)
    for client in range(200):
        store.put([client], values([client], 1))
    assert holds(store, {0: 1, 199: 1})  # read back, and written on behind
    store.put([7, 200], values([7, 200], 2))
    (part,) = tmp_path.iterdir()
    assert part.suffix == ".part"
    assert len(store) == 0
    store.commit(store.next_number())
    assert holds(store, {0: 1, 7: 2, 8: 1, 200: 2})
    assert [p.suffix for p in tmp_path.iterdir()] == [".bin"]
    store.put([3], values([3], 3))
    store.discard()
    assert holds(store, {3: 1})
    assert [p.suffix for p in tmp_path.iterdir()] == [".bin"]
    # A kill leaves a part, which the next process removes.
    (tmp_path / "0123.part").write_bytes(b"half")
    again = ClientStore(tmp_path, LIKE)
    again.load_state_dict(store.state_dict())
    again.clear_parts()
    assert [p.suffix for p in tmp_path.iterdir()] == [".bin"]
    assert holds(again, {3: 1, 7: 2})
    # An error in the middle of a round leaves none.
    again.put([3], values([3], 5))
    assert len(list(tmp_path.iterdir())) == 2
    del again
    assert [p.suffix for p in tmp_path.iterdir()] == [".bin"]


def test_store_grows_with_who_took_part(tmp_path):
    store = ClientStore(tmp_path, LIKE)
    size = 6 * 4 + 4 + 3 * 2 + 2 * 8
    put(store, [10**9, 3], 0)
    assert len(store) == 2
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) == 2 * size
    for mark in range(1, 5):
        put(store, [3], mark)
        store.sweep([])
    # One file for each of the two: that of the first round still has the big client's state.
    assert len(store) == 2
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) == 3 * size
    assert store.state_dict()["index"].shape == (2, 4)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="holes are made on Linux")
def test_disk_follows_what_checkpoints_need(tmp_path):
    """Files of ten clients each, of which one soon is the only one that is still needed."""
    clients, cohort, size = 40, 10, 3 * 4096
    like = {"c": [torch.zeros(size // 4)]}
    rng = torch.Generator().manual_seed(0)
    store, marks, best, last = ClientStore(tmp_path, like), {}, None, None
    state = lambda c, r: torch.full((size // 4,), float(1000 * r + c + 1))  # noqa: E731
    peak = 0
    for r in range(60):
        chosen = torch.randperm(clients, generator=rng)[:cohort].tolist()
        store.put(chosen, {"c": [torch.stack([state(c, r) for c in chosen])]})
        store.commit(store.next_number())
        marks |= dict.fromkeys(chosen, r)
        if r == 20:
            best = store.state_dict(), dict(marks)
        peak = max(peak, sum(512 * p.stat().st_blocks for p in tmp_path.iterdir()))
        if r % 10 == 9:  # before last.ckpt has this round
            store.sweep([c[0] for c in (best, last) if c])
        last = store.state_dict(), dict(marks)
    assert peak <= 1.02 * (2 * clients + 11 * cohort) * size  # holes need a block themselves
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) > 2 * clients * size  # but for holes
    again = ClientStore(tmp_path, like)
    for saved, then in (last, best):
        again.load_state_dict(saved)
        for c, r in then.items():
            assert torch.equal(again.load([c], torch.device("cpu"))["c"][0][0], state(c, r))


def test_a_checkpoint_whose_state_was_given_back_is_refused(tmp_path):
    """One kept elsewhere, which the sweep does not know; the file it needs is still there."""
    like = {"c": [torch.zeros(3000)]}
    store = ClientStore(tmp_path, like)
    for clients in ([0, 1, 2, 3], [0, 1]):
        store.put(clients, {"c": [torch.ones(len(clients), 3000)]})
        store.commit(store.next_number())
        if len(clients) == 4:
            old = store.state_dict()
    store.sweep([old])
    ClientStore(tmp_path, like).load_state_dict(old)
    store.sweep([])
    assert len(list(tmp_path.glob("*.bin"))) == 2
    with pytest.raises(MissingClientState):
        ClientStore(tmp_path, like).load_state_dict(old)
    shutil.copytree(tmp_path, tmp_path / "copy")  # holes are copied as zeros
    with pytest.raises(MissingClientState):
        ClientStore(tmp_path / "copy", like).load_state_dict({**old, "folder": ""})
    # State that is zero, or begins so, is as good as any.
    sound = ClientStore(tmp_path / "sound", like)
    sound.put([0, 1], {"c": [torch.zeros(2, 3000)]})
    sound.commit(0)
    ClientStore(tmp_path / "sound", like).load_state_dict(sound.state_dict())


BIG = {"a": [torch.zeros(3, 700)], "b": [torch.zeros(1100, dtype=torch.bfloat16)]}
"""Of more than two blocks of a file system, so that a hole gives space back."""


@pytest.mark.parametrize("like", [LIKE, BIG], ids=["small", "big"])
@pytest.mark.parametrize("seed", range(2))
def test_store_every_checkpoint_stays_exact(seed, like, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "LIKE", like)
    # Random histories of commits, checkpoints, sweeps, kills and steps back.
    rng = torch.Generator().manual_seed(seed)
    draw = lambda n: int(torch.randint(n, (), generator=rng))  # noqa: E731
    store, marks = ClientStore(tmp_path, LIKE), {}
    saved = []
    for mark in range(30):
        clients = torch.randperm(12, generator=rng)[: 1 + draw(4)].tolist()
        put(store, clients, mark)
        marks |= dict.fromkeys(clients, mark)
        match draw(6):
            case 0 | 1:
                saved = [*saved, (store.state_dict(), dict(marks))][-3:]
            case 2:
                store.sweep(state for state, _ in saved)
            case 3 if saved:  # killed, and resumed from any checkpoint there is
                (tmp_path / "00000999.part").write_bytes(b"torn")
                state, marks = saved[draw(len(saved))]
                marks = dict(marks)
                store = ClientStore(tmp_path, LIKE)
                store.load_state_dict(state)
        assert holds(store, marks)
        for state, then in saved:
            back = ClientStore(tmp_path, LIKE)
            back.load_state_dict(state)
            assert holds(back, then)
    assert len(saved) == 3
    store.sweep(state for state, _ in saved)
    assert len(list(tmp_path.glob("*.bin"))) <= 4 * 12


def test_store_moves_to_another_folder(tmp_path):
    old = ClientStore(tmp_path / "old", LIKE)
    put(old, [1, 2, 3], 0)
    put(old, [2], 1)
    state = old.state_dict()
    new = ClientStore(tmp_path / "new", LIKE)
    put(new, [7], 9)  # a file with the same name as one of the old folder
    new.load_state_dict(state)
    assert holds(new, {1: 0, 2: 1, 3: 0})
    put(new, [3], 2)
    shutil.rmtree(tmp_path / "old")
    again = ClientStore(tmp_path / "new", LIKE)
    again.load_state_dict(new.state_dict())
    assert holds(again, {1: 0, 2: 1, 3: 2})


def test_store_never_takes_a_file_of_another_run(tmp_path):
    mine, other = ClientStore(tmp_path / "mine", LIKE), ClientStore(tmp_path / "other", LIKE)
    for mark in range(3):
        put(mine, [1, 2], mark)
        put(other, [1, 2], mark + 10)
    state = mine.state_dict()
    # The checkpoint was copied into another run's folder, which has files of the same names.
    back = ClientStore(tmp_path / "other", LIKE)
    back.load_state_dict(state, beside=tmp_path / "other")
    assert holds(back, {1: 2, 2: 2})
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(MissingClientState, match="resume it in the folder of its run"):
        ClientStore(tmp_path / "new", LIKE).load_state_dict(state, beside=tmp_path / "other")


@pytest.mark.parametrize("damage", ["gone", "short", "changed"])
def test_store_names_a_missing_file(damage, tmp_path):
    store = ClientStore(tmp_path, LIKE)
    put(store, [1], 0)
    put(store, [2], 1)
    (path,) = [p for p in tmp_path.iterdir() if int(p.stem) == 1]
    if damage == "gone":
        path.unlink()
        with pytest.raises(MissingClientState, match=r"needs per-client state from .*missing"):
            ClientStore(tmp_path, LIKE).load_state_dict(store.state_dict())
    elif damage == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.write_bytes(b"?" + path.read_bytes()[1:])
    assert holds(store, {1: 0})
    with pytest.raises(MissingClientState, match=r"client 2 .*00000001\.bin.* missing, cut short"):
        store.load([2], CPU)


def test_checkpoint_reader_sees_client_state(finished):
    # assert_same_run compares control variates by content.
    state = checkpoint(finished("scaffold").folder)["callbacks"]["FederatedServer"]["clients"]
    assert len(state) >= 5
    assert all(t.any() for s in state.values() for t in s["c_i"])
