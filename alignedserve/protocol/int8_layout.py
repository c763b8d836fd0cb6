"""The layout of a page of kind KV_INT8: KV with a byte for each number, and two numbers for each channel.

    levels     a byte for each number of the page, in the page's order
    least      for each channel (a layer's K or V, one of its kv_dim places), fp16
    step       for each channel, fp16
    num wide   the number of wide channels, whose least or step fp16 cannot hold
    wide       for each wide channel its number (int32), least and step (fp32)

A number is least + step * level. There is room for one wide channel in 64: pages with more stay KV. So 15 such pages
fit where 8 pages in bf16 lie.
"""

from __future__ import annotations

from dataclasses import dataclass

_HALF, _WORD = 2, 4  # bytes
_WIDE_IN = 64  # one channel in 64 may be wide
_LEAST_WIDE = 4


@dataclass(frozen=True)
class Int8Layout:
    channels: int  # over all layers, K and V
    tokens: int

    @property
    def least_at(self) -> int:
        return self.channels * self.tokens

    @property
    def step_at(self) -> int:
        return self.least_at + _HALF * self.channels

    @property
    def num_wide_at(self) -> int:
        """Return where the words begin: the number of wide channels, then three words for each."""
        return -(-(self.step_at + _HALF * self.channels) // _WORD) * _WORD

    @property
    def most_wide(self) -> int:
        return max(_LEAST_WIDE, self.channels // _WIDE_IN)

    @property
    def size(self) -> int:
        return self.num_wide_at + _WORD * (1 + 3 * self.most_wide)
