"""The way of signs of life from the parts that start to their launcher, which has an inbox for nothing else.

A part's newest sign is what counts, so it is sent a few times a second at most, whatever there was to say meanwhile.
One that runs goes on giving signs, as long as its loops turn (loop_watch.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import zmq

from alignedserve.errors import WireError
from alignedserve.protocol.wire import pack, unpack
from alignedserve.shell.link_keys import LinkKeys
from alignedserve.signs import Sign, Stage

_EACH_S = 0.2  # least time between two signs of a part
_SAID_S = 1.0  # within which a sign that waits for its turn is sent
_MOST_BYTES = 4096  # of a sign, encrypted
_KINDS: dict[str, type] = {Sign.__name__: Sign}


class SignSender:
    """Sends the signs of this process from a thread of its own."""

    def __init__(self, part: str, incarnation: int, launcher: str, keys: LinkKeys) -> None:
        self._sign, self._lock = Sign(part, incarnation, Stage.LIBRARIES), threading.Lock()
        self._launcher, self._keys = launcher, keys
        self._has_changed, self._runs_is_said = threading.Event(), threading.Event()
        self._has_changed.set()
        threading.Thread(target=self._send, name="signs", daemon=True).start()

    def stage(self, stage: Stage, total: int = 0) -> None:
        with self._lock:
            self._sign = replace(self._sign, stage=stage, done=0, total=total)
        self._has_changed.set()
        if stage is Stage.RUNS:  # the first request may hang the whole process: running parts are watched more closely
            self._runs_is_said.wait(_SAID_S)

    def advance(self, done: int = 1) -> None:
        with self._lock:
            self._sign = replace(self._sign, done=self._sign.done + done)
        self._has_changed.set()

    def _send(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._keys.show(socket)
        socket.connect(self._launcher)
        while True:
            self._has_changed.wait()
            self._has_changed.clear()
            sign = self._sign
            socket.send(pack(sign))
            if sign.stage is Stage.RUNS:
                self._runs_is_said.set()
            time.sleep(_EACH_S)


class SignInbox:
    """The launcher's inbox for signs. Each sign is passed to `hear`, in the inbox's own thread."""

    def __init__(self, address: str, keys: LinkKeys, hear: Callable[[Sign], None]) -> None:
        """Listen at the address with the keys of the parts, which alone are heard."""
        self._hear = hear
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._admission = keys.admission(self._context, hears_launcher=False)
        self._admission.__enter__()
        self._inbox = self._context.socket(zmq.PULL)
        keys.guard(self._inbox)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        self._inbox.bind(address)
        self.address: str = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._receive, name="signs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._admission.__exit__(None, None, None)
        self._context.term()  # ends the thread's wait
        self._thread.join()

    def _receive(self) -> None:
        while True:
            try:
                self._hear(unpack(self._inbox.recv(), _KINDS))
            except WireError:
                continue  # a part of another version, or one that has gone mad
            except zmq.ContextTerminated:
                self._inbox.close(linger=0)
                return
