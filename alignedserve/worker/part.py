"""What the parts of a worker's core have in common: the verbs that concern all of them.

Events are not among these verbs: a core's file has one table that says which part hears which event, in which order
(decode_worker/state.py, prefill_worker/state.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from alignedserve.protocol.commands import Command

REFRESH_S = 5.0  # after which a worker repeats what was not answered
REFRESH = "refresh"  # name of the timer

Act: TypeAlias = Callable[[float], list[Command]]  # what a core does in each turn, whatever has happened; now is given
# A handler of an event gets the event and the time; one of a message gets the message, the frame and the time.
Handler: TypeAlias = Callable[..., list[Command] | None]
# The handlers of each message and of each event by its class; of members that come and go by (class, role), too.
Events: TypeAlias = Mapping[object, tuple[Handler, ...]]


class FormPart(Protocol):
    """A part that a form of KV adds to a core: what it hears of, and what it does in each turn."""

    @property
    def events(self) -> Events: ...

    def act(self, now: float) -> list[Command]: ...


class CorePart:
    """A piece of a worker's core with state of its own. A verb that a part does not override does nothing."""

    def drop(self, request: str, attempt: int) -> list[Command]:
        """Forget the request up to this attempt, and release what the pool keeps for it."""
        return []

    def ask_again(self) -> None:
        """Prepare to repeat what was asked and not answered: the ask or its answer may have been lost."""

    def repeat(self, to: str) -> list[Command]:
        """Repeat what a member may have missed because a frame to it was lost."""
        return []

    @property
    def awaits_answer(self) -> bool:
        """Return whether this part may have to repeat something later, so that the refresh timer has to run."""
        return False
