"""What the documents show is run: a method from file to figure, and the notebook."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from fake_runs import write_run

from fedmuon_pl.cli import main

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_a_method_from_file_to_figure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    forked: None,
) -> None:
    text = (DOCS / "add-your-method.md").read_text()
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.S)
    assert [kind for kind, _ in blocks] == ["python", "yaml", "yaml", "bash"]
    method, config, plan, commands = (block for _, block in blocks)
    assert len(method.splitlines()) <= 30
    (tmp_path / "configs/algorithm").mkdir(parents=True)
    (tmp_path / "configs/plan").mkdir()
    (tmp_path / "normalised.py").write_text(method)
    (tmp_path / "configs/algorithm/normalised.yaml").write_text(config)
    # The same plan, shortened to what a test may take.
    short = yaml.safe_load(plan)
    for entry in short["algorithms"].values():
        entry["grid"] = {key: values[1:2] for key, values in entry["grid"].items()}
    short |= {"seeds": [0], "set": {"trainer.max_epochs": 2}}
    (tmp_path / "configs/plan/idea.yaml").write_text(yaml.safe_dump(short))
    monkeypatch.chdir(tmp_path)
    for line in commands.splitlines():
        program, *arguments = line.split()
        assert program == "fedmuon"
        assert main(arguments) == 0, capsys.readouterr()
    page = (tmp_path / "report/index.html").read_text()
    assert "normalised: 1 trial (lr=0.1)" in page
    assert (tmp_path / "report/figures/curves.pdf").read_bytes().startswith(b"%PDF")


def test_the_methods_steps_have_length_lr() -> None:
    import torch

    (method,) = re.findall(r"```python\n(.*?)```", (DOCS / "add-your-method.md").read_text(), re.S)
    names: dict = {}
    exec(method, names)
    kernels = torch.randn(3, 4, 2, 5, 5).to(memory_format=torch.channels_last_3d)
    gradients = [torch.randn(3, 4, 2), torch.randn(3, 5), torch.zeros(3), kernels]
    assert not kernels.is_contiguous()
    before = [g.clone() for g in gradients]
    names["Normalise"]().correct(None, gradients)
    for client in range(3):
        norm = sum(float(g[client].square().sum()) for g in before) ** 0.5
        for g, old in zip(gradients, before, strict=True):
            torch.testing.assert_close(g[client], old[client] / norm)


def use(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / "use.md").read_text(), re.S)


def test_the_flags_of_the_table_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = (DOCS / "use.md").read_text().split("## An experiment")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    flags = [flag for cell in cells for flag in re.findall("`(.*?)`", cell)]
    assert len(flags) == 17
    # Loggers need their packages; half precision and several processes are tested elsewhere.
    left_out = ("logger/", "precision", "devices")
    words = [w for flag in flags if not any(o in flag for o in left_out) for w in flag.split()]
    short = {"max_epochs=100": "max_epochs=1", "every_n_epoch=10": "every_n_epoch=1"}
    for old, new in short.items():
        words = [word.replace(old, new) for word in words]
    words = [word.replace("at_once=8", "at_once=2") for word in words]  # of 20 * 0.1 clients
    monkeypatch.chdir(tmp_path)
    base = ["-c", "base", "-c", "experiment/digits", "-c", "algorithm/fedavg"]
    assert main(["fit", *base, *words, "--trainer.enable_progress_bar=false"]) == 0
    assert (tmp_path / "runs/digits/fedavg-s1/done").is_file()


def test_an_own_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs/experiment").mkdir(parents=True)
    (tmp_path / "configs/experiment/flowers.yaml").write_text(use("yaml")[0])
    for part, number in (("train", 12), ("test", 3)):
        for c, name in enumerate(("rose", "tulip")):
            folder = tmp_path / "flowers" / part / name
            folder.mkdir(parents=True)
            for i in range(number):
                Image.new("RGB", (20, 20), (200 * c, 20 * i, 0)).save(folder / f"{i}.png")
    words = ["-c", "base", "-c", "experiment/flowers", "-c", "algorithm/fedmuon"]
    assert main(["fit", *words, "--trainer.enable_progress_bar=false"]) == 0
    assert (tmp_path / "runs/flowers/fedmuon-s0/done").is_file()


def test_the_plans_that_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedmuon_pl.compare import plan_file

    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs/plan").mkdir(parents=True)
    _, grid, search = use("yaml")
    every = set(plan_file._KEYS) - {"name", "tuned"}  # its name is the file's; tuned is an entry's
    shown = [yaml.safe_load(text) for text in (grid, search)]
    assert set().union(*shown) == every
    for name, text, runs in (("grid", grid, 8), ("search", search, 0)):
        (tmp_path / f"configs/plan/{name}.yaml").write_text(text)
        plan = plan_file.load_plan(name)
        assert len(plan.runs()) == runs
    assert main(["sweep", "grid", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("start ") == 8


def test_use_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = use("python")
    # Two rounds become one; the rest is as shown.
    text = text.replace(
        "max_epochs=2", "max_epochs=1, enable_progress_bar=False, accelerator='cpu'"
    )
    names: dict = {}
    exec(text, names)
    assert names["trainer"].callback_metrics["test/acc"] > 0.15


def test_the_notebook_runs_and_shows_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = json.loads((DOCS / "compare.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert kinds
    assert "error" not in kinds
    assert all(cell["outputs"] for cell in cells)
    config = {"model.algorithm.init_args": {"lr": 0.1}}
    for i, name in enumerate(("fedavg", "fedmuon")):
        for seed in range(3):
            curve = [0.3, 0.6 + 0.05 * i, 0.8 + 0.01 * seed * i]
            changed = {**config, "model.algorithm.init_args": {"lr": 0.1 * (i + 1)}}
            write_run(tmp_path / "runs", name, seed, curve, experiment="digits", config=changed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    assert list(names["pairs"]["method"]) == ["fedmuon"]
    assert (tmp_path / "report/index.html").exists()
    sys.modules["matplotlib.pyplot"].close("all")
