"""The speed of a worker, by its own measure: the time of steps, the size of chunks, the tokens that a step may have,
and the chats to come (ArrivalForecast).

A step that finds too little memory has changed nothing: smaller steps follow (StepRoom). A step that would wait for
masks of grammars has fewer of their requests (MaskTurns).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf

from alignedserve.core import Chunk, Slo, StepPlan, StepResult, WorkerLimits
from alignedserve.cost.fit import OnlineCost
from alignedserve.cost.model import CostModel, Shape
from alignedserve.scheduling.slo import RecentSteps, StepTimes
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.step.context import StepContext
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import shape_of

COUNTED = 20
LONGEST_S, SHORTEST_S = 60.0, 10.0  # without a prompt, before none is expected: prompts may come in bursts
JOINED_S = 1.0  # after a chat that was handed on, within which more may come
SHARE = 0.25  # of the time that a chat has to spare
JOINS = 0.65  # of the time between two tokens: the rest is for copies, and for the next step


class ArrivalForecast:
    """Chats that are still to come: a step that has just begun must not make their first tokens late.

    While no chat is here nothing bounds a step, and documents would fill the step up to the budget; a chat that arrives
    meanwhile waits for the step's end. So a step with documents takes at most a quarter of the least spare time of the
    last 20 chats: a chat's ttft less the time of its prompt alone. For example, a chat with a ttft of 1 s and a prompt
    of 0.2 s has 0.8 s to spare: steps take at most 0.2 s.

    Only the last 20 chats count, so that a kind of chat that no longer comes binds no step. Where none came for ten
    times the usual interval (10 s at least, 60 s at most), none is expected until the next one. Gain on 17 loads:
    -2.9 to +4.9 points, most on a CPU with first tokens promised in 0.3 s where a chat comes in 2 s, and -0.7 to +2.2 %
    of the tokens of documents.

    A chat is not to notice documents of other callers: `expected_chats` says how long a caller's prompts take alone,
    and the scheduler keeps steps with documents of others to a part of that time.

    Chats that a prefill worker hands on count too: this worker hears of such a chat at the end of a step, and the next
    token is due soon. Gain on 17 loads: long prompts beside lots of documents as 1+1 +3.0 points and +2.8 %, beside a
    few -0.7 and -2.6 %, else within 1.5 points and 1.2 %.
    """

    def __init__(self, slo_scale: float = 1.0) -> None:
        self._slo_scale = slo_scale
        self._last: deque[tuple[float, float]] = deque(maxlen=COUNTED)  # when, seconds to spare
        self._bound_s = self._until = inf
        self._joined: deque[tuple[float, float]] = deque(maxlen=COUNTED)  # when, time between two tokens
        self._firsts: dict[str, tuple[float, float]] = {}  # by caller: the time of a prompt, until when more may come

    def count(self, prompt: WorkerRequest, prompt_s: float, now: float) -> None:
        """Count a prompt that takes `prompt_s` by itself. A prompt that is late even alone does not bind steps."""
        spare_s = self._slo_scale * prompt.request.slo.ttft_s - prompt_s
        if not prompt.promise.is_rt or spare_s <= 0:
            return
        caller = prompt.request.caller
        mean_s, _ = self._firsts.pop(caller, (prompt_s, now))
        self._firsts[caller] = mean_s + (prompt_s - mean_s) / COUNTED, now + LONGEST_S  # the last to expire
        while self._firsts[eldest := next(iter(self._firsts))][1] <= now:
            del self._firsts[eldest]
        if now >= self._until:
            self._last.clear()
        self._last.append((now, spare_s))
        wait_s = LONGEST_S
        if len(self._last) == COUNTED:
            wait_s = min(LONGEST_S, max(SHORTEST_S, (now - self._last[0][0]) * 10 / (COUNTED - 1)))
        self._until = now + wait_s
        self._bound_s = SHARE * min(spare_s for _, spare_s in self._last)

    def expected_chats(self, now: float) -> list[tuple[str, float]]:
        """Return the callers whose chats may come, with the mean time of the caller's prompts alone."""
        return [(caller, mean_s) for caller, (mean_s, until) in self._firsts.items() if now < until]

    def joined(self, tbt_s: float, now: float) -> None:
        """Count a real-time request that was handed on to this worker."""
        self._joined.append((now, self._slo_scale * tbt_s))

    def max_step_for_handoffs_s(self, now: float) -> float:
        """Return the most time that a step with prompts may take, for the requests that are handed on meanwhile."""
        if not self._joined or now > self._joined[-1][0] + JOINED_S:
            return inf
        return JOINS * min(tbt_s for _, tbt_s in self._joined)

    def bound_s(self, now: float) -> float:
        """Return the most time that a step may take."""
        return self._bound_s if self.are_expected(now) else inf

    def are_expected(self, now: float) -> bool:
        """Return whether more chats may come soon."""
        return now < self._until


_PATIENCE = 16  # steps that go well before a larger step is tried


class StepRoom:
    """Limits the tokens of a step: fewer after a step that found too little memory, then more again, step by step."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.tokens = most
        self._went_well = 0

    def shrink(self, tokens: int) -> bool:
        """Shrink after a step of `tokens` found too little memory; return whether a smaller step can be tried."""
        self._went_well = 0
        self.tokens = max(1, min(self.tokens, tokens) // 2)
        return tokens > 1

    def grow(self) -> None:
        """Count a step that went well; grow after enough such steps."""
        if self.tokens == self._most:
            return
        self._went_well += 1
        if self._went_well == _PATIENCE:
            self.tokens, self._went_well = min(self._most, 2 * self.tokens), 0


FREE_S = 0.002  # of masks, in any step
UNKNOWN_S = 0.001  # of a mask of a request that has had none yet
WAITS = 0.25  # times as long as steps run without, they may have waited for masks


class MaskTurns:
    """Requests whose grammars are slow take turns, so that no step waits long for their masks.

    While a step computes, a thread finds which tokens may come next, for most grammars in microseconds. `(a{300}){300}`
    takes 25 ms for each token: with eight such requests a step of 2 ms took 0.2 s. So a step has as many of them as fit
    into its time, or FREE_S; the others sit it out. A mask that is longer than that runs where steps have waited for a
    fifth of the time lately at most (WAITS), or where nothing else is here. For example, steps of 2 ms run for 92 ms
    after one that waited 23 ms for a mask. Callers take turns by what their masks took.
    """

    def __init__(self) -> None:
        self._takes: dict[str, float] = {}  # what the newest mask of a request took; 0 where that is little
        self._used: dict[str, float] = {}  # by caller: what masks took together
        self._free_s = FREE_S  # of masks, in the newest step
        self._late_s, self._at = 0.0, 0.0  # for which steps have waited and others are not made up for, as of when

    def within(
        self, decodes: Sequence[WorkerRequest], are_prompts: bool, fit: OnlineCost, now: float
    ) -> Sequence[WorkerRequest]:
        """Return the decodes for which the next step has time. `are_prompts` says whether prompts may run in it.

        Masks are measured in time of a processor, so the step's time is that of a quiet machine."""
        masked = [running for running in decodes if running.history is not None and running.request.sampling.syntax]
        if not masked:
            return decodes
        least = min(self._used.values(), default=0.0)
        self._used = {of: self._used.get(of, least) for of in {running.request.caller for running in masked}}
        self._takes = {it.request.id: it_s for it in masked if (it_s := self._takes.get(it.request.id)) is not None}
        self._free_s = max(FREE_S, fit.model.seconds(shape_of((), decodes)) / max(1.0, fit.slowdown))
        is_late = self._left_s(now) > 0 and (are_prompts or len(masked) < len(decodes))
        total_s, out = 0.0, set[WorkerRequest]()
        for running in sorted(masked, key=lambda it: (self._used[it.request.caller], it.last_token_at)):
            known_s = self._takes.get(running.request.id)
            takes_s = UNKNOWN_S if known_s is None else known_s
            fits = total_s + takes_s <= self._free_s and not (is_late and known_s is None)
            if takes_s and not fits and (total_s or is_late):
                out.add(running)
            else:
                total_s += takes_s
                self._used[running.request.caller] += takes_s
        return [running for running in decodes if running not in out] if out else decodes

    def ended(self, plan: StepPlan, result: StepResult, now: float) -> bool:
        """Note what the masks of a step took, and return whether the step waited for them."""
        took = dict(result.masks)
        for decode in plan.decodes:
            if decode.history is not None and decode.sampling.syntax:
                self._takes[decode.request] = took.get(decode.request, 0.0)
        if not took:
            return False
        waited_s = max(0.0, sum(took.values()) - self._free_s)
        self._late_s, self._at = self._left_s(now) + waited_s, now
        return waited_s > 0

    def _left_s(self, now: float) -> float:
        return max(0.0, self._late_s - WAITS * (now - self._at))


_CHUNK_WEIGHT = 0.1  # of the newest chunk in the mean


class Pace:
    def __init__(self, setup: WorkerSetup) -> None:
        self.policy, self.copying, self.limits, self.layers = setup.policy, setup.copying, setup.limits, setup.layers
        self.fit = OnlineCost(()) if setup.cost is None else setup.cost  # what the worker has learnt of steps
        self._promise = setup.promise
        self._recent = RecentSteps(_first_times(self.fit.model, setup.limits))
        self._mean_chunk = float(setup.limits.max_step_tokens)
        self.pivot = self.fit.model.pivot(setup.limits.max_step_tokens)
        self.room = StepRoom(setup.limits.max_step_tokens)
        self.masks = MaskTurns()
        self.coming = ArrivalForecast(self.policy.slo_scale)
        self.fetched_s = 0.0  # that copies from the pool have taken before steps, as predicted

    def make_no_pauses(self) -> None:
        """Let all steps run from the first layer to the last."""
        self.layers = 0

    @property
    def cost(self) -> CostModel:
        """Return what steps are expected to take now."""
        return self.fit.model

    def promise(self, now: float) -> Slo | None:
        """Return what this worker can promise chats that ask for nothing; None if it does not know."""
        return None if self._promise is None else self._promise.told(self.fit.model, now)

    @property
    def times(self) -> StepTimes:
        """Return the mean and the longest time of recent steps."""
        return self._recent.now

    def context(self, now: float) -> StepContext:
        """Return what the plan of a step depends on beside the requests."""
        times, chunk = self.policy.ordering.times_of(self._recent.now), max(1, round(self._mean_chunk))
        room, block_size = self.room.tokens, self.limits.block_size
        at = StepContext(now, self.fit.model, times, room, block_size, chunk, self.policy, self.pivot)
        at.max_step_for_arrivals_s, at.max_step_for_handoffs_s = (
            self.coming.bound_s(now),
            self.coming.max_step_for_handoffs_s(now),
        )
        at.expected_chats, at.layers = self.coming.expected_chats(now), self.layers
        at.enough_s = 0.0 if self._promise is None else self._promise.step_s(self.fit.model, now)
        return at

    def prompt_came(self, prompt: WorkerRequest, now: float) -> None:
        """Count a new prompt for the forecast of the next prompts."""
        size = prompt.num_ahead
        alone_s = prompt.fetch_s + self.fit.model.seconds(Shape.build([(size, prompt.num_tokens - size)]))
        self.coming.count(prompt, alone_s, now)

    @property
    def prompt_token_s(self) -> float:
        """Return the seconds that a prompt token takes in chunks of the present size.

        Real-time prompts get more of a step than documents: the chunks that documents are cut to say little of how
        long real-time prompts take.
        """
        return self.fit.model.prompt_token_s(max(self.pivot, round(self._mean_chunk)))

    @property
    def copy_token_s(self) -> float:
        """Return the seconds until the KV of a token of the pool is on the device, in a long copy."""
        return self.copying.token_s

    def fetch_s(self, prompt: WorkerRequest, end: int, copied: int) -> float | None:
        """Return the time of a copy of `copied` tokens, after which a prompt has KV up to `end`; None where computing
        these tokens takes less.

        Computing costs what the prompt adds to a step that is full already, since several prompts may come. As long
        as the cost model knows no times, copies are taken to be quicker.
        """
        computing_s = self.fit.model.computing_s(prompt.prefix, end, prompt.num_tokens, self.pivot)
        seconds = self.copying.seconds(copied)
        return None if 0 < computing_s < seconds else seconds

    def learn(self, plan: StepPlan, shape: Shape, seconds: float, find: Callable[[str], WorkerRequest | None]) -> None:
        """Learn from a step that went well. `find` returns the running request of a name."""
        if not shape.tokens:  # a trial
            return
        self.room.grow()
        if seconds > 0:
            self._recent.add(seconds)
            self.fit.learn(shape, seconds)
        for chunk in plan.chunks:
            if not chunk.is_last and _says_what_fits(chunk, plan, find):
                self._mean_chunk += _CHUNK_WEIGHT * (len(chunk.tokens) - self._mean_chunk)


def _says_what_fits(chunk: Chunk, plan: StepPlan, find: Callable[[str], WorkerRequest | None]) -> bool:
    """Return whether a chunk that was cut says how large chunks are.

    A document's chunk beside chats does not: chats may leave a few tokens for each, and prompts of chats, which get
    more, would seem to take for ever.
    """
    running = find(chunk.request)
    if running is None or running.promise.is_rt:
        return True
    beside = (find(part.request) for part in plan.parts)
    return not any(other is not None and other.promise.is_rt for other in beside)


def _first_times(model: CostModel, limits: WorkerLimits) -> StepTimes:
    """Return the times assumed before steps have run: of half a batch of decodes, and of the longest prompt step."""
    decodes = Shape.build(prefixes=[limits.max_step_tokens] * max(1, limits.max_batch // 2))
    return StepTimes(model.seconds(decodes), model.seconds(Shape.build([(limits.max_step_tokens, 0)])))
