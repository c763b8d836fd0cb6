"""What a process derives from the frames that reach it: who came and went, and which frames did not arrive.

Shared by the shell, the links and the simulator; no IO.
"""

from __future__ import annotations

from alignedserve.errors import CastOut
from alignedserve.protocol.events import LinkGap, MemberJoined, MemberLost, Received
from alignedserve.protocol.messages import ROUTER, Member
from alignedserve.protocol.wire import Envelope

UNNUMBERED = 0  # heartbeats, which come from a thread of their own


MOST_HELD = 10_000  # frames of one member that has not been announced


class Membership:
    """The members, as the router announced them last.

    A core hears from a member between its MemberJoined and its MemberLost only. A frame may overtake the
    announcement of its sender, which comes on another link: it waits for that. The router announces
    everybody and is announced by nobody else, so what it says never waits, and it never waits itself.
    """

    def __init__(self, me: str, incarnation: int) -> None:
        self._me, self._incarnation = me, incarnation
        self._members: dict[str, Member] = {}
        self._held: dict[str, list[Received]] = {}  # sender -> what waits for its announcement

    def announced(self, members: tuple[Member, ...]) -> list[MemberLost | MemberJoined | Received | LinkGap]:
        """Who has gone, then who is new, each with what waited for it; a new incarnation is both.

        CastOut where this process is not named: it was taken for dead, and what it had has been given to others.
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
        """Whether its core may hear this now; otherwise it is kept until its sender is announced."""
        if ROUTER in (self._me, event.sender):
            return True
        member = self._members.get(event.sender)
        if member is not None and member.incarnation == event.incarnation:
            return True
        held = self._held.setdefault(event.sender, [])
        if len(held) <= MOST_HELD:  # one more than is ever delivered: so it is known that some are missing
            held.append(event)
        return False

    def _waited(self, member: Member) -> list[Received | LinkGap]:
        held = self._held.pop(member.name, [])
        of_this_life = [event for event in held if event.incarnation == member.incarnation]
        return [*of_this_life[:MOST_HELD], *([LinkGap(member.name)] if len(held) > MOST_HELD else [])]


class Heard:
    """The number of the last frame from each sender."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}  # sender -> its incarnation and its last number

    def events(self, envelope: Envelope) -> list[Received | LinkGap]:
        """What a frame tells its receiver: nothing, if its sender has said something later already.

        Such a frame is of an earlier life, comes a second time, or was overtaken when its link was made anew;
        in the last case the one that overtook it has told of the gap.
        """
        sender, incarnation, number = envelope.sender, envelope.incarnation, envelope.number
        received = Received(sender, envelope.message, incarnation)
        if number == UNNUMBERED:
            return [received]
        life, last = self._last.get(sender, (0, 0))
        if incarnation < life:
            return []
        if incarnation > life:
            last = 0
        elif number <= last:
            return []
        self._last[sender] = (incarnation, number)
        return [received] if number == last + 1 else [LinkGap(sender), received]
