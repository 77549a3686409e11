// The live page. Messages come a few times a second; everything is drawn by requestAnimationFrame,
// once per message at most. What workers made up (names, messages) only ever becomes text.

const $ = id => document.getElementById(id);
const number = (value, places = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
const short = value => {
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toFixed(2)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toFixed(2)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toFixed(1)}k`;
  return size >= 100 ? value.toFixed(0) : `${+value.toPrecision(3)}`;
};
const percent = value => `${(value * 100).toFixed(2)} %`;
const lasting = seconds => {
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor(whole % 3600 / 60)} min`;
};
const text = (element, value) => {
  if (element.textContent !== value) element.textContent = value;
};
const make = (name, content = "", kind = "") => {
  const element = document.createElement(name);
  element.textContent = content;
  if (kind) element.className = kind;
  return element;
};
const final = state => state !== "running" && state !== "paused";

// ---- the hive

/** Asks the hive. The key travels in a header, never in an address. */
async function ask(path, signal) {
  const key = sessionStorage.getItem("skep.key");
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { headers, signal, cache: "no-store" });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  const error = new Error(body.message || `the hive answered ${answer.status}`);
  error.status = answer.status;
  throw error;
}
const askJson = async (path, signal) => (await ask(path, signal)).json();
const pause = seconds => new Promise(resume => setTimeout(resume, seconds * 1000));

function link(state, words) {
  $("link").className = state;
  text($("link"), words);
}

// ---- state

const traces = new Map(); // run -> { points, measured }
const compared = new Set();
let runs = [];
let chosen = null;
let following = null; // AbortController of the chosen run's stream
let progress = null;
let workers = [];
let order = { by: "rate", down: true };
let received = 0;
let messages = 0;
let axis = "samples";

/** So many points are kept of a run here; then neighbours become one. */
const MOST_POINTS = 2000;

function add(trace, points) {
  trace.points.push(...points);
  if (trace.points.length <= MOST_POINTS) return;
  const halved = [];
  for (let at = 0; at < trace.points.length; at += 2) {
    const [a, b] = [trace.points[at], trace.points[at + 1]];
    const mean = name => a[name] === null ? b[name] : b[name] === null ? a[name] : (a[name] + b[name]) / 2;
    halved.push(b ? { ...b, loss: mean("loss"), staleness: mean("staleness") } : a);
  }
  trace.points = halved;
}

// ---- drawing, once a frame

const dirty = new Set();
function requestFrame(...parts) {
  if (dirty.size === 0) requestAnimationFrame(drawAll);
  parts.forEach(part => dirty.add(part));
}
const draws = { runs: drawRuns, run: drawRun, charts: drawCharts, workers: drawWorkers, cost: drawCost };
function drawAll() {
  const parts = [...dirty];
  dirty.clear();
  parts.forEach(part => draws[part]());
}

// ---- runs

function drawRuns() {
  const body = $("runs").tBodies[0];
  $("no-runs").hidden = runs.length > 0;
  while (body.rows.length > runs.length) body.deleteRow(-1);
  runs.forEach((run, at) => {
    let row = body.rows[at];
    if (!row) {
      row = body.insertRow();
      for (let cell = 0; cell < 10; cell += 1) row.insertCell();
      const box = make("input");
      box.type = "checkbox";
      box.addEventListener("change", () => compare(row.dataset.run, box.checked));
      row.cells[0].append(box);
      const button = make("button");
      button.addEventListener("click", () => choose(row.dataset.run));
      row.cells[1].append(button);
      row.cells[2].append(make("span", "", "badge"));
    }
    row.dataset.run = run.name;
    row.className = run.name === chosen ? "chosen" : "";
    const [box] = row.cells[0].children;
    box.checked = run.name === chosen || compared.has(run.name);
    box.disabled = run.name === chosen;
    box.setAttribute("aria-label", `compare ${run.name}`);
    text(row.cells[1].firstChild, run.name);
    if (run.name === chosen) row.cells[1].firstChild.setAttribute("aria-current", "true");
    else row.cells[1].firstChild.removeAttribute("aria-current");
    row.cells[2].firstChild.className = `badge ${run.state}`;
    text(row.cells[2].firstChild, run.state.replaceAll("_", " "));
    const cells = [
      run.version, `${run.epoch + 1}`, number(run.samples), number(run.rate),
      run.loss === null ? "–" : run.loss.toFixed(4),
      run.accuracy === null ? "–" : percent(run.accuracy), `${run.workers}`,
    ];
    cells.forEach((value, cell) => text(row.cells[cell + 3], value));
  });
}

async function pollRuns() {
  for (;;) {
    const own = sessionStorage.getItem("skep.run");
    try {
      if (own) {
        const view = await askJson(`v1/runs/${encodeURIComponent(own)}/progress`);
        const accuracy = view.best === null ? null : view.best.accuracy;
        runs = [{ ...view, accuracy, workers: view.worker_count }];
      } else {
        runs = await askJson("v1/runs");
      }
      $("main").hidden = false;
      $("key-form").hidden = true;
      if (runs.length > 0 && !runs.some(run => run.name === chosen)) {
        const named = decodeURIComponent(location.hash.slice(1));
        const open = runs.find(run => run.name === named) || runs.find(run => !final(run.state));
        choose((open || runs[runs.length - 1]).name);
      }
      if (runs.length === 0) link("live", "live");
      requestFrame("runs");
    } catch (error) {
      if (error.status === 401 || error.status === 403 || (own && error.status === 404)) {
        askForKey(error);
        return;
      }
      link("lost", "the hive does not answer; trying again");
    }
    await pause(2);
  }
}

function askForKey(error) {
  if (following) following.abort();
  chosen = null;
  $("main").hidden = true;
  $("key-form").hidden = false;
  link("", "needs a key");
  text($("key-error"), sessionStorage.getItem("skep.key") ? error.message : "");
  $("key").focus();
}

$("key-form").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem("skep.key", $("key").value.trim());
  sessionStorage.setItem("skep.run", $("key-run").value.trim());
  $("key").value = "";
  text($("key-error"), "");
  pollRuns();
});

/** Overlays another run's curves, and keeps them up to date while it runs. */
async function compare(name, wanted) {
  if (!wanted) {
    compared.delete(name);
    requestFrame("charts");
    return;
  }
  compared.add(name);
  while (compared.has(name) && name !== chosen) {
    try {
      traces.set(name, await askJson(`v1/runs/${encodeURIComponent(name)}/history?points=500`));
      requestFrame("charts");
    } catch { /* the next time, perhaps */ }
    const run = runs.find(run => run.name === name);
    if (!run || final(run.state)) return;
    await pause(5);
  }
}

// ---- the chosen run

function choose(name) {
  if (following) following.abort();
  const before = chosen;
  chosen = name;
  compared.delete(name);
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
  document.title = `${name} – Skep`;
  progress = null;
  workers = [];
  $("events").replaceChildren();
  $("run").hidden = false;
  text($("run-name"), name);
  if (before && before !== name) traces.delete(before);
  following = new AbortController();
  follow(name, following.signal);
  requestFrame("runs", "charts", "workers");
}

async function follow(name, signal) {
  const at = `v1/runs/${encodeURIComponent(name)}`;
  for (let wait = 0.5; !signal.aborted; wait = Math.min(wait * 2, 10)) {
    try {
      const trace = await askJson(`${at}/history`, signal);
      traces.set(name, trace);
      const last = trace.points.at(-1);
      const after = last ? Number(last.version.split(".")[1]) : 0;
      $("events").replaceChildren();
      requestFrame("charts");
      const stream = await ask(`${at}/progress?follow=true&after=${after}`, signal);
      link("live", "live");
      wait = 0.5;
      await read(stream, message => take(trace, message));
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) return;
    }
    if (!signal.aborted) link("lost", "the hive does not answer; trying again");
    await pause(wait);
  }
}

/** Server-sent events by fetch: EventSource cannot send a key. */
async function read(stream, take) {
  const reader = stream.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    received += value.length;
    rest += decoder.decode(value, { stream: true });
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter(line => line.startsWith("data:")).map(line => line.slice(5));
      if (data.length > 0) take(JSON.parse(data.join("\n")));
    }
  }
}

function take(trace, message) {
  if (message.name !== chosen) return;
  messages += 1;
  Object.assign(document.body.dataset, { bytes: received, messages });
  progress = message;
  add(trace, message.points);
  trace.measured.push(...message.measured);
  if (message.workers) workers = message.workers;
  addEvents(message.events);
  requestFrame("run", "charts", "cost", ...(message.workers ? ["workers"] : []));
}

function drawRun() {
  if (!progress) return;
  const run = progress;
  text($("run-state"), run.state.replaceAll("_", " "));
  $("run-state").className = `badge ${run.state}`;
  text($("run-reason"), run.reason);
  const bound = run.steps !== null ? [Number(run.version.split(".")[1]), run.steps]
    : run.epochs !== null ? [run.epoch * run.epoch_positions + run.epoch_applied, run.epochs * run.epoch_positions]
    : [run.epoch_applied, run.epoch_positions];
  const share = Math.min(1, bound[0] / Math.max(1, bound[1]));
  $("bar").firstElementChild.style.transform = `scaleX(${share})`;
  $("bar").setAttribute("aria-valuenow", Math.round(share * 100));
  const epoch = run.epochs === null ? run.epoch + 1 : `${Math.min(run.epoch + 1, run.epochs)} of ${run.epochs}`;
  const within = Math.floor(100 * run.epoch_applied / Math.max(1, run.epoch_positions));
  const parts = [
    `epoch ${epoch}${run.epochs !== null && run.epoch >= run.epochs ? "" : `, ${within} % of it`}`,
    `${number(run.samples)} samples in ${lasting(run.seconds)}`,
    `version ${run.version}, durable ${run.durable}`,
  ];
  if (run.steps !== null) parts.unshift(`step ${bound[0]} of ${bound[1]}`);
  if (run.skipped > 0) parts.push(`${number(run.skipped)} positions skipped`);
  text($("bar-text"), parts.join(" · "));
  $("trouble").hidden = !run.trouble;
  text($("trouble"), run.trouble ? `checkpoints cannot be written: ${run.trouble}` : "");
  const measured = result => result === null ? "–" : result.accuracy === null ? result.loss.toFixed(4) : percent(result.accuracy);
  text($("tile-loss"), run.loss === null ? "–" : run.loss.toFixed(4));
  text($("tile-accuracy"), measured(run.validation));
  text($("tile-best"), measured(run.best));
  text($("tile-test"), measured(run.test));
  const over = final(run.state);
  text($("tile-versions"), over ? "–" : short(run.versions_per_second));
  text($("tile-samples"), over ? "–" : short(run.rate));
  text($("worker-count"), `${run.worker_count}`);
  text($("tile-left"), over || run.seconds_left === null ? "–" : lasting(run.seconds_left));
}

// ---- curves

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

// ---- workers: only the rows in view are in the document

const ROW = 28;

function drawWorkers() {
  const wanted = $("filter").value.trim().toLowerCase();
  const found = wanted === "" ? workers.slice()
    : workers.filter(one => one.name.toLowerCase().includes(wanted) || one.engine.toLowerCase().includes(wanted));
  const sign = order.down ? -1 : 1;
  found.sort((a, b) => order.by === "name" ? sign * a.name.localeCompare(b.name, "en", { numeric: true })
    : sign * (a[order.by] - b[order.by]) || (a.name < b.name ? -1 : 1));
  text($("shown"), found.length === workers.length ? `${found.length}` : `${found.length} of ${workers.length}`);
  const table = $("workers");
  table.setAttribute("aria-rowcount", found.length + 1);
  for (const head of table.tHead.rows[0].cells) {
    if (head.dataset.sort === order.by) head.setAttribute("aria-sort", order.down ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
  const view = $("workers-scroll");
  const first = Math.max(0, Math.min(Math.floor(view.scrollTop / ROW) - 4, found.length - 1));
  const shown = found.slice(first, first + Math.ceil(330 / ROW) + 8);
  const body = table.tBodies[0];
  if (body.rows.length === 0) {
    for (const kind of ["gap", "gap"]) {
      const gap = body.insertRow();
      gap.className = kind;
      gap.setAttribute("aria-hidden", "true");
      gap.insertCell().colSpan = 6;
    }
  }
  const [above, below] = [body.rows[0], body.rows[body.rows.length - 1]];
  above.cells[0].style.height = `${first * ROW}px`;
  below.cells[0].style.height = `${Math.max(0, found.length - first - shown.length) * ROW}px`;
  while (body.rows.length - 2 > shown.length) body.deleteRow(1);
  while (body.rows.length - 2 < shown.length) {
    const row = body.insertRow(1);
    for (let cell = 0; cell < 6; cell += 1) row.insertCell();
  }
  shown.forEach((worker, at) => {
    const row = body.rows[at + 1];
    row.dataset.worker = worker.name;
    row.setAttribute("aria-rowindex", first + at + 2);
    row.cells[0].title = worker.engine;
    const cells = [
      worker.name, `${number(worker.seen_seconds, 1)} s`, short(worker.rate), number(worker.samples),
      worker.staleness.toFixed(2), `${Math.round(worker.waiting * 100)} %`,
    ];
    cells.forEach((value, cell) => text(row.cells[cell], value));
  });
}
$("workers-scroll").addEventListener("scroll", () => requestFrame("workers"), { passive: true });
$("filter").addEventListener("input", () => requestFrame("workers"));
for (const head of $("workers").tHead.rows[0].cells) {
  head.firstElementChild.addEventListener("click", () => {
    const by = head.dataset.sort;
    order = { by, down: order.by === by ? !order.down : by !== "name" };
    requestFrame("workers");
  });
}

// ---- events

const says = {
  evaluated: event => `${event.split} of ${event.version}: loss ${event.loss.toFixed(4)}${event.accuracy === null ? "" : `, ${percent(event.accuracy)}`}`,
  joined: event => `${event.worker} joined`,
  fault: event => event.worker ? `${event.worker}: ${event.message}` : event.message,
  checkpoint: event => `checkpoint ${event.version}`,
  state: event => event.state.replaceAll("_", " ") + (event.reason ? `: ${event.reason}` : ""),
};

function addEvents(events) {
  const list = $("events");
  for (const event of events) {
    // One that is written again (the run was measured, or ended) is no news.
    if (event.event === "checkpoint" && list.dataset.checkpoint === event.version) continue;
    if (event.event === "checkpoint") list.dataset.checkpoint = event.version;
    const item = make("li");
    const time = make("time", new Date(event.time).toLocaleTimeString("en-GB"));
    time.dateTime = new Date(event.time).toISOString();
    const words = says[event.event] ? says[event.event](event) : event.event;
    item.append(time, make("span", words, event.event));
    list.prepend(item);
  }
  while (list.children.length > 100) list.lastElementChild.remove();
}

// ---- use and cost

const PRICES = { "price-hour": 0.04, "price-gb-second": 0, "price-gb": 0.09, memory: 0.25 };
const prices = { ...PRICES, ...JSON.parse(localStorage.getItem("skep.prices") || "{}") };
for (const name of Object.keys(PRICES)) {
  $(name).value = prices[name];
  $(name).addEventListener("input", () => {
    prices[name] = Math.max(0, Number($(name).value) || 0);
    localStorage.setItem("skep.prices", JSON.stringify(prices));
    requestFrame("cost");
  });
}

function drawCost() {
  if (!progress) return;
  const { worker_seconds, received_bytes, sent_bytes } = progress.usage;
  const memory = worker_seconds * prices.memory;
  const moved = (received_bytes + sent_bytes) / 1e9;
  const costs = [
    worker_seconds / 3600 * prices["price-hour"], memory * prices["price-gb-second"], moved * prices["price-gb"],
  ];
  const money = value => number(value, value !== 0 && value < 1 ? 5 : 2);
  text($("used-hours"), `${number(worker_seconds)} worker-seconds`);
  text($("used-gb-seconds"), `${number(memory)} GB-seconds`);
  text($("used-bytes"), `${number(received_bytes / 1e6, 1)} MB in, ${number(sent_bytes / 1e6, 1)} MB out`);
  ["cost-hour", "cost-gb-second", "cost-gb"].forEach((name, at) => text($(name), money(costs[at])));
  text($("cost-sum"), money(costs.reduce((sum, cost) => sum + cost, 0)));
}

text($("hive"), location.host);
pollRuns();
