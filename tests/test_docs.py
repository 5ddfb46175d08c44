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
