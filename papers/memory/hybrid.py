"""Memory that keeps some requests as hidden vectors (Apt-Serve §4.3, under the rules of BROS; worth.py).

    waits ── it pays, memory is short ──▶ hidden ── memory comes free ──▶ KV: made once, without a second prefill
      └──────────────── otherwise ───────────────────────────────────────▶ KV ── leaves ──▶ waits, or the pool

A hidden request takes whole blocks, the one half and then the other, so that no half of a block is left that KV could
not take: less than a block is empty. A chosen request may begin as hidden if that pays, if the step has
time for what hidden vectors will cost later steps, and if a block is left for each seated request to grow into. Memory
that is left then goes to hidden requests: their K and V are made before the step, in the time that the step would take
for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from alignedserve.core import KvForm, PreemptionCause, Slo, units_for
from alignedserve.cost.model import CostModel
from alignedserve.papers.apt_serve import AptServe
from alignedserve.papers.memory.worth import CacheKind, MemoryWish, assign, pays_as_hidden
from alignedserve.papers.rules import HIDDEN
from alignedserve.protocol.commands import Command
from alignedserve.protocol.form_orders import ProjectKv
from alignedserve.scheduling.dues import TokenPromise
from alignedserve.scheduling.slo import Late
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.memory import MemoryChange, PlainMemory, Preempted, Seated
from alignedserve.worker.pace import Pace
from alignedserve.worker.pool import PoolLink
from alignedserve.worker.requests import Requests
from alignedserve.worker.scheduler import Scheduler
from alignedserve.worker.step.blocks import Blocks, keep_as
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.seating import PackedSeating, Seating
from alignedserve.worker.step.view import PlannedStep
from alignedserve.worker.step.waiting_prompts import WaitingPrompts

_LATE_WORTH = 1e-6  # of a request with a missed deadline, where such requests are dropped to the end


@dataclass(slots=True)
class HybridSeating(PackedSeating):
    """A waiting request may take memory as hidden vectors."""

    hides: Callable[[WorkerRequest, int], bool] = field(kw_only=True)  # whether that pays for this number of tokens
    headroom: int = 0  # blocks that are left for seated requests, where a request is seated as hidden

    def in_block(self, running: WorkerRequest) -> int:
        return self.block_size * (2 if self._is_hidden(running) else 1)

    def take(self, running: WorkerRequest, size: int) -> None:
        is_hidden = self._is_hidden(running)
        PackedSeating.take(self, running, size)
        if is_hidden and not running.kv.form:
            keep_as(running, _hidden(running.blocks))

    def _is_hidden(self, running: WorkerRequest) -> bool:
        if running.blocks:
            return bool(running.kv.form)
        tokens = self.room_for(running)
        left = self.blocks.num_free - self.headroom
        fits = units_for(tokens, 2 * self.block_size) <= left
        return fits and self.hides(running, tokens) and self.has_time_to_project(tokens)


class WeighedMemory(PlainMemory):
    """Gives memory by worth to requests that are kept as KV; answers follow from what `_begin` noted at that moment."""

    runs_amid = False
    _halves = 1  # of a block that hold hidden vectors

    def __init__(self, pace: Pace, steps: StepsInFlight, here: Requests, pool: PoolLink, scheduler: Scheduler) -> None:
        super().__init__(pace, steps, here, pool, scheduler)
        self._apt_serve = scheduler if isinstance(scheduler, AptServe) else None
        self._now, self._token_s = 0.0, 0.0
        self._decodes_s = 0.0  # that decodes were pending before this step, in all
        self.num_hidden = 0  # requests that were seated as hidden, and stayed so
        self.num_projected = 0  # that have become KV

    def make_blocks(self) -> Blocks:
        return Blocks(self.limits.num_blocks)

    def _begin(self, waiting: WaitingPrompts, now: float) -> None:
        """Note what a token that is kept as hidden costs all requests that a longer step delays."""
        num_here = self._here.num_seated + len(waiting)
        self._now, self._token_s = now, num_here * self.pace.cost.remade_token_s

    # --- What a request is worth

    def _pays(self, running: WorkerRequest, tokens: int) -> bool:
        return pays_as_hidden(self._wish(running, tokens))

    def _wish(self, running: WorkerRequest, tokens: int) -> MemoryWish:
        size = self.limits.block_size
        halves = self._halves if running.request.adapter is None else 1  # K and V are made again without adapters
        kv, hidden = units_for(tokens, size), units_for(tokens, halves * size)
        return MemoryWish(self._value(running), kv, hidden, self._token_s * tokens)

    def _wish_of_hidden(self, running: WorkerRequest, tokens: int) -> MemoryWish:
        """Return the wish of a hidden request that has memory."""
        has = len(running.blocks)
        kv, penalty = max(has, units_for(tokens, self.limits.block_size)), self._token_s * tokens
        return MemoryWish(self._value(running), kv, has, penalty, is_sure=True)

    def _pending_s(self, running: WorkerRequest) -> float:
        return max(0.0, self._now - running.last_token_at)

    def _value(self, running: WorkerRequest) -> float:
        pending_s, promise = self._pending_s(running), running.promise
        if self._policy.late is Late.DROP_LAST and promise.is_late(self._now):
            return _LATE_WORTH * pending_s
        if isinstance(promise, TokenPromise):
            return pending_s * promise.worth
        return min(pending_s, Slo().tbt_s) if self._policy.is_rt_first else pending_s

    @property
    def _headroom(self) -> int:
        """Return the blocks to grow into, which hidden vectors leave free: a displaced request is recomputed."""
        return self._here.num_seated if self._policy.grows else 0

    # --- Seats

    def seating(self, seats: int, waiting: WaitingPrompts, at: StepContext) -> Seating:
        seating = super().seating(seats, waiting, at)
        if not isinstance(seating, PackedSeating):
            return seating
        self._begin(waiting, at.now)
        packed = {each.name: getattr(seating, each.name) for each in fields(PackedSeating)}
        return HybridSeating(**packed, hides=self._pays, headroom=self._headroom)

    # --- Which requests have memory at all

    def grow(self, waiting: WaitingPrompts, now: float) -> Iterator[MemoryChange]:
        """Let decodes leave first where the memory brings more elsewhere (Apt-Serve §5).

        KV becomes hidden only by being recomputed: the request waits until then. Hidden vectors become KV later."""
        if self._apt_serve is None:
            yield from super().grow(waiting, now)
            return
        self._begin(waiting, now)
        decodes = list(self._here.residents.values())
        self._decodes_s = sum(map(self._pending_s, decodes))
        for running, kind in zip(decodes, self._stay_as(decodes), strict=True):
            if kind is None or (kind is CacheKind.HIDDEN and not running.kv.form):
                yield Preempted(PreemptionCause.WORTH, running)
        yield from self._grow()
        for prompt in self._seat_by_worth(waiting, self._apt_serve):
            yield Seated(prompt)

    def _stay_as(self, decodes: Sequence[WorkerRequest]) -> list[CacheKind | None]:
        """Return the form of each decode: the present form where all next tokens find a place, else the form of most
        worth."""
        held = [CacheKind.HIDDEN if running.kv.form else CacheKind.KV for running in decodes]
        wishes = [self._wish(running, running.num_tokens) for running in decodes]
        more = (wish.size(kind) - len(of.blocks) for of, wish, kind in zip(decodes, wishes, held, strict=True))
        if sum(max(0, blocks) for blocks in more) <= self.num_free:
            return [*held]
        return assign(wishes, self.num_free + sum(len(running.blocks) for running in decodes))

    def _seat_by_worth(self, waiting: WaitingPrompts, scheduler: AptServe) -> list[WorkerRequest]:
        """Give memory to the prompts that are worth most, each in its form of most worth; return these prompts."""
        prompts = sorted(waiting, key=lambda prompt: prompt.request.arrival_at)
        prompts_s = sum(map(self._pending_s, (*prompts, *self._here.prompts.values())))
        takes_prompts = scheduler.takes_prompts(prompts_s, self._decodes_s)  # always asked, and noted there
        seats = self.limits.max_batch - self._here.num_seated
        if seats <= 0 or not takes_prompts:
            return []
        wishes = [self._wish(prompt, self.room_for(prompt)) for prompt in prompts]
        kinds = assign(wishes, max(0, self.num_free - self._headroom))
        chosen = [(prompt, kind) for prompt, kind in zip(prompts, kinds, strict=True) if kind is not None][:seats]
        for prompt, kind in chosen:
            self._seat_as(prompt, kind is CacheKind.HIDDEN)
        return [prompt for prompt, _ in chosen]

    def _seat_as(self, running: WorkerRequest, is_hidden: bool) -> None:
        blocks = self.blocks.take(units_for(self.room_for(running), self.limits.block_size * (2 if is_hidden else 1)))
        assert blocks is not None, "memory was assigned that is not there"
        keep_as(running, _hidden(blocks) if is_hidden else KvForm(blocks))
        self.num_hidden += is_hidden

    # --- Which requests become KV

    def settle(self, selection: PlannedStep, at: StepContext) -> tuple[PlannedStep, Sequence[Command]]:
        """Make KV of the step's hidden requests before the step runs, where there is memory."""
        if not (selection.shape.remade or selection.admitted):
            return selection, ()
        chosen = [*selection.decodes, *map(self._here.running_of, selection.chunks)]
        hidden = sorted(
            (running for running in chosen if running.kv.form), key=lambda running: running.request.arrival_at
        )
        self.num_hidden += sum(running.kv.form != "" for running in selection.admitted)
        upgraded = self._affordable(hidden)
        if not upgraded:
            return selection, ()
        projected = [self._upgrade(running, blocks) for running, blocks in upgraded]
        commands = [command for command in projected if command is not None]
        self.num_hidden -= sum(running in selection.admitted for running, _ in upgraded)
        self.num_projected += len(commands)
        return _as_kv(selection, [running for running, _ in upgraded], self.pace.cost), commands

    def _affordable(self, hidden: Sequence[WorkerRequest]) -> list[tuple[WorkerRequest, int]]:
        """Return the hidden requests for which there is memory as KV, and the blocks that each then has."""
        if not hidden:
            return []
        wishes = [self._wish_of_hidden(running, max(self.room_for(running), running.num_tokens)) for running in hidden]
        free = max(0, self.num_free - self._headroom)
        kinds = assign(wishes, free + sum(wish.hidden for wish in wishes))
        found = zip(hidden, wishes, kinds, strict=True)
        return [(running, wish.kv) for running, wish, kind in found if kind is CacheKind.KV]

    def _upgrade(self, running: WorkerRequest, num_blocks: int) -> ProjectKv | None:
        kept = running.blocks
        more = self.blocks.take(max(0, num_blocks - len(running.blocks)))
        assert more is not None, "memory was assigned that is not there"
        keep_as(running, KvForm(kept + more))
        if not running.prefix:
            return None
        return ProjectKv(running.request.id, kept, running.blocks, running.prefix)


class HybridMemory(WeighedMemory):
    """Keeps requests as KV or as hidden vectors."""

    _halves = 2


def _as_kv(selection: PlannedStep, upgraded: Sequence[WorkerRequest], cost: CostModel) -> PlannedStep:
    now = {running.request.id: running.kv for running in upgraded}
    chunks = tuple(replace(of, kv=now[of.request]) if of.request in now else of for of in selection.chunks)
    projected = sum(running.prefix for running in upgraded)
    shape = selection.shape._replace(remade=selection.shape.remade - projected)
    return replace(selection, chunks=chunks, shape=shape, predicted_s=cost.seconds(shape))


def _hidden(blocks: tuple[int, ...]) -> KvForm:
    """Return the form of a request with hidden vectors in these blocks, one half of each and then the other."""
    return KvForm(blocks, form=HIDDEN, in_place=2)
