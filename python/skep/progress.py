"""The progress of a run, as people like to see it: a line in a terminal, a bar in a notebook."""

from __future__ import annotations

import html
import logging
import shutil
import sys
import threading
from typing import Any, TextIO

from .client import Client, run_path
from .errors import SkepError

log = logging.getLogger("skep")


def line_of(view: dict[str, Any]) -> str:
    """A run in one line, in the words of `skep train`."""
    parts = [_epoch(view), f"{view['rate']:,.0f} samples/s"]
    if view["loss"] is not None:
        parts.append(f"loss {view['loss']:.4f}")
    validation = view["validation"]
    if validation and validation["accuracy"] is not None:
        parts.append(f"validation {100 * validation['accuracy']:.2f} %")
    parts.append(f"version {view['version']}")
    workers = len(view["workers"])
    parts.append(f"{workers} worker{'' if workers == 1 else 's'}")
    if view["seconds_left"] is not None and view["state"] == "running":
        parts.append(f"{duration(view['seconds_left'])} left")
    return "  ".join(parts)


def end_of(view: dict[str, Any]) -> list[str]:
    """What there is to say when a run has ended."""
    state = view["state"].replace("_", " ")
    reason = f": {view['reason']}" if view["reason"] else ""
    verb = "has" if state == "failed" else "is"
    lines = [f"run {view['name']} {verb} {state}{reason}"]
    test = view["test"]
    if test:
        accuracy = test["accuracy"]
        right = "" if accuracy is None else f"accuracy {100 * accuracy:.2f} %, "
        lines.append(f"test: {right}loss {test['loss']:.4f} on {test['samples']:,} samples")
    lines.append(
        f"elapsed time {duration(view['seconds'])} ({view['samples']:,} samples, "
        f"version {view['version']})"
    )
    if view["model"]:
        lines.append(f"model {view['model']}")
    return lines


def duration(seconds: float) -> str:
    """`3 min 20 s`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def share(view: dict[str, Any]) -> float | None:
    """How much of a run is done, from 0 to 1; None where it has no end."""
    version = int(view["version"].split(".")[1])
    if view["steps"]:
        return min(version / int(view["steps"]), 1.0)
    if view["epochs"] and view["epoch_positions"]:
        return min(int(view["samples"]) / (int(view["epochs"]) * int(view["epoch_positions"])), 1.0)
    return None


def _epoch(view: dict[str, Any]) -> str:
    if view["steps"]:
        return f"step {view['version'].split('.')[1]}/{view['steps']}"
    if view["epochs"]:
        return f"epoch {min(view['epoch'] + 1, view['epochs'])}/{view['epochs']}"
    return f"epoch {view['epoch'] + 1}"


class Progress:
    """Shows nothing; the base of those that do."""

    def say(self, reason: str) -> None:
        """What the worker waits for."""

    def close(self) -> None:
        """The worker has ended."""


class _Watching(Progress):
    """Asks the hive for the run again and again, in a thread of its own, and shows it."""

    every = 1.0

    def __init__(self, client: Client, run: str) -> None:
        self._client = client.another(patience=0.0)
        self._path = run_path(run)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="skep progress", daemon=True)
        self._thread.start()

    def show(self, view: dict[str, Any]) -> None:
        raise NotImplementedError

    def finish(self, view: dict[str, Any] | None) -> None:
        raise NotImplementedError

    def _ask(self) -> dict[str, Any] | None:
        try:
            view: dict[str, Any] = self._client.once("GET", self._path, deadline=5.0).json()
            return view
        except (SkepError, OSError) as error:
            log.debug("progress: %s", error)
            return None

    def _watch(self) -> None:
        while not self._ended.wait(self.every):
            view = self._ask()
            if view is not None and not self._ended.is_set():
                self.show(view)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(timeout=6.0)
        self.finish(self._ask())
        self._client.close()


class Lines(_Watching):
    """Plain lines, every five seconds: for logs."""

    every = 5.0

    def __init__(self, client: Client, run: str, out: TextIO) -> None:
        self._out = out
        super().__init__(client, run)

    def show(self, view: dict[str, Any]) -> None:
        print(line_of(view), file=self._out, flush=True)

    def finish(self, view: dict[str, Any] | None) -> None:
        if view is not None:
            print("\n".join(end_of(view)), file=self._out, flush=True)


class TerminalLine(_Watching):
    """One line that is written over."""

    every = 0.25

    def __init__(self, client: Client, run: str, out: TextIO) -> None:
        self._out = out
        super().__init__(client, run)

    def show(self, view: dict[str, Any]) -> None:
        columns = shutil.get_terminal_size().columns
        done = share(view)
        bar = ""
        if done is not None and columns >= 100:
            filled = int(20 * done)
            bar = "█" * filled + "░" * (20 - filled) + "  "
        self._out.write(f"\r\x1b[K{(bar + line_of(view))[: columns - 1]}")
        self._out.flush()

    def finish(self, view: dict[str, Any] | None) -> None:
        self._out.write("\r\x1b[K")
        if view is not None:
            self._out.write("\n".join(end_of(view)) + "\n")
        self._out.flush()


class NotebookBar(_Watching):
    """A bar with the curve of the loss under it, in the output of a notebook's cell."""

    every = 0.5

    def __init__(self, client: Client, run: str) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._losses: list[float] = []
        self._handle = display(HTML("<em>waiting for the hive…</em>"), display_id=True)
        super().__init__(client, run)

    def show(self, view: dict[str, Any]) -> None:
        self._handle.update(self._html(self._render(view, [line_of(view)])))

    def finish(self, view: dict[str, Any] | None) -> None:
        if view is not None:
            self._handle.update(self._html(self._render(view, end_of(view))))

    def _render(self, view: dict[str, Any], lines: list[str]) -> str:
        if view["loss"] is not None:
            self._losses.append(view["loss"])
        done = share(view)
        percent = 100.0 if done is None else 100.0 * done
        text = "<br>".join(html.escape(line) for line in lines)
        return (
            '<div style="font-family:sans-serif;font-size:13px;max-width:640px">'
            f'<div style="font-weight:600;margin-bottom:4px">{html.escape(view["name"])}</div>'
            '<div role="progressbar" aria-valuemin="0" aria-valuemax="100" '
            f'aria-valuenow="{percent:.0f}" style="height:8px;border-radius:4px;'
            'background:rgba(128,128,128,.25);overflow:hidden">'
            f'<div style="height:8px;width:{percent:.1f}%;background:#d99a00"></div></div>'
            f"{curve(self._losses)}"
            '<div style="margin-top:4px;font-variant-numeric:tabular-nums;white-space:pre-wrap">'
            f"{text}</div></div>"
        )


def curve(losses: list[float]) -> str:
    """The loss as a small picture."""
    if len(losses) < 2:
        return ""
    width, height = 640, 60
    stride = max(1, len(losses) // 200)
    points = losses[::stride]
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    across = (len(points) - 1) or 1
    path = " ".join(
        f"{width * at / across:.1f},{2 + (height - 4) * (high - loss) / span:.1f}"
        for at, loss in enumerate(points)
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" style="width:100%;height:{height}px;margin-top:6px" '
        f'role="img" aria-label="training loss from {losses[0]:.4f} to {losses[-1]:.4f}">'
        f'<polyline points="{path}" fill="none" stroke="#3b82c4" stroke-width="2"/></svg>'
    )


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    if shell is None:
        return False
    instance = shell.get_ipython()
    return instance is not None and hasattr(instance, "kernel")


def progress_for(wanted: bool | None, client: Client, run: str) -> Progress:
    """The display that fits where this runs."""
    if wanted is False:
        return Progress()
    if _in_notebook():
        return NotebookBar(client, run)
    if sys.stderr.isatty():
        return TerminalLine(client, run, sys.stderr)
    return Lines(client, run, sys.stderr) if wanted else Progress()
