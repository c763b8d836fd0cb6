"""The orders of a worker's rank 0 to the other ranks, which do on their devices and arenas what rank 0 does on its own;
and their reports to rank 0 on transfers, which go on beside that work.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, replace
from typing import TypeAlias

from alignedserve.core import Chunk, Decode, Draw, FormOrder, StepPlan
from alignedserve.protocol import wire
from alignedserve.protocol.commands import CopyIn, CopyOut, ReceiveKv, RunStep, SendKv
from alignedserve.protocol.events import KvReceived, KvSent
from alignedserve.protocol.form_orders import FORM_ORDERS
from alignedserve.protocol.messages import Member


@dataclass(frozen=True, slots=True)
class Meet:
    """Meet a pool, in which each rank has an arena of its own, or a worker to whose ranks KV goes."""

    member: Member


@dataclass(frozen=True, slots=True)
class PartFrom:
    member: Member


Copying: TypeAlias = CopyOut | CopyIn | FormOrder
Order: TypeAlias = RunStep | Copying | SendKv | ReceiveKv | Meet | PartFrom
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (*typing.get_args(Order), *FORM_ORDERS)}
Ended: TypeAlias = KvSent | KvReceived
_ENDED: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Ended)}
_Part = typing.TypeVar("_Part", Chunk, Decode, Draw)


def decode(frame: bytes) -> Order:
    """Return the order in this frame; raises WireError if there is none."""
    return typing.cast(Order, wire.unpack(frame, _KINDS))


def decode_ended(frame: bytes) -> Ended:
    return typing.cast(Ended, wire.unpack(frame, _ENDED))


def without_histories(plan: StepPlan) -> StepPlan:
    """Return the plan without what only sampling needs: other ranks than rank 0 sample nothing."""
    chunks, decodes = tuple(map(_without_history, plan.chunks)), tuple(map(_without_history, plan.decodes))
    return replace(plan, chunks=chunks, decodes=decodes, draws=tuple(map(_without_history, plan.draws)))


def _without_history(part: _Part) -> _Part:
    return part if part.history is None else replace(part, history=None)
