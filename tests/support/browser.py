"""A browser without a window: opens a page, runs a program in it, and returns what that found.

Commands go to it over two pipes, in the DevTools protocol of Chromium: objects of JSON, each with a zero behind it.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from support.commands import HANG_SECONDS


NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@dataclass(frozen=True)
class Opened:
    """A page that was opened.

    Attributes:
        found: result of the program.
        errors: errors of the console, uncaught ones, and requests that were refused.
    """

    found: Any
    errors: list[str]


@dataclass
class Browser:
    """A browser that runs."""

    asks: BinaryIO
    answers: BinaryIO
    number: int = 0
    errors: list[str] = field(default_factory=list)

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """The result of a command; notes errors that the page has meanwhile."""
        self.number += 1
        asked = {"id": self.number, "method": method, "params": parameters}
        self.asks.write(json.dumps(asked if session is None else asked | {"sessionId": session}).encode() + b"\0")
        self.asks.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def wait_for(self, method: str) -> None:
        """Waits for an event."""
        while self._next().get("method") != method:
            pass

    def _next(self) -> Any:
        """The next answer or event."""
        text = bytearray()
        while (byte := self.answers.read(1)) != b"\0":
            assert byte, "the browser ended"
            text += byte
        event = json.loads(text)
        happened = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(happened["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and happened["entry"]["level"] == "error":
            self.errors.append(happened["entry"]["text"])
        elif event.get("method") == "Runtime.consoleAPICalled" and happened["type"] in ("error", "warning", "assert"):
            self.errors.append(str(happened["args"]))
        return event

    def open(self, page: Path, program: str, width: int = 1100, dark: bool = False) -> Opened:
        """Opens a page and runs a program in it, the body of an asynchronous function.

        Args:
            page: a file of HTML.
            width: of the window, in pixels.
            dark: whether the reader prefers dark pages.
        """
        self.errors = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        tab = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable", tab)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", tab, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", tab, features=[scheme])
        self.ask("Page.navigate", tab, url=page.resolve().as_uri())
        self.wait_for("Page.loadEventFired")
        run = {"expression": f"(async () => {{ {program} }})()", "awaitPromise": True, "returnByValue": True}
        result = self.ask("Runtime.evaluate", tab, **run)
        assert "exceptionDetails" not in result, result
        self.ask("Target.closeTarget", targetId=target)
        return Opened(result["result"].get("value"), list(self.errors))


@contextmanager
def browser() -> Iterator[Browser]:
    """Chromium, ended with the context; without one the test is skipped, and says so."""
    paths = [path for path in map(shutil.which, NAMES) if path is not None]
    if not paths:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH (Debian: apt-get install chromium)")
    # Chromium reads descriptor 3 and writes descriptor 4.
    (to_read, asks), (answers, to_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        line = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        options += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}"]
        process = subprocess.Popen(
            ["bash", "-c", line, paths[0], *options],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        with os.fdopen(asks, "wb") as to_browser, os.fdopen(answers, "rb") as from_browser:
            opened = Browser(to_browser, from_browser)
            try:
                yield opened
                opened.ask("Browser.close")
            finally:
                try:
                    process.wait(HANG_SECONDS if process.poll() is None else 0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
