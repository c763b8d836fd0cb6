"""Attention of other libraries over paged blocks: FlashAttention 3, and flash-attn.

both take K and V as [pages, tokens of a page, heads, head_dim], with any stride between the pages, and a table of each
request's pages. A layer's cache has this form without a copy: K of all blocks is every other half, V the rest.
`misfit` and `why_not` say what else they require. They read the tokens of a page in the order of its slots alone.

The libraries read what is in the cache already; nothing here writes to it.

In captured steps they attend for the chunks alone. They learn on the device where the requests lie, and of numbers on
the host they take only bounds: a graph gives those of its size, and requests of no tokens where there are fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from alignedserve.kernels.common.failing import in_a_line
from alignedserve.kernels.common.placing import on_device
from alignedserve.kernels.common.spans import OF_LIBRARY, Spans, StaticSpans

PAGE = 256  # tokens that a page is a multiple of, for flash-attn
_MOST_HEAD_DIM = 256
_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PagedRequests:
    """A step's decodes, or all its other requests, in the form that these libraries take: tensors on the device."""

    rows: Tensor | None  # rows of these requests' queries; None: the libraries get all rows
    starts: Tensor  # compressed rows of their queries, int32
    tokens: Tensor  # of each, int32
    reached: Tensor  # compressed rows of their tokens, int32
    table: Tensor  # [requests, most pages of any]: a request's pages, then arbitrary pages
    most_queries: int  # no request has more
    most_tokens: int


class _Place(NamedTuple):
    row: int  # of the request's first query
    end: int  # of its queries
    tokens: int
    pages: Tensor


def requests_of(spans: Spans, device: torch.device, *, decodes: bool) -> PagedRequests | None:
    """Return the decodes or the other requests, or None where there are none; all layers of a step share the result."""
    if isinstance(spans, StaticSpans):
        assert not decodes, "in captured steps ours attends for decodes"
        static: _StaticRequests = spans.kept(OF_LIBRARY, lambda: _StaticRequests(spans))
        return static.requests
    made: PagedRequests | None = spans.kept((device, "requests", decodes), lambda: _requests(spans, device, decodes))
    return made


def _places(spans: Spans, decodes: bool) -> list[_Place]:
    lies = zip(pairwise(spans.rows.tolist()), spans.tokens.tolist(), pairwise(spans.starts.tolist()), strict=True)
    return [
        _Place(row, end, tokens, spans.blocks[start:stop])
        for (row, end), tokens, (start, stop) in lies
        if (end - row == 1) == decodes
    ]


def _requests(spans: Spans, device: torch.device, decodes: bool) -> PagedRequests | None:
    chosen = _places(spans, decodes)
    if not chosen:
        return None
    counts, lengths = [place.end - place.row for place in chosen], [place.tokens for place in chosen]
    table = pad_sequence([place.pages for place in chosen], batch_first=True)
    parts = _sums(counts), torch.tensor(lengths, dtype=torch.int32), _sums(lengths), table.flatten()
    at = [row for place in chosen for row in range(place.row, place.end)]
    begun, there, reached, pages = on_device(torch.cat(parts), device).split([len(part) for part in parts])
    return PagedRequests(
        None if len(chosen) == len(spans) else on_device(torch.tensor(at), device),
        *(begun, there, reached, pages.view(table.shape), max(counts), max(lengths)),
    )


def _sums(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


class _StaticRequests:
    """The chunks of captured steps, in memory that stays, with room for as many as there can be.

    The libraries get all rows, and leave those before and behind the chunks as they are."""

    def __init__(self, spans: StaticSpans) -> None:
        size = spans.size
        assert size.long is not None, "no library attends in these steps"
        most, pages = self._room = size.chunks, size.long.pages
        counts = most + 1, most, most + 1, most * pages
        self._parts = starts, tokens, reached, table = tuple(spans.section(count, torch.int32) for count in counts)
        self._spans, bounds = spans, (size.rows, pages * spans.block_size)
        self.requests = PagedRequests(
            None, starts.device, tokens.device, reached.device, table.device.view(self._room), *bounds
        )
        self.refill()
        spans.send()

    def refill(self) -> None:
        chosen, (starts, tokens, reached, table) = _places(self._spans, False), (part.host for part in self._parts)
        if any(before.end != after.row for before, after in pairwise(chosen)):
            raise ValueError("the chunks of a captured step must lie side by side")
        lengths, ends = [place.tokens for place in chosen], [place.end for place in chosen]
        tokens.zero_()[: len(chosen)] = torch.tensor(lengths)
        starts.fill_(ends[-1])[: len(chosen)] = torch.tensor([place.row for place in chosen])
        reached.fill_(sum(lengths))[: len(chosen) + 1] = _sums(lengths)
        table.zero_()  # behind a request's pages: what a library may ask for, and not use
        for row, place in zip(table.view(self._room), chosen, strict=False):
            row[: len(place.pages)] = place.pages


_NO_FLASH_ATTN = "flash-attn is not installed"
_FLASH_3 = "flash_attn_interface"  # the module of each package of FlashAttention 3
_NO_FLASH_3 = "FlashAttention 3 is not installed"


class PagedLibrary(Protocol):
    @property
    def name(self) -> str:
        """Return the library's name with its version."""

    @property
    def page(self) -> int:
        """Return the number of tokens that a page has to be a multiple of."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """Return the one compute capability that it has kernels for, None where trying it tells.

        Where a kernel does not start, FlashAttention ends the process: no trial would come back."""

    def why_not(self, decodes: bool) -> str | None:
        """Return why the library cannot attend for decodes or for chunks, or None where it can."""

    def attend(
        self, query: Tensor, k: Tensor, v: Tensor, requests: PagedRequests, scale: float, window: int | None
    ) -> Tensor:
        """Return the causal attention of these requests' queries, as reference.py defines it."""


class FlashAttn3:
    """FlashAttention 3, for GPUs of compute capability 9.0. It takes pages of any size."""

    name, page = "FlashAttention 3", 1
    capability: tuple[int, int] | None = (9, 0)

    def __init__(self, module: Any) -> None:
        self._attend = module.flash_attn_with_kvcache

    def why_not(self, decodes: bool) -> str | None:
        return "ours are as fast there (0.9 to 1.15 times on an H100)" if decodes else None

    def attend(
        self, query: Tensor, k: Tensor, v: Tensor, requests: PagedRequests, scale: float, window: int | None
    ) -> Tensor:
        attended: Tensor = self._attend(
            *(query, k, v),
            cache_seqlens=requests.tokens,
            page_table=requests.table,
            cu_seqlens_q=requests.starts,
            max_seqlen_q=requests.most_queries,
            softmax_scale=scale,
            causal=True,
            window_size=_window(window),
        )
        return attended


class FlashAttn:
    page = PAGE
    capability: tuple[int, int] | None = None

    def __init__(self, module: Any, version: str = "") -> None:
        """Take the package `flash_attn`, or a package with the same functions."""
        self.name = f"flash-attn {version}".rstrip()
        self._decode, self._chunks = module.flash_attn_with_kvcache, module.flash_attn_varlen_func

    def why_not(self, decodes: bool) -> str | None:
        return None

    def attend(
        self, query: Tensor, k: Tensor, v: Tensor, requests: PagedRequests, scale: float, window: int | None
    ) -> Tensor:
        common = {"softmax_scale": scale, "causal": True, "window_size": _window(window), "block_table": requests.table}
        if requests.most_queries == 1:  # only there does it split long requests
            out: Tensor = self._decode(query[:, None], k, v, cache_seqlens=requests.tokens, **common)
            return out[:, 0]
        attended: Tensor = self._chunks(
            *(query, k, v),
            cu_seqlens_q=requests.starts,
            cu_seqlens_k=requests.reached,
            max_seqlen_q=requests.most_queries,
            max_seqlen_k=requests.most_tokens,
            **common,
        )
        return attended


def _window(window: int | None) -> tuple[int, int]:
    """Return how many tokens a query sees to its left and to its right."""
    return (-1, -1) if window is None else (window - 1, 0)


def pages_of(cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return K and V of a layer's cache as views, [blocks, block_size, heads, head_dim]."""
    halves, block_size, kv_dim = cache.shape
    both = cache.view(halves // 2, 2, block_size, kv_dim // head_dim, head_dim)
    return both[:, 0], both[:, 1]


def unable(library: PagedLibrary, device: torch.device) -> str | None:
    """Return why the library must not even be tried on this GPU, or None where it may."""
    if device.type != "cuda" or library.capability is None:
        return None
    has = torch.cuda.get_device_capability(device)
    if has == library.capability:
        return None
    wanted, had = (".".join(map(str, each)) for each in (library.capability, has))
    return f"it is for GPUs of compute capability {wanted}, this one has {had}"


def misfit(library: PagedLibrary, dtype: torch.dtype, block_size: int) -> str | None:
    """Return why the library cannot use such blocks, or None where they fit."""
    if dtype not in _DTYPES:
        return f"numbers are {str(dtype).removeprefix('torch.')}, it wants 16 bits"
    if block_size % library.page:
        return f"blocks have {block_size} tokens, it wants a multiple of {library.page} (engine.block_size)"
    return None


def fits(library: PagedLibrary, query: Tensor, cache: Tensor, spans: Spans) -> bool:
    head_dim = query.shape[-1]
    if misfit(library, cache.dtype, cache.shape[1]) is not None or head_dim > _MOST_HEAD_DIM:
        return False
    if head_dim % 8:  # the libraries would pad, and so copy the whole cache
        return False
    return isinstance(spans, StaticSpans) or spans.is_in_order  # a captured step's size says which chunks it holds


def installed() -> tuple[list[str], list[str]]:
    """Return the libraries that are installed and those that are not; nothing is imported, which would take seconds."""
    there, lacking = list[str](), list[str]()
    if find_spec(_FLASH_3) is not None:
        there.append(FlashAttn3.name)
    else:
        lacking.append(_NO_FLASH_3)
    try:
        there.append(f"flash-attn {version('flash-attn')}")
    except PackageNotFoundError:
        lacking.append(_NO_FLASH_ATTN)
    return there, lacking


def find() -> tuple[list[PagedLibrary], list[str]]:
    """Return the installed libraries that take page tables, and why the others are missing."""
    found, (there, lacking) = list[PagedLibrary](), installed()
    for name in there:
        try:
            if name == FlashAttn3.name:
                found.append(FlashAttn3(import_module(_FLASH_3)))
            else:
                found.append(FlashAttn(import_module("flash_attn"), name.rpartition(" ")[2]))
        except Exception as error:  # built for another torch or CUDA, importing it may raise anything
            lacking.append(f"{name} cannot be imported ({in_a_line(error)})")
    return found, lacking
