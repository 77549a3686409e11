// The live page. Messages come a few times a second; everything is drawn by requestAnimationFrame,
// once per message at most. What workers made up (names, messages) only ever becomes text.

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

text($("hive"), location.host);
pollRuns();
