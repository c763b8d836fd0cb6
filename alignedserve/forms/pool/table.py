"""Make the pool's pages, and the part that compresses pages to int8 where the policy asks for it."""

from __future__ import annotations

from alignedserve.forms.pool.compression import Compressor
from alignedserve.forms.pool.pages import CompressiblePages
from alignedserve.forms.rules import Compression
from alignedserve.kvpool.arena.extents import Extents
from alignedserve.kvpool.memory.pages import Pages
from alignedserve.kvpool.memory.rewriting import AllWaiting, Rewriting
from alignedserve.scheduling.policy import Policy


def pages_of(extents: Extents) -> Pages:
    """Return the pages of these extents, all free."""
    if len(extents.kinds) > 1:
        return CompressiblePages(extents)
    return Pages(extents.num_pages(extents.first_kind))


def rewriting_of(policy: Policy, pages: Pages, waiters: AllWaiting) -> Rewriting:
    if policy.compression is not Compression.OFF and isinstance(pages, CompressiblePages):
        return Compressor(policy, pages, waiters)
    return Rewriting()
