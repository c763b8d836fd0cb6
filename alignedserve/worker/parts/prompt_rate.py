"""How long prompts that wait will take: as long as such prompts took lately, while some had to wait.

The cost model says what prompts take alone. Where decodes run beside them, where a step may take no longer than a chat
leaves for it, and where prompts wait for seats, they take many times as long. So the time of a prompt token is what
passed while prompts had to wait, divided by the prompt tokens that were run meanwhile. The step that runs the last of
them had time for more: its tokens count with the time that they take alone. What passed long ago counts less and less,
and while nothing waits the cost model is believed again.

A prompt has to wait where it was here when a step was chosen and the step did not run all of it. Time does not count in
which prompts waited for memory alone: admission predicts that wait, and it says nothing of prompts that have memory.
What the pool has of a prompt is copied and not computed: the time of copies is counted apart, by the cost model. Copies
before a step come on top of what is computed; copies beside steps take only what they take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import exp

from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import Event, StepDone
from alignedserve.protocol.messages import Backlog
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.parts.queue import PromptQueue
from alignedserve.worker.step.running import Running

_MEMORY_S = 4.0  # what passed so long ago counts e times less
_MOST = 20.0  # times what the cost model says: prompts that wait for seats say little of the next ones
_MODEL_S = 0.25  # the cost model counts as much as so many seconds of observation


class _Passed:
    """Time in which prompts had to wait, and the prompt tokens that ran in it."""

    def __init__(self) -> None:
        self._seconds = self._tokens = self._at = 0.0

    def add(self, seconds: float, tokens: int, now: float) -> None:
        left = self._left(now)
        self._seconds, self._tokens, self._at = self._seconds * left + seconds, self._tokens * left + tokens, now

    def token_s(self, model_s: float, now: float) -> float:
        """Return the time of a token: what was seen and what the cost model says, weighed by how long was seen."""
        seconds = self._seconds * self._left(now)
        seen_s = min(self._seconds / max(1.0, self._tokens), _MOST * model_s)
        return max(model_s, (seconds * seen_s + _MODEL_S * model_s) / (seconds + _MODEL_S))

    def _left(self, now: float) -> float:
        return exp(min(0.0, self._at - now) / _MEMORY_S)


class PromptRate(CorePart):
    def __init__(
        self,
        common: Common,
        queue: PromptQueue,
        seated: Callable[[], Iterable[Running]],
        coming: Callable[[], Iterable[Running]] = tuple,
        copies_beside: bool = False,
    ) -> None:
        """`seated` returns the seated prompts that are not through, `coming` those that are to join the queue.

        `copies_beside` says whether copies from the pool go on beside steps."""
        self._steps, self._pace, self._queue = common.steps, common.pace, queue
        self._seated, self._coming, self._copies_beside = seated, coming, copies_beside
        self._waited_from: dict[bool, float | None] = {True: None, False: None}
        self._passed = {True: _Passed(), False: _Passed()}  # of real-time prompts; of all
        self._fetched_s = 0.0  # that copies had taken when the last step ended

    def hear(self, event: Event, now: float) -> list[Command]:
        """Count a step that has ended; this comes before its requests hear of it."""
        if isinstance(event, StepDone) and (plan := self._steps.running) is not None:
            in_step = {chunk.request: len(chunk.tokens) for chunk in plan.chunks}
            copied_s, self._fetched_s = self._pace.fetched_s - self._fetched_s, self._pace.fetched_s
            for only_rt in (True, False):
                self._count(only_rt, in_step, event.seconds, copied_s, now)
        return []

    def _count(self, only_rt: bool, in_step: dict[str, int], seconds: float, copied_s: float, now: float) -> None:
        """Count a step of so many seconds, and the time since the step before but that of copies."""
        seated = [running for running in self._seated() if running.promise.is_rt or not only_rt]
        waiting = self._queue.num_old_rt if only_rt else self._queue.num_old
        is_cut = any(running.num_ahead > in_step.get(running.request.id, 0) for running in seated)
        has_left, since = waiting > 0 or is_cut, self._waited_from[only_rt]
        tokens = sum(in_step.get(running.request.id, 0) for running in seated)
        if is_cut or (waiting > 0 and not self._queue.lacks_memory(only_rt)):
            passed_s = seconds if since is None else max(seconds, now - since - copied_s)
            self._passed[only_rt].add(passed_s, tokens, now)
        elif since is not None and not has_left:  # the step ran all that had waited, and could have run more
            self._passed[only_rt].add(min(seconds, tokens * self._pace.prompt_token_s), tokens, now)
        self._waited_from[only_rt] = now if has_left else None

    def backlog(self, now: float) -> Backlog:
        """Return the work that is left of prompts, and the time of one more token."""
        model_s = self._pace.prompt_token_s
        token_s, rt_token_s = (self._passed[only_rt].token_s(model_s, now) for only_rt in (False, True))
        (tokens, copies_s), (rt_tokens, rt_copies_s) = (self._left(only_rt) for only_rt in (False, True))
        prompts_s = self._with_copies(token_s * tokens, copies_s)
        rt_prompts_s = self._with_copies(rt_token_s * rt_tokens, rt_copies_s)
        return Backlog(prompts_s, model_s, rt_prompts_s, token_s, rt_token_s, self._pace.copying)

    def _with_copies(self, computing_s: float, copies_s: float) -> float:
        return max(computing_s, copies_s) if self._copies_beside else computing_s + copies_s

    def _left(self, only_rt: bool) -> tuple[int, float]:
        """Return how many prompt tokens are to be computed, and how long the rest takes to be copied from the pool."""
        waiting = self._queue.waiting
        prompts = [*self._seated(), *self._coming()]
        tokens = waiting.num_rt_tokens if only_rt else waiting.num_tokens
        tokens += sum([prompt.num_ahead for prompt in prompts if prompt.promise.is_rt or not only_rt])
        fetched = [prompt for prompt in (*prompts, *waiting.fetched) if prompt.promise.is_rt or not only_rt]
        return tokens, sum([prompt.fetch_s for prompt in fetched])
