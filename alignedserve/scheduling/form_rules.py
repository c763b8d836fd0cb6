"""What a policy says of memory: how a decode worker uses its blocks, and which pages of the pool become int8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

PLAIN = "plain"  # the memory of a decode worker whose blocks each hold the KV of one request


class Compression(str, Enum):
    """The rule for when full pages of waiting requests become int8."""

    OFF = "off"
    AUTO = "auto"  # while free pages are few: longest expected wait first
    INT8 = "int8"  # always


@dataclass(frozen=True)
class BlockUse:
    """How a memory uses the blocks of a decode worker: what other parts have to know of it."""

    takes: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # other options -> the values that fit the memory
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


def block_use_of(memory: str) -> BlockUse:
    """Return how this memory uses blocks. Raises ConfigError."""
    if memory == PLAIN:
        return BlockUse()
    from alignedserve.scheduling.offered import block_use  # here: most deployments look for none

    found: BlockUse = block_use(memory)
    return found
