"""Reads a run's `metrics/` folder with the real TensorBoard and Python's csv, and compares the two.

    python3 scripts/check_metrics.py skep-runs/runs/mnist/metrics
"""

import csv
import math
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def main(folder: Path) -> None:
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    points = [row for row in rows if row["versions"]]
    number = lambda row: int(row["version"].split(".")[1])  # noqa: E731
    numbers = [number(row) for row in points]
    assert numbers == sorted(set(numbers)), "versions in metrics.csv go back"
    assert all(math.isfinite(float(row["loss"])) for row in points)

    # 0: every event, no sampling.
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    for tag in tags:
        steps = [event.step for event in events.Scalars(tag)]
        assert steps == sorted(set(steps)), f"steps of {tag} go back or repeat"
    loss = events.Scalars("loss/train")
    assert loss[-1].step == numbers[-1], (loss[-1], numbers[-1])
    assert loss[0].value > loss[-1].value > 0, (loss[0], loss[-1])
    for split in ["validation", "test"]:
        in_csv = {number(row): float(row[f"{split}_accuracy"]) for row in rows if row[f"{split}_accuracy"]}
        in_events = {event.step: event.value for event in events.Scalars(f"accuracy/{split}")}
        assert in_csv.keys() == in_events.keys(), (split, in_csv, in_events)
        assert all(abs(in_csv[step] - in_events[step]) < 1e-6 for step in in_csv), split
    files = len(list(folder.glob("*tfevents*")))
    print(
        f"{files} event files with {len(tags)} scalars, {len(loss)} points of loss; "
        f"{len(rows)} lines of CSV; last version {numbers[-1]}"
    )


main(Path(sys.argv[1]))
