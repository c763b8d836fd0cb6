"""A connection of two ranks of a worker, over which frames go."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from alignedserve.errors import RankLost

SHORT = 1 << 16  # most bytes of a frame to rank 0: an address names the GPUs that it reaches
_LENGTH = 8  # bytes of a frame's length


class RankLink:
    """A connection of two ranks, over which frames go. A wait has no limit: an idle worker sends nothing."""

    def __init__(self, link: socket.socket) -> None:
        """Take over a connection of the two."""
        self.socket = link
        link.settimeout(None)

    def tell(self, frame: bytes) -> None:
        try:
            self.socket.sendall(len(frame).to_bytes(_LENGTH, "little") + frame)
        except OSError as error:
            lose(error)

    def hear(self, most_bytes: int) -> bytes:
        """Return the next frame. Raises RankLost if it has more than `most_bytes`."""
        length = int.from_bytes(self._read(_LENGTH), "little")
        if length > most_bytes:
            raise RankLost(f"another rank says {length} bytes at once, the limit is {most_bytes}: this rank ends")
        return self._read(length)

    def _read(self, num_bytes: int) -> bytes:
        left = memoryview(read := bytearray(num_bytes))
        while left:
            try:
                num = self.socket.recv_into(left)
            except OSError as error:
                lose(error)
            left = left[num:] if num else lose("its connection has ended")
        return bytes(read)


class TeamLinks(NamedTuple):
    """The connections of a rank, by the rank at the other end: with rank 0, and for tensors with all."""

    said: Mapping[int, RankLink]
    told: Mapping[int, RankLink]
    tensors: Mapping[int, RankLink]


def lose(why: object) -> NoReturn:
    line = (str(why).splitlines() or [type(why).__name__])[0][:200]
    raise RankLost(f"another rank of this worker has gone or does not answer: {line}") from None
