"""Links between processes: each process has one inbox, and a numbered one-way link to each member that it talks to.

A frame carries its sender's name and incarnation and its number on the link. Frames of an earlier life are dropped,
and so are frames whose number is not larger than the last; a missing number is reported as `LinkGap`. Therefore a
new link to the same address goes on counting.
"""

from __future__ import annotations

import logging
import math
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import zmq

from alignedserve.core import Choice, Request, Sampling
from alignedserve.errors import AlignedServeError, WireError
from alignedserve.protocol.events import LinkGap, Received
from alignedserve.protocol.membership import UNNUMBERED, Heard
from alignedserve.protocol.messages import ROUTER, Attempt, Message, Prefill, Submit
from alignedserve.protocol.wire import Envelope, attempts_in, decode, encode
from alignedserve.shell.control import private_socket
from alignedserve.shell.link_keys import LinkKeys


class SharedPrompts:
    """Choices of one body share prompt and rules, and each choice comes in its own frame: a part keeps prompt and rules
    once, or a body of some kilobytes with many choices would take megabytes.
    """

    def __init__(self) -> None:
        self._prompt: tuple[int, ...] = ()
        self._stop_tokens: tuple[int, ...] = ()
        self._rules: Sampling | None = None  # the last rules that may be long

    def share(self, envelope: Envelope) -> Envelope:
        """Return the envelope; fields that equal those of the request before share its objects."""
        message = envelope.message
        if not isinstance(message, Submit | Prefill):
            return envelope
        shared = self._shared(message.request)
        return envelope if shared is message.request else replace(envelope, message=replace(message, request=shared))

    def _shared(self, request: Request) -> Request:
        if request.prompt == self._prompt:
            request = replace(request, prompt=self._prompt)
        if request.stop_tokens == self._stop_tokens:
            request = replace(request, stop_tokens=self._stop_tokens)
        self._prompt, self._stop_tokens = request.prompt, request.stop_tokens
        own, last = request.sampling, self._rules
        if own.logit_bias or own.allowed_tokens or own.grammar is not None or own.syntax:
            if last is not None and _rules(own) == _rules(last):
                bias, allowed, grammar, syntax = _rules(last)
                own = replace(own, logit_bias=bias, allowed_tokens=allowed, grammar=grammar, syntax=syntax)
                request = replace(request, sampling=own)
            self._rules = own
        return request


def _rules(of: Sampling) -> tuple[tuple[tuple[int, float], ...], bytes, Choice | None, str]:
    return of.logit_bias, of.allowed_tokens, of.grammar, of.syntax


log = logging.getLogger("alignedserve.links")
_Arrived = TypeVar("_Arrived")
_On: TypeAlias = Callable[[tuple[Attempt, ...]], None]

MOST_QUEUED = 100_000  # frames on a link, before it counts as full
_SEAL = 33  # bytes that encryption adds to a frame
CUT_OFF = 4  # times the limit ends the connection; a frame between the two is refused with a line in the log
_HANDSHAKE_MS = 5_000  # a connection that has not shown its keys by then ends; the other side tries again
_MOST_SAID = 100  # reasons why frames are refused, until one is logged a second time
MOST_WAITING = 100  # of a pulse, while the router is away: heartbeats do not pile up


class LinkFull(AlignedServeError):
    """A member takes no more frames."""


@dataclass
class MemberLink:
    address: str
    incarnation: int
    socket: zmq.Socket[bytes]
    sent: int = 0


class Links:
    def __init__(self, name: str, incarnation: int, bind: str, router: str, most_bytes: int, keys: LinkKeys) -> None:
        self.name, self.incarnation = name, incarnation
        self._most_bytes, self._keys = most_bytes, keys
        self._context = zmq.Context()
        self._doorkeeper = ExitStack()
        self._hears_launcher = name == ROUTER
        self._doorkeeper.enter_context(keys.admission(self._context, self._hears_launcher))
        self._inbox = self._context.socket(zmq.PULL)
        keys.guard(self._inbox)
        self._inbox.setsockopt(zmq.RCVHWM, MOST_QUEUED)
        self._inbox.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        # This ends a connection before its frame fills the memory.
        self._inbox.setsockopt(zmq.MAXMSGSIZE, CUT_OFF * most_bytes + _SEAL)
        try:
            self._inbox.bind(bind)
        except zmq.ZMQError as error:
            raise AlignedServeError(f"cannot listen on {bind}: {error.strerror}") from error
        self.address: str = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wake_address = f"inproc://wake-{id(self)}"
        self._woken = self._context.socket(zmq.PULL)
        self._woken.bind(self._wake_address)
        self._waker = self._pushing()
        self._waker.connect(self._wake_address)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)
        self._waker_lock = threading.RLock()  # a signal handler may wake while another handler does
        self._links: dict[str, MemberLink] = {}
        self._ended: dict[str, MemberLink] = {}  # name -> the link before
        self._heard, self._prompts = Heard(name), SharedPrompts()
        self._said: set[str] = set()  # why frames were refused
        self.connect(ROUTER, router)

    def _pushing(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, MOST_QUEUED)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        return socket

    def _connected(self, address: str) -> zmq.Socket[bytes]:
        socket = self._pushing()
        self._keys.show(socket)
        socket.connect(address)
        return socket

    def connect(self, name: str, address: str, incarnation: int = 0) -> None:
        """Link to a member. A later life's address replaces the present address; an earlier life's address does not."""
        self._heard.meet(name, incarnation)
        known = self._links.get(name)
        if known is not None and (known.address == address or known.incarnation > incarnation):
            return
        self.disconnect(name)
        before = self._ended.pop(name, None)
        sent = before.sent if before is not None and before.address == address else 0
        self._links[name] = MemberLink(address, incarnation, self._connected(address), sent)

    def disconnect(self, name: str) -> None:
        link = self._links.pop(name, None)
        if link is not None:
            link.socket.close()
            self._ended[name] = link

    def send(self, to: str, message: Message) -> None:
        """Queue a frame for a member. A member that is not there gets nothing: its loss is an event of its own. Raises
        WireError if no frame can hold the message, LinkFull if too many frames are queued."""
        link = self._links.get(to)
        if link is None:
            log.debug("%s: no link to %s for %s", self.name, to, type(message).__name__)
            return
        link.sent += 1
        frame = encode(Envelope(self.name, self.incarnation, link.sent, message))
        if len(frame) > self._most_bytes:  # the receiver would drop it without telling the sender
            what = f"a {type(message).__name__} of {len(frame)} bytes"
            raise WireError(f"{what} exceeds the limit of {self._most_bytes}")
        try:
            link.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise LinkFull(f"{to} takes no more frames: {MOST_QUEUED} are queued") from None

    def wake(self) -> None:
        """End a `receive` that waits. Any thread may call this, also after `close`."""
        with self._waker_lock:
            if not self._waker.closed:
                self._waker.send(b"")

    def receive(self, timeout_s: float | None, on: _On | None = None) -> list[Received | LinkGap]:
        """Return what has arrived; where nothing has, wait for it at most so long. `on` is told which requests are in
        the frame that is read next, since the process may end amid reading."""
        if timeout_s is None or timeout_s > 0:  # else what is there is read at once
            self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
        _drain(partial(self._woken.recv, zmq.NOBLOCK))
        events: list[Received | LinkGap] = []
        if self._hears_launcher:
            for labelled in _drain(self._labelled):
                events += self._read(labelled.bytes, on, self._keys.is_launchers(labelled))
        else:
            for frame in _drain(partial(self._inbox.recv, zmq.NOBLOCK)):
                events += self._read(frame, on)
        if on is not None:
            on(())
        return events

    def _labelled(self) -> zmq.Frame:
        """Return a frame with the keys that it came by. This costs a microsecond more."""
        return self._inbox.recv(zmq.NOBLOCK, copy=False)

    def _read(self, frame: bytes, on: _On | None, is_launchers: bool = False) -> list[Received | LinkGap]:
        if on is not None:
            on(attempts_in(frame))
        try:
            envelope = self._prompts.share(decode(frame, self._most_bytes))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a WireError, or what no frame should have made possible
            self._log_once(str(error) if isinstance(error, WireError) else f"a frame cannot be read: {error!r}")
            return []
        return self._heard.events(envelope, is_launchers)

    def _log_once(self, why: str) -> None:
        """Say why a frame is refused, unless that was said lately: a part of another version sends heartbeats on."""
        if why not in self._said:
            if len(self._said) >= _MOST_SAID:
                self._said.clear()
            self._said.add(why)
            log.warning("%s: %s", self.name, why)

    def close(self) -> None:
        for link in self._links.values():
            link.socket.close(linger=200)  # the last messages still go out
        with self._waker_lock:  # a socket that is closed during a send ends the process
            self._waker.close(linger=0)
        for end in (self._inbox, self._woken):
            end.close(linger=0)
        self._doorkeeper.close()
        self._context.term()


def _drain(receive: Callable[[], _Arrived]) -> list[_Arrived]:
    """Return all that has arrived."""
    arrived = []
    try:
        while True:
            arrived.append(receive())
    except zmq.Again:
        return arrived


class Pulse:
    """Says a message to the router again and again, from a thread of its own: that a member lives, or what a launcher
    has started."""

    def __init__(
        self,
        sender: str,
        incarnation: int,
        message: Message,
        router: str,
        interval_s: float,
        keys: LinkKeys,
        look: Callable[[Message], Message] = lambda message: message,
    ) -> None:
        """`look` is called before each repetition, in this thread, and returns what is said."""
        self._sender, self._incarnation, self._message = sender, incarnation, message
        self._router, self._interval_s, self._keys, self._look = router, interval_s, keys, look
        self._said: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: stop
        self._said.put(message)
        self._thread = threading.Thread(target=self._speak, name="pulse", daemon=True)
        self._thread.start()

    def say(self, message: Message) -> None:
        """Say this once, now. Any thread may call this."""
        self._said.put(message)

    def change(self, message: Message) -> None:
        """Say this now, and from now on again and again."""
        self._message = message
        self.say(message)

    def stop(self) -> None:
        self._said.put(None)
        self._thread.join()

    def _speak(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, MOST_WAITING)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._keys.show(socket)
        socket.connect(self._router)
        while (message := self._next()) is not None:
            try:
                socket.send(encode(Envelope(self._sender, self._incarnation, UNNUMBERED, message)), zmq.NOBLOCK)
            except zmq.Again:
                log.debug("the router takes nothing from %s", self._sender)
        socket.close()
        context.term()

    def _next(self) -> Message | None:
        try:
            return self._said.get(timeout=self._interval_s)
        except queue.Empty:
            return self._look(self._message)


# --- Inboxes of a deployment on one machine: sockets in a folder that only its user can open
#
# The keys of links (link_keys.py) say who is heard, but only after a handshake: whoever may connect can hold
# connections open, and make a part keep room for a frame, before it. At these sockets no other user of the machine may
# connect. Killed parts leave theirs behind; their next life, their launcher or the next deployment removes them.

PREFIX = "alignedserve-"  # of the names of all deployments
_YOUNG_S = 0.1  # a socket is there before its process listens, though for less than this


def inbox(deployment: str, part: str, incarnation: int | None = None) -> str:
    """Return the address of a part, or of one of its lives; raises ControlError if there is no folder for it."""
    life = "" if incarnation is None else f".{incarnation}"
    return f"ipc://{private_socket(f'{deployment}-{part}{life}')}"


def remove_sockets(deployment: str, beginning: str = "") -> None:
    """Remove the sockets that killed parts of this deployment have left, or those whose names begin so."""
    for path in _sockets(f"{deployment}-{beginning}"):
        path.unlink(missing_ok=True)


def remove_dead_sockets() -> None:
    """Remove the sockets of deployments whose launcher was killed too."""
    if dead := [path for path in _sockets(PREFIX) if not _is_heard(path)]:
        time.sleep(_YOUNG_S)
        for path in dead:
            if not _is_heard(path):
                path.unlink(missing_ok=True)


def _sockets(prefix: str) -> list[Path]:
    return list(private_socket(prefix).parent.glob(f"{prefix}*.sock"))


def _is_heard(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)  # whoever listens may be busy
        try:
            connection.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
        return True
