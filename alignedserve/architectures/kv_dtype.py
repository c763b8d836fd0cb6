"""Name the ways to keep K and V on the device, and say how large a token's vector is in each.

A vector is a token's K or V in one layer, on one rank. As it is, it has the numbers of all heads one after another. In
int8 each number is a level of -127 to 127, and the scales of the heads follow:

    levels of head 0 │ levels of head 1 │ ... │ scale of head 0 │ scale of head 1 │ ...
    a byte each                                 bf16 each

A number is level * scale. Every token has scales of its own, so a vector is written once and never changed, whatever
comes after it; and a vector is copied as it is, between slots, to the pool's pages and to other workers.
"""

from __future__ import annotations

from enum import Enum

SCALE_BYTES = 2


class KvDtype(str, Enum):
    AUTO = "auto"  # the dtype that the model computes in
    INT8 = "int8"

    @property
    def why_not_hidden(self) -> str | None:
        """Return why the blocks of KV have no room for hidden vectors; None where this dtype does not forbid it."""
        return "KV is kept in int8, and hidden vectors are not" if self is KvDtype.INT8 else None

    def vector_bytes(self, heads: int, head_dim: int, whole: int) -> int:
        """Return the bytes of a vector, whose numbers have `whole` bytes each where they stay as they are."""
        if self is KvDtype.INT8:
            return heads * (head_dim + SCALE_BYTES)
        return heads * head_dim * whole
