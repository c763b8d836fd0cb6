"""The decode worker's core: fetches batches from the pool and decodes them; colocated, it runs prompts too.

    Batch ───▶ arrived ───▶ joining ───▶ resident ───▶ ended: Release
               (no room)    (pages to      ▲
                             pairs)        │
    Offer ───▶ candidate ─▶ receiving ─────┤  (candidates.py; a pinned Batch is one too)
    Prefill ─▶ waiting ────▶ prompt ───────┘
               (no room)    (its chunks)

Who has pairs, and who leaves for others: seats.py. What of that goes to the pool: to_pool.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from alignedserve.commands import Command, Send
from alignedserve.core import CacheKind, Chunk, Decode, Entry, FinishReason, StepPlan, StepResult
from alignedserve.cost import Kind
from alignedserve.cost_fit import OnlineCost
from alignedserve.decode_worker.pulling import PullingCore
from alignedserve.events import CopiedIn, Event, Received
from alignedserve.messages import AskBatch, Attempt, Batch, Expect, Release
from alignedserve.policy import DEFAULT_POLICY, Policy
from alignedserve.prefill_worker.selection import Selection
from alignedserve.running import Running, WorkerLimits
from alignedserve.worker import key


class DecodeCore(PullingCore):
    def __init__(
        self,
        limits: WorkerLimits,
        policy: Policy = DEFAULT_POLICY,
        cost: OnlineCost | None = None,
        copy_token_s: float = 0.0,
        root: bytes = b"",
        direct: bool = False,
    ) -> None:
        """`root` and `direct` as a prefill worker has them: answers are known again by the one.

        What comes from device to device comes beside the steps, to pairs that nobody may enter meanwhile: where pairs
        are shared all comes by the pool.
        """
        super().__init__(limits, policy, cost, copy_token_s, root, direct and not policy.shares)
        self._arrived: deque[Entry] = deque()  # entries without room
        self._from_lost_pool: frozenset[int] = frozenset()  # copies that were under way when it went
        self._tags: dict[str, int] = {}  # of those that have arrived: entries that came in one batch have the same
        self._num_batches = 0
        self.num_decode_steps = 0
        self.num_mixed_steps = 0  # of them, those with members of two batches
        self._asked: tuple[int, int, int] | None = None  # what the pool knows of our room: pairs, requests, rt_pairs

    @property
    def held(self) -> dict[str, int]:
        """What is taken now; nothing when no request is open."""
        held = {
            "requests": len(self._held_attempts()),
            "pairs": self._limits.num_pairs - self._blocks.num_free,
            "pages": len(self._from_pool),
            "outputs": self._outputs.num_kept,
        }
        return held if self.shared is None else held | {"places": self.shared.num_saved}

    def _happened(self, event: Event) -> list[Command]:
        match event:
            case Received(pool, Batch(entries, is_pinned)):
                self._asked = self._asked if is_pinned else None
                return self._arrive(pool, entries, is_pinned)
            case CopiedIn(number, intact) if number in self._joining:
                return self._copied(number, intact)
        return super()._happened(event)

    def _go_on(self) -> list[Command]:
        commands = [*self._seat_all(), *self._next_step()]
        if self._kept:
            commands += [*self._keep_answers(), *self._seat_all(), *self._next_step()]
        # Prompts get their seats with a step: what is left then is the pool's, and nothing where somebody had to leave.
        return [*commands, *self._ask(), *self._ask_for_pages()]

    # --- Room

    def _arrive(self, pool: str, entries: Sequence[Entry], is_pinned: bool = False) -> list[Command]:
        """A pool that took us for dead may hand out again what is here: it goes on as it is.

        One that others took for dead may hand out an attempt whose next one is here already.
        """
        self._num_batches += 1
        here, over = dict(sorted(self._held_attempts())), list[Command]()
        for entry in entries:
            name, attempt = key(entry.request)
            if here.get(name, -1) > attempt:
                over.append(Send(pool, Release(name, attempt)))
                continue
            self._from_pool[name] = (name, attempt)
            if here.get(name) == attempt:
                self._candidates.in_pool((name, attempt), entry, entry.pages)
            elif is_pinned:
                self._add_candidate(entry, None, is_pinned)
            else:
                self._arrived.append(entry)
                self._tags[name] = self._num_batches
        return over

    # --- Seats

    def _seat_all(self) -> list[Command]:
        """Room for candidates, then for entries, which have waited in the pool too, before prompts."""
        commands = self._seat_candidates()
        if self._candidates:
            return commands
        while self._arrived and (running := self._seated_entry(self._arrived[0])) is not None:
            commands += self._join(self._arrived.popleft(), running)
        if not self._arrived:
            self._tags.clear()
        for running in self._first_come():
            must_wait = not self._packer.has_seat(self._num_seated) or (not running.promise.is_rt and self._lacking)
            if must_wait or not self._seat(running, self._room_for(running)):
                break
            self._seated_now(running)
        return commands

    def _seated_entry(self, entry: Entry) -> Running | None:
        running = self._running_of(entry.request, entry.output, entry.due)
        running.prefix, running.logprobs = entry.prefix, list(entry.logprobs)
        running.batch = self._tags.get(entry.request.id, 0)
        running.prompt_logprobs, running.num_cached = list(entry.prompt_logprobs), entry.num_cached
        full = entry.prefix // self._limits.page_size
        running.known, running.names = entry.pages[:full], entry.names[:full]
        return running if self._has_seat and self._seat(running, self._room_for(running)) else None

    def _expect_elsewhere(self, told: Expect) -> list[Command]:
        for at, entry in enumerate(self._arrived):
            if key(entry.request) == (told.request, told.attempt):
                self._arrived[at] = replace(entry, request=replace(entry.request, estimate=told.estimate))
        return []

    def _join(self, entry: Entry, running: Running) -> list[Command]:
        dropped = self._drop(entry.request.id, entry.request.attempt - 1)
        return [*dropped, *self._copy_in(running, entry.pages)]

    def _copied(self, number: int, intact: bool) -> list[Command]:
        running = self._joining.pop(number)
        if intact:
            self._residents[running.request.id] = running
            self._note("joined", running.key)
            return []
        # Right or not at all: its owner starts the next attempt, which prefills it again.
        self._vacate_after_step(running)
        self._note("lost", running.key)
        refused = [] if number in self._from_lost_pool else [self._refused()]
        return [*refused, *self._release(running.key)]

    def _ask(self) -> list[Command]:
        """Tell the pool of our room whenever it has changed. Who had to let somebody go has none until another ends."""
        if self._pool is None or self._candidates or self._arrived or self._waiting:
            return []  # who waits here already, such as one that had to leave, comes first
        if not 0 < self._crowded_at <= self._num_seated:
            self._crowded_at = 0
        is_lacking = bool(self._lacking)
        pairs = 0 if is_lacking else self._blocks.num_free
        rt_pairs = 0 if self.shared is None else self._blocks.num_free - pairs + self.shared.room_for_rt
        room = (pairs, max(0, self._limits.max_batch - self._num_seated), rt_pairs)
        if self._crowded_at:
            room = (0, 0, 0)
        offers = room[1] > 0 and (room[0] > 0 or room[2] > 0)
        withdraws = self._asked is not None and (self._crowded_at > 0 or (is_lacking and self._asked[0] > 0))
        if not (offers or withdraws) or room == self._asked:
            return []
        self._asked = room
        limits, cost = self._limits, self._cost.model.coefficients[Kind.DECODE]
        times, device = (self._recent.now, self._copy_token_s), (limits.num_pairs, limits.max_batch)
        return [Send(self._pool.name, AskBatch(*room[:2], *times, *device, self._band, cost, room[2]))]

    @property
    def _band(self) -> tuple[int, int] | None:
        prefixes = [running.prefix for running in (*self._residents.values(), *self._joining.values())]
        prefixes += self._candidates.prefixes
        return (min(prefixes), max(prefixes)) if prefixes else None

    @property
    def _awaits_the_pool(self) -> bool:
        return self._asked is not None or self._writer.awaits_the_pool

    def _ask_again(self) -> None:
        self._asked = None
        self._writer.ask_again()

    # --- Steps

    def _next_step(self) -> list[Command]:
        if self._in_flight is not None:
            return []
        before = self._grow() if self._policy.grows else []
        while True:
            selection = self._chosen(before)
            # Who had left and is known to the pool is seated with one choice, and computed anew with the next.
            if selection.chunks or selection.decodes or not (selection.seated or self._made_room(before)):
                break
        self._count_mixed(selection.decodes)
        before += self._copies()
        decodes = [  # one for each token: a call for each would cost as much again
            Decode(
                of.id, one.output[-1], one.prefix, one.pairs, of.sampling, len(one.output), one.history, one.from_right
            )
            for one in selection.decodes
            for of in (one.request,)
        ]
        if selection.shape.hidden:
            decodes = [*map(_as_kept, selection.decodes, decodes)]
        return [*before, *self._begin_step(selection, tuple(decodes))]

    def _chosen(self, commands: list[Command]) -> Selection:
        """What leaves for it is added."""
        seats = 0 if self._candidates or self._arrived else self._limits.max_batch - self._num_seated
        sharing, decodes, prompts = self._sharing, self._residents.values(), self._prompts.values()
        if sharing is None:
            seated = tuple(decodes), tuple(prompts)
        else:
            seated = sharing.whole(decodes), sharing.whole(prompts)
        selection = self._select(*self._packer.runnable(*seated), seats)
        for running in selection.unseated:
            commands += self._preempt(running, has_pairs=False)
        for running in selection.seated:
            self._seated_now(running)
        self._packer.planned(selection)
        if sharing is None:
            return self._with_kv(selection, commands)
        selection = sharing.left_of(selection, self._residents | self._prompts, self._cost.model)
        if selection.decodes or selection.chunks:
            sharing.return_slots(self._lacking)
        return selection

    def _count_mixed(self, decodes: Sequence[Running]) -> None:
        if decodes and self._num_batches:
            self.num_decode_steps += 1
            self.num_mixed_steps += len({one.batch for one in decodes}) > 1

    def _stepped(self, plan: StepPlan, result: StepResult) -> list[Command]:
        released, prompts = list[Command](), self._prompts
        for running, finish in self._emitted(plan.parts, result):
            if prompts and (request := running.request.id) in prompts:
                self._residents[request] = prompts.pop(request)
            if finish is not None:
                released += self._ended(running, finish)
        return [*released, *self._outputs.flush()]

    def _lose(self, ran: Chunk | Decode) -> list[Command]:
        running = self._seated(ran.request)
        if running is None or not running.is_at(ran):
            return []
        (self._prompts if ran.request in self._prompts else self._residents).pop(ran.request)
        self._vacate(running)
        self._outputs.drop(*running.key)
        self._note("lost", running.key)
        return self._release(running.key)

    def _ended(self, running: Running, finish: FinishReason) -> Iterable[Command]:
        del self._residents[running.request.id]
        self._note_end(running)
        is_alone = self.shared is None or not self.shared.is_shared(running)  # else it would be in somebody's way
        if is_alone and finish is not FinishReason.ERROR and self._pages_to_keep(running) > 0:
            self._kept.append(running)
            return []
        self._vacate(running)
        return self._release(running.key)

    # --- To the pool

    # --- What is here

    def _held_attempts(self) -> list[Attempt]:
        waiting = [one.key for one in self._waiting]
        waiting += [copy.running.key for copy in self._writer.copies if copy.wanted and not copy.has_ended]
        waiting += self._candidates.attempts
        seated = (*self._residents.values(), *self._prompts.values(), *self._joining.values())
        return [*(one.key for one in seated), *waiting, *(key(one.request) for one in self._arrived)]

    def _drop(self, request: str, attempt: int) -> list[Command]:
        released = [one.key for one in self._waiting.drop(request, attempt)]  # one that left may have pages
        self._is_stuck = False
        for entry in [one for one in self._arrived if one.request.id == request and one.request.attempt <= attempt]:
            self._arrived.remove(entry)
            released.append(key(entry.request))
        for seats in (self._residents, self._prompts, self._joining):
            released += self._leave(seats, request, attempt)
        released += [running.key for running in self._writer.drop(request, attempt)]
        released += self._candidates.drop(request, attempt)
        self._outputs.drop(request, attempt)
        return [command for one in released for command in self._release(one)]

    def _pool_lost(self) -> None:
        """Entries that were not copied yet are lost with it; who was on the way there is recomputed."""
        self._asked = None
        self._from_lost_pool = frozenset(self._joining)
        for running in self._writer.pool_lost():
            self._put_back(running)
        for running in (*self._seats(), *self._waiting):
            running.known = ()
        for attempt in (*(key(entry.request) for entry in self._arrived), *self._candidates.pool_lost()):
            self._note("lost", attempt)
        self._arrived.clear()
        self._from_pool.clear()


def _as_kept(running: Running, decode: Decode) -> Decode:
    if not running.blocks:
        return decode
    return replace(decode, pairs=(), kind=CacheKind.HIDDEN, blocks=running.blocks)
