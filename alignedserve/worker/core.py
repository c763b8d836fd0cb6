"""What the cores of both workers have in common: pairs, steps, outputs, and their word to the others.

A step that finds too little memory has changed nothing: smaller ones follow (step_room.py). Where even a single token
finds too little, its request is lost, and its owner starts the next attempt.

A worker is told to run a prompt (Prefill) or to drop a request (Cancel). It keeps what it has emitted
until the owner has it, and whatever frame is lost on the way, it is said again: at the latest REFRESH_S
later, at once where the link's numbers tell (LinkGap) or the other side says so (Missed).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from alignedserve.core import (
    OWNERS,
    Chunk,
    Decode,
    Due,
    FinishReason,
    Request,
    Role,
    StepPlan,
    StepResult,
    WorkerLimits,
    units_for,
)
from alignedserve.cost.fit import OnlineCost
from alignedserve.cost.model import CostModel, Shape
from alignedserve.protocol.commands import Command, End, RunStep, Send, SetTimer
from alignedserve.protocol.events import (
    Event,
    LinkGap,
    MemberJoined,
    MemberLost,
    PageCompressed,
    Received,
    StepDone,
    TimerFired,
)
from alignedserve.protocol.messages import (
    ROUTER,
    Acknowledge,
    Attempt,
    Backlog,
    Cancel,
    Compress,
    Compressed,
    Expect,
    Figures,
    Holding,
    Inquire,
    Member,
    Missed,
    Prefill,
    Resend,
    Retire,
)
from alignedserve.scheduling.policy import Room
from alignedserve.scheduling.promise import promise
from alignedserve.scheduling.slo import RecentSteps, StepTimes
from alignedserve.worker.compressing import Compressing
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.notes import Notes
from alignedserve.worker.outputs import Outputs
from alignedserve.worker.setup import WorkerSetup as WorkerSetup
from alignedserve.worker.step.coming import Coming
from alignedserve.worker.step.limits import Moment, Selection
from alignedserve.worker.step.ranks import last
from alignedserve.worker.step.running import Blocks, Running
from alignedserve.worker.step.seating import Seating
from alignedserve.worker.step.selection import select
from alignedserve.worker.step.waiting import Waiting
from alignedserve.worker.step_room import StepRoom

REFRESH_S = 5.0
_REFRESH = "refresh"  # timer
_CHUNK_WEIGHT = 0.1  # of the newest chunk in the mean


# Requests that a step has brought a token or their end, and why they ended, if they did.
Emitted: TypeAlias = Iterator[tuple[Running, FinishReason | None]]


class WorkerCore(ABC):
    def __init__(self, setup: WorkerSetup) -> None:
        self._limits, self._policy, self._copy_token_s = setup.limits, setup.policy, setup.copy_token_s
        self._cost = OnlineCost(()) if setup.cost is None else setup.cost
        self._recent = RecentSteps(_first_times(self._cost.model, self._limits))
        self._mean_chunk = float(self._limits.max_step_tokens)
        self._room = StepRoom(self._limits.max_step_tokens)
        self._now = 0.0
        self._blocks = Blocks(self._limits.num_pairs)
        self._outputs = Outputs()
        self._waiting = Waiting(setup.policy)  # prompts without room
        self._coming = Coming()
        self._came_in_step: list[Running] = []  # real-time prompts, since the step in flight began
        self._is_stuck = False  # the first of them could not be seated, and nothing has changed since
        self._is_crowded = False  # a prompt had to leave for others: nobody is seated before memory has come free
        self._pivot = self._cost.model.pivot(self._limits.max_step_tokens)
        self._pool: Member | None = None
        self._compressing = Compressing()
        self._steps, self._notes = StepsInFlight(), Notes()
        self._refreshing = False  # whether the timer is set
        self._is_retiring = False  # it takes nothing new
        self.num_refused = 0
        self.num_failed_transfers = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        self._now = now
        happened = [*self._happened(event), *self._go_on(), *self._compress()]
        return [*happened, *self._refresh_later(now), *self._told(), *self._end()]

    def _end(self) -> list[Command]:
        """Where it retires, and all that was here has gone on or is with its owners."""
        is_idle = self._is_retiring and self._steps.running is None and not self._outputs.num_kept
        return [End()] if is_idle and not self._held_attempts() else []

    @abstractmethod
    def _go_on(self) -> list[Command]:
        """What there is to do now, whatever has happened."""

    @abstractmethod
    def _drop(self, request: str, attempt: int) -> list[Command]:
        """Forget the request up to this attempt, wherever it is."""

    @abstractmethod
    def _stepped(self, plan: StepPlan, result: StepResult) -> list[Command]:
        """A step has ended."""

    @abstractmethod
    def _lose(self, ran: Chunk | Decode) -> list[Command]:
        """Give up the attempt that this was to run a part of, if it is still here."""

    @abstractmethod
    def _held_attempts(self) -> list[Attempt]:
        """All that is here."""

    @abstractmethod
    def _seated(self, request: str) -> Running | None:
        """The one of this name that may be in a step."""

    @abstractmethod
    def _seats(self) -> list[Running]:
        """All that have pairs."""

    @property
    def pool(self) -> Member | None:
        """The one whose pages are copied from and to."""
        return self._pool

    @property
    def pairs(self) -> list[int]:
        """Free, taken, or left to the step in flight: each pair of the device once, as long as all is well."""
        taken = [*self._steps.left, *(running.pairs for running in self._seats())]
        return [*self._blocks.free, *(pair for pairs in taken for pair in pairs)]

    @property
    def free_share(self) -> float:
        """Of the device's pairs."""
        return self._blocks.num_free / self._limits.num_pairs

    @abstractmethod
    def _prompts_ahead(self) -> Iterable[Running]:
        """Prompts that are seated and not through."""

    @abstractmethod
    def _pool_lost(self) -> None:
        """All that the pool had is gone."""

    @property
    @abstractmethod
    def _awaits_the_pool(self) -> bool:
        """Whether there is an ask that it has not answered."""

    @abstractmethod
    def _ask_again(self) -> None:
        """The next `_go_on` repeats what was asked of the pool: the ask or its answer may have been lost."""

    def _happened(self, event: Event) -> list[Command]:
        match event:
            case Received(message=Prefill(request, decode)):
                dropped = self._drop(request.id, request.attempt - 1)
                running = self._running_of(request, request.emitted)
                running.decode = decode
                return [*dropped, *self._prefill(running)]
            case Received(message=Expect() as told):
                return self._expect(told)
            case Received(message=Cancel(request=request, attempt=attempt)):
                return self._drop(request, attempt)
            case Received(message=Retire()):
                self._is_retiring = True
            case Received(message=Resend() as asked):
                return [*self._outputs.resend(asked)]
            case Received(message=Acknowledge(requests)):
                self._outputs.forget(requests)
            case Received(sender, Inquire(attempts)):
                held = set(self._held_attempts())
                return self._unknown(sender, [attempt for attempt in attempts if attempt not in held])
            case Received(sender, Missed()):
                return self._say_again(sender)
            case LinkGap(sender):
                return [Send(sender, Missed()), *self._say_again(sender)]
            case Received(message=Compress() as order):
                return self._answers(self._compressing.ordered(order))
            case PageCompressed() as one:
                return self._answers(self._compressing.page_done(one))
            case StepDone(result, seconds):
                return self._step_ended(result, seconds)
            case MemberJoined(member) if member.role is Role.POOL:
                self._pool = member
                self._compressing.met(member.holder)
            case MemberJoined(member) if member.role is Role.ROUTER:
                return [self._holding()]
            case MemberLost(member) if member == self._pool:
                self._pool = None
                self._pool_lost()
            case MemberLost(member) if member.role in OWNERS:
                self._outputs.owner_lost(member.name)
            case TimerFired(name) if name == _REFRESH:
                self._refreshing = False
                self._ask_again()
                return [*self._outputs.remind()]
        return []

    # --- For the pool, beside the steps

    def _compress(self) -> list[Command]:
        """A page, where no step is due: none runs, or all that are late by then can wait for it."""
        if self._pool is None or not self._compressing.has_work or not self._can_wait(self._compressing.page_s):
            return []
        return [self._compressing.next_page()]

    def _can_wait(self, seconds: float) -> bool:
        """Whether the step after the one in flight may begin so much later: nobody's next token is late for it."""
        if self._steps.running is None:
            return True
        bound = self._now + 2 * self._recent.now.most_s + seconds
        return all(one.promise.due_at(self._now) > bound for one in self._seats() if one.promise.is_rt)

    def _answers(self, answer: Compressed | None) -> list[Command]:
        return [] if answer is None or self._pool is None else [Send(self._pool.name, answer)]

    def _refused(self) -> Command:
        """A copy from the pool was not intact."""
        self.num_refused += 1
        return self._figures

    @property
    def _figures(self) -> Command:
        """All of them, each time: what is told last is what counts."""
        return Send(ROUTER, Figures(num_refused=self.num_refused, num_failed_transfers=self.num_failed_transfers))

    def _prefill(self, running: Running) -> list[Command]:
        """A prompt to run."""
        self._waiting.add(running)
        self._coming.came(running, self._cost.model.seconds(Shape.of([(running.num_ahead, 0)])), self._now)
        if running.promise.is_rt and self._steps.running is not None:
            self._came_in_step.append(running)
        self._is_stuck = False
        return []

    def _expect(self, told: Expect) -> list[Command]:
        here = [one for one in self._named(told.request) if one.key == (told.request, told.attempt)]
        for running in here:
            running.expect(told.estimate, self._policy, self._now)
            self._waiting.moved(running)
        return [] if here else self._expect_elsewhere(told)

    def _named(self, request: str) -> Iterable[Running]:
        """Of this request, or perhaps of it."""
        return (*self._waiting.named(request), *self._seats())

    @abstractmethod
    def _expect_elsewhere(self, told: Expect) -> list[Command]:
        """Of a request that has gone on, or has no memory yet."""

    def _say_again(self, to: str) -> list[Command]:
        if to == ROUTER:
            return [self._holding()]
        if self._pool is not None and to == self._pool.name:
            self._ask_again()
            return []
        return [*self._outputs.remind(to)]

    def _holding(self) -> Command:
        return Send(ROUTER, Holding(tuple(self._held_attempts()), self._blocks.num_free, self._is_retiring))

    def _unknown(self, _asker: str, attempts: Sequence[Attempt]) -> list[Command]:
        for attempt in attempts:
            self._notes.moved("unknown", attempt)
        return []

    def _refresh_later(self, now: float) -> list[Command]:
        if self._refreshing or not (self._awaits_the_pool or self._outputs.num_kept):
            return []
        self._refreshing = True
        return [SetTimer(_REFRESH, now + REFRESH_S)]

    # --- Steps

    def _running_of(self, request: Request, output: Sequence[int], due: Due | None = None) -> Running:
        return Running(request, promise(request, self._policy, len(output), due), list(output))

    @property
    def _tokens_in_pair(self) -> int:
        return self._limits.block_size

    def _seat(self, waiting: Running, tokens: int) -> bool:
        """Pairs for so many tokens, if there are as many."""
        pairs = self._blocks.take(units_for(tokens, self._tokens_in_pair))
        if pairs is None:
            self._is_stuck = True
            return False
        waiting.pairs = pairs
        return True

    def _first_come(self) -> Iterator[Running]:
        """Those that are seated as soon as there is room, where who comes first is served first.

        Nobody overtakes the first, else the large would wait for ever. Nobody, while nothing has changed.
        """
        while self._waiting and not self._is_stuck and self._policy.is_plain:
            yield self._first_waiting()

    def _first_waiting(self) -> Running:
        return next(iter(self._waiting))

    @property
    def _moment(self) -> Moment:
        limits, chunk = self._limits, max(1, round(self._mean_chunk))
        times, room = self._recent.now, self._room.tokens
        if self._policy.as_in_paper:
            times = StepTimes(times.most_s, times.most_s)  # T_max throughout
        at = Moment(self._now, self._cost.model, times, room, limits.block_size, chunk, self._policy, self._pivot)
        at.calm_s = self._coming.bound_s(self._now)
        return at

    def _add_waiting(self, some: Iterable[Running]) -> None:
        for running in some:
            self._waiting.add(running)
        self._is_stuck = False

    def _put_back(self, running: Running) -> None:
        """It gives up what pairs it has, waits before all others, and runs anew."""
        self._vacate(running)
        running.pairs, running.blocks, running.prefix = (), (), 0
        self._waiting.add_first(running)

    def _uncrowd(self, seats: dict[str, Running], prompts: Iterable[Running]) -> None:
        """Prompts that get their pairs chunk by chunk may all have some, and none enough: the last of these leaves.

        Nobody is seated before one of the others is through, else two could take turns for ever.
        """
        self._put_back(seats.pop(last(prompts, self._moment).request.id))
        self._is_crowded = True

    def _select(self, decodes: Sequence[Running], prompts: Sequence[Running], seats: int) -> Selection:
        """`seats`: how many requests more may have room."""
        seating = self._seating(0 if self._is_crowded else seats)
        return select(decodes, prompts, self._waiting, self._moment, seating)

    def _seating(self, seats: int) -> Seating:
        by_chunk, pairs = self._policy.room is Room.CHUNKS, self._limits.num_pairs
        return Seating(self._blocks, pairs, self._tokens_in_pair, seats, by_chunk, self._room_for, self._has_long)

    @abstractmethod
    def _room_for(self, running: Running) -> int:
        """Tokens that a prompt gets pairs for when it is seated."""

    def _has_long(self) -> bool:
        """Whether a long prompt is unfinished here."""
        return any(running.num_tokens >= self._policy.long_prompt for running in self._unfinished())

    @abstractmethod
    def _unfinished(self) -> Iterable[Running]:
        """Those that have room, and hold up long prompts as long as they have."""

    def _begin_step(self, selection: Selection, decodes: tuple[Decode, ...] = ()) -> list[Command]:
        if not selection.chunks and not decodes:
            return []
        return [RunStep(self._steps.begin(selection.chunks, decodes, selection.shape, selection.predicted_s))]

    def _step_ended(self, result: StepResult, seconds: float) -> list[Command]:
        self._is_stuck = False  # time has passed, so another may be the first
        ended = self._steps.ended()
        plan = ended.plan
        if self._came_in_step:
            self._hold_up(plan, seconds)
        for pairs in ended.free:
            self._give(pairs)
        if not ended.counts:
            return []
        if result.failure is not None:
            return self._step_failed(plan)
        self._learn(plan, ended.shape, seconds)
        self._room.succeeded()
        return self._stepped(plan, result)

    def _hold_up(self, plan: StepPlan, seconds: float) -> None:
        """Those that came in the middle of this step."""
        parts = (self._seated(part.request) for part in plan.parts)
        if any(one is not None and not one.promise.is_rt for one in parts):
            for running in self._came_in_step:
                running.held_up_s = min(seconds, self._now - running.request.arrival_at)
        self._came_in_step.clear()

    def _step_failed(self, plan: StepPlan) -> list[Command]:
        self._steps.failed()
        if self._room.failed(plan.num_tokens):
            return []
        return [command for ran in plan.parts for command in self._lose(ran)]

    def _emitted(self, parts: Iterable[Chunk | Decode], result: StepResult) -> Emitted:
        """What the parts of a step brought to requests that are here still.

        Of a request that has left nothing is kept; its next attempt, which has other pairs, may be here by now.
        """
        tokens, unsampled = dict(result.tokens), set(result.unsampled)
        logprobs, scores = dict(result.logprobs), dict(result.prompt_logprobs)
        seated, now, emit = self._seated, self._now, self._outputs.emit
        for part in parts:  # one for each token
            request = part.request
            running = seated(request)
            if running is None or not running.is_at(part):
                continue
            if isinstance(part, Decode):
                running.prefix += 1
            else:
                running.chunk_ran(part, scores.get(request, ()))
                running.promise.served(now)
            token, finish = tokens.get(request), None
            if token is not None:
                if running.promise.is_rt and not running.output:
                    self._coming.began(running, now)
                finish = running.emit(token, now, logprobs.get(request) if logprobs else None)
            elif request in unsampled:
                finish = FinishReason.ERROR
            else:
                continue
            emit(running, finish)
            yield running, finish

    def _learn(self, plan: StepPlan, shape: Shape, seconds: float) -> None:
        if seconds > 0:
            self._recent.add(seconds)
            self._cost.learn(shape, seconds)
        for chunk in plan.chunks:
            if chunk.sampling is None and self._says_what_fits(chunk, plan):
                self._mean_chunk += _CHUNK_WEIGHT * (len(chunk.tokens) - self._mean_chunk)

    def _says_what_fits(self, chunk: Chunk, plan: StepPlan) -> bool:
        """Of a chunk that was cut: what is whole says nothing of it. Nor does what real-time requests leave for a
        best-effort prompt: by a few tokens at a time their own prompts would seem to take for ever."""
        running = self._seated(chunk.request)
        return running is None or running.promise.is_rt or not any(one.promise.is_rt for one in self._ran(plan))

    def _ran(self, plan: StepPlan) -> Iterator[Running]:
        """Those of its requests that are here still."""
        for part in plan.parts:
            running = self._seated(part.request)
            if running is not None:
                yield running

    def _vacate(self, running: Running) -> None:
        """It gives up its pairs."""
        self._give(running.pairs)

    def _give(self, pairs: tuple[int, ...]) -> None:
        self._blocks.give(pairs)
        self._is_stuck = self._is_crowded = False

    def _is_in_step(self, running: Running) -> bool:
        """In the one in flight."""
        parts = () if self._steps.running is None else self._steps.running.parts
        return any(part.request == running.request.id and running.is_at(part) for part in parts)

    def _vacate_after_step(self, running: Running) -> None:
        """The steps in flight may still write there."""
        self._free(running.pairs)

    def _free(self, pairs: tuple[int, ...]) -> None:
        if not self._steps.leave(pairs):
            self._give(pairs)

    # --- For the router

    def _told(self) -> list[Command]:
        progress = self._notes.told(self._backlog, self._blocks.num_free)
        return [] if progress is None else [Send(ROUTER, progress)]

    def _backlog(self) -> Backlog:
        # Real-time prompts get more of a step than documents: what those are cut to says little of how long they take.
        token_s = self._cost.model.whole_request(max(self._pivot, round(self._mean_chunk))).prompt_token_s
        ahead = [(one.promise.is_rt, one.num_ahead) for one in self._prompts_ahead()]
        tokens = self._waiting.num_tokens + sum(tokens for _, tokens in ahead)
        rt_tokens = self._waiting.num_rt_tokens + sum(tokens for is_rt, tokens in ahead if is_rt)
        return Backlog(token_s * tokens, token_s, token_s * rt_tokens)


def key(request: Request) -> Attempt:
    return request.id, request.attempt


def _first_times(model: CostModel, limits: WorkerLimits) -> StepTimes:
    """Until there are steps: a step of half as many decodes as there may be, and the longest prompt step."""
    size = max(1, limits.max_batch // 2)
    decodes = Shape.of(prefixes=[limits.max_step_tokens] * size)
    return StepTimes(model.seconds(decodes), model.seconds(Shape.of([(limits.max_step_tokens, 0)])))
