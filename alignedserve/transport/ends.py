"""The two ends of a channel: the source's and the receiver's."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import deque
from typing import Any

from alignedserve.engine.device.groups import BrokenGroup, Flight, Group
from alignedserve.protocol.commands import ReceiveKv, SendKv
from alignedserve.protocol.events import KvReceived, KvSent
from alignedserve.transport.channel import Channel
from alignedserve.transport.frames import (
    CHUNK,
    HEADER,
    HEADER_BYTES,
    PLACES,
    NotOurs,
    Reply,
    TransferHeader,
    pack_places,
    places_bytes,
    read_places,
)
from alignedserve.transport.meeting import GivenUpByPeer
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


log = logging.getLogger("alignedserve.transport")


class Receiver(Channel[ReceiveKv]):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ahead: tuple[Group, TransferHeader] | None = None  # the header of a later transfer that was read already

    def _succeeded(self, transfer: ReceiveKv) -> KvReceived:
        return KvReceived(transfer.number, transfer.source, intact=True)

    def _perform(self, transfer: ReceiveKv) -> bool:
        expected = self._header(transfer)
        group, header = self._await(transfer.number)
        is_it = header == expected
        self._answer(group, header.number, is_it or not header.has_kv)
        if not header.has_kv:
            return False
        if not is_it:
            log.warning("%s: refused transfer %d: its header is not what was announced", self.name, header.number)
            return False
        return self._receive(group, transfer, header)

    @abstractmethod
    def _receive(self, group: Group, transfer: ReceiveKv, header: TransferHeader) -> bool:
        """Receive the payload, tell the other end, and return whether all of it is in this worker's blocks."""

    def _answer(self, group: Group, number: int, yes: bool) -> None:
        self._say(group, number, Reply.YES if yes else Reply.NO)

    def _await(self, number: int) -> tuple[Group, TransferHeader]:
        """Wait for the transfer's header. Raises GivenUpByPeer where a later transfer comes in its place."""
        deadline = self._deadline()
        while True:
            group, header = self._ahead or self._next_header(number, deadline)
            if header.number > number:
                self._ahead = group, header
                raise GivenUpByPeer
            self._ahead = None
            if header.number == number:
                return group, header
            self._answer(group, header.number, False)  # this end has given that transfer up before

    def _next_header(self, number: int, deadline: float) -> tuple[Group, TransferHeader]:
        """Read the next header; make a new group where the last one broke since it was used."""
        while True:
            group = self._connected(self._meeting.accept, number, deadline)
            try:
                raw = self._next_frame(group, HEADER, HEADER_BYTES, deadline - time.monotonic())
                return group, TransferHeader.read(raw)
            except BrokenGroup:
                self._drop_group()
                if time.monotonic() >= deadline:
                    raise

    def _drop_group(self) -> None:
        self._ahead = None
        super()._drop_group()


class ChunkReceiver(Receiver):
    def _receive(self, group: Group, transfer: ReceiveKv, header: TransferHeader) -> bool:
        number, timeout_s, checksum = header.number, self._end.timeout_s, 0
        chunks = list(self._chunks(transfer, header))
        with self._carrier(group, number) as carrier:
            buffers = ChunkBuffers(self._most_bytes(header), carrier.device)

            def begin(index: int) -> Flight:
                return carrier.receive(buffers.chunk(index, chunks[index][1]), CHUNK)

            flights = deque(begin(index) for index in range(min(WINDOW, len(chunks))))
            for index, (slots, num_bytes) in enumerate(chunks):
                flights.popleft().land(timeout_s)
                chunk = buffers.chunk(index, num_bytes)
                with self._end.pace.turn():
                    checksum = added(checksum, self._end.blocks.checksum(chunk) if header.is_checked else 0)
                    with self._blocks_of(number) as blocks:
                        blocks.scatter(slots, chunk)
                    if index + WINDOW < len(chunks):  # not earlier: the buffer is empty now
                        flights.append(begin(index + WINDOW))
                if carrier.asks_first and index + WINDOW < len(chunks):
                    self._say(group, number, Reply.GOES_ON)
            is_intact = read_places(self._next_frame(group, PLACES, places_bytes(0)), number)[1] == checksum
            self._answer(group, number, is_intact)
        return is_intact
