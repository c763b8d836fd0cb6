"""The decode worker's core: fetches batches from the pool and decodes them; colocated, it runs prompts too.

    Batch ───▶ arrived ───▶ joining ───▶ resident ───▶ ended: Release
               (no room)    (pages to      ▲
                             pairs)        │
    Prefill ─▶ waiting ────▶ prompt ───────┘
               (no room)    (its chunks)

With Room.WHOLE a request gets the pairs for its whole possible length when it is seated, so that a resident never has
to leave for want of memory. With Room.GROWING it gets them block by block; where none is free the newest leaves, waits
as a prompt again, and what it had is recomputed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from alignedserve.core import Chunk, Decode, Entry, StepPlan, StepResult
from alignedserve.cost import Kind
from alignedserve.cost_fit import OnlineCost
from alignedserve.messages import (
    ROUTER,
    AskBatch,
    Attempt,
    Batch,
    Command,
    CopiedIn,
    CopyIn,
    Event,
    Received,
    Release,
    Send,
)
from alignedserve.policy import DEFAULT_POLICY, Policy, Room
from alignedserve.running import Running, WorkerLimits
from alignedserve.worker import WorkerCore, key


class DecodeCore(WorkerCore):
    def __init__(
        self,
        limits: WorkerLimits,
        policy: Policy = DEFAULT_POLICY,
        cost: OnlineCost | None = None,
        copy_token_s: float = 0.0,
    ) -> None:
        super().__init__(limits, policy, cost, copy_token_s)
        self._arrived: deque[Entry] = deque()  # entries without room
        self._prompts: dict[str, Running] = {}
        self._joining: dict[int, Running] = {}  # by the number of the copy
        self._copy_number = 0
        self._residents: dict[str, Running] = {}
        self._from_pool: dict[str, Attempt] = {}  # requests whose pages the pool keeps for us
        self.num_preemptions = 0
        self._asked: tuple[int, int] | None = None  # what the pool knows of our room: pairs and requests

    @property
    def held(self) -> dict[str, int]:
        """What is taken now; nothing when no request is open."""
        return {
            "requests": len(self._held_attempts()),
            "pairs": self._limits.num_pairs - self._blocks.num_free,
            "pages": len(self._from_pool),
            "outputs": self._outputs.num_kept,
        }

    @property
    def _num_seated(self) -> int:
        return len(self._residents) + len(self._prompts) + len(self._joining)

    def _happened(self, event: Event) -> list[Command]:
        match event:
            case Received(pool, Batch(entries)):
                self._asked = None
                return self._arrive(pool, entries)
            case CopiedIn(number, intact) if number in self._joining:
                return self._copied(self._joining.pop(number), intact)
        return super()._happened(event)

    def _go_on(self) -> list[Command]:
        return [*self._seat_all(), *self._ask(), *self._next_step()]

    # --- Room

    def _arrive(self, pool: str, entries: Sequence[Entry]) -> list[Command]:
        """A pool that took us for dead may hand out again what is here: it goes on as it is.

        One that others took for dead may hand out an attempt whose next one is here already.
        """
        here, over = dict(sorted(self._held_attempts())), list[Command]()
        for entry in entries:
            name, attempt = key(entry.request)
            if here.get(name, -1) > attempt:
                over.append(Send(pool, Release(name, attempt)))
                continue
            self._from_pool[name] = (name, attempt)
            if here.get(name) != attempt:
                self._arrived.append(entry)
        return over

    def _seat_all(self) -> list[Command]:
        """Room for entries, which have waited in the pool, before prompts."""
        commands: list[Command] = []
        while self._arrived and (running := self._seated_entry(self._arrived[0])) is not None:
            commands += self._join(self._arrived.popleft(), running)
        for running in self._first_come():
            if not self._has_seat or not self._seat(running, self._room_for(running)):
                break
            self._seated_now(running)
        return commands

    def _seated_now(self, running: Running) -> None:
        self._waiting.remove(running)
        self._prompts[running.request.id] = running
        self._note("joined", running.key)

    @property
    def _has_seat(self) -> bool:
        return self._num_seated < self._limits.max_batch

    def _seated_entry(self, entry: Entry) -> Running | None:
        running = self._running_of(entry.request, entry.output, entry.due)
        running.prefix, running.logprobs = entry.prefix, list(entry.logprobs)
        running.prompt_logprobs = list(entry.prompt_logprobs)
        return running if self._has_seat and self._seat(running, self._room_for(running)) else None

    def _room_for(self, running: Running) -> int:
        """Tokens that it gets pairs for."""
        return running.request.most_tokens if self._policy.room is Room.WHOLE else running.num_tokens

    def _join(self, entry: Entry, running: Running) -> list[Command]:
        assert self._pool is not None, "entries are lost with their pool"
        dropped = self._drop(entry.request.id, entry.request.attempt - 1)
        self._copy_number += 1
        self._joining[self._copy_number] = running
        tokens = running.tokens(0, running.prefix)
        return [*dropped, CopyIn(self._copy_number, self._pool.holder, entry.pages, running.pairs, tokens)]

    def _copied(self, running: Running, intact: bool) -> list[Command]:
        if intact:
            self._residents[running.request.id] = running
            self._note("joined", running.key)
            return []
        # Right or not at all: its owner starts the next attempt, which prefills it again.
        self._free(running.pairs)
        self._note("lost", running.key)
        return self._release(running.key)

    def _ask(self) -> list[Command]:
        """Tell the pool of our room whenever it has changed."""
        if self._pool is None or self._arrived or self._waiting:
            return []  # who waits here already, such as one that had to leave, comes first
        room = (self._blocks.num_free, self._limits.max_batch - self._num_seated)
        if not all(room) or room == self._asked:
            return []
        self._asked = room
        limits, cost = self._limits, self._cost.model.coefficients[Kind.DECODE]
        ask = AskBatch(
            *room, self._recent.now, self._copy_token_s, limits.num_pairs, limits.max_batch, self._band, cost
        )
        return [Send(self._pool.name, ask)]

    @property
    def _band(self) -> tuple[int, int] | None:
        prefixes = [running.prefix for running in (*self._residents.values(), *self._joining.values())]
        return (min(prefixes), max(prefixes)) if prefixes else None

    @property
    def _awaits_the_pool(self) -> bool:
        return self._asked is not None

    def _ask_again(self) -> None:
        self._asked = None

    # --- Steps

    def _next_step(self) -> list[Command]:
        if self._in_flight is not None:
            return []
        if self._policy.grows:
            self._grow()
        while True:
            seats = 0 if self._arrived else self._limits.max_batch - self._num_seated
            selection = self._select(tuple(self._residents.values()), tuple(self._prompts.values()), seats)
            for running in selection.seated:
                self._seated_now(running)
            if selection.chunks or selection.decodes or not self._made_room():
                break
        return self._begin_step(selection, tuple(self._decode(running) for running in selection.decodes))

    def _grow(self) -> None:
        """A place for the next token of each that decodes, in the order of their seats."""
        for running in list(self._residents.values()):
            while running.pairs and not running.has_place(self._limits.block_size):
                more = self._blocks.take(1)
                if more is not None:
                    running.pairs += more
                else:
                    self._preempt_newest()

    def _preempt_newest(self) -> None:
        seats = self._prompts or self._residents
        _, running = seats.popitem()
        self._put_back(running)
        self.num_preemptions += 1

    def _made_room(self) -> bool:
        """Where nothing can run, and nothing else that is under way gives memory back."""
        if len(self._prompts) < 2 or self._residents or self._joining:
            return False
        self._uncrowd(self._prompts)
        self.num_preemptions += 1
        return True

    def _unfinished(self) -> Iterable[Running]:
        """Long prompts hold up others until they are through; in AccelGen's paper, until their requests end."""
        residents = self._residents.values() if self._policy.as_in_paper else ()
        return [*self._prompts.values(), *residents]

    def _decode(self, running: Running) -> Decode:
        sampling, index = running.request.sampling, len(running.output)
        name, token = running.request.id, running.output[-1]
        return Decode(name, token, running.prefix, running.pairs, sampling, index, running.history)

    def _stepped(self, plan: StepPlan, result: StepResult) -> list[Command]:
        released = list[Command]()
        for running, finish in self._emitted(plan.parts, result):
            request = running.request.id
            if request in self._prompts:
                self._residents[request] = self._prompts.pop(request)
            if finish is not None:
                released += self._ended(running)
        return [*released, *self._outputs.flush()]

    def _seated(self, request: str) -> Running | None:
        return self._residents.get(request) or self._prompts.get(request)

    def _lose(self, ran: Chunk | Decode) -> list[Command]:
        running = self._seated(ran.request)
        if running is None or running.pairs != ran.pairs:
            return []
        (self._prompts if ran.request in self._prompts else self._residents).pop(ran.request)
        self._give(running.pairs)
        self._outputs.drop(*running.key)
        self._note("lost", running.key)
        return self._release(running.key)

    def _ended(self, running: Running) -> Iterable[Command]:
        del self._residents[running.request.id]
        self._give(running.pairs)
        self._note("ended", running.key)
        return self._release(running.key)

    # --- What is here

    def _prompts_ahead(self) -> Iterable[Running]:
        return self._prompts.values()

    def _seats(self) -> list[Running]:
        return [*self._residents.values(), *self._prompts.values(), *self._joining.values()]

    def _held_attempts(self) -> list[Attempt]:
        waiting = [one.key for one in self._waiting]
        return [*(one.key for one in self._seats()), *waiting, *(key(one.request) for one in self._arrived)]

    def _drop(self, request: str, attempt: int) -> list[Command]:
        released = [one.key for one in self._waiting.drop(request, attempt)]  # one that left may have pages
        self._is_stuck = False
        for entry in [one for one in self._arrived if one.request.id == request and one.request.attempt <= attempt]:
            self._arrived.remove(entry)
            released.append(key(entry.request))
        for seats in (self._residents, self._prompts, self._joining):
            released += self._leave(seats, request, attempt)
        self._outputs.drop(request, attempt)
        return [command for one in released for command in self._release(one)]

    def _leave(self, seats: dict[Any, Running], request: str, attempt: int) -> list[Attempt]:
        leaving = [seat for seat, one in seats.items() if one.is_of(request, attempt)]
        left = [seats.pop(seat) for seat in leaving]
        for running in left:
            self._free(running.pairs)
        return [running.key for running in left]

    def _release(self, attempt: Attempt) -> list[Command]:
        """Its pages, where the pool keeps some for it."""
        if self._pool is None or self._from_pool.get(attempt[0]) != attempt:
            return []
        del self._from_pool[attempt[0]]
        return [Send(self._pool.name, Release(*attempt))]

    def _unknown(self, asker: str, attempts: Sequence[Attempt]) -> list[Command]:
        if asker == ROUTER or self._pool is None:
            return super()._unknown(asker, attempts)
        return [Send(self._pool.name, Release(*attempt)) for attempt in attempts]

    def _pool_lost(self) -> None:
        """Entries that were not copied yet are lost with it."""
        self._asked = None
        for entry in self._arrived:
            self._note("lost", key(entry.request))
        self._arrived.clear()
        self._from_pool.clear()
