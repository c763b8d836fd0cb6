"""The transport `ipc`: workers on one machine map each other's device caches, and the receiver reads the KV itself.

On CPUs device caches are files in shared memory. On GPUs this is for processes on one GPU, where NCCL refuses two
ranks, and for GPUs that read each other's memory over NVLink or PCIe: no kernel waits for the other end (mapping.py).
The frames of a transfer go over a group, as with `collective`; KV does not.

    source                                     receiver
    header ──▶                                 as for every transfer (frames.py)
                         ◀── yes
    handle, once ──▶                           maps the source's device cache, once per incarnation
    places ──▶                                 copies from there to its own blocks, chunk by chunk
                         ◀── the copy goes on ...
                         ◀── the copy is complete
    the blocks were the transfer's: yes ──▶    only now the copy is intact

Who may write to the source's blocks? While the transfer is outstanding there, no process may. If the transfer ends at
the source before the receiver has said that it is complete (a time-out, a peer given up for dead), the blocks belong
to the core again at once, and the receiver may read anything from then on. So the receiver asks when it has copied all:
the source says yes only while the transfer is outstanding, under the lock that ends the transfer. No answer means no.
Workers never write to another device cache: on CPUs it is mapped read-only.
"""

from __future__ import annotations

import logging
import time

from alignedserve.engine.device.devices import finish
from alignedserve.engine.device.groups import Group
from alignedserve.errors import PlanError
from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.transport.ends import Receiver, Sender
from alignedserve.transport.frames import (
    HANDLE,
    HANDLE_BYTES,
    PLACES,
    Reply,
    TransferHeader,
    pack_handle,
    pack_places,
    places_bytes,
    read_handle,
    read_places,
)
from alignedserve.transport.mapping import Maps, NotMapped
from alignedserve.transport.payload import DeviceBlocks

log = logging.getLogger("alignedserve.transport")

_REPLY_PART = 4  # the receiver replies after this part of the time for which the source waits


class MappingSender(Sender):
    """The source's end: it says where the KV lies."""

    _handle: bytes = b""  # the handle for this peer
    _told: Group | None = None  # the group that has carried the handle

    def _send(self, group: Group, transfer: SendKv, header: TransferHeader) -> bool:
        finish(self._end.blocks.device)  # what was ordered before is in the blocks now
        if self._told is not group:
            self._handle = self._handle or self._maps.handle(self._end.blocks.cache)
            self._send_frame(group, HANDLE, pack_handle(self._handle))
            self._told = group
        blocks = transfer.blocks[: self._end.blocks.num_blocks(header.num_tokens)]
        checksum = self._checksum(transfer, header) if header.is_checked else 0
        self._send_frame(group, PLACES, pack_places(header.number, blocks, checksum))
        reply = Reply.GOES_ON
        while reply is Reply.GOES_ON:
            reply = self._hear(group, header.number)
        if reply is Reply.NO:
            return False
        was_ours = self._is_outstanding(header.number)
        self._say(group, header.number, Reply.YES if was_ours else Reply.NO)
        return was_ours

    @property
    def _maps(self) -> Maps:
        assert self._end.maps is not None, "this transport has maps"
        return self._end.maps


class MappingReceiver(Receiver):
    """The receiver's end: it copies the KV from the source's memory."""

    _told: Group | None = None  # the group over which a handle has come
    _handle: bytes = b""  # the handle that is mapped
    _there: DeviceBlocks | None = None

    def _receive(self, group: Group, transfer: ReceiveKv, header: TransferHeader) -> bool:
        if self._told is not group:
            self._map(read_handle(self._next_frame(group, HANDLE, HANDLE_BYTES)))
            self._told = group
        num_bytes = places_bytes(self._end.blocks.num_blocks(header.num_tokens))
        blocks, checksum = read_places(self._next_frame(group, PLACES, num_bytes), header.number)
        is_intact = self._there is not None and self._copy(group, transfer, header, blocks) in (checksum, None)
        self._answer(group, header.number, is_intact)
        return is_intact and self._hear(group, header.number) is Reply.YES

    def _map(self, handle: bytes) -> None:
        if handle == self._handle:
            return  # the same incarnation sends the same handle over another group
        assert self._end.maps is not None, "this transport has maps"
        self._handle, self._there = handle, None
        try:
            self._there = self._end.blocks.mapped(self._end.maps.map(handle))
        except (NotMapped, PlanError) as error:
            log.warning("%s: %s", self.name, error)

    def _copy(self, group: Group, transfer: ReceiveKv, header: TransferHeader, blocks: tuple[int, ...]) -> int | None:
        """Copy the KV, and return its checksum where checksums are on."""
        there, each, spoke_at = self._there, self._end.blocks.num_blocks(header.chunk_tokens), time.monotonic()
        assert there is not None
        there.check(blocks, header.num_tokens)
        of, to = (self._end.blocks.places(all_of) for all_of in (blocks, transfer.blocks[: len(blocks)]))
        for some, others in zip(of.split(each), to.split(each), strict=True):
            with self._end.pace.turn(), self._blocks_of(header.number) as device:
                device.copy(there, some, others)
            if time.monotonic() - spoke_at > self._end.timeout_s / _REPLY_PART:
                self._say(group, header.number, Reply.GOES_ON)
                spoke_at = time.monotonic()
        finish(self._end.blocks.device)  # nothing is read any more
        return self._checksum(transfer, header) if header.is_checked else None

    def _run(self) -> None:
        super()._run()
        self._there = None  # unmap the peer's memory
