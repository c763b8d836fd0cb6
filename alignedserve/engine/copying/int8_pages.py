"""A full page of KV as int8, and back (ALISE §3.2): kvpool/arena/int8_layout.py draws its inside.

Each channel of a page has its own least number and step, so that one with large numbers costs no other its precision.
fp16 holds the two where that moves nothing by more than half a step; elsewhere they are kept in fp32 at the page's end.
What cannot be kept so, because too many channels are of that kind or a number is not finite, is not compressed.
"""

from __future__ import annotations

import torch

from alignedserve.engine.device.devices import CPU
from alignedserve.errors import NotFinite
from alignedserve.kernels.common.reference import LEVELS
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kvpool.arena.int8_layout import Int8Layout

_MOST_HALF = torch.finfo(torch.float16).max


class Int8Pages:
    """Of one model and page size; `groups` are a layer's K or V each."""

    def __init__(
        self,
        groups: int,
        tokens: int,
        kv_dim: int,
        dtype: torch.dtype,
        kernels: Kernels,
        device: torch.device = CPU,
    ) -> None:
        """The kernels are the device's, which compresses and expands: pages are on the CPU, and go there and back."""
        self._shape, self._dtype, self._kernels, self._device = (groups, tokens, kv_dim), dtype, kernels, device
        self.layout = Int8Layout(groups * kv_dim, tokens)

    def compress(self, rows: torch.Tensor, payload: memoryview) -> bool:
        """Rows [groups, tokens, kv_dim], a page, to another page; False where they must stay as they are."""
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
        above = least.float() + LEVELS * step.float() > torch.finfo(self._dtype).max  # it would be infinite
        beyond = ((off > 0.5 * exact_step) | above).flatten().nonzero().flatten()
        if len(beyond) > self.layout.most_wide:
            return False
        wide[0] = len(beyond)
        of_wide = wide[1 : 1 + 3 * len(beyond)].view(-1, 3)
        of_wide[:, 0] = beyond
        of_wide[:, 1] = exact_least.view(-1)[beyond].view(torch.int32)
        of_wide[:, 2] = exact_step.view(-1)[beyond].view(torch.int32)
        return True

    def expand(self, payload: memoryview, cache: torch.Tensor, slots: torch.Tensor) -> None:
        """From a page to these slots of a cache on the device, [layers, 2 * pairs, block_size, kv_dim]. On a GPU the
        page goes there as it is; it may still be on its way when this returns."""
        groups, tokens, kv_dim = self._shape
        parts = self._parts(payload)
        num_wide = min(max(0, int(parts[3][0])), self.layout.most_wide)  # whatever a page may hold that was spoiled
        levels, least, step, wide = (one.to(self._device, non_blocking=True) for one in parts)
        of_wide = wide[1 : 1 + 3 * num_wide].view(-1, 3)
        beyond = of_wide[:, 0].long().clamp(0, self.layout.channels - 1)
        # In memory of our own: what is wide is put right there.
        least, step = (
            one.to(torch.float32, copy=True).view(-1).index_copy_(0, beyond, exact.contiguous().view(torch.float32))
            for one, exact in ((least, of_wide[:, 1]), (step, of_wide[:, 2]))
        )
        of_channels = (groups // 2, 2, kv_dim)
        self._kernels.expand(
            cache, slots, levels.view(groups // 2, 2, tokens, kv_dim), least.view(of_channels), step.view(of_channels)
        )

    def _parts(self, payload: memoryview) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The page's memory itself: levels, and by channel least, step and what is wide."""
        groups, _, kv_dim = self._shape
        layout = self.layout
        levels = torch.frombuffer(payload, dtype=torch.uint8, count=layout.least_at).view(self._shape)

        def halves(offset: int) -> torch.Tensor:
            return torch.frombuffer(payload, dtype=torch.float16, count=layout.channels, offset=offset)

        least, step = (halves(offset).view(groups, kv_dim) for offset in (layout.least_at, layout.step_at))
        words = 1 + 3 * layout.most_wide
        return levels, least, step, torch.frombuffer(payload, dtype=torch.int32, count=words, offset=layout.num_wide_at)
