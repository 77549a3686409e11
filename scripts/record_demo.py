#!/usr/bin/env python3
"""Records `skep demo chaos` as it is: the terminal, and the page that follows the run.

    record_demo.py SKEP OUT.gif [--seconds N] [--frames FOLDER] [--svg FOLDER]

Runs the real command in a pseudo-terminal, opens the page it names in headless Chromium, draws
digits on it, and makes an animated picture of both, several times as fast. Nothing is staged: if
the demonstration fails, so does this. Needs chromium, chromium-driver and Pillow.
"""

import argparse
import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time

from PIL import Image

from try_page import DIGITS, Browser

COLUMNS, ROWS = 84, 34
CELL = (8.43, 17.2)
COLOURS = {"31": "#ff7b72", "32": "#56d364", "33": "#ffb454", "36": "#6cb6ff"}
PAGE = (400, 690)
STAGE = (1140, 640)
SPEED = 4.0
FRAMES_PER_SECOND = 4.0

# The terminal is drawn character by character on a grid, Braille as terminals do it: dots of its own.
PAINT = """
const [lines, width, height] = arguments;
const canvas = document.querySelector('canvas');
const pen = canvas.getContext('2d');
pen.setTransform(2, 0, 0, 2, 0, 0);
pen.clearRect(0, 0, canvas.width, canvas.height);
pen.textBaseline = 'middle';
lines.forEach((line, row) => {
  let column = 0;
  for (const [text, colour, bold, dim] of line) {
    pen.fillStyle = colour || '#e6edf3';
    pen.globalAlpha = dim ? 0.55 : 1;
    pen.font = `${bold ? 600 : 400} 14px "DejaVu Sans Mono", monospace`;
    for (const character of text) {
      const dots = character.codePointAt(0) - 0x2800;
      const [x, y] = [column * width, row * height];
      if (dots > 0 && dots < 256) {
        [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [0, 3], [1, 3]].forEach(([i, j], bit) => {
          if (dots >> bit & 1) pen.fillRect(x + i * width / 2, y + j * height / 4, width / 2, height / 4);
        });
      } else if (character === '─' || character === '│') {
        pen.fillText(character, x, y + height / 2, width * 1.1);
      } else {
        pen.fillText(character, x, y + height / 2);
      }
      column += 1;
    }
  }
});
"""

CSS = """
body { margin: 0; background: #0d1117; overflow: hidden; }
#stage { display: flex; gap: 16px; padding: 16px; }
canvas, img { height: 608px; border-radius: 8px; border: 1px solid #30363d; box-sizing: border-box; }
canvas { width: 740px; padding: 10px 12px; }
"""


class Terminal:
    """As much of a terminal as the demonstration uses."""

    def __init__(self) -> None:
        self.lines: list = [[]]
        self.row = 0
        self.column = 0
        self.style: tuple = ()
        self.rest = ""

    def feed(self, text: str) -> None:
        text = self.rest + text
        self.rest = ""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = re.match(r"\x1b\[([0-9;?]*)([A-Za-z])", text[at:])
                if not found:
                    self.rest = text[at:]
                    return
                self.command(*found.groups())
                at += found.end()
                continue
            self.put(text[at])
            at += 1

    def put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.row, self.column = self.row + 1, 0
            while len(self.lines) <= self.row:
                self.lines.append([])
        else:
            line = self.lines[self.row]
            line.extend([(" ", ())] * (self.column + 1 - len(line)))
            line[self.column] = (character, self.style)
            self.column += 1

    def command(self, numbers: str, letter: str) -> None:
        if letter == "m":
            parts = numbers.split(";") if numbers else ["0"]
            for part in parts:
                self.style = () if part == "0" else (*self.style, part)
        elif letter == "A":
            self.row = max(0, self.row - int(numbers or 1))
        elif letter == "K":
            del self.lines[self.row][self.column :]
        elif letter == "J":
            del self.lines[self.row][self.column :]
            del self.lines[self.row + 1 :]

    def view(self) -> list:
        """The last lines, each as stretches of one style."""
        lines = []
        for line in self.lines[-ROWS:]:
            stretches: list = []
            for character, style in line:
                if stretches and stretches[-1][1] == style:
                    stretches[-1][0] += character
                else:
                    stretches.append([character, style])
            lines.append(stretches)
        return lines


class Demo(threading.Thread):
    """The command, in a terminal of its own."""

    def __init__(self, command: list, folder: str | None) -> None:
        super().__init__(daemon=True)
        self.terminal = Terminal()
        self.lock = threading.Lock()
        self.main, secondary = pty.openpty()
        fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environment = dict(os.environ, TERM="xterm-256color", CLICOLOR_FORCE="1")
        self.process = subprocess.Popen(
            command, stdin=secondary, stdout=secondary, stderr=secondary, env=environment, cwd=folder
        )
        os.close(secondary)
        self.start()

    def run(self) -> None:
        waiting = b""
        while True:
            try:
                if not select.select([self.main], [], [], 0.1)[0]:
                    continue
                read = os.read(self.main, 65536)
            except OSError:
                return
            if not read:
                return
            waiting += read
            text = waiting.decode(errors="ignore")
            try:
                waiting.decode()
                waiting = b""
            except UnicodeDecodeError as error:
                text, waiting = waiting[: error.start].decode(), waiting[error.start :]
            with self.lock:
                self.terminal.feed(text)

    def view(self) -> list:
        with self.lock:
            return self.terminal.view()

    def text(self) -> str:
        return "\n".join("".join(text for text, _ in line) for line in self.view())


def draw_on(page: Browser, url: str, shots: list, over: threading.Event) -> None:
    """Draws one digit after the other and takes pictures of the page."""
    page.size(*PAGE)
    page.scheme("dark")
    page.open(url)
    page.until("the page", lambda: page.run("return !document.querySelector('#draw').hidden"))
    digits = iter("3725849160" * 20)
    while not over.is_set():
        digit = next(digits)
        for part in (0.5, 1.0):
            page.run("document.querySelector('#clear').click()")
            page.draw(DIGITS[digit], part=part)
            page.run("scrollTo(0, 0)")
            until = time.monotonic() + (0.2 if part < 1 else 2.2)
            while time.monotonic() < until and not over.is_set():
                shots.append((time.monotonic(), page.call("GET", "/screenshot")))
                time.sleep(0.35)


def record(options: argparse.Namespace) -> tuple:
    command = [os.path.abspath(options.skep), "demo", "chaos", "--seconds", str(options.seconds)]
    if options.svg:
        os.makedirs(options.svg, exist_ok=True)
        command += ["--save", "."]
    page = Browser()
    demo = Demo(command, options.svg)
    frames, shots, over, drawer = [], [], threading.Event(), None
    try:
        while demo.process.poll() is None:
            frames.append((time.monotonic(), demo.view()))
            found = re.search(r"page (http://\S+)", demo.text())
            if found and drawer is None:
                arguments = (page, found.group(1), shots, over)
                drawer = threading.Thread(target=draw_on, args=arguments, daemon=True)
                drawer.start()
            if "elapsed time" in demo.text() or "lost           " in demo.text():
                over.set()
            time.sleep(0.1)
        time.sleep(0.5)
        frames.append((time.monotonic(), demo.view()))
        over.set()
        if drawer:
            drawer.join(timeout=10)
    finally:
        page.close()
    if demo.process.returncode != 0:
        raise SystemExit(f"the demonstration failed:\n{demo.text()}")
    return frames, shots


def look(style: tuple) -> list:
    colour = next((COLOURS[part] for part in style if part in COLOURS), None)
    return [colour, "1" in style, "2" in style]


def compose(frames: list, shots: list, folder: str) -> list:
    """Terminal and page side by side, as they were at the same moment."""
    stage = Browser()
    paths = []
    try:
        stage.size(*STAGE)
        file = os.path.join(folder, "stage.html")
        with open(file, "w") as out:
            canvas = "<canvas width=1432 height=1172></canvas>"
            out.write(f"<style>{CSS}</style><div id=stage>{canvas}<img></div>")
        stage.open(f"file://{file}")
        begin, end = frames[0][0], frames[-1][0]
        count = int((end - begin) / SPEED * FRAMES_PER_SECOND)
        moments = [begin + (at + 1) * (end - begin) / count for at in range(count)]
        for at, moment in enumerate(moments):
            view = [view for when, view in frames if when <= moment][-1]
            lines = [[[text, *look(style)] for text, style in line] for line in view]
            shown = [shot for when, shot in shots if when <= moment]
            source = f"data:image/png;base64,{shown[-1]}" if shown else ""
            stage.run(PAINT, lines, *CELL)
            stage.run(
                "const i = document.querySelector('img');"
                "i.style.visibility = arguments[0] ? 'visible' : 'hidden';"
                "if (arguments[0]) { i.src = arguments[0]; return i.decode(); }",
                source,
            )
            path = os.path.join(folder, f"{at:04}.png")
            stage.screenshot(path)
            paths.append(path)
    finally:
        stage.close()
    return paths


def animate(paths: list, out: str) -> None:
    """One palette for all pictures, so that what does not change costs nothing."""
    pictures = [Image.open(path).convert("RGB") for path in paths]
    sample = Image.new("RGB", (pictures[0].width, pictures[0].height * 3))
    for at, share in enumerate((0.2, 0.6, 1.0)):
        picture = pictures[min(len(pictures) - 1, int(share * (len(pictures) - 1)))]
        sample.paste(picture, (0, at * picture.height))
    # The terminal's colours are few dots among many, and must be there all the same.
    common = sample.quantize(56, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    own = [int(colour[at : at + 2], 16) for colour in COLOURS.values() for at in (1, 3, 5)]
    palette = Image.new("P", (1, 1))
    palette.putpalette((common.getpalette() or [])[: 56 * 3] + own)
    small = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    each = int(1000 / FRAMES_PER_SECOND)
    durations = [each] * (len(small) - 1) + [5000]
    buffer = io.BytesIO()
    small[0].save(
        buffer, "GIF", save_all=True, append_images=small[1:], duration=durations, loop=0,
        optimize=False, disposal=1,
    )
    with open(out, "wb") as file:
        file.write(buffer.getvalue())
    print(f"{out}: {len(small)} pictures, {len(buffer.getvalue()) / 1e6:.2f} MB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("skep", help="the program")
    parser.add_argument("out", help="the picture")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--frames", help="a folder in which single pictures are kept")
    parser.add_argument("--svg", help="a folder for chaos.svg")
    options = parser.parse_args()
    frames, shots = record(options)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.frames or temporary
        os.makedirs(folder, exist_ok=True)
        animate(compose(frames, shots, folder), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
