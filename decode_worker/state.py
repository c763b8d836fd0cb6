"""The decode worker's core: fetches batches from the pool and decodes them; colocated, it runs prompts too.

    Batch ───▶ arrived ───▶ joining ───▶ resident ───▶ ended: Release
               (no room)    (pages to      ▲
                             pairs)        │
    Prefill ─▶ waiting ────▶ prompt ───────┘
               (no room)    (its chunks)

A request gets the pairs for its whole possible length when it is seated, so that a resident never
has to leave for want of memory.
"""

from __future__ import annotations

from collections import deque

from alignedserve.core import Decode, Entry, Request, Role, StepPlan, StepResult
from alignedserve.messages import (
    ROUTER,
    Acknowledge,
    AskBatch,
    Batch,
    Cancel,
    Command,
    CopiedIn,
    CopyIn,
    Event,
    Holding,
    Member,
    MemberJoined,
    MemberLost,
    Prefill,
    Progress,
    Received,
    Release,
    Resend,
    RunStep,
    Send,
    StepDone,
)
from alignedserve.outputs import Outputs
from alignedserve.prefill_worker.chunks import cut
from alignedserve.prefill_worker.state import Key, WorkerLimits
from alignedserve.running import Blocks, Running, pairs_for


class DecodeCore:
    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self._blocks = Blocks(limits.num_pairs)
        self._outputs = Outputs()
        self._waiting: deque[Request] = deque()  # prompts without room
        self._arrived: deque[Entry] = deque()  # entries without room
        self._prompts: dict[str, Running] = {}
        self._joining: dict[str, tuple[Running, Entry]] = {}
        self._residents: dict[str, Running] = {}
        self._from_pool: dict[str, Key] = {}  # requests whose pages the pool keeps for us
        self._pool: Member | None = None
        self._asked: AskBatch | None = None  # what the pool knows of our room
        self._step_number = 0
        self._in_flight: StepPlan | None = None
        self._leaving: list[tuple[int, ...]] = []  # pairs that the step in flight may still write to
        self._progress: dict[str, list[Key]] = {}

    def handle(self, event: Event, now: float) -> list[Command]:
        commands: list[Command] = []
        match event:
            case Received(message=Prefill(request)):
                commands += self._drop(request.id, request.attempt - 1)
                self._waiting.append(request)
            case Received(message=Batch(entries)):
                self._asked = None
                self._arrived += entries
            case Received(message=Cancel(request=request, attempt=attempt)):
                commands += self._drop(request, attempt)
            case Received(message=Resend() as asked):
                commands += self._outputs.resend(asked)
            case Received(message=Acknowledge(requests)):
                self._outputs.forget(requests)
            case StepDone(result):
                commands += self._stepped(result)
            case CopiedIn(request, intact):
                commands += self._copied(request, intact)
            case MemberJoined(member):
                commands += self._joined(member)
            case MemberLost(member) if member == self._pool:
                self._pool_lost()
            case MemberLost(member) if member.role is Role.GATEWAY:
                self._outputs.owner_lost(member.name)
        return commands + self._seat() + self._ask() + self._next_step() + self._told()

    @property
    def held(self) -> dict[str, int]:
        """What is taken now; nothing when no request is open."""
        return {
            "requests": len(self._waiting) + len(self._arrived) + self._num_seated,
            "pairs": self._limits.num_pairs - self._blocks.num_free,
            "pages": len(self._from_pool),
            "outputs": self._outputs.num_kept,
        }

    @property
    def _num_seated(self) -> int:
        return len(self._residents) + len(self._prompts) + len(self._joining)

    def _seat(self) -> list[Command]:
        """Room for those that came first: entries, which have waited in the pool, before prompts."""
        commands: list[Command] = []
        while self._arrived and (running := self._seated(self._arrived[0].request)) is not None:
            entry = self._arrived.popleft()
            commands += self._drop(entry.request.id, entry.request.attempt - 1)
            running.output += entry.output
            running.prefix = entry.prefix
            self._joining[entry.request.id] = (running, entry)
            self._from_pool[entry.request.id] = running.key
            tokens = running.tokens(0, running.prefix)
            commands.append(CopyIn(entry.request.id, entry.pages, running.pairs, tokens))
        while self._waiting and (running := self._seated(self._waiting[0])) is not None:
            request = self._waiting.popleft()
            running.output += request.emitted
            self._prompts[request.id] = running
            self._note("joined", running.key)
        return commands

    def _seated(self, request: Request) -> Running | None:
        if self._num_seated >= self._limits.max_batch:
            return None
        pairs = self._blocks.take(pairs_for(request.most_tokens, self._limits.block_size))
        return None if pairs is None else Running(request, [], pairs)

    def _ask(self) -> list[Command]:
        """Tell the pool of our room whenever it has changed."""
        room = AskBatch(self._blocks.num_free, self._limits.max_batch - self._num_seated)
        if self._pool is None or self._arrived or not room.requests or not room.pairs or room == self._asked:
            return []
        self._asked = room
        return [Send(self._pool.name, room)]

    def _next_step(self) -> list[Command]:
        if self._in_flight is not None:
            return []
        decodes = tuple(self._decode(running) for running in self._residents.values())
        chunks = cut(self._prompts.values(), self._limits.max_step_tokens - len(decodes))
        if not decodes and not chunks:
            return []
        self._step_number += 1
        self._in_flight = StepPlan(self._step_number, chunks, decodes)
        return [RunStep(self._in_flight)]

    def _decode(self, running: Running) -> Decode:
        sampling, index = running.request.sampling, len(running.output)
        return Decode(running.request.id, running.output[-1], running.prefix, running.pairs, sampling, index)

    def _stepped(self, result: StepResult) -> list[Command]:
        plan, self._in_flight = self._in_flight, None
        assert plan is not None, "a step ended that was not begun"
        for pairs in self._leaving:
            self._blocks.give(pairs)
        self._leaving.clear()
        for chunk in plan.chunks:
            running = self._prompts.get(chunk.request)
            if running is not None and running.pairs == chunk.pairs:
                running.prefix += len(chunk.tokens)
        for decode in plan.decodes:
            running = self._residents.get(decode.request)
            if running is not None and running.pairs == decode.pairs:
                running.prefix += 1
        commands: list[Command] = []
        ran = {chunk.request: chunk.pairs for chunk in plan.chunks}
        ran |= {decode.request: decode.pairs for decode in plan.decodes}
        for request, token in result.tokens:
            commands += self._sampled(request, ran[request], token)
        return [*commands, *self._outputs.flush()]

    def _sampled(self, request: str, pairs: tuple[int, ...], token: int) -> list[Command]:
        """Of a request that has left nothing is kept; its next attempt, which has other pairs, may be here by now."""
        running = self._prompts.get(request) or self._residents.get(request)
        if running is None or running.pairs != pairs:
            return []
        self._prompts.pop(request, None)
        self._residents[request] = running
        running.output.append(token)
        finish = running.request.finish(len(running.output) - 1, token)
        self._outputs.emit(running.request, running.output, finish)
        if finish is None:
            return []
        del self._residents[request]
        self._blocks.give(running.pairs)
        self._note("ended", running.key)
        return self._release(request)

    def _copied(self, request: str, intact: bool) -> list[Command]:
        joined = self._joining.pop(request, None)
        if joined is None:
            return []
        running, _ = joined
        if intact:
            self._residents[request] = running
            self._note("joined", running.key)
            return []
        # Right or not at all: its owner starts the next attempt, which prefills it again.
        self._free(running.pairs)
        self._note("lost", running.key)
        return self._release(request)

    def _joined(self, member: Member) -> list[Command]:
        if member.role is Role.POOL:
            self._pool = member
        if member.role is Role.ROUTER:
            held = [*self._residents.values(), *self._prompts.values(), *(one for one, _ in self._joining.values())]
            asked = [*self._waiting, *(entry.request for entry in self._arrived)]
            keys = [running.key for running in held] + [(one.id, one.attempt) for one in asked]
            return [Send(ROUTER, Holding(tuple(keys), self._blocks.num_free))]
        return []

    def _pool_lost(self) -> None:
        """Entries that were not copied yet are lost with it."""
        self._pool = None
        self._asked = None
        for entry in self._arrived:
            self._note("lost", (entry.request.id, entry.request.attempt))
        self._arrived.clear()
        self._from_pool.clear()

    def _drop(self, request: str, attempt: int) -> list[Command]:
        """Forget the request up to this attempt, wherever it is."""
        self._waiting = deque(one for one in self._waiting if not (one.id == request and one.attempt <= attempt))
        dropped = [one for one in self._arrived if one.request.id == request and one.request.attempt <= attempt]
        for entry in dropped:
            self._arrived.remove(entry)
            self._from_pool[request] = (request, entry.request.attempt)
        commands = self._release(request) if dropped else []
        for seats in (self._residents, self._prompts):
            running = seats.get(request)
            if running is not None and running.request.attempt <= attempt:
                del seats[request]
                self._free(running.pairs)
                commands += self._release(request)
        joining = self._joining.get(request)
        if joining is not None and joining[0].request.attempt <= attempt:
            del self._joining[request]
            self._free(joining[0].pairs)
            commands += self._release(request)
        self._outputs.forget([request])
        return commands

    def _release(self, request: str) -> list[Command]:
        key = self._from_pool.pop(request, None)
        return [] if key is None or self._pool is None else [Send(self._pool.name, Release(*key))]

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
