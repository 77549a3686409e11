"""SIGTERM and SIGINT while a worker is at work."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from .errors import Terminated


class CallOff:
    """Notices that the process should go.

    SIGTERM is only noted: the worker finishes the step it is in, pushes it or gives it back, and
    then ends with `Terminated`. A second one ends the process at once. A handler that the script
    has set itself is left alone. SIGINT still raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.terminated = False
        self.interrupted = False
        self._former: dict[int, Any] = {}

    def watch(self) -> None:
        if threading.current_thread() is not threading.main_thread() or self._former:
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._former[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._terminate)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._former[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)

    def leave(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._former.items():
                signal.signal(number, handler)
            self._former = {}

    def check(self) -> None:
        """Raises if the process should go."""
        if self.terminated:
            raise Terminated

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        signal.default_int_handler(number, frame)
