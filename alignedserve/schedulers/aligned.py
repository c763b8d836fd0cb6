"""AlignedServe's own scheduler, the default: chats in time, documents in all that chats leave.

R is the time that the next step may take: what the tightest chat leaves. Decodes of chats may fill R. Prompts and
documents stop short of R, by as much as steps take longer than predicted. For example, 20 chats decode in 15 ms, and
the tightest is due in 40 ms: prompts and documents get 25 ms less that caution. At 0.1 ms a token, a prompt of 400
tokens is cut to about 200, and the rest runs in later steps.

Three exceptions keep work going, as decodes might fill R for ever: where nothing fits, the first request of the order
runs alone; the first prompt of a chat that is late gets a block of tokens; and one text that runs whole may pass R.

Beside each rule stand its paper and its gain, with the rule against without: chats in time in points, tokens of
documents in % (lab/benchmarks/rules.py, results/*-rules*.jsonl). A rule without a paper is ours. `Tight` is a CPU with
promises of 0.3 s and 60 ms. docs/how/steps.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import chain, islice
from math import inf
from types import MappingProxyType

from alignedserve.cost.model import Kind
from alignedserve.schedulers.near_lengths import NearLengths
from alignedserve.scheduling.policy import Chunking, Grouping, Policy
from alignedserve.scheduling.slo import Late, Rank
from alignedserve.worker.scheduler import NO_LIMIT, Scheduler
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.ranks import RankedRequests, in_turn, last_of_old
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.step_builder import UNBOUNDED, StepBounds, StepBuilder, all_decodes
from alignedserve.worker.step.view import PlannedStep, StepAhead, StepView, dominant_callers, estimate_of
from alignedserve.worker.step.waiting_prompts import Ranked, WaitingPrompts

# The worth of a first token in time, as late gaps between tokens: of chats without a late gap so far, and of any chat.
GAPS_FOR_FIRST, MOST_GAPS = 2, 16
DOCUMENTS_PER_STEP = 0.75  # of the time of a step: prompts of documents beside chats that decode
# The longest step with documents where another caller's chat may come, in times of the chat's prompt alone, and in
# times of the step's decodes.
MAX_STEP_PER_PREFILL, MAX_STEP_PER_DECODES = 0.5, 2.0
# Where this share of the memory is taken, and this share is held by chats, a step with documents takes at most so many
# times the time of the chats' decodes.
FULL_MEMORY, MANY_CHATS, MAX_STEP_PER_CHATS = 0.85, 0.4, 1.2
# Beside chats of other callers, where steps pause: the longest layer, in times of the chat's prompt alone; and the
# tokens that fit in any case, a part of those that saturate the hardware.
MAX_LAYER_PER_PREFILL, LEAST_TOKENS_PER_PIVOT = 0.3, 1 / 3
MAX_STEP_PER_OTHERS_ALONE = 1.25  # times other callers' prompts alone: the longest step in which they run beside all
LEAST_STEP_PER_DECODES = 1.5  # times the step's decodes: the shortest step with documents that leaves room for a pause
MOST_LONGER = 1.05  # times the newest step that was planned in full: a step ahead that goes on with its prompts
MOST_WITHOUT = 4  # steps on end that leave documents out for prompts of chats; weighed with `plan_amid`
NO_GAPS: Mapping[str, float] = MappingProxyType({})  # of parts: a single caller has work
_AT_A_TIME = 32  # decodes, or prompts that wait, that are looked at
_AMONG = 512  # prompts that wait, among which those of callers that do not dominate are looked for


class Aligned(Scheduler):
    def __init__(self, policy: Policy, most: int = NO_LIMIT) -> None:
        super().__init__(policy, most)
        self._near = NearLengths() if policy.grouping is Grouping.ALIGNED else None
        self.makes_pauses = policy.chunking is Chunking.SLO
        self._ran_others = False  # whether the last step had prompts of other callers alone
        self._num_without_documents = 0  # steps on end that left documents out, as they had prompts of chats

    def plan(self, view: StepView) -> PlannedStep:
        """Fill the next step, and leave out the longest documents where that is faster (near_lengths.py)."""
        found = self.fill(view)
        return found if self._near is None else self._near.choose(found, view)

    def fill(self, view: StepView) -> PlannedStep:
        """Fill the next step: chats as their promises ask, documents with what is left.

        Chats come before documents, even urgent documents: time of R that these took would be missing when a chat's
        prompt is due. Of each class urgent requests come first, then decodes, then prompts.
        A chat's prompt that finds no memory or seat gets a document's, which waits until there is room again.
        """
        at = view.at
        ran_others, self._ran_others = self._ran_others, False
        num_without, self._num_without_documents = self._num_without_documents, 0
        view.waiting.refresh(at.now, at.times, at.chunk)
        bounds = step_bounds(view, self.most)
        if (decodes := all_decodes(view, self.most, bounds)) is not None:
            return decodes  # as in most steps: no prompt waits, and there is time for all
        line, waiting = view.waiting.line, waiting_in_order(view)

        # The step may take R, a budget of prompt tokens, and as many requests as the engine takes.
        dominant = dominant_callers((*view.decodes, *view.prompts), view.waiting, at.expected_chats, at.block_size)
        step = AlignedStep(view, bounds, budget_beside_others(view, dominant), self.most)
        if not ran_others:
            step.add(step.seatable(prompts_of_others(view, step, dominant)))
            self._ran_others = not step.is_empty
            if self._ran_others:  # or one was seated, and is fetched first
                return step.selection
        step.add_together(first_decodes(view))  # decodes of all chats, if all fit
        step.budget = budget_beside_layers(view, step, dominant)
        ranks = ranks_of(view, step)  # the other requests that have a seat
        for is_rt in (True, False):
            if not is_rt:
                step.budget = self.documents_budget(step)
                # A step with chats' prompts cannot pause: documents sit it out, four steps on end at most.
                if at.layers and step.chunks and num_without < MOST_WITHOUT:
                    self._num_without_documents = num_without + 1
                    break
            urgent, later = line.urgent(at.now, at.times.most_s, is_rt), line.later(at.now, at.times.most_s, is_rt)
            step.add(in_turn(ranks.urgent(is_rt), step.seatable(urgent, not is_rt)))
            step.add(ranks.decodes(is_rt))
            self.add_prompts(step, in_turn(ranks.prompts(is_rt), step.seatable(later, not is_rt)), is_rt)
        step.add(in_turn(ranks.dropped(), step.seatable(line.late(at.now))))  # late chats, where those are dropped

        if step.is_empty:
            step.add_one_alone(ranks, waiting)  # something always runs
        return step.selection

    def goes_on(self, ahead: StepAhead, at: StepContext) -> bool:
        if self._near is not None and self._near.leaves_some_out:
            return False
        return fits_ahead(ahead, at, self.most) and is_in_time(ahead, at)

    def plan_amid(self, view: StepView, most_s: float) -> PlannedStep:
        """Return the prompts of chats that run in a pause of the running step (ConServe, FlowPrefill).

        Only prompts with time for all their tokens run. What exceeds the budget goes on in the next pause, or in the
        next step where the pause is for other callers than the dominant ones. Prompts that the pool has pages of wait
        for the next step. Not weighed alone; all rules of pauses together: p95 of first tokens 0.71 to 0.76 times,
        documents' tokens -0.8 to -0.9 % (two CPUs, simulated)."""
        at = view.at
        view.waiting.refresh(at.now, at.times, at.chunk)
        step = StepBuilder(view, StepBounds(most_s, most_s, most_s), prompt_budget(at), self.most)
        step.prompts_s = min(most_s, at.max_step_for_handoffs_s)  # the margin is in `most_s`
        step.add(chats_amid(view, step))
        return step.selection

    def documents_budget(self, step: StepBuilder) -> int:
        """Return the most prompt tokens of documents: where chats decode, as many as saturate the hardware, or as keep
        the step within three quarters of R.

        More of them gain next to nothing. Gain: first tokens in 71 ms (median) in place of 102, gaps of 118 ms (P99) in
        place of 147; on 17 loads -3.6 to +2.2 points (tight 1+1), -2.1 to +19.1 %.
        """
        bounds_steps = self.policy.chunking is Chunking.SLO
        if not (bounds_steps and any(running.promise.is_rt for running in step.decodes)):
            return step.budget
        left = max(step.at.block_size, step.at.pivot) - step.estimate.chunk_tokens
        if left < step.budget:
            left = max(left, step.fitting(DOCUMENTS_PER_STEP * step.bound_s, 0, step.budget))
        return max(0, min(step.budget, left))

    def add_prompts(self, step: StepBuilder, prompts: Iterable[Ranked], is_rt: bool) -> None:
        """Add prompts that are not urgent."""
        step.add(prompts)

    # --- Who gives way

    def leaving(
        self, prompts: Sequence[WorkerRequest], decodes: Sequence[WorkerRequest], at: StepContext
    ) -> WorkerRequest:
        """Return the document that is last in the order of service, or without documents that chat (BROS §4.2).

        While one batch takes the place of another, a request of the old batch leaves. Gain, eight seeds: where a CPU
        has too little memory for the answers +4.5 (error 1.3, 2xcolocated) and +5.7 points (1.8, 1+1), +1.5 %; chats
        alone at 1.5 times the capacity +0.5 (0.1); on 24 other loads 0."""
        seated = (*prompts, *decodes)
        return last_of_old([seat for seat in seated if not seat.promise.is_rt] or seated, at)


class AlignedStep(StepBuilder):
    """A step in which documents never stand in the way of chats."""

    takes_after_cut = False  # a step that is too long for decodes makes all of them late (BROS §4.2)

    def may_exceed(self, prompt: WorkerRequest) -> bool:
        """Return whether the prompt is a late chat's, and the first of the step. Needed: as long as chats decode, there
        may never be time for such a prompt, which would wait for ever."""
        late = self.policy.late is not Late.DROP_LAST and prompt.promise.is_late(self.at.now)
        return prompt.promise.is_rt and late and not self.chunks

    def blocks_all(self, running: WorkerRequest) -> bool:
        return running.promise.is_rt

    def is_worth_gaps(self, prompt: WorkerRequest, size: int, most: int) -> bool:
        return is_worth_gaps(self, prompt, size, most)


def is_worth_gaps(step: StepBuilder, prompt: WorkerRequest, size: int, most: int) -> bool:
    """Return whether all of a prompt runs now, though this makes decodes late: else the first token would be late.

    The prompt may make a few decodes late, or, where even a block makes decodes late, any number: the prompt at once
    makes each decode late once, a block at a time once for each block. Gain: that of `may_sacrifice_gaps`.
    """
    promise, now = prompt.promise, step.at.now
    if not promise.is_rt or most < prompt.num_ahead or step.decodes_s == inf:
        return False
    if step.policy.late is Late.DROP_LAST and promise.is_late(now):
        return False
    if prompt.request.runs_whole:
        return not step.chunks  # one per step: while chats decode, there may never be time for the whole prompt
    left_s, prefix, remade = promise.due_at(now) - now, prompt.num_held, prompt.num_remade
    if size and size * int(left_s / step.prompts_s) >= prompt.num_ahead:
        return False  # in time a piece at a time
    if step.estimate.with_chunk(most, prefix, remade) > left_s:
        return False
    if step.estimate.with_chunk(min(most, step.at.block_size), prefix, remade) > step.decodes_s:
        return True
    return may_sacrifice_gaps(step.decodes, now)


def may_sacrifice_gaps(decodes: Iterable[WorkerRequest], now: float) -> bool:
    """Return whether delaying this step hurts at most 16 chats in time, at most 2 of them without a late gap yet.

    Gain: where every step takes longer than a gap may, of 60 chats that come one after the other 58 get their token
    beside 12 that are late, in place of 49. Eight seeds: nothing on 22 loads, on a CPU -0.9 and -0.6 points (0.4),
    +1.0 (error 0.4) where long prompts come beside lots of documents."""
    chats = [running.promise for running in decodes if running.promise.is_rt]
    in_time = [promise for promise in chats if not promise.is_late(now)]
    return len(in_time) <= MOST_GAPS and sum(not promise.has_missed for promise in in_time) <= GAPS_FOR_FIRST


def prompt_budget(at: StepContext) -> int:
    """Return the most prompt tokens of a step, however much time there is: four times the tokens that saturate the
    hardware, or with a fixed budget (`schedule.chunking`) all tokens of a step (AccelGen §4.2).

    Gain: of R and this budget together, +19 points against a fixed budget at 24 conversations a second; of the
    factor of four -3.9 to +4.5 points, -21 to +12 %."""
    if at.policy.chunking is not Chunking.SLO:
        return at.room
    return max(at.block_size, int(at.policy.budget_pivots * at.pivot))


def budget_beside_others(view: StepView, dominant: frozenset[str]) -> int:
    """Return the most prompt tokens of a step: as many as saturate the hardware, where one or a few callers dominate
    and chats of others may come.

    Such a chat waits for the end of the running step, or for a pause, and a step that fills R leaves no time for one.
    Gain: with what `dominant_callers` counts, p95 of first tokens beside prompts of 1,500 tokens on a CPU 250 to 24 ms
    (alone 14), for 3 % of the flood's tokens."""
    at, budget = view.at, prompt_budget(view.at)
    if not dominant or len(at.expected_chats) < 2 or at.policy.chunking is not Chunking.SLO:
        return budget
    return min(budget, max(at.block_size, at.pivot))


def budget_beside_layers(view: StepView, step: StepBuilder, dominant: frozenset[str]) -> int:
    """Return the most prompt tokens of a step that pauses for chats of other callers: the dominant callers' as many as
    keep the layers short, and those of the others' prompts on top.

    Gain: p95 of first tokens beside prompts of 1,500 tokens on a CPU 19.5 to 17.0 ms, beside 64 sessions 22.3 to 17.4
    (alone 14), for 16 % and none of the flood's tokens.
    """
    at, callers = view.at, view.waiting.callers
    firsts_s = [first_s for caller, first_s in at.expected_chats if caller not in dominant]
    if not (dominant and firsts_s and at.layers) or len(at.expected_chats) < 2:
        return step.budget
    of_dominant = max(at.block_size, step.fitting(pausing_step_s(min(firsts_s), at), 0, step.budget))
    others = [prompt for prompt in view.prompts if prompt.promise.is_rt and prompt.request.caller not in dominant]
    of_others = sum(prompt.num_ahead for prompt in others)
    of_others += sum(tokens for caller, tokens in callers.items() if caller not in dominant)
    return min(step.budget, of_dominant + of_others)


def pausing_step_s(first_s: float, at: StepContext) -> float:
    """Return the most time of a step that pauses between its layers for a chat whose prompt takes `first_s` alone.

    The chat waits for one layer, at most 0.3 of its own time. For example, with 12 layers and 11 ms a step takes at
    most 40 ms. A third of the tokens that saturate the hardware fit in any case, or steps would do little but begin.
    """
    return max(
        MAX_LAYER_PER_PREFILL * at.layers * first_s,
        estimate_of((), at).with_chunk(max(1, int(LEAST_TOKENS_PER_PIVOT * at.pivot)), 0),
    )


# --- The order


def first_decodes(view: StepView) -> Sequence[WorkerRequest]:
    """Return the decodes that come before all prompts, if they all fit.

    These are the decodes of chats: a decode that is left out would be late more often than a prompt that gets a little
    less. Decodes of documents are added only where no prompt is urgent or a chat's: beside documents a chat's prompt
    would need more steps. Gain of documents among them, eight seeds: P99 of gaps 4 to 6 % less beside conversations and
    beside prompts with 8 answers; on 26 loads -0.05 points (error 0.04) and +0.5 % of the documents' tokens.
    """
    at, decodes, prompts, waiting = view.at, view.decodes, view.prompts, view.waiting
    if at.policy.late is Late.DROP_LAST:
        return [running for running in decodes if running.promise.is_rt and not running.promise.is_late(at.now)]
    has_rt = any(running.promise.is_rt for running in chain(islice(waiting.real_time, 1), prompts))
    if has_rt or _is_any_urgent(view):
        return [running for running in decodes if running.promise.is_rt]
    return decodes


def prompts_of_others(view: StepView, step: StepBuilder, dominant: frozenset[str]) -> Iterator[Ranked]:
    """Return the chats' prompts of other callers that run before all else, where a few callers dominate.

    Such a chat has waited for the end of a step, and would wait for another one with the dominant callers' decodes and
    prompts. So these run by themselves where the other step would take 1.25 times as long, and where all decodes are in
    time one step later. That never happens twice in a row: it would stop the dominant callers' requests. Gain: beside a
    flood of 64 chats on a CPU +8 to +16 points, -0.5 to +0.4 % of the flood's tokens; else 0.
    """
    decodes, prompts, waiting, at = view.decodes, view.prompts, view.waiting, view.at
    if not dominant or waiting.callers.keys() <= dominant:  # as mostly; many prompts of theirs may wait
        return iter(())
    found = [
        each for each in waiting_in_order(view) if each[1].promise.is_rt and each[1].request.caller not in dominant
    ]
    tokens, together = sum(prompt.num_ahead for _, prompt in found), estimate_of(decodes, at)
    # Of dominant callers, nearly all:
    others = sum(prompt.num_ahead for prompt in prompts) + waiting.num_rt_tokens - tokens
    alone_s = estimate_of((), at).with_chunk(tokens, 0)
    is_shorter = together.with_chunk(tokens + min(step.budget, others), 0) >= MAX_STEP_PER_OTHERS_ALONE * alone_s
    return iter(found if is_shorter and alone_s + together.seconds <= step.prompts_s else ())


def chats_amid(view: StepView, step: StepBuilder) -> Iterator[Ranked]:
    """Yield the prompts of chats that a pause has time for. Many may wait, and each event asks: few are looked at, and
    those of callers that do not dominate are looked for among the first that wait."""
    line, now, most_s = view.waiting.line, view.at.now, view.at.times.most_s
    waiting = chain(line.urgent(now, most_s, is_rt=True), line.later(now, most_s, is_rt=True))
    if view.dominant:
        first = islice(view.waiting.real_time, _AMONG)
        waiting = (((Rank.RT,), each) for each in first if each.request.caller not in view.dominant)
    for prompt in chain(view.prompts, (found for _, found in step.seatable(islice(waiting, _AT_A_TIME)))):
        if not prompt.blocks and step.seating.pages.has_to_fetch(prompt):
            continue
        if step.estimate.with_chunk(prompt.num_ahead, prompt.num_held, prompt.num_remade) <= step.prompts_s:
            yield (Rank.RT,), prompt


def _is_any_urgent(view: StepView) -> bool:
    """Return whether a prompt has no more slack than a step may take."""
    at, line = view.at, view.waiting.line
    now, most_s = at.now, at.times.most_s
    return any(next(line.urgent(now, most_s, is_rt), None) for is_rt in (True, False)) or any(
        running.promise.standing(now, running.work(at.chunk), at.times).slack_s <= most_s for running in view.prompts
    )


def waiting_in_order(view: StepView) -> Iterator[Ranked]:
    """Return waiting prompts in order."""
    return view.waiting.in_order(view.at.now, view.at.times.most_s)


def ranks_of(view: StepView, step: StepBuilder) -> RankedRequests:
    """Return the seated requests that are not in the step, ranked by promises."""
    return RankedRequests((*step.others_of(view.decodes), *view.prompts), view.at)


# --- R


def step_bounds(view: StepView, most: int = NO_LIMIT) -> StepBounds:
    """Return R where promises bound steps of at most `most` requests (AccelGen §4.2).

    Nothing is sorted or made here: this runs over all that is on the worker, at every step.

    A prompt that cannot be in time beside the decoding chats does not bind: either the chats or the prompt would be
    late.
    """
    at, decodes, prompts, waiting = view.at, view.decodes, view.prompts, view.waiting
    if at.policy.chunking is not Chunking.SLO:
        return UNBOUNDED
    if at.policy.late is Late.DROP_LAST:  # late requests run last, and take no time of others
        decodes = [running for running in decodes if not running.promise.is_late(at.now)]
    gaps_s = gaps_of_parts_s(view)
    bound, late_s = _decodes_bound_s(decodes, at, gaps_s)
    if len(decodes) > most:  # no step runs more
        decodes = nsmallest(
            most, (each for each in decodes if each.promise.is_rt), key=lambda each: each.promise.next_due_at
        )
    bound = after_slow_step_s(bound, late_s, decodes, at)
    prompts_s = _prompts_bound_s(decodes, prompts, waiting, at) if prompts or waiting else inf
    arrivals_s = max(at.max_step_for_arrivals_s, min(gaps_s.values(), default=0.0))  # of callers with a part
    about_s = min(arrivals_s, unnoticed_s(view), uncrowded_s(view), room_for_pause_s(bound, view))
    return StepBounds(bound, min(bound, prompts_s), about_s, enough_for_prompts_s(view))


def enough_for_prompts_s(view: StepView) -> float:
    """Return the least time of a step for prompts of chats, where no chat that decodes has asked for its gaps.

    Steps that are stopped now and then, as on a shared machine, leave next to nothing of R when the tail of their
    times is taken off. Chats that asked for nothing would then run one after the other. Measured on a machine that was
    stopped for 15 % of the time: of four chats the last had its first token after 9 s, in place of 3 s.
    """
    if not (view.prompts or view.waiting) or any(
        running.promise.is_rt and running.request.slo.is_asked for running in view.decodes
    ):
        return 0.0
    return view.at.enough_s


def after_slow_step_s(bound: float, late_s: float, decodes: Iterable[WorkerRequest], at: StepContext) -> float:
    """Return the bound of the next step after a step that made decodes late: `late_s`, their least tbt, or `bound`.

    A step that takes longer than predicted makes all decodes late at once; their next tokens can be in time again. For
    example, after a slow step all 20 chats are late, and none binds: with a tbt of 50 ms the next step still takes at
    most 50 ms. This is for machines that falter. Gain: tight 1+1 +2.2 points; else none.
    """
    if late_s < bound and estimate_of((decode for decode in decodes if decode.promise.is_rt), at).seconds <= late_s:
        return late_s
    return bound


def gaps_of_parts_s(view: StepView) -> Mapping[str, float]:
    """Return, where several callers have work here, the least gap between tokens that bounds a step for each.

    A caller's promises bind a step for its part of the time. For example, decodes of chats take 4 ms, and two callers
    have work. A stream that asks for a token each 10 ms gets it. For a stream that asks for a token each 5 ms, a step
    may still take 8 ms: half of it is for the other caller's documents. Without this rule one stream could take all of
    a worker.
    """
    by_salt = {running.request.salt: running.request for running in chain(view.decodes, view.prompts)}  # mostly one
    parts = {request.caller: request.weight for request in by_salt.values()}
    parts |= dict.fromkeys({*view.waiting.callers, *view.waiting.documents} - parts.keys(), 1)
    if len(parts) < 2:
        return NO_GAPS
    decodes_s = estimate_of((running for running in view.decodes if running.promise.is_rt), view.at).seconds
    return {caller: decodes_s * sum(parts.values()) / weight for caller, weight in parts.items()}


def _decodes_bound_s(
    decodes: Iterable[WorkerRequest], at: StepContext, gaps_s: Mapping[str, float]
) -> tuple[float, float]:
    """Return the bound of decodes that are in time, and the least promised time between two tokens of the others."""
    bound, late_s, now, mean_s = inf, inf, at.now, at.times.mean_s
    (least_s, prefix_s), remade_s = at.cost.one_decode, at.cost.remade_token_s
    for running in decodes:
        promise = running.promise
        if promise.next_due_at - now < bound:  # mostly one of many: the tokens of a step are due together
            alone_s = least_s + (prefix_s + remade_s if running.kv.form else prefix_s) * running.prefix
            room_s = promise.step_room_s(now, 1, mean_s, alone_s)
            bound = min(bound, room_s + (max(0.0, gaps_s[running.request.caller] - promise.tbt_s) if gaps_s else 0.0))
        if promise.num_missed:
            late_s = min(late_s, max(promise.tbt_s, gaps_s[running.request.caller] if gaps_s else 0.0))
    return bound, late_s


def _prompts_bound_s(
    decodes: Iterable[WorkerRequest], prompts: Iterable[WorkerRequest], waiting: WaitingPrompts, at: StepContext
) -> float:
    """Return the most time that prompts of chats leave for the step."""
    bound, now, most_s = inf, at.now, at.times.most_s
    beside = estimate_of((running for running in decodes if running.promise.is_rt), at)
    for running in prompts:
        if running.promise.is_rt:
            chunks = -(-running.num_ahead // at.chunk)
            with_it_s = beside.with_chunk(min(running.num_ahead, at.chunk), running.prefix, running.num_remade)
            bound = min(bound, running.promise.step_room_s(now, chunks, most_s, with_it_s))
    if waiting:
        bound = min(bound, waiting.bound_s(now, lambda tokens: beside.with_chunk(tokens, 0)))
    return bound


def uncrowded_s(view: StepView) -> float:
    """Return the most time of a step with documents where memory is full and chats hold much of it.

    Documents make steps longer, so chats stay longer, and hold the memory longer that other documents wait for. Shorter
    steps then cost documents next to nothing. Gain: BROS' figure 10a at 10 chats a second 59 -> 53 ms a token for 2 %
    of the documents' tokens, 10d at 15 a second 67 -> 58 ms for 3 %. At 1.5 times, however much memory is free, 48 and
    51 ms; that costs 15 to 43 % of the documents.
    """
    here = [*chain(view.decodes, view.prompts)]
    chats = [running for running in here if running.promise.is_rt]
    most, taken = view.seating.total, view.seating.total - view.seating.blocks.num_free
    if (
        len(chats) == len(here)
        or taken < FULL_MEMORY * most
        or sum(len(chat.blocks) for chat in chats) <= MANY_CHATS * most
    ):
        return inf
    return (
        MAX_STEP_PER_CHATS
        * estimate_of((running for running in view.decodes if running.promise.is_rt), view.at).seconds
    )


def unnoticed_s(view: StepView) -> float:
    """Return the most time of a step with documents, so that a chat of another caller hardly notices the documents.

    A chat waits for the end of the running step, and its first step has documents too. Within one caller's work the
    promise alone counts. For another's chat a step takes at most half the time of the chat's prompt alone. Or, where
    that is more, twice the time of the step's decodes, or of a chunk that saturates the hardware: shorter steps would
    do little but begin. Where steps pause, the chat waits for one layer alone (`pausing_step_s`). Gain: on three CPUs
    the p95 of first tokens falls from 1.6 to 2.9 times that of chats alone to 1.2 to 1.5 times, for 5 to 15 % of the
    documents' tokens; with pauses from 1.33 to 1.2 times.
    """
    documents = [running for running in chain(view.decodes, view.prompts) if not running.promise.is_rt]
    others = {running.request.caller for running in documents} if view.at.expected_chats else ()
    noticed_s = [first_s for caller, first_s in view.at.expected_chats if any(other != caller for other in others)]
    if not noticed_s:
        return inf
    least_s = MAX_STEP_PER_PREFILL * min(noticed_s)
    chunk_s = estimate_of((), view.at).with_chunk(view.at.pivot, 0)
    if view.at.layers:
        least_s, chunk_s = pausing_step_s(min(noticed_s), view.at), 0.0
    return max(least_s, chunk_s, MAX_STEP_PER_DECODES * estimate_of(view.decodes, view.at).seconds)


def room_for_pause_s(bound: float, view: StepView) -> float:
    """Return the most time of a step with documents that leaves room in R, `bound`, for a pause: a chat's prompt alone.

    For example, R = 90 ms is 78 ms with the margin, and the callers' longest prompt takes 20 ms: the step may take 58
    ms. Where the step gets less than a third of R, no room is kept: documents would pay much, and pauses be late.
    Weighed with `plan_amid`.
    """
    at = view.at
    if not (at.layers and at.expected_chats) or bound == inf:
        return inf
    room_s = bound / (1.0 + at.cost.uncertainty[Kind.MIXED].p90) - max(first_s for _, first_s in at.expected_chats)
    return max(room_s, LEAST_STEP_PER_DECODES * estimate_of(view.decodes, at).seconds) if 3 * room_s >= bound else inf


def fits_ahead(ahead: StepAhead, at: StepContext, most: int) -> bool:
    """Return whether a step that goes on with decodes and prompts has places for all, and takes about as long as the
    newest step that was planned with all that is here in view."""
    if ahead.chunks and ahead.predicted_s > MOST_LONGER * ahead.planned_s:
        return False
    return 0 < ahead.num_tokens <= at.room and len(ahead.decodes) + len(ahead.chunks) <= most


def is_in_time(ahead: StepAhead, at: StepContext) -> bool:
    """Return whether no chat's gap exceeds the promise, and a chat that comes waits at most
    `max_step_for_arrivals_s` for both steps.

    Needed: a step that is planned ahead must not break what R keeps."""
    if at.policy.chunking is not Chunking.SLO:
        return True
    together_s = ahead.running_s + ahead.predicted_s
    gaps = [(running, ahead.predicted_s) for running in ahead.decodes] + [(each, together_s) for each in ahead.paused]
    of_rt = [(gap_s, running.promise.tbt_s) for running, gap_s in gaps if running.promise.is_rt]
    kind = Kind.MIXED if ahead.chunks else Kind.DECODE
    if ahead.chunks and any(
        running.promise.is_rt
        and together_s > at.careful_s(running.promise.next_due_at + running.promise.tbt_s - at.now)
        for running in ahead.decodes
    ):
        return False  # the running step took some of the time
    return together_s <= at.max_step_for_arrivals_s and all(
        gap_s <= at.careful_s(tbt_s, kind) for gap_s, tbt_s in of_rt
    )
