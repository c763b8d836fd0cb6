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
        self._state = state_of(*self._paths)
        self.context = self._loaded()  # of all connections

    def read(self) -> None:
        """Take the certificate as it is now, for new connections. Raise a ConfigError, and keep the one that was, where
        it cannot be used: its files may be replaced one after the other."""
        state = state_of(*self._paths)
        if state == self._state:
            return
        self._loaded()  # a context that fails to load has lost its key
        self.context.load_cert_chain(*self._paths, password=_no_password)
        self._state = state
        log.info("the certificate has changed: new connections get it")

    def _loaded(self) -> ssl.SSLContext:
        """Return Python's defaults, from TLS 1.2 on, with the certificate."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(*self._paths, password=_no_password)
        except (OSError, ValueError) as error:
            files = " and ".join(dict.fromkeys(self._paths))
            raise ConfigError(f"TLS cannot be used with {files}: {error}") from None
        return context


def _no_password() -> str:
    raise ValueError("the key is encrypted: use a key that is not")
