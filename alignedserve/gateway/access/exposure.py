"""Check before a deployment starts who can reach it, with which keys, and whether by TLS; load the certificate."""

from __future__ import annotations

import ipaddress
import logging
import ssl
from dataclasses import replace
from pathlib import Path

from alignedserve.config.config import Config
from alignedserve.config.sections import ServerConfig
from alignedserve.errors import ConfigError
from alignedserve.gateway.access.keys import hash_setting, key_ring, state_of

log = logging.getLogger("alignedserve.certificate")


def check_exposure(config: Config) -> Config:
    """Return the configuration with absolute paths, and with the hash of its key in place of the key.

    Raise ConfigError if other machines can reach the address and it has neither keys nor allow_anonymous.
    """
    server = config.server
    keys_file = server.keys_file and str(Path(server.keys_file).absolute())
    has_keys = bool(key_ring(server.api_key, keys_file))
    if not has_keys and not server.allow_anonymous and not is_loopback(server.host):
        raise ConfigError(
            f"server.host {server.host} can be reached by others, who would need no key: "
            "set --keys-file or --api-key, or --allow-anonymous to let everybody in"
        )
    api_key = None if server.api_key is None else hash_setting(server.api_key)
    server = replace(server, keys_file=keys_file, api_key=api_key)
    if server.tls_cert is not None:
        cert, key = (str(Path(path).absolute()) for path in (server.tls_cert, server.tls_key or server.tls_cert))
        Certificate(cert, key)  # raises where it cannot be used
        server = replace(server, tls_cert=cert, tls_key=key)
    elif server.tls_key is not None:
        raise ConfigError("server.tls_key needs server.tls_cert too")
    return replace(config, server=server)


def warnings(server: ServerConfig) -> list[str]:
    """Return warnings for the operator about a configuration that is allowed but open."""
    found, has_keys = [], bool(key_ring(server.api_key, server.keys_file))
    if not has_keys and "*" in (server.cors_origins or ""):
        found.append("every page that a browser here opens may use it: --cors-origins is *, and there are no keys")
    if is_loopback(server.host):
        return found
    if not has_keys:
        found.append(f"everybody who can reach {server.host} may use it: there are no keys")
    if server.tls_cert is None:
        found.append("keys, prompts and answers cross the network as plain text: there is no TLS")
    return found


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Certificate:
    """A certificate that is read again where its files have changed: it is renewed without a restart."""

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
