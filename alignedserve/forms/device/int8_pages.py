"""Converts a full page of KV to int8 and back (ALISE §3.2); forms/pool/int8_layout.py draws the page.

Each channel of a page has a separate least number and step, so that a channel with large numbers costs other channels
no precision. Both are kept in fp16 if that moves no number by more than half a step; otherwise the channel is *wide*,
and both are kept in fp32 at the page's end. A page with too many wide channels, or with a number that is not
finite, is not compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from alignedserve.engine.device.devices import CPU
from alignedserve.errors import NotFinite
from alignedserve.forms.pool.int8_layout import Int8Layout
from alignedserve.kernels.common.reference import LEVELS
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kvpool.arena.extents import PageKind

_MOST_HALF = torch.finfo(torch.float16).max


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

    def write(self, rows: Tensor, payload: memoryview) -> bool:
        """Compress a page's rows, [groups, tokens, kv_dim], into another page; False if they cannot be compressed."""
        levels, least, step, wide = self._parts(payload)
        is_here = self._device.type == "cpu"
        made = levels if is_here else torch.empty(self._shape, dtype=torch.uint8, device=self._device)
        exact = torch.empty((2, self._shape[0], self._shape[2]), device=self._device)
        try:
            self._kernels.quantise(rows.to(self._device, non_blocking=True), made, *exact)
        except NotFinite:
            return False
        if not is_here:
            levels.copy_(made)
        exact_least, exact_step = exact.to(CPU)
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

    def expand(self, payload: memoryview, cache: Tensor, slots: Tensor) -> None:
        """Expand a page into slots of a cache on the device, [layers, 2 * blocks, block_size, kv_dim].

        A GPU receives the page as it is; the page may still be on its way when this returns.
        """
        groups, tokens, kv_dim = self._shape
        parts = self._parts(payload)
        num_wide = min(max(0, int(parts[3][0])), self.layout.most_wide)  # a corrupt page may hold any number
        levels, least, step, wide = (part.to(self._device, non_blocking=True) for part in parts)
        entries = wide[1 : 1 + 3 * num_wide].view(-1, 3)
        channels = entries[:, 0].long().clamp(0, self.layout.channels - 1)
        # A copy, not the page itself: the exact numbers of wide channels replace those of fp16 in it.
        least, step = (
            rough.to(torch.float32, copy=True).view(-1).index_copy_(0, channels, exact.contiguous().view(torch.float32))
            for rough, exact in ((least, entries[:, 1]), (step, entries[:, 2]))
        )
        shape = (groups // 2, 2, kv_dim)
        self._kernels.expand(
            cache, slots, levels.view(groups // 2, 2, tokens, kv_dim), least.view(shape), step.view(shape)
        )

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
