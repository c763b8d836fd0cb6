"""A real browser opens pages of other origins, which try to use a server that asks for no key.

The names of these origins lead to loopback, so no request leaves this machine. Without Chromium the tests skip.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from alignedserve.text.text_model import TextModel
from tests.browser import FLAGS
from tests.chromium import program
from tests.gateway.conftest import MODEL, PATIENT_S, FakeOwner, Gateway
from tests.gateway.served import served

OTHER, REBOUND = "page.example", "rebound.example"  # the second name leads to the page first, then to the server
REBOUND_ADDRESS = "127.0.0.2"
BODY = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}

# Each try reports what the page saw: an answer's status and text, or that the browser refused.
PAGE = """<!doctype html><script>
const body = %(body)s, url = "%(url)s", report = "%(report)s"
const form = new FormData(); form.set("purpose", "batch"); form.set("file", new Blob(["{}"]), "a.jsonl")
const tries = {
  "read": ["/v1/models", {}],
  "metrics": ["/metrics", {}],
  "json": ["/v1/completions", {method: "POST", headers: {"Content-Type": "application/json"}, body}],
  "text": ["/v1/completions", {method: "POST", body}],
  "text, unread": ["/v1/completions", {method: "POST", mode: "no-cors", body}],
  "form": ["/v1/files", {method: "POST", mode: "no-cors", body: form}],
}
async function attempt([path, options]) {
  try {
    const answer = await fetch(url + path, options)
    return [answer.type, answer.status, await answer.text()]
  } catch (error) { return ["refused by the browser", 0, ""] }
}
(async () => {
  const seen = {}
  for (const name in tries) seen[name] = await attempt(tries[name])
  await fetch(report, {method: "POST", mode: "no-cors", body: JSON.stringify(seen)})
})()
</script>"""


@dataclass(frozen=True)
class Saw:
    """What a page saw of the answer to one of its tries."""

    kind: str
    status: int
    text: str


@dataclass
class Site:
    """A web site at an address of loopback: it serves one page, hears its report, and hands all else to the server."""

    page: str = ""
    server_port: int = 0
    reports: queue.Queue[dict[str, list[Any]]] = field(default_factory=queue.Queue)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        if request.path == "/page":
            self._send(request, 200, "text/html", self.page.encode())
        elif request.path == "/report":
            self.reports.put(json.loads(body))
            self._send(request, 204, "text/plain", b"")
        else:
            self._hand_on(request, body)

    def _hand_on(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        """Send the request to the server as it came: with this the name has become the server's."""
        to = http.client.HTTPConnection("127.0.0.1", self.server_port, timeout=PATIENT_S)
        to.request(request.command, request.path, body, dict(request.headers))
        answer = to.getresponse()
        self._send(request, answer.status, answer.getheader("Content-Type", ""), answer.read())
        to.close()

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, status: int, content_type: str, body: bytes) -> None:
        request.send_response(status)
        request.send_header("Content-Type", content_type)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    @contextmanager
    def at(self, address: str, port: int) -> Iterator[int]:
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.answer(self)

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer((address, port), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


@contextmanager
def browser(url: str, profile: Path) -> Iterator[None]:
    names = f"MAP {OTHER} 127.0.0.1, MAP {REBOUND} {REBOUND_ADDRESS}, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    found, env = program()
    command = [found, *FLAGS.split(), f"--user-data-dir={profile}", f"--host-resolver-rules={names}", url]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, env=env
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass
class Trial:
    """What a page saw, and what the server answered."""

    saw: dict[str, Saw]
    answered: list[tuple[str, str, int]]  # method, path, status
    opened: int  # requests that reached the model

    def status(self, method: str, path: str) -> set[int]:
        return {status for *asked, status in self.answered if asked == [method, path]}


def open_page(text: TextModel, profile: Path, rebinding: bool, host: str = OTHER, **settings: Any) -> Trial:
    """Have the browser open the page, on its own site or on a site whose name then leads to the server."""
    gateway, answered = Gateway(text, FakeOwner((5,)), **settings), list[tuple[str, str, int]]()

    async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered.append((scope["method"], scope["path"], message["status"]))
            await send(message)

        await gateway.app(scope, receive, send_on)

    with served(recorded) as server:
        site = Site(server_port=server.port)
        with site.at("127.0.0.1", 0) as port, site.at(REBOUND_ADDRESS, server.port):
            url = f"http://{REBOUND}:{server.port}" if rebinding else f"http://127.0.0.1:{server.port}"
            page = url if rebinding else f"http://{host}:{port}"
            given = {"body": json.dumps(json.dumps(BODY)), "url": url, "report": f"http://{host}:{port}/report"}
            site.page = PAGE % given
            with browser(f"{page}/page", profile):
                seen = site.reports.get(timeout=4 * PATIENT_S)  # a browser starts slowly on a busy machine
    saw = {name: Saw(*what) for name, what in seen.items()}
    return Trial(saw, answered, len(gateway.owner.opened))


def test_a_page_of_another_origin_reads_nothing_and_has_nothing_done(text: TextModel, tmp_path: Path) -> None:
    trial = open_page(text, tmp_path, rebinding=False)
    assert [saw.text for saw in trial.saw.values()] == [""] * len(trial.saw)
    assert {saw.kind for saw in trial.saw.values()} <= {"refused by the browser", "opaque"}
    assert trial.opened == 0
    assert trial.status("POST", "/v1/completions") == {403}  # as text; JSON is not sent at all
    assert trial.status("OPTIONS", "/v1/completions") == {405}
    assert trial.status("POST", "/v1/files") == {403}


def test_a_page_whose_name_leads_to_the_server_reads_nothing(text: TextModel, tmp_path: Path) -> None:
    trial = open_page(text, tmp_path, rebinding=True)
    assert {status for *_, status in trial.answered} == {421}
    assert all(MODEL not in saw.text or "unknown_host" in saw.text for saw in trial.saw.values())
    assert {saw.status for saw in trial.saw.values()} == {421}
    assert trial.opened == 0


def test_a_page_that_is_let_in_does_both(text: TextModel, tmp_path: Path) -> None:
    """The tries would succeed, then, where nothing forbade them. A page of this machine is let in by default."""
    for number, (rebinding, host, origins) in enumerate(
        ((False, OTHER, ("*",)), (True, OTHER, ("*",)), (False, "127.0.0.1", None))
    ):
        trial = open_page(text, tmp_path / str(number), rebinding, host, cors_origins=origins)
        assert {name: trial.saw[name].status for name in ("read", "metrics", "json")} == {
            "read": 200,
            "metrics": 200,
            "json": 200,
        }
        assert trial.opened == 1
        assert trial.saw["text"].status == 415
