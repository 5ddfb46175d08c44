"""Pictures of runs."""

import math
import statistics
from pathlib import Path

import pytest
from fake_runs import METHODS, synthetic, write_run

from fedmuon_pl.compare import figures, runs, style


def test_a_curve_is_mean_and_band_over_rounds_that_all_seeds_have(tmp_path: Path) -> None:
    nan = math.nan
    for seed, values in enumerate(([0.1, nan, 0.3], [0.3, 0.9, 0.5], [0.2, 0.1, 1.0])):
        write_run(tmp_path, "fedavg", seed, values)
    read = runs.read_runs([tmp_path])[0]
    frame = figures.curve(read, "val/acc")
    assert frame["x"].tolist() == [1, 3]
    assert frame["mean"].tolist() == pytest.approx([0.2, 0.6])
    assert frame["low"].tolist() == [0.1, 0.3]
    assert frame["high"].tolist() == [0.3, 1.0]
    sd = figures.curve(read, "val/acc", "comm/total_mb", "sd")
    assert sd["x"].tolist() == [2.0, 6.0]
    assert sd["high"][2] - sd["mean"][2] == pytest.approx(statistics.stdev([0.3, 0.5, 1.0]))
    assert figures.curve(read, "no/such").empty


def test_pictures_are_written_and_not_blank(tmp_path: Path) -> None:
    from matplotlib.image import imread

    synthetic(tmp_path, rounds=6, seeds=2)
    read = runs.read_runs([tmp_path])[0]
    png, pdf, svg = figures.draw_curves(read, tmp_path / "out/curves")
    assert pdf.read_bytes().startswith(b"%PDF")
    assert "FedMuon</text>" in svg.read_text()  # text stays text
    picture = imread(png)[..., :3]
    assert picture.shape[1] > 1000
    for method in METHODS:
        colour = [int(style.method_style(method)[0][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(picture - colour).max(axis=-1) < 0.02).sum() > 100, method
    figures.draw_curves(read[:1], tmp_path / "out/one", band="sd", metric="loss")
    with pytest.raises(ValueError, match="no run has val/ppl or test/ppl"):
        figures.draw_curves(read, tmp_path / "out/none", metric="ppl")


def test_a_colour_belongs_to_a_name() -> None:
    fixed = {style.method_style(method) for method in METHODS}
    assert len(fixed) == len(METHODS)
    assert style.method_style("fedmuon") == ("#D55E00", "-")
    assert style.method_style("mine") == style.method_style("mine")
    assert style.method_style("mine")[1] != "-"
    for variant, method in (("fedavg_adam", "fedavg"), ("local_muon_x_y", "local_muon")):
        assert style.method_style(variant)[0] == style.method_style(method)[0]
        assert style.method_style(variant)[1] != "-"
    assert style.method_style("fedmuon_lmo")[0] != style.method_style("fedmuon")[0]
    many = [f"method{i}" for i in range(12)]
    styles = style.distinct_styles(many)
    assert len({repr(look) for look in styles.values()}) == len(many)
    assert all(styles[name][0] == style.method_style(name)[0] for name in many)
