"""What TensorBoard and other loggers are given beside the curves."""

import re
from pathlib import Path

import pytest
import yaml
from fake_runs import synthetic
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from fedmuon_pl.cli import main
from fedmuon_pl.compare import compare_runs, read_runs
from fedmuon_pl.tensorboard import LAYOUT, by_cost, settings_of

FIT = ["fit", "-c", "base", "-c", "experiment/digits", "-c", "algorithm/fedmuon"]
QUIET = ["--trainer.enable_progress_bar=false", "--threads=1"]


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    found.Reload()
    return found


def scalars(found: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in found.Scalars(tag)]


def text(found: EventAccumulator, tag: str) -> str:
    (event,) = found.Tensors(tag)
    return event.tensor_proto.string_val[0].decode()


def settings(found: EventAccumulator) -> dict:
    tag = "_hparams_/session_start_info"
    content = found.summary_metadata[tag].plugin_data.content
    data = plugin_data_pb2.HParamsPluginData.FromString(content)
    return dict(data.session_start_info.hparams)


def test_a_runs_pages(tmp_path: Path) -> None:
    root = [f"--trainer.default_root_dir={tmp_path}"]
    assert main([*FIT, *QUIET, *root, "--trainer.max_epochs=2"]) == 0
    folder = tmp_path / "digits" / "fedmuon-s0"
    found = events(folder)
    method = text(found, "method/text_summary")
    assert method.startswith("# FedMuon")
    assert "alpha" in method
    assert "clients_per_round: 5" in text(found, "config/text_summary")
    assert found.Tags()["images"] == ["partition"]
    assert found.Tags()["histograms"] == ["partition/samples_per_client"]
    (event,) = found.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    patterns = [p for c in layout.category for chart in c.chart for p in chart.multiline.tag]
    assert len(layout.category) == len(LAYOUT)
    tags = found.Tags()["scalars"]
    assert all(any(re.match(pattern, tag) for tag in tags) for pattern in patterns)
    (run,), _ = read_runs([folder])
    assert (
        settings(found)["algorithm.lr"].number_value == run.config["model.algorithm.init_args.lr"]
    )
    assert settings(found)["method"].string_value == "fedmuon"
    rows = run.metrics
    assert scalars(found, "final/test_acc") == [(2, pytest.approx(rows["test/acc"][1]))]
    assert scalars(found, "by_kb/val_acc") == [
        (round(1000 * mb), pytest.approx(acc))
        for mb, acc in zip(rows["comm/total_mb"], rows["val/acc"], strict=True)
    ]
    # It goes on for a round: what was final is so no more, and nothing is there twice.
    assert main([*FIT, *QUIET, *root, "--trainer.max_epochs=3", "--ckpt_path=last"]) == 0
    found = events(folder)
    assert [step for step, _ in scalars(found, "val/acc")] == [0, 1, 2]
    assert [step for step, _ in scalars(found, "final/test_acc")] == [3]
    assert len(scalars(found, "by_ms/test_acc")) == 3
    assert text(found, "method/text_summary") == method
    assert len(list(folder.glob("*.final"))) == 1


def test_costs_are_cumulative() -> None:
    rows = [
        {"val/acc": 0.1, "comm/total_mb": 0.5, "time/round_s": 0.25},
        {"comm/total_mb": 1.0, "time/round_s": 0.25},
        {"val/acc": 0.3, "comm/total_mb": 1.5, "time/round_s": 0.5},
    ]
    assert by_cost(rows) == [
        ("by_kb/val_acc", 0.1, 500),
        ("by_ms/val_acc", 0.1, 250),
        ("by_kb/val_acc", 0.3, 1500),
        ("by_ms/val_acc", 0.3, 1000),
    ]


def test_hparams_are_what_decides() -> None:
    config = {
        "method": "fedavg",
        "seed_everything": 3,
        "threads": 4,
        "trainer": {"max_epochs": 5, "devices": 1},
        "model": {"algorithm": {"init_args": {"lr": 0.1, "betas": [0.9, 0.99], "server": None}}},
    }
    assert settings_of(config) == {
        "method": "fedavg",
        "seed_everything": 3,
        "trainer.max_epochs": 5,
        "algorithm.lr": 0.1,
        "algorithm.betas": "[0.9, 0.99]",
    }


def test_a_comparison_is_a_run_of_its_own(tmp_path: Path) -> None:
    synthetic(tmp_path, rounds=3, seeds=2)
    (one,) = compare_runs(read_runs([tmp_path])[0])
    for _ in range(2):  # the second takes the place of the first
        one.to_tensorboard(tmp_path / "compare")
    found = events(tmp_path / "compare")
    (image,) = found.Images("figures/curves")
    assert image.encoded_image_string.startswith(b"\x89PNG")
    assert image.width > image.height > 500
    assert "| FedMuon" in text(found, "comparison")


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_other_loggers_by_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    package = pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    (tmp_path / "runs").mkdir()
    args = ["-c", f"logger/{name}", "--trainer.max_epochs=2", "--method=m"]
    assert main([*FIT, *QUIET, *args]) == 0
    folder = tmp_path / "runs/digits/m-s0"
    (run,), _ = read_runs([folder])
    assert yaml.safe_load((folder / "config.yaml").read_text())["method"] == "m"
    if name == "wandb":
        package.finish()
        (offline,) = (tmp_path / "runs/wandb").glob("offline-run-*/run-*.wandb")
        assert b"val/acc" in offline.read_bytes()
        return
    client = package.MlflowClient("sqlite:///runs/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("fedmuon").experiment_id])
    history = client.get_metric_history(found.info.run_id, "val/acc")
    assert [(m.step, m.value) for m in history] == list(enumerate(run.metrics["val/acc"]))
