"""A full page of KV as int8, and back (ALISE §3.2): kvpool/int8_layout.py draws its inside.

Each channel of a page has its own least number and step, so that one with large numbers costs no other its precision.
fp16 holds the two where that moves nothing by more than half a step; elsewhere they are kept in fp32 at the page's end.
What cannot be kept so, because too many channels are of that kind or a number is not finite, is not compressed.
"""

from __future__ import annotations

import torch

from alignedserve.errors import NotFinite
from alignedserve.kernels.dispatch import Kernels
from alignedserve.kernels.reference import LEVELS
from alignedserve.kvpool.int8_layout import Int8Layout

_MOST_HALF = torch.finfo(torch.float16).max


class Int8Pages:
    """Of one model and page size; `groups` are a layer's K or V each."""

    def __init__(self, groups: int, tokens: int, kv_dim: int, dtype: torch.dtype, kernels: Kernels) -> None:
        self._shape, self._kernels = (groups, tokens, kv_dim), kernels
        self.layout = Int8Layout(groups * kv_dim, tokens)
        self._least, self._step = torch.empty((2, groups, kv_dim), dtype=torch.float32)
        self._expanded = torch.empty(self._shape, dtype=dtype)

    def compress(self, rows: torch.Tensor, payload: memoryview) -> bool:
        """Rows [groups, tokens, kv_dim] to a page; False where they must stay as they are."""
        levels, least, step, wide = self._parts(payload)
        try:
            self._kernels.quantise(rows, levels, self._least, self._step)
        except NotFinite:
            return False
        least.copy_(self._least.clamp(-_MOST_HALF, _MOST_HALF))
        step.copy_(self._step.clamp(max=_MOST_HALF))
        off = (least.float() - self._least).abs_() + LEVELS * (step.float() - self._step).abs_()
        above = least.float() + LEVELS * step.float() > torch.finfo(self._expanded.dtype).max  # it would be infinite
        beyond = ((off > 0.5 * self._step) | above).flatten().nonzero().flatten()
        if len(beyond) > self.layout.most_wide:
            return False
        wide[0] = len(beyond)
        of_wide = wide[1 : 1 + 3 * len(beyond)].view(-1, 3)
        of_wide[:, 0] = beyond
        of_wide[:, 1] = self._least.view(-1)[beyond].view(torch.int32)
        of_wide[:, 2] = self._step.view(-1)[beyond].view(torch.int32)
        return True

    def expand(self, payload: memoryview) -> torch.Tensor:
        """[groups, tokens, kv_dim] in the cache's dtype: memory of ours, good until the next page."""
        levels, least, step, wide = self._parts(payload)
        self._least.copy_(least)
        self._step.copy_(step)
        num_wide = min(max(0, int(wide[0])), self.layout.most_wide)  # whatever a page may hold that was spoiled
        of_wide = wide[1 : 1 + 3 * num_wide].view(-1, 3)
        beyond = of_wide[:, 0].long().clamp(0, self.layout.channels - 1)
        self._least.view(-1)[beyond] = of_wide[:, 1].contiguous().view(torch.float32)
        self._step.view(-1)[beyond] = of_wide[:, 2].contiguous().view(torch.float32)
        self._kernels.dequantise(levels, self._least, self._step, self._expanded)
        return self._expanded

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
