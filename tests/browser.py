"""A headless Chromium, driven over a pipe by the protocol of its developer tools: for tests, and for pictures.

    with chromium(tmp_path) as browser, browser.page("http://127.0.0.1:8000/dashboard", 1280, 900) as page:
        page.until("document.title === 'AlignedServe'")

Names of other hosts lead nowhere, so what a page asks of them fails; and `page.requests` has what it asked for.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

_UNPACKED = Path(__file__).resolve().parents[1] / "build" / "chromium" / "usr"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
)
_OFFLINE = "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
PATIENT_S = 120.0  # more than a browser takes, however slow the machine is
_LOOK_S = 0.05
_CODES = {"Backspace": 8, "Enter": 13, "Escape": 27}  # of keys by which the browser itself does something
_HIGH = 20  # descriptors from here on: the browser's are 3 and 4


def find() -> tuple[str, dict[str, str]] | None:
    """Return the browser and its environment, where there is one: on the path, or unpacked by `make chromium`."""
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    if found := next(filter(None, map(shutil.which, _NAMES)), None):
        return found, env
    unpacked = _UNPACKED / "lib" / "chromium" / "chromium-headless-shell"
    if unpacked.exists():
        folders = [path for lib in (_UNPACKED / "lib", _UNPACKED.parent / "lib") for path in lib.glob("*-linux-gnu")]
        folders += [path / "pulseaudio" for path in folders]  # where libpulse has a library of its own
        libraries = ":".join(map(str, folders))
        return str(unpacked), env | {"LD_LIBRARY_PATH": libraries, "XDG_DATA_DIRS": str(_UNPACKED / "share")}
    return None


@contextmanager
def chromium(profile: Path, *flags: str) -> Iterator[Browser]:
    found = find()
    assert found is not None, "there is no Chromium: see make chromium"
    command, env = found
    to_browser, from_browser = os.pipe(), os.pipe()
    reads, writes = (fcntl.fcntl(end, fcntl.F_DUPFD, _HIGH) for end in (to_browser[0], from_browser[1]))
    options = [*FLAGS.split(), "--remote-debugging-pipe", f"--user-data-dir={profile}", *flags]
    process = subprocess.Popen(
        [
            "bash",
            "-c",
            f'exec "$0" "$@" 3<&{reads} 4>&{writes}',
            command,
            *options,
            f"--host-resolver-rules={_OFFLINE}",
        ],
        pass_fds=(reads, writes),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=env,
    )
    for end in (reads, writes, to_browser[0], from_browser[1]):
        os.close(end)
    try:
        yield Browser(to_browser[1], from_browser[0])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])


class Browser:
    def __init__(self, writes: int, reads: int) -> None:
        self._writes, self._reads = writes, reads
        self._numbers, self._unread = count(1), b""
        self.events: list[dict[str, Any]] = []

    @contextmanager
    def page(
        self, url: str, width: int = 1280, height: int = 900, headers: Mapping[str, str] | None = None
    ) -> Iterator[Page]:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        if headers:
            page.send("Network.setExtraHTTPHeaders", headers=dict(headers))
        page.send("Page.navigate", url=url)
        page.until("location.href !== 'about:blank' && document.readyState === 'complete'")
        try:
            yield page
        finally:
            self.send("Target.closeTarget", targetId=target)

    def send(self, method: str, session: str | None = None, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            if "method" in answer:
                self.events.append(answer)
        error = answer.get("error")
        if error and "navigated" in error["message"]:
            raise PageLeftError(method)
        assert not error, f"{method}: {error}"
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            there, _, _ = select.select([self._reads], [], [], PATIENT_S)
            new = os.read(self._reads, 1 << 20) if there else b""
            assert new, "the browser does not answer"
            self._unread += new
        first, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message


class PageLeftError(Exception):
    """The browser went to another page while it was asked about this one."""


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def send(self, method: str, **params: Any) -> Any:
        return self._browser.send(method, self._session, **params)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def until(self, expression: str, within_s: float = PATIENT_S) -> float:
        """Wait until the expression is true, and return how long that took."""
        began_at = time.monotonic()
        while not self._is_true(expression):
            waited_s = time.monotonic() - began_at
            assert waited_s < within_s, f"not within {within_s} s: {expression}\n{self.text('body')}"
            time.sleep(_LOOK_S)
        return time.monotonic() - began_at

    def _is_true(self, expression: str) -> bool:
        """Say whether the expression is true of the page that is there; it is not while the next one is on its way."""
        try:
            return bool(self.value(expression))
        except PageLeftError:
            return False

    def press(self, key: str, text: str | None = None, modifiers: int = 0) -> None:
        """Press a key, which types `text`: a letter types itself. Of the modifiers, Shift is 8."""
        text = text if text is not None else key if len(key) == 1 else ""
        pressed: dict[str, Any] = {"key": key, "modifiers": modifiers, "windowsVirtualKeyCode": _CODES.get(key, 0)}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        self.send("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def type(self, text: str) -> None:
        """Type a text where the cursor is."""
        self.send("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click the first shown element of a selector where a person would: it must be there to be seen."""
        shown = f"[...document.querySelectorAll({json.dumps(selector)})].find(one => one.checkVisibility())"
        left, top, width, height = self.value(
            f"(box => [box.x, box.y, box.width, box.height])({shown}.getBoundingClientRect())"
        )
        x, y = left + width / 2, top + height / 2
        is_seen = self.value(f"{shown}.contains(document.elementFromPoint({x}, {y}))")
        assert is_seen, f"{selector} at {x}, {y} is out of sight or below something\n{self.text('body')}"
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def prefer(self, scheme: str) -> None:
        """Let its user prefer light or dark pages."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self) -> bytes:
        """Return the visible part of the page as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    @property
    def requests(self) -> list[str]:
        """Return the URLs that it asked for."""
        return [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    @property
    def errors(self) -> list[str]:
        """Return what its console shows as an error, and the exceptions that nobody caught."""
        logged = [event["entry"] for event in self._events("Log.entryAdded")]
        said = [event for event in self._events("Runtime.consoleAPICalled") if event["type"] in ("error", "assert")]
        thrown = [str(event["exceptionDetails"]) for event in self._events("Runtime.exceptionThrown")]
        entries = [f"{entry['text']} {entry.get('url', '')}" for entry in logged if entry["level"] == "error"]
        return [*entries, *map(str, said), *thrown]

    def _events(self, method: str) -> list[Any]:
        self.value("0")  # read what has come until now
        events = self._browser.events
        return [
            event["params"] for event in events if (event.get("sessionId"), event["method"]) == (self._session, method)
        ]
