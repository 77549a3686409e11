// The curves of the chosen run, and of those it is compared with.

const charts = {
  loss: new Chart("chart-loss", "Loss", short),
  accuracy: new Chart("chart-accuracy", "Accuracy", value => `${+(value * 100).toPrecision(4)} %`),
  versions: new Chart("chart-versions", "Versions per second", short),
  samples: new Chart("chart-samples", "Samples per second", short),
};
let said = 0;

/** Each the mean of its neighbours, a fiftieth of all of them: a mean that looks back only lags. */
function smooth(values) {
  const reach = Math.floor(values.length / 100);
  const sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, at) => {
    const near = Math.min(reach, at, values.length - 1 - at);
    return (sums[at + near + 1] - sums[at - near]) / (2 * near + 1);
  });
}

function drawCharts() {
  const names = [chosen, ...compared].filter(name => traces.has(name));
  const series = { loss: [], accuracy: [], versions: [], samples: [] };
  names.forEach((name, at) => {
    const { points, measured } = traces.get(name);
    const colour = `--c${at % 6}`;
    const learnt = points.filter(point => point.loss !== null);
    const xs = learnt.map(point => point[axis]);
    const losses = learnt.map(point => point.loss);
    series.loss.push({ name, colour, xs, ys: losses, faint: true }, { name, colour, xs, ys: smooth(losses) });
    for (const split of ["validation", "test"]) {
      const known = measured.filter(one => one.split === split && one.accuracy !== null);
      const label = split === "test" ? `${name} (test)` : name;
      series.accuracy.push({
        name: label, colour, dots: true, xs: known.map(one => one[axis]), ys: known.map(one => one.accuracy),
      });
    }
    const all = points.map(point => point[axis]);
    series.versions.push({ name, colour, xs: all, ys: points.map(point => point.versions_per_second) });
    series.samples.push({ name, colour, xs: all, ys: points.map(point => point.samples_per_second) });
  });
  const ends = names.map(name => traces.get(name).points.at(-1)?.[axis] ?? 0);
  const end = Math.max(1, ...ends);
  const xFormat = axis === "samples" ? short : lasting;
  const now = performance.now();
  for (const [name, chart] of Object.entries(charts)) {
    chart.show(series[name], end, xFormat);
    chart.draw();
    // Words change once a second: nobody listens faster.
    if (now - said > 1000) chart.say();
  }
  drawLegend(names);
  if (now - said > 1000) {
    said = now;
    if ($("figures").open) drawFigures();
  }
}

function drawLegend(names) {
  const legend = $("legend");
  if (legend.dataset.names === names.join(" ")) return;
  legend.dataset.names = names.join(" ");
  legend.replaceChildren(...names.map((name, at) => {
    const item = make("li", name);
    const mark = make("i");
    mark.style.background = `var(--c${at % 6})`;
    item.prepend(mark);
    return item;
  }));
}

function drawFigures() {
  const trace = traces.get(chosen);
  if (!trace) return;
  const step = Math.max(1, Math.ceil(trace.points.length / 40));
  const rows = trace.points.filter((_, at) => (trace.points.length - 1 - at) % step === 0).reverse();
  const measuredAt = point => trace.measured.findLast(one => one.split === "validation" && one.samples <= point.samples);
  $("figures").querySelector("tbody").replaceChildren(...rows.map(point => {
    const row = make("tr");
    const result = measuredAt(point);
    const cells = [
      point.version, number(point.samples), number(point.seconds, 1),
      point.loss === null ? "–" : point.loss.toFixed(4),
      result && result.accuracy !== null ? percent(result.accuracy) : "–",
      short(point.versions_per_second), short(point.samples_per_second),
      point.staleness.toFixed(2), `${point.workers}`,
    ];
    row.append(...cells.map(cell => make("td", cell)));
    return row;
  }));
}
$("figures").addEventListener("toggle", drawFigures);

for (const choice of document.querySelectorAll("input[name=axis]")) {
  choice.addEventListener("change", () => { axis = choice.value; requestFrame("charts"); });
}
$("log").addEventListener("change", () => { charts.loss.log = $("log").checked; requestFrame("charts"); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => requestFrame("charts"));
