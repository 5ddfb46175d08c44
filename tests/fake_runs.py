"""Folders as runs leave them, and a process that stands in for a run: nothing here trains."""

import csv
import json
from pathlib import Path

import yaml

from fedmuon_pl.compare import plan, runs
from fedmuon_pl.compare.plan_file import parse_plan

PROJECT = Path(__file__).resolve().parents[1]
METHODS = ("fedmuon", "local_muon", "fedavg", "scaffold", "fedadam")
LR = "model.algorithm.init_args.lr"

# A stand-in for `fedmuon fit`: a round every --pace seconds, a checkpoint after each, `done` after
# the last. `--fail` ends it after its first round, `--crash-early` before the first checkpoint.
FAKE = """
import json, os, pathlib, signal, sys, time
flags = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--") and "=" in a)
configs = [b for a, b in zip(sys.argv, sys.argv[1:]) if a == "-c"]
rounds = int(flags.get("trainer.max_epochs", 4))
folder = pathlib.Path(flags["trainer.default_root_dir"], flags["experiment"],
                      f"{flags['method']}-s{flags['seed_everything']}")
last = folder / "checkpoints" / "last.ckpt"
resume = flags.get("ckpt_path") == "last"
if folder.exists() and not resume:
    sys.exit(f"error: there is a run in {folder}")
if resume and not last.exists():
    sys.exit("error: no checkpoint")
stopped = []
signal.signal(signal.SIGTERM, lambda *a: stopped.append(1))
folder.mkdir(parents=True, exist_ok=True)
lr = float(flags.get("model.algorithm.init_args.lr", 0.1))
(folder / "config.yaml").write_text(json.dumps({
    "experiment": flags["experiment"], "method": flags["method"],
    "seed_everything": int(flags["seed_everything"]), "trainer": {"max_epochs": rounds},
    "model": {"local_steps": 10, "algorithm": {
        "class_path": "fedmuon_pl.algorithms." + configs[2].split("/")[1],
        "init_args": {"lr": lr}}}}))
(folder / "environment.json").write_text(json.dumps([
    {"planned": json.loads(os.environ.get("FEDMUON_PLANNED", "null"))}]))
if "crash-early" in flags:
    print("training starts", flush=True)
    print("Traceback", "ValueError: it broke at once", sep="\\n", file=sys.stderr)
    sys.exit(1)
start = int(last.read_text()) if resume else 0
table = folder / "metrics.csv"
lines = ["round,val/acc,test/acc,time/round_s"]
if resume:
    lines = table.read_text().splitlines()[: start + 1]
table.write_text("\\n".join(lines) + "\\n")
last.parent.mkdir(exist_ok=True)
print("threads", os.environ["OMP_NUM_THREADS"], "from", start, flush=True)
print("gpu", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
for r in range(start, rounds):
    time.sleep(float(flags.get("pace", 0)))
    acc = 1 - abs(lr - 0.1) - 0.5 ** (r + 1)
    with table.open("a") as f:
        f.write(f"{r},{acc},{acc - 0.01},0.5\\n")
    last.write_text(str(r + 1))
    if "fail" in flags:
        print("| 0/4 clients\\r| 1/4 clientsfedmuon: \x1b[1mround 0, client 3: the loss is nan",
              file=sys.stderr)
        print("see the log")
        sys.exit(2)
    if stopped:
        sys.exit(0)
(folder / "done").write_text(json.dumps({"rounds": rounds}))
"""


def write_run(
    root: Path,
    method: str,
    seed: int,
    curve: list[float],
    *,
    experiment: str = "toy",
    config: dict | None = None,
    done: bool = True,
    test_shift: float = -0.01,
    mb: float = 2.0,
) -> Path:
    """A run's folder as the engine leaves it, with ``curve`` as ``val/acc``."""
    folder = root / experiment / f"{method}-s{seed}"
    folder.mkdir(parents=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["round", "val/acc", "val/loss", "test/acc", "comm/total_mb", "time/round_s"]
        )
        for r, acc in enumerate(curve):
            writer.writerow([r, acc, 1 - acc, acc + test_shift, mb * (r + 1), 0.25])
    content = {
        "seed_everything": seed,
        "experiment": experiment,
        "method": method,
        "trainer": {"max_epochs": len(curve)},
        "model": {
            "local_steps": 10,
            "algorithm": {"class_path": "x.Y", "init_args": {"lr": 0.1}},
        },
        "data": {"batch_size": 32, "num_clients": 100},
        "server": {"clients_per_round": 10},
    }
    for key, value in (config or {}).items():
        place = content
        *sections, leaf = key.split(".")
        for section in sections:
            place = place[section]
        place[leaf] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    if done:
        (folder / "done").write_text(json.dumps({"rounds": len(curve)}))
    return folder


def find_here(name: str) -> Path:
    """The rule of ``fedmuon_pl.configuration.find_config`` for this folder only."""
    path = Path("configs", f"{name}.yaml")
    if not path.is_file():
        raise FileNotFoundError(f"there is no configuration {name!r}")
    return path


def make_plan(**changes: object) -> plan.Plan:
    content = {
        "name": "p",
        "experiments": ["toy"],
        "algorithms": ["fedavg"],
        "seeds": [0],
        **changes,
    }
    return parse_plan({key: value for key, value in content.items() if value is not None})


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def synthetic(root: Path, rounds: int = 50, seeds: int = 3) -> None:
    """Curves like those of the quickstart."""
    import numpy as np

    shape = {"fedmuon": (0.97, 5), "local_muon": (0.945, 7), "fedavg": (0.93, 12),
             "scaffold": (0.87, 14), "fedadam": (0.85, 16)}  # fmt: skip
    for i, (method, (top, tau)) in enumerate(shape.items()):
        for seed in range(seeds):
            rng = np.random.default_rng([i, seed])
            r = np.arange(1, rounds + 1)
            wobble = rng.normal(0, 0.012, rounds) * (1 + 2 * np.exp(-r / 10)) * (1 + i / 4)
            acc = 0.1 + (top - 0.1) * (1 - np.exp(-r / tau)) + wobble + rng.normal(0, 0.004)
            curve = np.clip(acc, 0.05, 0.995).round(4).tolist()
            mb = 4.9 if method in ("scaffold", "fedmuon") else 2.45
            write_run(root, method, seed, curve, test_shift=-0.008, mb=mb)


def example(tmp_path: Path) -> list[runs.RunData]:
    """Two methods, whose numbers are easy to work out by hand."""
    for seed, last in enumerate((0.90, 0.92, 0.97)):
        write_run(tmp_path, "fedavg", seed, [0.5, 0.95, last])
        write_run(tmp_path, "fedmuon", seed, [0.91, 0.8, last + 0.01], mb=3.0)
    return runs.read_runs([tmp_path])[0]
