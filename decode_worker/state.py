"""The decode worker's core: fetches batches from the pool and decodes them; colocated, it runs prompts too.

    Batch ───▶ candidate ─▶ joining ───▶ resident ───▶ ended: Release
               (no room)    (pages to      ▲
                             pairs)        │
    Offer ───▶ candidate ─▶ receiving ─────┤  (candidates.py; who has to leave becomes one: evicting.py)
    Prefill ─▶ waiting ────▶ prompt ───────┘
               (no room)    (its chunks)

Who has pairs, and who leaves for others: seats.py. What of that goes to the pool: to_pool.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from alignedserve.core import CacheKind, Chunk, Decode, Entry, FinishReason, StepPlan, StepResult
from alignedserve.cost.model import Kind
from alignedserve.decode_worker.ahead import Ahead, ahead_of
from alignedserve.decode_worker.evicting import AHEAD_STEPS
from alignedserve.decode_worker.packing import Knapsack
from alignedserve.decode_worker.taking_in import STOCK, TakingInCore
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import CopiedIn, Event, Received
from alignedserve.protocol.messages import ROUTER, AskBatch, Attempt, Batch, Expect, Release, Report
from alignedserve.scheduling.policy import Chunking, Grouping
from alignedserve.worker.core import WorkerSetup, key
from alignedserve.worker.step.limits import Selection, caution
from alignedserve.worker.step.running import Running

REPORT_STEPS = 8  # between two reports to the router


class DecodeCore(TakingInCore):
    def __init__(self, setup: WorkerSetup) -> None:
        """What comes from device to device comes beside the steps, to pairs that nobody may enter meanwhile.

        Where pairs are shared all comes by the pool.
        """
        super().__init__(replace(setup, direct=setup.direct and not setup.policy.shares))
        self._from_lost_pool: frozenset[int] = frozenset()  # copies that were under way when it went
        self._num_batches = 0
        self._reported_step = 0  # the last one when the router got a report
        self.num_decode_steps = 0
        self.num_mixed_steps = 0  # of them, those with members of two batches; guests are of none
        self._asked: AskBatch | None = None  # what the pool knows of our room
        self._looks_ahead = setup.look_ahead > 0
        assert not (self._looks_ahead and setup.policy.why_not_ahead), setup.policy.why_not_ahead
        self._all_run = False  # nobody who could decode was left out when a step was last chosen
        self.num_ahead_steps = 0  # planned while another ran

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

    @property
    def attempts(self) -> Sequence[Attempt]:
        """All that is here."""
        return self._held_attempts()

    def _happened(self, event: Event) -> list[Command]:
        match event:
            case Received(pool, Batch() as batch):
                self._asked = None
                return self._arrive(pool, batch)
            case CopiedIn(number, intact) if number in self._joining:
                return self._copied(number, intact)
        return super()._happened(event)

    def _go_on(self) -> list[Command]:
        commands = [*self._evict_again(), *self._seat_all(), *self._next_step()]
        if self._kept:
            commands += [*self._keep_answers(), *self._seat_all(), *self._next_step()]
        # Prompts get their seats with a step: what is left then is the pool's, and nothing where somebody had to leave.
        commands += [*self._take_in(), *self._ask(), *self._prefetch(), *self._cancel_buffers()]
        return [*commands, *self._ask_for_pages()]

    def _told(self) -> list[Command]:
        return [*super()._told(), *self._report()]

    def _report(self) -> list[Command]:
        """Every few steps, and when there are none."""
        steps = self._steps.number - self._reported_step
        if not steps or (self._steps.running is not None and steps < REPORT_STEPS):
            return []
        self._reported_step = self._steps.number
        chats = [one.promise for one in self._seats() if one.promise.is_rt]
        report = Report(
            num_running=self._num_seated,
            band=self._batch.band(self._here) or self._span,
            free_pairs=self._blocks.num_free,
            batch=self._packer.batch,
            times=self._recent.now,
            num_requests=self._candidates.num_requests,
            num_batch=self._candidates.num_in_batch,
            num_buffered=self._candidates.num_buffered,
            num_rt=len(chats),
            num_late=sum(promise.is_late(self._now) for promise in chats),
        )
        return [Send(ROUTER, report)]

    # --- Room

    def _arrive(self, pool: str, batch: Batch) -> list[Command]:
        """A pool that took us for dead may hand out again what is here: it goes on as it is.

        One that others took for dead may hand out an attempt whose next one is here already.
        """
        is_request = batch.is_pinned or batch.is_dynamic
        if not is_request and batch.entries:
            self._num_batches += 1
            self._batch.comes(self._num_batches, [one.prefix for one in batch.entries])
        here, over = dict(sorted(self._held_attempts())), list[Command]()
        for entry in batch.entries:
            name, attempt = key(entry.request)
            if here.get(name, -1) > attempt:
                over.append(Send(pool, Release(name, attempt)))
                continue
            self._from_pool[name] = (name, attempt)
            if here.get(name) == attempt:
                self._candidates.in_pool((name, attempt), entry, entry.pages)
            else:
                found_for = self._tag(entry.prefix) if batch.is_dynamic else 0
                number = 0 if is_request else self._num_batches
                self._add_candidate(entry, None, batch.is_pinned, number, found_for=found_for)
        return over

    # --- Seats

    def _seat_all(self) -> list[Command]:
        """Candidates have waited already: they come before prompts."""
        commands = self._seat_candidates()
        if self._first_candidate is not None:
            return commands
        for running in self._first_come():
            must_wait = not self._packer.has_seat(self._num_seated) or (not running.promise.is_rt and self._lacking)
            if must_wait or not self._seat(running, self._room_for(running)):
                break
            self._seated_now(running)
        return commands

    def _running_from(self, entry: Entry) -> Running:
        running = self._running_of(entry.request, entry.output, entry.due)
        running.prefix, running.logprobs = entry.prefix, list(entry.logprobs)
        running.prompt_logprobs, running.num_cached = list(entry.prompt_logprobs), entry.num_cached
        full = entry.prefix // self._limits.page_size
        running.known, running.names = entry.pages[:full], entry.names[:full]
        return running

    def _expect(self, told: Expect) -> list[Command]:
        commands = super()._expect(told)
        if (running := self._residents.get(told.request)) is not None:
            self._in_order.moved(running)
        return commands

    def _expect_elsewhere(self, told: Expect) -> list[Command]:
        self._candidates.expect(told, self._policy, self._now)
        return []

    def _join(self, entry: Entry, running: Running) -> list[Command]:
        dropped = self._drop(entry.request.id, entry.request.attempt - 1)
        return [*dropped, *self._copy_in(running, entry.pages)]

    def _copied(self, number: int, intact: bool) -> list[Command]:
        running = self._joining.pop(number)
        if intact:
            self._residents[running.request.id] = running
            self._notes.moved("joined", running.key)
            return []
        # Right or not at all: its owner starts the next attempt, which prefills it again.
        self._vacate_after_step(running)
        self._notes.moved("lost", running.key)
        refused = [] if number in self._from_lost_pool else [self._refused()]
        return [*refused, *self._release(running.key)]

    def _ask(self) -> list[Command]:
        """Tell the pool of our room whenever it has changed. Who had to let somebody go has none until another ends."""
        if self._pool is None or self._waiting:
            return []  # who has to be recomputed comes first
        if not 0 < self._crowded_at <= self._num_seated:
            self._crowded_at = 0
        room = self._room_for_more()
        offers = (room.requests > 0 and room.pairs + room.rt_pairs > 0) or room.wants_batch or room.ahead > 0
        withdraws = self._asked is not None and (
            self._crowded_at > 0 or self._is_retiring or (self._asked.pairs > 0 and bool(self._lacking))
        )
        if not (offers or withdraws) or room == self._asked:
            return []
        self._asked = room
        limits, cost = self._limits, self._cost.model.coefficients[Kind.DECODE]
        return [
            Send(
                self._pool.name,
                replace(
                    room,
                    times=self._recent.now,
                    copy_token_s=self._copy_token_s,
                    all_pairs=limits.num_pairs,
                    most_requests=limits.max_batch,
                    band=None if self._candidates.is_starving(self._now) else self._batch.band(self._here),
                    cost=cost,
                    wait_s=self._mean_join_s,
                ),
            )
        ]

    def _room_for_more(self) -> AskBatch:
        """Beyond the candidates: who waits here did not fit. Real-time ones may fit where best-effort ones do not."""
        if self._crowded_at or self._is_retiring:
            return AskBatch(0, 0, wants_batch=False)
        free, lacks = self._blocks.num_free, bool(self._lacking)
        pairs = 0 if lacks or self._candidates else free
        rt_pairs = 0
        if self.shared is not None and not self._candidates.have_rt:
            rt_pairs = free - pairs + self.shared.room_for_rt
        requests = max(0, self._limits.max_batch - self._num_seated) if pairs + rt_pairs else 0
        return AskBatch(
            pairs,
            requests,
            rt_pairs=rt_pairs,
            wants_batch=self._is_aligned and not lacks and not self._candidates.num_in_batch,
            ahead=self._wanted_ahead if self._is_aligned and not lacks else 0,
        )

    @property
    def _is_aligned(self) -> bool:
        """Whether there are batches that keep together."""
        return self._policy.grouping is Grouping.ALIGNED

    @property
    def _wanted_ahead(self) -> int:
        """Candidate requests that join as others end: more are asked for when half of them have joined."""
        most, here = max(1, self._limits.max_batch // STOCK), self._candidates.num_requests
        return most - here if self._num_seated and 2 * here <= most else 0

    @property
    def _span(self) -> tuple[int, int] | None:
        """Of all that are here."""
        prefixes = [one.prefix for one in self._here]
        return (min(prefixes), max(prefixes)) if prefixes else None

    @property
    def _awaits_the_pool(self) -> bool:
        return self._asked is not None or self._writer.awaits_the_pool or bool(self._leaves)

    def _ask_again(self) -> None:
        self._asked, self._evicts_again = None, True
        self._writer.ask_again()

    # --- Steps

    def _next_step(self) -> list[Command]:
        if self._steps.running is not None:
            return self._step_ahead(self._steps.running)
        if isinstance(self._packer, Knapsack):
            before = self._choose_memory(self._packer)
        else:
            before = self._grow() if self._policy.grows else []
            before += self._evict_ahead()
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
        self._all_run = len(decodes) == len(self._residents)
        begun = self._begin_step(selection, tuple(decodes))
        return [*before, *begun, *(self._step_ahead(self._steps.running) if self._steps.running is not None else ())]

    def _step_ahead(self, running: StepPlan) -> list[Command]:
        """The one after that, where what comes of it has no say in who runs (ahead.py)."""
        if not self._looks_ahead or self._steps.has_next or not self._is_settled(running):
            return []
        ahead = ahead_of(running, self._residents.values(), self._blocks, self._limits.block_size)
        if ahead is None or not 0 < len(ahead.going) <= min(self._room.tokens, self._packer.batch):
            return []
        shape = ahead.shape
        predicted_s = self._cost.model.seconds(shape)
        if not self._is_in_time(ahead, running.predicted_s, predicted_s):
            return []
        selection = Selection(ahead.going, (), shape, predicted_s)
        self._packer.planned(selection)
        self._count_mixed(ahead.going)
        self.num_ahead_steps += 1
        return self._begin_step(selection, tuple(ahead.decodes))

    def _is_settled(self, running: StepPlan) -> bool:
        """Whether all that is here decodes in it, or has joined since, and has memory to go on."""
        if running.chunks or self._steps.runs_in_vain or not self._all_run or self._waiting or self._prompts:
            return False
        if (first := self._first_candidate) is not None and self._cannot_wait(first):
            return False  # others leave for it before the next step
        return not self._evicts_ahead or self._pairs_needed(AHEAD_STEPS + 1) <= self._blocks.num_free

    def _is_in_time(self, ahead: Ahead, running_s: float, ahead_s: float) -> bool:
        """Nobody's gap is longer than was promised, and no newcomer waits for two steps longer than for one it may."""
        if self._policy.chunking is not Chunking.SLO or self._policy.as_in_paper:
            return True
        at = self._moment
        careful = caution(at, Kind.DECODE)
        one_s, both_s = careful * ahead_s, careful * (running_s + ahead_s)
        gaps = [(one, one_s) for one in ahead.going] + [(one, both_s) for one in ahead.sitting_out]
        return both_s <= at.calm_s and all(gap_s <= one.request.slo.tbt_s for one, gap_s in gaps if one.promise.is_rt)

    def _chosen(self, commands: list[Command]) -> Selection:
        """What leaves for it is added."""
        seats = 0 if self._first_candidate is not None else self._limits.max_batch - self._num_seated
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
            sharing.return_slots(self._as_they_return)
        return selection

    def _count_mixed(self, decodes: Sequence[Running]) -> None:
        if decodes and self._num_batches:
            self.num_decode_steps += 1
            self.num_mixed_steps += len({one.batch for one in decodes if one.batch}) > 1

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
        self._vacate_after_step(running)
        self._outputs.drop(*running.key)
        self._notes.moved("lost", running.key)
        return self._release(running.key)

    def _ended(self, running: Running, finish: FinishReason) -> Iterable[Command]:
        del self._residents[running.request.id]
        self._notes.ended(running)
        is_alone = self.shared is None or not self.shared.is_shared(running)  # else it would be in somebody's way
        if is_alone and finish is not FinishReason.ERROR and self._pages_to_keep(running) > 0:
            self._kept.append(running)
            return []
        self._vacate_after_step(running)
        return self._release(running.key)

    # --- What is here

    def _held_attempts(self) -> list[Attempt]:
        waiting = [one.key for one in self._waiting]
        waiting += [copy.running.key for copy in self._writer.copies if copy.wanted and not copy.has_ended]
        waiting += self._candidates.attempts
        waiting += [one.running.key for one in self._leaves if one.is_wanted]
        seated = (*self._residents.values(), *self._prompts.values(), *self._joining.values())
        return [*(one.key for one in seated), *waiting]

    def _drop(self, request: str, attempt: int) -> list[Command]:
        released = [one.key for one in self._waiting.drop(request, attempt)]  # one that left may have pages
        self._is_stuck = False
        for seats in (self._residents, self._prompts, self._joining):
            released += self._leave(seats, request, attempt)
        released += [running.key for running in self._writer.drop(request, attempt)]
        released += self._candidates.drop(request, attempt)
        released += self._drop_leaving(request, attempt)
        self._outputs.drop(request, attempt)
        return [command for one in released for command in self._release(one)]

    def _pool_lost(self) -> None:
        """Entries that were not copied yet are lost with it; who was on the way there is recomputed."""
        self._asked = None
        self._from_lost_pool = frozenset(self._joining)
        for running in self._writer.pool_lost():
            self._put_back(running)
        for running in (*self._seats(), *self._waiting, *self._candidates.evicted):
            running.known = ()
        for attempt in self._candidates.pool_lost():
            self._notes.moved("lost", attempt)
        self._from_pool.clear()


def _as_kept(running: Running, decode: Decode) -> Decode:
    if not running.blocks:
        return decode
    return replace(decode, pairs=(), kind=CacheKind.HIDDEN, blocks=running.blocks)
