"""Requests that come to a worker, and wait.

    Prefill ─▶ (its syntax is compiled) ─▶ asking ── Prefix ──▶ waiting ──▶ fetching ── CopiedIn ──▶ running, from the
                                             └── no answer ──▶   ▲        (seated)        │     first unknown token on
                                                                 └──── not intact ────────┘

What the pool still has of a prompt's beginning is not computed again. The pool holds these pages for the attempt until
its Commit or Keep names them, or a Release gives them up. A new attempt drops the attempts before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from alignedserve.core import units_for
from alignedserve.explain.decisions import DecisionRing, Kind
from alignedserve.protocol.commands import Command, CopyIn, PrepareSyntax
from alignedserve.protocol.events import CopiedIn, MemberLost, Received, SyntaxReady
from alignedserve.protocol.messages import AskPrefix, Attempt, Cancel, Expect, Prefill, Prefix
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.memory import PlainMemory
from alignedserve.worker.part import Worker, WorkerPart
from alignedserve.worker.requests import Requests
from alignedserve.worker.setup import running_of
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State
from alignedserve.worker.step.waiting_prompts import WaitingPrompts


class PromptQueue:
    """Prompts that wait for a seat."""

    def __init__(self, here: Requests, memory: PlainMemory, decisions: DecisionRing) -> None:
        self.waiting = WaitingPrompts(memory.pace.policy, memory.pages)
        self._here, self._memory, self._steps, self._pace = here, memory, memory.steps, memory.pace
        self._decisions = decisions
        self._came_in_step = self._rt_came_in_step = 0  # prompts since the step in flight began; the real-time ones

    def admit(self, running: WorkerRequest, now: float) -> None:
        """Add a new prompt that is to run."""
        self._add(running)
        self._pace.prompt_came(running, now)
        if self._steps.running is not None:
            self._came_in_step += 1
            self._rt_came_in_step += running.promise.is_rt
        self._memory.reconsider()

    def add_again(self, prompts: Iterable[WorkerRequest]) -> None:
        """Add prompts that have been here before."""
        for running in prompts:
            self._add(running)
        self._memory.reconsider()

    def _add(self, running: WorkerRequest) -> None:
        self._decisions.note(Kind.QUEUED, running.request, number=len(self.waiting), tokens=running.num_ahead)
        self._here.move(running, State.WAITING)
        self.waiting.add(running)

    def put_back(self, running: WorkerRequest) -> None:
        """Take a request's blocks away. It waits before all others, and is recomputed."""
        self._memory.lose(running)
        self._here.move(running, State.WAITING, first=True)
        self.waiting.add_first(running)

    def crowd_out(self, running: WorkerRequest) -> None:
        """Put a seated prompt back so that others can go on.

        Prompts that get their blocks chunk by chunk may all have some, and none enough. No prompt is seated before
        memory has come free, else two prompts could take turns for ever.
        """
        self.put_back(running)
        self._memory.is_crowded = True

    @property
    def num_old_rt(self) -> int:
        """Return how many real-time prompts wait that were here when the step in flight was chosen."""
        return self.waiting.num_rt - self._rt_came_in_step

    @property
    def num_old(self) -> int:
        """Return the same of all prompts."""
        return len(self.waiting) - self._came_in_step

    def step_ended(self) -> None:
        self._came_in_step = self._rt_came_in_step = 0

    @property
    def blocks_for_first(self) -> int:
        """Return the number of blocks that the prompt needs that has waited longest."""
        return self._blocks_for(next(iter(self.waiting), None))

    def lacks_memory(self, only_rt: bool) -> bool:
        """Return whether the prompt that has waited longest, of all or of real-time ones, needs more than is free."""
        waiting = self.waiting.real_time if only_rt else iter(self.waiting)
        return self._blocks_for(next(waiting, None)) > self._memory.num_free

    def _blocks_for(self, prompt: WorkerRequest | None) -> int:
        limits = self._memory.limits
        return 0 if prompt is None else units_for(limits.least_held(prompt.num_tokens), limits.block_size)


ANSWER_S = 0.005  # a step waits so long for the pool's word on a chat: it takes about a millisecond


class Prefixes(WorkerPart):
    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._unanswered: set[WorkerRequest] = set()  # at the last look: they go on at the next
        self._answered_by = 0.0  # until then the next step waits for the pool's word on a chat's prompt

    @property
    def asking(self) -> list[WorkerRequest]:
        """Return the prompts that wait for the pool's answer."""
        return self._here.of(State.ASKING)

    def admit(self, running: WorkerRequest, now: float) -> list[Command]:
        """Ask the pool what it knows of a new prompt, or let the prompt wait for room where there is nothing to ask."""
        names = self._askable(running)
        if not names:
            self._queue.admit(running, now)
            return []
        if running.promise.is_rt and not self._has_chat:
            self._answered_by = now + ANSWER_S
        self._here.move(running, State.ASKING)
        return self._pool.send(AskPrefix(*running.key, names, running.request.service))

    @property
    def answered_by(self) -> float:
        """Return until when the next step is to wait for the pool's word on a chat's prompt; 0 where none asks."""
        return self._answered_by if self._has_chat else 0.0

    @property
    def _has_chat(self) -> bool:
        return any(running.promise.is_rt for running in self._here.among(State.ASKING))

    def _askable(self, running: WorkerRequest) -> tuple[int, ...]:
        """Return the names of the full pages that the pool may have."""
        may_have = self._policy.reuse and self._pool.member is not None
        return self._writer.names.pages_before_last(running) if may_have else ()

    def pool_lost(self, event: MemberLost, now: float) -> None:
        self._queue.add_again(self.asking)
        for running in (*self._here.occupants(), *self._queue.waiting):
            running.forget_known()

    def answered(self, prefix: Prefix, frame: Received, now: float) -> list[Command]:
        attempt = prefix.request, prefix.attempt
        running = next((asking for asking in self._here.among(State.ASKING) if asking.key == attempt), None)
        if running is None:
            return self._answered_late(attempt, prefix.pages, now)
        running.kept_in_pool(prefix.pages)
        self._note(attempt, bool(prefix.pages))
        self._queue.admit(running, now)
        return []

    def _answered_late(self, attempt: Attempt, pages: tuple[int, ...], now: float) -> list[Command]:
        """Forget what was known of a prompt that has gone on if the pool keeps nothing for it; release what it keeps
        for a prompt that is not here any more."""
        having = (*self._here.occupants(), *self._here.among(State.LEAVING), *self._queue.waiting)
        here = [running for running in having if running.key == attempt and running.state is not State.ABANDONED]
        if not pages:
            for running in here:
                self._writer.forget_parts(running)  # they come after what is to be written now
                running.forget_known()
        if here:
            self._note(attempt, bool(pages))
            return []
        return self._holds.decline(attempt, now) if pages else []

    def _note(self, attempt: Attempt, is_held: bool) -> None:
        (self._holds.add if is_held else self._holds.discard)(attempt)

    def ask_again(self) -> None:
        """Let prompts go on without an answer that were asking at the last look already: the ask or its answer was
        lost."""
        late = [running for running in self.asking if running in self._unanswered]
        self._unanswered = {running for running in self.asking if running not in late}
        self._queue.add_again(late)

    @property
    def awaits_answer(self) -> bool:
        return bool(self._here.among(State.ASKING))


class Fetching(WorkerPart):
    """Copies KV of requests from the pool to their blocks: what it has of a prompt, which runs from there on, or all of
    a candidate that joins."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._new: list[int] = []  # copies to prompts that are not ordered yet
        self.num_reused_tokens = 0  # that were not computed because the pool had their KV
        self.num_spoiled_pages = 0  # of the pool that were not intact

    def seat(self, prompt: WorkerRequest) -> None:
        """Let a prompt run that has got its blocks, after what the pool knows of it has been fetched."""
        if self._pages.has_to_fetch(prompt) and self._may_fetch(prompt) and self._pool.member is not None:
            self._new.append(self._here.begin_copy(prompt, State.FETCHING))
            if not self._memory.copies_beside:
                self._pace.note_fetch(prompt)
            prompt.begin_fetch(self._limits.page_size)
        else:
            prompt.end_fetch()
            self._here.move(prompt, State.PROMPT)

    def _may_fetch(self, prompt: WorkerRequest) -> bool:
        """Return whether it becomes KV, and is not to be recomputed because it had to leave (`schedule.evict`)."""
        has_left = len(prompt.output) > len(prompt.request.emitted)
        return not prompt.kv.form and (self._policy.evict or not has_left)

    def fetch(self, now: float) -> list[Command]:
        """Order the copies to prompts that were seated since: behind those of requests that left them their blocks."""
        new, self._new = self._new, []
        return [*self._memory.orders(), *map(self._fetch, new)] if new else []

    def _fetch(self, number: int) -> Command:
        """Return the order to copy what the device lacks of a prompt."""
        prompt = self._here.copies[number]
        blocks = prompt.blocks[: units_for(prompt.prefix, self._limits.block_size)]
        return self._copy(number, prompt.known, blocks, prompt.tokens(0, prompt.prefix), prompt.fetched_from)

    def copy_in(self, running: WorkerRequest, pages: tuple[int, ...], start: int = 0) -> list[Command]:
        """Copy all of a request to its blocks from these pages, from the one that begins with token `start` on."""
        number = self._here.begin_copy(running, State.JOINING)
        # The copy, or the first step, may end this process before another frame gets out. So the router hears of the
        # request now, and charges the death to it.
        self._notes.note("joined", running.key)
        return [*self._memory.orders(), self._copy(number, pages, running.blocks, running.kept_tokens, start)]

    def _copy(
        self, number: int, pages: tuple[int, ...], blocks: tuple[int, ...], tokens: tuple[int, ...], start: int
    ) -> CopyIn:
        assert self._pool.member is not None, "pages and entries are lost with their pool"
        lacking = pages[start // self._limits.page_size :]
        return CopyIn(number, self._pool.member.holder, lacking, blocks, tokens, start, self._memory.copies_beside)

    def copied_in(self, event: CopiedIn, now: float) -> list[Command]:
        """Let the request run that has its KV now.

        KV that is not intact no other request gets: the pool forgets these pages, since the next attempt could commit
        them again, with the rest from a device. A prompt is recomputed. The owner of a request that was to decode
        starts the next attempt, which begins with the prompt."""
        here, running = self._here, self._here.end_copy(event.number)
        if running is None:  # the copy was to a buffer of a form
            return []
        if running.state is State.ABANDONED:
            here.move(running, State.GONE)
            self._memory.release(running)
            return []
        is_prompt, pages = running.state is State.FETCHING, running.known
        if is_prompt:
            running.end_fetch()
            self._memory.reconsider()  # another prompt may have waited for these pages
        if event.intact:
            here.move(running, State.PROMPT if is_prompt else State.RESIDENT)
            if is_prompt:
                running.came_with(running.prefix)
                self.num_reused_tokens += running.prefix - running.fetched_from
            else:
                self._decisions.note(Kind.JOINED, running.request, "", len(running.output), len(here.residents))
            self._pages.publish(running)
            # The next copy of a request that lacks its beginning is of other tokens.
            is_let_go = self._memory.dropping.drop(running) if is_prompt else running.num_lost > 0
            return self._holds.release(running.key) if is_let_go else []
        if is_prompt:
            running.forget_known()
            self._queue.put_back(running)
        else:
            here.move(running, State.GONE)
            self._memory.release(running)
            self._notes.note("lost", running.key)
            self._decisions.note(Kind.LOST, running.request, why="its KV in the pool was not intact")
        if event.number in here.from_lost_pool:
            return [] if is_prompt else self._holds.release(running.key)
        self.num_spoiled_pages += len(pages)
        self._faults.num_refused += 1
        return [*self._pool.tell_spoiled(pages), *self._holds.release(running.key)]


class Arrivals:
    """Admits prompts, and drops requests: a new attempt drops the attempts before it.

    A request with a syntax is admitted when that is compiled. Otherwise its first step would wait for it, with all
    others in that step."""

    def __init__(
        self,
        here: Requests,
        policy: Policy,
        decisions: DecisionRing,
        admit: Callable[[WorkerRequest, float], list[Command]],
    ) -> None:
        self._here, self._policy, self._decisions, self._admit = here, policy, decisions, admit

    def prefill(self, message: Prefill, frame: Received, now: float) -> list[Command]:
        request = message.request
        dropped = self._here.drop(request.id, request.attempt - 1)
        running = running_of(self._policy, request, request.emitted, decode=message.decode)
        if request.sampling.syntax:
            self._here.move(running, State.COMPILING)
            return [*dropped, PrepareSyntax(request)]
        return [*dropped, *self._admit(running, now)]

    def syntax_ready(self, event: SyntaxReady, now: float) -> list[Command]:
        running = self._compiling((event.request, event.attempt))
        return [] if running is None else self._admit(running, now)

    def expect(self, told: Expect, frame: Received, now: float) -> None:
        if (running := self._compiling((told.request, told.attempt))) is not None:
            running.expect(told.estimate, self._policy, now)

    def cancel(self, message: Cancel, frame: Received, now: float) -> list[Command]:
        self._note_dropped(message.request, message.attempt)
        return self._here.drop(message.request, message.attempt)

    def _compiling(self, attempt: Attempt) -> WorkerRequest | None:
        """Return the request whose syntax is being compiled."""
        return next((running for running in self._here.among(State.COMPILING) if running.key == attempt), None)

    def _note_dropped(self, request: str, attempt: int) -> None:
        for running in self._here.occupants():
            if running.request.id == request and running.request.attempt <= attempt:
                self._decisions.note(Kind.DROPPED, running.request)


class Expectations:
    """Passes on how long the output of a request is expected to be."""

    def __init__(
        self,
        policy: Policy,
        queue: PromptQueue,
        named: Callable[[str], Iterable[WorkerRequest]],
        elsewhere: Callable[[Expect, float], list[Command]],
    ) -> None:
        """`named` returns at least the requests of a name that do not wait; `elsewhere` passes on what is not here."""
        self._policy, self._queue, self._named, self._elsewhere = policy, queue, named, elsewhere

    def expect(self, told: Expect, frame: Received, now: float) -> list[Command]:
        waiting, attempt = self._queue.waiting, (told.request, told.attempt)
        candidates = (*waiting.named(told.request), *self._named(told.request))
        here = [running for running in candidates if running.key == attempt]
        for running in here:
            running.expect(told.estimate, self._policy, now)
            waiting.refile(running)
        return [] if here else self._elsewhere(told, now)
