"""The keys of a deployment's links: its launcher makes them and hands them to its parts; others cannot send.

Every frame is encrypted (CURVE), and a connection with other keys, or without keys, ends before its first frame. The
launcher has a pair of keys of its own, so that the router knows its connection from those of parts: all parts share the
other pair.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

_DOMAIN = "alignedserve"  # without a domain libzmq admits every key


@dataclass(frozen=True)
class LinkKeys:
    """The pair of keys of a process, and the public keys of the deployment, in ZeroMQ's text form."""

    public: str
    secret: str = field(repr=False)
    parts: str  # public: of every inbox
    launcher: str  # public

    def secret_of(self, what: str) -> bytes:
        """Return a secret for this purpose, which who has these keys can derive."""
        return hmac.digest(self.secret.encode(), what.encode(), "sha256")

    def guard(self, inbox: zmq.Socket[Any]) -> None:
        """Have a part's inbox admit keys of the deployment only. Call this before it binds."""
        inbox.setsockopt(zmq.CURVE_SERVER, 1)
        inbox.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)
        inbox.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)

    def show(self, link: zmq.Socket[Any]) -> None:
        """Have this link present the keys. Call this before it connects."""
        link.setsockopt_string(zmq.CURVE_SERVERKEY, self.parts)
        link.setsockopt_string(zmq.CURVE_PUBLICKEY, self.public)
        link.setsockopt_string(zmq.CURVE_SECRETKEY, self.secret)

    @contextmanager
    def admission(self, context: zmq.Context[Any], hears_launcher: bool) -> Iterator[None]:
        """Run a doorkeeper for the guarded inboxes of a context: a thread that checks each new connection once."""
        keeper = ThreadAuthenticator(context)
        keeper.start()
        admitted = {self.parts, *({self.launcher} if hears_launcher else ())}
        # ZeroMQ itself checks that the peer has the secret key too.
        keeper.configure_curve_callback(_DOMAIN, SimpleNamespace(callback=lambda _, key: key.decode() in admitted))
        try:
            yield
        finally:
            keeper.stop()

    def is_launchers(self, frame: zmq.Frame) -> bool:
        """Return whether the frame came from a process that has the launcher's keys."""
        return frame.get("User-Id") == self.launcher


@dataclass(frozen=True)
class DeploymentKeys:
    launcher: LinkKeys
    parts: LinkKeys

    @classmethod
    def new(cls) -> DeploymentKeys:
        (launcher, launchers_secret), (parts, parts_secret) = _new_pair(), _new_pair()
        of_launcher = LinkKeys(launcher, launchers_secret, parts, launcher)
        return cls(of_launcher, replace(of_launcher, public=parts, secret=parts_secret))


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()
