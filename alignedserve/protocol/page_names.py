"""Names of KV pages: a page is named by a hash of its tokens and of all tokens before them.

The gateway, the router, workers and the pool name pages alike, so that a prefix is found wherever it was computed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

_HASH_BYTES = 8


def chained_hashes(tokens: Sequence[int], page_size: int, root: bytes = b"") -> tuple[int, ...]:
    """Return one hash per page, of its tokens and all tokens before them; the last page may be partial.

    Every process and every machine computes the same hashes. Prompts share hashes only where they share the root.
    """
    hashes = []
    before = root
    packed, page_bytes = struct.pack(f"<{len(tokens)}I", *tokens), 4 * page_size
    for start in range(0, len(packed), page_bytes):
        before = blake2b(before + packed[start : start + page_bytes], digest_size=_HASH_BYTES).digest()
        hashes.append(int.from_bytes(before, "little"))
    return tuple(hashes)


def more_hashes(hashes: tuple[int, ...], tokens: Sequence[int], page_size: int, root: bytes) -> tuple[int, ...]:
    """Return the hashes of full pages, followed by those of the pages that `tokens` fill after them."""
    before = hashes[-1].to_bytes(_HASH_BYTES, "little") if hashes else root
    return hashes + chained_hashes(tokens, page_size, before)
