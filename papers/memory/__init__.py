"""Memories of a decode worker that share blocks between requests, or keep some requests as hidden vectors.

two_ended.py    Memory in which two requests may share a block (BROS §5).
block_ends.py   Blocks that two requests share: a real-time request from the left, a best-effort request from the right.
hybrid.py       Memory that keeps some requests as hidden vectors (Apt-Serve §4.3).
worth.py        What a request is best kept as: KV, hidden vectors, or nothing (Apt-Serve §4.2, §5).
hidden.py       Attention of an engine to hidden vectors, and K and V made of hidden vectors.

`schedule.memory` names one (rules.py).
"""

from __future__ import annotations

from alignedserve.papers.memory.hybrid import HybridMemory, WeighedMemory
from alignedserve.papers.memory.two_ended import TwoEndedMemory
from alignedserve.papers.rules import HYBRID, TWO_ENDED, WEIGHED
from alignedserve.worker.memory import PlainMemory

_MEMORIES: dict[str, type[PlainMemory]] = {
    HYBRID: HybridMemory,
    WEIGHED: WeighedMemory,
    TWO_ENDED: TwoEndedMemory,
}


def memory_of(memory: str) -> type[PlainMemory]:
    """Return the class of this memory; what is behind a colon is in the policy's `block_use`."""
    return _MEMORIES[memory.partition(":")[0]]
