"""Predict whether decode workers have memory for the answers of all chats to the end, with a new chat among them.

All decodes of a worker grow by a token in each step, so what a chat will hold until its end is known. For example, 21
translations with prompts of 1,067 tokens have 450 of about 1,600 tokens of output each. The chats hold 32,000 tokens
now, and will want 55,000 before the first chat ends. A device of 42,000 tokens has room for one more prompt, but not
for the answer: several chats would stand still until others have ended. (The future memory of a batch, as Past-Future
has it, ASPLOS 25.)

An answer is expected to be as long as predicted (router/lengths.py), but to get at least as many tokens more as it has:
so long answers are known for long before any has ended. For example, of an answer with 60 of 100 predicted tokens 60
more are expected. It goes on for that long with a chance of 46 %, for twice as long with 4 % (Rayleigh).
Where nothing is predicted, fewer than eight answers have ended (LEAST_ENDED): so an answer is expected to get an eighth
of the tokens that all open ones have together. For example, at a start whose 40 chats have 200 tokens each, and none
has ended, each is expected to get 1,000 more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, inf, pi, sqrt
from typing import NamedTuple

from alignedserve.core import Request, Retention
from alignedserve.scheduling.lengths import LEAST_ENDED, bounds, is_exact, mean_and_upper
from alignedserve.scheduling.policy import Policy, Predictor

_SURE = 0.25  # standard deviations: six of ten moments
_LOOKS = 16  # moments ahead that are looked at
_MOST_CHATS = 128  # that are looked at: beyond that, each stands for several
_PAUSE_S = 1.0  # a shortage that is over sooner keeps nobody waiting for long
_HARDLY = 1.7  # times the tokens that are expected: one answer in ten gets more


class Shortage(NamedTuple):
    tokens: float  # of memory that will lack; negative where some is left
    after_s: float  # until then


NO_SHORTAGE = Shortage(-inf, 0.0)


class Answer(NamedTuple):
    """The answer of an open chat."""

    request: Request
    tokens: float = 0.0  # of output so far
    part: float = 1.0  # that counts: below 1 where the chat may go on elsewhere


class _Span(NamedTuple):
    """A chat from now on."""

    part: float
    held: float  # tokens now
    expected: float  # more tokens of output; inf: all that are left
    left: float  # steps until the end, at the latest


def shortage(
    answers: Sequence[Answer], capacity: float, step_s: float, policy: Policy, retention: Retention
) -> Shortage:
    """Return what these chats will want beyond `capacity` tokens at the worst moment; a step takes `step_s`."""
    every = 1 + len(answers) // _MOST_CHATS
    unknown = 0.0 if policy.predictor is not Predictor.HASH else sum(answer.tokens for answer in answers) / LEAST_ENDED
    spans = [_span(answer, every, unknown, policy) for answer in answers[::every]]
    last = max(min(span.left, _HARDLY * span.expected) for span in spans)
    looks = [last * look / _LOOKS for look in range(_LOOKS)]
    wanted = [_wanted(spans, steps, retention) for steps in looks]
    if sum(tokens > capacity for tokens in wanted) * last / _LOOKS * step_s < _PAUSE_S:
        return NO_SHORTAGE
    tokens, steps = max(zip(wanted, looks, strict=True))
    return Shortage(tokens - capacity, steps * step_s)


def _span(answer: Answer, stands_for: int, unknown: float, policy: Policy) -> _Span:
    """`unknown` are the tokens that an answer is expected to get at least where its length is not predicted."""
    request, tokens = answer.request, answer.tokens
    left, more = max(1.0, bounds(request)[1] - tokens), mean_and_upper(request, policy)[0] - tokens
    expected = inf if is_exact(request) else max(1.0, more, tokens, unknown if request.estimate is None else 0.0)
    return _Span(answer.part * stands_for, len(request.prompt) + tokens, expected, left)


def _wanted(spans: Iterable[_Span], steps: float, retention: Retention) -> float:
    """Return the tokens of memory that suffice in six of ten cases after `steps` steps."""
    mean = variance = 0.0
    for span in spans:
        if steps < span.left:
            held, lives = retention.of_decode(round(span.held + steps)), exp(-pi / 4 * (steps / span.expected) ** 2)
            mean += span.part * lives * held
            variance += span.part * lives * (1 - lives) * held * held
    return mean + _SURE * sqrt(variance)
