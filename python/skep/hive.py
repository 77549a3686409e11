"""A hive of one's own on this machine, for notebooks, examples and tests."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from .errors import Misuse, SkepError


class Hive:
    """Starts `skep hive` and stops it again:

        with skep.Hive(store="runs") as hive:
            run = skep.create(hive.url, …)

    The program is found as SKEP_BINARY or on the PATH. Without `store` everything is gone in the
    end.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | None = None,
        listen: str = "127.0.0.1:0",
        arguments: Sequence[str] = (),
        program: str | None = None,
    ) -> None:
        found = program or os.environ.get("SKEP_BINARY") or shutil.which("skep")
        if not found:
            raise Misuse(
                "the program `skep` is not here",
                "build it with `cargo build --release` and put it on the PATH, or set SKEP_BINARY",
            )
        self._folder = None if store else tempfile.TemporaryDirectory(prefix="skep-")
        self.store = Path(store if store else self._folder.name)  # type: ignore[union-attr]
        command = [found, "hive", "--listen", listen, "--store", str(self.store), *arguments]
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
        except OSError as error:
            if self._folder is not None:
                self._folder.cleanup()
            raise Misuse(f"cannot start {found}: {error}", "does SKEP_BINARY name it?") from error
        self._lines: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ready.wait(60)
        if not self.url:
            self.close()
            raise SkepError("the hive did not start:\n" + "\n".join(self._lines))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            del self._lines[:-1000]
            found = re.search(r"hive at (https?://[^\s,]+)", line)
            if found and not self.url:
                self.url = found.group(1)
                self._ready.set()
        self._ready.set()

    @property
    def log(self) -> str:
        """What it has said."""
        return "\n".join(self._lines)

    def close(self) -> None:
        """Stops it as SIGTERM does: it writes a last checkpoint."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5)
        if self.process.stderr is not None:
            self.process.stderr.close()
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Hive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
