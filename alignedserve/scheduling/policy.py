"""The policy: how a deployment schedules. Every part has the same policy, on real workers and in the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

from alignedserve.forms.rules import Cache as Cache
from alignedserve.forms.rules import FormOptions
from alignedserve.forms.rules import Layout as Layout
from alignedserve.policies.guard import NO_POLICIES, OwnPolicies
from alignedserve.policies.kinds import PolicyKind
from alignedserve.scheduling import orders
from alignedserve.scheduling.levels import AGE_S
from alignedserve.scheduling.orders import ByOwnPolicy, Ordering
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
    VLLM_V0 = "vllm_v0"  # the same: whole prompts alone whenever one fits, else decodes
    VLLM_V1 = "vllm_v1"  # the same: decodes, then chunks of prompts
    ORCA = "orca"  # the same: whole prompts beside decodes
    SARATHI = "sarathi"  # the same: decodes, then chunks of prompts that have begun, then of new ones
    FASTGEN = "fastgen"  # the same: prompts split and composed, with memory chunk by chunk
    DISTSERVE = "distserve"  # the same: on prefill workers and decode workers apart
    LONGEST = "longest"  # by arrival; the longest request of the old batch leaves (AlignedServe §3.4)
    ROUND_ROBIN = "round_robin"  # chats and documents in alternate steps, each by arrival
    MLFQ = "mlfq"  # by five levels of service; the request that was served most leaves
    FASTSERVE = "fastserve"  # the same; long prompts begin in lower levels, which are swapped out for higher levels
    APT_SERVE = "apt_serve"  # memory by pending time per memory (Apt-Serve §5)
    TGI = "tgi"  # by arrival; whole prompts interrupt decodes once enough prompts wait


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
_AT_ONCE_OR_BY_BLOCK = (Room.WHOLE, Room.GROWING)
_KV, _PLAIN = {"cache": (Cache.KV,)}, {"blocks": (Layout.PLAIN,)}
_BY_SERVICE = {"chunking": (Chunking.NONE, Chunking.FIXED), "room": _AT_ONCE_OR_BY_BLOCK, **_PLAIN}
_ORDER_TOO = (PolicyKind.ORDER, PolicyKind.SCHEDULER)


@dataclass(frozen=True)
class SchedulerRules:
    """What other parts know of a scheduler. They do not load its code."""

    ordering: Ordering = orders.BY_ARRIVAL  # in which requests are served wherever some have to wait
    fills: bool = True  # each plan gives prompts their seats; else prompts are seated by arrival, before a plan
    is_rt_first: bool = False  # chats take seats and memory of documents; else both are equal
    swaps: tuple[Room, ...] = ()  # where requests take memory and seats of lower levels
    own: tuple[PolicyKind, ...] = (PolicyKind.SCHEDULER,)  # what a custom policy may decide
    takes: Takes = field(default_factory=lambda: _KV)


_FCFS = SchedulerRules(fills=False)
_TURNS = SchedulerRules(fills=False, own=(), takes=_KV | _BY_SERVICE)  # by class or past service, not by promises
RULES: dict[SchedulerName, SchedulerRules] = {
    SchedulerName.ALIGNED: SchedulerRules(orders.BY_DUE, is_rt_first=True, own=_ORDER_TOO, takes={}),
    SchedulerName.BEST_FIT: SchedulerRules(orders.BY_DUE, is_rt_first=True, takes={}),
    SchedulerName.BROS: SchedulerRules(orders.BY_SLACK, is_rt_first=True, own=_ORDER_TOO, takes={}),
    SchedulerName.SHORTEST: SchedulerRules(orders.BY_REMAINING, own=_ORDER_TOO),
    SchedulerName.ALISE: SchedulerRules(  # "defers" newcomers where memory is given at once (ALISE §4.3)
        orders.BY_LEVELS, swaps=(Room.GROWING, Room.CHUNKS), own=_ORDER_TOO, takes=_KV | _PLAIN
    ),
    SchedulerName.ACCELGEN: SchedulerRules(orders.BY_ACCELGEN),
    SchedulerName.ACCELGEN_NO_BATCH: SchedulerRules(orders.BY_ACCELGEN),
    SchedulerName.ACCELGEN_NO_ORDER: SchedulerRules(),
    SchedulerName.FCFS: _FCFS,
    SchedulerName.VLLM_V0: _FCFS,
    SchedulerName.VLLM_V1: _FCFS,
    SchedulerName.ORCA: _FCFS,
    SchedulerName.SARATHI: _FCFS,
    SchedulerName.FASTGEN: _FCFS,
    SchedulerName.DISTSERVE: _FCFS,
    SchedulerName.LONGEST: _FCFS,
    SchedulerName.ROUND_ROBIN: _TURNS,
    SchedulerName.MLFQ: _TURNS,
    SchedulerName.FASTSERVE: replace(_TURNS, swaps=_AT_ONCE_OR_BY_BLOCK),
    SchedulerName.APT_SERVE: replace(_TURNS, takes=_BY_SERVICE),
    SchedulerName.TGI: replace(_TURNS, takes=_KV | {"chunking": (Chunking.NONE,)}),
}
_OF_ROOM: Mapping[Room, Takes] = {
    Room.GROWING: {"reserve": (0,)},
    Room.CHUNKS: {"reserve": (0,), "chunking": (Chunking.FIXED, Chunking.SLO)},
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
    slo_scale: float = 1.0  # of what chats are promised: the times that steps are planned for
    refuse_ttfts: float = 2.0  # most ttfts that a chat may wait for others in a burst, else it is refused; 0: none
    own: OwnPolicies = NO_POLICIES  # decide in place of what is above

    def of_part(self, own: OwnPolicies) -> Policy:
        """Return the same policy for a part with separate custom policies."""
        return self if own.source is None else replace(self, own=own)

    @property
    def problem(self) -> str | None:
        """Return why these options mean nothing together, or None."""
        rules = RULES[self.scheduler]
        options = {"scheduler": rules.takes, "room": _OF_ROOM.get(self.room, {}), **self.block_use.takes}
        for option, takes in options.items():
            for other, values in takes.items():
                if getattr(self, other) not in values:
                    return _unfit(option, getattr(self, option), other, getattr(self, other), values)
        for kind in _ORDER_TOO:
            if self.own.decides(kind) and kind not in rules.own:
                names = [name for name, others in RULES.items() if kind in others.own]
                return _unfit("a policy for", kind.label, "scheduler", self.scheduler, names)
        if self.waiting_ratio and self.scheduler is not SchedulerName.TGI:
            return f"waiting_ratio goes not with scheduler {self.scheduler.value}: set scheduler to tgi"
        return None

    @property
    def why_not_ahead(self) -> str | None:
        """Return why no step can be planned while the step before runs, or None."""
        if self.own.decides(PolicyKind.SCHEDULER):
            return "a policy for scheduler is asked before each step"
        return self.block_use.why_not_ahead

    @cached_property
    def rules(self) -> SchedulerRules:
        """Return what holds of the scheduler; in a custom order both classes are equal, and none is swapped out."""
        guard = self.own.guard(PolicyKind.ORDER)
        return RULES[self.scheduler] if guard is None else SchedulerRules(ByOwnPolicy(guard))

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
    return f"{option} {_said(value)} goes not with {other} {_said(given)}: set {other} to {wanted}"


def _said(option: Any) -> str:
    return str(option.value if isinstance(option, Enum) else option)


DEFAULT_POLICY = Policy()
