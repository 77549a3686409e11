"""Keeps a lease alive while the model computes."""

from __future__ import annotations

import logging
import threading

from .client import Client, run_path
from .errors import Refused, SkepError

log = logging.getLogger("skep")


class Heartbeat:
    """A thread that renews the lease that is held, and learns when it is lost."""

    def __init__(self, client: Client, run: str) -> None:
        self._client = client.another(patience=0.0)
        self._run = run
        self._changed = threading.Condition()
        self._lease: str | None = None
        self._every = 1.0
        self._lost: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._beat, name="skep heartbeat", daemon=True)
        self._thread.start()

    def hold(self, lease: str, every: float) -> None:
        """Begins with a lease."""
        with self._changed:
            self._lease, self._every, self._lost = lease, min(max(every, 0.05), 600.0), None
            self._changed.notify()

    def release(self) -> None:
        """Leaves the lease alone."""
        with self._changed:
            self._lease = None
            self._changed.notify()

    def is_lost(self) -> bool:
        """Whether the hive has said that the lease is no more."""
        with self._changed:
            return self._lost is not None and self._lost == self._lease

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._client.close()

    def _beat(self) -> None:
        while True:
            with self._changed:
                held = self._lease
                self._changed.wait(self._every if held else None)
                if self._closed:
                    return
                if held is None or held != self._lease:
                    continue
            try:
                path = run_path(self._run, f"/leases/{held}")
                self._client.once("PUT", path, deadline=10.0)
            except Refused as refused:
                if refused.code not in ("busy", "closing", "too_slow", "internal"):
                    with self._changed:
                        self._lost = held
            except SkepError as error:
                log.debug("heartbeat: %s", error.message)
            except Exception as error:  # the pool may be closed under us at exit
                log.debug("heartbeat: %s", error)
