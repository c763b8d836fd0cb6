"""A worker's core: parts that hear what has happened, and a turn of acts that follows each event."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, Received
from alignedserve.protocol.messages import AskDecisions, Attempt, Decisions, Member
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import Act, CorePart


class Explaining(CorePart):
    """Tells gateways what this worker decided about a request, as far as it remembers."""

    def __init__(self, common: Common) -> None:
        self._decisions = common.decisions

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(sender, AskDecisions(number, request)):
                return [Send(sender, Decisions(number, now, self._decisions.about(request)))]
        return []


class WorkerCore:
    """The core that both workers share: a worker's core makes its parts, and then sets its parts and its turn."""

    def __init__(self, common: Common) -> None:
        self._common = common
        self._decisions = common.decisions
        self._turn: tuple[Act, ...] = ()

    def _compose(self, parts: tuple[CorePart, ...], turn: tuple[Act, ...]) -> None:
        self._common.roster.enlist(Explaining(self._common), *parts)
        self._turn = turn

    def handle(self, event: Event, now: float) -> list[Command]:
        """Let each part hear the event, then do what there is to do in each turn."""
        self._decisions.now = now
        commands = self._common.roster.hear(event, now)
        for act in self._turn:
            commands += act(now)
        return commands

    @property
    def parts(self) -> tuple[CorePart, ...]:
        """Return the parts in the order in which they hear of events."""
        return self._common.roster.parts

    @property
    def pool(self) -> Member | None:
        """Return the member whose pages are copied from and to."""
        return self._common.pool.member

    @property
    def attempts(self) -> list[Attempt]:
        """Return all attempts that are here."""
        return self._common.roster.attempts()

    @property
    def outputs(self) -> Mapping[Attempt, bool]:
        """Return the attempts whose outputs are kept, and whether they have ended."""
        return self._common.owners.outputs.attempts

    @property
    def pairs(self) -> list[int]:
        """Return each pair of the device once, as long as all is well."""
        return self._common.memory.pairs_with(self._common.roster.occupants())

    @property
    def kept_pairs(self) -> Collection[int]:
        """Return the pairs of full pages, to which nothing is to be written."""
        return self._common.memory.blocks.kept

    @property
    def num_shared_tokens(self) -> int:
        """Return how many tokens were not computed because the device had their KV for another request."""
        return self._common.pages.num_shared_tokens

    @property
    def free_share(self) -> float:
        """Return the share of the device's pairs that is free."""
        return self._common.memory.free_share

    @property
    def leased_pages(self) -> tuple[int, ...]:
        """Return the pages of the pool that are leased to this worker. A lease may outlast its request."""
        return self._common.writer.leased

    @property
    def slowdown(self) -> float:
        """Return how many times as long steps take as when the worker's profile was measured, as far as it knows."""
        return self._common.pace.slowdown

    @property
    def num_refused(self) -> int:
        """Return how many copies from the pool were not intact."""
        return self._common.faults.num_refused

    @property
    def num_failed_transfers(self) -> int:
        """Return how many transfers of KV from device to device failed."""
        return self._common.faults.num_failed_transfers
