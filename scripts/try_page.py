#!/usr/bin/env python3
"""Uses the page of `skep serve` as people do, in headless Chromium.

    try_page.py draw URL [--picture FILE.png:ANSWER] [--screenshots FOLDER]
    try_page.py write URL [--praise WORD] [--blame WORD] [--review TEXT] [--screenshots FOLDER]
    try_page.py tensors URL [--screenshots FOLDER]

`draw` draws digits with mouse, finger and keyboard on the page of a model of digits, and gives it
pictures; `write` types a review on the page of a model of texts. Speaks WebDriver to chromedriver
with nothing but Python's own library. Exits with 0 if everything was as it should be.
"""

import argparse
import base64
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

PATIENCE = 60.0
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"

# Strokes in a square of side 1; drawn for this test, and not the ones that the page draws itself.
DIGITS = {
    "0": [[(0.5, 0.2), (0.36, 0.27), (0.29, 0.45), (0.31, 0.66), (0.42, 0.8), (0.56, 0.8),
           (0.68, 0.68), (0.72, 0.48), (0.66, 0.29), (0.5, 0.2)]],
    "1": [[(0.54, 0.18), (0.53, 0.4), (0.51, 0.62), (0.5, 0.84)]],
    "2": [[(0.31, 0.36), (0.36, 0.24), (0.5, 0.18), (0.64, 0.24), (0.67, 0.37), (0.6, 0.51),
           (0.46, 0.65), (0.3, 0.8), (0.48, 0.79), (0.72, 0.79)]],
    "3": [[(0.32, 0.25), (0.46, 0.18), (0.62, 0.22), (0.66, 0.34), (0.58, 0.45), (0.45, 0.48),
           (0.6, 0.52), (0.69, 0.63), (0.64, 0.77), (0.48, 0.83), (0.31, 0.77)]],
    "4": [[(0.38, 0.18), (0.33, 0.36), (0.28, 0.55), (0.48, 0.55), (0.74, 0.54)],
          [(0.62, 0.36), (0.6, 0.6), (0.58, 0.84)]],
    "5": [[(0.68, 0.2), (0.52, 0.2), (0.38, 0.2), (0.36, 0.34), (0.34, 0.47), (0.48, 0.43),
           (0.62, 0.48), (0.69, 0.6), (0.65, 0.74), (0.52, 0.82), (0.33, 0.78)]],
    "6": [[(0.62, 0.18), (0.46, 0.3), (0.35, 0.47), (0.31, 0.64), (0.38, 0.79), (0.52, 0.83),
           (0.65, 0.76), (0.67, 0.63), (0.57, 0.54), (0.43, 0.57), (0.33, 0.67)]],
    "7": [[(0.29, 0.22), (0.5, 0.21), (0.71, 0.21), (0.62, 0.42), (0.53, 0.63), (0.46, 0.84)]],
    "8": [[(0.64, 0.28), (0.52, 0.18), (0.38, 0.22), (0.36, 0.35), (0.48, 0.46), (0.62, 0.57),
           (0.67, 0.7), (0.58, 0.82), (0.42, 0.82), (0.33, 0.71), (0.4, 0.57), (0.54, 0.46),
           (0.64, 0.36), (0.64, 0.28)]],
    "9": [[(0.66, 0.34), (0.58, 0.21), (0.43, 0.2), (0.34, 0.32), (0.38, 0.46), (0.52, 0.49),
           (0.64, 0.4), (0.66, 0.34), (0.65, 0.52), (0.62, 0.68), (0.57, 0.84)]],
}


class Browser:
    """A session of headless Chromium."""

    def __init__(self) -> None:
        driver = shutil.which("chromedriver") or "/usr/bin/chromedriver"
        self.folder = tempfile.mkdtemp(prefix="skep-browser-")
        self.driver = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        port = None
        for line in self.driver.stdout:
            found = re.search(r"started successfully on port (\d+)", line)
            if found:
                port = int(found.group(1))
                break
        if port is None:
            raise SystemExit("chromedriver did not start")
        threading.Thread(target=self.driver.stdout.read, daemon=True).start()
        self.base = f"http://127.0.0.1:{port}"
        arguments = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--hide-scrollbars", f"--user-data-dir={self.folder}",
        ]
        options = {"args": arguments}
        if os.path.exists("/usr/bin/chromium"):
            options["binary"] = "/usr/bin/chromium"
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        answer = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.base += f"/session/{answer['sessionId']}"

    def call(self, method: str, path: str, body: object = None) -> object:
        data = None if method in ("GET", "DELETE") else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.base + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode()[:600]}") from None

    def close(self) -> None:
        try:
            self.call("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait()
            shutil.rmtree(self.folder, ignore_errors=True)

    def open(self, url: str) -> None:
        self.call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: object) -> object:
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def tools(self, command: str, **parameters: object) -> object:
        body = {"cmd": command, "params": parameters}
        return self.call("POST", "/goog/cdp/execute", body)

    def find(self, selector: str) -> dict:
        return self.call("POST", "/element", {"using": "css selector", "value": selector})

    def click(self, selector: str) -> None:
        self.call("POST", f"/element/{self.find(selector)[ELEMENT]}/click")

    def type(self, selector: str, text: str) -> None:
        self.call("POST", f"/element/{self.find(selector)[ELEMENT]}/value", {"text": text})

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def until(self, what: str, ask):
        end = time.monotonic() + PATIENCE
        while True:
            found = ask()
            if found:
                return found
            if time.monotonic() > end:
                log = self.call("POST", "/se/log", {"type": "browser"})
                raise AssertionError(f"gave up waiting for {what}; the browser says {log}")
            time.sleep(0.03)

    def screenshot(self, path: str) -> None:
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("GET", "/screenshot")))

    def draw(self, strokes: list, pointer: str = "mouse", part: float = 1.0) -> None:
        """Draws on the canvas with real pointer events, from where the page lies now."""
        self.run("document.querySelector('#canvas').scrollIntoView({block: 'center'})")
        box = self.run(
            "const b = document.querySelector('#canvas').getBoundingClientRect();"
            "return [b.left, b.top, b.width, b.height]"
        )
        steps = []
        for stroke in strokes:
            stroke = stroke[: max(2, round(len(stroke) * part))]
            for at, (x, y) in enumerate(stroke):
                steps.append({
                    "type": "pointerMove", "duration": 0 if at == 0 else 25, "origin": "viewport",
                    "x": round(box[0] + x * box[2]), "y": round(box[1] + y * box[3]),
                })
                if at == 0:
                    steps.append({"type": "pointerDown", "button": 0})
            steps.append({"type": "pointerUp", "button": 0})
        source = {
            "type": "pointer", "id": pointer, "parameters": {"pointerType": pointer},
            "actions": steps,
        }
        self.call("POST", "/actions", {"actions": [source]})
        self.call("DELETE", "/actions")

    def drop(self, path: str, x: int, y: int) -> None:
        """Drops a file on the page, as one does who drags it there from a folder."""
        data = {"items": [], "files": [path], "dragOperationsMask": 1}
        for step in ("dragEnter", "dragOver", "drop"):
            self.tools("Input.dispatchDragEvent", type=step, x=x, y=y, data=data)

    def keys(self, keys: list) -> None:
        steps = []
        for key in keys:
            steps += [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": steps}]})
        self.call("DELETE", "/actions")

    def scheme(self, name: str) -> None:
        self.tools(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": name}],
        )

    def size(self, width: int, height: int, mobile: bool = False, scale: float = 1) -> None:
        self.tools(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=mobile,
        )
        self.tools("Emulation.setTouchEmulationEnabled", enabled=mobile)

    def check_width(self, width: int) -> None:
        found = self.run("return document.documentElement.scrollWidth")
        assert found <= width, f"the page is {found} pixels wide on a screen of {width}"

    def check_log(self) -> None:
        """Nothing refused by the policy, no script in trouble; refusals of the server are said."""
        log = self.call("POST", "/se/log", {"type": "browser"})
        bad = [e for e in log if e["level"] == "SEVERE" and "status of 4" not in e["message"]]
        assert not bad, bad

    def check_names(self) -> None:
        """Whatever can be reached has a name that a screen reader can say."""
        self.tools("Accessibility.enable")
        nodes = self.tools("Accessibility.getFullAXTree")["nodes"]
        kinds = ("button", "textbox", "meter", "application", "link")
        said = 0
        for node in nodes:
            role = node.get("role", {}).get("value")
            if role in kinds and not node.get("ignored"):
                name = node.get("name", {}).get("value", "").strip()
                assert name, f"a {role} without a name"
                said += 1
        assert said >= 3, f"only {said} things have names"


def answered(browser: Browser, wanted: str) -> None:
    browser.until(
        f"the answer {wanted} (it is {browser.text('#answer')!r})",
        lambda: browser.text("#answer") == wanted
        and "answered by version" in browser.text("#by"),
    )


def shares(browser: Browser) -> list:
    return browser.run(
        "return [...document.querySelectorAll('[role=meter]')].map(m => +m.ariaValueNow)"
    )


def draw(browser: Browser, options: argparse.Namespace) -> None:
    browser.size(1000, 820)
    browser.open(options.url)
    browser.until("the page", lambda: browser.run("return !document.querySelector('#draw').hidden"))
    version = browser.text("#model b")
    assert re.fullmatch(r"\d+\.\d+|sha256-[0-9a-f]{12}", version), version
    assert browser.text("#answer") == "?"

    # Half a digit, then all of it: the probabilities move while one draws.
    browser.draw(DIGITS["8"], part=0.45)
    browser.until("a first answer", lambda: browser.text("#answer") != "?")
    before = shares(browser)
    browser.click("#clear")
    browser.until("a clean sheet", lambda: browser.text("#answer") == "?")
    wrong = []
    for digit, strokes in DIGITS.items():
        browser.draw(strokes)
        try:
            answered(browser, digit)
        except AssertionError:
            wrong.append((digit, browser.text("#answer")))
        if digit == "8":
            assert shares(browser) != before
        browser.until("the bars", lambda: sum(shares(browser)) > 99)
        if digit == "3":
            browser.until("the spoken answer", lambda: browser.text("#spoken").startswith("3, "))
            assert f"Version {version}" in browser.text("#spoken"), browser.text("#spoken")
            if options.screenshots:
                time.sleep(0.4)
                browser.screenshot(f"{options.screenshots}/light.png")
        browser.keys(["\ue017"]) if browser.run(
            "return document.activeElement.id === 'canvas'"
        ) else browser.click("#clear")
        browser.until("a clean sheet", lambda: browser.text("#answer") == "?")
    assert not wrong, f"wrong: {wrong}"
    print("ten digits drawn with the mouse: all right")

    browser.run("document.querySelector('#canvas').focus()")
    browser.keys([" "] + ["\ue015"] * 20 + [" "])
    answered(browser, "1")
    browser.keys(["z"])
    browser.until("a stroke taken back", lambda: browser.text("#answer") == "?")
    print("a 1 drawn with the keyboard, and taken back")

    if options.picture:
        path, _, wanted = options.picture.rpartition(":")
        browser.type("#file", os.path.abspath(path))
        answered(browser, wanted)
        folder, name = os.path.split(os.path.abspath(path))
        handler = functools.partial(Quiet, directory=folder)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.click("#clear")
        browser.until("a clean sheet", lambda: browser.text("#answer") == "?")
        browser.type("#url", f"http://127.0.0.1:{server.server_address[1]}/{name}")
        browser.click("#link button")
        answered(browser, wanted)
        server.shutdown()
        browser.click("#clear")
        browser.until("a clean sheet", lambda: browser.text("#answer") == "?")
        browser.drop(os.path.abspath(path), 300, 300)
        answered(browser, wanted)
        print(f"a picture as a file, by its address and dropped on the page: {wanted}")
        browser.click("#clear")
        browser.run("document.querySelector('#url').value = ''")

    browser.click("#sample")
    browser.until("a digit that draws itself", lambda: browser.text("#answer") != "?")
    browser.click("#clear")

    browser.check_names()
    browser.scheme("dark")
    browser.draw(DIGITS["5"])
    answered(browser, "5")
    if options.screenshots:
        browser.run("scrollTo(0, 0)")
        time.sleep(0.4)
        browser.screenshot(f"{options.screenshots}/dark.png")
    browser.scheme("light")
    browser.size(360, 740, mobile=True, scale=2)
    browser.click("#clear")
    browser.draw(DIGITS["2"], pointer="touch")
    answered(browser, "2")
    browser.check_width(360)
    print("a 2 drawn with a finger on a screen of 360 pixels")
    if options.screenshots:
        browser.run("scrollTo(0, 0)")
        time.sleep(0.4)
        browser.screenshot(f"{options.screenshots}/phone.png")
    browser.check_log()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def write(browser: Browser, options: argparse.Namespace) -> None:
    browser.size(1000, 820)
    browser.open(options.url)
    browser.until("the page", lambda: browser.run("return !document.querySelector('#write').hidden"))
    assert browser.run("return document.querySelector('#draw').hidden")
    if not options.review_only:
        praise_and_blame(browser, options.praise, options.blame)
    browser.type("#text", options.review)
    browser.until("an answer", lambda: browser.text("#answer") != "?" and words(browser, "for"))
    browser.run("document.activeElement.blur(); scrollTo(0, 0)")
    for scheme in ("light", "dark"):
        browser.scheme(scheme)
        if options.screenshots:
            time.sleep(0.5)
            browser.screenshot(f"{options.screenshots}/text-{scheme}.png")
    browser.scheme("light")
    browser.size(360, 740, mobile=True, scale=2)
    browser.check_width(360)
    if options.screenshots:
        time.sleep(0.5)
        browser.screenshot(f"{options.screenshots}/text-phone.png")
    browser.check_log()
    print("a review was read, with the words that drove the answer")


def praise_and_blame(browser: Browser, praise: str, blame: str) -> None:
    browser.type("#text", f"What a {praise} and {praise} film, not a {blame} one.")
    answered(browser, "positive")
    browser.until("words for it", lambda: praise in words(browser, "for"))
    assert blame in words(browser, "against"), words(browser, "against")
    browser.until("the spoken answer", lambda: f"because of {praise}" in browser.text("#spoken"))
    browser.check_names()
    browser.type("#text", f" {blame} {blame} {blame}")
    answered(browser, "negative")
    browser.until("the other words", lambda: blame in words(browser, "for"))
    browser.run("const t = document.querySelector('#text'); t.value = ''; t.dispatchEvent(new Event('input'))")
    browser.until("a clean sheet", lambda: browser.text("#answer") == "?")


def words(browser: Browser, kind: str) -> list:
    """The words on the page that speak for the answer, or against it, without stops."""
    script = "return [...document.querySelectorAll(`#words .${arguments[0]}`)].map(w => w.textContent)"
    return [re.sub(r"\W", "", word).lower() for word in browser.run(script, kind)]


def tensors(browser: Browser, options: argparse.Namespace) -> None:
    browser.size(360, 740, mobile=True, scale=2)
    browser.open(options.url)
    browser.until("the page", lambda: browser.run("return !document.querySelector('#tensors').hidden"))
    assert "/infer" in browser.text("#infer"), browser.text("#infer")
    assert browser.run("return document.querySelectorAll('#inputs li').length") > 0
    assert browser.run("return document.querySelector('#result').hidden")
    browser.check_width(360)
    if options.screenshots:
        browser.screenshot(f"{options.screenshots}/tensors.png")
    browser.check_log()
    print("the page says what tensors the model takes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["draw", "write", "tensors"])
    parser.add_argument("url")
    parser.add_argument("--picture", help="FILE.png:ANSWER")
    parser.add_argument("--praise", default="good", help="a word that praises, to the model")
    parser.add_argument("--blame", default="bad", help="a word that blames, to the model")
    parser.add_argument("--review", default="A good film with a bad end.", help="for the pictures")
    parser.add_argument("--review-only", action="store_true", help="write nothing but that")
    parser.add_argument("--screenshots", help="a folder for them")
    options = parser.parse_args()
    browser = Browser()
    try:
        {"draw": draw, "write": write, "tensors": tensors}[options.what](browser, options)
    finally:
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
