"""The owner's core keeps the only lasting copy of each open request that its gateway or job runner accepted.

The owner hands every token to its client exactly once and in order, whatever happens to the request on the way: the
owner drops duplicates and tokens of older attempts, asks again for missing tokens, and follows a lost attempt by the
next, which goes on after the delivered tokens. A request that is silent for long may have lost a frame that no later
frame tells of: the owner asks the workers that may keep the tokens, and asks the router whether any part still has the
request.

Where a client does not read, the owner pauses the request: the attempt is cancelled, and the next attempt waits here
until the client has read what has come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from alignedserve.core import SUSPECT_DEATHS, FinishReason, Rejection, Request, Role, Sketch
from alignedserve.owner.accounts import Account, SettlingAccounts
from alignedserve.owner.explaining import Explanations
from alignedserve.protocol.commands import Command, Deliver, Reject, Send, SetTimer, Show, TellPlace
from alignedserve.protocol.events import (
    Closed,
    Event,
    LinkGap,
    MemberJoined,
    MemberLost,
    Opened,
    Paused,
    Received,
    Resumed,
    StoryAsked,
    TimerFired,
    Unsent,
    attempts_of,
)
from alignedserve.protocol.messages import (
    ROUTER,
    Acknowledge,
    Acquit,
    AttemptLost,
    Cancel,
    Decisions,
    Declare,
    Figures,
    Infeasible,
    InLine,
    Inquire,
    Member,
    Missed,
    Output,
    Place,
    Refused,
    RequestUse,
    Resend,
    StepLate,
    Submit,
    Tokens,
    Used,
)

RESEND_S = 2.0  # wait for the answer to a Resend; then the next attempt starts
MOST_DECLARED = 32  # requests in a frame
MOST_FRUITLESS = 10  # attempts in a row without a token, before a request is given up: the request may break them
# A request has passed the place of its last death after this number of tokens beyond: the first number, and after each
# death further on the next number, since a request may end its workers some tokens after each start. Some requests end
# a worker for each block of 16 tokens, as the block is copied.
PASSED = (16, 32, 128, 512)
MOST_PASSED = 10  # deaths, each further on than the death before, from which on the request runs alone until its end
SILENCE_S = 5.0  # without news, before the owner asks about a request
_SILENCE = ""  # name of a timer; a request's timer has the request's name


@dataclass(slots=True)
class OwnedRequest:
    request: Request  # of the current attempt
    sketch: Sketch | None
    heard_at: float  # when it was opened, its last token came, or it was asked for
    output: list[int] = field(default_factory=list)  # delivered
    senders: tuple[str, ...] = ()  # workers that may keep its tokens
    missing_at: int | None = None  # the index that a Resend asked for
    num_fruitless: int = 0  # attempts in a row that brought no token
    charged_attempt: int = -1  # the last attempt that was charged with a death
    may_be_culprit: bool = False  # whether it is one if the worker of that attempt has ended
    before_silence: tuple[int, int, int] | None = None  # the counts before a charge that may be taken back
    num_passed: int = 0  # workers that ended when it had passed the place of the death before
    num_deaths: int = 0  # workers that ended in a row while they had it, each at about the same place ...
    died_at: int = 0  # ... which is that of the last death: the tokens that it had
    emitted_at: float | None = None  # when the last token came
    has_doubted: bool = False  # whether an attempt was given up since its KV may have been spoiled
    is_infeasible: bool = False  # whether the prompt alone takes longer than the ttft
    is_paused: bool = False  # whether its attempt waits here: no other part knows of it
    account: Account = field(default_factory=Account)

    @property
    def next_attempt(self) -> Request:
        attempt, emitted = self.request.attempt + 1, tuple(self.output)
        return replace(
            self.request, attempt=attempt, emitted=emitted, emitted_at=self.emitted_at, deaths=self.num_charged
        )

    @property
    def is_watched(self) -> bool:
        """Return whether no number of tokens acquits the request any more."""
        return self.num_passed >= MOST_PASSED

    @property
    def num_charged(self) -> int:
        return max(self.num_deaths, SUSPECT_DEATHS) if self.is_watched else self.num_deaths

    @property
    def num_gained(self) -> int:
        """Return how many tokens came since the place at which the last worker ended."""
        return len(self.output) - self.died_at

    @property
    def has_passed(self) -> bool:
        return self.num_gained > PASSED[min(self.num_passed, len(PASSED) - 1)]

    def charge(self, attempt: int, died: bool, alone: bool) -> None:
        """Count a death, which may be taken back where the worker is only silent."""
        self.charged_attempt, was_watched = attempt, self.is_watched
        self.before_silence = None if died else (self.num_deaths, self.num_passed, self.died_at)
        self._count_death()
        self.may_be_culprit = alone and (was_watched or self.num_deaths > SUSPECT_DEATHS)

    def take_back(self) -> None:
        """Forget the last charge, if it was for a silence: the worker was cut off."""
        if self.before_silence is not None:
            self.num_deaths, self.num_passed, self.died_at = self.before_silence
            self.before_silence, self.may_be_culprit = None, False

    def _count_death(self) -> None:
        if self.has_passed:
            self.num_passed, self.num_deaths = self.num_passed + 1, 0
        self.num_deaths += 1
        self.died_at = len(self.output)


class OwnerCore:
    """Decides for an owner. Without the `needed` roles no request can run; `lost_at` says since when: at an owner that
    follows another, since its start."""

    def __init__(self, needed: frozenset[Role], lost_at: float = -math.inf) -> None:
        self._needed = needed
        self._open: dict[str, OwnedRequest] = {}
        self._members: dict[str, Member] = {}  # by name
        self._late: dict[str, float] = {}  # worker -> how long its present step has run, where that is late
        self._explanations, self._settling = Explanations(), SettlingAccounts()
        self._listening = False  # whether the timer for silent requests is set
        self._lost_at = lost_at  # when a role was last left without a member
        self._left_at: dict[Role, float] = {}  # role -> when its last member left, or the router joined

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def held(self) -> dict[str, int]:
        return {"requests": self.num_open}

    @property
    def members(self) -> tuple[Member, ...]:
        """Return the members that are there, sorted by name. Any thread may call this."""
        return tuple(sorted(self._members.values(), key=lambda member: member.name))

    @property
    def ready(self) -> bool:
        """Return whether a request that is opened now could run."""
        return self._needed <= {member.role for member in self._members.values() if member.name not in self._late}

    @property
    def late(self) -> dict[str, float]:
        """Return the workers whose present step is late, and for how long it has run. Any thread may call this."""
        return dict(self._late)

    def lacks_s(self, now: float) -> float:
        """Return for how long no request could run: 0 if one can run now, infinite if none ever could."""
        return 0.0 if self.ready else now - self._lost_at

    def away_s(self, role: Role, now: float) -> float:
        """Return for how long no member of this role has been there."""
        is_there = any(member.role is role for member in self._members.values())
        return 0.0 if is_there else now - self._left_at.get(role, now)

    def handle(self, event: Event, now: float) -> list[Command]:
        match event:
            case Opened(request, sketch):
                self._open[request.id] = OwnedRequest(request, sketch, now, list(request.emitted))
                return [Send(ROUTER, Submit(request, sketch)), *self._listen(now)]
            case Closed(request) if request in self._open:
                return self._closed(self._open.pop(request))
            case Paused(request) if (opened := self._open.get(request)) and not opened.is_paused:
                return self._pause(opened)
            case Resumed(request) if (opened := self._open.get(request)) and opened.is_paused:
                return self._resume(opened, now)
            case Received(sender, Tokens(outputs)):
                return self._arrived(sender, outputs, now)
            case Received(message=Used(uses)):
                return self._note_use(uses)
            case Received(message=AttemptLost(request, attempt, died, alone, silent)):
                return self._lost(request, attempt, died, alone, silent)
            case Received(message=Refused(request, attempt) as refused) if self._is_current(request, attempt):
                del self._open[request]
                return [Reject(request, refused.reason, refused.why, refused.retry_after_s)]
            case Received(message=Infeasible(request, attempt)) if self._is_current(request, attempt):
                self._open[request].is_infeasible = True
            case Received(message=InLine(places)):
                return [TellPlace(of.request, of.num_before, of.seconds) for of in places if self._is_unheard(of)]
            case Received(message=Figures() as figures):
                return [Show(figures)]
            case StoryAsked(number, request):
                return self._explanations.ask(number, request, self._members.values(), now)
            case Received(sender, Decisions() as answer):
                return self._explanations.hear(sender, answer, now)
            case Unsent(message=Submit() | Declare() as message, why=why):
                return self._unsent(message, why)
            case MemberLost(member):
                was_ready = self.ready
                self._members.pop(member.name, None)
                self._late.pop(member.name, None)
                if member.role is Role.ROUTER:
                    self._late.clear()  # the next router says again, at each heartbeat, whose step is late
                self._left_at[member.role] = now
                if was_ready and not self.ready:
                    self._lost_at = now
            case Received(message=StepLate(name, late_s)):
                was_ready = self.ready
                self._late.pop(name, None)
                if late_s and name in self._members:
                    self._late[name] = late_s
                if was_ready and not self.ready:
                    self._lost_at = now
            case MemberJoined(member):
                self._members[member.name] = member
                if member.role is not Role.ROUTER:
                    return []
                for role in Role:
                    self._left_at.setdefault(role, now)
                return self._declared()
            case Received(sender, Missed()):
                return self._say_again(sender)
            case LinkGap(sender):
                if sender == ROUTER:
                    self._late.clear()
                return [Send(sender, Missed()), *self._say_again(sender)]
            case TimerFired(name) if name == _SILENCE:
                return self._silent(now)
            case TimerFired(name) if self._explanations.has_timer(name):
                return self._explanations.end(name)
            case TimerFired(request):
                return self._unanswered(request)
        return []

    def _arrived(self, sender: str, outputs: Iterable[Output], now: float) -> list[Command]:
        commands: list[Command] = []
        for output in outputs:  # the hottest loop of an owner: each output costs no call and no list of its own
            opened = self._open.get(output.request)
            if opened is None:
                commands += self._unwanted(sender, output)
                continue
            if output.attempt < opened.request.attempt:  # the worker did not hear that it was to drop this attempt
                commands.append(Send(sender, Cancel(output.request, output.attempt)))
                continue
            finish = output.finish
            # None is asked first: Python 3.11 takes as long as for three calls to find a member of an enum.
            if finish is not None and finish is FinishReason.DOUBT:
                commands += self._hear_doubt(opened, sender, output, now)
                continue
            if sender not in opened.senders:
                opened.senders += (sender,)
            opened.heard_at = now
            have, new, logprobs = len(opened.output), output.tokens, output.logprobs
            if output.index > have:
                commands += self._ask_again(opened, sender, now)
                continue
            if output.index < have:
                known = have - output.index
                new, logprobs = new[known:], logprobs[known:]
            if not new and finish is not FinishReason.ERROR:
                continue
            opened.output += new
            opened.emitted_at = now
            opened.missing_at, opened.num_fruitless = None, 0
            opening, is_infeasible = None if have else output.opening, not have and opened.is_infeasible
            spent = opened.account.spent
            commands.append(Deliver(output.request, new, finish, logprobs, opening, is_infeasible, spent))
            if finish is not None:
                commands += self._ended(opened)
            elif opened.num_deaths and opened.num_gained > PASSED[0]:
                commands += self._acquit(opened)
        return commands

    def _hear_doubt(self, opened: OwnedRequest, sender: str, output: Output, now: float) -> list[Command]:
        """Start the next attempt, after the tokens that came before; the second time, end with an error."""
        if opened.has_doubted:
            return self._arrived(sender, (structs.replace(output, finish=FinishReason.ERROR),), now)
        commands = self._arrived(sender, (structs.replace(output, finish=None),), now)
        if len(opened.output) < output.index + len(output.tokens):
            return commands  # earlier tokens are missing: the output comes again
        opened.has_doubted = True
        return [*commands, *self._lost(output.request, output.attempt)]

    def _unwanted(self, sender: str, output: Output) -> list[Command]:
        """Tell the worker, and a router that has just started, that the client has gone or has the whole output."""
        if output.finish:
            return [Send(sender, Acknowledge((output.request,)))]
        cancel = Cancel(output.request, output.attempt)
        return [Send(sender, cancel), Send(ROUTER, cancel)]

    def _ended(self, opened: OwnedRequest) -> list[Command]:
        del self._open[opened.request.id]
        return [Send(worker, Acknowledge((opened.request.id,))) for worker in sorted(opened.senders)]

    def _ask_again(self, opened: OwnedRequest, sender: str, now: float) -> list[Command]:
        have = len(opened.output)
        if opened.missing_at == have:
            return []
        opened.missing_at = have
        return [self._resend(sender, opened), SetTimer(opened.request.id, now + RESEND_S)]

    def _say_again(self, to: str) -> list[Command]:
        """Ask again about all requests: lost frames of a worker may have held the first or the last tokens of any."""
        if to == ROUTER:
            passed = [opened for opened in self._running if opened.charged_attempt >= 0 and not opened.request.deaths]
            return [*map(_acquittal, passed), *self._inquire(self._running)]
        return [self._resend(to, opened) for opened in self._running]

    def _listen(self, now: float) -> list[Command]:
        if self._listening or not self._open:
            return []
        self._listening = True
        return [SetTimer(_SILENCE, now + SILENCE_S)]

    def _silent(self, now: float) -> list[Command]:
        self._listening = False
        silent = [opened for opened in self._running if now - opened.heard_at >= SILENCE_S]
        commands: list[Command] = []
        for opened in silent:
            commands += [self._resend(sender, opened) for sender in sorted(opened.senders)]
            opened.heard_at = now
        return [*commands, *self._inquire(silent), *self._listen(now)]

    def _resend(self, sender: str, opened: OwnedRequest) -> Command:
        return Send(sender, Resend(opened.request.id, opened.request.attempt, len(opened.output)))

    def _inquire(self, requests: Iterable[OwnedRequest]) -> list[Command]:
        attempts = tuple((opened.request.id, opened.request.attempt) for opened in requests)
        return [Send(ROUTER, Inquire(attempts))] if attempts else []

    def _declared(self) -> list[Command]:
        """Declare all requests, those with deaths one by one: a router that fails at a request then names the
        request."""
        charged = [opened.request for opened in self._running if opened.num_deaths]
        others = [opened.request for opened in self._running if not opened.num_deaths]
        alone = _in_frames(charged, 1, is_last=False) if charged else []
        return [*alone, *_in_frames(others, MOST_DECLARED)]

    def _unanswered(self, request: str) -> list[Command]:
        opened = self._open.get(request)
        if opened is None or opened.missing_at is None:
            return []
        return self._lost(request, opened.request.attempt)

    def _lost(
        self, request: str, attempt: int, died: bool = False, alone: bool = False, silent: bool = False
    ) -> list[Command]:
        opened = self._open.get(request)
        if opened is None or attempt > opened.request.attempt:
            return []
        is_current = attempt == opened.request.attempt
        if (died or silent) and attempt > opened.charged_attempt:
            opened.charge(attempt, died, alone)
        elif attempt == opened.charged_attempt and died:
            opened.before_silence = None
        elif attempt == opened.charged_attempt and not silent:
            opened.take_back()
        if opened.may_be_culprit and attempt == opened.charged_attempt:
            if died:
                return self._convict(opened)
            if silent:
                return []  # until the router knows whether the worker has ended
        if not is_current:  # the worker was silent, and the next attempt began before its death was known
            must_run_alone = opened.num_charged >= SUSPECT_DEATHS and not opened.request.is_suspect
            return self._go_on(opened) if must_run_alone and not opened.is_paused else []
        opened.num_fruitless += 1
        if opened.num_fruitless == MOST_FRUITLESS:
            return self._give_up(opened, f"{MOST_FRUITLESS} attempts in a row came to nothing")
        return self._go_on(opened)

    def _go_on(self, opened: OwnedRequest) -> list[Command]:
        opened.request, opened.missing_at = opened.next_attempt, None
        return [Send(ROUTER, Submit(opened.request, opened.sketch))]

    def give_up_on(self, event: Event) -> list[Command] | None:
        """End the one request of an event at which this core has failed; None where the event was about several."""
        if len(attempts := attempts_of(event)) != 1:
            return None
        request, attempt = attempts[0]
        why = "the server fails at this request: do not send it again"
        if (opened := self._open.get(request)) is not None:
            return self._give_up(opened, why, Rejection.CULPRIT, 0.0)
        if not isinstance(event, Opened):
            return []
        return [Send(ROUTER, Cancel(request, attempt)), Reject(request, Rejection.CULPRIT, why, 0.0)]

    # --- Requests that may be what ends their workers
    #
    # A request that ends its worker at some token does so in each attempt, whatever tokens came before. All requests of
    # the worker are charged with a death, since nobody knows the culprit. With one death a request runs among others,
    # but the router starts few of those at a time. With the second death in a row a request is a suspect: the router
    # runs the request alone. An unlucky request soon passes the place of the last death, and is acquitted. If the
    # worker ends again at that place, while it runs this request alone, the request is the culprit. A silent worker
    # counts as ended, or a request that hangs its workers would hang them all before the first is ended; but nobody is
    # the culprit before the end is known. A death at another place, or beside other requests, proves nothing: workers
    # are killed for other reasons too. Among many culprits an innocent request may see ten deaths, each further on.
    # From then on the request runs alone until its end, in turns with other suspects, and the next death convicts.

    def _acquit(self, opened: OwnedRequest) -> list[Command]:
        """Forget the deaths. A suspect goes on among others, in the next attempt: the next suspect gets the worker."""
        if opened.is_watched:
            has_had_turn = len(opened.output) - len(opened.request.emitted) > PASSED[-1]
            return self._go_on(opened) if has_had_turn and opened.request.is_suspect else []
        if opened.has_passed:
            opened.num_deaths, opened.may_be_culprit, opened.before_silence = 0, False, None
        if opened.request.is_suspect:
            return [] if opened.num_deaths else self._go_on(opened)
        if not opened.request.deaths:
            return []
        opened.request = replace(opened.request, deaths=0)
        return [_acquittal(opened)]

    def _convict(self, opened: OwnedRequest) -> list[Command]:
        num = max(opened.num_deaths, opened.num_passed)
        why = f"{num} workers ended while they ran this request, the last one alone with it"
        return self._give_up(opened, f"{why}: do not send it again", Rejection.CULPRIT, 0.0)

    def _give_up(
        self, opened: OwnedRequest, why: str, reason: Rejection = Rejection.GIVEN_UP, retry_after_s: float = 10.0
    ) -> list[Command]:
        """End a request that was accepted; the router may know an attempt of it."""
        request = self._open.pop(opened.request.id).request
        charges = self._settling.end(request.id, opened.account)
        cancel = Send(ROUTER, Cancel(request.id, request.attempt))
        return [cancel, *charges, Reject(request.id, reason, why, retry_after_s)]

    def _unsent(self, message: Submit | Declare, why: str) -> list[Command]:
        """End a request that no frame can hold: the next attempt would fail too. Requests that were declared together
        are declared again, one to a frame, to find out which request fails."""
        requests = message.requests if isinstance(message, Declare) else (message.request,)
        current = [request for request in requests if self._is_current(request.id, request.attempt)]
        is_last = isinstance(message, Declare) and message.is_last
        if len(requests) > 1:
            return _in_frames(current, 1, is_last)
        commands: list[Command] = _in_frames([], 1) if is_last else []
        for request in current:
            commands += self._give_up(self._open[request.id], f"the request cannot be sent to the router: {why}")
        return commands

    @property
    def _running(self) -> list[OwnedRequest]:
        return [opened for opened in self._open.values() if not opened.is_paused]

    def _pause(self, opened: OwnedRequest) -> list[Command]:
        cancel = Cancel(opened.request.id, opened.request.attempt)
        opened.request, opened.missing_at, opened.is_paused = opened.next_attempt, None, True
        return [Send(ROUTER, cancel)]

    def _resume(self, opened: OwnedRequest, now: float) -> list[Command]:
        opened.is_paused, opened.heard_at = False, now
        return [Send(ROUTER, Submit(opened.request, opened.sketch)), *self._listen(now)]

    def _closed(self, opened: OwnedRequest) -> list[Command]:
        request = opened.request
        return [Send(ROUTER, Cancel(request.id, request.attempt)), *self._settling.end(request.id, opened.account)]

    def _note_use(self, uses: Iterable[RequestUse]) -> list[Command]:
        """Note what requests have used; that of requests which ended early is charged at once."""
        commands: list[Command] = []
        for request, attempt, spent in uses:
            if (opened := self._open.get(request)) is not None:
                opened.account.note(attempt, spent)
            else:
                commands += self._settling.note(request, attempt, spent)
        return commands

    def _is_unheard(self, place: Place) -> bool:
        return self._is_current(place.request, place.attempt) and not self._open[place.request].output

    def _is_current(self, request: str, attempt: int) -> bool:
        return request in self._open and self._open[request].request.attempt == attempt


def _acquittal(opened: OwnedRequest) -> Command:
    return Send(ROUTER, Acquit(opened.request.id, opened.request.attempt))


def _in_frames(requests: Sequence[Request], most: int, is_last: bool = True) -> list[Command]:
    """Return the Declare messages for these requests, at most `most` in each: all prompts might not fit into one frame.
    Without requests one empty message says so."""
    starts = range(0, max(1, len(requests)), most)
    frames = [tuple(requests[at : at + most]) for at in starts]
    *before, last = frames
    declares = [*(Declare(frame, is_last=False) for frame in before), Declare(last, is_last)]
    return [Send(ROUTER, declare) for declare in declares]
