"""Predict whether decode workers have memory for the answers of all chats to the end, with a new chat among them.

All decodes of a worker grow by a token in each step, so what a chat will hold until its end is known. For example, 21
translations with prompts of 1,067 tokens have 450 of about 1,600 tokens of output each. The chats hold 32,000 tokens
now, and will want 55,000 before the first chat ends. A device of 42,000 tokens has room for one more prompt, but not
for the answer: several chats would stand still until others have ended. (The future memory of a batch, as Past-Future
has it, ASPLOS 25.)

How long an answer gets is learnt from ended and open chats: of all answers that reached some length, the share that
ended there (Kaplan and Meier). So long answers are known for long before any has ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf, log, sqrt
from typing import NamedTuple

from alignedserve.core import KEEPS_ALL, Request, Retention, ServiceClass
from alignedserve.protocol.messages import Report
from alignedserve.scheduling.lengths import bounds, is_exact

_SURE = 0.5  # standard deviations: seven of ten moments
_LOOKS = 16  # moments ahead that are looked at
_MOST_CHATS = 128  # that are looked at: beyond that, each stands for several
_BIN = 32  # tokens of output that are counted together
_PRIOR = 4.0  # outputs of the expected length that count as ended before any did
_BELIEF = 1.0  # outputs that are believed to have reached each length, and to have ended there as elsewhere
_LONGER = 16.0  # times the longest output: no output is expected to get longer by more, on average
_HALVED = 256  # outputs after which earlier ones count half
_PAUSE_S = 1.0  # a shortage that is over sooner keeps nobody waiting for long
_HARDLY = 2.3  # where the hazards sum up to this, one in ten is left
_SUREST = 0.99  # chance to end in a bin


@dataclass(slots=True)
class StepClock:
    """Counts a worker's steps by the mean time of a step that it told last."""

    steps: float = 0.0
    at: float = 0.0
    step_s: float = 0.0

    def now(self, now: float) -> float:
        return self.steps + (max(0.0, now - self.at) / self.step_s if self.step_s else 0.0)

    def tell(self, step_s: float, now: float) -> None:
        self.steps, self.at, self.step_s = self.now(now), now, step_s


@dataclass(slots=True)
class _OpenChat:
    request: Request
    tokens: float  # of output, when the worker's clock stood at `since`
    since: float | None  # None: the chat does not decode


class Shortage(NamedTuple):
    tokens: float  # of memory that will lack; negative where some is left
    after_s: float  # until then


NO_SHORTAGE = Shortage(-inf, 0.0)


class AnswersAhead:
    """The chats of each member with their outputs so far, and the lengths of outputs."""

    def __init__(self, expected_output: int, retention: Retention = KEEPS_ALL, grows: bool = True) -> None:
        """`grows` says that a chat gets memory block by block; otherwise a chat gets all possible memory at once."""
        self._retention, self._grows = retention, grows
        self._at: defaultdict[str, dict[str, _OpenChat]] = defaultdict(dict)  # member -> chats
        self._most: Counter[str] = Counter()  # member -> what the chats hold if all outputs get as long as possible
        self._num_open = 0
        self._clocks: defaultdict[str, StepClock] = defaultdict(StepClock)  # decode worker -> its steps
        self._lengths = OutputLengths(expected_output)

    def put(self, member: str, request: Request, decodes: bool, now: float, tokens: float | None = None) -> None:
        """Note that the member has a chat; `tokens` is the output so far, where known."""
        if request.service is not ServiceClass.RT:
            return
        self.take(member, request.id, now)
        so_far = len(request.emitted) if tokens is None else tokens
        self._at[member][request.id] = _OpenChat(request, so_far, self._clocks[member].now(now) if decodes else None)
        self._most[member] += request.most_tokens
        self._num_open += 1

    def take(self, member: str, request: str, now: float) -> float | None:
        """Forget a chat of the member, and return the number of output tokens."""
        if (chat := self._at[member].pop(request, None)) is None:
            return None
        self._most[member] -= chat.request.most_tokens
        self._num_open -= 1
        return self._tokens(member, chat, now)

    def ended(self, length: int) -> None:
        """Learn the length of a chat's output."""
        self._lengths.add(length)

    def reported(self, worker: str, report: Report, now: float) -> None:
        self._clocks[worker].tell(report.step_s, now)

    def shortage_of_all(self, request: Request, capacity: int, now: float) -> Shortage:
        """Return what a new chat and all others will want beyond `capacity` at the worst moment."""
        if request.most_tokens + self._most.total() <= capacity:
            return NO_SHORTAGE
        return self.shortage(request, dict.fromkeys(self._at, 1.0), capacity, now)

    def shortage(self, request: Request, members: Mapping[str, float], capacity: int, now: float) -> Shortage:
        """Return what a new chat and these members' chats will want beyond `capacity` at the worst moment.

        `members` has the part of each member's chats that counts."""
        most = request.most_tokens + sum(part * self._most[member] for member, part in members.items()) - capacity
        if most <= 0 or not self._grows:
            return Shortage(most, 0.0)  # as mostly: memory suffices even if all outputs get as long as possible
        chats = [
            (part, chat.request, self._tokens(member, chat, now))
            for member, part in members.items()
            for chat in self._at[member].values()
        ]
        every = 1 + len(chats) // _MOST_CHATS
        seen = chats[::every]
        ends = self._lengths.ends([tokens for _, _, tokens in seen], self._num_open / max(1, len(seen)))
        spans = [_ChatAhead(part * every, request, tokens, ends, self._retention) for part, request, tokens in seen]
        spans.append(_ChatAhead(1.0, request, 0.0, ends, self._retention))
        step_s = max((self._clocks[member].step_s for member in members), default=0.0)
        last = max(span.left if span.is_exact else min(span.left, ends.horizon) for span in spans)
        wanted = [_wanted(spans, last * look / _LOOKS, ends) for look in range(_LOOKS)]
        look_s, num_short = last / _LOOKS * step_s, sum(tokens > capacity for tokens in wanted)
        if num_short * look_s < _PAUSE_S:
            return NO_SHORTAGE
        most, look = max((tokens, look) for look, tokens in enumerate(wanted))
        return Shortage(most - capacity, look * look_s)

    def _tokens(self, member: str, chat: _OpenChat, now: float) -> float:
        return chat.tokens if chat.since is None else chat.tokens + self._clocks[member].now(now) - chat.since


class Ends:
    """The hazards of outputs to end, summed up from their first token on."""

    def __init__(self, sums: Sequence[float], per_token: float) -> None:
        """`sums` are those before each bin; beyond the last, outputs end `per_token`."""
        self._sums, self._per_token = sums, per_token
        self._last = len(sums) - 1

    def before(self, tokens: float) -> float:
        """Return the sum before `tokens`: an output that has `a` tokens reaches `b` with a chance of
        exp(before(a) - before(b))."""
        at = tokens / _BIN
        if at >= self._last:
            return self._sums[self._last] + (tokens - self._last * _BIN) * self._per_token
        whole = int(at)
        return self._sums[whole] + (at - whole) * (self._sums[whole + 1] - self._sums[whole])

    @property
    def horizon(self) -> float:
        """Return the length that one in ten outputs has."""
        if (beyond := _HARDLY - self._sums[self._last]) > 0:
            return self._last * _BIN + beyond / self._per_token
        return float(_BIN * next(at for at, summed in enumerate(self._sums) if summed >= _HARDLY))


class OutputLengths:
    """How many of the latest outputs reached each length, and how many ended there."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._came, self._ended = list[float](), list[float]()  # for each bin of lengths
        self._num = 0

    def add(self, length: int) -> None:
        at = length // _BIN
        for counted in (self._came, self._ended):
            counted += [0.0] * (at + 1 - len(counted))
        for passed in range(at + 1):
            self._came[passed] += 1
        self._ended[at] += 1
        self._num += 1
        if self._num % _HALVED == 0:
            self._came, self._ended = [n / 2 for n in self._came], [n / 2 for n in self._ended]

    def ends(self, open_at: Sequence[float], weight: float) -> Ends:
        """Return the hazards, given the lengths so far of outputs that go on; each stands for `weight` such.

        Where no output has come, they end as often for each token as everywhere; and on average not later than after
        16 times as many tokens as the longest has: where all chats go on at the start, long answers are expected."""
        goes_on = Counter(int(tokens) // _BIN for tokens in open_at)
        tokens = _BIN * sum(self._came) + weight * sum(open_at)
        longest = max([self._expected, _BIN * len(self._came), *open_at])
        per_token = max((sum(self._ended) + _PRIOR) / (tokens + _PRIOR * self._expected), 1 / (_LONGER * longest))
        last = max([len(self._came), *(at + 1 for at in goes_on)])
        hazards, beyond = list[float](), 0.0
        for at in reversed(range(last)):
            came, ended = (self._came[at], self._ended[at]) if at < len(self._came) else (0.0, 0.0)
            chance = min(_SUREST, (ended + _BELIEF * _BIN * per_token) / (came + beyond + _BELIEF))
            hazards.append(-log(1 - chance))
            beyond += weight * goes_on[at]
        return Ends([0.0, *accumulate(reversed(hazards))], per_token)


class _ChatAhead:
    """A chat from now on."""

    __slots__ = ("_before", "_held", "_retention", "_tokens", "is_exact", "left", "part")

    def __init__(self, part: float, request: Request, tokens: float, ends: Ends, retention: Retention) -> None:
        self.part, self._tokens, self._retention = part, tokens, retention
        self._held = len(request.prompt) + tokens
        self.is_exact, self._before = is_exact(request), ends.before(tokens)
        self.left = max(1.0, bounds(request)[1] - tokens)  # steps until the end, at the latest

    def after(self, steps: float, ends: Ends) -> tuple[float, float]:
        """Return what the chat holds after `steps` steps, and the chance that the chat goes on."""
        if steps >= self.left:
            return 0.0, 0.0
        lives = 1.0 if self.is_exact else exp(self._before - ends.before(self._tokens + steps))
        return self._retention.of_decode(round(self._held + steps)), lives


def _wanted(spans: Sequence[_ChatAhead], steps: float, ends: Ends) -> float:
    """Return the tokens of memory that suffice in seven of ten cases after `steps` steps."""
    mean = variance = 0.0
    for span in spans:
        held, lives = span.after(steps, ends)
        mean += span.part * lives * held
        variance += span.part * lives * (1 - lives) * held * held
    return mean + _SURE * sqrt(variance)
