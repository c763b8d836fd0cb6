"""The certificate of HTTPS, which is read again where its files have changed: it is renewed without a restart."""

from __future__ import annotations

import logging
import ssl

from alignedserve.errors import ConfigError
from alignedserve.gateway.access.keys import state_of

log = logging.getLogger("alignedserve.certificate")


class Certificate:
    def __init__(self, cert: str, key: str) -> None:
        """`cert` and `key` are files in PEM. Raise ConfigError where they cannot be used."""
        self._paths = (cert, key)
        self._read = self._paths, state_of(*self._paths)
        self.context = self._loaded(self._paths)  # of all connections

    def follow(self, cert: str, key: str) -> None:
        """Take the certificate from these files, from the next `read` on."""
        self._paths = (cert, key)

    def read(self) -> None:
        """Take the certificate as it is now, for new connections. Raise a ConfigError, and keep the one that was, where
        it cannot be used: its files may be replaced one after the other."""
        paths = self._paths
        now = paths, state_of(*paths)
        if now == self._read:
            return
        self._loaded(paths)  # a context that fails to load has lost its key
        self.context.load_cert_chain(*paths, password=_no_password)
        self._read = now
        log.info("the certificate has changed: new connections get it")

    @staticmethod
    def _loaded(paths: tuple[str, str]) -> ssl.SSLContext:
        """Return Python's defaults, from TLS 1.2 on, with the certificate."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(*paths, password=_no_password)
        except (OSError, ValueError) as error:
            files = " and ".join(dict.fromkeys(paths))
            raise ConfigError(f"TLS cannot be used with {files}: {error}") from None
        return context


def _no_password() -> str:
    raise ValueError("the key is encrypted: use a key that is not")
