"""The source's end of a channel."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque

from alignedserve.engine.device.groups import BrokenGroup, Flight, Group
from alignedserve.protocol.commands import SendKv
from alignedserve.protocol.events import KvSent
from alignedserve.transport.channel import Channel
from alignedserve.transport.frames import CHUNK, HEADER, PLACES, NotOurs, Reply, TransferHeader, pack_places
from alignedserve.transport.payload import WINDOW, ChunkBuffers, added


class Sender(Channel[SendKv]):
    def _succeeded(self, transfer: SendKv) -> KvSent:
        return KvSent(transfer.number, transfer.to, ok=True)

    def _perform(self, transfer: SendKv) -> bool:
        header = self._header(transfer)
        group, is_wanted = self._announce(header)
        return is_wanted and (not header.has_kv or self._send(group, transfer, header))

    def _announce(self, header: TransferHeader) -> tuple[Group, bool]:
        """Send the header, and return whether the receiver awaits the transfer; make a new group where one broke."""
        deadline = self._deadline()
        while True:
            group = self._connected(self._meeting.offer, header.number, deadline)
            try:
                self._send_frame(group, HEADER, header.pack())
                return group, self._hear(group, header.number, deadline - time.monotonic()) is Reply.YES
            except BrokenGroup:
                self._drop_group()
                if time.monotonic() >= deadline:
                    raise

    @abstractmethod
    def _send(self, group: Group, transfer: SendKv, header: TransferHeader) -> bool:
        """Send the payload, and return whether all of it has arrived."""


class ChunkSender(Sender):
    def _send(self, group: Group, transfer: SendKv, header: TransferHeader) -> bool:
        number, timeout_s, checksum, flights = header.number, self._end.timeout_s, 0, deque[Flight]()
        with self._carrier(group, number) as carrier:
            buffers = ChunkBuffers(self._most_bytes(header), carrier.device)
            for index, (slots, num_bytes) in enumerate(self._chunks(transfer, header)):
                if index >= WINDOW:
                    flights.popleft().land(timeout_s)
                    if carrier.asks_first and self._hear(group, number) is not Reply.GOES_ON:
                        raise NotOurs(f"the other end does not ask for a chunk of transfer {number}")
                chunk = buffers.chunk(index, num_bytes)
                with self._end.pace.turn(), self._blocks_of(number) as blocks:
                    checksum = added(checksum, blocks.gather(slots, chunk, header.is_checked))
                flights.append(carrier.send(chunk, CHUNK))
            for flight in flights:
                flight.land(timeout_s)
            self._send_frame(group, PLACES, pack_places(number, (), checksum))
            return self._hear(group, number) is Reply.YES
