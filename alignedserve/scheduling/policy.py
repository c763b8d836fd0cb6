"""The policy: how a deployment schedules. Every part has the same policy, on real workers and in the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from alignedserve.scheduling import orders
from alignedserve.scheduling.form_rules import PLAIN, BlockUse, Compression, block_use_of
from alignedserve.scheduling.levels import AGE_S
from alignedserve.scheduling.orders import Ordering
from alignedserve.scheduling.slo import Late

ALIGNED = "aligned"  # ours: by promises; chats take the time, the seats and the memory of documents


class Chunking(str, Enum):
    """The rule for how many prompt tokens a step runs."""

    NONE = "none"  # whole prompts, in separate steps before all decodes; a prompt longer than a step is cut
    FIXED = "fixed"  # chunks beside the decodes, up to a fixed number of tokens
    SLO = "slo"  # chunks beside the decodes, as the tightest promise allows (AccelGen §4.2)


class Room(str, Enum):
    """The rule for how much device memory a request gets with its seat."""

    WHOLE = "whole"  # for the longest possible output, so that no request is preempted
    GROWING = "growing"  # for the present tokens, then block by block; without room a request is preempted
    CHUNKS = "chunks"  # chunk by chunk; then as growing


class Grouping(str, Enum):
    """The rule for which requests decode together."""

    ALIGNED = "aligned"  # requests with about equally long prefixes, in steps where that is faster, or in batches
    FCFS = "fcfs"  # the next requests, of any length


class Handoff(str, Enum):
    """The rule for where a request goes when a prefill worker has run the prompt."""

    ROOM = "room"  # straight to a decode worker that has room and is reached directly; else to wait in the pool
    POOL = "pool"  # always to the pool, to wait for a batch (AlignedServe §3.5)
    DEVICE = "device"  # nowhere until a decode worker has room, and pulls the request (DistServe §4.3)


class Predictor(str, Enum):
    """The way in which output lengths are predicted. A length that the request states comes first (lengths.py)."""

    OFF = "off"  # every output is taken to have its longest possible length
    CONSTANT = "constant"  # every output is taken to be `expected_output` long
    HASH = "hash"  # by past prompts with about the same tokens (ALISE §3.1)
    ORACLE = "oracle"  # by the simulator, which knows the lengths


Takes = Mapping[str, Sequence[Any]]  # other options of a policy -> the values that go with this option


class Lends(str, Enum):
    """When prefill workers decode, too."""

    NEVER = "never"
    ALWAYS = "always"  # while they have room


@dataclass(frozen=True)
class SchedulerRules:
    """What other parts know of a scheduler. They do not load the code of ours, nor that of the papers'."""

    ordering: Ordering = orders.BY_ARRIVAL  # in which requests are served wherever some have to wait
    fills: bool = True  # each plan gives prompts their seats; else prompts are seated by arrival, before a plan
    is_rt_first: bool = False  # chats take seats and memory of documents; else both are equal
    swaps: tuple[Room, ...] = ()  # where requests take memory and seats of lower levels
    takes: Takes = field(default_factory=dict)


_ALIGNED = SchedulerRules(orders.BY_DUE, is_rt_first=True)


def rules_of(scheduler: str) -> SchedulerRules:
    """Return what other parts know of the scheduler of this name. Raises ConfigError."""
    if scheduler == ALIGNED:
        return _ALIGNED
    from alignedserve.scheduling.offered import of_papers, offered  # here: most deployments look for none

    papers = of_papers("rules")
    if papers is not None and scheduler in papers.RULES:
        found: SchedulerRules = papers.RULES[scheduler]
    else:
        found = offered(scheduler).rules
    return found


_OF_ROOM: Mapping[Room, Takes] = {
    Room.GROWING: {"reserve": (0,)},
    Room.CHUNKS: {"reserve": (0,), "chunking": (Chunking.FIXED, Chunking.SLO)},
}


@dataclass(frozen=True)
class Policy:
    scheduler: str = ALIGNED
    chunking: Chunking = Chunking.SLO
    room: Room = Room.GROWING
    grouping: Grouping = Grouping.ALIGNED
    reuse: bool = True  # whether prompts with the same prefix share KV
    late: Late = Late.DECAY
    expected_output: int = 256  # expected tokens of an output without a prediction
    age_s: float = AGE_S  # after which a best-effort request that is not served rises a level
    expected_chunk: int = 512  # tokens of a best-effort prompt in a step
    budget_pivots: float = 4.0  # most prompt tokens of a step with slo chunking, in multiples of S_pf
    predictor: Predictor = Predictor.HASH
    reserve: int = 0  # least tokens of memory that a request gets with room whole
    handoff: Handoff = Handoff.ROOM
    pinning: bool = True  # whether real-time requests that cannot wait go straight to a decode worker
    evict: bool = True  # whether preempted requests keep their KV elsewhere; otherwise they are recomputed
    helps: bool = True  # whether workers of one kind may take work of the other: else roles are strict
    lends: Lends = Lends.ALWAYS  # of work to prefill workers; decode workers take prompts that pile up anyway
    least_moved: int = 16  # least output tokens worth a move from a prefill worker that could decode them
    slo_scale: float = 1.0  # of what chats are promised: the times that steps are planned for
    refuse_ttfts: float = 2.0  # most ttfts that a chat may wait for others in a burst, else it is refused; 0: none
    memory: str = PLAIN  # of a decode worker: which requests share blocks, and in which form they are kept
    compression: Compression = Compression.OFF
    prefetch: bool = True  # whether prefill workers hold the KV of candidates
    candidate_share: float = 0.3  # most of a prefill worker's blocks for such KV

    @property
    def problem(self) -> str | None:
        """Return why these options mean nothing together, or None."""
        rules = self.rules
        options = {"scheduler": rules.takes, "room": _OF_ROOM.get(self.room, {}), "memory": self.block_use.takes}
        for option, takes in options.items():
            for other, values in takes.items():
                if getattr(self, other) not in values:
                    return _unfit(option, getattr(self, option), other, getattr(self, other), values)
        return None

    @property
    def prefill_decodes(self) -> bool:
        """Return whether prefill workers decode, too."""
        return self.helps and self.lends is not Lends.NEVER

    @property
    def why_not_ahead(self) -> str | None:
        """Return why no step can be planned while the step before runs, or None."""
        return self.block_use.why_not_ahead

    @cached_property
    def rules(self) -> SchedulerRules:
        return rules_of(self.scheduler)

    @cached_property  # read at every step
    def block_use(self) -> BlockUse:
        return block_use_of(self.memory)

    @cached_property  # read at every step
    def ordering(self) -> Ordering:
        return self.rules.ordering

    @cached_property  # read at every step
    def is_rt_first(self) -> bool:
        """Return whether real-time requests take seats and memory of best-effort requests; else both are equal."""
        return self.rules.is_rt_first

    @cached_property  # read at every step
    def swaps(self) -> bool:
        """Return whether requests take memory and seats from others of lower levels (ALISE, Algorithm 2; FastServe)."""
        return self.room in self.rules.swaps

    @property
    def batches_by_length(self) -> bool:
        """Return whether requests wait in the pool for a batch of about equal length.

        Otherwise the pool hands them out in order, and each worker chooses by length (schedulers/near_lengths.py)."""
        return self.grouping is Grouping.ALIGNED and self.handoff is Handoff.POOL

    @property
    def grows(self) -> bool:
        """Return whether a decode gets memory block by block."""
        return self.room is not Room.WHOLE

    @property
    def drops(self) -> bool:
        """Return whether requests get memory as they run, and give back what no layer reads any more: where the choice
        of each step gives memory, for KV, in blocks that hold nothing else."""
        is_chosen = not self.is_plain and self.chunking is not Chunking.NONE
        return is_chosen and self.grows and self.block_use.keeps_apart

    @property
    def is_plain(self) -> bool:
        """Return whether requests are served by arrival alone: neither promises nor the cost model count."""
        return not self.rules.fills and self.chunking is not Chunking.SLO and self.room is not Room.CHUNKS


def _unfit(option: str, value: Any, other: str, given: Any, fitting: Sequence[Any]) -> str:
    wanted = " or ".join(map(_said, fitting))
    return f"{option} {_said(value)} cannot be used with {other} {_said(given)}: set {other} to {wanted}"


def _said(option: Any) -> str:
    return str(option.value if isinstance(option, Enum) else option)


DEFAULT_POLICY = Policy()
