// The latest events and faults.

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
