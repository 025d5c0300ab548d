"""A real headless Chromium, driven over its DevTools protocol through two pipes."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Page", "find_chromium", "open_browser"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str:
    """The browser's program; skips the test where none is installed."""
    for name in _NAMES:
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium is installed; apt install chromium")


_SILENCE_S = 60.0


class Page:
    """One tab. errors: what it has thrown, logged as an error, or failed to load."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._numbers = itertools.count(1)
        self._held = b""
        self._session = ""
        self._events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            event = self._next()
            if event.get("id") == number:
                assert "error" not in event, f"{method}: {event['error']}"
                return dict(event["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            assert select.select([self._receive], [], [], _SILENCE_S)[0], "the browser says nothing"
            data = os.read(self._receive, 1 << 16)
            assert data, "the browser has ended"
            self._held += data
        raw, _, self._held = self._held.partition(b"\0")
        event: dict[str, Any] = json.loads(raw)
        params = event.get("params", {})
        method = event.get("method")
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))
        elif method == "Network.loadingFailed":
            self.errors.append(params["errorText"])
        self._events.append(event)
        return event

    def resize(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> None:
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._wait_loaded()

    def click_link(self, x: float, y: float) -> None:
        """Clicks at a place of the window, and waits for the page that opens."""
        self._events.clear()
        for kind in ("mousePressed", "mouseReleased"):
            place = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **place)
        self._wait_loaded()

    def _wait_loaded(self) -> None:
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._next()

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def take_picture(self, path: Path) -> None:
        """The whole page, however long."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


def _place(reader: int, writer: int) -> None:
    """Chromium reads its orders from 3 and answers on 4."""
    reader, writer = (fcntl.fcntl(number, fcntl.F_DUPFD, 10) for number in (reader, writer))
    os.dup2(reader, 3)
    os.dup2(writer, 4)


@contextlib.contextmanager
def open_browser() -> Iterator[Page]:
    """A browser with one tab, and nothing of it left afterwards."""
    program = find_chromium()
    to_browser, send = os.pipe()
    receive, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(prefix="paceline-browser-") as profile:
        words = [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            words,
            preexec_fn=lambda: _place(to_browser, from_browser),
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Page(send, receive)
        finally:
            os.close(send)
            os.close(receive)
            process.terminate()
            process.wait(timeout=20)
