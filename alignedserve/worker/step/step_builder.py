"""Puts a step together, and counts the time, tokens, seats and memory left.

A scheduler opens a step with a bound of time and a budget of prompt tokens, and adds requests in the order that it
wants; what does not fit is passed over. Only the last prompt of a step is cut. Where a prompt waits for memory, no
later prompt takes memory first: else a large prompt would wait for ever.

Rules that depend on the kind of a request are separate methods, which schedulers override. Here all requests are equal,
and the first prompt of a step gets a block of tokens even where no time is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from math import inf

from alignedserve.core import Chunk
from alignedserve.cost.model import Kind, StepEstimate
from alignedserve.scheduling.policy import Chunking
from alignedserve.scheduling.slo import Rank
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.ranks import key_of
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import PlannedStep, StepView, all_of, estimate_of, shape_of
from alignedserve.worker.step.waiting_prompts import Ranked


@dataclass(frozen=True, slots=True)
class StepBounds:
    """R: the most time that the coming step may take."""

    decodes_s: float = inf  # for decodes of chats, so that none is late
    prompts_s: float = inf  # for prompts of chats too
    about_s: float = inf  # for documents, so that chats which are still to come find a short step
    least_s: float = 0.0  # for decodes and prompts of chats in any case

    def careful_s(self, at: StepContext, kind: Kind = Kind.MIXED) -> float:
        """Return the most time that a step with documents is to take, as predicted.

        A step that takes longer than predicted makes each chat here late that had no time to spare: their bound has a
        margin. A chat that is still to come seldom comes in just that step: that bound has none.
        """
        return min(at.careful_s(self.prompts_s, kind), self.about_s)


UNBOUNDED = StepBounds()


class StepBuilder:
    def __init__(self, view: StepView, bounds: StepBounds, budget: int, most: int) -> None:
        """`budget` is the most prompt tokens of the step, `most` the most requests."""
        at, seating = view.at, view.seating
        self.at, self.seating, self.policy = at, seating, at.policy
        least_s, handoffs_s = bounds.least_s, at.careful_s(at.max_step_for_handoffs_s)
        # The most time of the step: beside decodes of chats, beside prompts of chats, and beside all others.
        self.decodes_s = max(least_s, bounds.decodes_s)
        self.prompts_s = min(max(least_s, at.careful_s(bounds.decodes_s)), handoffs_s)
        self.bound_s = min(bounds.careful_s(at), handoffs_s)
        self.budget = budget
        self.tokens, self.seats = at.room, most  # that are left
        self.decodes: list[WorkerRequest] = []
        self.chunks: list[Chunk] = []
        self.estimate = StepEstimate(at.cost)
        self.has_cut = False  # a prompt was cut for lack of time or tokens: no other prompt gets any
        self._look = view.waiting.look
        self._cuts = at.policy.chunking is not Chunking.NONE
        self._has_no_memory = False  # a request waits for memory: no other is seated
        self._be_has_no_memory = False  # a best-effort request waits for memory: only real-time requests may pass
        self._first: set[int] = set()  # decodes that came before all others
        seating.has_time_to_project = lambda tokens: self.estimate.with_remade(tokens) <= self.bound_s

    # --- Rules that schedulers override

    def may_exceed(self, prompt: WorkerRequest) -> bool:
        """Return whether the prompt gets a block of tokens even where no time is left."""
        return not self.chunks

    @property
    def takes_after_cut(self) -> bool:
        """Return whether the next prompt may get a block though an earlier prompt was cut."""
        return not self.chunks

    def blocks_all(self, running: WorkerRequest) -> bool:
        """Return whether a request that waits for memory blocks requests of both classes."""
        return True

    def scales(self, tokens: int) -> tuple[int, int]:
        """Return what counts as all of the tokens and all of the memory, where `tokens` are left."""
        return max(tokens, self.at.room), self.seating.total * self.at.block_size

    def is_worth_gaps(self, prompt: WorkerRequest, size: int, most: int) -> bool:
        """Return whether `most` tokens of a prompt run where only `size` fit, so that decodes are late."""
        return False

    # --- Add requests

    def seatable(self, waiting: Iterator[Ranked], only_be: bool = False) -> Iterator[Ranked]:
        """Yield waiting prompts as long as prompts may be seated; `only_be` says that all given are best-effort."""
        seating = self.seating
        for found in waiting:
            if self._has_no_memory or not self.takes_prompts:
                return
            if only_be and self._be_has_no_memory:
                return
            if seating.may_seat(found[1]):
                self._look(found[1])
                yield found

    def add_together(self, decodes: Sequence[WorkerRequest]) -> bool:
        """Add all these decodes to an empty step, or none where not all fit."""
        estimate = estimate_of(decodes, self.at)
        bound_s = self.decodes_s if all(running.promise.is_rt for running in decodes) else self.bound_s
        if estimate.seconds > bound_s or len(decodes) > min(self.tokens, self.seats):
            return False
        self.estimate = estimate
        self.decodes += decodes
        self._first.update(map(id, decodes))
        self.tokens -= len(decodes)
        self.seats -= len(decodes)
        return True

    def others_of(self, decodes: Sequence[WorkerRequest]) -> Sequence[WorkerRequest]:
        """Return the decodes that were not added together."""
        if len(self._first) == len(decodes):
            return ()
        return [running for running in decodes if id(running) not in self._first] if self._first else decodes

    def add(self, ranked: Iterable[Ranked]) -> None:
        """Add what fits of these requests."""
        for key, running in ranked:
            if self.tokens <= 0 or self.seats <= 0:
                return
            self._add(running, key[0] is Rank.URGENT_RT or key[0] is Rank.URGENT_BE)

    def add_one_alone(self, seated: Iterable[Ranked], waiting: Iterable[Ranked]) -> None:
        """Add the first request that may run, even where no time is left; then a prompt runs only a block of tokens.

        Where that request waits for memory or a seat, a seated request runs: decodes first, which soon free memory.
        """
        if self.bound_s < inf:
            self.budget = min(self.budget, self.at.block_size)
        self.decodes_s = self.prompts_s = self.bound_s = inf
        self.has_cut = False
        self._has_no_memory = self._be_has_no_memory = False
        self.budget = max(self.budget, self.at.block_size)
        for _, running in merge(seated, waiting, key=key_of):
            self._add(running, is_urgent=True)
            if not self.is_empty:
                return
            if self._lacks_memory(running) and not running.blocks:
                break
        for running in sorted([running for _, running in seated], key=lambda running: not running.decodes):
            self._add(running, is_urgent=True)
            if not self.is_empty:
                return

    def _add(self, running: WorkerRequest, is_urgent: bool) -> None:
        if not running.kv.blocks:
            self._look(running)
        if running.decodes:
            if not self._first or id(running) not in self._first:
                self._add_decode(running)
        else:
            self._add_prompt(running, is_urgent)

    def _add_decode(self, running: WorkerRequest) -> None:
        estimate, prefix, remade = self.estimate, running.num_held, running.num_remade
        if estimate.with_decode(prefix, remade) > (self.decodes_s if running.promise.is_rt else self.bound_s):
            return
        seating = self.seating
        # Decodes have a place for the next token; a recomputed prompt may lack the place.
        if (seating.by_chunk or not running.kv.blocks) and seating.demand(running, 1):
            if not seating.most(running, 1):
                self.note_no_memory(running)
                return
            seating.take(running, 1)
        self.decodes.append(running)
        estimate.add_decode(prefix)
        estimate.remade += remade
        self.tokens -= 1
        self.seats -= 1

    def _add_prompt(self, running: WorkerRequest, is_urgent: bool) -> None:
        most = self._most_in_step(running) if self.seats else 0
        if most <= 0 or not self.takes_prompts or self.must_wait(running, is_urgent):
            return
        if most < running.most_in_chunk and not self.may_cut:
            self.budget = 0  # no other prompt overtakes this prompt
            return
        with_memory = self.with_memory(running, most)
        if with_memory:
            self.add_chunk(running, with_memory)
        if with_memory < most:
            self.note_no_memory(running)

    def add_chunk(self, running: WorkerRequest, most: int) -> int:
        """Add a prompt's next chunk, of the `most` tokens with memory as many as there is time for. Return the size."""
        if not running.blocks and self.seating.pages.has_to_fetch(running):  # the cached prefix is fetched first
            self.seating.take(running, most)
            return 0
        bound_s = self.prompts_s if running.promise.is_rt else self.bound_s
        times = 2 if running.is_scored else 1  # Chunk.num_computed
        size = 0 if self.has_cut else self.fitting(bound_s, running.num_held, times * most, running.num_remade) // times
        if size < most and not self.has_cut and self.is_worth_gaps(running, size, most):
            size = most
        if running.request.runs_whole:
            size = most if size == most or self.may_exceed(running) else 0
        elif size < self.at.block_size and self.may_exceed(running):
            size = min(most, self.at.block_size)
        self.has_cut |= size < most
        if size:
            self.seating.take(running, size)
            self.chunks.append(chunk := chunk_of(running, size))
            self.estimate.add_chunk(chunk.num_computed, running.num_held)
            self.estimate.add_remade(running.num_remade)
            self.tokens -= size
            self.seats -= 1
            self.budget -= size
        return size

    # --- What is left

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks and not self.seating.admitted

    @property
    def takes_prompts(self) -> bool:
        has_time = not self.has_cut or self.takes_after_cut
        return has_time and self.tokens > 0 and self.seats > 0 and self.budget > 0

    @property
    def may_cut(self) -> bool:
        """Return whether the next prompt may be cut; where prompts run whole, only a prompt too long for any step."""
        return self._cuts or not self.chunks

    def must_wait(self, running: WorkerRequest, is_urgent: bool = False) -> bool:
        """Return whether a prompt waits for memory or pages before it gets a seat, urgent or not."""
        return not running.blocks and (self._lacks_memory(running) or not self.seating.may_seat(running))

    def _most_in_step(self, running: WorkerRequest) -> int:
        """Return how many tokens of a prompt the step has places for. A prompt that runs whole gets all or none: beside
        others if the step has room, or alone."""
        most = min(running.most_in_chunk, self.tokens, self.budget)
        if not (running.request.runs_whole and 0 < most < running.num_ahead):
            return most
        return running.num_ahead if running.num_ahead <= self.tokens or not self.chunks else 0

    def with_memory(self, running: WorkerRequest, most: int) -> int:
        """Return for how many of these tokens of a prompt there is memory: all or none for a prompt that runs whole."""
        found = self.seating.most(running, most)
        return 0 if running.request.runs_whole and found < running.num_ahead else found

    def note_no_memory(self, running: WorkerRequest) -> None:
        """Note that a request waits for memory: requests that are added later must not pass."""
        if self.blocks_all(running):
            self._has_no_memory = True
        else:
            self._be_has_no_memory = True

    def _lacks_memory(self, running: WorkerRequest) -> bool:
        """Return whether a request that is to be seated before this request waits for memory."""
        return self._has_no_memory or (self._be_has_no_memory and not running.promise.is_rt)

    def fitting(self, bound_s: float, cached: int, most: int, remade: int = 0) -> int:
        """Return the most tokens with which the step stays in bounds: a longer chunk never takes less."""
        if self.estimate.with_chunk(most, cached, remade) <= bound_s:
            return most
        fits = 0
        while most - fits > 1:
            middle = (fits + most) // 2
            if self.estimate.with_chunk(middle, cached, remade) <= bound_s:
                fits = middle
            else:
                most = middle
        return fits

    # --- The step

    @property
    def selection(self) -> PlannedStep:
        """Return the step, without requests that lost their memory to other requests of the step."""
        displaced, estimate = self.seating.displaced, self.estimate
        if displaced:
            names = {running.request.id for running in displaced}
            self.decodes = [running for running in self.decodes if running.request.id not in names]
            self.chunks = [chunk for chunk in self.chunks if chunk.request not in names]
            estimate = StepEstimate(self.at.cost, shape_of(self.chunks, self.decodes))
        return PlannedStep(
            self.decodes, tuple(self.chunks), estimate.shape, estimate.seconds, self.seating.admitted, displaced
        )


def all_decodes(view: StepView, most: int, bounds: StepBounds = UNBOUNDED) -> PlannedStep | None:
    """Return a step of all decodes where no prompt waits and all fit, else None. `most` requests run in a step."""
    at, decodes = view.at, view.decodes
    if view.prompts or view.waiting or len(decodes) > min(at.room, most):
        return None
    found = all_of(decodes, (), at)
    return found if found.predicted_s <= bounds.careful_s(at, Kind.DECODE) else None


def chunk_of(prompt: WorkerRequest, most: int, running: int = 0) -> Chunk:
    """Return the next chunk of a prompt, of at most `most` tokens; all tokens of a prompt that runs whole. The chunk
    comes behind `running` tokens, which the running step has; these are not scored."""
    request, start, left = prompt.request, prompt.prefix + running, prompt.num_ahead - running
    size = left if request.runs_whole else min(prompt.most_in_chunk, most, left)
    whole = size == left
    return Chunk(
        request=request.id,
        tokens=prompt.tokens(start, start + size),
        start=start,
        kv=prompt.kv,
        sampling=request.sampling if whole and prompt.has_tokens else None,
        index=len(prompt.output),
        history=prompt.history if whole else None,
        scoring=prompt.scoring(start + size),
        pooling=request.pooling if whole else None,
        adapter=prompt.request.adapter,
    )
