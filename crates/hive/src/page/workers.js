// The table of workers. Only the rows in view are in the document: there may be hundreds.

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
