"""Heat maps of a sweep over two settings."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedmuon_pl.cli import main
from fedmuon_pl.compare.heatmap import draw_heat_maps, heat_map
from fedmuon_pl.compare.runs import read_runs
from fedmuon_pl.errors import ConfigError


def grid(root, label="fedmuon", skip=()):
    """Accuracy is alpha + 10 lr in the last round, and worse before."""
    for alpha in (0.5, 0.0, 0.25):
        for lr in ("1.0e-03", "0.01"):
            for seed in (0, 1):
                folder = root / "toy" / f"{label}@alpha={alpha},lr={lr}-s{seed}"
                if (alpha, lr) in skip:
                    continue
                folder.mkdir(parents=True)
                last = alpha + 10 * float(lr) + (0.02 if seed else -0.02)
                lines = ["round,val/acc,val/loss", "0,0.1,9", "1,,", f"2,{last},{1 - last}"]
                (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
                (folder / "done").write_text('{"rounds": 3}')
    return root


def test_a_map_is_the_mean_over_seeds_after_the_last_round(tmp_path):
    runs, problems = read_runs([grid(tmp_path)])
    assert not problems
    values = heat_map(runs)
    assert (values.index.name, values.columns.name) == ("alpha", "lr")
    assert list(values.index) == [0.0, 0.25, 0.5]
    assert list(values.columns) == [0.001, 0.01]
    for alpha, row in values.iterrows():
        for lr, value in row.items():
            assert value == pytest.approx(alpha + 10 * lr, abs=1e-12)


@pytest.mark.parametrize("how", ["missing", "diverged", "not evaluated"])
def test_a_point_without_all_seeds_is_empty(how, tmp_path):
    grid(tmp_path)
    folder = tmp_path / "toy/fedmuon@alpha=0.5,lr=0.01-s1"
    lines = (folder / "metrics.csv").read_text().splitlines()
    if how == "missing":
        (folder / "done").unlink()
    else:
        lines[-1] = "2,inf,inf" if how == "diverged" else "2,,"
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    values = heat_map(read_runs([tmp_path])[0])
    assert values.isna().to_numpy().sum() == 1
    assert np.isnan(values.loc[0.5, 0.01])


def texts(axes):
    return {(t.get_position(), t.get_text()): t.get_fontweight() for t in axes.texts}


def test_experiments_do_not_mix_and_the_best_is_bold(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    other = grid(tmp_path / "a") / "toy"
    other.rename(tmp_path / "a/else")
    for path in (tmp_path / "a/else").iterdir():
        path.rename(path.with_name(path.name.replace("lr=0.01", "lr=polar")))
    runs = read_runs([grid(tmp_path / "b"), tmp_path / "a"])[0]
    for metric, bold in (("val/acc", ".600"), ("val/loss", ".400")):
        draw_heat_maps(runs, tmp_path / "x", metric=metric)
        figure = figures[-1]
        assert sorted(a.get_title() for a in figure.axes) == ["else, fedmuon", "toy, fedmuon"]
        for axes in figure.axes:
            strong = [text for (_, text), weight in texts(axes).items() if weight == "bold"]
            assert strong == [bold]
        assert "after the last round, seeds 0, 1" in figure.get_suptitle()
    with pytest.raises(ConfigError, match="no point of the grid has val/ppl after the last round"):
        draw_heat_maps(runs, tmp_path / "x", metric="val/ppl")


def test_the_command_draws_every_label_and_leaves_holes(tmp_path, capsys):
    grid(tmp_path)
    grid(tmp_path, "other", skip=[(0.5, "0.01")])
    values = heat_map([r for r in read_runs([tmp_path])[0] if r.method.startswith("other")])
    assert values.isna().to_numpy().sum() == 1
    stem = tmp_path / "pictures" / "map"
    assert main(["heatmap", str(tmp_path), "-o", str(stem)]) == 0
    said = capsys.readouterr().out.split()
    assert said == [f"{stem}.png", f"{stem}.pdf"]
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert stem.with_suffix(".pdf").read_bytes().startswith(b"%PDF")


def test_what_is_no_grid_is_one_sentence(tmp_path, capsys):
    folder = tmp_path / "toy" / "fedavg-s0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("round,val/acc\n0,0.1\n")
    (folder / "done").write_text('{"rounds": 1}')
    assert main(["heatmap", str(tmp_path), "-o", str(tmp_path / "map")]) == 2
    assert "fedavg is no point of a grid of two settings" in capsys.readouterr().err
    assert main(["heatmap", str(tmp_path / "nothing"), "-o", str(tmp_path / "map")]) == 2
    assert "there is no finished run" in capsys.readouterr().err
