"""What the parts of a worker's core have in common: the verbs that concern all parts.

Events are not among these verbs: a core's file has one table that says which part hears which event, in which order
(decode_worker/state.py, prefill_worker/state.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from alignedserve.protocol.commands import Command, Send, SetTimer
from alignedserve.protocol.events import LinkGap, MemberJoined, MemberLost, Received, TimerFired
from alignedserve.protocol.figures import DecodeSteps
from alignedserve.protocol.messages import Missed
from alignedserve.worker.log import WorkerLog
from alignedserve.worker.memory import PlainMemory
from alignedserve.worker.pool import PoolLink
from alignedserve.worker.prompt_queue import PromptQueue
from alignedserve.worker.requests import Requests

REFRESH_S = 5.0  # after which a worker repeats what was not answered
REFRESH = "refresh"  # name of the timer

Act: TypeAlias = Callable[[float], list[Command]]  # what a core does in each turn, whatever has happened; now is given
# A handler of an event gets the event and the time; a handler of a message gets the message, the frame and the time.
Handler: TypeAlias = Callable[..., list[Command] | None]
# The handlers of each message and of each event by its class; of members that come and go by (class, role), too.
Events: TypeAlias = Mapping[object, tuple[Handler, ...]]


class CorePart:
    """A piece of a worker's core with state of its own. A verb that a part does not override does nothing."""

    def ask_again(self) -> None:
        """Prepare to repeat what was asked and not answered: the ask or its answer may have been lost."""

    def repeat(self, to: str) -> list[Command]:
        """Repeat what a member may have missed because a frame to it was lost."""
        return []

    @property
    def awaits_answer(self) -> bool:
        """Return whether this part may have to repeat something later, so that the refresh timer has to run."""
        return False


class Repeats:
    """Repeats messages when a frame may have been lost: after a while of silence, or as soon as a gap is seen."""

    def __init__(self, pool: PoolLink, *parts: CorePart) -> None:
        self._pool, self._parts = pool, parts
        self._is_set = False  # the timer

    def timer_fired(self, event: TimerFired, now: float) -> None:
        if event.name == REFRESH:
            self._is_set = False
            self._ask_again()

    def missed(self, message: Missed, frame: Received, now: float) -> list[Command]:
        return self._repeat(frame.sender)

    def link_gap(self, event: LinkGap, now: float) -> list[Command]:
        return [Send(event.sender, Missed()), *self._repeat(event.sender)]

    def _repeat(self, to: str) -> list[Command]:
        pool = self._pool.member
        if pool is not None and to == pool.name:
            self._ask_again()
            return []
        return [command for part in self._parts for command in part.repeat(to)]

    def _ask_again(self) -> None:
        for part in self._parts:
            part.ask_again()

    def set_timer(self, now: float) -> list[Command]:
        """Set the refresh timer while anything is not answered. One timer at a time: else it would never fire."""
        if self._is_set or not any(part.awaits_answer for part in self._parts):
            return []
        self._is_set = True
        return [SetTimer(REFRESH, now + REFRESH_S)]


@dataclass(frozen=True)
class Worker:
    """What every part of a worker's core reads and changes."""

    here: Requests
    queue: PromptQueue  # takes prompts to State.WAITING
    memory: PlainMemory
    pool: PoolLink
    log: WorkerLog


class WorkerPart(CorePart):
    """A part that knows its worker. This is the one list of the names that all such parts use."""

    def __init__(self, worker: Worker) -> None:
        self._here, self._memory, self._pool, self._log = worker.here, worker.memory, worker.pool, worker.log
        here, memory, pool, log = worker.here, worker.memory, worker.pool, worker.log
        self._queue, self._candidates, self._batch = worker.queue, here.candidates, here.batch
        self._limits, self._steps, self._scheduler = memory.limits, memory.steps, memory.scheduler
        self._pace, self._policy, self._pages = memory.pace, memory.pace.policy, memory.pages
        self._holds, self._writer = pool.holds, pool.writer
        self._notes, self._counts, self._decisions = log.notes, log.counts, log.decisions


class FormPart(WorkerPart):
    """A part that a form of KV adds to a core (alignedserve/forms/). What a form does not override does nothing."""

    @property
    def events(self) -> Events:
        """Return the handlers of the form, by kind as in a core's table."""
        return {}

    def act(self, now: float) -> list[Command]:
        """Do what there is to do in each turn."""
        return []

    def make_room(self, now: float) -> list[Command]:
        """Let decodes leave ahead of need, before a step is planned."""
        return []

    @property
    def has_room_ahead(self) -> bool:
        """Return whether no decode is about to leave ahead of need, so that a step may be planned ahead."""
        return True

    def drop(self, request: str, attempt: int) -> None:
        """Forget what the form has of the request up to this attempt."""

    @property
    def blocks(self) -> list[int]:
        """Return the blocks of the device that the form has beside those of requests."""
        return []

    @property
    def held(self) -> Mapping[str, int]:
        """Return what is taken beside blocks, by name; nothing when no request is open."""
        return {}

    def counted(self, steps: DecodeSteps) -> DecodeSteps:
        """Add to the figures of a worker's steps what the form has counted."""
        return steps


class Forms:
    """The parts of forms as a core's table has them: one handler, for all events that some form hears."""

    def __init__(self, *parts: FormPart) -> None:
        self._events = [part.events for part in parts]
        self.kinds = tuple({kind: None for heard in self._events for kind in heard})

    def __call__(self, said: object, *when: object) -> list[Command]:
        """Let the forms hear an event or a message."""
        is_membership = isinstance(said, MemberJoined | MemberLost)
        kind = (type(said), said.member.role) if is_membership else type(said)
        handlers = [handler for heard in self._events for handler in heard.get(kind, ())]
        return [command for handler in handlers for command in handler(said, *when) or ()]
