"""The policy: how a deployment schedules. Every part has the same policy, on real workers and in the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

from alignedserve.forms.rules import FORMS_GO_WITH, FormOptions
from alignedserve.forms.rules import Cache as Cache
from alignedserve.forms.rules import Layout as Layout
from alignedserve.policies.guard import NO_POLICIES, OwnPolicies
from alignedserve.policies.kinds import PolicyKind
from alignedserve.scheduling.levels import AGE_S
from alignedserve.scheduling.orders import ORDERINGS, ByOwnPolicy, Order, Ordering
from alignedserve.scheduling.slo import Late


class SchedulerName(str, Enum):
    """The scheduler of a deployment: ours, or another system's (alignedserve/schedulers/)."""

    ALIGNED = "aligned"  # by promises; chats take the time, the seats and the memory of documents (BROS §4.2)
    BEST_FIT = "best_fit"  # the same; among about equally urgent chats, the best fill of what is left (AccelGen §4.4)
    BROS = "bros"  # the same as ALIGNED; chats by the slack that all their work leaves (BROS §4.1)
    SHORTEST = "shortest"  # the shortest remaining request first
    ALISE = "alise"  # by five levels of predicted steps; lower levels are swapped out for higher levels
    ACCELGEN = "accelgen"  # by slack, with the budget and the best fit of AccelGen's own formulas
    ACCELGEN_NO_BATCH = "accelgen_no_batch"  # the same, strictly by slack (AccelGen §6.3, /Batch)
    ACCELGEN_NO_ORDER = "accelgen_no_order"  # the same as ACCELGEN, by arrival (AccelGen §6.3, /Order)
    FCFS = "fcfs"  # by arrival; the newest request leaves where memory is short
    LONGEST = "longest"  # by arrival; the longest request of the old batch leaves (AlignedServe §3.4)
    ROUND_ROBIN = "round_robin"  # chats and documents in alternate steps, each by arrival
    MLFQ = "mlfq"  # by five levels of service; the request that was served most leaves
    FASTSERVE = "fastserve"  # the same; long prompts begin in lower levels, which are swapped out for higher levels
    APT_SERVE = "apt_serve"  # memory by pending time per memory (Apt-Serve §5)
    TGI = "tgi"  # by arrival; whole prompts interrupt decodes once enough prompts wait

    @property
    def order(self) -> Order:
        """Return the order in which the router, the pool and the workers serve requests that wait."""
        return _ORDERS.get(self, Order.FCFS)

    @property
    def is_accelgen(self) -> bool:
        """Return whether AccelGen's own rules hold: T_max for all times, and prompts of documents by slack.

        The slack of a document is spread over its steps, so the longest documents have the least. So our schedulers put
        the document with the fewest predicted steps first (ALISE §3.1)."""
        return self in _ACCELGEN


_ACCELGEN = (SchedulerName.ACCELGEN, SchedulerName.ACCELGEN_NO_BATCH, SchedulerName.ACCELGEN_NO_ORDER)
# Chats take seats and memory of documents: the others hold both for equal.
_RT_FIRST = (SchedulerName.ALIGNED, SchedulerName.BEST_FIT, SchedulerName.BROS)
_ORDERS: Mapping[SchedulerName, Order] = {  # the others serve by arrival
    SchedulerName.ALIGNED: Order.DUE,
    SchedulerName.BEST_FIT: Order.DUE,
    SchedulerName.BROS: Order.SLACK,
    SchedulerName.SHORTEST: Order.SHORTEST_REMAINING,
    SchedulerName.ALISE: Order.LEVELS,
    SchedulerName.ACCELGEN: Order.SLACK,
    SchedulerName.ACCELGEN_NO_BATCH: Order.SLACK,
}


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


_TURNS = (  # serve by class or by past service, whatever was promised
    SchedulerName.ROUND_ROBIN,
    SchedulerName.MLFQ,
    SchedulerName.FASTSERVE,
    SchedulerName.APT_SERVE,
)
_AT_ONCE_OR_BY_BLOCK = (Room.WHOLE, Room.GROWING)
_BY_SERVICE = {"chunking": (Chunking.NONE, Chunking.FIXED), "room": _AT_ONCE_OR_BY_BLOCK, "blocks": (Layout.PLAIN,)}
# What a value of an option asks of other options: option -> value -> other option -> values that go with both.
_GOES_WITH: Mapping[str, Mapping[Enum, Mapping[str, Sequence[Any]]]] = {
    "scheduler": {
        **dict.fromkeys(_TURNS, _BY_SERVICE),
        SchedulerName.ALISE: {"blocks": (Layout.PLAIN,)},  # requests are swapped out whole
        SchedulerName.TGI: {"chunking": (Chunking.NONE,)},
    },
    "room": {
        Room.GROWING: {"reserve": (0,)},
        Room.CHUNKS: {"reserve": (0,), "chunking": (Chunking.FIXED, Chunking.SLO)},
    },
    **FORMS_GO_WITH,
    "a policy for": {
        PolicyKind.ORDER: {
            "scheduler": (SchedulerName.ALIGNED, SchedulerName.BROS, SchedulerName.SHORTEST, SchedulerName.ALISE)
        },
        PolicyKind.PACKING: {"scheduler": [name for name in SchedulerName if name not in (*_TURNS, SchedulerName.TGI)]},
    },
}


@dataclass(frozen=True)
class Policy(FormOptions):
    scheduler: SchedulerName = SchedulerName.ALIGNED
    chunking: Chunking = Chunking.SLO
    room: Room = Room.GROWING
    grouping: Grouping = Grouping.ALIGNED
    reuse: bool = True  # whether prompts with the same prefix share KV
    late: Late = Late.DECAY
    expected_output: int = 256  # expected tokens of an output without a prediction
    age_s: float = AGE_S  # after which a best-effort request that is not served rises a level
    expected_chunk: int = 512  # tokens of a best-effort prompt in a step
    window_s: float = 0.75  # width in slack of the windows in which the best fit chooses (gamma)
    long_prompt: int = 4096  # tokens; by AccelGen's rules a single prompt of this length is unfinished at a time
    budget_pivots: float = 4.0  # most prompt tokens of a step with slo chunking, in multiples of S_pf
    predictor: Predictor = Predictor.HASH
    reserve: int = 0  # least tokens of memory that a request gets with room whole
    waiting_ratio: float = 0.0  # of TGI: waiting prompts per decode from which prompts interrupt decodes
    handoff: Handoff = Handoff.ROOM
    pinning: bool = True  # whether real-time requests that cannot wait go straight to a decode worker
    evict: bool = True  # whether preempted requests keep their KV elsewhere; otherwise they are recomputed
    helps: bool = True  # whether decode workers take prompts that pile up, and prefill workers decode where they can
    least_moved: int = 64  # least output tokens worth a move from a prefill worker that could decode them
    refuse_ttfts: float = 2.0  # most ttfts that a chat may wait for others in a burst, else it is refused; 0: none
    own: OwnPolicies = NO_POLICIES  # decide in place of what is above

    def of_part(self, own: OwnPolicies) -> Policy:
        """Return the same policy for a part with separate custom policies."""
        return self if own.source is None else replace(self, own=own)

    @property
    def problem(self) -> str | None:
        """Return why these options mean nothing together, or None."""
        asked = [(option, value, rules) for option, of in _GOES_WITH.items() for value, rules in of.items()]
        for option, value, rules in asked:
            is_set = self.own.decides(value) if isinstance(value, PolicyKind) else getattr(self, option) is value
            for other, values in rules.items() if is_set else ():
                if (given := getattr(self, other)) not in values:
                    wanted = " or ".join(map(_said, values))
                    return f"{option} {_said(value)} goes not with {other} {_said(given)}: set {other} to {wanted}"
        if self.waiting_ratio and self.scheduler is not SchedulerName.TGI:
            return f"waiting_ratio goes not with scheduler {self.scheduler.value}: set scheduler to tgi"
        return None

    @property
    def why_not_ahead(self) -> str | None:
        """Return why no step can be planned while the step before runs, or None."""
        if self.own.decides(PolicyKind.PACKING):
            return "a policy for packing is asked before each step"
        return self.block_use.why_not_ahead

    @cached_property  # read at every step
    def is_rt_first(self) -> bool:
        """Return whether real-time requests take seats and memory of best-effort requests; else both are equal."""
        return self.scheduler in _RT_FIRST and self.ordering.goes_by_promises

    @cached_property  # read at every step
    def ordering(self) -> Ordering:
        guard = self.own.guard(PolicyKind.ORDER)
        return ORDERINGS[self.scheduler.order] if guard is None else ByOwnPolicy(guard)

    @cached_property  # read at every step
    def swaps(self) -> bool:
        """Return whether requests take memory and seats from others of lower levels (ALISE, Algorithm 2; FastServe)."""
        return self.scheduler is SchedulerName.FASTSERVE or (self.ordering.has_levels and self.grows)

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

    @cached_property  # read at every step
    def is_plain(self) -> bool:
        """Return whether requests are served by arrival alone: neither promises nor the cost model count."""
        plain = self.ordering.is_by_arrival and not self.scheduler.is_accelgen
        return plain and self.chunking is not Chunking.SLO and self.room is not Room.CHUNKS


def _said(option: Any) -> str:
    return str(option.value if isinstance(option, Enum) else option)


DEFAULT_POLICY = Policy()
