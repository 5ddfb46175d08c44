"use strict";
// Draws what the page's data say. Everything is in the page; nothing is fetched.
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
  Chart.defaults.color = "#5b6472";
  Chart.defaults.animation = false;
  Chart.defaults.maintainAspectRatio = false;
  const charts = [];
  window.fedmuonCharts = charts;

  const short = (value) => {
    if (!Number.isFinite(value)) return "-";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
    return size >= 100 ? value.toFixed(1) : size >= 10 ? value.toFixed(2) : value.toFixed(4);
  };

  // For each method the point that is nearest on the x-axis: their megabytes and seconds differ.
  Chart.Interaction.modes.nearestOfEach = (chart, event) => {
    const at = Chart.helpers.getRelativePosition(event, chart).x;
    const items = [];
    chart.getSortedVisibleDatasetMetas().forEach((meta) => {
      if (chart.data.datasets[meta.index].part !== "mean" || !meta.data.length) return;
      let index = 0;
      meta.data.forEach((point, i) => {
        if (Math.abs(point.x - at) < Math.abs(meta.data[index].x - at)) index = i;
      });
      const last = meta.data[meta.data.length - 1];
      if (at > last.x + 12) return; // this method had ended
      items.push({ element: meta.data[index], datasetIndex: meta.index, index });
    });
    return items;
  };

  const cursor = {
    id: "cursor",
    afterDatasetsDraw(chart) {
      const active = chart.tooltip && chart.tooltip.opacity ? chart.tooltip.dataPoints || [] : [];
      if (!active.length || !chart.options.cursor) return;
      const { ctx, chartArea } = chart;
      const x = active[0].element.x;
      ctx.save();
      ctx.strokeStyle = "#9aa3af";
      ctx.beginPath();
      ctx.moveTo(x, chartArea.top);
      ctx.lineTo(x, chartArea.bottom);
      ctx.stroke();
      ctx.restore();
    },
  };
  Chart.register(cursor);

  const widths = (dash, width) => dash.map((length) => length * width);

  // Three data sets a method: the band's lower edge, its upper one filled down to it, the mean.
  const curves = (experiment, tag, x) =>
    experiment.methods.flatMap((method) => {
      const curve = (method.curves[tag] || {})[x];
      if (!curve) return [];
      const xy = (ys) => curve.x.map((value, i) => ({ x: value, y: ys[i] }));
      const bare = { method: method.name, borderWidth: 0, pointRadius: 0, pointHitRadius: 0 };
      const lone = curve.x.length === 1;
      return [
        { ...bare, part: "low", data: xy(curve.low), fill: false },
        { ...bare, part: "high", data: xy(curve.high), fill: "-1", backgroundColor: method.colour + "2e" },
        {
          ...bare,
          part: "mean",
          label: method.label,
          data: xy(curve.mean),
          curve,
          borderColor: method.colour,
          backgroundColor: method.colour,
          borderWidth: 2,
          borderDash: widths(method.dash, 2),
          pointRadius: lone ? 3 : 0,
          fill: false,
        },
      ];
    });

  const axis = (text, more) => ({
    type: "linear",
    title: { display: Boolean(text), text },
    grid: { color: "#eceff2" },
    ...more,
  });

  const drawCurves = (canvas, experiment, tag, x, y, logarithmic, small) => {
    const chart = new Chart(canvas, {
      type: "line",
      data: { datasets: curves(experiment, tag, x) },
      options: {
        cursor: true,
        parsing: false,
        normalized: true,
        interaction: { mode: "nearestOfEach", intersect: false },
        scales: {
          x: axis(DATA.axes[x], { ticks: { maxTicksLimit: small ? 5 : 10, maxRotation: 0 } }),
          y: axis(y, {
            type: logarithmic ? "logarithmic" : "linear",
            ticks: { maxTicksLimit: small ? 5 : 9 },
          }),
        },
        plugins: {
          legend: { display: false },
          tooltip: {
            itemSort: (a, b) => b.parsed.y - a.parsed.y,
            callbacks: {
              title: (items) =>
                items.length ? `${DATA.axes[x]} ${x === "round" ? items[0].parsed.x : short(items[0].parsed.x)}` : "",
              label: (item) => {
                const { low, high } = item.dataset.curve;
                const band = `${short(low[item.dataIndex])} to ${short(high[item.dataIndex])}`;
                const many = experiment.seeds > 1 ? ` (${band})` : "";
                return ` ${item.dataset.label} ${short(item.parsed.y)}${many}`;
              },
            },
          },
        },
      },
    });
    charts.push(chart);
    return chart;
  };

  const finalsLabel = (finals, method) => {
    if (!method) return "";
    const [there, all] = [finals.points[method.name].length, finals.seeds[method.name]];
    return there < all ? `${method.label} (${there} of ${all} seeds)` : method.label;
  };

  const drawFinals = (canvas, experiment) => {
    const finals = experiment.finals;
    const names = finals.methods.map((name) => experiment.methods.find((m) => m.name === name));
    canvas.parentElement.style.height = `${5 + 2.4 * names.length}rem`;
    const datasets = names.flatMap((method, place) => {
      const points = finals.points[method.name];
      const step = points.length > 1 ? 0.24 / (points.length - 1) : 0;
      const mean = points.reduce((sum, p) => sum + p.value, 0) / points.length;
      const complete = points.length === finals.seeds[method.name]; // else it is of the survivors
      const shared = { method: method.name, label: method.label, showLine: false };
      return [
        {
          ...shared,
          part: "seed",
          data: points.map((p, i) => ({ x: p.value, y: place + step * (i - (points.length - 1) / 2), seed: p.seed })),
          backgroundColor: method.colour + "b0",
          borderColor: method.colour,
          pointRadius: 5,
          pointHoverRadius: 7,
        },
        {
          ...shared,
          part: "average",
          data: complete ? [{ x: mean, y: place - 0.32 }, { x: mean, y: place + 0.32 }] : [],
          showLine: true,
          borderColor: method.colour,
          backgroundColor: method.colour,
          borderWidth: 3,
          pointRadius: 0,
          pointHitRadius: 8,
        },
      ];
    });
    charts.push(
      new Chart(canvas, {
        type: "scatter",
        data: { datasets },
        options: {
          interaction: { mode: "nearest", intersect: true },
          scales: {
            x: axis(finals.title, { ticks: { maxTicksLimit: 8, maxRotation: 0 } }),
            y: axis("", {
              min: -0.6,
              max: names.length - 0.4,
              reverse: true,
              grid: { display: false },
              afterBuildTicks: (scale) => (scale.ticks = names.map((_, i) => ({ value: i }))),
              ticks: { autoSkip: false, color: "#1d2129", callback: (value) => finalsLabel(finals, names[value]) },
            }),
          },
          plugins: {
            legend: { display: false },
            tooltip: {
              callbacks: {
                label: (item) =>
                  item.dataset.part === "seed"
                    ? ` ${item.dataset.label}, seed ${item.raw.seed}: ${short(item.parsed.x)}`
                    : ` ${item.dataset.label}, mean: ${short(item.parsed.x)}`,
              },
            },
          },
        },
      }),
    );
  };

  DATA.experiments.forEach((experiment, number) => {
    const section = document.getElementById(`experiment-${number}`);
    const find = (name) => section.querySelector(`.${name}`);
    const hidden = new Set();
    const own = [];
    const refresh = (chart) => {
      chart.data.datasets.forEach((set, i) => chart.setDatasetVisibility(i, !hidden.has(set.method)));
      chart.update();
    };
    const keep = (draw) => {
      const before = charts.length;
      draw();
      own.push(...charts.slice(before));
    };

    const canvas = find("curves");
    if (canvas) {
      const tag = find("tag");
      const x = find("x");
      const log = find("log");
      let chart = null;
      const show = () => {
        if (chart) {
          chart.destroy();
          own.splice(own.indexOf(chart), 1);
          charts.splice(charts.indexOf(chart), 1);
        }
        keep(() => {
          const name = tag.selectedOptions[0].textContent;
          chart = drawCurves(canvas, experiment, tag.value, x.value, name, log.checked, false);
        });
        refresh(chart);
      };
      [tag, x, log].forEach((control) => control.addEventListener("change", show));
      show();
    }
    section.querySelectorAll("canvas.diagnostic").forEach((small) => {
      keep(() => drawCurves(small, experiment, small.dataset.tag, "round", "", false, true));
    });
    if (find("finals")) keep(() => drawFinals(find("finals"), experiment));

    section.querySelectorAll(".chips button").forEach((button) => {
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-pressed") === "true";
        button.setAttribute("aria-pressed", String(!shown));
        if (shown) hidden.add(button.dataset.method);
        else hidden.delete(button.dataset.method);
        own.forEach(refresh);
      });
    });
  });
  document.documentElement.dataset.drawn = String(charts.length);
})();
