"""Addresses of Redis as they may be shown: without passwords, which stand before the host and among the options."""

from __future__ import annotations

import re

HIDDEN = "(hidden)"


def hide_secrets(url: str) -> str:
    """Return the address with its login and the passwords among its options hidden.

    All but the scheme is hidden where a / or ? may be one of a password that was not quoted."""
    url = re.sub(r"([?&][^=&]*password)=[^&]*", rf"\1={HIDDEN}", url, flags=re.IGNORECASE)
    scheme, colon, rest = url.partition("://")
    if not colon:  # sqlite, or off
        return url
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    others = rest[len(host) :]
    if "@" in others:
        return f"{scheme}://{HIDDEN}"
    login, at, host = host.rpartition("@")
    return f"{scheme}://{HIDDEN if login else ''}{at}{host}{others}"


def without_password(url: str) -> str:
    """Return where the server is: `redis://HOST:6379/0`."""
    return hide_secrets(url).replace(f"{HIDDEN}@", "").partition("?")[0]
