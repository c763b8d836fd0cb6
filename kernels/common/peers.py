"""Memory of each rank that all ranks of a worker read and write, through which a kernel sums their parts.

It is divided into channels. A channel has a flag for each rank and two halves for rows, and the same program of each
rank's kernel uses it. In its turn, a number that each sum raises by one, a program

    1. writes its rank's rows into half `turn % 2` of its own memory,
    2. says the turn in its rank's flag of every memory,
    3. waits until all flags of its own memory say the turn, or a later one,
    4. reads these rows from that half of every memory, and adds them in order of rank.

A half is never written while it is read. Its next writing is that of turn + 2, before which its rank has done step 3
of turn + 1: so each rank had said turn + 1, which it does once it has read all rows of the turn. This holds of each
channel by itself, whatever the number of rows. The turn is read on the device: sums of graphs, whose order is unknown
when they are captured, and of steps kernel by kernel follow each other as they come. All ranks must do the same sums.

A program waits only for those of its channel, which wait for nothing before they have said the turn. All programs of a
sum fit on a GPU at once, so each of them comes to say it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MOST_CHANNELS = 128
HALF = 32 << 10  # bytes of rows: with all channels 512 rows of 4,096 numbers of 16 bits
_FLAG = 8  # bytes
MOST_POLLS = 1 << 24  # of a flag, where a kernel gives up: some seconds


@dataclass(frozen=True)
class Peers:
    """The memory of all ranks, as one of them has it mapped."""

    rank: int
    channels: int
    memory: tuple[Tensor, ...]  # of each rank, bytes
    addresses: Tensor  # of each, on the device
    gives_up: bool = False  # after some seconds, with a wrong sum; else a kernel waits for ever

    @property
    def size(self) -> int:
        return len(self.memory)

    @property
    def flags(self) -> int:
        """Return the bytes before the first half."""
        return bytes_of_flags(self.channels, self.size)

    def takes(self, part: Tensor) -> bool:
        """Return whether rows of this kind fit the halves."""
        return len(part) > 0 and -(-len(part) // self.channels) * part.shape[1] * part.element_size() <= HALF


def bytes_of_flags(channels: int, size: int) -> int:
    return -(-channels * size * _FLAG // 16) * 16  # rows begin where 16 bytes are read at once


def bytes_for(channels: int, size: int) -> int:
    """Return the bytes of a rank's memory."""
    return bytes_of_flags(channels, size) + 2 * channels * HALF
