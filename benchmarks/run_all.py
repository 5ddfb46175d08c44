"""Measures what the project is held to and writes the table of ratios into RESULTS.md.

    python benchmarks/run_all.py [--only REGEX] [--repeat N]     # make bench
    python benchmarks/run_all.py --add gpu.json                  # rows measured elsewhere (gpu.sh)
    python benchmarks/run_all.py --toy -o DIR                    # all at toy size, for a test

The parts run one after the other, each as commands of their own, whose contestants take turns.
``results.json`` keeps what was measured, and the section of RESULTS.md is made from it: a part that
is not run keeps its rows, and each row says of which run it is.
"""

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from measure import HERE, Watch, machine, markdown, python

from fedmuon_pl.compare.compare_command import replace_section

SECTION = "bench"
NOT = "not measured"


@dataclass(frozen=True)
class Row:
    """One line of the table: what is measured, and what it has to be, ``<=`` or ``>=``."""

    what: str
    sign: str = ""
    target: float | None = None
    unit: str = ""

    def met(self, value):
        if self.target is None:
            return "-"
        return (
            "yes" if (value <= self.target if self.sign == "<=" else value >= self.target) else "no"
        )


MUON = "FedMuon over FedAvg"
HALF = "orthogonalised in bf16"
# part: (script and its own arguments, its rows)
PARTS = {
    "processes": (
        ("processes.py",),
        {
            "fit_2": Row(
                "FedAvg, LeNet, K = 20, 2 processes, 100 rounds: whole run over a bare gloo loop's",
                "<=",
                1.05,
            ),
            "first_1": Row(
                "command to the end of the first round, LeNet, 1 process", "<=", 4.5, " s"
            ),
            "first_1_imports": Row(
                "the same over importing torch and Lightning alone (4.5 s over 3.0 s)", "<=", 1.5
            ),
            "first_1_bare": Row("the same over the bare loop's"),
            "first_2": Row(
                "command to the end of the first round, LeNet, 2 processes", "<=", 5.0, " s"
            ),
            "first_2_imports": Row(
                "the same, 2 processes, over importing torch and Lightning alone (5 s over 3.0 s)",
                "<=",
                1.67,
            ),
            "first_2_bare": Row("the same over the bare gloo loop's"),
            "memory_2": Row("peak proportional memory, LeNet, 2 processes", "<=", 0.9, " GiB"),
        },
    ),
    "lenet": (
        ("overhead.py", "lenet"),
        {
            "lenet": Row("FedAvg, LeNet, over a bare loop"),
            "muon_lenet": Row(f"{MUON}, LeNet, fp32", "<=", 1.45),
            "muon_lenet_half": Row(f"{MUON}, LeNet, {HALF}", "<=", 1.35),
        },
    ),
    "resnet": (
        ("overhead.py", "resnet"),
        {
            "resnet": Row("FedAvg, ResNet-18-GN, fp32, over a bare loop", "<=", 0.80),
            "resnet_half": Row("the same in bf16-mixed, over the bare loop in fp32", "<=", 0.50),
            "muon_resnet": Row(f"{MUON}, ResNet-18-GN, fp32", "<=", 1.20),
            "muon_resnet_half": Row(f"{MUON}, ResNet-18-GN, {HALF}", "<=", 1.20),
        },
    ),
    "population": (
        ("population.py",),
        {
            "million_round": Row(
                "a round at 1,000,000 clients over one at 1,000, same cohort", "<=", 1.10
            ),
            "million_later": Row(
                "1,000,000 clients: rounds 151 to 200 over rounds 1 to 50", "<=", 1.10
            ),
            "million_growth": Row(
                "the same: resident memory at round 200 over round 50", "<=", 1.10
            ),
            "scaffold_memory": Row(
                "SCAFFOLD, 100,000 clients: peak memory over FedAvg's", "<=", 1.10
            ),
            "scaffold_disk": Row(
                "the same: state on disk over that of the clients that took part", "<=", 1.10
            ),
        },
    ),
    "gpu": (
        ("gpu.py",),
        {
            "gpu_lenet": Row(
                "GPU, LeNet, cohort of 100: side by side over one at a time, throughput", ">=", 10
            ),
            "gpu_resnet": Row(
                "GPU, ResNet-18-GN, TF32, one client at a time: fraction of the plain step's "
                "throughput",
                ">=",
                0.95,
            ),
            "gpu_resnet_auto": Row("the same, the cohort side by side (the default)"),
            "gpu_resnet_half": Row("the same, one client at a time, bf16-mixed", ">=", 0.95),
            "gpu_muon_lenet": Row(f"GPU, {MUON}, LeNet side by side, fp32"),
            "gpu_muon_lenet_half": Row(f"GPU, {MUON}, LeNet side by side, {HALF}"),
            "gpu_muon_resnet": Row(f"GPU, {MUON}, ResNet-18-GN, fp32"),
            "gpu_muon_resnet_half": Row(f"GPU, {MUON}, ResNet-18-GN, {HALF}"),
            "gpu_memory": Row("GPU, ResNet-18-GN, TF32: peak memory over the plain step's"),
        },
    ),
}


def measure(part, options):
    """Runs a part; what it found and where, or None where it cannot run here."""
    import torch

    script, _ = PARTS[part]
    if part == "gpu" and not (options.toy or torch.cuda.is_available()):
        print("gpu: there is none here", flush=True)
        return None
    words = list(script)
    words += ["--toy"] if options.toy else []
    words += ["--repeat", options.repeat] if options.repeat else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        busy = Watch()
        time.sleep(0.1 if options.toy else 2)
        before, watch = busy.others(), Watch()
        subprocess.run(python(*words, "--json", out), check=True, cwd=HERE.parent)
        found = json.loads(out.read_text())
    others = [None if x is None else round(x, 2) for x in (before, watch.others())]
    return {
        "command": " ".join(["python", "benchmarks/" + words[0], *map(str, words[1:])]),
        **machine(),
        "load": [round(busy.load, 1), round(Watch().load, 1)],
        "others": others,
        **found,
    }


def busy(run):
    """Whether other work had more than 0.15 cores before or during a run, as far as is known."""
    return any(cores is not None and cores > 0.15 for cores in run["others"])


def others(run):
    """How many cores other work had, in words."""
    before, during = ("?" if cores is None else f"{cores:.1f}" for cores in run["others"])
    return f"{before} before, {during} during"


def section(results):
    """The table of ratios, the runs that it is of, and the parts' own tables."""
    lines, runs, tables = [], [], []
    for part, (_, rows) in PARTS.items():
        run = results.get(part)
        for name, row in rows.items():
            value = run and run["rows"].get(name)
            target = f"{row.sign} {row.target:g}{row.unit}" if row.target else "-"
            if value is None:
                why = run and run["why"].get(name)
                lines.append([row.what, f"{NOT}: {why}" if why else NOT, target, "-", "-"])
            else:
                lines.append([row.what, f"{value:.2f}{row.unit}", target, row.met(value), part])
        if run:
            load = " to ".join(f"{x:.1f}" for x in run["load"])
            where = (run["machine"], run["torch"], run["commit"], run["date"])
            runs.append([part, f"`{run['command']}`", *where, load, others(run)])
            tables.append(f"### {part}\n\n    {run['command']}\n\n{run['table']}")
    text = markdown(["what", "measured", "target", "met", "run"], lines)
    if runs:
        heads = ["run", "command", "machine", "torch", "commit", "date", "load", "others' cores"]
        loud = [part for part in PARTS if part in results and busy(results[part])]
        if loud:
            text += f"\n**Others used the machine too**, so measure again: {', '.join(loud)}.\n"
        text += "\nMedians, contestants in turns. A commit with + had changes.\n\n"
        text += markdown(heads, runs) + "\n" + "\n".join(tables)
    return text


def kept(path):
    """What was measured before, without parts and rows that are not in the table any more."""
    try:
        results = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    for part in [p for p in results if p not in PARTS]:
        del results[part]
    for part, run in results.items():
        run["rows"] = {n: v for n, v in run["rows"].items() if n in PARTS[part][1]}
    return results


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="parts whose name matches")
    parser.add_argument("--repeat", type=int, help="repetitions; each part's own if not given")
    parser.add_argument("--toy", action="store_true", help="a size that only shows that it works")
    parser.add_argument("--add", type=Path, nargs="*", help="runs no part: adds files of gpu.sh")
    parser.add_argument("-o", "--output", type=Path, default=HERE, help="folder of RESULTS.md")
    options = parser.parse_args(words)
    page, store = options.output / "RESULTS.md", options.output / "results.json"
    if options.toy and options.output.resolve() == HERE:
        parser.error("--toy needs -o DIR: toy numbers are no results")
    if not page.exists():
        options.output.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HERE / "RESULTS.md", page)
    results = kept(store)
    if options.add is not None:
        for path in options.add:
            results["gpu"] = json.loads(path.read_text())
            if "--toy" in results["gpu"]["command"] and options.output.resolve() == HERE:
                parser.error(f"{path} is of --toy: toy numbers are no results")
    else:
        for part in PARTS:
            if not re.search(options.only, part):
                continue
            print(f"== {part}, {datetime.datetime.now():%H:%M:%S}", flush=True)
            try:
                run = measure(part, options)
            except subprocess.CalledProcessError as e:
                sys.exit(f"{part}: {e}")
            if run is not None:
                results[part] = run
            store.write_text(json.dumps(results, indent=1) + "\n")  # a later part may fail
    store.write_text(json.dumps(results, indent=1) + "\n")
    replace_section(page, SECTION, section(results))
    print(f"wrote section {SECTION} of {page}")


if __name__ == "__main__":
    main()
