"""What a run shows is true: tags, curves, bytes, diagnostics, each computed in another way."""

import csv
import json
import math
import re
import sys
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from cli_runs import (
    ALGORITHMS,
    COHORT,
    ROUNDS,
    STEPS,
    arguments,
    evaluate,
    events,
    fit,
    load,
    patched,
    rows,
    trainer_of,
)
from federation import ClientLists, TinyNet, federate, trainer

from fedmuon_pl import (
    SOAP,
    Classification,
    FedACG,
    FedAdam,
    FedAdamW,
    FedAvg,
    FedCM,
    FedDyn,
    FederatedModule,
    FedLADA,
    FedMuon,
    FedMuonLMO,
    FedNova,
    FedPAC,
    FedProx,
    LocalMuon,
    Mime,
    MimeLite,
    MuLoCo,
    Scaffold,
    ServerMuon,
    training,
)
from fedmuon_pl.cli import main
from fedmuon_pl.data.digits import SklearnDigits
from fedmuon_pl.data.partition import DirichletByClass
from fedmuon_pl.schedules import Cosine
from fedmuon_pl.server.callback import FederatedServer
from fedmuon_pl.server.progress import RoundProgressBar
from fedmuon_pl.server.roundlog import MetricsFile, RoundLog, prune_events
from fedmuon_pl.server.totals import RoundTotals

# docs/design.md, "Tags".
EVALUATED = {
    *("val/acc", "val/loss", "test/acc", "test/loss"),
    *("client/acc_mean", "client/acc_worst10"),
}
EVERY_ROUND = {
    *("train/loss", "fed/client_drift", "fed/update_norm", "fed/alignment", "fed/orthogonality"),
    *("fed/client_lr", "comm/up_mb", "comm/down_mb", "comm/total_mb"),
    *("time/round_s", "time/client_steps_per_s"),
}


def curves(folder):
    """``metrics.csv`` as numbers; an empty cell is None."""
    table = rows(folder, times=True)
    return [{k: float(v) if v else None for k, v in row.items()} for row in table]


# -- tags and curves ---------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_tag_once_a_round_everywhere(algorithm, finished):
    folder = finished(algorithm).folder
    table = curves(folder)
    assert all(row.keys() == {"round"} | EVALUATED | EVERY_ROUND for row in table)
    assert [row["round"] for row in table] == list(range(ROUNDS))
    assert all(math.isfinite(v) for row in table for v in row.values())
    shown = events(folder, times=True)
    expected = {(k, r): v for r, row in enumerate(table) for k, v in row.items() if k != "round"}
    assert shown.keys() == expected.keys()
    assert all(shown[key] == np.float32(value) for key, value in expected.items())
    history = load(folder / "checkpoints/last.ckpt")["callbacks"]["RoundLog"]["history"]
    assert history == table
    done = json.loads((folder / "done").read_text())
    assert done == {"rounds": ROUNDS, "last": table[-1]}
    # What a round took fits what was done in it.
    for row in table:
        assert row["time/round_s"] > 0
        done_steps = row["time/client_steps_per_s"] * row["time/round_s"]
        assert done_steps == pytest.approx(COHORT * STEPS, rel=1e-9)
        assert row["fed/client_lr"] in (0.02, 0.1, 1.0)


def test_the_bar_shows_what_is_logged(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    folder = fit("fedavg", tmp_path, "--trainer.enable_progress_bar", "true", rounds=3)
    out = capsys.readouterr().out
    accuracies = [f"{row['val/acc']:.4f}" for row in curves(folder)]
    assert len(set(accuracies)) == 3
    for r in range(3):
        bars = re.findall(rf"round {r + 1}/3\W+(\d)/(\d) clients(?:, val/acc=(\d\.\d+))?", out)
        assert COHORT in {int(done) for done, _, _ in bars}
        assert {int(of) for _, of, _ in bars} == {COHORT}
        # Its own when the round is over; before, if there was time to draw, the last one's.
        shown = {accuracy for *_, accuracy in bars if accuracy}
        assert accuracies[r] in shown
        assert shown <= set(accuracies[max(r - 1, 0) : r + 1])
    # Lightning's own metrics, which ModelCheckpoint and EarlyStopping monitor, are the same.
    own = trainer_of(arguments("fit", "fedavg", tmp_path / "own", rounds=1)).callback_metrics
    first = curves(folder)[0]
    assert {k: float(v) for k, v in own.items()} == {
        k: pytest.approx(first[k], rel=1e-7) for k in own
    }
    assert own.keys() >= EVALUATED


@pytest.mark.parametrize(("seconds", "said"), [(0.0, [1, 2, 3]), (3600.0, [1, 3])])
def test_a_log_has_a_line_now_and_then_in_the_place_of_a_bar(
    tmp_path, capsys, monkeypatch, seconds, said
):
    monkeypatch.setattr(training, "RoundProgressBar", partial(RoundProgressBar, seconds))
    folder = fit("fedavg", tmp_path, "--trainer.enable_progress_bar", "true", rounds=3)
    out = capsys.readouterr().out
    ends = [
        f"round {r}/3  {COHORT}/{COHORT} clients  val/acc {curves(folder)[r - 1]['val/acc']:.4f}"
        for r in said
    ]
    assert [line for line in out.splitlines() if f"{COHORT}/{COHORT} clients" in line] == ends
    assert "\r" not in out
    assert "|" not in out.split("round 1/3")[1]


# -- accuracy ---------------------------------------------------------------


def test_last_is_the_curve_evaluated_anew(finished):
    folder = finished("fedavg").folder
    last = curves(folder)[-1]
    for command, tags in (
        ("validate", {"val/acc", "val/loss"}),
        ("test", {"test/acc", "test/loss", "client/acc_mean", "client/acc_worst10"}),
    ):
        anew = evaluate(command, folder, "last")
        assert anew == {k: pytest.approx(last[k], rel=1e-7) for k in tags}


def test_best_is_the_curve_at_its_highest(finished):
    folder = finished("scaffold").folder
    table = curves(folder)
    accuracies = [row["val/acc"] for row in table]
    assert max(accuracies) > accuracies[-1], "choose a curve that goes down at its end"
    best = load(folder / "checkpoints/best.ckpt")
    assert best["epoch"] == accuracies.index(max(accuracies))
    assert len(best["callbacks"]["RoundLog"]["history"]) == best["epoch"] + 1
    assert evaluate("validate", folder, "best")["val/acc"] == pytest.approx(max(accuracies))
    anew = evaluate("test", folder, "best")["test/acc"]
    assert anew == pytest.approx(table[best["epoch"]]["test/acc"])


def test_accuracy_by_hand(finished):
    # Without Lightning, torchmetrics or our module: three matrices and the data.
    folder = finished("local_muon").folder
    saved = load(folder / "checkpoints/last.ckpt")
    weights = [v for k, v in saved["state_dict"].items() if k.startswith("network.")]
    data = SklearnDigits(20, DirichletByClass(0.5, min_samples=1), batch_size=16)
    data.setup()

    def logits(x):
        x = x.flatten(1)
        for i in range(0, 6, 2):
            x = x @ weights[i].T + weights[i + 1]
            x = x.relu() if i < 4 else x
        return x

    last = curves(folder)[-1]
    for split in ("val", "test"):
        inputs, labels = getattr(data.splits, split)
        out = logits(inputs)
        right = out.argmax(1) == labels
        assert last[f"{split}/acc"] == pytest.approx(right.double().mean().item(), abs=1e-6)
        assert last[f"{split}/loss"] == pytest.approx(F.cross_entropy(out, labels).item(), rel=1e-5)
    by_class = [right[labels == c].double().mean().item() for c in range(10)]
    clients = []
    for client in range(20):
        own = data.splits.labels[data.partition[client]]
        clients.append(np.mean([by_class[c] for c in own]))
    assert last["client/acc_mean"] == pytest.approx(np.mean(clients), abs=1e-6)
    assert last["client/acc_worst10"] == pytest.approx(np.mean(sorted(clients)[:2]), abs=1e-6)


def test_rounds_without_validation_have_empty_cells(finished, tmp_path):
    folder = fit("fedavg", tmp_path, "--trainer.check_val_every_n_epoch", "2", rounds=5)
    table = curves(folder)
    for row in table:
        known = {k for k, v in row.items() if v is not None}
        validated = row["round"] % 2 == 1
        assert known == {"round"} | EVERY_ROUND | (EVALUATED if validated else set())
    shown = {(tag, step) for tag, step in events(folder)}
    assert {step for tag, step in shown if tag in EVALUATED} == {1, 3}
    assert {step for tag, step in shown if tag == "train/loss"} == set(range(5))
    # The last round has no validation and is the last checkpoint all the same.
    assert load(folder / "checkpoints/last.ckpt")["epoch"] == 4
    best = max((row for row in table if row["val/acc"] is not None), key=lambda row: row["val/acc"])
    assert load(folder / "checkpoints/best.ckpt")["epoch"] == best["round"]
    assert evaluate("validate", folder, "best")["val/acc"] == pytest.approx(best["val/acc"])
    # And evaluating less often changes nothing else.
    for often, seldom in zip(curves(finished("fedavg").folder), table, strict=False):
        for tag in EVERY_ROUND - {"time/round_s", "time/client_steps_per_s"}:
            assert often[tag] == seldom[tag]
        assert seldom["val/acc"] in (None, often["val/acc"])


def test_another_logger_keeps_the_run_in_its_folder(tmp_path):
    logger = "pytorch_lightning.loggers.CSVLogger"
    flags = ("--trainer.logger", logger, "--trainer.logger.save_dir", str(tmp_path / "elsewhere"))
    folder = fit("scaffold", tmp_path, *flags, rounds=1)
    there = {p.name for p in folder.iterdir()}
    written = {"config.yaml", "environment.json", "metrics.csv"}
    assert there == {"checkpoints", "client_state", "done", *written}


def test_metrics_file_is_whole_at_any_time(tmp_path):
    log = MetricsFile(tmp_path / "run")
    for r, row in enumerate([{"a": 0.1}, {"a": 1e-300, "b": float("nan")}, {"b": -3}]):
        log.log_metrics(row, step=r)
        with (tmp_path / "run/metrics.csv").open(newline="") as f:
            table = list(csv.DictReader(f))
        assert [line["round"] for line in table] == [str(i) for i in range(r + 1)]
    assert table == [
        {"round": "0", "a": "0.1", "b": ""},
        {"round": "1", "a": "1e-300", "b": "nan"},
        {"round": "2", "a": "", "b": "-3.0"},
    ]


def test_pruning_keeps_the_earlier_events_and_nothing_else(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    for part in range(2):
        writer = SummaryWriter(str(tmp_path), filename_suffix=f".{part}")
        for step in range(3 * part, 3 * part + 3):
            writer.add_scalar("a", step, step)
            writer.add_scalar("b", -step, step)
        writer.close()
    (tmp_path / "events.part").write_bytes(b"of a killed pruning")
    kept = prune_events(tmp_path, 2)
    assert kept == {(tag, step) for tag in "ab" for step in range(2)}
    assert events(tmp_path) == {(t, s): s if t == "a" else -s for t in "ab" for s in range(2)}
    assert len(list(tmp_path.iterdir())) == 1


# -- bytes ---------------------------------------------------------------

# 64 -> 64 -> 32 -> 10, in float32: matrices and biases.
MATRICES = 4 * (64 * 64 + 64 * 32 + 32 * 10)
WEIGHTS = MATRICES + 4 * (64 + 32 + 10)

# What one client sends, and what it receives.
BYTES = {
    "fedavg": (WEIGHTS, WEIGHTS),
    "fedadam": (WEIGHTS, WEIGHTS),
    "local_muon": (WEIGHTS, WEIGHTS),
    # x and the change of c_i up, x and c down.
    "scaffold": (2 * WEIGHTS, 2 * WEIGHTS),
    # x and M up; x, Delta_g (of all parameters) and Mbar down. The server derives Delta_g from x.
    "fedmuon": (WEIGHTS + MATRICES, 2 * WEIGHTS + MATRICES),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bytes(algorithm, finished):
    up, down = BYTES[algorithm]
    for r, row in enumerate(curves(finished(algorithm).folder)):
        assert row["comm/up_mb"] == pytest.approx(COHORT * up / 1e6, rel=1e-12)
        assert row["comm/down_mb"] == pytest.approx(COHORT * down / 1e6, rel=1e-12)
        total = (r + 1) * COHORT * (up + down) / 1e6
        assert row["comm/total_mb"] == pytest.approx(total, rel=1e-12)


class Normed(torch.nn.Sequential):
    """A convolution, BatchNorm and a layer: 18 + (2 + 2) + (24 + 3) weights, 42 in matrices."""

    def __init__(self):
        super().__init__(
            torch.nn.Conv2d(1, 2, 3, bias=False),
            torch.nn.BatchNorm2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(8, 3),
        )


def tiny_data(clients=4, dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    return {
        i: (
            torch.randn(5 + 3 * i, 1, 4, 4, generator=rng, dtype=dtype),
            torch.randint(3, (5 + 3 * i,), generator=rng),
        )
        for i in range(clients)
    }


HEAVY_BALL = partial(torch.optim.SGD, momentum=0.9)
GRAMS = 2**2 + 1**2 + 3**2 + 3**2 + 3**2 + 8**2


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize(
    ("algorithm", "up", "down"),
    [
        (partial(FedAvg, 0.1), 49, 49),
        (partial(FedAdam, 0.1), 49, 49),
        (partial(LocalMuon, 0.1), 49, 49),
        (partial(Scaffold, 0.1), 98, 98),
        (partial(FedMuon, 0.1), 49 + 42, 98 + 42),
        (partial(FedMuon, 0.1, align_rest=False), 49 + 42, 49 + 42 + 42),
        (partial(FedMuon, 0.1, alpha=0.0), 49 + 42, 49 + 42),
        (partial(FedMuon, 0.1, average_momentum=False), 49, 98),
        # Rank 1 of 2 x 9 and of 3 x 8: 2 + 1 + 9 and 3 + 1 + 8 numbers, both ways.
        (partial(FedMuon, 0.1, momentum_ratio=0.3), 49 + 24, 98 + 24),
        (partial(FedMuon, 0.1, momentum_ratio=0.3, error_feedback=True), 49 + 24, 98 + 24),
        (partial(FedMuon, 0.1, momentum_ratio=1.0), 49 + 42, 98 + 42),
        (partial(FedProx, 0.1), 49, 49),
        (partial(FedDyn, 0.1), 49, 49),  # h stays on the server, l_i with the client
        (partial(FedNova, 0.1), 49, 49),  # K_i is known to the server
        (partial(FedCM, 0.1), 49, 98),  # Delta down
        (partial(FedACG, 0.1), 49, 49),  # the look-ahead point in the place of x
        (partial(Scaffold, 0.1, option="I"), 98, 98),
        (partial(Mime, 0.1), 98, 147),  # the full gradient up; m and the mean gradient down
        (partial(MimeLite, 0.1), 98, 98),
        (partial(FedMuonLMO, 0.1), 98, 98),  # the change of C_i up, C down
        (partial(FedMuonLMO, 0.1, control_variates=False), 49, 49),  # M_i stays with the client
        (partial(ServerMuon, 0.1), 49, 49),
        (partial(MuLoCo, 0.1), 49, 49),  # the inner state stays with the client
        (partial(FedLADA, 0.1), 98, 147),  # v up; g_a and vbar down
        (partial(FedLADA, 0.1, alpha=1.0), 98, 98),
        # A mean of v for each of five tensors; down also Delta and the weight of v.
        (partial(FedAdamW, 0.1), 49 + 5, 98 + 5 + 1),
        (partial(FedAdamW, 0.1, second_moment="full"), 98, 147 + 1),
        (partial(FedAdamW, 0.1, alpha=0.0), 49 + 5, 49 + 5 + 1),
        (partial(FedPAC, 0.1, averaged=[]), 49, 98),
        # A moment, and down its weight: the server knows K_i.
        (partial(FedPAC, 0.1), 49 + 49, 98 + 49 + 1),
        (partial(FedPAC, 0.1, averaged=["exp_avg", "exp_avg_sq"]), 49 + 98, 98 + 98 + 2),
        (
            partial(
                FedPAC, 0.1, partial(torch.optim.SGD, momentum=0.9), averaged=["momentum_buffer"]
            ),
            *(49 + 49, 98 + 49),
        ),
        (partial(FedAvg, 0.1, SOAP), 49, 49),
        # Four axes of the convolution, two of the matrix.
        (partial(FedPAC, 0.1, SOAP, averaged=["gram"]), 49 + GRAMS, 98 + GRAMS + 1),
    ],
    ids=[
        *("fedavg", "fedadam", "local_muon", "scaffold", "fedmuon", "matrices", "no_pull", "no_m"),
        *("lowrank", "feedback", "ratio_1"),
        *("fedprox", "feddyn", "fednova", "fedcm", "fedacg", "scaffold_i", "mime", "mimelite"),
        *(
            "fedmuon_lmo",
            "local_muon_lmo",
            "server_muon",
            "muloco",
            "fedlada",
            "fedlada-no-direction",
        ),
        *("fedadamw", "fedadamw-full", "fedadamw-no-pull"),
        *("fedpac_no_state", "fedpac", "aligned_adamw", "aligned_sgd", "soap", "fedpac_soap"),
    ],
)
def test_bytes_with_batchnorm(algorithm, up, down, at_once, tmp_path):
    recorder, _ = federate(
        algorithm(),
        tiny_data(),
        tmp_path,
        network=Normed,
        rounds=2,
        clients_at_once=at_once,
        trainer_kwargs={"precision": "32-true"},
    )
    # Mean and variance of two channels in float32, and a counter of 8 bytes, both ways.
    buffers = 4 * (2 + 2) + 8
    for r, row in enumerate(recorder.report):
        sent, received = 3 * (4 * up + buffers), 3 * (4 * down + buffers)
        assert row["comm/up_mb"] == pytest.approx(sent / 1e6, rel=1e-12)
        assert row["comm/down_mb"] == pytest.approx(received / 1e6, rel=1e-12)
        assert row["comm/total_mb"] == pytest.approx((r + 1) * (sent + received) / 1e6, rel=1e-12)


@pytest.mark.parametrize("at_once", [1, 2])
def test_bytes_of_a_direction_that_is_not_sent(at_once, tmp_path):
    recorder, _ = federate(
        FedMuon(0.1, send_direction=False),
        tiny_data(),
        tmp_path,
        network=Normed,
        rounds=4,
        cohort=2,
        clients_at_once=at_once,
        trainer_kwargs={"precision": "32-true"},
    )
    buffers = 4 * (2 + 2) + 8
    cohorts = [set(members) for members in recorder.rounds]
    # x^{r-1} goes to those who were not there to get it, and to nobody in round 0.
    missed = [0, *(len(now - last) for last, now in pairwise(cohorts))]
    assert len(set(missed)) > 1
    for behind, row in zip(missed, recorder.report, strict=True):
        received = 2 * (4 * (49 + 42) + buffers) + behind * 4 * 49
        assert row["comm/down_mb"] == pytest.approx(received / 1e6, rel=1e-12)
        assert row["comm/up_mb"] == pytest.approx(2 * (4 * (49 + 42) + buffers) / 1e6, rel=1e-12)


# -- diagnostics ---------------------------------------------------------------


def spread(matrix):
    """How equal the singular values are, from an SVD."""
    s = torch.linalg.svdvals(matrix.flatten(1))
    return (s.square().sum().square() / (len(s) * s.pow(4).sum())).item()


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_diagnostics(weighting, at_once, tmp_path):
    # What each client sent, from the engine; everything else is computed here in another way.
    data = tiny_data(5, torch.float64)
    sent, losses, before, after = {}, {}, [], []

    def receive(original):
        def call(self, run, uploads, lost, buffers):
            if run.round == len(before):
                before.append(torch.cat([x.flatten() for x in run.x0]).clone())
            for c, client in enumerate(run.clients):
                moved = [x[c] - x0 for x, x0 in zip(run.x, run.x0, strict=True)]
                sent.setdefault(run.round, {})[client] = moved
                losses.setdefault(run.round, {})[client] = lost[:, c].mean().item()
            original(self, run, uploads, lost, buffers)

        return call

    with patched(RoundTotals, "receive", receive):
        recorder, _ = federate(
            FedAvg(0.2, server=partial(torch.optim.SGD, lr=0.7)),
            data,
            tmp_path,
            rounds=4,
            weighting=weighting,
            clients_at_once=at_once,
            lr_schedule=Cosine(0.1),
            local_epochs=2,
        )
    after = [torch.cat([x.flatten() for x in state.values()]) for state in recorder.x]
    assert len({len(b) for cohort in recorder.rounds for b in cohort.values()}) > 1
    direction = None
    for r, row in enumerate(recorder.report):
        size = {c: len(data[c][1]) if weighting == "samples" else 1 for c in sent[r]}
        w = {c: n / sum(size.values()) for c, n in size.items()}
        flat = {c: torch.cat([t.flatten() for t in d]) for c, d in sent[r].items()}
        mean = sum(w[c] * flat[c] for c in flat)
        drift = math.sqrt(sum(w[c] * (flat[c] - mean).square().sum().item() for c in flat))
        assert row["fed/client_drift"] == pytest.approx(drift, rel=1e-9)
        assert row["fed/client_drift"] > 1e-3
        moved = (after[r] - before[r]).norm().item()
        assert row["fed/update_norm"] == pytest.approx(moved, rel=1e-9)
        assert row["fed/update_norm"] == pytest.approx(0.7 * mean.norm().item(), rel=1e-9)
        cosine = 0.0
        if direction is not None:
            cosine = sum(w[c] * F.cosine_similarity(flat[c], direction, dim=0) for c in flat).item()
            assert abs(cosine) > 1e-3
        assert row["fed/alignment"] == pytest.approx(cosine, rel=1e-9)
        direction = mean
        matrices = [sum(w[c] * d[i] for c, d in sent[r].items()) for i in (0, 1)]
        expected = sum(map(spread, matrices)) / 2
        assert row["fed/orthogonality"] == pytest.approx(expected, rel=1e-5)
        trained = sum(w[c] * losses[r][c] for c in w)
        assert row["train/loss"] == pytest.approx(trained, rel=1e-12)
        factor = 0.1 + 0.9 * (1 + math.cos(math.pi * r / 4)) / 2
        assert row["fed/client_lr"] == pytest.approx(0.2 * factor, rel=1e-12)


def test_train_loss_is_the_loss_of_the_steps(tmp_path):
    # One step a client: the loss at x^r of the batch it drew, forward by hand.
    data = tiny_data(5, torch.float64)
    recorder, module = federate(FedAvg(0.0 + 1e-12), data, tmp_path, rounds=2, local_steps=1)
    for cohort, row in zip(recorder.rounds, recorder.report, strict=True):
        with torch.no_grad():
            expected = [
                F.cross_entropy(module.network(x), y).item() for ((x, y),) in cohort.values()
            ]
        assert row["train/loss"] == pytest.approx(np.mean(expected), rel=1e-9)


def test_equal_clients_do_not_drift(tmp_path):
    inputs, labels = tiny_data(1, torch.float64)[0]
    data = {i: (inputs, labels) for i in range(3)}
    recorder, _ = federate(
        FedAvg(0.2), ClientLists(data, batch_size=5), tmp_path, rounds=2, local_epochs=1
    )
    first, second = recorder.report
    assert first["fed/client_drift"] < 1e-7
    assert first["fed/alignment"] == 0
    # Every client goes on in about the same direction.
    assert 0.9 < second["fed/alignment"] <= 1 + 1e-12


def test_muon_updates_are_more_orthogonal(finished):
    muon = curves(finished("fedmuon").folder)[-1]["fed/orthogonality"]
    plain = curves(finished("fedavg").folder)[-1]["fed/orthogonality"]
    assert plain < muon <= 1


def test_a_command_that_fails_says_so_once(tmp_path, capsys):
    assert main(arguments("test", "fedavg", tmp_path, "--ckpt_path", "last")) == 2
    said = [x for x in capsys.readouterr().err.splitlines() if x.startswith("fedmuon: ")]
    assert len(said) == 1
    assert "there is no checkpoint" in said[0]
    assert not any(tmp_path.iterdir())


def test_the_sanity_check_is_no_measurement(tmp_path):
    # Lightning validates x^0 on two batches before round 0; no row may hold that.
    data = ClientLists({i: (x.float(), y) for i, (x, y) in reference.tiny_problem()[2].items()})
    log = RoundLog()
    module = FederatedModule(Classification(TinyNet, num_classes=3), FedAvg(0.1), local_steps=1)
    settings = {"limit_val_batches": 1.0, "num_sanity_val_steps": 2, "precision": "32-true"}
    fit = trainer(tmp_path, 2, [FederatedServer(3), log], check_val_every_n_epoch=2, **settings)
    fit.fit(module, data)
    assert ["val/acc" in row for row in log.history] == [False, True]
