"""Opens pages in a real browser without a window, reads them, clicks in them and takes screenshots."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
MISSING = "needs Chromium: apt-get install chromium"
# In CI, tests fail without a browser instead of being skipped.
browser = pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason=MISSING)

# The options in QUIET solve two problems: a container's /dev/shm is too small for a browser, and a browser shows
# dialogs in its first run.
QUIET = ("--disable-dev-shm-usage", "--no-first-run")


def chromium(folder: Path, *words: str) -> list[str]:
    """Returns the command that opens a headless browser, with its profile in ``folder``."""
    if CHROMIUM is None:
        pytest.fail(MISSING)
    profile = f"--user-data-dir={folder / 'profile'}"
    return [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", profile, *QUIET, *words]


def _run(folder: Path, *words: str) -> str:
    command = chromium(folder, *words)
    for _ in range(2):  # tries twice, in case the browser crashes
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if ran.returncode == 0:
            return ran.stdout
    pytest.fail(ran.stderr[-500:])


def document(folder: Path, address: str, milliseconds: int = 3000) -> str:
    """Returns the DOM of the page at ``address`` after the page ran for ``milliseconds`` of virtual time."""
    return _run(folder, "--window-size=1400,900", "--dump-dom", f"--virtual-time-budget={milliseconds}", address)


def screenshot(folder: Path, address: str, *words: str) -> Path:
    """Saves a screenshot of a window of 1200 by 700 pixels in ``folder``."""
    shot = folder / "shot.png"
    _run(folder, "--window-size=1200,700", f"--screenshot={shot}", *words, address)
    return shot


class Page:
    """An open page in a browser. Evaluates scripts, and sends mouse events, through the DevTools protocol."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write, self._read = to_browser, from_browser
        self._received = b""
        self._sent = 0
        self._session: dict[str, str] = {}

    def open(self, address: str) -> None:
        """Opens ``address``, and waits until the page and its scripts are loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.call("Page.enable")
        self.call("Page.navigate", url=address)
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def value(self, script: str) -> Any:
        """Returns the value of the expression ``script`` on the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def click(self, x: float, y: float) -> None:
        """Presses and releases the left mouse button at a point of the window."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Presses the left mouse button at ``start``, moves the mouse to ``end``, and releases the button."""
        for kind, (x, y), buttons in (("mousePressed", start, 1), ("mouseMoved", end, 1), ("mouseReleased", end, 0)):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=buttons, clickCount=1)

    def screenshot(self) -> bytes:
        """Returns the window's contents as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        body = {"id": self._sent, "method": method, "params": parameters, **self._session}
        os.write(self._write, json.dumps(body).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._sent:
                assert "error" not in message, message
                return message["result"]  # type: ignore[no-any-return]

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser says nothing"
            more = os.read(self._read, 1 << 16)
            assert more, "the browser is gone"
            self._received += more
        text, _, self._received = self._received.partition(b"\0")
        return json.loads(text)  # type: ignore[no-any-return]


@contextmanager
def opened(folder: Path, address: str) -> Iterator[Page]:
    """Opens the page at ``address`` in a window of 1200 by 700 pixels."""
    command = chromium(folder, "--window-size=1200,700", "--remote-debugging-pipe", "about:blank")
    to_browser, from_browser = os.pipe(), os.pipe()
    ends = (to_browser[0], from_browser[1])
    # The browser reads from file descriptor 3 and writes to file descriptor 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}', "bash", *command]
    log = folder / "browser.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(shell, pass_fds=ends, stdout=stderr, stderr=stderr)
    try:
        for end in ends:
            os.close(end)
        page = Page(to_browser[1], from_browser[0])
        page.open(address)
        yield page
        page.call("Browser.close")
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        for end in (to_browser[1], from_browser[0]):
            os.close(end)
