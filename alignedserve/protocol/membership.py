"""Learn from the frames that reach a process which members came or went, which frames were lost, and what to drop.

What each peer may say, its role decides; what else it says is dropped. A part that has gone mad, or a process that has
stolen the keys of the parts, can so declare no death, name no members and speak for no other role.

The turn loop, the links and the simulator share this file; it does no IO.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from alignedserve.core import Role
from alignedserve.errors import CastOut
from alignedserve.protocol.events import LinkGap, MemberJoined, MemberLost, Received
from alignedserve.protocol.form_messages import FORM_SPEECH
from alignedserve.protocol.messages import (
    LAUNCHER,
    ROUTER,
    Acknowledge,
    Acquit,
    AskBatch,
    AskDecisions,
    AskPages,
    AskPrefix,
    AttemptLost,
    Batch,
    Cancel,
    Commit,
    Decisions,
    Declare,
    Decline,
    Died,
    Figures,
    GiveBack,
    Heartbeat,
    Holding,
    Infeasible,
    InLine,
    Inquire,
    Keep,
    Kept,
    LeasePages,
    Life,
    Member,
    Members,
    Message,
    Missed,
    Offer,
    Prefill,
    Prefix,
    Progress,
    Pull,
    Refused,
    Release,
    Report,
    Resend,
    Reserve,
    Retire,
    Spoiled,
    Started,
    StepLate,
    Submit,
    Tokens,
    Used,
)
from alignedserve.protocol.wire import Envelope

UNNUMBERED = 0  # the number of a heartbeat, which comes from a thread of its own
MOST_HELD = 10_000  # frames kept of a member that has not been announced


class Membership:
    """The members, as the router announced them last.

    A core hears from a member only between its MemberJoined and its MemberLost. A frame may overtake the
    announcement of its sender, which comes on another link: then the frame waits for it. The router announces
    all members, so its own messages never wait.
    """

    def __init__(self, me: str, incarnation: int) -> None:
        self._me, self._incarnation = me, incarnation
        self.refusals = Refusals(me)
        self._members: dict[str, Member] = {}
        self._held: dict[str, list[Received]] = {}  # sender -> what waits for its announcement

    def announced(self, members: tuple[Member, ...]) -> list[MemberLost | MemberJoined | Received | LinkGap]:
        """Return the members that have gone, then the new members, each followed by the frames that waited for it. A
        member with a new incarnation is in both lists.

        Raises CastOut if this process is not named: it was taken for dead, and others have got what it had.
        """
        if not any((member.name, member.incarnation) == (self._me, self._incarnation) for member in members):
            raise CastOut(f"the router took {self._me} for dead: it ends, and starts again as a new incarnation")
        now_there = {member.name: member for member in members}
        lost = [member for name, member in self._members.items() if now_there.get(name) != member]
        new = [member for name, member in now_there.items() if self._members.get(name) != member]
        self._members = now_there
        events: list[MemberLost | MemberJoined | Received | LinkGap] = [*map(MemberLost, lost)]
        for member in new:
            events += [MemberJoined(member), *self._waited(member)]
        return events

    def admits(self, event: Received) -> bool:
        """Return whether the core may hear this event now.

        Otherwise it is kept until its sender is announced, or dropped because the sender may not say it.
        """
        if event.sender == ROUTER:
            return self._may_say(Role.ROUTER, event)
        member = self._members.get(event.sender)
        if member is not None and member.incarnation == event.incarnation:
            return self._may_say(member.role, event)
        held = self._held.setdefault(event.sender, [])
        if len(held) <= MOST_HELD:  # one frame more than is ever delivered: it shows that some are missing
            held.append(event)
        return False

    def _waited(self, member: Member) -> list[Received | LinkGap]:
        held = self._held.pop(member.name, [])
        of_this_life = [event for event in held if event.incarnation == member.incarnation]
        said = [event for event in of_this_life[:MOST_HELD] if self._may_say(member.role, event)]
        return [*said, *([LinkGap(member.name)] if len(held) > MOST_HELD else [])]

    def _may_say(self, role: Role, event: Received) -> bool:
        """Return whether this role may say this to a member; only the router hears heartbeats."""
        if may_say(role, type(event.message)) and type(event.message) is not Heartbeat:
            return True
        self.refusals.note(event.sender, event.message)
        return False


class RouterMembership(Membership):
    """What the router knows of members before its core does: the lives that the launcher has started.

    The core hears nothing of a life that was not started, and holds nothing back: it decides itself who is there.
    """

    def __init__(self, me: str, incarnation: int, lives: Iterable[Life]) -> None:
        super().__init__(me, incarnation)
        self._lives: dict[str, Life] = {}  # name -> its newest life
        self._note_lives(lives)

    def admits(self, event: Received) -> bool:
        if event.sender == LAUNCHER:
            return self._admits_of_launcher(event.message)
        life = self._lives.get(event.sender)
        if life is not None and self._is_by(life, event):
            return True
        if life is None or event.incarnation >= life.incarnation:  # an earlier life's last heartbeat comes late
            self.refusals.note(event.sender, event.message)
        return False

    def _admits_of_launcher(self, message: Message) -> bool:
        """Return whether the core is to hear what the launcher says. A life that was never started can neither die nor
        retire: the core would take its number for that of the newest life."""
        match message:
            case Started(lives):
                self._note_lives(lives)
                return False
            case Died(name, incarnation) | Retire(name, incarnation):
                life = self._lives.get(name)
                if life is not None and incarnation <= life.incarnation:
                    return True
        self.refusals.note(LAUNCHER, message)
        return False

    def _note_lives(self, lives: Iterable[Life]) -> None:
        for life in lives:
            known = self._lives.get(life.name)
            if known is None or known.incarnation < life.incarnation:
                self._lives[life.name] = life

    @staticmethod
    def _is_by(life: Life, event: Received) -> bool:
        """Return whether the newest life of the sender may say this. Frames of earlier lives may still arrive; the core
        knows whether their senders are alive."""
        match event.message:
            case Heartbeat(member):
                named = Life(member.name, member.role, member.incarnation)
                return named == life and event.incarnation == life.incarnation
        return event.incarnation <= life.incarnation and may_say(life.role, type(event.message))


def membership_of(me: str, incarnation: int, lives: Iterable[Life] = ()) -> Membership:
    """Return the membership of a process; `lives` are the lives that the launcher had started when a router starts."""
    return RouterMembership(me, incarnation, lives) if me == ROUTER else Membership(me, incarnation)


class Heard:
    """The number of the last frame from each life of each sender."""

    def __init__(self, me: str) -> None:
        self.refusals = Refusals(me)
        self._met: dict[str, int] = {}  # sender -> its newest incarnation that was met
        self._last: dict[tuple[str, int], int] = {}  # sender and its incarnation -> its last number

    def meet(self, sender: str, incarnation: int) -> None:
        """Drop what earlier lives of the sender still say. The frames themselves prove no life: any part could make
        others deaf to another one with a large number."""
        if incarnation > self._met.get(sender, 0):
            self._met[sender] = incarnation
            self._last = {key: last for key, last in self._last.items() if key[0] != sender or key[1] >= incarnation}

    def events(self, envelope: Envelope, is_launchers: bool = False) -> list[Received | LinkGap]:
        """Return the events that a frame makes: none if a later frame of its sender has arrived already.

        Such a frame is of an earlier life, comes a second time, or was overtaken when its link was made again; in
        the last case the frame that overtook it has told of the gap. `is_launchers` says whether the frame came on the
        launcher's connection: on that one nobody else speaks, and on no other does the launcher.
        """
        sender, incarnation, number = envelope.sender, envelope.incarnation, envelope.number
        if (sender == LAUNCHER) is not is_launchers:
            self.refusals.note(sender, envelope.message)
            return []
        received = Received(sender, envelope.message, incarnation)
        if number == UNNUMBERED:
            return [received]
        last = self._last.get((sender, incarnation), 0)
        if number <= last or incarnation < self._met.get(sender, 0):
            return []
        self._last[sender, incarnation] = number
        return [received] if number == last + 1 else [LinkGap(sender), received]


# --- What each peer may say


log = logging.getLogger("alignedserve.links")

_OWNER = (Heartbeat, Submit, Cancel, Acquit, Declare, Inquire, Resend, Acknowledge, Missed)
_HOLDER = (Heartbeat, Progress, Holding, Figures, Missed)
_WORKER = (*_HOLDER, Tokens, Used, AskPages, AskPrefix, Spoiled, Commit, Release, Offer, Pull, Decisions)
_OF_ROUTER = (
    *(Members, Refused, Infeasible, InLine, AttemptLost, Prefill, Cancel, Inquire, Retire, Figures, Missed),
    Decisions,
    Reserve,
    StepLate,
)

_BY_LAUNCHER = frozenset[type]({Started, Died, Retire})
_BY_ROLE: Mapping[Role, frozenset[type]] = MappingProxyType(
    {
        Role.ROUTER: frozenset(_OF_ROUTER),
        Role.GATEWAY: frozenset((*_OWNER, AskDecisions)),
        Role.JOBS: frozenset(_OWNER),
        Role.POOL: frozenset((*_HOLDER, LeasePages, GiveBack, Prefix, Batch, Kept, Inquire, Cancel)),
        Role.PREFILL: frozenset((*_WORKER, Keep)),
        Role.DECODE: frozenset((*_WORKER, Report, Cancel, Decline, AskBatch, Keep)),
    }
)


def may_say(role: Role | None, kind: type) -> bool:
    """Return whether a member of this role may send messages of this kind; None is the launcher."""
    return kind in _BY_LAUNCHER if role is None else kind in _BY_ROLE[role] or kind in FORM_SPEECH.get(role, ())


class Refusals:
    """What was dropped because its sender may not say it: counted, with one line in the log for each sender."""

    _MOST_LINES = 20  # a stranger may use many names

    def __init__(self, me: str) -> None:
        self._me = me
        self._senders: set[str] = set()
        self.count = 0

    def note(self, sender: str, message: object) -> None:
        self.count += 1
        if sender not in self._senders and len(self._senders) < self._MOST_LINES:
            self._senders.add(sender)
            # without the content, which may be a prompt
            log.warning("%s drops what %.60r may not say: %s", self._me, sender, type(message).__name__)
