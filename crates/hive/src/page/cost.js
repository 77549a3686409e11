// What a run has used, and what that costs at the reader's prices.

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
