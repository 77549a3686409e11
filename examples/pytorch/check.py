"""Runs the examples and checks the scores that they state. Takes two minutes on two cores.

    SKEP_BINARY=target/debug/skep python examples/pytorch/check.py

The notebook is left out where `nbclient` is not installed.
"""

import argparse
import importlib.util
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile

import skep

HERE = pathlib.Path(__file__).resolve().parent
# The examples run in another folder, where relative paths would lead nowhere.
for variable in ("SKEP_BINARY", "PYTHONPATH"):
    if variable in os.environ:
        os.environ[variable] = os.path.abspath(os.environ[variable])


class Example:
    """One of the scripts, at work in a folder of its own."""

    def __init__(self, folder, script, *arguments, **environment):
        self.script = script
        self.process = subprocess.Popen(
            [sys.executable, HERE / script, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **environment},
        )

    def accuracy(self, least):
        """The score that it printed, which must be `least` or more."""
        said = self.process.communicate()[0]
        found = re.search(r"test accuracy ([\d.]+) %", said)
        if self.process.returncode != 0 or found is None or float(found[1]) < least:
            sys.exit(f"error: {self.script} ended with {self.process.returncode}:\n{said}")
        print(f"{self.script}: {found[1]} %, {least} % or more was expected", flush=True)
        return float(found[1])


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def check(folder):
    Example(folder, "own_model.py").accuracy(98)
    Example(folder, "fine_tune.py", "--make-init", "trunk.pth").process.communicate()
    Example(folder, "fine_tune.py", "--init", "trunk.pth").accuracy(94)
    with skep.Hive(arguments=["mnist"]) as hive:
        rust = [hive.process.args[0], "--log", "error", "worker", "--hive", hive.url]
        worker = subprocess.Popen(rust)
        Example(folder, "lenet_mixed.py", "--hive", hive.url).accuracy(98)
        worker.wait()
    with skep.Hive(store=folder / "store") as hive:
        pair = [Example(folder, "skep_worker.py", "--hive", hive.url) for _ in range(2)]
        scores = {worker.accuracy(98) for worker in pair}
    model = folder / "store/runs/digits/model.safetensors"
    scores.add(Example(folder, "load_result.py", model).accuracy(98))
    if len(scores) != 1:
        sys.exit(f"error: the run and plain PyTorch disagree: {scores}")
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    ranks = [Example(folder, "ddp.py", **group, RANK=rank) for rank in "01"]
    ranks[0].accuracy(98)
    ranks[1].process.communicate()
    if importlib.util.find_spec("nbclient") is None:
        print("notebook.ipynb: skipped, nbclient is not installed")
    else:
        run_notebook()


def run_notebook():
    """Fails where a cell does."""
    import nbclient
    import nbformat

    notebook = nbformat.read(HERE / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": HERE}}).execute()
    print("notebook.ipynb: ran to its end")


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        check(pathlib.Path(folder))


if __name__ == "__main__":
    main()
