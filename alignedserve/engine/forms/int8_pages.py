"""Converts a full page of KV to int8 and back (ALISE §3.2); protocol/int8_layout.py draws the page.

Each channel of a page has a separate least number and step, so that a channel with large numbers costs other channels
no precision. Both are kept in fp16 if that moves no number by more than half a step; otherwise the channel is *wide*,
and both are kept in fp32 at the page's end. A page with too many wide channels, or with a number that is not
finite, is not compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from alignedserve.engine.device.devices import CPU
from alignedserve.kernels.common.reference import LEVELS
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.protocol.extents import PageKind
from alignedserve.protocol.int8_layout import Int8Layout

_MOST_HALF = torch.finfo(torch.float16).max
_WORD = 4  # bytes


class Int8Pages:
    """Pages of one model and page size; a group is the K or the V of one layer."""

    def __init__(
        self, groups: int, tokens: int, kv_dim: int, dtype: torch.dtype, kernels: Kernels, device: torch.device = CPU
    ) -> None:
        """`kernels` are those of the device, which compresses and expands; the pages themselves are on the CPU."""
        self._shape, self._dtype, self._kernels, self._device = (groups, tokens, kv_dim), dtype, kernels, device
        self.layout = Int8Layout(groups * kv_dim, tokens)

    @property
    def num_bytes(self) -> int:
        return self.layout.size

    def new_scales(self) -> Tensor:
        """Return room on the device for each channel's least and step, [2, groups, kv_dim]."""
        return torch.empty((2, self._shape[0], self._shape[2]), device=self._device)

    def packing(
        self, rows: Tensor, payload: memoryview, scales: Tensor, most_bytes: int
    ) -> Iterator[tuple[Tensor, Tensor, Callable[[Tensor, Tensor], None]]]:
        """Yield pieces of a page's rows, [groups, tokens, kv_dim], of `most_bytes` at the most, the place of their
        levels in another page, and what makes these levels on the device, and its part of `scales`."""
        (groups, tokens, kv_dim), levels = self._shape, self._parts(payload)[0]
        each = max(1, most_bytes // (tokens * kv_dim * self._dtype.itemsize))
        for at in range(0, groups, each):
            now = slice(at, at + each)
            yield rows[now], levels[now], partial(self._quantise, *scales[:, now])

    def write_scales(self, scales: Tensor, payload: memoryview) -> bool:
        """Write what belongs to the levels, once these are made; False if no page can hold it."""
        _, least, step, wide = self._parts(payload)
        exact_least, exact_step = scales.to(CPU)
        if not exact_step.isfinite().all():
            return False
        least.copy_(exact_least.clamp(-_MOST_HALF, _MOST_HALF))
        step.copy_(exact_step.clamp(max=_MOST_HALF))
        off = (least.float() - exact_least).abs_() + LEVELS * (step.float() - exact_step).abs_()
        above = least.float() + LEVELS * step.float() > torch.finfo(self._dtype).max  # would become infinite
        channels = ((off > 0.5 * exact_step) | above).flatten().nonzero().flatten()
        if len(channels) > self.layout.most_wide:
            return False
        wide[0] = len(channels)
        entries = wide[1 : 1 + 3 * len(channels)].view(-1, 3)
        entries[:, 0] = channels
        entries[:, 1] = exact_least.view(-1)[channels].view(torch.int32)
        entries[:, 2] = exact_step.view(-1)[channels].view(torch.int32)
        return True

    def pieces(
        self, payload: memoryview, cache: Tensor, slots: Tensor, most_bytes: int
    ) -> Iterator[tuple[Tensor, Callable[[Tensor], None]]]:
        """Yield pieces of a page, of `most_bytes` at the most, and what expands each one, in this order, once it is on
        the device: into slots of a cache, [layers, 2 * blocks, block_size, kv_dim]."""
        groups, tokens, kv_dim = self._shape
        layers, page = groups // 2, torch.frombuffer(payload, dtype=torch.uint8, count=self.layout.size)
        levels = page[: self.layout.least_at].view(layers, 2, tokens, kv_dim)
        num_wide = min(max(0, int(self._parts(payload)[3][0])), self.layout.most_wide)  # a corrupt page says any number
        scales = torch.empty((2, layers, 2, kv_dim), device=self._device)
        yield page[self._rest_at :], partial(self._unpack, num_wide, scales)
        each = max(1, most_bytes // (2 * tokens * kv_dim))
        for at in range(0, layers, each):
            now = slice(at, at + each)
            yield levels[now], partial(self._expand, cache[now], slots, *scales[:, now])

    @property
    def least_bytes(self) -> int:
        """Return the bytes of the piece that is never divided, all behind the levels; a layer may have more."""
        return self.layout.size - self._rest_at

    @property
    def _rest_at(self) -> int:
        return self.layout.least_at // _WORD * _WORD  # where words are read, also once these bytes lie elsewhere

    def _unpack(self, num_wide: int, scales: Tensor, rest: Tensor) -> None:
        """Write each channel's least and step, [2, layers, 2, kv_dim], from the bytes behind the levels."""
        halves, words = self.layout.least_at - self._rest_at, self.layout.num_wide_at - self._rest_at
        scales.view(-1).copy_(rest[halves : halves + 4 * self.layout.channels].view(torch.float16))
        entries = rest[words:].view(torch.int32)[1 : 1 + 3 * num_wide].view(-1, 3)
        channels = entries[:, 0].long().clamp(0, self.layout.channels - 1)
        scales.view(2, -1).index_copy_(1, channels, entries[:, 1:].t().contiguous().view(torch.float32))

    def _quantise(self, least: Tensor, step: Tensor, rows: Tensor, levels: Tensor) -> None:
        self._kernels.quantise(rows, levels, least, step)

    def _expand(self, cache: Tensor, slots: Tensor, least: Tensor, step: Tensor, levels: Tensor) -> None:
        self._kernels.expand(cache, slots, levels, least, step)

    def _parts(self, payload: memoryview) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return views of the page's memory: the levels, each channel's least and step, and the wide channels."""
        groups, _, kv_dim = self._shape
        layout = self.layout
        levels = torch.frombuffer(payload, dtype=torch.uint8, count=layout.least_at).view(self._shape)

        def halves(offset: int) -> Tensor:
            return torch.frombuffer(payload, dtype=torch.float16, count=layout.channels, offset=offset)

        least, step = (halves(offset).view(groups, kv_dim) for offset in (layout.least_at, layout.step_at))
        words = 1 + 3 * layout.most_wide
        return levels, least, step, torch.frombuffer(payload, dtype=torch.int32, count=words, offset=layout.num_wide_at)


# Writes to the rows of a page, [layers, 2, tokens, kv_dim], what the device does not hold of them; the range is that of
# the page's tokens. Returns whether it wrote anything.
Amend: TypeAlias = Callable[[Tensor, range], bool]


def page_forms(
    groups: int, tokens: int, kv_dim: int, dtype: torch.dtype, kernels: Kernels, device: torch.device
) -> Mapping[PageKind, Int8Pages]:
    """Return the forms by the kind of a page. `groups` is the number of layers, times two."""
    return {PageKind.KV_INT8: Int8Pages(groups, tokens, kv_dim, dtype, kernels, device)}
