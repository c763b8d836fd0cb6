"""The policy: how a deployment schedules. Every part has the same policy, on real workers and in the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from alignedserve.policies.guard import NO_POLICIES, OwnPolicies
from alignedserve.policies.kinds import PolicyKind
from alignedserve.scheduling.levels import AGE_S
from alignedserve.scheduling.orders import ORDERINGS, ByKey, ByOwnPolicy, Ordering
from alignedserve.scheduling.orders import Order as Order
from alignedserve.scheduling.slo import Late


class Chunking(str, Enum):
    """The rule for how much of the prompts one step runs."""

    NONE = "none"  # whole prompts, in separate steps before all decodes; a prompt longer than a step is cut
    FIXED = "fixed"  # chunks beside the decodes, up to a fixed number of tokens
    SLO = "slo"  # chunks beside the decodes, as the tightest promise allows (AccelGen §4.2)


class PromptChoice(str, Enum):
    """The rule for which prompts fill a step, among those that are not urgent."""

    IN_ORDER = "in_order"  # one after the other
    MULTI_RESOURCE = (
        "multi_resource"  # among about equally urgent prompts, the one that best fills the time and memory left
    )


class Room(str, Enum):
    """The rule for how much device memory a request gets when it is seated."""

    WHOLE = "whole"  # for its longest possible output, so that no request is preempted
    GROWING = "growing"  # for its present tokens, then block by block; without room a request is preempted (Packing)
    CHUNKS = "chunks"  # for each chunk when it runs; then as growing


class Packing(str, Enum):
    """The rule for which seated requests a decode worker runs in a step, and which it preempts when memory is short."""

    FCFS = "fcfs"  # by arrival; the newest is preempted
    LONGEST = "longest"  # by arrival; the longest of the old batch is preempted (AlignedServe §3.4)
    ROUND_ROBIN = "round_robin"  # real-time and best-effort requests in alternate steps, by arrival
    MLFQ = "mlfq"  # the least served requests first, in five levels, whatever their class
    SKIP_JOIN = "skip_join"  # the same, but a long prompt starts in a lower level (FastServe)
    KNAPSACK = "knapsack"  # by pending time per memory (Apt-Serve §5)
    RT_BE = "rt_be"  # by promises; real-time requests get the memory of best-effort ones (BROS §4.2)

    @property
    def takes_turns(self) -> bool:
        """Return whether requests run by their class or by what they were served, whatever they were promised."""
        return self in (Packing.ROUND_ROBIN, Packing.MLFQ, Packing.SKIP_JOIN, Packing.KNAPSACK)


class Grouping(str, Enum):
    """The rule for which requests that wait in the pool decode together."""

    ALIGNED = "aligned"  # requests with prefixes of about one length
    FCFS = "fcfs"  # the next requests, whatever their lengths


class Handoff(str, Enum):
    """The rule for where a prompt goes that is through on a prefill worker."""

    ROOM = "room"  # straight to a decode worker that has room; else it waits in the pool, grouped where that buys time
    POOL = "pool"  # always to the pool, where it waits for its batch (AlignedServe §3.5)
    DEVICE = "device"  # it stays on its device until a decode worker has room and pulls it (DistServe §4.3)


class Compression(str, Enum):
    """The rule for when full pages of waiting requests become int8."""

    OFF = "off"
    AUTO = "auto"  # while free pages are few: longest expected wait first
    INT8 = "int8"  # always


class Predictor(str, Enum):
    """The way in which output lengths are predicted. A length that the request states outweighs it (lengths.py)."""

    OFF = "off"  # every output is taken to be as long as it may be
    CONSTANT = "constant"  # every output is taken to be `expected_output` long
    HASH = "hash"  # by past prompts with about the same tokens (ALISE §3.1)
    MINILM = "minilm"  # by past prompts with about the same meaning, which a text encoder finds
    ORACLE = "oracle"  # by the simulator, which knows the lengths


class Layout(str, Enum):
    """The rule for which requests' tokens a block pair holds."""

    PLAIN = "plain"  # those of one request
    BIDIRECTIONAL = "bidirectional"  # a real-time request from the left, a best-effort one from the right (BROS §5)


class Cache(str, Enum):
    """The form in which a decode worker keeps a request's tokens on its device."""

    KV = "kv"
    HYBRID = "hybrid"  # KV, or for some requests hidden vectors: half the memory, and time in every step


class PlainPairs:
    """The plain use of block pairs on a decode worker: each holds the KV of one request."""

    why_not_ahead: str | None = None  # why no step can be planned while the one before it runs
    why_not_direct: str | None = None  # why no KV can come from device to device
    keeps_hidden = False  # whether some requests may be kept as hidden vectors
    keeps_apart = True  # whether each request has pairs of its own, for KV alone

    def num_places(self, num_slots: int) -> int:
        """Return how many tokens without a slot a worker keeps on the host, if its device has so many slots."""
        return 0

    def problem(self, policy: Policy) -> str | None:
        """Return why the policy means nothing together with such pairs."""
        return None


class SharedPairs(PlainPairs):
    """Two requests may be in one pair (BROS §5)."""

    why_not_ahead = "with blocks bidirectional a chat may take slots of any request before each step"
    why_not_direct = "KV that comes directly needs pairs of its own: schedule.blocks bidirectional shares them"
    keeps_apart = False

    def __init__(self, checkpoints: float) -> None:
        self._checkpoints = checkpoints

    def num_places(self, num_slots: int) -> int:
        return int(self._checkpoints * num_slots)

    def problem(self, policy: Policy) -> str | None:
        if policy.room is not Room.GROWING:
            return "blocks bidirectional gives memory block by block: it needs room growing"
        if policy.ordering.has_levels:
            return "order levels swaps requests out whole: it needs blocks plain"
        if policy.packing.takes_turns:
            return f"packing {policy.packing.value} has whole pairs, and recomputes: it needs blocks plain"
        if policy.cache is Cache.HYBRID:
            return "cache hybrid has requests that are kept or dropped whole: it needs blocks plain"
        return None


class HybridPairs(PlainPairs):
    """Some requests may be kept as hidden vectors (Apt-Serve §4.3)."""

    why_not_ahead = "with cache hybrid what is kept of a request may change before each step"
    keeps_hidden = True
    keeps_apart = False

    def problem(self, policy: Policy) -> str | None:
        if policy.packing is not Packing.KNAPSACK and not policy.is_rt_first:
            return "cache hybrid goes by how long requests have waited: it needs packing knapsack, or rt_be by slack"
        if policy.room is Room.CHUNKS:
            return "cache hybrid decides once what a prompt is kept as: it needs room whole or growing"
        return None


_PLAIN, _HYBRID = PlainPairs(), HybridPairs()


@dataclass(frozen=True)
class Policy:
    order: Order = Order.DUE
    chunking: Chunking = Chunking.SLO
    selection: PromptChoice = PromptChoice.IN_ORDER
    room: Room = Room.GROWING
    grouping: Grouping = Grouping.ALIGNED
    packing: Packing = Packing.RT_BE
    reuse: bool = True  # whether prompts with the same prefix share KV
    late: Late = Late.DECAY
    token_group: int = 1  # tokens of a real-time request that are due together
    expected_output: int = 256  # expected tokens of an output without a prediction
    age_s: float = AGE_S  # a best-effort request rises a level when it is unserved for so long
    expected_chunk: int = 512  # tokens of a best-effort prompt in a step
    window_s: float = 0.75  # width in slack of the windows in which multi_resource chooses (gamma)
    long_prompt: int = 4096  # tokens; with slo chunking only one so long prompt is unfinished at a time
    budget_pivots: float = 4.0  # most prompt tokens of a step with slo chunking, in multiples of S_pf
    as_in_paper: bool = False  # AccelGen's own budget, slack and distance, in place of ours
    compression: Compression = Compression.OFF
    rt_reserve: float = 0.1  # share of the pool's pages that only real-time requests get
    predictor: Predictor = Predictor.HASH
    blocks: Layout = Layout.PLAIN
    cache: Cache = Cache.KV
    reserve: int = 0  # least tokens of memory that a request gets with room whole
    waiting_ratio: float = 0.0  # waiting prompts per decode from which prompts interrupt decodes (TGI)
    handoff: Handoff = Handoff.ROOM
    pinning: bool = True  # whether real-time requests that cannot wait go straight to a decode worker
    evict: bool = True  # whether preempted requests keep their KV elsewhere; otherwise it is computed anew
    prefetch: bool = True  # whether prefill workers hold the KV of candidates
    candidate_share: float = 0.3  # most of a prefill worker's pairs for such KV
    helps: bool = True  # whether decode workers take prompts of chats that pile up before prefill workers
    refuse_ttfts: float = 2.0  # most ttfts that a chat may wait for others in a burst, else it is refused; 0: none
    checkpoints: float = 1.0  # tokens without a slot that a worker keeps on the host / tokens with a slot
    own: OwnPolicies = NO_POLICIES  # decide in place of what is above

    def of_part(self, own: OwnPolicies) -> Policy:
        """Return the same policy for a part that has policies of one's own for itself."""
        return self if own.source is None else replace(self, own=own)

    def reserved(self, num_pages: int) -> int:
        return int(self.rt_reserve * num_pages)

    @property
    def problem(self) -> str | None:
        """Return why these options mean nothing together, or None."""
        if self.selection is PromptChoice.MULTI_RESOURCE and isinstance(self.ordering, ByKey):
            return "selection multi_resource compares requests about as urgent: it needs order due, slack or fcfs"
        if self.room is Room.CHUNKS and self.chunking is Chunking.NONE:
            return "room chunks has no chunks with chunking none: it needs chunking fixed or slo"
        if self.as_in_paper and (self.chunking, self.selection) == (Chunking.FIXED, PromptChoice.IN_ORDER):
            return "as_in_paper changes slo chunking and selection multi_resource: it needs one of them"
        if (self.packing is Packing.RT_BE) == self.ordering.is_by_arrival:
            return "packing rt_be goes by order due, slack, shortest_remaining or levels, and every other by fcfs"
        if self.packing.takes_turns and not self.is_plain:
            return f"packing {self.packing.value} needs chunking fixed or none, selection in_order, and not room chunks"
        if (problem := self.pairs.problem(self)) is not None:
            return problem
        if self.reserve and self.room is not Room.WHOLE:
            return "reserve is memory that is given at once: it needs room whole"
        if self.waiting_ratio and (self.chunking is not Chunking.NONE or self.packing is not Packing.FCFS):
            return "waiting_ratio is when whole prompts interrupt decodes: it needs chunking none and packing fcfs"
        if self.own.decides(PolicyKind.PACKING) and (self.packing.takes_turns or self.waiting_ratio):
            return "a policy for packing needs packing rt_be, longest or fcfs, and no waiting_ratio: others take turns"
        return None

    @property
    def why_not_ahead(self) -> str | None:
        """Return why no step can be planned while the one before it runs, or None."""
        if self.own.decides(PolicyKind.PACKING):
            return "a policy for packing is asked before each step"
        return self.pairs.why_not_ahead

    @cached_property  # read at every step
    def is_rt_first(self) -> bool:
        """Return whether real-time requests take seats and memory of best-effort ones; else both are equal."""
        return self.packing is Packing.RT_BE and self.ordering.goes_by_promises and not self.as_in_paper

    @cached_property  # read at every step
    def ranks_be_by_slack(self) -> bool:
        """Return whether best-effort prompts that are not urgent go by slack.

        Their slack is spread over their steps: the longest have the least. So only AccelGen's own rules go by it; ours
        take those first that are soonest through (ALISE §3.1).
        """
        return self.as_in_paper

    @cached_property  # read at every step
    def pairs(self) -> PlainPairs:
        """Return how decode workers use their block pairs."""
        if self.blocks is Layout.BIDIRECTIONAL:
            return SharedPairs(self.checkpoints)
        return _HYBRID if self.cache is Cache.HYBRID else _PLAIN

    @cached_property  # read at every step
    def ordering(self) -> Ordering:
        guard = self.own.guard(PolicyKind.ORDER)
        return ORDERINGS[self.order] if guard is None else ByOwnPolicy(guard)

    @cached_property  # read at every step
    def swaps(self) -> bool:
        """Return whether requests take memory and seats from others of lower levels (ALISE, Algorithm 2; FastServe)."""
        return self.packing is Packing.SKIP_JOIN or (self.ordering.has_levels and self.grows)

    @property
    def grows(self) -> bool:
        """Return whether a decode gets its memory block by block."""
        return self.room is not Room.WHOLE

    @property
    def drops(self) -> bool:
        """Return whether requests get memory as they run, and give back what no layer reads any more: where a choice
        of each step gives it to them, as KV, in pairs of their own."""
        is_chosen = not self.is_plain and self.chunking is not Chunking.NONE
        return is_chosen and self.grows and self.pairs.keeps_apart

    @cached_property  # read at every step
    def is_plain(self) -> bool:
        """Return whether requests are served as they come: neither promises nor the cost model count."""
        plain = self.ordering.is_by_arrival and self.selection is PromptChoice.IN_ORDER
        return plain and self.chunking is not Chunking.SLO and self.room is not Room.CHUNKS


DEFAULT_POLICY = Policy()
