"""``fedmuon sweep`` and ``fedmuon compare``; the runs are ``fake_runs.FAKE``."""

import csv
import io
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fake_runs import LR, PROJECT, example, make_plan, synthetic, write_run

from fedmuon_pl.compare import execute as execution
from fedmuon_pl.compare import fairness, runs
from fedmuon_pl.compare.compare_command import compare_main
from fedmuon_pl.compare.sweep_command import sweep_main
from fedmuon_pl.compare.sweep_view import SweepView


def test_sweep_shows_and_writes_the_comparison(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "configs/plan/mine.yaml").write_text(
        "experiments: [toy, other]\nalgorithms: [fedavg, fedmuon]\nseeds: [0, 1]\n"
    )
    assert sweep_main(["mine", "--jobs", "2"]) == 0
    output = capsys.readouterr().out
    assert "✓ toy/fedmuon-s1" in output
    assert "round 4/4" in output
    assert "TensorBoard: tensorboard --logdir runs/other" in output
    assert "Tables and curves: runs/toy/compare" in output
    for experiment in ("toy", "other"):
        folder = here / "runs" / experiment / "compare"
        found = {path.name for path in folder.iterdir() if "tfevents" not in path.name}
        assert len(list(folder.glob("events.out.tfevents.*"))) == 1
        assert found == {
            *("table.md", "table.tex", "table.csv", "runs.csv", "pairs.csv"),
            *("curves.png", "curves.pdf", "curves.svg"),
        }
        assert "| FedMuon |" in (folder / "table.md").read_text()
    assert sweep_main(["mine"]) == 0
    assert capsys.readouterr().out.count("already finished") == 8


def test_sweep_without_a_plan_does_the_named_runs(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = here / "configs/tuned/toy/fedavg.yaml"
    tuned.parent.mkdir(parents=True)
    tuned.write_text("{}\n")
    args = ["--experiment", "toy", "--algorithm", "fedavg", "scaffold", "--seed", "4", "5"]
    assert sweep_main([*args, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert output.count("-c tuned/toy/fedavg") == 2  # where there is one
    assert "tuned/toy/scaffold" not in output
    assert sweep_main([*args, "--root", "out"]) == 0
    output = capsys.readouterr().out
    assert "✓ toy/scaffold-s5" in output
    assert "TensorBoard: tensorboard --logdir out/toy" in output
    assert not (here / "out/toy/compare").exists()  # the comparison is the plans'


def test_sweep_dry_run_starts_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "configs/plan/mine.yaml").write_text(
        "experiments: [toy]\nalgorithms: [fedavg]\nseeds: [0]\n"
    )
    assert sweep_main(["mine", "--dry-run", "--root", "elsewhere"]) == 0
    output = capsys.readouterr().out
    assert "start   toy/fedavg-s0" in output
    assert "--trainer.default_root_dir=elsewhere" in output
    assert not (here / "elsewhere").exists()


def test_sweep_over_a_grid_chooses_and_compares_only_the_chosen(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "configs/plan/tune.yaml").write_text(
        f"experiments: [toy]\nseeds: [7]\nroot: runs/tune\n"
        f"algorithms:\n  fedavg: {{grid: {{{LR}: [0.05, 0.1, 0.4]}}}}\n"
        f"  scaffold: {{grid: {{{LR}: [0.05, 0.1, 0.4]}}}}\n"
    )
    assert sweep_main(["tune", "--write-tuned", "configs/tuned"]) == 0
    output = capsys.readouterr().out
    assert "**lr 0.1**" in output
    tuned = yaml.safe_load((here / "configs/tuned/toy/scaffold.yaml").read_text())
    assert tuned == {"model": {"algorithm": {"init_args": {"lr": 0.1}}}}
    table = (here / "runs/tune/toy/compare/table.md").read_text()
    assert "| FedAvg " in table
    assert "lr=" not in table
    assert (here / "runs/tune/toy/compare/grid.md").exists()


def test_sweep_reports_failures_at_the_end(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "configs/plan/mine.yaml").write_text(
        "experiments: [toy]\nseeds: [0]\nalgorithms: {fedavg: {}, fedadam: {set: {fail: 1}}}\n"
    )
    assert sweep_main(["mine"]) == 1
    output = capsys.readouterr().out
    assert (
        "1 of 2 runs failed:\n  toy/fedadam-s0: fedmuon: round 0, client 3: the loss is nan"
        in output
    )
    assert "log: runs/toy/logs/fedadam-s0.log" in output
    assert "FedAvg" in output


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["nothing"], "fedmuon sweep: there is no plan 'nothing'"),
        (["mine", "--jobs", "0"], "fedmuon sweep: argument --jobs: should be a number from 1, not"),
        (["mine", "--job"], "fedmuon sweep: argument --jobs: expected one argument"),
        (["mine", "--seeds", "3"], "fedmuon sweep: unrecognized arguments: --seeds 3"),
        (
            ["mine", "--write-tuned", "x"],
            "fedmuon sweep: plan mine has no grid, so that --write-tu",
        ),
        ([], "fedmuon sweep: name a plan, or --experiment and --algorithm"),
        (["--experiment", "toy"], "fedmuon sweep: name a plan, or --experiment and --algorithm"),
        (["mine", "--algorithm", "fedavg"], "fedmuon sweep: name a plan, or --experiment and --al"),
        (["mine", "--set", "lr"], "fedmuon sweep: --set takes KEY=VALUE, such as trainer.max_"),
    ],
)
def test_a_bad_sweep_command_gets_one_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], args: list[str], sentence: str
) -> None:
    (here / "configs/plan/mine.yaml").write_text(
        "experiments: [toy]\nalgorithms: [fedavg]\nseeds: [0]\n"
    )
    assert sweep_main(args) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(sentence)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_compare_prints_writes_and_fills_a_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    synthetic(tmp_path, rounds=5, seeds=2)
    write_run(tmp_path, "fedprox", 0, [0.1], done=False)
    readme = tmp_path / "README.md"
    readme.write_text(
        "before\n<!-- results:a -->\nold\n<!-- /results -->\nbetween\n"
        "<!-- results:b -->\nkept\n<!-- /results -->\nafter\n"
    )
    args = [str(tmp_path / "toy"), "-o", str(tmp_path / "out"), "--target", "0.2"]
    assert compare_main([*args, "--markdown", str(readme), "--section", "a"]) == 0
    captured = capsys.readouterr()
    assert "toy: to val acc 0.2" in captured.out
    assert "fedprox-s0: not finished: it has 1 of 1 rounds" in captured.err
    assert (tmp_path / "out/curves.png").stat().st_size > 10_000
    text = readme.read_text()
    assert text.startswith("before\n<!-- results:a -->\n\n| method")
    assert "old" not in text
    assert text.endswith("between\n<!-- results:b -->\nkept\n<!-- /results -->\nafter\n")
    assert compare_main([*args, "--markdown", str(readme), "--section", "a"]) == 0
    assert readme.read_text() == text


@pytest.mark.parametrize("form", ["markdown", "latex", "csv"])
def test_standard_output_is_the_format_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    example(tmp_path)
    write_run(tmp_path, "fedprox", 0, [0.1], done=False)
    args = [str(tmp_path), "--format", form, "--against", "fedavg", "-o", str(tmp_path / "out")]
    assert compare_main(args) == 0
    captured = capsys.readouterr()
    assert "left out " in captured.err
    assert "Tables and curves: " in captured.err
    if form == "csv":
        assert len(list(csv.DictReader(captured.out.splitlines()))) == 3 - 1
        assert "Not tested (the same difference in every seed)" in captured.err
    elif form == "latex":
        assert captured.out.count(r"\begin{tabular}") == 2
        assert "% Not tested (the same difference in every seed): FedMuon and FedAvg." in (
            captured.out
        )
    else:
        assert "| FedMuon − FedAvg |" in captured.out  # noqa: RUF001
        assert "the same difference in every seed |" in captured.out
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"table.tex", "runs.csv", "pairs.csv"} <= written
    with (tmp_path / "out/runs.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6


def test_settings_are_only_those_that_differ(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1])
    write_run(tmp_path, "fedavg", 1, [0.1], config={"data.batch_size": 64})
    write_run(tmp_path, "fedmuon", 0, [0.1], config={"model.algorithm.init_args": {"alpha": 0.5}})
    table = fairness.settings(runs.read_runs([tmp_path])[0])
    assert table.to_dict("index") == {
        "data.batch_size": {"fedavg": "32 | 64", "fedmuon": "32"},
        LR: {"fedavg": "0.1", "fedmuon": ""},
        "model.algorithm.init_args.alpha": {"fedavg": "", "fedmuon": "0.5"},
    }


def test_compare_says_what_is_not_fair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1])
    write_run(tmp_path, "fedmuon", 0, [0.2], config={"data.batch_size": 64})
    assert compare_main([str(tmp_path), "-o", str(tmp_path / "out")]) == 0
    note = "not the same data, cohort or budget, data.batch_size: 32 in fedavg; 64 in fedmuon"
    assert note in capsys.readouterr().out
    assert note in (tmp_path / "out/table.md").read_text()


def test_several_experiments_are_several_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1])
    write_run(tmp_path, "fedavg", 0, [0.2], experiment="other")
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:x -->\n<!-- /results -->\n")
    out = tmp_path / "out"
    args = [str(tmp_path), "-o", str(out), "--markdown", str(readme), "--section", "x"]
    assert compare_main(args) == 0
    assert (out / "toy/table.csv").exists()
    assert (out / "other/table.csv").exists()
    assert readme.read_text().index("### other") < readme.read_text().index("### toy")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["{}/nowhere"], "there is no folder"),
        (["{}/empty"], "there is no finished run in"),
        (["{}/r", "--target", "high"], "argument --target: should be a number, not 'high'"),
        (["{}/r", "--markdown", "x.md"], "--markdown FILE and --section NAME go together"),
        (["{}/r", "--markdown", "{}/a.md", "--section", "x"], "no line <!-- results:x -->"),
        (["{}/r", "--markdown", "{}/b.md", "--section", "x"], "no <!-- /results --> after"),
        (["{}/r", "--markdown", "{}/c.md", "--section", "x"], "c.md: No such file or directory"),
        (["{}/r", "--metric", "f1"], "no run has val/f1 or test/f1"),
        (["{}/r", "--against", "fedx"], "there is no method fedx among fedavg"),
        (["{}/r", "--format", "word"], "argument --format: invalid choice: 'word'"),
    ],
)
def test_a_bad_compare_command_gets_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], sentence: str
) -> None:
    write_run(tmp_path / "r", "fedavg", 0, [0.1])
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.md").write_text("nothing\n")
    (tmp_path / "b.md").write_text("<!-- results:x -->\n<!-- results:y -->\n<!-- /results -->\n")
    assert compare_main([arg.format(tmp_path) for arg in args]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("fedmuon compare: ")
    assert sentence in error


@pytest.mark.parametrize("main", [sweep_main, compare_main])
def test_help_has_an_example(main: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0  # type: ignore[operator]
    assert "examples:\n  fedmuon " in capsys.readouterr().out


def test_the_live_view_shows_what_runs(here: Path) -> None:
    from rich.console import Console

    planned = make_plan(seeds=[0, 1]).runs("runs")
    console = Console(force_terminal=True, width=100, record=True, file=io.StringIO())
    with SweepView(console, planned, "val/acc") as view:
        view(execution.Event("started", planned[0]))
        view(execution.Event("progress", planned[0], 2, 0.5))
        with console.capture() as capture:
            console.print(view._render())
        view(execution.Event("done", planned[0], 4, 0.75))
        view(execution.Event("failed", planned[1], 0, None, "error: [no] memory"))
    shown = capture.get()
    assert "toy/fedavg-s0" in shown
    assert "round 2/4" in shown
    assert "val/acc 0.5000" in shown
    assert "0 of 2 runs ended, about " in shown
    text = console.export_text()
    assert "round 4/4  val/acc 0.7500" in text
    assert "error: [no] memory" in text


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, 3), (3600.0, 2)])
def test_without_a_terminal_a_run_says_now_and_then_how_far_it_is(
    here: Path, seconds: float, lines: int
) -> None:
    from rich.console import Console

    (planned,) = make_plan(seeds=[0]).runs("runs")
    written = io.StringIO()
    with SweepView(Console(file=written, width=100), [planned], "val/acc", None, seconds) as view:
        view(execution.Event("started", planned))
        view(execution.Event("progress", planned, 2, 0.5))
        view(execution.Event("done", planned, 4, 0.75))
    shown = written.getvalue().splitlines()
    assert len(shown) == lines
    assert ("round 2/4  val/acc 0.5000" in written.getvalue()) == (seconds == 0)


def test_starting_needs_neither_torch_nor_pandas_nor_matplotlib() -> None:
    code = (
        "import sys, fedmuon_pl.compare.sweep_command, fedmuon_pl.compare.compare_command\n"
        "heavy = {'torch', 'pytorch_lightning', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT, check=False
    )
    assert done.returncode == 0, done.stderr
