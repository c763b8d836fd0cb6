"""The forms other than KV that the pool's pages may have, as copies between pages and the device know these forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from alignedserve.forms.device.int8_pages import Int8Pages
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kvpool.arena.extents import PageKind

# Writes to the rows of a page, [layers, 2, tokens, kv_dim], what the device does not hold of them; the range is that of
# the page's tokens. Returns whether it wrote anything.
Amend: TypeAlias = Callable[[Tensor, range], bool]


class PageForm(Protocol):
    @property
    def num_bytes(self) -> int:
        """Return the bytes of a page in this form."""

    def write(self, rows: Tensor, payload: memoryview) -> bool:
        """Write a full page's rows, [groups, tokens, kv_dim]; return False where the form cannot hold them."""

    def expand(self, payload: memoryview, cache: Tensor, slots: Tensor) -> None:
        """Write the KV of a page to slots of the device cache. The page may still be on its way at the return."""


def page_forms(
    groups: int, tokens: int, kv_dim: int, dtype: torch.dtype, kernels: Kernels, device: torch.device
) -> Mapping[PageKind, PageForm]:
    """Return the forms by the kind of a page. `groups` is the number of layers, times two."""
    return {PageKind.KV_INT8: Int8Pages(groups, tokens, kv_dim, dtype, kernels, device)}
