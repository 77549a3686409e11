"""What people see."""

import io
import sys
import types
import unittest
from unittest import mock

from skep import progress

from .support import WithHive, needs_hive
from .test_run import gradient, numbers, unit_run

VIEW = {
    "name": "digits",
    "state": "running",
    "reason": "",
    "version": "1.304",
    "epoch": 1,
    "epochs": 4,
    "steps": None,
    "epoch_positions": 1000,
    "samples": 1500,
    "rate": 8123.4,
    "loss": 0.12345,
    "validation": {"accuracy": 0.9731},
    "workers": [1, 2],
    "seconds": 75.0,
    "seconds_left": 200.0,
    "test": None,
    "model": None,
}


class Lines(unittest.TestCase):
    def test_a_line_has_the_words_of_the_program(self):
        self.assertEqual(
            progress.line_of(VIEW),
            "epoch 2/4  8,123 samples/s  loss 0.1235  validation 97.31 %  version 1.304  "
            "2 workers  3 min 20 s left",
        )
        young = {**VIEW, "loss": None, "validation": None, "seconds_left": None, "workers": [1]}
        self.assertEqual(
            progress.line_of(young), "epoch 2/4  8,123 samples/s  version 1.304  1 worker"
        )
        self.assertIn("step 304/400", progress.line_of({**VIEW, "steps": 400}))
        self.assertIn("epoch 2  ", progress.line_of({**VIEW, "epochs": None}))

    def test_an_end(self):
        test = {"accuracy": 0.98, "loss": 0.05, "samples": 2000}
        ended = {**VIEW, "state": "done_with_gaps", "reason": "3 skipped", "test": test}
        lines = progress.end_of({**ended, "model": "/m"})
        self.assertEqual(lines[0], "run digits is done with gaps: 3 skipped")
        self.assertEqual(lines[1], "test: accuracy 98.00 %, loss 0.0500 on 2,000 samples")
        self.assertEqual(lines[2], "elapsed time 1 min 15 s (1,500 samples, version 1.304)")
        self.assertEqual(lines[3], "model /m")

    def test_how_much_is_done(self):
        self.assertEqual(progress.share(VIEW), 0.375)
        self.assertEqual(progress.share({**VIEW, "steps": 608}), 0.5)
        self.assertIsNone(progress.share({**VIEW, "epochs": None}))

    def test_durations(self):
        for seconds, text in ((0.4, "0.4 s"), (59, "59 s"), (61, "1 min 1 s"), (7300, "2 h 1 min")):
            self.assertEqual(progress.duration(seconds), text)

    def test_a_curve_stays_in_its_picture(self):
        drawn = progress.curve([2.0, 1.0, 0.5, 0.25])
        self.assertIn("from 2.0000 to 0.2500", drawn)
        self.assertEqual(progress.curve([1.0]), "")
        self.assertLess(len(progress.curve([1.0 / (i + 1) for i in range(100_000)])), 20_000)


@needs_hive
class Displays(WithHive):
    def work(self, wanted):
        run = unit_run(self.hive().url)
        for batch in run.batches(numbers(), progress=wanted):
            run.step(gradient(batch), 1.0)

    def test_plain_lines_have_no_control_codes(self):
        out = io.StringIO()
        with mock.patch.object(sys, "stderr", out):
            self.work(True)
        self.assertIn("run unit is done\nelapsed time", out.getvalue())
        self.assertNotIn("\x1b", out.getvalue())
        self.assertNotIn("\r", out.getvalue())

    def test_nothing_is_written_unless_someone_looks(self):
        out = io.StringIO()
        with mock.patch.object(sys, "stderr", out):
            self.work(None)
        self.assertEqual(out.getvalue(), "")

    def test_a_terminal_gets_a_line_that_is_written_over(self):
        out = io.StringIO()
        out.isatty = lambda: True
        with mock.patch.object(sys, "stderr", out):
            self.work(None)
        self.assertIn("\r\x1b[K", out.getvalue())
        self.assertIn("run unit is done\n", out.getvalue())

    def test_a_notebook_gets_a_bar(self):
        shown = []
        handle = types.SimpleNamespace(update=lambda page: shown.append(page))
        display = types.ModuleType("IPython.display")
        display.HTML = lambda text: text
        display.display = lambda page, display_id: handle
        notebook = types.ModuleType("IPython")
        notebook.get_ipython = lambda: types.SimpleNamespace(kernel=object())
        with mock.patch.dict(sys.modules, {"IPython": notebook, "IPython.display": display}):
            self.work(None)
        self.assertIn('role="progressbar"', shown[-1])
        self.assertIn("run unit is done", shown[-1])


if __name__ == "__main__":
    unittest.main()
