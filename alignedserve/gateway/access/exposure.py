"""Check before a deployment starts who can reach it, with which keys, and whether by TLS."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from pathlib import Path

from alignedserve.config.config import Config
from alignedserve.config.sections import ServerConfig
from alignedserve.errors import ConfigError
from alignedserve.gateway.access.certificate import Certificate
from alignedserve.gateway.access.keys import hash_setting, key_ring


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
    return replace(config, server=_check_tls(replace(server, keys_file=keys_file, api_key=api_key)))


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


def _check_tls(server: ServerConfig) -> ServerConfig:
    """Return the settings with absolute paths of the certificate and its key, after loading both."""
    if server.tls_cert is None:
        if server.tls_key is not None:
            raise ConfigError("server.tls_key needs server.tls_cert too")
        return server
    cert, key = (str(Path(path).absolute()) for path in (server.tls_cert, server.tls_key or server.tls_cert))
    absolute = replace(server, tls_cert=cert, tls_key=key)
    Certificate(cert, key)
    return absolute
