"""The owner's core: the one lasting copy of each open request, in the gateway that accepted it.

It hands every token to its client exactly once and in order, whatever happened to the request on the
way: duplicates and tokens of older attempts are dropped, a gap is asked for again, and an attempt
that is lost is followed by the next, which goes on after the tokens that were delivered. A request of
which nothing is heard for long may have lost a frame that no later one tells of: its owner asks those
who may keep its tokens, and inquires of the router whether anybody still has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from alignedserve.core import FinishReason, Request, Role, Sketch
from alignedserve.protocol.commands import Command, Deliver, Reject, Send, SetTimer, Show
from alignedserve.protocol.events import (
    Closed,
    Event,
    LinkGap,
    MemberJoined,
    MemberLost,
    Opened,
    Received,
    TimerFired,
    Unsent,
)
from alignedserve.protocol.messages import (
    ROUTER,
    Acknowledge,
    AttemptLost,
    Cancel,
    Declare,
    Figures,
    Inquire,
    Member,
    Missed,
    Output,
    Refused,
    Resend,
    Submit,
    Tokens,
)

RESEND_S = 2.0  # without an answer for so long, the next attempt starts
MOST_DECLARED = 32  # requests in a frame
MOST_FRUITLESS = 10  # attempts in a row, before a request is given up: it may be what breaks them
SILENCE_S = 5.0  # after which a request is asked for
_SILENCE = ""  # timer; those of requests have their names


@dataclass(slots=True)
class _Open:
    request: Request  # of the current attempt
    sketch: Sketch | None
    heard_at: float  # when it was opened, its last token came, or it was asked for
    output: list[int] = field(default_factory=list)  # delivered
    senders: set[str] = field(default_factory=set)  # workers that may keep its tokens
    missing_at: int | None = None  # the index that a Resend asked for
    num_fruitless: int = 0  # attempts in a row of which no token came
    emitted_at: float | None = None  # when the last token came

    @property
    def next_attempt(self) -> Request:
        attempt, emitted = self.request.attempt + 1, tuple(self.output)
        return replace(self.request, attempt=attempt, emitted=emitted, emitted_at=self.emitted_at)


class OwnerCore:
    def __init__(self, needed: frozenset[Role]) -> None:
        self._needed = needed  # roles without which no request can run
        self._open: dict[str, _Open] = {}
        self._members: dict[str, Member] = {}  # by name
        self._listening = False  # whether the timer for silent requests is set
        self._lost_at = -math.inf  # when a role was last left without a member

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def held(self) -> dict[str, int]:
        return {"requests": self.num_open}

    @property
    def members(self) -> tuple[Member, ...]:
        """Whoever is there, by name; from any thread."""
        return tuple(sorted(self._members.values(), key=lambda member: member.name))

    @property
    def ready(self) -> bool:
        """Whether a request that is opened now could run."""
        return self._needed <= {member.role for member in self._members.values()}

    def lacks_s(self, now: float) -> float:
        """For how long it could not have run; 0 where it could, and without end where none ever could."""
        return 0.0 if self.ready else now - self._lost_at

    def handle(self, event: Event, now: float) -> list[Command]:
        match event:
            case Opened(request, sketch):
                self._open[request.id] = _Open(request, sketch, now, list(request.emitted))
                return [Send(ROUTER, Submit(request, sketch)), *self._listen(now)]
            case Closed(request) if request in self._open:
                return self._closed(self._open.pop(request))
            case Received(sender, Tokens(outputs)):
                return self._arrived(sender, outputs, now)
            case Received(message=AttemptLost(request, attempt)):
                return self._lost(request, attempt)
            case Received(message=Refused(request, attempt, why, retry_after_s)) if self._is_current(request, attempt):
                del self._open[request]
                return [Reject(request, why, retry_after_s)]
            case Received(message=Figures() as figures):
                return [Show(figures)]
            case Unsent(message=Submit() | Declare() as message, why=why):
                return self._unsent(message, why)
            case MemberLost(member):
                was_ready = self.ready
                self._members.pop(member.name, None)
                if was_ready and not self.ready:
                    self._lost_at = now
            case MemberJoined(member):
                self._members[member.name] = member
                if member.role is not Role.ROUTER:
                    return []
                return self._declared()
            case Received(sender, Missed()):
                return self._say_again(sender)
            case LinkGap(sender):
                return [Send(sender, Missed()), *self._say_again(sender)]
            case TimerFired(name) if name == _SILENCE:
                return self._silent(now)
            case TimerFired(request):
                return self._unanswered(request)
        return []

    def _arrived(self, sender: str, outputs: Iterable[Output], now: float) -> list[Command]:
        commands: list[Command] = []
        for output in outputs:  # one for each token: it costs no call, and no list of its own
            one = self._open.get(output.request)
            if one is None:
                commands += self._unwanted(sender, output)
                continue
            if output.attempt < one.request.attempt:  # it was to be dropped, and the worker did not hear of it
                commands.append(Send(sender, Cancel(output.request, output.attempt)))
                continue
            one.senders.add(sender)
            one.heard_at = now
            have, new, logprobs = len(one.output), output.tokens, output.logprobs
            if output.index > have:
                commands += self._ask_again(one, sender, now)
                continue
            if output.index < have:
                known = have - output.index
                new, logprobs = new[known:], logprobs[known:]
            if not new and output.finish is not FinishReason.ERROR:
                continue
            one.output += new
            one.emitted_at = now
            one.missing_at, one.num_fruitless = None, 0
            prompt_logprobs, num_cached = ((), 0) if have else (output.prompt_logprobs, output.num_cached)
            commands.append(Deliver(output.request, new, output.finish, logprobs, prompt_logprobs, num_cached))
            if output.finish is not None:
                commands += self._ended(one)
        return commands

    def _unwanted(self, sender: str, output: Output) -> list[Command]:
        """Its client has gone, or has it all; the worker, and a router that has just started, may not know."""
        if output.finish:
            return [Send(sender, Acknowledge((output.request,)))]
        cancel = Cancel(output.request, output.attempt)
        return [Send(sender, cancel), Send(ROUTER, cancel)]

    def _ended(self, one: _Open) -> list[Command]:
        del self._open[one.request.id]
        return [Send(worker, Acknowledge((one.request.id,))) for worker in sorted(one.senders)]

    def _ask_again(self, one: _Open, sender: str, now: float) -> list[Command]:
        have = len(one.output)
        if one.missing_at == have:
            return []
        one.missing_at = have
        return [self._resend(sender, one), SetTimer(one.request.id, now + RESEND_S)]

    def _say_again(self, to: str) -> list[Command]:
        """A worker's lost frames may have held the first or the last tokens of any request: it is asked for all."""
        if to == ROUTER:
            return self._inquire(self._open.values())
        return [self._resend(to, one) for one in self._open.values()]

    def _listen(self, now: float) -> list[Command]:
        if self._listening or not self._open:
            return []
        self._listening = True
        return [SetTimer(_SILENCE, now + SILENCE_S)]

    def _silent(self, now: float) -> list[Command]:
        self._listening = False
        silent = [one for one in self._open.values() if now - one.heard_at >= SILENCE_S]
        commands: list[Command] = [self._resend(sender, one) for one in silent for sender in sorted(one.senders)]
        for one in silent:
            one.heard_at = now
        return [*commands, *self._inquire(silent), *self._listen(now)]

    def _resend(self, sender: str, one: _Open) -> Command:
        return Send(sender, Resend(one.request.id, one.request.attempt, len(one.output)))

    def _inquire(self, these: Iterable[_Open]) -> list[Command]:
        attempts = tuple((one.request.id, one.request.attempt) for one in these)
        return [Send(ROUTER, Inquire(attempts))] if attempts else []

    def _declared(self) -> list[Command]:
        return _in_frames([one.request for one in self._open.values()], MOST_DECLARED)

    def _unanswered(self, request: str) -> list[Command]:
        one = self._open.get(request)
        if one is None or one.missing_at is None:
            return []
        return self._lost(request, one.request.attempt)

    def _lost(self, request: str, attempt: int) -> list[Command]:
        if not self._is_current(request, attempt):
            return []
        one = self._open[request]
        one.num_fruitless += 1
        if one.num_fruitless == MOST_FRUITLESS:
            del self._open[request]
            cancel = Send(ROUTER, Cancel(request, attempt))
            return [
                cancel,
                Reject(request, f"{MOST_FRUITLESS} attempts in a row came to nothing", 10.0, is_given_up=True),
            ]
        one.request, one.missing_at = one.next_attempt, None
        return [Send(ROUTER, Submit(one.request, one.sketch))]

    def _unsent(self, message: Submit | Declare, why: str) -> list[Command]:
        """A request that no frame can hold ends: its next attempt would fare no better. Of several that were declared
        together, each is told alone, to see which it is."""
        requests = message.requests if isinstance(message, Declare) else (message.request,)
        current = [one for one in requests if self._is_current(one.id, one.attempt)]
        is_last = isinstance(message, Declare) and message.is_last
        if len(requests) > 1:
            return _in_frames(current, 1, is_last)
        commands: list[Command] = _in_frames([], 1) if is_last else []
        for one in current:
            del self._open[one.id]
            cancel = Send(ROUTER, Cancel(one.id, one.attempt))  # an attempt before it may be known there
            commands += [
                cancel,
                Reject(one.id, f"the request cannot be sent to the router: {why}", 10.0, is_given_up=True),
            ]
        return commands

    def _closed(self, one: _Open) -> list[Command]:
        return [Send(ROUTER, Cancel(one.request.id, one.request.attempt))]

    def _is_current(self, request: str, attempt: int) -> bool:
        return request in self._open and self._open[request].request.attempt == attempt


def _in_frames(requests: Sequence[Request], most: int, is_last: bool = True) -> list[Command]:
    """Declared, some at a time: with their prompts, all of them might not fit into a frame. That there are none is said
    too."""
    starts = range(0, max(1, len(requests)), most)
    frames = [tuple(requests[at : at + most]) for at in starts]
    *before, last = frames
    return [*(Send(ROUTER, Declare(some, is_last=False)) for some in before), Send(ROUTER, Declare(last, is_last))]
