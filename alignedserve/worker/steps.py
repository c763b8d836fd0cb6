"""What steps say of a worker: how long waiting prompts will take, and how fast the machine is, by trials while idle."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from statistics import median

from alignedserve.core import StepPlan
from alignedserve.cost.fit import BUSY
from alignedserve.cost.model import EMPTY
from alignedserve.cost.trials import Bounds, Trial
from alignedserve.protocol.commands import Command, RunStep, SetTimer
from alignedserve.protocol.events import StepDone
from alignedserve.protocol.messages import SEEN_S, Backlog
from alignedserve.worker.part import Worker, WorkerPart
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State

_MOST = 20.0  # times what the cost model says: prompts that wait for seats say little of the next prompts
_MODEL_S = 0.25  # the cost model counts as much as this many seconds of observation


class _Passed:
    """Time in which prompts had to wait, and the prompt tokens that ran in it."""

    def __init__(self) -> None:
        self._seconds = self._tokens = self._at = 0.0

    def add(self, seconds: float, tokens: int, now: float) -> None:
        left = self._left(now)
        self._seconds, self._tokens, self._at = self._seconds * left + seconds, self._tokens * left + tokens, now

    def token_s(self, model_s: float, now: float) -> float:
        """Return the time of a token: the observed time and the cost model's, weighed by the time of observation."""
        seconds = self._seconds * self._left(now)
        seen_s = min(self._seconds / max(1.0, self._tokens), _MOST * model_s)
        return max(model_s, (seconds * seen_s + _MODEL_S * model_s) / (seconds + _MODEL_S))

    def _left(self, now: float) -> float:
        return exp(min(0.0, self._at - now) / SEEN_S)


class PromptRate(WorkerPart):
    """Predicts how long waiting prompts will take: as long as prompts took lately, while some had to wait.

    The cost model says what prompts take alone. Beside decodes, under the bounds of chats, and waiting for seats,
    prompts take many times as long. So the time of a prompt token is the time that passed while prompts had to wait,
    divided by the prompt tokens that ran meanwhile. For example, if 2,000 tokens ran in 4 s while prompts waited, a
    token takes 2 ms. Older observations count less; while nothing waits, the cost model is believed again.

    A prompt had to wait if a step was chosen while the prompt was here, and did not run the whole prompt. Choices that
    get their first tokens with the step do not wait. Time in which prompts waited for memory alone does not count
    either: admission predicts that wait. Copies from the pool are counted
    apart, by the cost model: copies before a step come on top of computing, copies beside steps count only for the time
    beyond computing.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._waited_from: dict[bool, float | None] = {True: None, False: None}
        self._passed = {True: _Passed(), False: _Passed()}  # of real-time prompts; of all
        self._fetched_s = 0.0  # that copies had taken when the last step ended

    def step_done(self, event: StepDone, now: float) -> None:
        """Count a step that has ended, before requests get its tokens."""
        if (plan := self._steps.plan(event.result.number)) is not None:
            in_step = {chunk.request: len(chunk.tokens) for chunk in plan.chunks}
            beside = self._steps.beside(plan.number)
            others = () if beside is None else [chunk.request for chunk in beside.chunks]  # these do not wait either
            prompts = [running for running in self._here.unfinished if running.request.id not in others]
            drawing = {draw.request for run in (plan, beside) if run is not None for draw in run.draws}
            copied_s, self._fetched_s = self._pace.fetched_s - self._fetched_s, self._pace.fetched_s
            for only_rt in (True, False):
                seated = [running for running in prompts if running.promise.is_rt or not only_rt]
                waiting = self._queue.num_old(only_rt, drawing)
                self._count(only_rt, seated, waiting, in_step, event.seconds, copied_s, now)

    def _count(
        self,
        only_rt: bool,
        seated: Sequence[WorkerRequest],
        waiting: int,
        in_step: dict[str, int],
        seconds: float,
        copied_s: float,
        now: float,
    ) -> None:
        """Count a step of `seconds`, and the time since the step before, less the time of copies."""
        is_cut = any(running.num_ahead > in_step.get(running.request.id, 0) for running in seated)
        has_left, since = waiting > 0 or is_cut, self._waited_from[only_rt]
        tokens = sum(in_step.get(running.request.id, 0) for running in seated)
        if is_cut or (waiting > 0 and not self._queue.lacks_memory(only_rt)):
            if since is not None and self._pace.layers:  # a step that has paused began before `since`
                seconds = min(seconds, now - since)
            passed_s = seconds if since is None else max(seconds, now - since - copied_s)
            self._passed[only_rt].add(passed_s, tokens, now)
        elif since is not None and not has_left:  # the step ran all that had waited, and could have run more
            self._passed[only_rt].add(min(seconds, tokens * self._pace.prompt_token_s), tokens, now)
        self._waited_from[only_rt] = now if has_left else None

    def backlog(self, now: float) -> Backlog:
        """Return the work left in prompts, and the time of one more token."""
        model_s = self._pace.prompt_token_s
        token_s, rt_token_s = (self._passed[only_rt].token_s(model_s, now) for only_rt in (False, True))
        (tokens, copies_s), (rt_tokens, rt_copies_s) = (self._left(only_rt) for only_rt in (False, True))
        prompts_s = self._with_copies(token_s * tokens, copies_s)
        rt_prompts_s = self._with_copies(rt_token_s * rt_tokens, rt_copies_s)
        return Backlog(prompts_s, model_s, rt_prompts_s, token_s, rt_token_s, self._pace.copying)

    def _with_copies(self, computing_s: float, copies_s: float) -> float:
        return max(computing_s, copies_s) if self._memory.copies_beside else computing_s + copies_s

    def _left(self, only_rt: bool) -> tuple[int, float]:
        """Return how many prompt tokens are to be computed, and how long the rest takes to be copied from the pool."""
        waiting = self._queue.waiting
        prompts = self._here.of(State.PROMPT, State.FETCHING, State.ASKING)
        tokens = waiting.num_rt_tokens if only_rt else waiting.num_tokens
        tokens += sum([prompt.num_ahead for prompt in prompts if prompt.promise.is_rt or not only_rt])
        fetched = [prompt for prompt in (*prompts, *waiting.fetched) if prompt.promise.is_rt or not only_rt]
        return tokens, sum([prompt.fetch_s for prompt in fetched])


IDLE_S = 2.0
AGAIN_S = 60.0  # after which an idle worker with a slow machine, or a failed trial, measures again
_TIMER = "idle trials"
_LONGEST = 64  # tokens of a request
_TRIALS = (
    *(Trial(((8, 0),)), Trial(prefixes=(16,)), Trial(((8, 0),), (16,))),
    *(Trial(((16, 0),)), Trial(prefixes=(16,) * 2), Trial(((16, 0),), (16,) * 2)),
    *(Trial(((32, 0),)), Trial(prefixes=(16,) * 4), Trial(((32, 0),), (16,) * 4)),
)


class IdleTrials(WorkerPart):
    """Measures again how fast the machine is, while the worker has nothing to do.

    A worker that believes its machine slow, by the profile or by the last steps, may be wrong by now: other work may
    have ended. After some idle seconds the worker runs a few short steps on free blocks, and predicts steps by their
    times. A request that comes meanwhile waits for one such step at most. A worker that `looks_first` does so as soon
    as it starts: its profile is of an earlier start.
    """

    def __init__(self, worker: Worker, has_profile: bool, looks_first: bool = False) -> None:
        super().__init__(worker)
        self._has_looked = not looks_first
        bounds = Bounds(self._limits, _LONGEST)
        # Without a profile nothing is known of a quiet machine.
        self._trials = [trial for trial in _TRIALS if has_profile and bounds.allow(trial)]
        self._starts_at: float | None = None  # the first trial; None while there is work, or nothing to measure
        self._running: StepPlan | None = None
        self._ratios: list[float] = []  # of the trials that have run, measured / predicted

    def step_done(self, event: StepDone, now: float) -> list[Command]:
        """Note what a trial took; this comes before the step's end."""
        trial = self._running
        if trial is None or event.result.number != trial.number:
            return []
        self._running = None
        if event.result.failure is not None or trial.predicted_s <= 0:  # a trial predicted to take no time says nothing
            return self._start_in(AGAIN_S, now)
        self._ratios.append(event.seconds / trial.predicted_s)
        return []

    def measure(self, now: float) -> list[Command]:
        """Run the next trial if the worker is idle and believes its machine slow."""
        if self._steps.running is not None:
            return []
        is_unsure = self._pace.fit.slowdown >= BUSY or not self._has_looked
        if not (self._trials and is_unsure) or self._here.is_retiring or self._here.attempts():
            self._starts_at = None
            return []
        if self._starts_at is None:
            return self._start_in(IDLE_S if self._has_looked else 0.0, now)
        if now < self._starts_at:
            return []
        if len(self._ratios) < len(self._trials):
            return self._run(self._trials[len(self._ratios)])
        self._has_looked = True
        self._pace.fit.rescale(median(self._ratios))
        return self._start_in(AGAIN_S, now)

    def _start_in(self, seconds: float, now: float) -> list[Command]:
        self._ratios.clear()
        self._starts_at = now + seconds
        return [SetTimer(_TIMER, self._starts_at)]

    def _run(self, trial: Trial) -> list[Command]:
        """Begin the step of a trial, on blocks that come free at the end. Nothing else is learnt from a trial."""
        block_size = self._limits.block_size
        counts = trial.num_blocks(block_size)
        blocks = self._memory.take(sum(counts))
        if blocks is None:
            return []
        chunks, decodes = trial.parts(blocks, block_size)
        self._running = self._steps.begin(chunks, decodes, EMPTY, self._pace.cost.seconds(trial.shape))
        self._memory.leave(blocks)
        return [RunStep(self._running)]
