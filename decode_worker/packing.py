"""Who of those that are seated runs in the next step, who is seated next, and who leaves for want of memory.

Resident is who has memory on the device; the step batch are those of them that run now. Residents that are not in a
step keep what they have: they are paused, never evicted for that.

    fcfs         by arrival; the newest leaves
    longest      by arrival; the longest leaves, of the old batch while another takes its place (AlignedServe §3.4)
    round_robin  real-time and best-effort requests in alternate steps, each by arrival; the newest leaves
    mlfq         those that were served least, in five levels, by arrival within each; the one served most leaves
    skip_join    the same, and a long prompt counts as service before it has run (FastServe §4.1)
    knapsack     all that have memory, in steps of one type or of both: who has memory is chosen (hybrid.py)
    rt_be        BROS §4.2: by promises (selection.py), at most B_curr in a step; best-effort requests leave, who has
                 longest to wait first, so that real-time ones find memory
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from alignedserve.decode_worker.band import RunningBatch
from alignedserve.scheduling.levels import level_served
from alignedserve.scheduling.policy import Chunking, Packing, Policy
from alignedserve.worker.step.limits import Selection
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.seating import Seating
from alignedserve.worker.step.waiting import Waiting

FIRST_BATCH = 128  # B_curr to begin with, where the engine takes as many (BROS §4.2)
STEP_PROMPT = 32  # prompt tokens that count as a step of service: about what a GPU runs in the time of a decode
MOST_WAITING = 20  # steps of decodes that a prompt waits for at most (TGI: max_waiting_tokens)
RECALL_S = 30.0  # in which what real-time requests needed counts half: to recompute others costs more than free memory


FirstToLeave: TypeAlias = Callable[[Sequence[Running]], Running]  # of one class


class Packer:
    """First come, first served: all that are seated run."""

    def __init__(self, most: int) -> None:
        self._most = most  # requests of a step that the engine takes

    @property
    def batch(self) -> int:
        """Most requests of the coming step."""
        return self._most

    def has_seat(self, num_seated: int) -> bool:
        """For a prompt, where nothing is chosen."""
        return num_seated < self._most

    def first(self, waiting: Waiting) -> Running:
        """Who is seated next, where nothing is chosen."""
        return next(iter(waiting))

    def runnable(
        self, decodes: Sequence[Running], prompts: Sequence[Running]
    ) -> tuple[Sequence[Running], Sequence[Running]]:
        """Who may run in the coming step, in the order in which they do."""
        return decodes, prompts

    def leaving(self, prompts: Sequence[Running], decodes: Sequence[Running]) -> Running:
        """For want of memory, of those that are seated, each in the order of their seats."""
        return (prompts or decodes)[-1]

    def planned(self, selection: Selection) -> None:
        """What runs next."""


class LongestLeaves(Packer):
    """AlignedServe's: it frees the most memory, and the old batch is gone the sooner (§3.4, case 3)."""

    def __init__(self, most: int, batch: RunningBatch) -> None:
        super().__init__(most)
        self._running = batch

    def leaving(self, prompts: Sequence[Running], decodes: Sequence[Running]) -> Running:
        return max(self._running.old_of((*prompts, *decodes)), key=lambda one: one.num_tokens)


class RoundRobin(Packer):
    """It is one class's turn, then the other's; a class that has nobody passes."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._is_rt = True  # whose turn it is
        self._runs_rt = True  # who runs in it

    def first(self, waiting: Waiting) -> Running:
        its, others = waiting.real_time, waiting.best_effort
        if not self._is_rt:
            its, others = others, its
        first = next(its, None)
        return next(others) if first is None else first

    def runnable(
        self, decodes: Sequence[Running], prompts: Sequence[Running]
    ) -> tuple[Sequence[Running], Sequence[Running]]:
        for is_rt in (self._is_rt, not self._is_rt):
            its = [[one for one in some if one.promise.is_rt is is_rt] for some in (decodes, prompts)]
            if any(its):
                self._runs_rt = is_rt
                return its[0], its[1]
        return (), ()

    def planned(self, selection: Selection) -> None:
        if not selection.is_empty:
            self._is_rt = not self._runs_rt


class ByLevels(Packer):
    """Nobody's length is predicted: who has used up the bound of a level goes on in the next lower one."""

    def has_seat(self, _num_seated: int) -> bool:
        return True  # who comes is on top, and pauses others

    def first(self, waiting: Waiting) -> Running:
        return min(waiting, key=self._level)

    def runnable(
        self, decodes: Sequence[Running], prompts: Sequence[Running]
    ) -> tuple[Sequence[Running], Sequence[Running]]:
        if len(decodes) + len(prompts) <= self._most:
            return sorted(decodes, key=self._level), sorted(prompts, key=self._level)
        first = sorted((*decodes, *prompts), key=self._place)[: self._most]
        return [one for one in first if one.decodes], [one for one in first if not one.decodes]

    def leaving(self, prompts: Sequence[Running], decodes: Sequence[Running]) -> Running:
        return max((*prompts, *decodes), key=self._place)

    def _level(self, one: Running) -> int:
        return level_served(len(one.output))

    def _place(self, one: Running) -> tuple[int, float, str]:
        return self._level(one), one.request.arrival_at, one.request.id


class SkipJoin(ByLevels):
    """Who would use up a level's bound with its first token alone starts below it (FastServe §4.1)."""

    def _level(self, one: Running) -> int:
        return level_served(len(one.output) + len(one.request.prompt) // STEP_PROMPT)


class Ratio(Packer):
    """Whole prompts interrupt decodes once enough of them wait, or decodes have run for long (TGI's router)."""

    def __init__(self, most: int, waiting_ratio: float) -> None:
        super().__init__(most)
        self._ratio, self._num_steps = waiting_ratio, 0  # of decodes since the last prompt

    def runnable(
        self, decodes: Sequence[Running], prompts: Sequence[Running]
    ) -> tuple[Sequence[Running], Sequence[Running]]:
        waits = bool(decodes) and len(prompts) < self._ratio * len(decodes) and self._num_steps < MOST_WAITING
        return decodes, () if waits else prompts

    def planned(self, selection: Selection) -> None:
        if not selection.is_empty:
            self._num_steps = 0 if selection.chunks else self._num_steps + 1


class Knapsack(Packer):
    """Whoever has memory runs; who has it is chosen before each step (hybrid.py). Where prompts are not cut, a step is
    of those, or of decodes: whichever have been pending longer in all (Apt-Serve §5)."""

    def __init__(self, most: int, has_types: bool) -> None:
        super().__init__(most)
        self._has_types, self._is_prefill = has_types, True

    def has_seat(self, num_seated: int) -> bool:
        """Nobody is seated as it comes."""
        return False

    def choose(self, prompts_s: float, decodes_s: float) -> None:
        """The type of the next step, by how long they have been pending."""
        self._is_prefill = prompts_s >= decodes_s

    @property
    def takes_prompts(self) -> bool:
        """Whether prompts may be seated for the next step."""
        return self._is_prefill or not self._has_types

    def runnable(
        self, decodes: Sequence[Running], prompts: Sequence[Running]
    ) -> tuple[Sequence[Running], Sequence[Running]]:
        if not self._has_types:
            return decodes, prompts
        return ((), prompts) if prompts and (self._is_prefill or not decodes) else (decodes, ())


class RtBe(Packer):
    """B_curr doubles when a choice did not end for want of time, and returns to its start when it did."""

    def __init__(self, most: int, first_to_leave: FirstToLeave) -> None:
        super().__init__(most)
        self._first_batch = self._batch = min(FIRST_BATCH, most)
        self._first_to_leave = first_to_leave

    @property
    def batch(self) -> int:
        return self._batch

    def leaving(self, prompts: Sequence[Running], decodes: Sequence[Running]) -> Running:
        seated = (*prompts, *decodes)
        return self._first_to_leave([one for one in seated if not one.promise.is_rt] or seated)

    def planned(self, selection: Selection) -> None:
        self._batch = self._first_batch if selection.stopped_on_time else min(2 * self._batch, self._most)


def packer(policy: Policy, most: int, first_to_leave: FirstToLeave, batch: RunningBatch) -> Packer:
    if policy.packing is Packing.LONGEST:
        return LongestLeaves(most, batch)
    if policy.packing is Packing.ROUND_ROBIN:
        return RoundRobin(most)
    if policy.packing is Packing.MLFQ:
        return ByLevels(most)
    if policy.packing is Packing.SKIP_JOIN:
        return SkipJoin(most)
    if policy.packing is Packing.KNAPSACK:
        return Knapsack(most, has_types=policy.chunking is Chunking.NONE)
    if policy.waiting_ratio:
        return Ratio(most, policy.waiting_ratio)
    return RtBe(most, first_to_leave) if policy.packs else Packer(most)


# --- Memory of real-time requests


class Lately:
    """What real-time requests needed of a device lately: more of them will come."""

    def __init__(self) -> None:
        self._pairs, self._at = 0.0, 0.0

    def spare_pairs(self, held: int, now: float) -> int:
        """Of those that are free, best-effort ones are not seated on: what is held falls short of it."""
        self._pairs = max(held, self._pairs * 0.5 ** ((now - self._at) / RECALL_S))
        self._at = now
        return int(self._pairs) - held


@dataclass(slots=True)
class PackedSeating(Seating):
    """Real-time requests find also the memory of best-effort ones, and a seat."""

    best_effort: Sequence[Running] = ()  # that are seated
    spare: int = 0  # pairs that best-effort ones are not seated on, beside others of them
    is_open: bool = True  # to real-time ones, however many are seated
    in_order: Callable[[Sequence[Running]], Sequence[Running]] = field(kw_only=True)  # the first to leave last
    _yielding: list[Running] | None = None  # of the best-effort ones, the first to leave last
    _can_yield: int | None = None  # pairs

    def left_for(self, running: Running) -> int:
        pairs = self.blocks.num_free
        if running.promise.is_rt:
            if self._can_yield is None:
                self._can_yield = sum(len(one.pairs) for one in self._left())
            pairs += self._can_yield
        elif not running.pairs and self.best_effort:
            pairs = max(0, pairs - self.spare)
        return pairs * self.block_size

    def has_seat(self, waiting: Running) -> bool:
        return self.seats > 0 or (self.is_open and waiting.promise.is_rt)

    def _left(self) -> Sequence[Running]:
        return self.best_effort if self._yielding is None else self._yielding

    def _taken(self, count: int) -> tuple[int, ...]:
        while count > self.blocks.num_free:
            if self._yielding is None:
                self._yielding = [*self.in_order(self.best_effort)]
            leaving, self._can_yield = self._yielding.pop(), None
            self.blocks.give(leaving.pairs)  # it says where its KV is until then
            self.unseated.append(leaving)
        return Seating._taken(self, count)
