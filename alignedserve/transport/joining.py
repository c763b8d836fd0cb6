"""Joins two processes by a socket, once both have proved to each other that they know a secret.

The receiver of a channel listens at a free port, and leaves it and a fresh secret in the source's mailbox, which the
deployment's parts alone can open (mailbox.py). Ranks of a worker have a secret by the deployment's keys (`meet`). The
receiver listens until the source has come:

    source ── connects ──▶ receiver
           ◀── nonce ──                  a fresh one for each connection
           ── proof, nonce ──▶           another proof ends this connection alone; so does silence, with the meeting
           ◀── proof ──                  the receiver does not listen any more

A proof is a keyed hash (HMAC-SHA256) of who proves and of the other's nonce. Strangers are heard beside the source.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeAlias

import torch

from alignedserve.engine.device.groups import BrokenGroup
from alignedserve.engine.device.rank_link import SHORT, RankLink, TeamLinks
from alignedserve.engine.device.ranks import Team
from alignedserve.errors import RankLost
from alignedserve.protocol.messages import rank_suffix
from alignedserve.shell.control import private_socket
from alignedserve.shell.part import PartSpec

Address: TypeAlias = tuple[str, int] | str  # host and port, or the path of a socket

SECRET_BYTES = _NONCE_BYTES = _PROOF_BYTES = 32
_BACKLOG = 1024  # most connections that wait to be accepted
_MOST_HEARD = 100  # most connections that have not proved themselves yet: beyond it, the oldest one ends


def listening(address: Address) -> socket.socket:
    """Return a socket that listens at this address, where port 0 is any free one."""
    return socket.create_server(address, family=_family(address), backlog=_BACKLOG)


def admitted(door: socket.socket, secret: bytes, deadline: float) -> Generator[socket.socket, None, None]:
    """Yield each connection that proves to be a source's. Raises BrokenGroup if none does so in time."""
    heard: dict[socket.socket, bytes] = {}  # connection -> its nonce
    door.setblocking(False)
    with selectors.DefaultSelector() as ready:
        ready.register(door, selectors.EVENT_READ)
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                for key, _ in ready.select(left_s):
                    link = key.fileobj
                    assert isinstance(link, socket.socket)
                    if link is door:
                        with suppress(BlockingIOError, ConnectionError):  # it has gone already
                            link, _ = door.accept()
                            link.setblocking(False)
                            heard[link] = secrets.token_bytes(_NONCE_BYTES)
                            ready.register(link, selectors.EVENT_READ)
                            link.send(heard[link])
                        link = next(iter(heard)) if len(heard) > _MOST_HEARD else door
                    elif link in heard and _proves(link, secret, heard[link]):
                        del heard[link]
                        ready.unregister(link)
                        yield link
                    if heard.pop(link, None) is not None:
                        ready.unregister(link)
                        link.close()
        finally:
            for link in heard:
                link.close()
    raise BrokenGroup("the other end has not connected in time")


def entered(address: Address, secret: bytes, timeout_s: float) -> socket.socket:
    """Connect to the receiver. Raises BrokenGroup or OSError if what listens there does not prove to be it."""
    link, nonce = socket.socket(_family(address)), secrets.token_bytes(_NONCE_BYTES)
    try:
        link.settimeout(timeout_s)
        link.connect(address)
        link.sendall(_proof(secret, b"source", link.recv(_NONCE_BYTES)) + nonce)
        if not hmac.compare_digest(link.recv(_PROOF_BYTES), _proof(secret, b"receiver", nonce)):
            raise BrokenGroup("what listens there has not proved to be the other end")
    except BaseException:
        link.close()
        raise
    return link


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_UNIX if isinstance(address, str) else socket.AF_INET


def _proves(link: socket.socket, secret: bytes, nonce: bytes) -> bool:
    """Return whether the connection proves to be the source's, and answer it. So short a proof comes whole."""
    with suppress(OSError):  # it has gone
        said = link.recv(_PROOF_BYTES + _NONCE_BYTES)
        if hmac.compare_digest(said[:_PROOF_BYTES], _proof(secret, b"source", nonce)):
            link.send(_proof(secret, b"receiver", said[_PROOF_BYTES:]))
            return True
    return False


def _proof(secret: bytes, who: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, who + nonce, "sha256")


_MEETING_S = 300.0  # ranks do not start at the same time
_ANSWER_S = 10.0  # for a rank's proof
_PAUSE_S = 0.02  # until a rank listens


def meet(spec: PartSpec, size: int, device: torch.device, meeting_s: float = _MEETING_S) -> Team:
    """Connect this rank with the others of its life. Raises RankLost if they do not come in time.

    The ranks meet at sockets in a folder that only their user can open: all are on one machine. Once all have met, none
    listens.

        rank 1, 2 ── said, told, tensors ──▶ rank 0
        rank 2 ───── tensors ──▶ rank 1
    """
    assert spec.keys is not None, f"{spec.name} has no keys for its links"
    secret = spec.keys.secret_of(f"ranks of {spec.deployment}-{spec.worker}.{spec.incarnation}")
    own, deadline = spec.rank, time.monotonic() + meeting_s
    links: defaultdict[str, dict[int, RankLink]] = defaultdict(dict)
    try:
        with listening(str(door_of(spec, own))) as door, closing(admitted(door, secret, deadline)) as coming:
            for rank in range(own):
                for purpose in ("tensors",) if rank else TeamLinks._fields:
                    links[purpose][rank] = link = _entered(door_of(spec, rank), secret, deadline)
                    link.tell(f"{purpose} {own}".encode())
            for _ in range((size - 1 - own) * (1 if own else len(TeamLinks._fields))):
                link = RankLink(next(coming))
                link.socket.settimeout(max(_PAUSE_S, deadline - time.monotonic()))
                purpose, number = link.hear(SHORT).decode().split()
                link.socket.settimeout(None)
                links[purpose][int(number)] = link
    except (OSError, BrokenGroup) as error:
        raise RankLost(f"the ranks of this worker do not meet: {error}") from None
    finally:
        door_of(spec, own).unlink(missing_ok=True)
    return Team(own, size, TeamLinks(**links), device)


def door_of(spec: PartSpec, rank: int) -> Path:
    """Return where a rank of this worker's life listens."""
    return private_socket(f"{spec.deployment}-{spec.worker}{rank_suffix(rank)}.{spec.incarnation}-ranks")


def _entered(door: Path, secret: bytes, deadline: float) -> RankLink:
    while (left_s := deadline - time.monotonic()) > 0:
        with suppress(OSError, BrokenGroup):  # it does not listen yet, or too many strangers came
            return RankLink(entered(str(door), secret, min(left_s, _ANSWER_S)))
        time.sleep(_PAUSE_S)
    raise BrokenGroup(f"no rank has let this one in at {door} in time")
