"""Orders to a worker's device that a form of KV gives: each is performed before the work that is ordered after it."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.core import FoldKv, FormOrder


@dataclass(frozen=True, slots=True)
class CopySlots(FormOrder):
    """Copy K and V of single tokens, in all layers. All are read before any is written.

    A slot is block * block_size + offset; a place holds one token in memory that only this worker reads.
    """

    checkpoints: tuple[tuple[int, int], ...] = ()  # (slot, place)
    restores: tuple[tuple[int, int], ...] = ()  # (place, slot)
    moves: tuple[tuple[int, int], ...] = ()  # (slot, slot)
    copy: int = 0  # the number of a CopyOut that follows; 0: none
    saved: tuple[tuple[int, int], ...] = ()  # (token, place): what that copy finds at a place, for lack of a slot


@dataclass(frozen=True, slots=True)
class ProjectKv(FormOrder):
    """Compute K and V of a request's first tokens from the hidden vectors in `kept`, and write K and V to blocks, which
    may be the same."""

    request: str
    kept: tuple[int, ...]
    blocks: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CompressPage(FormOrder):
    """Compress one page of the pool into another page, on one GPU beside the steps: PageCompressed follows."""

    number: int  # of the pool's order
    pool: str
    page: int
    into: int


FORM_ORDERS = (CopySlots, ProjectKv, FoldKv, CompressPage)
