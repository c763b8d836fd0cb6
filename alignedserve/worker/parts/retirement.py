"""What a worker takes. One that retires takes nothing new, and stops when all its requests have gone on and owners have
their tokens; one that is reserved takes what the router sends, and nothing of the pool."""

from __future__ import annotations

from alignedserve.core import Role
from alignedserve.protocol.commands import Command, End
from alignedserve.protocol.events import Event, MemberLost, Received
from alignedserve.protocol.messages import Reserve, Retire
from alignedserve.worker.in_flight import StepsInFlight
from alignedserve.worker.outputs import Outputs
from alignedserve.worker.parts.part import CorePart, Roster


class Retirement(CorePart):
    def __init__(self, roster: Roster, steps: StepsInFlight, outputs: Outputs) -> None:
        self._roster, self._steps, self._outputs = roster, steps, outputs
        self.is_retiring = False  # the worker takes nothing new
        self.is_reserved = False  # nothing joins but the prompts that the router sends, which run alone

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(message=Retire()):
                self.is_retiring = True
            case Received(message=Reserve(is_on)):
                self.is_reserved = is_on
            case MemberLost(member) if member.role is Role.ROUTER:
                self.is_reserved = False  # its next life says so again
        return []

    def end(self, now: float) -> list[Command]:
        """End the worker if it retires and is idle."""
        is_idle = self.is_retiring and self._steps.running is None and not self._outputs.num_kept
        return [End()] if is_idle and not self._roster.attempts() else []
