"""A certificate that is renewed counts for new connections, without a restart."""

from __future__ import annotations

import shutil
import socket
import ssl
from pathlib import Path
from threading import Thread

import pytest

from alignedserve.errors import ConfigError
from alignedserve.gateway.access.exposure import Certificate

PEMS = Path(__file__).parent / "certificates"


def shown(certificate: Certificate) -> bytes | None:
    """Return the certificate that a client is shown."""
    ours, theirs = socket.socketpair()
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE

    def answer() -> None:
        with ours, certificate.context.wrap_socket(ours, server_side=True):
            pass

    server = Thread(target=answer)
    server.start()
    try:
        with theirs, client.wrap_socket(theirs) as connection:
            return connection.getpeercert(binary_form=True)
    finally:
        server.join()


def of(name: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert((PEMS / f"{name}.pem").read_text().partition("-----BEGIN PRIVATE")[0])


def test_a_new_certificate_is_shown_to_new_connections_and_a_wrong_one_never(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(PEMS / "first.pem", cert)
    shutil.copy(PEMS / "first.pem", key)
    certificate = Certificate(str(cert), str(key))
    certificate.read()
    assert shown(certificate) == of("first")

    shutil.copy(PEMS / "second.pem", cert)  # and its key a moment later
    with pytest.raises(ConfigError, match=r"TLS cannot be used with .*cert\.pem and .*key\.pem"):
        certificate.read()
    assert shown(certificate) == of("first")

    shutil.copy(PEMS / "second.pem", key)
    certificate.read()
    assert shown(certificate) == of("second")

    cert.unlink()
    with pytest.raises(ConfigError):
        certificate.read()
    assert shown(certificate) == of("second")
