"""How a page of kind KV_INT8 is laid out: KV with a byte for each number, and two numbers for each channel.

    levels     a byte for each number of the page, in the order in which the page had them
    least      of each channel (a layer's K or V, one of its kv_dim places), fp16
    step       of each channel, fp16
    num wide   how many channels are wide: fp16 cannot hold their least or their step
    wide       of each of these: its number (int32), least and step (fp32)

A number is least + step * level. Room is for one wide channel in 64: pages with more stay KV. So 15 of these pages find
room where 8 in bf16 lie.
"""

from __future__ import annotations

from dataclasses import dataclass

_HALF, _WORD = 2, 4  # bytes
_WIDE_IN = 64  # channels
_LEAST_WIDE = 4


@dataclass(frozen=True)
class Int8Layout:
    channels: int  # of all layers, K and V
    tokens: int

    @property
    def least_at(self) -> int:
        return self.channels * self.tokens

    @property
    def step_at(self) -> int:
        return self.least_at + _HALF * self.channels

    @property
    def num_wide_at(self) -> int:
        """Words from here on: the count, then three for each."""
        return -(-(self.step_at + _HALF * self.channels) // _WORD) * _WORD

    @property
    def most_wide(self) -> int:
        return max(_LEAST_WIDE, self.channels // _WIDE_IN)

    @property
    def size(self) -> int:
        return self.num_wide_at + _WORD * (1 + 3 * self.most_wide)
