"""The report: its page in a browser, its data without one, and its files."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_runs import METHODS, synthetic, write_run
from matplotlib.figure import Figure

from fedmuon_pl.compare import compare_runs, read_runs, report_data, write_report
from fedmuon_pl.compare.figures import draw_finals
from fedmuon_pl.compare.report_command import report_main
from fedmuon_pl.compare.report_data import experiment_data
from fedmuon_pl.compare.style import method_style

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


def data_of(page: Path) -> dict:
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S
    )
    return json.loads(text)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on five methods, two seeds and what is not right with them."""
    root = tmp_path_factory.mktemp("report")
    synthetic(root, rounds=6, seeds=2)
    write_run(
        root, "<b>mine</b>", 0, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], config={"data.batch_size": 64}
    )
    write_run(root, "fedprox", 0, [0.1], done=False)
    environment = [{"first_round": 0, "commit": "abc+", "packages": {"torch": "2.9"}, "cuda": []}]
    (root / "toy/fedavg-s0/environment.json").write_text(json.dumps(environment))
    arguments = [str(root / "toy"), "-o", str(root / "out"), "--no-partition", "--target", "0.5"]
    assert report_main(arguments) == 0
    return root / "out"


def test_the_page_needs_nothing_but_itself(made: Path) -> None:
    text = (made / "index.html").read_text()
    assert "{{" not in re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text)
    assert "default-src 'none'" in text
    assert "Chart.js v4" in text
    assert "Released under the MIT License" in text
    assert len(text) < 600_000


def test_the_page_says_what_is_wrong(made: Path) -> None:
    text = (made / "index.html").read_text()
    assert "data.batch_size: 64 in &lt;b&gt;mine&lt;/b&gt;" in text.replace("&quot;", "")
    assert "<b>mine" not in text
    assert "fedprox-s0: not finished: it has 1 of 1 rounds and no done file" in text
    assert "not recorded (10 of 11 runs)" in text
    assert "abc+ (1 of 11 runs)" in text


def test_the_pages_data_are_the_curves(made: Path) -> None:
    (toy,) = data_of(made / "index.html")["experiments"]
    assert toy["name"] == "toy"
    assert {method["name"] for method in toy["methods"]} == {*METHODS, "<b>mine</b>"}
    for method in toy["methods"]:
        assert method["colour"] == method_style(method["name"])[0]
        assert bool(method["dash"]) == (method["name"] not in METHODS)
    (fedavg,) = [method for method in toy["methods"] if method["name"] == "fedavg"]
    runs, _ = read_runs([made.parent / "toy"])
    ones, twos = (run.metrics["test/acc"] for run in runs if run.method == "fedavg")
    curve = fedavg["curves"]["test/acc"]["round"]
    assert curve["x"] == [1, 2, 3, 4, 5, 6]
    assert curve["mean"] == pytest.approx(list((ones + twos) / 2), rel=1e-5)
    assert curve["low"] == pytest.approx([min(p) for p in zip(ones, twos, strict=True)], rel=1e-5)
    assert fedavg["curves"]["val/acc"]["seconds"]["x"] == [0.25, 0.5, 0.75, 1, 1.25, 1.5]
    assert fedavg["curves"]["val/acc"]["comm/total_mb"]["x"][-1] == pytest.approx(6 * 2.45)
    assert toy["finals"]["points"]["fedavg"] == [
        {"seed": 0, "value": pytest.approx(ones.iloc[-1])},
        {"seed": 1, "value": pytest.approx(twos.iloc[-1])},
    ]


def test_a_long_curve_is_thinned_to_its_ends(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [i / 2000 for i in range(1500)])
    (one,) = compare_runs(read_runs([tmp_path])[0])
    curve = report_data.experiment_data(one)["methods"][0]["curves"]["val/acc"]["round"]
    assert len(curve["x"]) == report_data.MOST_POINTS
    assert (curve["x"][0], curve["x"][-1]) == (1, 1500)
    assert curve["mean"] == pytest.approx([(x - 1) / 2000 for x in curve["x"]], rel=1e-5)


def test_every_figure_is_there_in_three_forms(made: Path) -> None:
    names = {path.name for path in (made / "figures").iterdir()}
    assert names == {
        f"{stem}.{kind}" for stem in ("curves", "finals") for kind in ("png", "pdf", "svg")
    }
    assert {"table.md", "table.tex", "table.csv", "runs.csv", "pairs.csv"} <= {
        path.name for path in made.iterdir()
    }


def test_several_experiments_have_a_section_each(tmp_path: Path) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1])
    write_run(tmp_path, "fedavg", 0, [0.2], experiment="other", config={"data": {}})
    page = write_report(compare_runs(read_runs([tmp_path])[0]), tmp_path / "out")
    text = page.read_text()
    assert '<a href="#experiment-1">' in text
    # The partition of a run whose data cannot be made is not drawn, and the page says why.
    assert text.count("No picture: ") == 2
    assert (tmp_path / "out/toy/figures/finals.svg").exists()


def test_a_bad_report_command_gets_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "fedavg", 0, [0.1])
    assert report_main([str(tmp_path)]) == 2
    assert "the following arguments are required: -o/--output" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert report_main([str(tmp_path), "-o", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"fedmuon report: {tmp_path}/file is no folder\n"
    assert report_main(["--help"]) == 0


PROBE = """
<script>
(() => {
  const section = document.getElementById("experiment-0");
  const chart = () => window.fedmuonCharts.find((c) => c.canvas.className.includes("curves"));
  const means = () => chart().data.datasets
    .filter((set, i) => set.part === "mean" && chart().isDatasetVisible(i))
    .map((set) => set.method);
  const found = {charts: window.fedmuonCharts.length, before: means()};
  section.querySelector('.chips button[data-method="fedavg"]').click();
  found.hidden = means();
  const x = section.querySelector("select.x");
  x.value = "comm/total_mb";
  x.dispatchEvent(new Event("change"));
  found.still = means();
  found.title = chart().options.scales.x.title.text;
  const point = {x: chart().width / 3, y: chart().height / 2};
  const near = Chart.Interaction.modes.nearestOfEach(chart(), {native: true, ...point});
  chart().tooltip.setActiveElements(near, point);
  chart().update();
  found.tooltip = chart().tooltip.body.map((part) => part.lines[0]);
  section.querySelector('.chips button[data-method="fedavg"]').click();
  found.after = means();
  found.overflow = document.documentElement.scrollWidth - window.innerWidth;
  document.body.dataset.found = JSON.stringify(found);
})();
</script>
"""


@pytest.mark.skipif(not BROWSER, reason="there is no Chromium")
def test_the_page_works_in_a_browser(made: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text((made / "index.html").read_text().replace("</body>", PROBE + "</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000"]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    (found,) = re.findall(r'data-found="(.*?)"', done.stdout) or [done.stderr[-500:]]
    found = json.loads(found.replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">"))
    assert found["charts"] == 2
    assert sorted(found["before"]) == sorted([*METHODS, "<b>mine</b>"])
    assert "fedavg" not in found["hidden"]
    assert len(found["hidden"]) == len(METHODS)
    assert found["still"] == found["hidden"]
    assert found["title"] == "communicated MB"
    assert any(re.match(r" FedMuon 0\.\d+ \(0\.\d+ to 0\.\d+\)", line) for line in found["tooltip"])
    assert found["after"] == found["before"]
    assert found["overflow"] <= 0  # nothing sticks out to the side on a phone


def test_a_method_that_lost_a_seed_has_no_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, last in ((0, 0.6), (1, math.inf)):
        write_run(tmp_path, "fedavg", seed, [0.5, last])
        write_run(tmp_path, "fedmuon", seed, [0.5, 0.7 + seed / 10])
    runs = read_runs([tmp_path])[0]
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    draw_finals(runs, tmp_path / "finals")
    (axes,) = figures[0].axes
    strokes = [line.get_xdata()[0] for line in axes.lines if line.get_linewidth() == 2]
    assert strokes == pytest.approx([0.74])  # of the test set, 0.01 below
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ["FedMuon", "FedAvg (1 of 2 seeds)"]
    (comparison,) = compare_runs(runs)
    finals = experiment_data(comparison)["finals"]
    assert finals["seeds"] == {"fedmuon": 2, "fedavg": 2}
    assert [len(finals["points"][name]) for name in ("fedmuon", "fedavg")] == [2, 1]
