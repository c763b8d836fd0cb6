"""The road of KV between two workers, as both and the router read it from what they registered.

road         the pair
ipc          on one node: one GPU, or GPUs that read each other's memory; on CPUs where `ipc` or `direct` was asked for
collective   anywhere, where `collective` was asked for; with `direct` where ipc is none, as between nodes
host         no direct road: KV goes through the KV pool
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from alignedserve.protocol.messages import Member


class Road(str, Enum):
    HOST = "host"
    COLLECTIVE = "collective"
    IPC = "ipc"


class Endpoint(NamedTuple):
    """The address of one rank of a worker. A peer reads KV from `device`; without a device, the rank sends it."""

    address: str
    device: str = ""  # "cpu", or a GPU's UUID
    reached: frozenset[str] = frozenset()  # UUIDs of other GPUs whose memory its GPU reads
    also_sends: bool = False  # to peers that do not read from its device

    @property
    def sends(self) -> bool:
        return self.also_sends or not self.device

    def pack(self) -> str:
        if not self.device:
            return self.address
        more = ("sends",) if self.also_sends else ()
        return "|".join((self.address, self.device, ",".join(sorted(self.reached)), *more))

    @classmethod
    def read(cls, packed: str) -> Endpoint:
        address, device, reached, sends, *_ = (*packed.split("|"), "", "", "")
        return cls(address, device, frozenset(filter(None, reached.split(","))), bool(sends))

    def reads(self, other: Endpoint) -> bool:
        return self.device == other.device or other.device in self.reached

    def maps(self, other: Endpoint) -> bool:
        """Return whether both read KV from each other's device, where they are on one node."""
        return bool(self.device and other.device) and self.reads(other) and other.reads(self)


def endpoints(member: Member) -> list[Endpoint]:
    """Return the endpoints of all ranks; none where KV does not go to this member directly."""
    return [Endpoint.read(packed) for packed in member.transport.split()]


def road_between(one: Member, other: Member) -> Road:
    ours, theirs = endpoints(one), endpoints(other)
    if not ours or len(ours) != len(theirs):
        return Road.HOST
    if one.node == other.node and all(here.maps(there) for here, there in zip(ours, theirs, strict=True)):
        return Road.IPC
    return Road.COLLECTIVE if all(end.sends for end in (*ours, *theirs)) else Road.HOST
