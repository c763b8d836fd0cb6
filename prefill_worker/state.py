"""The prefill worker's core: runs prompts, emits their first tokens, commits their KV to the pool.

    Prefill ─▶ waiting ──▶ running ──▶ ended (one token was enough)
               (no pairs)     │
                              └──▶ committing ──▶ copying ──▶ Commit
                                   (no pages)     (pairs to pages)

A request that is cancelled, or whose next attempt arrives, leaves from wherever it is. Of one that is
being copied, pairs and pages stay taken until the copy has ended. Pages that nothing waits for go back
to the pool: another worker may be waiting for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from alignedserve.core import Entry, Request, Role, StepPlan, StepResult
from alignedserve.messages import (
    ROUTER,
    Acknowledge,
    AskPages,
    Cancel,
    Command,
    Commit,
    CopiedOut,
    CopyOut,
    Event,
    Holding,
    LeasePages,
    Member,
    MemberJoined,
    MemberLost,
    Prefill,
    Progress,
    Received,
    Resend,
    ReturnPages,
    RunStep,
    Send,
    StepDone,
)
from alignedserve.outputs import Outputs
from alignedserve.prefill_worker.chunks import cut
from alignedserve.running import Blocks, Running, pairs_for

Key = tuple[str, int]  # (request, attempt)


@dataclass(frozen=True)
class WorkerLimits:
    """What a worker may take: the same for prefill and decode workers."""

    num_pairs: int
    block_size: int
    page_size: int
    max_step_tokens: int
    max_batch: int


class PrefillCore:
    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self._blocks = Blocks(limits.num_pairs)
        self._outputs = Outputs()
        self._waiting: deque[Request] = deque()
        self._running: dict[str, Running] = {}  # has pairs, in the order of arrival
        self._committing: deque[Running] = deque()  # waits for pages
        self._copying: dict[str, tuple[Running, tuple[int, ...]]] = {}  # with the pages that it is copied to
        self._abandoned: dict[str, tuple[Running, tuple[int, ...]]] = {}  # the copy goes on, for nobody
        self._lease: list[int] = []  # pages of the pool that are ours to write to
        self._asked_pages = 0
        self._pool: Member | None = None
        self._step_number = 0
        self._in_flight: StepPlan | None = None
        self._leaving: list[tuple[int, ...]] = []  # pairs that the step in flight may still write to
        self._progress: dict[str, list[Key]] = {}

    def handle(self, event: Event, now: float) -> list[Command]:
        commands: list[Command] = []
        match event:
            case Received(message=Prefill(request)):
                self._drop(request.id, request.attempt - 1)
                self._waiting.append(request)
            case Received(message=Cancel(request=request, attempt=attempt)):
                self._drop(request, attempt)
            case Received(message=LeasePages(pages)):
                self._lease += pages
                self._asked_pages = 0
            case Received(message=Resend() as asked):
                commands += self._outputs.resend(asked)
            case Received(message=Acknowledge(requests)):
                self._outputs.forget(requests)
            case StepDone(result):
                commands += self._stepped(result)
            case CopiedOut(request):
                commands += self._copied(request)
            case MemberJoined(member):
                commands += self._joined(member)
            case MemberLost(member) if member == self._pool:
                self._pool_lost()
            case MemberLost(member) if member.role is Role.GATEWAY:
                self._outputs.owner_lost(member.name)
        return commands + self._copies() + self._next_step() + self._told()

    @property
    def held(self) -> dict[str, int]:
        """What is taken now; nothing when no request is open."""
        return {
            "requests": len(self._waiting) + len(self._running) + len(self._committing) + len(self._copying),
            "pairs": self._limits.num_pairs - self._blocks.num_free,
            "outputs": self._outputs.num_kept,
        }

    @property
    def num_leased_pages(self) -> int:
        """A lease may outlast its request: the next one uses it."""
        copies = [*self._copying.values(), *self._abandoned.values()]
        return len(self._lease) + sum(len(pages) for _, pages in copies)

    def _next_step(self) -> list[Command]:
        if self._in_flight is not None:
            return []
        self._seat_waiting()
        chunks = cut(self._running.values(), self._limits.max_step_tokens)
        if not chunks:
            return []
        self._step_number += 1
        self._in_flight = StepPlan(self._step_number, chunks=chunks)
        return [RunStep(self._in_flight)]

    def _seat_waiting(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            pairs = self._blocks.take(pairs_for(len(request.tokens), self._limits.block_size))
            if pairs is None:
                return
            self._waiting.popleft()
            self._running[request.id] = Running(request, list(request.emitted), pairs)

    def _stepped(self, result: StepResult) -> list[Command]:
        plan, self._in_flight = self._in_flight, None
        assert plan is not None, "a step ended that was not begun"
        for pairs in self._leaving:
            self._blocks.give(pairs)
        self._leaving.clear()
        for chunk in plan.chunks:
            running = self._running.get(chunk.request)
            if running is not None and running.pairs == chunk.pairs:
                running.prefix += len(chunk.tokens)
        for request, token in result.tokens:
            if request in self._running:
                self._first_token(self._running.pop(request), token)
        return list(self._outputs.flush())

    def _first_token(self, running: Running, token: int) -> None:
        running.output.append(token)
        finish = running.request.finish(len(running.output) - 1, token)
        self._outputs.emit(running.request, running.output, finish)
        if finish is None:
            self._committing.append(running)
        else:
            self._blocks.give(running.pairs)
            self._note("ended", running.key)

    def _copies(self) -> list[Command]:
        """Copy orders for those that have pages; pages are asked for where the lease is too small."""
        commands: list[Command] = []
        if self._pool is None:
            return []
        while self._committing:
            running = self._committing[0]
            wanted = pairs_for(running.prefix, self._limits.page_size)
            if wanted > len(self._lease):
                return commands + self._ask_pages(self._pool)
            self._committing.popleft()
            pages = tuple(self._lease.pop() for _ in range(wanted))
            self._copying[running.request.id] = (running, pages)
            tokens = running.tokens(0, running.prefix)
            commands.append(CopyOut(running.request.id, running.pairs, pages, tokens))
        return commands + self._return_pages(self._pool)

    def _ask_pages(self, pool: Member) -> list[Command]:
        """For the first one only, and for all that it needs: who holds some pages and waits for more blocks others."""
        if self._asked_pages:
            return []
        self._asked_pages = pairs_for(self._committing[0].prefix, self._limits.page_size)
        return [*self._return_pages(pool), Send(pool.name, AskPages(self._asked_pages))]

    def _return_pages(self, pool: Member) -> list[Command]:
        pages = tuple(self._lease)
        self._lease.clear()
        return [Send(pool.name, ReturnPages(pages))] if pages else []

    def _copied(self, request: str) -> list[Command]:
        abandoned = self._abandoned.pop(request, None)
        if abandoned is not None:
            self._blocks.give(abandoned[0].pairs)
            self._lease += abandoned[1]
            return []
        copied = self._copying.pop(request, None)
        if copied is None or self._pool is None:
            return []
        running, pages = copied
        self._blocks.give(running.pairs)
        self._outputs.forget([request])  # the decode worker gets the whole output, and keeps it
        return [Send(self._pool.name, Commit(Entry(running.request, tuple(running.output), pages)))]

    def _joined(self, member: Member) -> list[Command]:
        if member.role is Role.POOL:
            self._pool = member
        if member.role is Role.ROUTER:
            held = [*self._running.values(), *self._committing, *(running for running, _ in self._copying.values())]
            keys = [running.key for running in held] + [(one.id, one.attempt) for one in self._waiting]
            return [Send(ROUTER, Holding(tuple(keys), self._blocks.num_free))]
        return []

    def _pool_lost(self) -> None:
        """Its pages are gone; what was being copied to them is copied anew once there is a pool."""
        self._pool = None
        self._lease.clear()
        self._asked_pages = 0
        self._committing.extendleft(running for running, _ in self._copying.values())
        self._copying.clear()
        self._abandoned = {request: (running, ()) for request, (running, _) in self._abandoned.items()}

    def _drop(self, request: str, attempt: int) -> None:
        """Forget the request up to this attempt, wherever it is."""
        self._waiting = deque(one for one in self._waiting if not (one.id == request and one.attempt <= attempt))
        running = self._running.get(request)
        if running is not None and running.request.attempt <= attempt:
            del self._running[request]
            self._free(running.pairs)
        for one in [one for one in self._committing if one.request.id == request and one.request.attempt <= attempt]:
            self._committing.remove(one)
            self._free(one.pairs)
        copying = self._copying.get(request)
        if copying is not None and copying[0].request.attempt <= attempt:
            self._abandoned[request] = self._copying.pop(request)
        self._outputs.forget([request])

    def _free(self, pairs: tuple[int, ...]) -> None:
        if self._in_flight is None:
            self._blocks.give(pairs)
        else:
            self._leaving.append(pairs)

    def _note(self, stage: str, key: Key) -> None:
        self._progress.setdefault(stage, []).append(key)

    def _told(self) -> list[Command]:
        if not self._progress:
            return []
        stages = {stage: tuple(keys) for stage, keys in self._progress.items()}
        self._progress.clear()
        return [Send(ROUTER, Progress(**stages, free_pairs=self._blocks.num_free))]
