"""The options of a policy that turn forms on: what they forbid of other options, and what they mean for other parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

HIDDEN = "hidden"  # the form of a request that is kept as hidden vectors (core.KvForm)


class Layout(str, Enum):
    """The rule that says which requests may have tokens in the same block."""

    PLAIN = "plain"  # a block holds tokens of one request
    BIDIRECTIONAL = "bidirectional"  # a real-time request from the left, a best-effort one from the right (BROS §5)


class Cache(str, Enum):
    """The form in which a decode worker keeps a request's tokens on its device."""

    KV = "kv"
    HYBRID = "hybrid"  # KV, or for some requests hidden vectors: half the memory, and time in every step


class Compression(str, Enum):
    """The rule for when full pages of waiting requests become int8."""

    OFF = "off"
    AUTO = "auto"  # while free pages are few: longest expected wait first
    INT8 = "int8"  # always


@dataclass(frozen=True)
class BlockUse:
    """How a decode worker uses its blocks: plainly, where each block holds the KV of one request, or otherwise."""

    # The option that asks for the use -> other options -> the values that go with it (scheduling/policy.py).
    takes: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    why_not_ahead: str | None = None  # why no step can be planned while the one before it runs
    why_not_direct: str | None = None  # why no KV can come from device to device
    keeps_hidden: bool = False  # whether some requests may be kept as hidden vectors (Apt-Serve §4.3)
    keeps_apart: bool = True  # whether each request has blocks of its own, for KV alone
    on_host: float = 0.0  # tokens that a worker keeps in host memory / tokens with a slot on the device

    @property
    def keeps_places(self) -> bool:
        """Return whether KV stays in place as long as the request has its blocks, as KV that comes directly has to."""
        return self.why_not_direct is None

    def num_on_host(self, num_slots: int) -> int:
        """Return how many tokens a worker keeps in host memory beside a device with `num_slots`."""
        return int(self.on_host * num_slots)


_HYBRID = BlockUse(  # the form of a prompt is chosen once
    {"cache": {"room": ("whole", "growing")}},
    "with cache hybrid what is kept of a request may change before each step",
    keeps_hidden=True,
    keeps_apart=False,
)
_TWO_ENDED = BlockUse(  # two requests may be in one block (BROS §5)
    {"blocks": {"room": ("growing",), "cache": ("kv",)}},
    "with blocks bidirectional a chat may take slots of any request before each step",
    "KV that comes directly needs blocks of its own: schedule.blocks bidirectional shares them",
    keeps_apart=False,
)


@dataclass(frozen=True, kw_only=True)
class FormOptions:
    """The part of a policy that forms declare (scheduling/policy.py has the rest)."""

    blocks: Layout = Layout.PLAIN
    checkpoints: float = 1.0  # tokens without a slot that a worker keeps on the host / tokens with a slot
    cache: Cache = Cache.KV
    compression: Compression = Compression.OFF
    prefetch: bool = True  # whether prefill workers hold the KV of candidates
    candidate_share: float = 0.3  # most of a prefill worker's blocks for such KV

    @cached_property  # read at every step
    def block_use(self) -> BlockUse:
        if self.blocks is Layout.BIDIRECTIONAL:
            return replace(_TWO_ENDED, on_host=self.checkpoints)
        return _HYBRID if self.cache is Cache.HYBRID else BlockUse()
