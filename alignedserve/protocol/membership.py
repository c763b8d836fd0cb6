"""Learn from the frames that reach a process which members came or went, and which frames were lost.

The turn loop, the links and the simulator share this file; it does no IO.
"""

from __future__ import annotations

from alignedserve.errors import CastOut
from alignedserve.protocol.events import LinkGap, MemberJoined, MemberLost, Received
from alignedserve.protocol.messages import ROUTER, Member
from alignedserve.protocol.wire import Envelope

UNNUMBERED = 0  # the number of a heartbeat, which comes from a thread of its own
MOST_HELD = 10_000  # frames kept of a member that has not been announced


class Membership:
    """The members, as the router announced them last.

    A core hears from a member only between its MemberJoined and its MemberLost. A frame may overtake the
    announcement of its sender, which comes on another link: then the frame waits for it. The router announces
    all members, so its own messages never wait, and the router itself holds no messages back.
    """

    def __init__(self, me: str, incarnation: int) -> None:
        self._me, self._incarnation = me, incarnation
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
        """Return whether the core may hear this event now; otherwise it is kept until its sender is announced."""
        if ROUTER in (self._me, event.sender):
            return True
        member = self._members.get(event.sender)
        if member is not None and member.incarnation == event.incarnation:
            return True
        held = self._held.setdefault(event.sender, [])
        if len(held) <= MOST_HELD:  # one frame more than is ever delivered: it shows that some are missing
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
        """Return the events that a frame makes: none if a later frame of its sender has arrived already.

        Such a frame is of an earlier life, comes a second time, or was overtaken when its link was made anew; in
        the last case the frame that overtook it has told of the gap.
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
