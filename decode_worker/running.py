"""The next step of a decode worker, and what a step that has ended brings.

    step N      planned ─▶ runs ─────────────────────────▶ the tokens are known
    step N + 1       planned ─▶ waits on the device ─▶ runs ───────────────────▶

While step N runs, step N + 1 is planned ahead, so that the device never waits for the worker. The results of step N are
not known then, so only what no result can change is planned ahead: all decodes go on, and all prompts of N, as long as
no other prompt could have a seat in N + 1: a prompt that waits for the end of a request gets its seat a step later. A
request in step N has as its input in N + 1 the token that N samples, also where N has the last
chunk of the prompt. A prompt that N cuts goes on behind that chunk, without a token of N; N + 1 has as many tokens as
N, and takes about as long as the newest step that the scheduler planned by itself. A request that must end with the
token of N is left out. If a request turns out to have ended, its result in N + 1 is dropped; its blocks are free when
N + 1 has ended. If the host has a say in a request's next token (penalties, a grammar: all with a History), the request
sits out one step.

All else (new prompts, requests that join or leave) is decided with no step in flight: the device waits once.
Prompts of chats need not wait on a CPU, where the step in flight can pause for them (pausing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from alignedserve.core import Chunk, Decode, FinishReason, PreemptionCause, StepPlan
from alignedserve.cost.model import Shape
from alignedserve.decode_worker.choices import Choices
from alignedserve.decode_worker.joining import Seats
from alignedserve.decode_worker.leaving import Leaving
from alignedserve.decode_worker.pausing import Pauses
from alignedserve.decode_worker.pool_traffic import PagesToWrite, PageWriting
from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command, RunAmid, RunStep, SetTimer
from alignedserve.protocol.events import StepDone
from alignedserve.protocol.messages import Attempt
from alignedserve.worker.arriving import Arrivals
from alignedserve.worker.caller_shares import CallerShares
from alignedserve.worker.memory import Seated
from alignedserve.worker.owners import Outputs
from alignedserve.worker.part import FormPart, Worker, WorkerPart
from alignedserve.worker.scheduler import Levels
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State
from alignedserve.worker.step.step_builder import chunk_of
from alignedserve.worker.step.view import PlannedStep, RanStep, StepAhead, StepView


def decodes_of(requests: Sequence[WorkerRequest]) -> tuple[Decode, ...]:
    """Return the decodes of requests with a known newest token."""
    return tuple(
        [  # one for each token: a call for each would cost as much again, and a keyword half as much
            Decode(
                of.id,
                running.output[-1],
                running.prefix,
                running.kv,
                of.sampling,
                len(running.output),
                running.history,
                of.adapter,
            )
            for running in requests
            for of in (running.request,)
        ]
    )


_ANSWER = "answer"  # timer: the next step waits no longer for the pool


class Stepping(WorkerPart):
    """Plans a step: memory for the next tokens, the choice, a step ahead of the one in flight, or one in its pause."""

    def __init__(
        self, worker: Worker, arrivals: Arrivals, seats: Seats, choices: Choices, leaving: Leaving, elsewhere: FormPart
    ) -> None:
        super().__init__(worker)
        self._arrivals, self._seats, self._choices = arrivals, seats, choices
        self._leaving, self._elsewhere = leaving, elsewhere
        self._shares = CallerShares(self._limits.max_batch, self._pace, self._queue.waiting)
        self._pauses = Pauses(worker)
        self._all_run = False  # whether the newest choice left out no request that could decode
        self._planned_s = 0.0  # the time of the newest choice, as predicted
        self.num_ahead_steps = 0  # planned while another ran

    def plan(self, now: float) -> list[Command]:
        """Plan the next step if none runs; else a step for a pause of the running step, or the step after it."""
        if (step := self._steps.running) is not None:
            return self._plan_amid(step, now) or self._plan_ahead(step, now)
        if self._awaits_copies:
            return []
        if now < self._arrivals.answered_by and (self._here.num_seated or self._queue.waiting):
            return [SetTimer(_ANSWER, self._arrivals.answered_by)]
        self._divide()
        before = [*self._leaving.hand_on(now), *self._give_memory(now)]
        selection = self._next_step(before, now)
        before += self._seats.fetch()
        if selection is None:
            return before
        self._counts.count_decodes(selection.decodes, selection.is_grouped)
        self._shares.count(selection, self._here.running_of)
        before += self._memory.orders()
        decodes, self._planned_s = decodes_of(selection.decodes), selection.predicted_s
        self._all_run = len(decodes) == len(self._here.residents)
        if not self._all_run and self._memory.decodes:
            chosen = [*selection.decodes, *map(self._here.running_of, selection.chunks)]
            self._counts.count_held_back(self._here.residents.values(), chosen)
        begun = self._begin(selection, decodes)
        self._pauses.begins(selection, now)
        running = self._steps.running
        return [*before, *begun, *(self._plan_ahead(running, now) if running is not None else ())]

    def _divide(self) -> None:
        """Let each caller have its part of the next step."""
        if self._policy.is_rt_first:
            self._shares.divide(self._here.seated)

    def _begin(self, selection: PlannedStep, decodes: tuple[Decode, ...]) -> list[Command]:
        """Order the chosen step, if anything runs in it."""
        if not selection.chunks and not decodes:
            return []
        plan = self._steps.begin(selection.chunks, decodes, selection.shape, selection.predicted_s)
        plan.draws = self._choices.draws(plan.chunks)
        prompts = [*map(self._here.running_of, selection.chunks)]
        self._steps.newest = RanStep(plan.number, selection.decodes, prompts)
        return [RunStep(plan)]

    @property
    def _awaits_copies(self) -> bool:
        """Return whether pages are being copied between two steps: the requests are to run in the next step."""
        return not self._memory.copies_beside and any(map(self._here.among, (State.JOINING, State.FETCHING)))

    # --- Memory

    def _give_memory(self, now: float) -> list[Command]:
        """Give each decode a place for the next token; where memory is short, requests leave."""
        memory, here, commands = self._memory, self._here, list[Command]()
        for change in memory.grow(self._queue.waiting, now):
            if isinstance(change, Seated):
                self._seats.seat(change.prompt)
                continue
            prompts, decodes = (*here.prompts.values(),), (*here.residents.values(),)
            leaving = change.request or self._scheduler.leaving(prompts, decodes, memory.context(now))
            commands += self._leaving.preempt(leaving, change.cause)
        commands += self._elsewhere.make_room(now)
        return commands if self._scheduler.levels is None else [*commands, *self._swap(self._scheduler.levels, now)]

    def _swap(self, levels: Levels, now: float) -> list[Command]:
        """Seat prompts that take memory from requests of lower levels, each prompt once.

        A request that left has less to run, and so a higher level, as long as its pages may be found again. Two such
        requests could take the same memory from each other for ever.
        """
        commands, waiting, seated = list[Command](), self._queue.waiting, set[WorkerRequest]()
        at = self._memory.context(now)
        while (prompt := levels.first_waiting(waiting, at)) is not None and prompt not in seated:
            left = self._leaving.swap_for(prompt, self._memory.room_for(prompt), now)
            if left is None or not self._memory.seat_beside_others(prompt):
                break
            commands += left
            self._seats.seat(prompt)
            seated.add(prompt)
        return commands

    def _make_room(self, before: list[Command], now: float) -> bool:
        """Make room where nothing can run; return whether that helped. Commands for that are added to `before`."""
        leaving = self._memory.crowded(self._memory.context(now))
        if leaving is None:
            return False
        if leaving.state is State.PROMPT:
            self._leaving.crowd_out(leaving)
        else:
            before += self._leaving.preempt(leaving, PreemptionCause.CROWDED)
        return True

    # --- The choice

    def _next_step(self, before: list[Command], now: float) -> PlannedStep | None:
        """Choose the next step; None where nothing can run. Commands that must come before it are added to `before`.

        A choice gives prompts seats. Where the pool has pages of a prompt, these are fetched first, and the step is
        chosen again without that prompt. A choice may seat a request that had left, and the next choice recompute it.
        """
        while not self._awaits_copies:
            num_fetching = self._here.num_fetching
            selection = self._choose(before, now)
            if self._here.num_fetching > num_fetching:
                continue
            if selection.chunks or selection.decodes:
                return selection
            if not (selection.admitted or self._make_room(before, now)):
                return None
        return None

    def _choose(self, before: list[Command], now: float) -> PlannedStep:
        """Choose what may run in the next step, and give prompts seats."""
        seats = self._limits.max_batch - self._here.num_seated if self._seats.takes_prompts(now) else 0
        waiting = self._queue.waiting
        decodes, prompts = self._memory.runnable()
        at = self._memory.context(now)
        copies_s = self._writer.num_between_steps * self._pace.copy_token_s  # gaps between tokens are longer by that
        seating = self._memory.seating(0 if self._memory.is_crowded else seats, waiting, at)
        begins = self._memory.context(now + copies_s) if copies_s else at
        some = decodes
        if len(decodes) <= self._limits.max_batch:  # all have a place
            some = self._pace.masks.within(decodes, bool(prompts or waiting), self._pace.fit, now)
        view = StepView(some, prompts, waiting, begins, seating, self._here.seated, self._steps.newest)
        selection = self._scheduler.plan(view)
        if selection.is_empty and len(some) < len(decodes):  # no prompt has a seat
            selection = self._scheduler.plan(view._replace(decodes=decodes))
        for running in selection.displaced:
            before += self._leaving.preempt(
                running, PreemptionCause.REAL_TIME, next(iter(selection.admitted), None), is_replaced=True
            )
        for prompt in selection.admitted:
            self._seats.seat(prompt)
        selection, commands = self._memory.settle(selection, at)
        before += commands
        return selection

    # --- A step in a pause of the step in flight

    def _plan_amid(self, step: StepPlan, now: float) -> list[Command]:
        """Run chats' waiting prompts in a pause of the running step, if that step can pause now."""
        most_s, dominant = self._pauses.room(step, now)
        if most_s <= 0 or not self._seats.takes_prompts(now):
            return []
        waiting, at, prompts = self._queue.waiting, self._memory.context(now), self._pauses.chats
        seating = self._memory.seating_amid(waiting)
        view = StepView((), prompts, waiting, at, seating, ran=self._steps.newest, dominant=dominant)
        selection = self._scheduler.plan_amid(view, most_s)
        if not selection.chunks:
            return []
        for prompt in selection.admitted:
            self._seats.seat(prompt)
        self._queue.run_amid(selection.admitted)
        self._shares.count(selection, self._here.running_of)
        self._pauses.pauses_for(selection.predicted_s, dominant)
        plan = self._steps.begin_amid(selection.chunks, selection.shape, selection.predicted_s)
        plan.draws = self._choices.draws(plan.chunks)
        return [RunAmid(plan)]

    # --- The step after the step in flight

    def _plan_ahead(self, step: StepPlan, now: float) -> list[Command]:
        """Plan the step after `step`, which runs, where no result of `step` changes which requests run."""
        if not self._steps.takes_next or not self._is_settled(step, now):
            return []
        in_step = {part.request: part for part in step.parts}
        decodes, going, sitting_out = list[Decode](), list[WorkerRequest](), list[WorkerRequest]()
        cut = list[tuple[WorkerRequest, int]]()  # prompts, and how many tokens the running step has of each
        for running in self._here.seated:
            part = in_step.get(running.request.id)
            if part is not None and not running.is_at(part):  # joined since
                part = None
            tokens = len(part.tokens) if isinstance(part, Chunk) else 1
            if isinstance(part, Chunk) and not part.is_last:
                cut.append((running, tokens))
                continue
            if part is not None and running.history is not None:
                sitting_out.append(running)  # until the step after that
                continue
            if part is not None and part.index + 1 >= running.request.max_tokens:
                continue
            start = running.prefix if part is None else part.start + tokens
            if not running.kv.has_place(start, self._limits.block_size) and not self._memory.take_for(running, 1):
                return []
            going.append(running)
            if part is None:
                decodes += decodes_of((running,))
            else:  # the token is not known yet
                index, adapter = part.index + 1, part.adapter
                decodes.append(
                    Decode(part.request, None, start, running.kv, running.request.sampling, index, adapter=adapter)
                )
        chunks = self._chunks_behind(step, cut, len(decodes))
        if chunks is None:
            return []
        shape = Shape.build(
            [(chunk.num_computed, chunk.num_before) for chunk in chunks], [decode.num_before for decode in decodes]
        )
        predicted_s = self._pace.cost.seconds(shape)
        ahead = StepAhead(going, sitting_out, step.predicted_s, predicted_s, chunks, self._planned_s)
        if not self._scheduler.goes_on(ahead, self._memory.context(now)):
            return []
        self._counts.count_decodes(going)
        self.num_ahead_steps += 1
        return self._begin(PlannedStep(going, chunks, shape, predicted_s), tuple(decodes))

    def _chunks_behind(
        self, step: StepPlan, cut: Sequence[tuple[WorkerRequest, int]], num_decodes: int
    ) -> tuple[Chunk, ...] | None:
        """Return the next chunks of prompts that the running step has cut, so that the next step has as many tokens;
        None where there is no place for one of these prompts."""
        left, chunks = step.num_tokens - num_decodes, list[Chunk]()
        if cut and num_decodes and not step.decodes:
            return None  # the scheduler may run prompts by themselves
        for running, tokens in cut:
            if left < 1:
                return None
            chunk = chunk_of(running, left, tokens)
            if not running.kv.has_place(chunk.start + len(chunk.tokens) - 1, self._limits.block_size):
                return None
            chunks.append(chunk)
            left -= len(chunk.tokens)
        return tuple(chunks)

    def _is_settled(self, step: StepPlan, now: float) -> bool:
        """Return whether every request here runs in the step, or has joined since, and has memory to go on."""
        if self._queue.waiting and (self._gives_way or self._here.num_seated < self._limits.max_batch):
            return False
        if self._here.among(State.ASKING) or not self._prompts_are_settled(step):
            return False
        if self._steps.is_discarded or not self._all_run or self._leaving.ready:
            return False
        first = self._seats.next_candidate(now)
        if first is not None and self._seats.cannot_wait(first, now):
            return False  # requests leave for the candidate before the next step
        return self._elsewhere.has_room_ahead

    @property
    def _gives_way(self) -> bool:
        """Return whether a request may have to leave for one that waits."""
        waiting = self._queue.waiting
        return bool(waiting and (self._scheduler.levels is not None or (waiting.real_time and self._here.best_effort)))

    def _prompts_are_settled(self, step: StepPlan) -> bool:
        """Return whether the step has a chunk of every prompt here, and brings nothing but KV and first tokens; all of
        them decode here."""
        if not step.chunks:
            return not self._here.unfinished
        chunks = {chunk.request: chunk for chunk in step.chunks}
        return self._brings_kv_and_tokens(step) and all(
            (chunk := chunks.get(prompt.request.id)) is not None
            and prompt.is_at(chunk)
            and prompt.prefix == chunk.start
            and not prompt.decode
            for prompt in self._here.unfinished
        )

    def _brings_kv_and_tokens(self, step: StepPlan) -> bool:
        """Return whether the prompts of the step bring nothing else, and no step may run in its pauses."""
        if step.draws or self._steps.takes_amid or self._limits.fold is not None:
            return False
        return all(chunk.scoring is None and chunk.pooling is None for chunk in step.chunks)


MOST_ALIKE = 15  # steps of the same decodes that are charged like an earlier one


class StepEnd(WorkerPart):
    """Ends a step: blocks come free, the worker learns the step's time, and the requests get their tokens.

    A step that finds too little memory has changed nothing: smaller steps follow (pace.py). Where even a single token
    finds too little, the request is lost, and its owner starts the next attempt.
    """

    def __init__(
        self, worker: Worker, choices: Choices, outputs: Outputs, writing: PageWriting, to_write: PagesToWrite
    ) -> None:
        super().__init__(worker)
        self._choices, self._outputs, self._writing, self._to_write = choices, outputs, writing, to_write
        self._alike: tuple[list[str], list[float], float] = [], [], 1.0  # requests that decoded last, and their charges
        self._num_alike = 0  # steps that were charged so

    def step_done(self, event: StepDone, now: float) -> list[Command]:
        self._memory.reconsider()  # time has passed, so another prompt may be the first
        ended, seconds = self._steps.end(event.result.number, event.seconds), event.seconds
        if ended.paused is None:
            self._queue.step_ended()
        else:
            self._counts.num_pauses += 1
        for blocks in ended.free:
            self._memory.give(blocks)
        if not ended.counts:
            return []
        plan = ended.plan
        if event.result.failure is not None:
            return self._fail(plan, ended.paused)
        if not self._pace.masks.ended(plan, event.result, now):  # or it would say that all steps are so slow
            self._pace.learn(plan, ended.shape, seconds, self._here.find)
        self._counts.count_step(plan, seconds)
        self._decisions.note_step(plan, seconds)
        for chunk in plan.chunks:  # which decodes are in a step follows from where they are
            if (running := self._here.find(chunk.request)) is not None:
                step, tokens, predicted_s = plan.number, len(chunk.tokens), plan.predicted_s
                self._decisions.note(Kind.CHUNK, running.request, "", tokens, step, seconds, predicted_s)
        released = self._give_tokens(plan, event, now - seconds - ended.paused_s, now)
        self._outputs.steps_ended(ended.all_to)
        # Behind the step in flight, and before whatever is ordered for the blocks that come free.
        folds = self._memory.folding.trim(self._writing.awaits, partial(self._queue.lacks_memory, only_rt=False))
        return [*released, *folds, *self._outputs.flush()]

    def _give_tokens(self, plan: StepPlan, done: StepDone, began_at: float, now: float) -> list[Command]:
        """Give requests the results of the step that began at `began_at`, and charge each with its share of the step;
        prompts that get a first token become residents. Return the releases of requests that end or lose their
        beginning, and copies to choices that join.

        The result for a request that has left is dropped; the next attempt, which has other blocks, may be here by now.
        """
        here, pages, outputs, released = self._here, self._pages, self._outputs, list[Command]()
        emit = outputs.emit
        result, seconds, joules, prompts = done.result, done.seconds, done.joules, here.prompts
        find: Callable[[str], WorkerRequest | None] = here.find if prompts else here.residents.get  # mostly the second
        tokens, unsampled = dict(result.tokens), set(result.unsampled)
        logprobs, scores, vectors = dict(result.logprobs), dict(result.prompt_logprobs), dict(result.vectors)
        size, dropping, let_go = pages.page_size, self._memory.dropping, list[Attempt]()
        charges, in_all = self._charges(plan)
        part_s, part_joules = seconds / in_all, joules / in_all
        joined = list[tuple[Chunk, float]]()  # behind the parts: choices, which pay for nothing that ran
        copied = set[str]()  # these
        for part, charge in chain(zip(plan.parts, charges, strict=True), joined):  # one for each token
            request = part.request
            running = find(request)
            # Nearly always the same KV: no need to ask.
            if running is None or (part.kv is not running.kv and not running.is_at(part)):
                if outputs.has_left:
                    tokens_run = 1 if isinstance(part, Decode) else len(part.tokens)
                    outputs.charge_left(request, tokens_run, charge * part_s, charge * part_joules)
                continue
            if isinstance(part, Decode):
                running.ran(1, charge * part_s, charge * part_joules)
                if size and not running.prefix % size:
                    pages.publish(running)
            else:
                running.ran(len(part.tokens), charge * part_s, charge * part_joules)
                running.end_chunk(part, began_at, scores.get(request, ()), vectors.get(request, b""))
                if request not in copied:  # which happens behind this: the last page is shared with a later one
                    pages.publish(running)
                running.promise.served(now)
                if plan.draws:
                    chunks, copies = self._choices.join(running, plan, now)
                    joined += [(chunk, 0.0) for chunk in chunks]
                    copied.update(chunk.request for chunk in chunks)
                    released += copies
            if dropping.is_on and dropping.drop(running):
                let_go.append(running.key)
            if (token := tokens.get(request)) is not None:
                running.emit(token, now, logprobs.get(request) if logprobs else None)
            elif request in unsampled:
                running.fail()
                pages.forget(running)
            else:
                outputs.tell_use_of_chunk(running)
                continue
            emit(running)
            finish = running.finish
            if prompts and running.state is State.PROMPT:
                here.move(running, State.RESIDENT)
                if finish is None:
                    self._decisions.note(Kind.JOINED, running.request, "", len(running.output), len(here.residents))
                    self._writing.add_prompt(running)
            if finish is not None:
                released += self._end(running, finish)
        return released + self._holds.release_all(let_go)

    def _charges(self, plan: StepPlan) -> tuple[Sequence[float], float]:
        """Return the charge of each part of a step, and the sum of the charges; zeros, and 1, if no owner is told.

        Usually all requests are metered, or none. But some may have left, and gateways of two versions may share a
        worker. The charges of the same decodes are kept for some steps: a token more changes next to nothing."""
        names = [decode.request for decode in plan.decodes]
        if not plan.chunks and names == self._alike[0] and self._num_alike < MOST_ALIKE:
            self._num_alike += 1
            return self._alike[1:]
        find, parts, is_told = self._here.find, plan.parts, self._outputs.has_left
        for part in parts:  # mostly the first is metered: any() takes longer
            if is_told or ((running := find(part.request)) is not None and running.request.is_metered):
                charges, in_all = self._pace.cost.charges(plan)
                self._alike, self._num_alike = ([] if plan.chunks else names, charges, in_all), 0
                return charges, in_all
        return (0.0,) * len(parts), 1.0

    def _end(self, running: WorkerRequest, finish: FinishReason) -> list[Command]:
        self._notes.note_end(running)
        self._counts.count_end(running)
        self._decisions.note(
            Kind.ENDED,
            running.request,
            self._outputs.energy_source,
            len(running.output),
            seconds=running.spent_s,
            why=finish.value,
            joules=running.spent_joules,
        )
        is_doubtful = finish is FinishReason.DOUBT and running.key in self._holds
        spoiled = self._pool.tell_spoiled(running.known) if is_doubtful else []
        return [*spoiled, *self._to_write.end(running, finish)]

    def _fail(self, plan: StepPlan, paused: StepPlan | None) -> list[Command]:
        """Try smaller steps, or give up the attempts of a step that cannot be smaller.

        In a pause the memory had to do for both steps; by itself, the smaller one may fit."""
        self._steps.fail()
        if paused is not None:
            self._steps.close_to_pauses()
            self._pace.room.shrink(paused.num_tokens + plan.num_tokens)
            return []
        alone = self._here.find(plan.parts[0].request) if len(plan.parts) == 1 else None
        is_least = alone is not None and alone.request.runs_whole
        if not is_least and self._pace.room.shrink(plan.num_tokens):
            return []
        return [command for ran in plan.parts for command in self._lose(ran)]

    def _lose(self, ran: Chunk | Decode) -> list[Command]:
        """Give up the attempt of this part, if still here."""
        running = self._here.find(ran.request)
        if running is None or not running.is_at(ran):
            return []
        self._here.move(running, State.GONE)
        self._memory.release_after_step(running)
        self._outputs.drop(*running.key)
        self._notes.note("lost", running.key)
        self._decisions.note(Kind.LOST, running.request, why="the device has too little memory for a single token")
        return self._holds.release(running.key)
