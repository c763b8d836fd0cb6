"""Predict whether decode workers have memory for the answers of all chats to the end, with a new chat among them.

All decodes of a worker grow by a token in each step, so what a chat will hold until its end is known. For example, 21
translations with prompts of 1,067 tokens have 450 of about 1,600 tokens of output each. The chats hold 32,000 tokens
now, and will want 55,000 before the first chat ends. A device of 42,000 tokens has room for one more prompt, but not
for the answer: several chats would stand still until others have ended. (The future memory of a batch, as Past-Future
has it, ASPLOS 25.)

How long answers get is learnt by kind, that is by caller and size of prompt, from ended and open chats: of all outputs
that reached some length, the share that ended there (Kaplan and Meier). So long ones are known for long before any has
ended. A kind of which little is known is believed to be as all are. For example, of a caller's chats those with prompts
of 4,000 tokens have answers of 60 tokens, and those with prompts of 1,000 answers of 400.

Where memory lacks, it serves most chats if the small ones have it, those with short prompts and answers. For example, a
prompt of 4,000 tokens takes the memory of ten chats with 400. So a chat may come although memory lacks now, if it will
be there when the chat's first token is due, and if half of the memory suffices for all that ask and are as small.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import exp, inf, log, sqrt
from typing import NamedTuple, TypeAlias

from alignedserve.core import KEEPS_ALL, Request, Retention, ServiceClass
from alignedserve.protocol.messages import Report
from alignedserve.scheduling.lengths import bounds, is_exact

Kind: TypeAlias = tuple[str, int]
_SURE = 0.25  # standard deviations: six of ten moments
_LOOKS = 16  # moments ahead that are looked at
_MOST_CHATS = 128  # that are looked at: beyond that, each stands for several
_PAUSE_S = 1.0  # a shortage that is over sooner keeps nobody waiting for long
_SMALL = 0.5  # of the memory: small chats together ask for no more
_BIN = 32  # tokens of output that are counted together
_PRIOR = 4.0  # outputs of the expected length that count as ended before any did
_BELIEF = 1.0  # outputs that are believed to have reached each length, and to have ended there as elsewhere
_ALIKE = 8.0  # outputs of a kind that are believed to end as those of all kinds
_LONGER = 16.0  # times the longest output: no output is expected to get longer by more, on average
_HALVED = 256  # outputs after which earlier ones count half
_HARDLY = 2.3  # where the hazards sum up to this, one in ten is left
_SUREST = 0.99  # chance to end in a bin
_MOST_KINDS = 256  # the longest unseen one is forgotten
_RECENT_S = 20.0  # chats that came so long ago count half


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
        self._lengths = LengthsByKind(expected_output)
        self._asked = Asked()

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

    def asked(self, request: Request, now: float) -> None:
        """Note that a chat has come, admitted or not."""
        if request.service is ServiceClass.RT:
            self._asked.add(request, now)

    def ended(self, request: Request, length: int) -> None:
        """Learn the length of a chat's output."""
        self._lengths.add(request, length)

    def reported(self, worker: str, report: Report, now: float) -> None:
        self._clocks[worker].tell(report.step_s, now)

    def step_s(self, worker: str) -> float:
        """Return the time of a step of the worker with decodes, as it told last."""
        return self._clocks[worker].step_s

    def shortage_of_all(self, request: Request, capacity: int, now: float) -> Shortage:
        """Return what a new chat and all others will want beyond `capacity` at the worst moment."""
        if request.most_tokens + self._most.total() <= capacity:
            return NO_SHORTAGE
        return self.shortage(request, dict.fromkeys(self._at, 1.0), capacity, capacity, now)

    def shortage(
        self, request: Request, members: Mapping[str, float], capacity: int, capacity_of_all: int, now: float
    ) -> Shortage:
        """Return what a new chat and these members' chats will want beyond `capacity` at the worst moment.

        `members` has the part of each member's chats that counts; `capacity_of_all` is what all members hold."""
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
        ends = self._lengths.ends([(chat, tokens) for _, chat, tokens in seen], self._num_open / max(1, len(seen)))
        spans = [_ChatAhead(part * every, chat, tokens, ends.of(chat), self._retention) for part, chat, tokens in seen]
        spans.append(_ChatAhead(1.0, request, 0.0, ends.of(request), self._retention))
        step_s = max((self._clocks[member].step_s for member in members), default=0.0)
        last = max(span.last for span in spans)
        looks = [last * look / _LOOKS for look in range(_LOOKS)]
        held = self._asked.held_by_smaller(request, ends, now) * step_s
        if step_s and held <= _SMALL * capacity_of_all:
            due = request.slo.ttft_s / step_s
            looks = [due, *(steps for steps in looks if steps > due)]
        wanted = [_wanted(spans, steps) for steps in looks]
        look_s, num_short = last / _LOOKS * step_s, sum(tokens > capacity for tokens in wanted)
        if num_short * look_s < _PAUSE_S:
            return NO_SHORTAGE
        most, steps = max(zip(wanted, looks, strict=True))
        return Shortage(most - capacity, steps * step_s)

    def _tokens(self, member: str, chat: _OpenChat, now: float) -> float:
        return chat.tokens if chat.since is None else chat.tokens + self._clocks[member].now(now) - chat.since


class _ChatAhead:
    """A chat from now on."""

    __slots__ = ("_before", "_ends", "_held", "_is_exact", "_left", "_retention", "_tokens", "part")

    def __init__(self, part: float, request: Request, tokens: float, ends: Ends, retention: Retention) -> None:
        self.part, self._tokens, self._ends, self._retention = part, tokens, ends, retention
        self._held = len(request.prompt) + tokens
        self._is_exact, self._before = is_exact(request), ends.before(tokens)
        self._left = max(1.0, bounds(request)[1] - tokens)  # steps until the end, at the latest

    @property
    def last(self) -> float:
        """Return the step after which it is not looked at."""
        return self._left if self._is_exact else min(self._left, self._ends.horizon)

    def after(self, steps: float) -> tuple[float, float]:
        """Return what the chat holds after `steps` steps, and the chance that the chat goes on."""
        if steps >= self._left:
            return 0.0, 0.0
        lives = 1.0 if self._is_exact else exp(self._before - self._ends.before(self._tokens + steps))
        return self._retention.of_decode(round(self._held + steps)), lives


def _wanted(spans: Sequence[_ChatAhead], steps: float) -> float:
    """Return the tokens of memory that suffice in six of ten cases after `steps` steps."""
    mean = variance = 0.0
    for span in spans:
        held, lives = span.after(steps)
        mean += span.part * lives * held
        variance += span.part * lives * (1 - lives) * held * held
    return mean + _SURE * sqrt(variance)


# --- Kinds of chats: how long their outputs get, and how many come


def kind_of(request: Request) -> Kind:
    """Return the kind of a chat: prompts of a size are within a factor of two."""
    return request.caller, len(request.prompt).bit_length()


def footprint(held: float, steps: float) -> float:
    """Return what a chat holds, summed up over its steps, in each of which it grows by a token."""
    return steps * (held + steps / 2)


class Ends:
    """The hazards of outputs to end, summed up from their first token on."""

    def __init__(self, sums: Sequence[float], per_token: float) -> None:
        """`sums` are those before each bin; beyond the last, outputs end `per_token`."""
        self._sums, self.per_token = sums, per_token
        self.last = len(sums) - 1

    def before(self, tokens: float) -> float:
        """Return the sum before `tokens`: an output that has `a` tokens reaches `b` with a chance of
        exp(before(a) - before(b))."""
        at = tokens / _BIN
        if at >= self.last:
            return self._sums[self.last] + (tokens - self.last * _BIN) * self.per_token
        whole = int(at)
        return self._sums[whole] + (at - whole) * (self._sums[whole + 1] - self._sums[whole])

    def of_bin(self, at: int) -> float:
        """Return the chance of an output that reaches the bin to end there."""
        return 1 - exp(self.before(_BIN * at) - self.before(_BIN * (at + 1)))

    @property
    def horizon(self) -> float:
        """Return the length that one in ten outputs has."""
        if (beyond := _HARDLY - self._sums[self.last]) > 0:
            return self.last * _BIN + beyond / self.per_token
        return float(_BIN * next(at for at, summed in enumerate(self._sums) if summed >= _HARDLY))

    @cached_property
    def mean(self) -> float:
        """Return the mean length of outputs."""
        reached = [exp(-summed) for summed in self._sums]
        return _BIN * sum(reached[:-1]) + reached[-1] / self.per_token


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

    def ends(self, open_at: Sequence[float], weight: float, of_all: Ends | None = None) -> Ends:
        """Return the hazards, given the lengths so far of outputs that go on; each stands for `weight` such.

        Where no output has come, they end as those `of_all`; without these, as often for each token as everywhere, and
        on average not later than after 16 times as many tokens as the longest has: where all chats go on at the start,
        long answers are expected."""
        goes_on = Counter(int(tokens) // _BIN for tokens in open_at)
        per_token = self._per_token(open_at, weight) if of_all is None else of_all.per_token
        last = max([len(self._came), *(at + 1 for at in goes_on), *([] if of_all is None else [of_all.last])])
        hazards, beyond = list[float](), 0.0
        for at in reversed(range(last)):
            came, ended = (self._came[at], self._ended[at]) if at < len(self._came) else (0.0, 0.0)
            belief, usual = (_BELIEF, _BIN * per_token) if of_all is None else (_ALIKE, of_all.of_bin(at))
            hazards.append(-log(1 - min(_SUREST, (ended + belief * usual) / (came + beyond + belief))))
            beyond += weight * goes_on[at]
        return Ends([0.0, *accumulate(reversed(hazards))], per_token)

    def _per_token(self, open_at: Sequence[float], weight: float) -> float:
        tokens = _BIN * sum(self._came) + weight * sum(open_at)
        longest = max([self._expected, _BIN * len(self._came), *open_at])
        return max((sum(self._ended) + _PRIOR) / (tokens + _PRIOR * self._expected), 1 / (_LONGER * longest))


class LengthsByKind:
    """The lengths of all outputs, and of each kind's."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._all = OutputLengths(expected)
        self._of = OrderedDict[Kind, OutputLengths]()  # the longest unseen one first

    def add(self, request: Request, length: int) -> None:
        self._all.add(length)
        kind = kind_of(request)
        self._of[kind] = lengths = self._of.pop(kind, None) or OutputLengths(self._expected)
        lengths.add(length)
        if len(self._of) > _MOST_KINDS:
            self._of.popitem(last=False)

    def ends(self, open_at: Iterable[tuple[Request, float]], weight: float) -> EndsByKind:
        """Return the hazards, given open chats and the lengths of their outputs so far; each stands for `weight`."""
        by_kind: dict[Kind, list[float]] = {}
        for request, tokens in open_at:
            by_kind.setdefault(kind_of(request), []).append(tokens)
        of_all = self._all.ends([at for ats in by_kind.values() for at in ats], weight)
        return EndsByKind(of_all, self._of, by_kind, weight)


class EndsByKind:
    """The hazards of each kind; a kind's are made when they are asked for."""

    def __init__(
        self, of_all: Ends, lengths: dict[Kind, OutputLengths], open_at: dict[Kind, list[float]], weight: float
    ) -> None:
        self._of_all, self._lengths, self._open_at, self._weight = of_all, lengths, open_at, weight
        self._made: dict[Kind, Ends] = {}

    def of(self, request: Request) -> Ends:
        return self.of_kind(kind_of(request))

    def of_kind(self, kind: Kind) -> Ends:
        if kind not in self._made:
            lengths, open_at = self._lengths.get(kind), self._open_at.get(kind, [])
            self._made[kind] = self._of_all if lengths is None else lengths.ends(open_at, self._weight, self._of_all)
        return self._made[kind]


@dataclass(slots=True)
class _Came:
    chats: float = 0.0
    tokens: float = 0.0  # of their prompts


class Asked:
    """How many chats of each kind came lately, refused ones among them: moving sums that forget what is old."""

    def __init__(self) -> None:
        self._of = OrderedDict[Kind, _Came]()  # the longest unseen one first
        self._began_at: float | None = None
        self._at = 0.0

    def add(self, request: Request, now: float) -> None:
        self._began_at = now if self._began_at is None else self._began_at
        left = 0.5 ** ((now - self._at) / _RECENT_S)
        for came in self._of.values():
            came.chats, came.tokens = came.chats * left, came.tokens * left
        self._at = now
        kind = kind_of(request)
        self._of[kind] = came = self._of.pop(kind, None) or _Came()
        came.chats, came.tokens = came.chats + 1, came.tokens + len(request.prompt)
        if len(self._of) > _MOST_KINDS:
            self._of.popitem(last=False)

    def held_by_smaller(self, request: Request, ends: EndsByKind, now: float) -> float:
        """Return what all chats of this one's kind, and of kinds with smaller footprints, would hold at once, if they
        were served and each step took a second: as many of them are open as come while one lasts (Little)."""
        if self._began_at is None:
            return 0.0
        seen_s = max(1.0, _RECENT_S / log(2) * (1 - 0.5 ** ((now - self._began_at) / _RECENT_S)))
        each = {kind: footprint(came.tokens / came.chats, ends.of_kind(kind).mean) for kind, came in self._of.items()}
        own = each.get(kind_of(request), 0.0)
        return sum(came.chats * each[kind] for kind, came in self._of.items() if each[kind] <= own) / seen_s
