"""The keys of a deployment's links: its launcher makes them and hands them to its parts; others cannot send.

With keys every frame is encrypted (CURVE), and a connection with other keys, or without keys, ends before its first
frame. Without keys, links work on the loopback of one machine only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

_DOMAIN = "alignedserve"  # without a domain libzmq admits every key


@dataclass(frozen=True)
class LinkKeys:
    """One pair of keys for all parts of a deployment, in ZeroMQ's text form."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def new(cls) -> LinkKeys:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def guard(self, inbox: zmq.Socket[Any]) -> None:
        """Have this inbox admit these keys only. Call this before it binds."""
        inbox.setsockopt(zmq.CURVE_SERVER, 1)
        inbox.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)
        inbox.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)

    def show(self, link: zmq.Socket[Any]) -> None:
        """Have this link present the keys. Call this before it connects."""
        link.setsockopt_string(zmq.CURVE_SERVERKEY, self.public)
        link.setsockopt_string(zmq.CURVE_PUBLICKEY, self.public)
        link.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)

    @contextmanager
    def admission(self, context: zmq.Context[Any]) -> Iterator[None]:
        """Run a doorkeeper for the guarded inboxes of a context: a thread that checks each new connection once."""
        keeper = ThreadAuthenticator(context)
        keeper.start()
        keeper.configure_curve_callback(_DOMAIN, self)
        try:
            yield
        finally:
            keeper.stop()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the doorkeeper admits this key. ZeroMQ itself checks that the peer has the secret key too."""
        return key == self.public.encode()
