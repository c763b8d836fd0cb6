"""The client of `LLM`: whom it trusts."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from alignedserve.api.asking import Asking
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
            Asking(f"https://127.0.0.1:{listener.getsockname()[1]}").model()
        server.join()
