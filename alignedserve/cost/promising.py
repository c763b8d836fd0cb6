"""What a worker can promise a chat that asks for nothing: the default promise, or the next human numbers.

The yardstick is a prompt of 1,000 tokens beside 7 other chats that decode after prompts as long. Two steps:

    gap           steps beside these decodes need room for prompt tokens: a step that has room for 14 takes nearly as
                  long as one with 100. The gap is the least with which prompts run at 0.85 of their best pace there.
    first token   the step that runs when the prompt comes, and then the prompt's own steps, none longer than the gap

For example, where a step beside 7 decodes takes 0.1 s and 6 ms more for each prompt token, 80 tokens a step are enough:
0.58 s, and 0.75 s if the model is off by as much as it may be. The next human gap is 1 s. A prompt takes 13 such steps:
its first token comes in 10 s. Four simulations of 40 chats of 500 tokens on that machine, 0.2 a second: with a gap of
0.75, 1 and 1.5 s the mean first token came in 14.8, 11.5 and 9.9 s, and the mean gap was 0.37, 0.41 and 0.42 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from alignedserve.core import Slo, WorkerLimits
from alignedserve.cost.model import CostModel, Shape

TTFTS_S = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600)
TBTS_S = (0.1875, 0.25, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 10)
PROMPT, OTHERS = 1000, 7  # tokens of the prompt, and chats that decode meanwhile
SHARE = 0.85  # of the best pace of prompts beside these chats
SETTLED_S = 60.0  # a promise changes once the cost model has said so for this long
_GRAIN = 16  # tokens: chunks of other sizes are not tried
_CARE = 3.0  # times the 90th percentile of the model's error: schedulers leave as much room in a step
_MOST_ERROR = 0.3  # of a step, that is counted: a few steps measured on a busy machine say little of it
_LOOK_S = 5.0  # between two looks at what the cost model says


class MachinePace(NamedTuple):
    promise: Slo
    step_s: float  # that is enough for prompts beside decodes, if steps take as long as predicted


def machine_pace(model: CostModel, limits: WorkerLimits, longest: int) -> MachinePace:
    """Return what this worker can promise, and by which steps; `longest` is the most tokens of a chat."""
    prompt = max(1, min(PROMPT, longest - 1, limits.num_tokens - 1))
    room = limits.num_tokens // (prompt + 1)  # for chats of this length
    others = max(0, min(OTHERS, min(limits.max_batch, limits.max_step_tokens, room) - 1))
    most, beside = min(prompt, limits.max_step_tokens - others), [prompt] * others

    def step_s(tokens: int, cached: int = 0) -> float:
        return model.seconds(Shape.build([(tokens, cached)], beside))

    times = {tokens: step_s(tokens) for tokens in (*range(_GRAIN, most, _GRAIN), most)}
    token_s = min(seconds / tokens for tokens, seconds in times.items())
    error = min(_MOST_ERROR, model.uncertainty[Shape.build([(1, 0)], beside).kind].p90)
    care = 1 + _CARE * error
    enough_s = next(seconds for tokens, seconds in times.items() if SHARE * seconds <= tokens * token_s)
    # Not the rounded gap: a slower machine, with the next gap, would else seem quicker at prompts.
    gap_s = max(TBTS_S[0], care * enough_s)
    tokens = max(tokens for tokens, seconds in times.items() if care * seconds <= gap_s)
    first_s = times[tokens] + sum(step_s(min(tokens, prompt - at), at) for at in range(0, prompt, tokens))
    promise = Slo(_human(TTFTS_S, (1 + error) * first_s), _human(TBTS_S, gap_s), is_asked=False)
    return MachinePace(promise, enough_s)


def machine_promise(model: CostModel, limits: WorkerLimits, longest: int) -> Slo:
    return machine_pace(model, limits, longest).promise


def _human(numbers: Sequence[float], least: float) -> float:
    return float(next((number for number in numbers if number >= least), numbers[-1]))


def slowest(promises: Iterable[Slo]) -> Slo | None:
    """Return what all of these workers can keep; None where there is none."""
    told = list(promises)
    if not told:
        return None
    return Slo(max(slo.ttft_s for slo in told), max(slo.tbt_s for slo in told), is_asked=False)


class LearntPromise:
    """A worker's promise while its cost model learns. Clients see it, so it does not follow each busy second."""

    def __init__(self, limits: WorkerLimits, longest: int) -> None:
        self._limits, self._longest = limits, longest
        self._promise: Slo | None = None
        self._found: MachinePace | None = None  # by the newest look
        self._looked_at = -inf
        self._differs_since = inf  # when the cost model began to say something else

    def told(self, model: CostModel, now: float) -> Slo:
        """Return the promise, changed if the model has said otherwise for a minute."""
        found = self._look(model, now).promise
        self._differs_since = inf if found == self._promise else min(self._differs_since, self._looked_at)
        if self._promise is None or now - self._differs_since >= SETTLED_S:
            self._promise, self._differs_since = found, inf
        return self._promise

    def step_s(self, model: CostModel, now: float) -> float:
        """Return the time of a step that is enough for prompts beside chats that asked for nothing, at present."""
        return self._look(model, now).step_s

    def _look(self, model: CostModel, now: float) -> MachinePace:
        if self._found is None or now - self._looked_at >= _LOOK_S:
            self._looked_at, self._found = now, machine_pace(model, self._limits, self._longest)
        return self._found
