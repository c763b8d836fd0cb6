"""The mailbox of a worker, in which other workers leave notes for it: over ZeroMQ, by the keys of the deployment.

    post ── box, note ──▶ mailbox     a connection without the keys ends before anything of it is read (link_keys.py)
         ◀── empty ──                 the note is there

A post has a connection of its own, so that a worker that has gone is found out at once. On one machine a mailbox is a
socket that only its user can open, as inboxes are.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from urllib.parse import quote, unquote

import zmq

from alignedserve.engine.device.groups import BrokenGroup
from alignedserve.errors import TransportError
from alignedserve.shell.link_keys import LinkKeys
from alignedserve.shell.links import inbox
from alignedserve.shell.part import PartSpec

_OPTIONS = {
    zmq.MAXMSGSIZE: 1 << 16,
    zmq.HANDSHAKE_IVL: 5_000,  # ms: a connection that has not shown its keys by then ends
    zmq.BACKLOG: 1024,
    zmq.LINGER: 0,
}
_MOST_LATE = 16  # posts that were not answered in time and may still arrive
_LOST = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class Mailbox:
    def __init__(self, keys: LinkKeys, host: str, at: str = "") -> None:
        """Listen at ZeroMQ's address `at`, or at a free port of `host`; at `host` listen the ends of groups too."""
        self.host, self._keys = host, keys
        self._boxes, self._changed = defaultdict[str, deque[bytes]](deque), threading.Condition()
        self._late, self._is_closed = deque[zmq.Socket[bytes]](maxlen=_MOST_LATE), False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._admission = keys.admission(self._context, hears_launcher=False)
        self._admission.__enter__()
        self._inbox = self._context.socket(zmq.REP)
        keys.guard(self._inbox)
        for option, value in _OPTIONS.items():
            self._inbox.setsockopt(option, value)
        try:
            self._inbox.bind(at or f"tcp://{host}:*")
        except zmq.ZMQError as error:
            raise TransportError(f"no mailbox can be opened at {at or host}: {error.strerror}") from None
        self.address = quote(self._inbox.getsockopt_string(zmq.LAST_ENDPOINT), safe=":/")  # a path may have spaces
        self._thread = threading.Thread(target=self._serve, name="mailbox", daemon=True)
        self._thread.start()

    def leave(self, box: str, note: bytes) -> None:
        """Leave a note for this worker itself. Any thread may call this."""
        with self._changed:
            self._boxes[box].append(note)
            self._changed.notify_all()

    def take(self, box: str, deadline: float) -> bytes:
        """Wait for the next note of a box, and take it out. Raises BrokenGroup if none comes in time, or before the
        mailbox is closed."""
        with self._changed:
            left_s = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: self._boxes.get(box) or self._is_closed, left_s)
            if not self._boxes.get(box):
                raise BrokenGroup(f"{box}: no answer in time")
            note = self._boxes[box].popleft()
            if not self._boxes[box]:
                del self._boxes[box]
            return note

    def clear(self, beginning: str) -> None:
        """Take out all notes of boxes whose names begin so: nobody waits for them any more."""
        with self._changed:
            for box in [box for box in self._boxes if box.startswith(beginning)]:
                del self._boxes[box]

    def post(self, address: str, box: str, note: bytes, deadline: float) -> None:
        """Leave a note in the mailbox at this address. Raises BrokenGroup if that has gone, has other keys, or is
        silent; then the note may still arrive later."""
        try:
            link = self._context.socket(zmq.REQ)
            try:
                heard = self._ask(link, address, [box.encode(), note], deadline)
            except BaseException:
                link.close()
                raise
        except zmq.ZMQError as error:  # no address of a mailbox, or this one was closed
            raise BrokenGroup(f"{address}: {error.strerror}") from None
        with self._changed:
            may_be_late = not heard and not self._is_closed  # once it is closed, nobody else would close the link
            if may_be_late:
                self._late.append(link)
        if not may_be_late:
            link.close()
        if not heard:
            raise BrokenGroup(f"{box}: the mailbox at {address} does not answer in time")
        if link not in heard:
            raise BrokenGroup(f"{box}: the mailbox at {address} cannot be reached")

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for link in self._late:
            link.close()
        self._admission.__exit__(None, None, None)
        self._context.term()  # ends what other threads wait for at their links; each closes its own
        self._thread.join()

    def _ask(
        self, link: zmq.Socket[bytes], address: str, said: list[bytes], deadline: float
    ) -> list[zmq.Socket[bytes]]:
        """Return the link where it is answered, the monitor of the link where that is lost, nothing in silence."""
        link.setsockopt(zmq.LINGER, 0)
        self._keys.show(link)
        poller = zmq.Poller()
        with link.get_monitor_socket(_LOST) as events:
            for socket in (link, events):
                poller.register(socket, zmq.POLLIN)
            try:
                link.connect(unquote(address))
                link.send_multipart(said)
                heard = poller.poll(max(0, math.ceil((deadline - time.monotonic()) * 1000)))
            finally:
                link.disable_monitor()
        return [socket for socket, _ in heard]

    def _serve(self) -> None:
        try:
            while True:
                said = self._inbox.recv_multipart()
                if len(said) == 2:  # else of another version
                    self.leave(said[0].decode(errors="replace"), said[1])
                self._inbox.send(b"")
        except zmq.ContextTerminated:
            self._inbox.close()


def mailbox_of(spec: PartSpec) -> Mailbox:
    """Open the mailbox of a worker, or of one of its ranks."""
    assert spec.keys is not None, f"{spec.name} has no keys for its links"
    at = inbox(spec.deployment, f"{spec.name}.{spec.incarnation}-mail") if spec.is_private else ""
    return Mailbox(spec.keys, spec.host, at)
