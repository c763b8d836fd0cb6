"""The road of KV between two workers, as both and the router read it from what they registered.

road         the pair
ipc          on one node: one GPU, or GPUs that read each other's memory; on CPUs where `ipc` was asked for
collective   anywhere, where `collective` was asked for
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

    def pack(self) -> str:
        return "|".join((self.address, self.device, ",".join(sorted(self.reached)))) if self.device else self.address

    @classmethod
    def read(cls, packed: str) -> Endpoint:
        address, _, more = packed.partition("|")
        device, _, reached = more.partition("|")
        return cls(address, device, frozenset(filter(None, reached.split(","))))

    def reads(self, other: Endpoint) -> bool:
        return self.device == other.device or other.device in self.reached


def endpoints(member: Member) -> list[Endpoint]:
    """Return the endpoints of all ranks; none where KV does not go to this member directly."""
    return [Endpoint.read(packed) for packed in member.transport.split()]


def road_between(one: Member, other: Member) -> Road:
    ours, theirs = endpoints(one), endpoints(other)
    if not ours or len(ours) != len(theirs):
        return Road.HOST
    if not any(end.device for end in (*ours, *theirs)):
        return Road.COLLECTIVE
    can_read = all(here.reads(there) and there.reads(here) for here, there in zip(ours, theirs, strict=True))
    return Road.IPC if one.node == other.node and can_read else Road.HOST
