"""The client of `LLM`: whom it trusts, and how it asks a server that is busy."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from alignedserve.api.asking import ServerCalls
from alignedserve.api.llm import LLM
from alignedserve.api.outputs import Piece
from alignedserve.errors import AskError, DeploymentError
from tests.scripted_server import WHOLE, Refusal, Reply, full, scripted, streamed

HI = [{"role": "user", "content": "Hi"}]
MADE = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_server_whose_certificate_nobody_signed_is_not_trusted(tmp_path: Path) -> None:
    key, made = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(["openssl", *MADE.split(), "-keyout", key, "-out", made], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)

    def answer_one() -> None:
        with suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as peer:
            peer.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 23\r\n\r\n{"data": [{"id": "x"}]}')

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=answer_one)
        server.start()
        with pytest.raises(AskError, match=r"has a certificate that is not trusted \(self-signed certificate\)"):
            ServerCalls(f"https://127.0.0.1:{listener.getsockname()[1]}").model()
        server.join()


def test_a_busy_server_is_asked_again_and_answers_keep_their_order() -> None:
    """It refuses each request once, and says when to come again."""
    refused = set[str]()

    class Busy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self.send_response(200 if asked in refused else 503)
            self.send_header("Retry-After", "0")
            answer = json.dumps({"said": json.loads(asked)["prompt"]} if asked in refused else {}).encode()
            refused.add(asked)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None: ...

    told = list[int]()
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever).start()
        asking = ServerCalls(f"http://127.0.0.1:{server.server_port}/v1")
        bodies = [{"prompt": name} for name in "abc"]
        answers = asyncio.run(asking.all_of("/v1/completions", bodies, told.append))
        server.shutdown()
    assert answers == [{"said": name} for name in "abc"]
    assert told == [0, 1, 2, 3]


def _streamed(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


async def _streamed_async(pieces: AsyncIterator[Piece]) -> str:
    return "".join([piece.text async for piece in pieces])


WAYS: dict[str, Callable[[LLM], str]] = {
    "generate": lambda llm: llm.generate("Hi", use_tqdm=False)[0].outputs[0].text,
    "chat": lambda llm: llm.chat(HI, use_tqdm=False)[0].outputs[0].text,
    "agenerate": lambda llm: asyncio.run(llm.agenerate("Hi"))[0].outputs[0].text,
    "stream": lambda llm: _streamed(llm.stream(HI)),
    "astream": lambda llm: asyncio.run(_streamed_async(llm.astream(HI))),
    "detokenize": lambda llm: llm.detokenize([3]),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_full_server_is_asked_again_when_it_says(way: str) -> None:
    with scripted() as server:
        answer: Reply = streamed("fi", "ne", waits=["3 before you, about 12 s"]) if "stream" in way else WHOLE
        server.replies = [full(retry_after="0.4"), full("it starts", "0.2", status=503), Refusal(503, ""), answer]
        assert WAYS[way](LLM(url=server.url)) == "fine"
    assert server.bodies == server.bodies[:1] * 4
    assert server.retries == [0, 1, 2, 3], "who comes again may wait longer in line"
    first, second, third, fourth = server.times
    for waited_s, told_s in ((second - first, 0.4), (third - second, 0.2), (fourth - third, 1.0)):
        assert waited_s >= told_s


def test_patience_ends(way: str) -> None:
    with scripted() as server:
        server.replies = [full("it is full", "0.5"), full("it is fuller", "0.5")]
        with pytest.raises(AskError, match="the server refuses with 429: it is fuller"):
            WAYS[way](LLM(url=server.url, retry_for_s=0.9))
    assert len(server.bodies) == 2


def test_the_bar_is_there_while_nothing_has_an_answer_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with scripted() as server:
        server.replies = [full(retry_after="0.3"), WHOLE]
        LLM(url=server.url).generate("Hi")
    assert "] 0 of 1" in terminal.getvalue()


@pytest.mark.parametrize("way", ["stream", "astream"])
def test_a_stream_that_waits_says_its_place(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Once on what is no terminal, and never what other servers write into comments."""
    with scripted() as server:
        server.replies = [streamed("fine", waits=["ping", "3 before you, about 12 s", "1 before you, about 4 s"])]
        assert WAYS[way](LLM(url=server.url)) == "fine"
    assert capsys.readouterr().err == "3 before you, about 12 s\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"gpu_memory_utilization": 0.9}, "is not understood: kv_memory_mb for what KV takes, gpu_reserve_mb for what"),
        ({"n_ctx": 4096}, "is not understood: did you mean max_model_len\\?"),
    ],
)
def test_an_option_of_another_engine_leads_to_the_keyword_that_says_it(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(DeploymentError, match=f"^{min(flags)} {said}"):
        LLM("smollm2", **flags)
