"""A step that is being put together: what fits into what is left of its time, its tokens and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from operator import itemgetter

from alignedserve.core import Chunk, ServiceClass
from alignedserve.cost.model import StepEstimate
from alignedserve.scheduling.policy import Chunking
from alignedserve.scheduling.slo import Late, Rank
from alignedserve.worker.step.chunks import chunk_of
from alignedserve.worker.step.limits import Moment, Selection, StepBounds, caution, estimate_of, rules_of, shape_of
from alignedserve.worker.step.lines import Ranked
from alignedserve.worker.step.running import Running
from alignedserve.worker.step.seating import Seating
from alignedserve.worker.step.windows import Left, Window, windows

# The worth of a first token in time, as late gaps between tokens: of chats without a late gap so far, and of any chat.
GAPS_FOR_FIRST, MOST_GAPS = 2, 16
HELD_TO = 0.75  # of the time of a step: best-effort prompts beside real-time decodes


class Filling:
    def __init__(
        self, bounds: StepBounds, budget: int, at: Moment, seating: Seating, look: Callable[[Running], None]
    ) -> None:
        """`look` notes what the device has of a prompt that waits."""
        careful = caution(at)
        self._most_s = bounds.decodes_s  # for real-time decodes
        self._prompts_s = min(bounds.decodes_s, at.joins_s) / careful  # for real-time prompts
        self._bound_s = min(bounds.all_s, at.joins_s) / careful  # for all others
        self._budget, self._at, self._seating, self._look = budget, at, seating, look
        seating.has_time_to_project = self._has_time_to_project
        self.policy, self._rules = at.policy, rules_of(at.policy)
        self._first_is_sure = not at.policy.ordering.goes_by_promises  # without promises, the first of all
        self._estimate = StepEstimate(at.cost)
        self._room, self._places = at.room, at.batch
        self._ran_out_of_time = self._is_full = self._has_replaced = False
        self._spare: list[tuple[float, Running]] | None = None  # real-time decodes, the most slack last
        self._has_sure = False  # the prompt that gets a block in any case
        self._has_cut = False  # a prompt was cut for lack of time or tokens: no other prompt gets any
        self._has_no_memory = False  # a request waits for memory: no other is seated
        self._be_has_no_memory = False  # a best-effort request waits for memory: real-time ones may pass it
        self._long: set[ServiceClass] | None = None  # classes of the long prompts that are unfinished
        self._taken: set[int] = set()  # decodes that came before all others
        self.decodes: list[Running] = []
        self.chunks: list[Chunk] = []

    @property
    def selection(self) -> Selection:
        seating = self._seating
        if seating.unseated:
            self._leave_out(seating.unseated)
        if seating.unseated or self._has_replaced:
            self._recount()
        estimate, ran_out = self._estimate, self._ran_out_of_time or self._has_cut
        chunks, seated, unseated = tuple(self.chunks), seating.seated, seating.unseated
        return Selection(self.decodes, chunks, estimate.shape, estimate.seconds, seated, unseated, ran_out)

    def _leave_out(self, unseated: Sequence[Running]) -> None:
        """Take requests out that were chosen before others took their memory."""
        names = {running.request.id for running in unseated}
        self.decodes = [running for running in self.decodes if running.request.id not in names]
        self.chunks = [chunk for chunk in self.chunks if chunk.request not in names]

    def _recount(self) -> None:
        self._estimate = StepEstimate(self._at.cost, shape_of(self.chunks, self.decodes))

    def _has_time_to_project(self, tokens: int) -> bool:
        return self._estimate.with_hidden(tokens) <= self._bound_s

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks and not self._seating.seated

    def from_waiting(
        self, source: Callable[[float, float], Iterator[Ranked]], only_be: bool = False
    ) -> Iterator[Ranked]:
        """Yield waiting prompts of a source as long as prompts may be seated."""
        seating = self._seating
        if only_be and not seating.takes_best_effort:
            return
        for found in source(self._at.now, self._at.times.most_s):
            if self._has_no_memory or not self._takes_prompts:
                return
            if only_be and (self._be_has_no_memory or not seating.takes_best_effort):
                return
            if self._takes(found[1]) and self._seating.may_seat(found[1]):
                self._look(found[1])
                yield found

    @property
    def _takes_prompts(self) -> bool:
        return self._room > 0 and self._places > 0 and self._budget > 0 and not (self._has_cut and self._has_sure)

    def _takes(self, prompt: Running) -> bool:
        return not self._has_cut or self._may_exceed(prompt)

    # --- In order

    def add_decodes(self, decodes: Sequence[Running]) -> bool:
        """Add all of these decodes, or none where they do not fit."""
        estimate = estimate_of(decodes, self._at)
        bound_s = self._most_s if all(running.promise.is_rt for running in decodes) else self._bound_s
        if estimate.seconds > bound_s or len(decodes) > min(self._room, self._places):
            return False
        self._estimate = estimate
        self.decodes += decodes
        self._taken.update(map(id, decodes))
        self._room -= len(decodes)
        self._places -= len(decodes)
        return True

    def add_all(self, ranked: Iterable[Ranked], is_rt: bool | None = None) -> None:
        """Add what fits of requests of one class, or of both."""
        for key, running in ranked:
            if self._room <= 0 or (self._is_full and is_rt is False):
                return
            if self._places <= 0 and (self._is_full or running.promise.is_rt):
                if is_rt:
                    return
                continue
            self._add(running, key[0] is Rank.URGENT_RT or key[0] is Rank.URGENT_BE)

    def hold_back(self) -> None:
        """Limit the best-effort prompts that come next, where real-time decodes run: to as many tokens as saturate the
        hardware, or as keep the step within three quarters of what it may take.

        More of them gain next to nothing, and what a step that is longer than predicted costs grows with it.
        """
        if self.policy.chunking is Chunking.SLO and any(running.promise.is_rt for running in self.decodes):
            left = max(self._at.block_size, self._at.pivot) - self._estimate.chunk_tokens
            if left < self._budget:
                left = max(left, self._fitting(HELD_TO * self._bound_s, 0, self._budget))
            self._budget = max(0, min(self._budget, left))

    def add_one_alone(self, ranked: Iterable[Ranked], seated: Iterable[Ranked]) -> None:
        """Add the first request that may run, whatever time it takes; of a prompt, no more than a block where time is
        short.

        Where it waits for memory or a seat, a seated request goes on: a decode first, that gives some back.
        """
        if self._bound_s < inf:
            self._budget = min(self._budget, self._at.block_size)
        self._most_s = self._prompts_s = self._bound_s = inf
        self._has_cut = False
        self._has_no_memory = self._be_has_no_memory = False
        self._budget = max(self._budget, self._at.block_size)
        for _, running in ranked:
            self._add(running, is_urgent=True)
            if not self.is_empty:
                return
            if self._lacks_memory(running) and not running.pairs:
                break
        here = [running for _, running in seated]
        for running in sorted(here, key=lambda running: not running.decodes):
            self._add(running, is_urgent=True)
            if not self.is_empty:
                return

    def _add(self, running: Running, is_urgent: bool) -> None:
        """Add a request if it fits; of a prompt, as much as fits."""
        if not running.pairs:
            self._look(running)
        if running.decodes:
            if not self._taken or id(running) not in self._taken:
                self._add_decode(running)
        else:
            self._add_prompt(running, is_urgent)

    def _add_decode(self, running: Running) -> None:
        estimate, prefix, hidden = self._estimate, running.prefix - running.dropped, running.num_hidden
        is_late = estimate.with_decode(prefix, hidden) > (self._most_s if running.promise.is_rt else self._bound_s)
        self._ran_out_of_time |= is_late
        if (is_late or not self._places) and not self._replaces(running):
            return
        seating = self._seating
        # Decodes have a place for their token; a prompt computed anew may lack one.
        if (seating.by_chunk or not running.pairs) and seating.demand(running, 1):
            if not seating.most(running, 1):
                self._note_no_memory(running)
                return
            seating.take(running, 1)
        self.decodes.append(running)
        estimate.add_decode(prefix)
        estimate.hidden += hidden
        self._room -= 1
        self._places -= 1

    def _add_prompt(self, running: Running, is_urgent: bool) -> None:
        most = self._most_in_step(running) if self._places else 0
        if most <= 0 or not self._takes(running) or self._must_wait(running, is_urgent):
            return
        if most < running.most_in_chunk and not self._may_cut:
            self._budget = 0  # no other prompt overtakes it
            return
        with_memory = self._with_memory(running, most)
        if with_memory:
            self._add_chunk(running, with_memory)
        if with_memory < most:
            self._note_no_memory(running)

    def _most_in_step(self, running: Running) -> int:
        """Return how many tokens of a prompt the step has places for. A prompt that runs whole takes as many as it has,
        beside others if the step has room, or alone."""
        most = min(running.most_in_chunk, self._room, self._budget)
        if not (running.request.runs_whole and 0 < most < running.num_ahead):
            return most
        return running.num_ahead if running.num_ahead <= self._room or self._is_first else 0

    @property
    def _is_first(self) -> bool:
        """Return whether the next prompt is the first of the step."""
        return not self.chunks

    def _with_memory(self, running: Running, most: int) -> int:
        """Return for how many of these tokens of a prompt there is memory: all or none where it runs whole."""
        found = self._seating.most(running, most)
        return 0 if running.request.runs_whole and found < running.num_ahead else found

    def _note_no_memory(self, running: Running) -> None:
        if self.policy.precedence.holds_up_all(running.promise.is_rt):
            self._has_no_memory = True
        else:
            self._be_has_no_memory = True

    def _lacks_memory(self, running: Running) -> bool:
        """Return whether another request waits for memory that is to be seated before this one."""
        return self._has_no_memory or (self._be_has_no_memory and not running.promise.is_rt)

    def _replaces(self, best_effort: Running) -> bool:
        """Replace the real-time decode with most slack if it is in time without this step; return whether that is done.

        The first best-effort decode that neither fits nor may replace ends the choice of such (BROS §4.2, Alg. 1).
        """
        if self._is_full or not self.policy.precedence.may_replace(best_effort.promise.is_rt):
            return False
        if self._spare is None:
            slacks = [(self._slack_s(running), running) for running in self.decodes if running.promise.is_rt]
            self._spare = sorted([found for found in slacks if found[0] != inf], key=itemgetter(0))
        if self._spare:
            slack_s, real_time = self._spare[-1]
            estimate = self._estimate  # its `longest` may be of the request that goes: that is counted again at the end
            estimate.decodes -= 1
            estimate.prefixes -= real_time.num_held
            estimate.hidden -= real_time.num_hidden
            if estimate.with_decode(best_effort.num_held, best_effort.num_hidden) <= min(self._bound_s, slack_s):
                self._spare.pop()
                self.decodes.remove(real_time)
                self._has_replaced = True
                self._room += 1
                self._places += 1
                return True
            estimate.add_decode(real_time.num_held)
            estimate.add_hidden(real_time.num_hidden)
        self._is_full = True
        return False

    def _slack_s(self, real_time: Running) -> float:
        """Return its slack; infinity where it is late already, and is to run as soon as it can."""
        now, dues = self._at.now, real_time.promise.dues
        if dues is None or dues.is_late(now):
            return inf
        return dues.due_at(now) - now - dues.num_left * self._at.times.mean_s

    @property
    def _may_cut(self) -> bool:
        """Return whether a prompt may be cut. Without chunking, only a prompt that is longer than any step is cut."""
        return self.policy.chunking is not Chunking.NONE or not self.chunks

    def _must_wait(self, running: Running, is_urgent: bool = False) -> bool:
        """Return whether a prompt waits to be seated: for memory, pages, or the end of another long prompt (ERA,
        AccelGen §4.2)."""
        if running.pairs:
            return False
        if self._lacks_memory(running) or not self._seating.may_seat(running):
            return True
        if self.policy.chunking is not Chunking.SLO or running.num_tokens < self.policy.long_prompt:
            return False
        holds, waiting = self.policy.precedence.holds_long, running.request.service
        return any(holds(unfinished, waiting, is_urgent) for unfinished in self._long_classes)

    @property
    def _long_classes(self) -> set[ServiceClass]:
        if self._long is None:
            self._long = self._seating.long_classes()
        return self._long

    def _add_chunk(self, running: Running, most: int) -> int:
        """Add a chunk of at most so many tokens, for which there is memory, and return for how many there is time."""
        if not running.pairs and self._seating.pages.has_to_fetch(running):  # what is known of it is fetched first
            self._seating.take(running, most)
            return 0
        bound_s = self._prompts_s if running.promise.is_rt else self._bound_s
        size = 0 if self._has_cut else self._fitting(bound_s, running.num_held, most, running.num_hidden)
        if size < most and not self._has_cut and self._is_worth_gaps(running, size, most):
            size = most
        if running.request.runs_whole:
            size = most if size == most or self._may_exceed(running) else 0
        elif size < self._at.block_size and self._may_exceed(running):
            size = min(most, self._at.block_size)
        self._has_cut |= size < most
        if size:
            if not running.pairs and running.num_tokens >= self.policy.long_prompt:
                self._long_classes.add(running.request.service)
            self._seating.take(running, size)
            self.chunks.append(chunk_of(running, size))
            self._estimate.add_chunk(size, running.num_held)
            self._estimate.add_hidden(running.num_hidden)
            self._room -= size
            self._places -= 1
            self._budget -= size
            self._has_sure |= running.promise.is_rt or self._first_is_sure
        return size

    def _is_worth_gaps(self, running: Running, size: int, most: int) -> bool:
        """Return whether all of a prompt runs now, though decodes are late for it: else its first token would be.

        It may make a few of them late, or, where even a block makes them late, any number: all at once makes each late
        once, and a block at a time once for each block.
        """
        dues, now = running.promise.dues, self._at.now
        if dues is None or most < running.num_ahead or self._most_s == inf or not self._rules.delays_decodes:
            return False
        if self.policy.late is Late.DROP_LAST and dues.is_late(now):
            return False
        left_s, prefix, hidden = dues.due_at(now) - now, running.num_held, running.num_hidden
        if size and size * int(left_s / self._prompts_s) >= running.num_ahead:
            return False  # it is in time a piece at a time
        if self._estimate.with_chunk(most, prefix, hidden) > left_s:
            return False
        if self._estimate.with_chunk(min(most, self._at.block_size), prefix, hidden) > self._most_s:
            return True
        in_time = [
            dues for running in self.decodes if (dues := running.promise.dues) is not None and not dues.is_late(now)
        ]
        return len(in_time) <= MOST_GAPS and sum(not dues.has_missed for dues in in_time) <= GAPS_FOR_FIRST

    # --- By windows

    def add_windows(self, prompts: Iterable[tuple[tuple[int, float], Running]]) -> None:
        """Add what fills the step best of prompts that are about as urgent, window by window."""
        for members in windows(prompts, self.policy.window_s):
            if not self._takes_prompts or not self._takes(members[0]):
                return
            tokens = self._left_tokens(members[0])
            self._has_cut |= tokens < 1
            if tokens:
                self._add_window(Window(members, self._seating), tokens, members[0])

    def _left_tokens(self, first: Running) -> int:
        """Return what is left of the budget for a window that begins with this prompt."""
        bound_s = self._prompts_s if first.promise.is_rt else self._bound_s
        fits = 0 if self._has_cut else self._fitting(bound_s, 0, min(self._room, self._budget))
        most = min(self._room, self._budget, first.most_in_chunk)
        if fits < most and not self._has_cut and self._is_worth_gaps(first, fits, most):
            return most
        if fits < self._at.block_size and self._may_exceed(first):
            return min(self._room, self._budget, self._at.block_size)
        return fits

    def _add_window(self, window: Window, tokens: int, first: Running) -> None:
        seating = self._seating
        token_scale, memory_scale = self._rules.scales(tokens, self._at.room, seating.total * seating.block_size)
        while tokens > 0 and self._places > 0:
            left = Left(tokens, seating.left_for(first), token_scale, memory_scale)
            found = window.take_nearest(left, self._may_cut, self._most_of)
            if found is None:
                # A prompt that fits in time but finds no memory, or no seat, is not overtaken by prompts of later
                # windows.
                if any(not seating.most(running, 1) for running in window if seating.may_seat(running)):
                    self._note_no_memory(first)
                return
            running, size = found
            tokens -= self._add_chunk(running, size)
            if self._has_cut:
                return

    def _most_of(self, running: Running, size: int) -> int:
        if running.request.runs_whole and size < running.num_ahead:
            size = running.num_ahead if self._is_first else 0
        return 0 if self._must_wait(running) or not size else self._with_memory(running, size)

    def _may_exceed(self, running: Running) -> bool:
        """Return whether a prompt gets a block whatever time there is: the first real-time one, unless it is to be
        behind all others; without promises, the first of all."""
        if self._has_sure or self._first_is_sure:
            return not self._has_sure
        if not running.promise.is_rt:
            return False
        return self.policy.late is not Late.DROP_LAST or not running.promise.is_late(self._at.now)

    def _fitting(self, bound_s: float, cached: int, most: int, hidden: int = 0) -> int:
        """Return the most tokens with which the step stays in bounds: a longer chunk never takes less."""
        if self._estimate.with_chunk(most, cached, hidden) <= bound_s:
            return most
        fits = 0
        while most - fits > 1:
            middle = (fits + most) // 2
            if self._estimate.with_chunk(middle, cached, hidden) <= bound_s:
                fits = middle
            else:
                most = middle
        return fits
