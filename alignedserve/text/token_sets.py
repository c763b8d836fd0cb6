"""Pack a set of tokens into few bytes, since a client may name every token of a vocabulary and ask for many choices.

A token is a bit, and the bits are compressed: 151,936 tokens take 19 kB at most and as tuple of numbers 5.5 MB; a few
tokens, or nearly all, take some tens of bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FAST = 1  # of zlib's levels


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return the set of these tokens as bytes; there must be at least one token."""
    ids = np.array(tokens)
    bits = np.zeros(ids.max() + 1, dtype=np.bool_)
    bits[ids] = True
    return zlib.compress(np.packbits(bits, bitorder="little").tobytes(), _FAST)


def unpack_tokens(packed: bytes, vocab_size: int) -> NDArray[np.bool_]:
    """Return [vocabulary]: whether each token is in the set."""
    most = (vocab_size + 7) // 8
    found = np.frombuffer(zlib.decompressobj().decompress(packed, most), dtype=np.uint8)
    bits = np.zeros(8 * most, dtype=np.bool_)
    bits[: 8 * len(found)] = np.unpackbits(found, bitorder="little")
    return bits[:vocab_size]
