"""The client of `LLM`: whom it trusts, and how it asks a server that is busy."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from alignedserve.api.asking import ServerCalls
from alignedserve.errors import AskError

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
        with pytest.raises(AskError, match="certificate verify failed"):
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
    assert told == [1, 2, 3]
