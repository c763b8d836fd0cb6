"""The best fit (AccelGen §4.4): of about equally urgent prompts, the set that best fills the tokens and the memory
left.

A window holds the prompts with little more slack than the first prompt. Each time, the scheduler takes the prompt with
the demand nearest (Euclidean) to the tokens and the memory left, both as shares of the total. Then the window moves on.

Demands never exceed what is left, so the nearest is the largest: prompts are sorted by tokens and looked through from
the largest that fits, until even the most memory of all could not make up for fewer tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from math import inf
from typing import NamedTuple

from alignedserve.papers.policy import PaperPolicy
from alignedserve.schedulers.aligned import Aligned
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.seating import Seating
from alignedserve.worker.step.step_builder import StepBuilder
from alignedserve.worker.step.waiting_prompts import Ranked

MOST = 128  # prompts of a window: to look through more would take longer than a step may


class WindowMember(NamedTuple):
    """A prompt of a window, and the whole demand; the least slack has the highest number."""

    tokens: int
    number: int
    memory: int
    running: WorkerRequest


class Left(NamedTuple):
    """The tokens and memory left of a step and a device, and the scale by which distances along each are divided."""

    tokens: int
    memory: int
    token_scale: float
    memory_scale: float

    def distance(self, tokens: int, memory: int) -> float:
        """Return the squared distance of a demand."""
        of_tokens, of_memory = (self.tokens - tokens) / self.token_scale, (self.memory - memory) / self.memory_scale
        return of_tokens * of_tokens + of_memory * of_memory


def windows(
    prompts: Iterable[tuple[tuple[int, float], WorkerRequest]], width_s: float
) -> Iterator[list[WorkerRequest]]:
    """Yield windows of prompts of one priority and about one slack; prompts come in the order of these keys."""
    window: list[WorkerRequest] = []
    first: tuple[int, float] = (0, 0.0)
    for key, running in prompts:
        if window and (key[0] != first[0] or key[1] > first[1] + width_s or len(window) == MOST):
            yield window
            window = []
        if not window:
            first = key
        window.append(running)
    if window:
        yield window


class Window:
    def __init__(self, prompts: Sequence[WorkerRequest], seating: Seating) -> None:
        """`prompts` come from the least slack on."""
        self._seating = seating
        whole = ((running.most_in_chunk, -number, running) for number, running in enumerate(prompts))
        self._members = sorted(
            WindowMember(size, number, seating.demand(running, size), running) for size, number, running in whole
        )
        self._most_memory = max(member.memory for member in self._members)

    def __iter__(self) -> Iterator[WorkerRequest]:
        return (member.running for member in self._members)

    def take_nearest(
        self, left: Left, may_cut: bool, most_of: Callable[[WorkerRequest, int], int]
    ) -> tuple[WorkerRequest, int] | None:
        """Take the nearest prompt out, and return the prompt with the number of tokens that run.

        `most_of` returns how many of some tokens a prompt may run, for memory and rules.
        """
        best, size, least = None, 0, (inf, 0)
        fitting = bisect_right(self._members, (left.tokens, inf))
        most_memory = min(left.memory, self._most_memory)
        for member in chain(self._members[fitting:] if may_cut else (), reversed(self._members[:fitting])):
            if member.tokens <= left.tokens and left.distance(member.tokens, most_memory) > least[0]:
                break  # no memory makes up for so few tokens
            if not (most := most_of(member.running, min(member.tokens, left.tokens))):
                continue
            memory = member.memory if most == member.tokens else self._seating.demand(member.running, most)
            if (found := (left.distance(most, memory), -member.number)) < least:
                best, size, least = member, most, found
        if best is None:
            return None
        self._members.remove(best)
        return best.running, size


class BestFit(Aligned):
    """The default, with the best fit for prompts of chats."""

    def add_prompts(self, step: StepBuilder, prompts: Iterable[Ranked], is_rt: bool) -> None:
        if is_rt:
            add_best_fit(step, ((key[1:3], running) for key, running in prompts))  # by priority and slack
        else:
            step.add(prompts)


def add_best_fit(step: StepBuilder, prompts: Iterable[tuple[tuple[int, float], WorkerRequest]]) -> None:
    """Add what fills the step best of prompts that are about as urgent, window by window."""
    for members in windows(prompts, PaperPolicy.of(step.policy).window_s):
        if not step.takes_prompts:
            return
        tokens = _left_tokens(step, members[0])
        step.has_cut |= tokens < 1
        if tokens:
            _add_window(step, Window(members, step.seating), tokens, members[0])


def _left_tokens(step: StepBuilder, first: WorkerRequest) -> int:
    """Return how many tokens of the budget are left for a window of prompts that begins with this prompt."""
    bound_s, left = step.prompts_s if first.promise.is_rt else step.bound_s, min(step.tokens, step.budget)
    fits, most = 0 if step.has_cut else step.fitting(bound_s, 0, left), min(left, first.most_in_chunk)
    if fits < most and not step.has_cut and step.is_worth_gaps(first, fits, most):
        return most
    if fits < step.at.block_size and step.may_exceed(first):
        return min(left, step.at.block_size)
    return fits


def _add_window(step: StepBuilder, window: Window, tokens: int, first: WorkerRequest) -> None:
    seating, scales = step.seating, step.scales(tokens)

    def most_of(running: WorkerRequest, size: int) -> int:
        if running.request.runs_whole and size < running.num_ahead:
            size = 0 if step.chunks else running.num_ahead
        return 0 if step.must_wait(running) or not size else step.with_memory(running, size)

    while tokens > 0 and step.seats > 0:
        found = window.take_nearest(Left(tokens, seating.left_for(first), *scales), step.may_cut, most_of)
        if found is None:
            # A prompt that fits in time but finds no memory, or no seat, is not overtaken by prompts of later windows.
            if any(not seating.most(running, 1) for running in window if seating.may_seat(running)):
                step.note_no_memory(first)
            return
        running, size = found
        tokens -= step.add_chunk(running, size)
        if step.has_cut:
            return
