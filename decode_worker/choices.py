"""The choices of one prompt (`n` of a body): the last chunk of the first brings the first tokens of all.

    first    ── chunk ─▶ last chunk ─▶ its logits ── first token ─▶ decodes
    others      wait      wait            └──────── Draw ── KV of the end copied ─▶ decode

The others share the full blocks of the prompt, and get a copy of the last block's tokens: nothing of the prompt runs
twice. A draw needs no seat. Where one is lacking when the step has ended, or memory, or the first has left meanwhile,
the drawn token is dropped, and the choice waits on: it shares full blocks then, and runs the rest.

No prompt is overtaken: choices draw only while there are seats and memory for all that wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.core import Chunk, Draw, StepPlan
from alignedserve.decode_worker.joining import Seats
from alignedserve.protocol.commands import Command
from alignedserve.protocol.form_orders import CopySlots
from alignedserve.worker.part import Worker, WorkerPart
from alignedserve.worker.step.device_pages import are_choices
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State
from alignedserve.worker.step.step_builder import chunk_of


class Choices(WorkerPart):
    def __init__(self, worker: Worker, seats: Seats) -> None:
        super().__init__(worker)
        self._seats = seats

    def draws(self, chunks: Sequence[Chunk]) -> tuple[Draw, ...]:
        """Return the draws from the logits of these chunks, which run next."""
        if not (self._pages.lets_draw and self._queue.waiting and self._has_room_for_all):
            return ()
        found = dict[str, Draw]()
        for chunk in chunks:
            first = self._here.running_of(chunk)
            for other in self._queue.waiting if chunk.sampling is not None else ():
                if are_choices(first, other):
                    request = other.request
                    found[request.id] = Draw(request.id, chunk.request, request.sampling, other.history)
        return tuple(found.values())

    @property
    def _has_room_for_all(self) -> bool:
        """Return whether all that wait may have seats, and the first of them finds memory."""
        waiting, num_seated = self._queue.waiting, self._here.num_seated
        most = min(self._limits.max_batch, self._scheduler.most_seated)
        return num_seated + len(waiting) <= most and not self._queue.lacks_memory(only_rt=False)

    def join(self, first: WorkerRequest, plan: StepPlan, now: float) -> tuple[list[Chunk], list[Command]]:
        """Seat the choices that drew from the last chunk of `first`, which has run.

        Return for each a chunk that counts as run, and the order to copy the KV of these chunks."""
        chunks, moves, size = list[Chunk](), list[tuple[int, int]](), self._limits.block_size
        for draw in plan.draws:
            others = self._here.named(draw.request, State.WAITING) if draw.source == first.request.id else ()
            for other in others:
                if are_choices(first, other) and self._seat(other, now):
                    chunk = chunk_of(other, other.num_ahead)
                    chunks.append(chunk)
                    source, target = (of.blocks[chunk.start // size] * size for of in (first, other))
                    moves += [(source + at, target + at) for at in range(len(chunk.tokens))]
        return chunks, [CopySlots(moves=tuple(moves))] if moves else []

    def _seat(self, other: WorkerRequest, now: float) -> bool:
        """Seat a choice on the full blocks of the prompt and free blocks; return whether that was possible."""
        memory, size = self._memory, self._limits.block_size
        if memory.is_crowded or not (self._has_room_for_all and self._seats.takes_prompts(now)):
            return False
        if self._pages.has_to_fetch(other) or other.num_ahead > size:  # a full block is not found
            return False
        seating = memory.seating(1, self._queue.waiting, memory.context(now))
        tokens = other.num_ahead
        if seating.most(other, tokens) < tokens or seating.demand(other, tokens) > memory.num_free * size:
            return False  # another would have to leave
        seating.take(other, tokens)
        self._seats.seat(other)
        return True
