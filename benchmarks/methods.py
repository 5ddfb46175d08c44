"""Every method at a glance: what it sends and learns; rewrites the table of docs/methods.md.

    python benchmarks/methods.py [--root DIR] [NAME ...]

Bytes: one round through the command line, two clients of two, ResNet-18 (BatchNorm, 100 classes,
32 x 32 colour images), counted by the engine. Accuracy: experiment/digits, 20 rounds. The local
rate is one of six, half a decade apart, from a tenth of the YAML's to 30 times it (or of another
rate, CENTRES): all six with seed 10, the best two with seeds 11 and 12 as well, and of these two
the better mean on the validation split, ten runs for every method; then the test accuracy of seeds
0, 1 and 2. A rate at an end of its grid is marked. Finished runs are not repeated. Everything runs
in this process, one run after the other: about 450 runs of three to five seconds.
"""

import argparse
import contextlib
import io
import statistics
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import yaml

from fedmuon_pl.cli import main
from fedmuon_pl.compare.compare_command import replace_section
from fedmuon_pl.compare.names import display_name

HERE = Path(__file__).resolve().parent.parent
ALGORITHMS = HERE / "configs" / "algorithm"
PAGE = HERE / "docs" / "methods.md"
FACTORS = (1 / 10, 1 / 3, 1.0, 3.0, 10.0, 30.0)
TUNING, CONFIRMING, SEEDS = 10, (11, 12), (0, 1, 2)  # what chooses is not what is reported
# Where the best rate was at an end of the grid around the YAML's.
CENTRES = {"aligned_adamw": 0.003, "fedcm": 0.3, "fedmuon_fedadam": 0.06}
PERSONAL = {"fedbn"}  # has no global model to evaluate, and digits' network has no BatchNorm
RATE = "model.algorithm.init_args.lr"
RESNET = "fedmuon_pl.models.ResNet18"


def run(root: Path, experiment: str, method: str, seed: int, *flags: str) -> pd.DataFrame:
    """The metrics of one run, which is made if it is not there."""
    folder = root / experiment / f"{method}-s{seed}"
    if not (folder / "done").exists():
        arguments = [
            *("fit", "-c", "base", "-c", "experiment/digits"),
            *("-c", f"algorithm/{method.partition('@')[0]}", *flags),
            *("--threads", "1", "--trainer.accelerator", "cpu", "--trainer.logger", "true"),
            *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
            *("--seed_everything", str(seed), "--trainer.default_root_dir", str(root)),
            *("--experiment", experiment, "--method", method),
        ]
        last = folder / "checkpoints" / "last.ckpt"
        resume = ["--ckpt_path", str(last)] if last.exists() else []
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            failed = main([*arguments, *resume])
        if failed:
            raise RuntimeError(f"{method}, seed {seed}: {said.getvalue()[-500:]}")
    return pd.read_csv(folder / "metrics.csv")


def megabytes(root: Path, method: str) -> tuple[float, float]:
    """What one client sends and receives in a round, in MB."""
    data = root / "colour.npz"
    if not data.exists():
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (200, 3, 32, 32), dtype=np.uint8)
        labels = np.arange(200) % 100
        np.savez(data, x_train=images, y_train=labels, x_test=images[:100], y_test=labels[:100])
    network = {"class_path": RESNET, "init_args": {"num_classes": 100, "norm": "batch"}}
    settings = {
        "server": {"clients_per_round": 2},
        "model": {
            "task": {
                "class_path": "Classification",
                "init_args": {"network": network, "num_classes": 100},
            },
            "local_steps": 1,
        },
        "data": {
            "class_path": "Npz",
            "init_args": {"path": str(data), "val_size": 100, "clients": 2, "batch_size": 4},
        },
        "trainer": {"max_epochs": 1, "limit_val_batches": 0},
    }
    settings["data"]["init_args"]["partition"] = {"class_path": "IID", "init_args": {}}
    config = root / "colour.yaml"
    config.write_text(yaml.safe_dump(settings))
    row = run(root, "bytes", method, 0, "-c", str(config)).iloc[0]
    return row["comm/up_mb"] / 2, row["comm/down_mb"] / 2


def tried(root: Path, method: str, lr: float, seed: int) -> float:
    """The validation accuracy after the last round; 0 if the run diverged."""
    try:
        metrics = run(root, "tuning", f"{method}@lr={lr}", seed, f"--{RATE}={lr}")
    except RuntimeError as e:
        print(e, file=sys.stderr)
        return 0.0
    return float(metrics["val/acc"].iloc[-1])


def accuracy(root: Path, method: str) -> tuple[str, list[float]]:
    """The chosen local rate, and the test accuracy of every seed."""
    content = yaml.safe_load((ALGORITHMS / f"{method}.yaml").read_text())
    rate = CENTRES.get(method, float(content["model"]["algorithm"]["init_args"]["lr"]))
    grid = [float(f"{rate * factor:.2g}") for factor in FACTORS]
    first = {lr: tried(root, method, lr, TUNING) for lr in grid}
    scores = {
        lr: statistics.mean([first[lr], *(tried(root, method, lr, seed) for seed in CONFIRMING)])
        for lr in sorted(grid, key=lambda lr: -first[lr])[:2]
    }
    lr = max(scores, key=lambda lr: scores[lr])
    runs = [run(root, "digits", f"{method}@lr={lr}", seed, f"--{RATE}={lr}") for seed in SEEDS]
    mark = " (edge)" if lr in (grid[0], grid[-1]) else ""
    return f"{lr:g}{mark}", [float(metrics["test/acc"].iloc[-1]) for metrics in runs]


def table(root: Path, methods: list[str]) -> str:
    """Markdown, a row per method."""
    lines = [
        "| method | `algorithm/` | MB up | MB down | local rate | digits, test accuracy |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for method in methods:
        up, down = megabytes(root, method)
        if method in PERSONAL:
            lines.append(f"| {display_name(method)} | {method} | {up:.1f} | {down:.1f} | | |")
            continue
        lr, values = accuracy(root, method)
        mean, spread = statistics.mean(values), statistics.stdev(values)
        lines.append(
            f"| {display_name(method)} | {method} | {up:.1f} | {down:.1f} | {lr} "
            f"| {mean:.3f} ± {spread:.3f} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path("runs/methods"))
    parser.add_argument("methods", nargs="*", help="names in configs/algorithm (default: all)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.root.mkdir(parents=True, exist_ok=True)
    every = sorted(path.stem for path in ALGORITHMS.glob("*.yaml"))
    text = table(options.root, options.methods or every)
    if not options.methods:
        replace_section(PAGE, "methods", text)
