"""Chromium, driven over its DevTools pipe: no driver, no socket, nothing but the standard library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip


def find_chromium() -> str | None:
    """The browser's program: the one that CHROMIUM names, or the first on the path."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if name and (path := shutil.which(name))), None)


class Chromium:
    """``with Chromium(program, folder) as browser: page = browser.open(url)``; ``folder``: an empty profile."""

    def __init__(self, program: str, folder: Path) -> None:
        to_child, self._write = _pipe()
        self._read, from_child = _pipe()

        def descriptors() -> None:  # the browser reads commands from 3 and writes answers to 4
            os.dup2(to_child, 3)
            os.dup2(from_child, 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=descriptors,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._lock = threading.Lock()
        self._last_id = 0
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._receive, daemon=True)
        self._reader.start()

    def _receive(self) -> None:
        rest = b""
        while data := os.read(self._read, 1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                else:
                    self.events.append(message)

    def command(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Raises RuntimeError for a command that the browser refuses, TimeoutError without an answer."""
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            self._last_id += 1
            message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
            if session is not None:
                message["sessionId"] = session
            self._answers[self._last_id] = answer
            data = memoryview(json.dumps(message).encode() + b"\0")
            while data:
                data = data[os.write(self._write, data) :]
        try:
            got = answer.get(timeout=60)
        except queue.Empty:
            raise TimeoutError(f"no answer to {method}") from None
        if "error" in got:
            raise RuntimeError(f"{method}: {got['error']['message']}")
        result: dict[str, Any] = got["result"]
        return result

    def open(self, url: str, width: int = 1360, height: int = 900) -> Tab:
        """A tab of its own profile (no storage shared), once its document is loaded."""
        context = self.command("Target.createBrowserContext")["browserContextId"]
        target = self.command("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.command(f"{domain}.enable")
        tab.resize(width, height)
        tab.go(url)
        return tab

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)  # the browser ends when its pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(10)
        os.close(self._read)


class Tab:
    """One page. Scripts run as the developer's console would run them."""

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.command(method, self._session, **parameters)

    def go(self, url: str) -> None:
        self.command("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def evaluate(self, script: str) -> Any:
        """The value of an expression (awaited, if a promise). Raises AssertionError with what it threw."""
        got = self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in got:
            details = got["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description", details["text"]))
        return got["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        """Until an expression is true."""
        self.wait_for(lambda: bool(self.evaluate(condition)), condition, seconds)

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"did not happen: {what}"
            time.sleep(0.03)

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def click(self, selector: str) -> None:
        """With the mouse, in the element's middle."""
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def point(self, selector: str) -> None:
        x, y = self._middle(selector)
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _middle(self, selector: str) -> tuple[float, float]:
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'nearest'}); const b = e.getClientRects()[0];"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return x, y

    def fill(self, selector: str, value: str) -> None:
        """As typing over what is there, and leaving."""
        self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)};"
            " for (const kind of ['input', 'change']) e.dispatchEvent(new Event(kind, {bubbles: true})); })()"
        )

    def key(self, key: str, code: str | None = None, *, alt: bool = False, ctrl: bool = False) -> None:
        codes = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
                 "Home": 36, "End": 35, "Tab": 9}  # fmt: skip
        number = codes.get(key, ord(key[0].upper()))
        text = key if len(key) == 1 and not (alt or ctrl) else ""
        common = {
            "key": key,
            "code": code or key,
            "windowsVirtualKeyCode": number,
            "modifiers": alt + 2 * ctrl,
        }
        self.command("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.command("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        got = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(got["data"]))

    def troubles(self) -> list[str]:
        """Exceptions, errors in the console and violations of the content security policy so far. Answers with an
        error status are not among them."""
        out = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            values = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                details = values["exceptionDetails"]
                out.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Runtime.consoleAPICalled" and values["type"] == "error":
                out.append(str([argument.get("value") for argument in values["args"]]))
            elif event["method"] == "Log.entryAdded":
                entry = values["entry"]
                if entry["level"] == "error" and entry["source"] != "network":
                    out.append(entry["text"])
        return out

    def requested(self) -> list[str]:
        """Addresses of everything that the page asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        self._browser.command("Target.closeTarget", targetId=self._target)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are above 4, so that placing others at 3 and 4 cannot close them."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
