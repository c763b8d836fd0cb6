"""The transport `ipc`: workers on one machine map each other's device cache, and the receiver reads what it is to get.

On CPUs device caches are files in shared memory; on GPUs it is for processes on one GPU, where NCCL refuses two ranks
(mapping.py). What the ends say to each other goes over a group, as with `collective`; KV does not.

    source                                     receiver
    header ──▶                                 the same as of every transfer (frames.py)
                         ◀── yes
    handle, once ──▶                           maps the source's device cache, once in its life
    places ──▶                                 copies from there to its own blocks, chunk by chunk
                         ◀── it goes on ...
                         ◀── I have it
    was it yours still? yes ──▶                only now it is intact

Who may write to the source's blocks. While the transfer is outstanding there, nobody. When it ends at the source before
the receiver has said that it has it (a time-out, a peer taken for dead), the blocks are the core's again at once, and
what the receiver reads from then on may be anything. So the receiver asks when it is through: the source says yes only
while the transfer is outstanding, under the lock under which it ends. No answer is a no. Nobody writes to another
worker's device cache at all: on CPUs it is mapped to be read alone.
"""

from __future__ import annotations

import logging
import time
import zlib

import torch

from alignedserve.engine.device.devices import finish
from alignedserve.engine.device.groups import Group
from alignedserve.errors import PlanError
from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.transport.frames import (
    HANDLE,
    HANDLE_BYTES,
    PLACES,
    Header,
    Says,
    pack_handle,
    pack_places,
    places_bytes,
    read_handle,
    read_places,
)
from alignedserve.transport.mapping import Maps, NotMapped
from alignedserve.transport.payload import Buffers, DeviceBlocks
from alignedserve.transport.receiving import Receiving
from alignedserve.transport.sending import Sending

log = logging.getLogger("alignedserve.transport")

_SAID_IN = 4  # of the time for which the source waits for a word, the part after which it gets one


class Showing(Sending):
    """The source's end: it says where the KV lies."""

    _handle: bytes = b""  # for this peer
    _told: Group | None = None  # over which it has gone

    def _send(self, group: Group, transfer: SendKv, header: Header) -> bool:
        finish(self._end.blocks.device)  # what was ordered before is in the blocks
        if self._told is not group:
            self._handle = self._handle or self._maps.handle(self._end.blocks.cache)
            group.send(_bytes(pack_handle(self._handle)), HANDLE).land(self._end.timeout_s)
            self._told = group
        pairs = transfer.pairs[: self._end.blocks.num_pairs(header.num_tokens, header.kind)]
        checksum = self._checksum(transfer, header) if header.is_checked else 0
        places = _bytes(pack_places(header.number, pairs, checksum))
        group.send(places, PLACES).land(self._end.timeout_s)
        said = Says.GOES_ON
        while said is Says.GOES_ON:
            said = self._hear(group, header.number)
        if said is Says.NO:
            return False
        was_ours = self._is_outstanding(header.number)
        self._say(group, header.number, Says.YES if was_ours else Says.NO)
        return was_ours

    def _checksum(self, transfer: SendKv, header: Header) -> int:
        buffers, checksum = Buffers(self._most_bytes(header), self._end.blocks.device), 0
        for index, (slots, num_bytes) in enumerate(self._chunks(transfer, header)):
            body = buffers.chunk(index, num_bytes).body
            with self._end.pace.turn():
                with self._blocks_of(header.number) as blocks:
                    blocks.gather(slots, header.kind, body)
                checksum = _added(checksum, body)
        return checksum

    @property
    def _maps(self) -> Maps:
        assert self._end.maps is not None, "this transport has maps"
        return self._end.maps


class Reading(Receiving):
    """The receiver's end: it copies what lies there."""

    _told: Group | None = None  # over which a handle has come
    _handle: bytes = b""  # of what is mapped
    _there: DeviceBlocks | None = None

    def _receive(self, group: Group, transfer: ReceiveKv, header: Header) -> bool:
        if self._told is not group:
            raw = bytearray(HANDLE_BYTES)
            group.receive(torch.frombuffer(raw, dtype=torch.uint8), HANDLE).land(self._end.timeout_s)
            self._map(read_handle(raw))
            self._told = group
        raw = bytearray(places_bytes(self._end.blocks.num_pairs(header.num_tokens, header.kind)))
        group.receive(torch.frombuffer(raw, dtype=torch.uint8), PLACES).land(self._end.timeout_s)
        pairs, checksum = read_places(raw, header.number)
        is_intact = self._there is not None and self._copy(group, transfer, header, pairs) in (checksum, None)
        self._answer(group, header.number, is_intact)
        return is_intact and self._hear(group, header.number) is Says.YES

    def _map(self, handle: bytes) -> None:
        if handle == self._handle:
            return  # over another group the same life of it says the same
        assert self._end.maps is not None, "this transport has maps"
        self._handle, self._there = handle, None
        try:
            self._there = self._end.blocks.mapped(self._end.maps.map(handle))
        except (NotMapped, PlanError) as error:
            log.warning("%s: %s", self.name, error)

    def _copy(self, group: Group, transfer: ReceiveKv, header: Header, pairs: tuple[int, ...]) -> int | None:
        """The checksum of what came, where there are any."""
        there, buffers = self._there, Buffers(self._most_bytes(header), self._end.blocks.device)
        assert there is not None
        there.check(pairs, header.num_tokens, header.kind)
        sources = there.slots(pairs, header.num_tokens, header.kind).split(header.chunk_tokens)
        checksum, spoke_at = 0, time.monotonic()
        for index, (source, (slots, num_bytes)) in enumerate(zip(sources, self._chunks(transfer, header), strict=True)):
            body = buffers.chunk(index, num_bytes).body
            with self._end.pace.turn():
                there.gather(source, header.kind, body)
                with self._blocks_of(header.number) as blocks:
                    blocks.scatter(slots, header.kind, body)
                checksum = _added(checksum, body) if header.is_checked else 0
            if time.monotonic() - spoke_at > self._end.timeout_s / _SAID_IN:
                self._say(group, header.number, Says.GOES_ON)
                spoke_at = time.monotonic()
        return checksum if header.is_checked else None

    def _run(self) -> None:
        super()._run()
        self._there = None  # the peer's memory is not ours to keep


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _added(checksum: int, body: torch.Tensor) -> int:
    return zlib.crc32(body.cpu().numpy().data, checksum)
