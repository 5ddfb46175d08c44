"""The benchmarks run at toy size, and their table has every row and no other."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
BENCHMARKS = PROJECT / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("run_all")


def command(*words, **env):
    done = subprocess.run(
        list(map(str, words)),
        env={**os.environ, "PYTHONPATH": str(PROJECT), **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def table(page):
    """The rows of the table of ratios: what -> the other cells."""
    text = page.read_text().split("<!-- results:bench -->")[1].split("<!-- /results -->")[0]
    lines = text.strip().partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {what: rest for what, *rest in rows}


def stale(bench, folder):
    """What an earlier version measured: a part and a row that are gone, and rows to be replaced."""
    run = {
        "command": "python benchmarks/old.py", "machine": "M", "torch": "2", "commit": "c0ffee",
        "date": "2020-01-01", "load": [0.0, 0.0], "others": [0.0, 0.0], "why": {}, "table": "old",
    }  # fmt: skip
    rows = {part: dict.fromkeys(known, 77.0) for part, (_, known) in bench.PARTS.items()}
    results = {part: {**run, "rows": {**known, "gone": 77.0}} for part, known in rows.items()}
    results["past"] = {**run, "rows": {"gone": 77.0}}
    (folder / "results.json").write_text(json.dumps(results))


def test_toy_bench_writes_every_row_and_leaves_no_stale_one(bench, tmp_path, monkeypatch):
    stale(bench, tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    bench.main(["--toy", "-o", str(tmp_path), "--only", "lenet"])
    page = tmp_path / "RESULTS.md"
    rows = table(page)
    known = {part: [row.what for row in rows.values()] for part, (_, rows) in bench.PARTS.items()}
    assert list(rows) == [what for whats in known.values() for what in whats]
    for part, whats in known.items():
        for what in whats:
            measured, target, met, run = rows[what]
            assert run == part
            assert met in (("-",) if target == "-" else ("yes", "no"))
            # A part that did not run keeps its rows.
            assert measured.startswith("77.00") == (part != "lenet")
            assert 0 < float(measured.split()[0]) < 1e4
    text = page.read_text()
    assert "past" not in text
    assert "gone" not in (tmp_path / "results.json").read_text()
    assert "    python benchmarks/overhead.py lenet --toy\n" in text
    assert re.search(r"\| lenet +\| .*c0ffee", text) is None
    assert re.search(r"\| population +\| .*c0ffee", text)


def test_gpu_script_and_its_rows_in_the_table(bench, tmp_path):
    where = {"PYTHON": sys.executable, "OUT": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command(BENCHMARKS / "gpu.sh", "--toy", **where)
    contestants = (tmp_path / "gpu.md").read_text()
    for name in ("LeNet, FedAvg, side by side", "ResNet-18, plain step, bf16-mixed"):
        assert f"| {name} " in contestants
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert set(results["rows"]) == set(bench.PARTS["gpu"][1])
    bench.main(["-o", str(tmp_path), "--add", str(tmp_path / "gpu.json")])
    rows = table(tmp_path / "RESULTS.md")
    for part, (_, known) in bench.PARTS.items():
        for name, row in known.items():
            measured = part == "gpu" and name != "gpu_memory"  # a CPU has no peak of its own
            assert rows[row.what][0].startswith("not measured") != measured
            assert rows[row.what][3] == ("gpu" if measured else "-")


def test_gpu_script_where_there_is_one(tmp_path):
    code = (
        "import gpu, pretended_gpu\n"  # whose peak is 1 MiB, whatever runs
        "with pretended_gpu.pretended_gpu():\n"
        "    gpu.main()\n"
    )
    path = os.pathsep.join(map(str, (BENCHMARKS, Path(__file__).parent, BENCHMARKS.parent)))
    out = tmp_path / "gpu.json"
    command(sys.executable, "-c", code, "--toy", "--run-json", out, PYTHONPATH=path)
    result = json.loads(out.read_text())
    assert result["machine"].startswith("a pretended GPU")
    assert all(ratio > 0 for ratio in result["rows"].values())
    assert result["rows"]["gpu_memory"] == 1


def test_state_on_disk_is_that_of_the_clients_that_took_part(tmp_path):
    out = tmp_path / "rows.json"
    words = ("--toy", "--json", out, "--only", "SCAFFOLD, 100,000 clients")
    command(sys.executable, BENCHMARKS / "population.py", *words)
    # 20 of 300 clients in each of three rounds: few of them twice.
    assert 1 <= json.loads(out.read_text())["rows"]["scaffold_disk"] < 1.3


def test_toy_numbers_never_reach_the_projects_table(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--toy"])
    assert "toy numbers are no results" in capsys.readouterr().err


def test_a_busy_machine_is_named(bench):
    run = {
        "command": "c", "machine": "M", "torch": "2", "commit": "c0ffee", "date": "2020-01-01",
        "load": [0.0, 0.0], "why": {}, "table": "", "rows": {"muon_lenet": 1.0},
    }  # fmt: skip
    for cores, loud in (([0.1, 0.1], False), ([1.2, 0.0], True), ([None, 0.9], True)):
        text = bench.section({"lenet": {**run, "others": cores}})
        assert ("**Others used the machine too**, so measure again: lenet." in text) == loud


def test_met(bench):
    row = bench.Row("what", "<=", 1.05)
    assert [row.met(value) for value in (1.0, 1.05, 1.06)] == ["yes", "yes", "no"]
    row = bench.Row("what", ">=", 10)
    assert [row.met(value) for value in (9.9, 10, 11)] == ["no", "yes", "yes"]
    assert bench.Row("what").met(3.0) == "-"
