"""Let a request go on when the transfer of its KV from a prefill worker's device has ended, well or not."""

from __future__ import annotations

from alignedserve.decode_worker.parts.joining import Joining
from alignedserve.decode_worker.parts.stores import Stores
from alignedserve.decode_worker.parts.taking_in import TakingIn
from alignedserve.decode_worker.requests.transfers import IncomingTransfer
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, KvReceived
from alignedserve.protocol.messages import Attempt, Decline
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.step.running import Running


class KvReceiving(CorePart):
    def __init__(self, stores: Stores, joining: Joining, taking_in: TakingIn) -> None:
        self._pool, self._here, self._candidates = stores.pool, stores.here, stores.candidates
        self._memory, self._queue, self._holds = stores.memory, stores.queue, stores.holds
        self._notes, self._faults, self._decisions = stores.notes, stores.faults, stores.decisions
        self._joining, self._taking_in = joining, taking_in
        self.num_prefetched = 0  # requests that joined from a prefill worker's device, and had waited in the pool

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case KvReceived(number, source, intact):
                return self._end(self._here.transfers.end(source, number, intact), intact)
        return []

    def _end(self, transfer: IncomingTransfer, intact: bool) -> list[Command]:
        self._memory.reconsider()
        running = transfer.running
        if not (transfer.is_wanted and intact):
            self._faults.num_failed_transfers += not intact
            return self._go_without(transfer)
        if transfer.is_for_pool:
            return self._taking_in.write(running)
        self.num_prefetched += transfer.is_prefetched
        self._here.residents[running.request.id] = running
        self._decisions.note(Kind.JOINED, running.request, "", len(running.output), len(self._here.residents))
        self._memory.pages.publish(running)
        return self._holds.release(running.key) if running.dropped else []

    def _go_without(self, transfer: IncomingTransfer) -> list[Command]:
        """Compute the request anew, copy it from the pool, or leave it to its sender or its owner."""
        running, attempt = transfer.running, transfer.running.key
        has_pages = bool(transfer.pages) and self._pool.member is not None
        if transfer.is_wanted and (transfer.was_evicted or (transfer.is_for_pool and has_pages)):
            self._queue.put_back(running)  # what is for the pool has neither a seat nor pairs to decode in
            return []
        if transfer.is_wanted and has_pages:
            return self._joining.copy_in(running, transfer.pages)
        self._memory.release(running)
        if not transfer.is_wanted:
            return []
        if transfer.is_prefetched or self._candidates.peer(transfer.source.name) != transfer.source:
            self._decisions.note(Kind.LOST, running.request, why="its KV did not come, and its sender has it no more")
            self._notes.note("lost", attempt)
            return []
        self._notes.note("returned", attempt)
        return [Send(transfer.source.name, Decline(*attempt, is_failed=True))]

    # --- Requests on their way here

    def drop(self, request: str, attempt: int) -> list[Command]:
        dropped = self._here.transfers.drop(request, attempt)
        return [command for key in dropped for command in self._holds.release(key)]

    def attempts(self) -> list[Attempt]:
        return [transfer.running.key for transfer in self._here.transfers.wanted]

    def occupants(self) -> list[Running]:
        return self._here.transfers.occupants

    def repeat(self, to: str) -> list[Command]:
        return self._here.transfers.pull_again(self._candidates.peer(to))
