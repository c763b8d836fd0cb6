"""What rank 0 of a worker tells the others, for what it does on its device and in its arena, they do on theirs."""

from __future__ import annotations

import typing
from dataclasses import dataclass, replace
from typing import TypeAlias

from alignedserve import wire
from alignedserve.commands import CompressPage, CopyIn, CopyOut, CopySlots, ProjectKv, RunStep
from alignedserve.core import Chunk, Decode, StepPlan
from alignedserve.messages import Member


@dataclass(frozen=True, slots=True)
class MapArena:
    """The pool is there: each rank has an arena of its own."""

    pool: Member


@dataclass(frozen=True, slots=True)
class UnmapArena:
    pool: Member


Order: TypeAlias = RunStep | CopyOut | CopyIn | CopySlots | ProjectKv | CompressPage | MapArena | UnmapArena
_KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Order)}
_Part = typing.TypeVar("_Part", Chunk, Decode)


def encode(order: Order) -> bytes:
    return wire.pack(order)


def decode(frame: bytes) -> Order:
    """WireError where it is none."""
    return typing.cast(Order, wire.unpack(frame, _KINDS))


def without_histories(plan: StepPlan) -> StepPlan:
    """What a rank needs that samples nothing."""
    chunks, decodes = tuple(map(_without_history, plan.chunks)), tuple(map(_without_history, plan.decodes))
    return replace(plan, chunks=chunks, decodes=decodes)


def _without_history(part: _Part) -> _Part:
    return part if part.history is None else replace(part, history=None)
