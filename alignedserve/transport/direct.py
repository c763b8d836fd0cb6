"""Transfers from device to device: a group, which is a socket of the two, for each direction between two workers.

On the road `collective` the group carries KV in chunks, or between GPUs a communicator of NCCL does (turns.py). On
`ipc` it carries only messages between the two ends, and the receiver reads the source's device cache (ipc.py). A worker
may have both: to some peers one road, to others the other. Both ends meet by their mailboxes (meeting.py). Workers
connect only when there is something to send.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from alignedserve.engine.device.pace import CopyPace
from alignedserve.protocol.commands import SendKv
from alignedserve.protocol.messages import Member
from alignedserve.protocol.roads import Endpoint, endpoints
from alignedserve.transport.channel import Channel, ChannelSettings
from alignedserve.transport.ends import ChunkReceiver, ChunkSender
from alignedserve.transport.ipc import MappingReceiver, MappingSender
from alignedserve.transport.mailbox import Mailbox
from alignedserve.transport.mapping import Maps
from alignedserve.transport.meeting import Direction, Meeting
from alignedserve.transport.payload import DeviceBlocks
from alignedserve.transport.transport import Post, Transfer, failed
from alignedserve.transport.turns import Communicators

log = logging.getLogger("alignedserve.transport")

_ANYWHERE = Endpoint("")
# By whether the receiver maps the source's memory, and whether it is the source's end.
_ENDS: tuple[tuple[type[Channel[Any]], ...], ...] = ((ChunkReceiver, ChunkSender), (MappingReceiver, MappingSender))


class _Peer(NamedTuple):
    address: str
    is_mapped: bool


class Direct:
    def __init__(
        self,
        holder: str,
        mailbox: Mailbox,
        blocks: DeviceBlocks,
        pace: CopyPace,
        *,
        verify: bool,
        timeout_s: float,
        maps: Maps | None = None,
        communicators: Communicators | None = None,
        on: Endpoint = _ANYWHERE,
        node: str = "",
        rank: int = 0,
        fault: Callable[[], None] = lambda: None,
    ) -> None:
        """Meet others by this mailbox, which is closed with it; other workers know this one as `holder`.

        With `maps`, receivers on this `node` read KV from mapped memory; else it goes over `communicators`, or the
        groups. A transfer's thread calls `fault` when the transfer failed by our own fault. `on` says which device has
        the KV.
        """
        self._holder, self._rank, self._on, self._blocks, self._timeout_s = holder, rank, on, blocks, timeout_s
        self._mailbox, self._communicators, self._node = mailbox, communicators, node
        common = blocks, pace, verify, timeout_s, self._count_failure
        self._sent = ChannelSettings(*common, None, fault, communicators)
        self._mapped = None if maps is None else ChannelSettings(*common, maps, fault)
        self._peers: dict[str, _Peer] = {}  # holder -> peer
        self._channels: dict[Direction, Channel[Any]] = {}
        self._counting = threading.Lock()
        self._num_failed = 0

    @property
    def address(self) -> str:
        return self._on._replace(address=self._mailbox.address).pack()

    @property
    def num_failed(self) -> int:
        return self._num_failed

    def meet(self, member: Member) -> None:
        ends = endpoints(member)
        if len(ends) > self._rank and member.holder != self._holder:
            end = ends[self._rank]
            is_mapped = self._mapped is not None and member.node == self._node and self._on.maps(end)
            self._peers[member.holder] = _Peer(end.address, is_mapped)

    def part_from(self, member: Member) -> None:
        self._peers.pop(member.holder, None)
        self._end_channels(member.holder)

    def start(self, transfer: Transfer, post: Post) -> None:
        """Start the transfer. Raises PlanError where its blocks cannot be right."""
        self._blocks.check(transfer.blocks, len(transfer.tokens))
        peer = transfer.to if isinstance(transfer, SendKv) else transfer.source
        if peer not in self._peers:  # the peer is gone, and the core will hear of it
            self._count_failure()
            post(failed(transfer))
            return
        is_source = isinstance(transfer, SendKv)
        direction = Direction(self._holder, peer) if is_source else Direction(peer, self._holder)
        if direction not in self._channels:
            address, is_mapped = self._peers[peer]
            meeting = Meeting(self._mailbox, address, direction, is_source, self._timeout_s)
            settings = self._mapped if is_mapped and self._mapped is not None else self._sent
            self._channels[direction] = _ENDS[is_mapped][is_source](meeting, settings, str(direction))
        self._channels[direction].add(transfer, post)

    def close(self) -> None:
        for peer in list(self._peers):
            self._peers.pop(peer)
            for channel in self._end_channels(peer):
                channel.join()
        if self._mapped is not None and self._mapped.maps is not None:
            self._mapped.maps.close()
        self._mailbox.close()

    def _end_channels(self, peer: str) -> list[Channel[Any]]:
        ended = [self._channels.pop(direction) for direction in [*self._channels] if peer in direction]
        for channel in ended:
            channel.close()
        if self._communicators is not None:
            self._communicators.forget(peer)
        return ended

    def _count_failure(self) -> None:
        with self._counting:
            self._num_failed += 1
