#!/usr/bin/env python3
"""What the exchanges cost and bring: accuracy, and bytes moved per sample.

For each exchange, number of workers, split of the data and seed: a hive and its workers as processes of
their own on the built-in digits, then the run's test accuracy and the hive's own byte counts. Workers share
one batch of 64: with 2 workers each has 32 of it, with 8 each has 8. What is measured is kept in a file, so
that an interrupted table goes on where it was.

    python3 scripts/exchange_table.py --skep target/release/skep --epochs 10 --seeds 3
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import tempfile
import time
import urllib.request


# Samples per version of the gradients exchange, whatever the number of workers.
BATCH = 64


def exchanges(workers: int, local: int) -> dict[str, str]:
    """The flags of each exchange. DiLoCo trains on a whole shard between two exchanges. The task's
    rate is for a batch of 32. With a smaller one it is lower: by the square root for short local training,
    whose momentum starts afresh each time, in proportion for long."""
    share = round(BATCH / workers) / 32
    short = "" if share == 1 else f" --rate {0.03 * share ** 0.5:.3f}"
    long = "" if share == 1 else f" --rate {0.03 * share:.4f}"
    return {
        "gradients, sync": f"--policy sync:{workers}",
        "average per round": f"--policy average:{workers} --every {local}{short}",
        "DiLoCo": f"--policy average:{workers} --outer nesterov --every 1000000{long}",
        "one-shot average": f"--policy average:once{long}",
    }


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read()


def counter(metrics: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}{{[^}}]*}} (\S+)$", metrics, re.M))


def train(skep: str, flags: str, workers: int) -> tuple[float, float, float]:
    """Accuracy, bytes per sample used, seconds."""
    with tempfile.TemporaryDirectory() as folder:
        log = open(pathlib.Path(folder) / "hive.log", "w+")
        hive = subprocess.Popen(
            [skep, "hive", "mnist", "--name", "run", "--listen", "127.0.0.1:0", "--store", folder]
            + flags.split(),
            stderr=log,
            stdout=log,
        )
        fleet = []
        try:
            deadline = time.time() + 120
            while not (found := re.search(r"hive at (http://[^\s,]+)", pathlib.Path(log.name).read_text())):
                if hive.poll() is not None or time.time() > deadline:
                    raise SystemExit(f"the hive did not start: {pathlib.Path(log.name).read_text()}")
                time.sleep(0.1)
            url = found.group(1)
            quiet = subprocess.DEVNULL
            fleet = [
                subprocess.Popen([skep, "worker", "--hive", url], stderr=quiet, stdout=quiet)
                for _ in range(workers)
            ]
            while True:
                view = json.loads(get(f"{url}/v1/runs/run"))
                if view["state"] in ("done", "failed", "stopped", "done_with_gaps") and view["model"]:
                    break
                time.sleep(0.2)
            metrics = get(f"{url}/metrics").decode()
            for worker in fleet:
                worker.wait(30)
        finally:
            for process in [*fleet, hive]:
                if process.poll() is None:
                    process.terminate()
                    process.wait(30)
    once = view["job"]["policy"].get("rounds") == "once"
    samples = view["samples"] * (view["job"]["run"]["epochs"] if once else 1)
    # Contributions and parameters; shards are sent whatever the exchange.
    moved = counter(metrics, "skep_received_bytes_total") + counter(metrics, "skep_sent_bytes_total")
    moved -= counter(metrics, "skep_sent_shard_bytes_total")
    return view["test"]["accuracy"], moved / samples, view["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--skep", default="target/release/skep")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 5, 8])
    parser.add_argument("--splits", nargs="+", default=["shuffled", "label"])
    parser.add_argument("--local", type=int, default=64, help="local steps per model of `average per round`")
    parser.add_argument("--kept", default="exchange_table.json", help="where measurements are kept")
    arguments = parser.parse_args()
    epochs = arguments.epochs
    kept = pathlib.Path(arguments.kept)
    known = json.loads(kept.read_text()) if kept.exists() else {}

    def measure(flags: str, workers: int) -> tuple[float, float, float]:
        if flags not in known:
            known[flags] = train(arguments.skep, flags, workers)
            kept.write_text(json.dumps(known, indent=1))
        return known[flags]

    def mean(flags: str, workers: int) -> tuple[float, float, float]:
        batch = round(BATCH / workers)
        runs = [
            measure(f"{flags} --batch {batch} --epochs {epochs} --seed {seed}", workers)
            for seed in range(arguments.seeds)
        ]
        spread = max(run[0] for run in runs) - min(run[0] for run in runs)
        return statistics.mean(run[0] for run in runs), spread, statistics.mean(run[1] for run in runs)

    alone, spread, moved = mean("--policy sync:1", 1)
    print(f"one process: {alone:.2%} ({spread * 100:.2f} points between seeds), {moved:,.0f} bytes per sample, "
          f"{epochs} epochs, {arguments.seeds} seeds\n")
    print("| exchange | workers | split | test accuracy | between seeds | bytes per sample | fewer than gradients |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for split in arguments.splits:
        for workers in arguments.workers:
            gradients = None
            for name, flags in exchanges(workers, arguments.local).items():
                cut = f"--set data.split={split} --set data.shards={workers}"
                accuracy, spread, moved = mean(f"{flags} {cut}", workers)
                gradients = gradients or moved
                print(f"| {name} | {workers} | {split} | {accuracy:.2%} | {spread * 100:.2f} | {moved:,.0f} "
                      f"| {gradients / moved:,.0f}x |", flush=True)


if __name__ == "__main__":
    main()
