"""The parts of an output that has tool calls in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallPart:
    """The new part of a call: the first part has its id and name, later parts add to its arguments."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class CallText:
    """A piece of output taken apart: its plain text, and the parts of calls in it."""

    text: str = ""
    parts: tuple[CallPart, ...] = ()

    def __add__(self, other: CallText) -> CallText:
        return CallText(self.text + other.text, join_parts([*self.parts, *other.parts]))


def join_parts(parts: list[CallPart]) -> tuple[CallPart, ...]:
    """Return one part for each call, in the order of the calls."""
    whole: dict[int, CallPart] = {}
    for part in parts:
        before = whole.get(part.index)
        if before is not None:
            part = CallPart(part.index, before.arguments + part.arguments, before.id, before.name)
        whole[part.index] = part
    return tuple(whole.values())
