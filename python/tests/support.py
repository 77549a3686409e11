"""What the tests share: a real hive, and other Python processes as workers."""

import os
import shutil
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

import skep

HERE = Path(__file__).resolve().parent

try:
    import torch
except ImportError:
    torch = None


def missing(what):
    """Under CI nothing is skipped: a test that lacks its real part fails."""
    if os.environ.get("CI"):
        raise AssertionError(f"{what} is missing, and under CI nothing is skipped")
    return True


def needs_hive(test):
    there = os.environ.get("SKEP_BINARY") or shutil.which("skep")
    if not there and missing("the program skep (SKEP_BINARY)"):
        return unittest.skip("no skep program: set SKEP_BINARY")(test)
    return test


def needs_torch(test):
    if torch is None and missing("torch"):
        return unittest.skip("no torch")(test)
    return test


def until(what, ask, seconds=60.0):
    """Asks until the answer is true."""
    start = time.monotonic()
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() - start > seconds:
            raise AssertionError(f"gave up waiting for {what}")
        time.sleep(0.02)


class Worker:
    """A worker in a process of its own: `python -m tests.workers NAME URL ARGUMENTS`."""

    def __init__(self, name, url, *arguments, **environment):
        command = [sys.executable, "-m", "tests.workers", name, url, *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            cwd=HERE.parent,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A shell that started the tests in the background has made them ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def end(self, seconds=90.0):
        """Waits for its end; gives the exit code and what it said."""
        said, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, said

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


class WithHive(unittest.TestCase):
    """Tests on a hive of their own."""

    def hive(self, **settings):
        hive = skep.Hive(**settings)
        self.addCleanup(hive.close)
        return hive

    def worker(self, name, url, *arguments, **environment):
        worker = Worker(name, url, *arguments, **environment)
        self.addCleanup(worker.close)
        return worker
