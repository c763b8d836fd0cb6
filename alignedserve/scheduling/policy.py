"""How a deployment schedules: the same in every part, on real workers and in the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from alignedserve.scheduling.levels import AGE_S
from alignedserve.scheduling.orders import ORDERINGS, ByKey, Ordering
from alignedserve.scheduling.orders import Order as Order
from alignedserve.scheduling.precedence import Precedence, RealTimeFirst
from alignedserve.scheduling.slo import Late


class Chunking(str, Enum):
    """How much of the prompts a step runs."""

    NONE = "none"  # whole prompts, in steps of their own before all decodes; one longer than any step is cut
    FIXED = "fixed"  # beside the decodes, up to a fixed number of tokens
    SLO = "slo"  # beside the decodes, as much as the tightest promise leaves time for (AccelGen §4.2)


class Choice(str, Enum):
    """Which prompts fill a step, of those that are not urgent."""

    IN_ORDER = "in_order"  # one after the other
    MULTI_RESOURCE = "multi_resource"  # of those about as urgent, who best fills what is left of time and memory


class Room(str, Enum):
    """What a request gets of a device cache when it is seated."""

    WHOLE = "whole"  # for its longest possible output: nobody has to leave
    GROWING = "growing"  # for what it has, then block by block; for want of room somebody leaves (Packing)
    CHUNKS = "chunks"  # for the chunk that runs, and so on; then as growing


class Packing(str, Enum):
    """Who of those that are seated on a decode worker runs in a step, and who leaves for want of memory."""

    FCFS = "fcfs"  # by arrival; the newest leaves
    LONGEST = "longest"  # by arrival; the longest of the old batch leaves (AlignedServe §3.4)
    ROUND_ROBIN = "round_robin"  # real-time and best-effort ones in alternate steps, by arrival
    MLFQ = "mlfq"  # those that were served least, in five levels, whatever their class
    SKIP_JOIN = "skip_join"  # the same, and who has a long prompt starts in a lower level (FastServe)
    KNAPSACK = "knapsack"  # by how long each has been pending for the memory that it takes (Apt-Serve §5)
    RT_BE = "rt_be"  # by promises; real-time ones get the memory of best-effort ones (BROS §4.2)

    @property
    def takes_turns(self) -> bool:
        """Whether requests run by their class or by what they were served, whatever they were promised."""
        return self in (Packing.ROUND_ROBIN, Packing.MLFQ, Packing.SKIP_JOIN, Packing.KNAPSACK)


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


class Predictor(str, Enum):
    """Who says how long an output will be. What a request says of itself outweighs it (lengths.py)."""

    OFF = "off"  # nobody: each is taken to produce all that it may
    CONSTANT = "constant"  # each is taken to produce `expected_output`
    HASH = "hash"  # by past prompts of about the same tokens (ALISE §3.1)
    MINILM = "minilm"  # by past prompts of about the same meaning: an encoder of text finds them
    ORACLE = "oracle"  # the simulator, which knows


class Layout(str, Enum):
    """Whose tokens a block pair holds."""

    PLAIN = "plain"  # one request's
    BIDIRECTIONAL = "bidirectional"  # a real-time one's from the left, a best-effort one's from the right (BROS §5)


class Cache(str, Enum):
    """What a decode worker keeps of a request's tokens on its device."""

    KV = "kv"
    HYBRID = "hybrid"  # KV, or of some hidden vectors, which take half of the memory and time in every step


class PlainPairs:
    """How a decode worker uses its block pairs: each holds the KV of one request."""

    why_not_ahead: str | None = None  # why no step can be planned while the one before it runs
    why_not_direct: str | None = None  # why no KV can come from device to device
    keeps_hidden = False  # whether some requests may be kept as hidden vectors

    def num_places(self, num_slots: int) -> int:
        """Return how many tokens without a slot a worker keeps on the host, if its device has so many slots."""
        return 0

    def problem(self, policy: Policy) -> str | None:
        """Return why the policy means nothing together with such pairs."""
        return None


class SharedPairs(PlainPairs):
    """Two requests may be in one pair (BROS §5)."""

    why_not_ahead = "with blocks bidirectional a chat may take the slots of anybody before each step"
    why_not_direct = "KV that comes directly needs pairs of its own: schedule.blocks bidirectional shares them"

    def __init__(self, checkpoints: float) -> None:
        self._checkpoints = checkpoints

    def num_places(self, num_slots: int) -> int:
        return int(self._checkpoints * num_slots)

    def problem(self, policy: Policy) -> str | None:
        if policy.room is not Room.GROWING:
            return "blocks bidirectional gives memory block by block: it needs room growing"
        if policy.entries is Entries.HIDDEN:
            return "blocks bidirectional has K and V at both ends of a pair: it needs entries kv"
        if policy.packing.takes_turns:
            return f"packing {policy.packing.value} has whole pairs, and recomputes: it needs blocks plain"
        if policy.cache is Cache.HYBRID:
            return "cache hybrid has requests that are kept or dropped whole: it needs blocks plain"
        return None


class HybridPairs(PlainPairs):
    """Some requests may be kept as hidden vectors (Apt-Serve §4.3)."""

    why_not_ahead = "with cache hybrid what is kept of a request may change before each step"
    keeps_hidden = True

    def problem(self, policy: Policy) -> str | None:
        if policy.packing is not Packing.KNAPSACK and not policy.precedence.may_displace(is_rt=True):
            return "cache hybrid looks at who has waited how long: it needs packing knapsack, or rt_be by slack"
        if policy.room is Room.CHUNKS:
            return "cache hybrid decides once what a prompt is kept as: it needs room whole or growing"
        return None


_ALIKE, _REAL_TIME_FIRST, _PLAIN, _HYBRID = Precedence(), RealTimeFirst(), PlainPairs(), HybridPairs()


@dataclass(frozen=True)
class Policy:
    order: Order = Order.SLACK
    chunking: Chunking = Chunking.SLO
    selection: Choice = Choice.MULTI_RESOURCE
    room: Room = Room.GROWING
    grouping: Grouping = Grouping.ALIGNED
    packing: Packing = Packing.RT_BE
    reuse: bool = True  # of the KV of prompts that begin alike
    late: Late = Late.DECAY
    token_group: int = 1  # tokens of a real-time request that are due together
    expected_output: int = 256  # tokens that a request is taken to produce before anything is predicted
    age_s: float = AGE_S  # unserved, after which a best-effort request rises a level
    expected_chunk: int = 512  # tokens of a best-effort prompt in a step
    window_s: float = 0.75  # of slack, in which multi_resource may choose (gamma)
    long_prompt: int = 4096  # tokens; with slo chunking one so long starts when no other is unfinished
    budget_pivots: float = 4.0  # most prompt tokens of a step with slo chunking, in sizes that saturate the hardware
    as_in_paper: bool = False  # AccelGen's own budget, slack and distance, in place of ours
    compression: Compression = Compression.OFF
    entries: Entries = Entries.KV
    rt_reserve: float = 0.1  # share of the pool's pages that only real-time requests get
    predictor: Predictor = Predictor.HASH
    blocks: Layout = Layout.PLAIN
    cache: Cache = Cache.KV
    reserve: int = 0  # tokens of memory that a request gets with room whole, even if it may say less
    waiting_ratio: float = 0.0  # of waiting prompts to decodes, before those are interrupted for them (TGI)
    pinning: bool = True  # of real-time requests that cannot wait in the pool, to a decode worker
    evict: bool = True  # who has to leave keeps its KV elsewhere; otherwise it is computed anew
    prefetch: bool = True  # KV of candidates is held by prefill workers that can send it on
    candidate_share: float = 0.3  # of a prefill worker's pairs: most that such KV has
    helps: bool = True  # decode workers take prompts of chats while those pile up before prefill workers
    refuse_ttfts: float = 3.0  # a chat whose first token is predicted later than so many ttfts is refused; 0: none
    checkpoints: float = 1.0  # tokens without a slot that a worker keeps on the host, as a share of those with one

    def reserved(self, num_pages: int) -> int:
        return int(self.rt_reserve * num_pages)

    @property
    def problem(self) -> str | None:
        """Why these mean nothing together."""
        if self.selection is Choice.MULTI_RESOURCE and isinstance(self.ordering, ByKey):
            return "selection multi_resource looks at who is about as urgent: it needs order slack or fcfs"
        if self.room is Room.CHUNKS and self.chunking is Chunking.NONE:
            return "room chunks has no chunks with chunking none: it needs chunking fixed or slo"
        if self.as_in_paper and (self.chunking, self.selection) == (Chunking.FIXED, Choice.IN_ORDER):
            return "as_in_paper changes slo chunking and selection multi_resource: it needs one of them"
        if (self.packing is Packing.RT_BE) == self.ordering.is_by_arrival:
            return "packing rt_be goes by order slack or shortest_remaining, and every other packing by order fcfs"
        if self.packing.takes_turns and not self.is_plain:
            return f"packing {self.packing.value} needs chunking fixed or none, selection in_order, and not room chunks"
        if (problem := self.pairs.problem(self)) is not None:
            return problem
        if self.reserve and self.room is not Room.WHOLE:
            return "reserve is memory that is given at once: it needs room whole"
        if self.waiting_ratio and (self.chunking is not Chunking.NONE or self.packing is not Packing.FCFS):
            return "waiting_ratio is when whole prompts interrupt decodes: it needs chunking none and packing fcfs"
        return None

    @cached_property  # asked at every step
    def precedence(self) -> Precedence:
        """Return how real-time and best-effort requests stand to each other where a step is chosen."""
        is_first = self.packing is Packing.RT_BE and self.ordering.goes_by_promises and not self.as_in_paper
        return _REAL_TIME_FIRST if is_first else _ALIKE

    @cached_property  # asked at every step
    def pairs(self) -> PlainPairs:
        """Return how decode workers use their block pairs."""
        if self.blocks is Layout.BIDIRECTIONAL:
            return SharedPairs(self.checkpoints)
        return _HYBRID if self.cache is Cache.HYBRID else _PLAIN

    @cached_property  # asked at every step
    def ordering(self) -> Ordering:
        """Return the rules of the order."""
        return ORDERINGS[self.order]

    @property
    def grows(self) -> bool:
        """Whether a decode gets its memory block by block."""
        return self.room is not Room.WHOLE

    @cached_property  # asked at every step
    def is_plain(self) -> bool:
        """Whether requests are served as they come, with nothing to choose: neither promises nor the cost model count.

        worker/step/selection.py chooses by it how steps are put together.
        """
        plain = self.ordering.is_by_arrival and self.selection is Choice.IN_ORDER
        return plain and self.chunking is not Chunking.SLO and self.room is not Room.CHUNKS


DEFAULT_POLICY = Policy()
