"""Who can reach a deployment, and with what: checked before anything is started."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import replace
from pathlib import Path

from alignedserve.config.config import Config, ServerConfig
from alignedserve.errors import ConfigError
from alignedserve.gateway.access.keys import key_ring, sealed


def checked(config: Config) -> Config:
    """With what only we need to read of it replaced: paths are absolute, a key is its hash.

    An address that others can reach needs keys, or a plain word that it is to have none.
    """
    server = config.server
    keys_file = server.keys_file and str(Path(server.keys_file).absolute())
    has_keys = bool(key_ring(server.api_key, keys_file))
    if not has_keys and not server.allow_anonymous and not is_loopback(server.host):
        raise ConfigError(
            f"server.host {server.host} can be reached by others, who would need no key: "
            "set --keys-file or --api-key, or --allow-anonymous to let everybody in"
        )
    return replace(config, server=_with_tls(replace(server, keys_file=keys_file, api_key=_sealed(server.api_key))))


def warnings(server: ServerConfig) -> list[str]:
    """What an operator should know, in plain words, of a configuration that is allowed."""
    if is_loopback(server.host):
        return []
    told = []
    if not key_ring(server.api_key, server.keys_file):
        told.append(f"everybody who can reach {server.host} may use it: there are no keys")
    if server.tls_cert is None:
        told.append("keys, prompts and answers cross the network as plain text: there is no TLS")
    return told


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """TLS 1.2 and later, with what Python's defaults allow."""
    if server.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(server.tls_cert, server.tls_key, password=_no_password)
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted: give one that is not")


def _sealed(api_key: str | None) -> str | None:
    return None if api_key is None else sealed(api_key)


def _with_tls(server: ServerConfig) -> ServerConfig:
    if server.tls_cert is None:
        if server.tls_key is not None:
            raise ConfigError("server.tls_key needs server.tls_cert beside it")
        return server
    paths = [str(Path(path).absolute()) for path in (server.tls_cert, server.tls_key or server.tls_cert)]
    found = replace(server, tls_cert=paths[0], tls_key=paths[1])
    try:
        tls_context(found)
    except (OSError, ValueError) as error:
        raise ConfigError(f"TLS cannot be had with {' and '.join(dict.fromkeys(paths))}: {error}") from None
    return found
