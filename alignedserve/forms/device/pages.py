"""The forms other than KV that the pool's pages may have, as copies between pages and the device know these forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from alignedserve.forms.device.int8_pages import Int8Pages
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kvpool.arena.extents import PageKind

# Writes to the rows of a page, [layers, 2, tokens, kv_dim], what the device does not hold of them; the range is that of
# the page's tokens. Returns whether it wrote anything.
Amend: TypeAlias = Callable[[Tensor, range], bool]


def page_forms(
    groups: int, tokens: int, kv_dim: int, dtype: torch.dtype, kernels: Kernels, device: torch.device
) -> Mapping[PageKind, Int8Pages]:
    """Return the forms by the kind of a page. `groups` is the number of layers, times two."""
    return {PageKind.KV_INT8: Int8Pages(groups, tokens, kv_dim, dtype, kernels, device)}
