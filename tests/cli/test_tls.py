"""The commands trust the authority that a user names, and say what is wrong with a certificate."""

from __future__ import annotations

import io
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from alignedserve.api.llm import LLM
from alignedserve.cli import main as cli
from alignedserve.errors import ConfigError
from alignedserve.lab.bench.connections import Address
from tests.scripted_server import scripted, streamed

PEMS = Path(__file__).parent.parent / "gateway" / "certificates"
OWN, OTHER = PEMS / "first.pem", PEMS / "second.pem"


def with_tls(listener: socket.socket) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(OWN)
    return context.wrap_socket(listener, server_side=True)


class NothingHere(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the address of a server with a certificate that signed itself."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with scripted() as server:
        server.socket = with_tls(server.socket)
        server.replies = [streamed("fine")]
        yield f"https://localhost:{server.server_address[1]}/v1"


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Return what a chat of one line writes to stdout and to stderr."""

    def chat(*flags: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
        cli.main(["chat", "--model", "m", *flags])
        return tuple(capsys.readouterr())

    return chat


def test_the_authority_is_named_by_a_flag_or_by_the_environment(
    url: str, chat: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat("--url", url, "--ca", str(OWN)) == ("fine\n", "")
    monkeypatch.setenv("SSL_CERT_FILE", str(OWN))
    assert LLM(url=url)._model == "first"
    monkeypatch.setenv("SSL_CERT_FILE", str(OTHER))
    assert LLM(url=url, ca=OWN)._model == "first", "what is named here counts"


@pytest.mark.parametrize("flags", [(), ("--ca", str(OTHER))])
def test_a_certificate_that_nobody_signed_is_not_called_no_server(
    url: str, chat: Callable[..., tuple[str, str]], flags: tuple[str, ...]
) -> None:
    out, err = chat("--url", url, *flags)
    assert out == ""
    assert err.startswith(f"alignedserve: {url} has a certificate that is not trusted (self-signed certificate): ")
    assert "--ca or SSL_CERT_FILE" in err
    assert "no server" not in err


@pytest.mark.parametrize("command", [["status"], ["explain", "req-1"], ["batch", "list"], ["bench"]])
def test_each_command_that_asks_a_server_takes_the_flag(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), NothingHere) as server:
        server.socket = with_tls(server.socket)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        for flags, said in (([], "is not trusted"), (["--ca", str(OWN)], "404")):
            assert cli.main([*command, "--url", f"https://localhost:{server.server_port}", *flags]) == 2
            assert said in capsys.readouterr().err
        server.shutdown()
        thread.join()


def test_a_server_without_tls_is_told_from_one_that_is_not_trusted(chat: Callable[..., tuple[str, str]]) -> None:
    with scripted() as server:
        _, err = chat("--url", server.url.replace("http:", "https:"))
    assert "is it http:// there?" in err


def test_a_file_that_holds_no_certificate_is_named(tmp_path: Path) -> None:
    for file, content in ((tmp_path / "none.pem", None), (tmp_path / "odd.pem", "odd")):
        if content is not None:
            file.write_text(content)
        with pytest.raises(ConfigError, match=f"{file.name} holds no certificates"):
            Address.parse("https://localhost/v1", None, file)
