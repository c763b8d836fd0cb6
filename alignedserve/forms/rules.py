"""The settings that turn forms on, and what they mean for other parts (what they forbid: scheduling/policy.py)."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

HIDDEN = "hidden"  # the form of a request that is kept as hidden vectors (core.KvForm)


class Layout(str, Enum):
    """The rule of which requests' tokens share a block."""

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


class Options(Protocol):
    """What is read of a policy (scheduling/policy.py)."""

    @property
    def blocks(self) -> Layout: ...

    @property
    def cache(self) -> Cache: ...

    @property
    def checkpoints(self) -> float: ...


class PlainUse:
    """The plain use of blocks on a decode worker: each holds the KV of one request."""

    why_not_ahead: str | None = None  # why no step can be planned while the one before it runs
    why_not_direct: str | None = None  # why no KV can come from device to device
    keeps_hidden = False  # whether some requests may be kept as hidden vectors
    keeps_apart = True  # whether each request has blocks of its own, for KV alone

    def num_on_host(self, num_slots: int) -> int:
        """Return how many tokens a worker keeps in host memory beside a device with `num_slots`."""
        return 0


class TwoEndedUse(PlainUse):
    """Two requests may be in one block (BROS §5)."""

    why_not_ahead = "with blocks bidirectional a chat may take slots of any request before each step"
    why_not_direct = "KV that comes directly needs blocks of its own: schedule.blocks bidirectional shares them"
    keeps_apart = False

    def __init__(self, checkpoints: float) -> None:
        self._checkpoints = checkpoints

    def num_on_host(self, num_slots: int) -> int:
        return int(self._checkpoints * num_slots)


class HybridUse(PlainUse):
    """Some requests may be kept as hidden vectors (Apt-Serve §4.3)."""

    why_not_ahead = "with cache hybrid what is kept of a request may change before each step"
    keeps_hidden = True
    keeps_apart = False


_PLAIN, _HYBRID = PlainUse(), HybridUse()


def block_use_of(policy: Options) -> PlainUse:
    """Return how decode workers use their blocks by this policy."""
    if policy.blocks is Layout.BIDIRECTIONAL:
        return TwoEndedUse(policy.checkpoints)
    return _HYBRID if policy.cache is Cache.HYBRID else _PLAIN
