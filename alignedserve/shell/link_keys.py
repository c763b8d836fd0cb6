"""Who may speak on a deployment's links: whoever has its keys, which its launcher makes and hands to its parts.

With keys every frame is encrypted (CURVE), and a connection of somebody who has other keys, or none, ends before its
first frame. Without, links are for one machine's loopback only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

_DOMAIN = "alignedserve"  # without one, libzmq asks nobody whether a key is welcome


@dataclass(frozen=True)
class LinkKeys:
    """One pair for all parts of a deployment, in ZeroMQ's text form."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> LinkKeys:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def guard(self, inbox: zmq.Socket[Any]) -> None:
        """Before it binds."""
        inbox.setsockopt(zmq.CURVE_SERVER, 1)
        inbox.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)
        inbox.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)

    def show(self, link: zmq.Socket[Any]) -> None:
        """Before it connects."""
        link.setsockopt_string(zmq.CURVE_SERVERKEY, self.public)
        link.setsockopt_string(zmq.CURVE_PUBLICKEY, self.public)
        link.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)

    @contextmanager
    def admission(self, context: zmq.Context[Any]) -> Iterator[None]:
        """A doorkeeper for the guarded inboxes of a context: a thread, which answers once for each new connection."""
        keeper = ThreadAuthenticator(context)
        keeper.start()
        keeper.configure_curve_callback(_DOMAIN, self)
        try:
            yield
        finally:
            keeper.stop()

    def callback(self, domain: str, key: bytes) -> bool:
        """As the doorkeeper asks; only who has the secret key, too, can say that this one is his."""
        return key == self.public.encode()
