"""A page in headless Chromium, through its DevTools protocol: open, evaluate, wait until, screenshot."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextlib.contextmanager
def browser(folder: Path):
    """Skips the test where there is no browser."""
    websocket = pytest.importorskip("websocket")
    binary = next((b for name in BROWSERS if (b := shutil.which(name))), None)
    if binary is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    process = subprocess.Popen(
        [binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port_file = folder / "DevToolsActivePort"
        wait_until(lambda: port_file.is_file() and len(port_file.read_text().splitlines()) == 2, "the browser starts")
        port, path = port_file.read_text().splitlines()
        root = websocket.create_connection(f"ws://127.0.0.1:{port}{path}", timeout=60)
        target = Page(root).command("Target.createTarget", url="about:blank")["targetId"]
        yield Page(websocket.create_connection(f"ws://127.0.0.1:{port}/devtools/page/{target}", timeout=60))
        root.close()
    finally:
        process.terminate()
        process.wait(120)


class Page:
    def __init__(self, socket):
        self.socket, self.numbers, self.complaints = socket, itertools.count(1), []

    def command(self, method, **params):
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(message["params"]["exceptionDetails"]["text"])
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.complaints.append(message["params"]["entry"]["text"])
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def open(self, url):
        for domain in ("Runtime", "Log", "Page"):
            self.command(f"{domain}.enable")
        self.command("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression):
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression):
        wait_until(lambda: self.evaluate(expression), expression)

    def screenshot(self, path):
        Path(path).write_bytes(base64.b64decode(self.command("Page.captureScreenshot")["data"]))


def wait_until(holds, what, seconds=120.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not in {seconds:g} s: {what}"
        time.sleep(0.05)
