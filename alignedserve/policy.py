"""How a deployment schedules: the same in every part, on real workers and in the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from alignedserve.slo import Late


class Order(str, Enum):
    """Who goes first, wherever somebody has to wait."""

    SLACK = "slack"  # by promises: slo.in_order
    FCFS = "fcfs"  # by arrival


class Steps(str, Enum):
    """What shares a step."""

    MIXED = "mixed"  # decodes, and chunks of prompts beside them
    PROMPTS_FIRST = "prompts_first"  # whole prompts alone while there are any, else decodes


class Room(str, Enum):
    """What a request gets of a device cache when it is seated."""

    WHOLE = "whole"  # for its longest possible output: nobody has to leave
    GROWING = "growing"  # for what it has, then block by block; the newest leaves for want of room


class Grouping(str, Enum):
    """Who decodes together, of those that wait in the pool."""

    ALIGNED = "aligned"  # prefixes of about one length
    FCFS = "fcfs"  # who is next, whatever its length


class Compression(str, Enum):
    """Of full pages of KV, of those who wait in the pool."""

    OFF = "off"
    AUTO = "auto"  # while there are few free pages, of those with longest to wait first
    INT8 = "int8"  # always


class Entries(str, Enum):
    """What the pool keeps of a request's tokens."""

    KV = "kv"
    HIDDEN = "hidden"  # each layer's input after its norm; K and V are made of it when the request joins


@dataclass(frozen=True)
class Policy:
    order: Order = Order.SLACK
    steps: Steps = Steps.MIXED
    room: Room = Room.WHOLE
    grouping: Grouping = Grouping.ALIGNED
    reuse: bool = True  # of the KV of prompts that begin alike
    late: Late = Late.DECAY
    token_group: int = 1  # tokens of a real-time request that are due together
    expected_output: int = 256  # tokens that a best-effort request is taken to produce
    expected_chunk: int = 512  # tokens of its prompt in a step
    compression: Compression = Compression.OFF
    entries: Entries = Entries.KV
    rt_reserve: float = 0.1  # share of the pool's pages that only real-time requests get

    def reserved(self, num_pages: int) -> int:
        return int(self.rt_reserve * num_pages)


DEFAULT_POLICY = Policy()
