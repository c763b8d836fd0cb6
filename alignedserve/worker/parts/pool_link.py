"""The pool as a worker knows it: which member it is, and how the worker writes to it."""

from __future__ import annotations

from alignedserve.core import Role
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, MemberJoined, MemberLost
from alignedserve.protocol.messages import Member, Message, Spoiled
from alignedserve.worker.parts.part import CorePart


class PoolLink(CorePart):
    """The member whose pages this worker copies from and to. It must be the last part that hears of a lost member."""

    def __init__(self) -> None:
        self.member: Member | None = None

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case MemberJoined(member) if member.role is Role.POOL:
                self.member = member
            case MemberLost(member) if member == self.member:
                self.member = None
        return []

    def send(self, message: Message) -> list[Command]:
        """Send the message to the pool; return no command where there is no pool."""
        return [] if self.member is None else [Send(self.member.name, message)]

    def tell_spoiled(self, pages: tuple[int, ...]) -> list[Command]:
        """Tell the pool that these pages do not hold what their names say, or may not."""
        return self.send(Spoiled(pages)) if pages else []
