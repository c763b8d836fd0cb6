"""Tests that FlashAttention 3 and flash-attn get the right arguments, and are used only where they work.

Neither is needed: functions of the same names and arguments stand in their place, compute in torch, and refuse
what the libraries refuse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Lie, Spans
from alignedserve.kernels.dispatch import paged_libraries
from alignedserve.kernels.dispatch.paged_attention import LEAST_TOKENS, Fastest, PagedKernels
from alignedserve.kernels.dispatch.paged_libraries import (
    PAGE,
    FlashAttn,
    FlashAttn3,
    PagedLibrary,
    find,
)
from alignedserve.kernels.dispatch.probing import working_libraries
from alignedserve.kernels.triton.launch import interpreting
from tests.kernels.samples import threads
from tests.rare import rarely

CPU = torch.device("cpu")
REFERENCE = Reference()
TRITON = "Triton"

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not interpreting(), reason="Triton compiles here: tests/gpu tries these libraries on the GPU"),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


def attended(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    tokens: int,
    scale: float,
    window: Any,
    page: int = PAGE,
) -> torch.Tensor:
    """Attend for one request: its queries, which are its last tokens, see as many tokens to each side as `window`
    says."""
    for pages in (k, v):
        assert pages.shape[1] % page == 0, "Paged KV cache block size must be divisible by 256"
        assert pages.stride(-1) == 1
        assert pages.dtype is query.dtype
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert table.dtype is torch.int32
    k, v = (pages[table.long()].flatten(0, 1)[:tokens] for pages in (k, v))
    groups = query.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1).transpose(0, 1).float() for x in (k, v))
    scores = query.transpose(0, 1).float() @ k.transpose(1, 2) * scale
    at = torch.arange(tokens)[None] - (torch.arange(len(query))[:, None] + tokens - len(query))
    left, right = window
    hidden = torch.zeros(at.shape, dtype=torch.bool)
    if left >= 0:
        hidden |= at < -left
    if right >= 0:
        hidden |= at > right
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1).to(query.dtype)


class FakeFlashAttn3:
    """The part of flash_attn_interface of FlashAttention 3 that we call."""

    def __init__(self) -> None:
        self.calls = 0

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        assert causal
        assert cache_seqlens.dtype is cu_seqlens_q.dtype is torch.int32
        assert max_seqlen_q == max(cu_seqlens_q.diff().tolist())
        self.calls += 1
        own = zip(q.split(cu_seqlens_q.diff().tolist()), page_table, cache_seqlens.tolist(), strict=True)
        window = (window_size[0], 0)
        return torch.cat([attended(x, k_cache, v_cache, pages, n, softmax_scale, window, 1) for x, pages, n in own])


class FakeFlashAttn:
    """The part of flash-attn 2.8 that we call."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        assert cache_seqlens.dtype is torch.int32
        assert q.shape[1] == 1
        assert causal
        self.calls.append("decode")
        rows = zip(q, block_table, cache_seqlens.tolist(), strict=True)
        made = [attended(query, k_cache, v_cache, own, n, softmax_scale, (window_size[0], 0)) for query, own, n in rows]
        return torch.stack(made)

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        assert causal
        self.calls.append("chunks")
        return of_each(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)(
            softmax_scale, (window_size[0], 0)
        )


def of_each(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    table: torch.Tensor,
) -> Callable[[float, Any], torch.Tensor]:
    assert cu_q.dtype is cu_k.dtype is torch.int32
    queries, tokens = cu_q.tolist(), cu_k.diff().tolist()
    assert (max(cu_q.diff().tolist()), max(tokens)) == (max_q, max_k)
    assert queries[-1] == len(q)

    def run(scale: float, window: Any) -> torch.Tensor:
        parts = zip(queries, queries[1:], tokens, table, strict=False)
        return torch.cat([attended(q[a:b], k, v, own, n, scale, window) for a, b, n, own in parts])

    return run


class _Case:
    def __init__(
        self, lengths: Sequence[tuple[int, int]], *, block_size: int = PAGE, kv_heads: int = 2, right: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        made, blocks, head_dim = list[Lie](), 0, 16
        for queries, tokens in lengths:
            its = tuple(range(blocks + -(-tokens // block_size), blocks, -1))
            blocks += len(its)
            made.append(Lie(queries, tokens, (~its[0], *its[1:]) if right else its))
        self.spans = Spans(made, block_size)
        shape = (2 * (blocks + 1), block_size, kv_heads * head_dim)
        self.cache = torch.randn(shape, generator=generator).bfloat16()
        self.query = torch.randn(self.spans.num_rows, 4, head_dim, generator=generator).bfloat16()

    def check(self, kernels: Reference, window: int | None = None) -> None:
        got = kernels.attend(self.query, self.cache, self.spans, Scoring(0.25, window))
        expected = REFERENCE.attend(self.query.float(), self.cache.float(), self.spans, Scoring(0.25, window))
        torch.testing.assert_close(got.float(), expected, rtol=0, atol=0.03)


MIXED = ((1, 260), (9, 270), (1, 5), (3, 512))
DECODES = ((1, 260), (1, 5), (1, 512))
CHUNKS = ((9, 270), (30, 30))


def preferring(name: str) -> Fastest:
    """Return a chooser to which this way is the fastest of all."""
    order: list[str] = []

    class Told(Fastest):
        def find(self, key: Any, ways: Any) -> str:
            order[:] = list(ways)
            return name if name in ways else super().find(key, ways)

    return Told(seconds=lambda work: (work(), 1.0)[1])


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "window"),
    [
        (MIXED, 1, 100),
        (CHUNKS, 4, None),
        *map(rarely, ((MIXED, 4, None), (DECODES, 4, None), (DECODES, 1, 100), (CHUNKS, 1, 100))),
    ],
)
def test_they_attend_as_the_reference_does(
    lengths: Sequence[tuple[int, int]], kv_heads: int, window: int | None
) -> None:
    module = FakeFlashAttn()
    flash = FlashAttn(module, "2.8")
    case = _Case(lengths, kv_heads=kv_heads)
    case.check(PagedKernels([flash], preferring(flash.name), least_tokens=0), window)
    kinds = {"decode" if queries == 1 else "chunks" for queries, _ in lengths}
    assert set(module.calls) == kinds
    third = FakeFlashAttn3()
    flash_3 = FlashAttn3(third)
    for block_size in (16, PAGE):
        _Case(lengths, kv_heads=kv_heads, block_size=block_size).check(
            PagedKernels([flash_3], preferring(flash_3.name), least_tokens=0), window
        )
    assert third.calls == (2 if "chunks" in kinds else 0), "decodes are left to ours"


def test_short_chunks_are_left_to_ours() -> None:
    third = FakeFlashAttn3()
    flash_3 = FlashAttn3(third)
    for tokens, calls in ((LEAST_TOKENS - 1, 0), (LEAST_TOKENS, 1)):
        _Case(((2, tokens),), block_size=64).check(PagedKernels([flash_3], preferring(flash_3.name)))
        assert third.calls == calls


def test_what_they_cannot_read_triton_attends_to() -> None:
    module = FakeFlashAttn()
    flash = FlashAttn(module)
    kernels = PagedKernels([flash], preferring(flash.name), least_tokens=0)
    for case in (_Case(((1, 40), (3, 20)), block_size=16), _Case(((1, 40), (3, 20)), right=True)):
        case.check(kernels)
    wide = _Case(((1, 40),))
    wide.cache, wide.query = wide.cache.float(), wide.query.float()
    wide.check(kernels)
    assert module.calls == []


def test_the_fastest_is_measured_once_for_what_is_alike() -> None:
    """flash-attn where it is faster, Triton elsewhere; and Triton where nothing can be timed."""
    module = FakeFlashAttn()
    flash = FlashAttn(module)
    timed, quick = list[int](), [0.5, 2.0]
    cannot = [True]

    def seconds(work: Callable[[], object]) -> float:
        before = len(module.calls)
        work()
        timed.append(1)
        return quick[0] if len(module.calls) > before else 1.0

    kernels = PagedKernels([flash], Fastest(seconds, lambda: cannot[0]), least_tokens=0)
    case = _Case(((1, 30), (1, 28)))
    case.check(kernels)
    assert not timed, "a graph is captured: it is not known yet which is the faster"
    assert not module.calls
    cannot[0] = False
    case.check(kernels)
    assert len(timed) == 6
    calls = len(module.calls)
    case.check(kernels)
    assert (len(timed), len(module.calls)) == (6, calls + 1)
    cannot[0], quick[0] = False, quick[1]
    _Case(((5, 27),)).check(kernels)
    calls = len(module.calls)
    _Case(((5, 27),)).check(kernels)
    assert len(module.calls) == calls, "for chunks it was the slower"


def test_a_library_that_fails_goes_out_with_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeFlashAttn):
        def flash_attn_with_kvcache(self, *_: Any, **__: Any) -> torch.Tensor:
            raise TypeError("got an unexpected keyword argument 'block_table'")

    flash = FlashAttn(Broken(), "1.0")
    kernels = PagedKernels([flash], preferring(flash.name), least_tokens=0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            _Case(((1, 5),)).check(kernels)
    said = "attention of flash-attn 1.0: the other kernels attend (TypeError: got an unexpected keyword argument"
    assert [record.message.startswith(said) for record in caplog.records] == [True]


class Wrong(FakeFlashAttn):
    def flash_attn_with_kvcache(self, *args: Any, **options: Any) -> torch.Tensor:
        return 2 * super().flash_attn_with_kvcache(*args, **options)


def test_at_the_start_it_is_said_which_are_used_and_why_not() -> None:
    flash, wrong = FlashAttn(FakeFlashAttn(), "2.8"), FlashAttn(Wrong(), "0.1")

    def told(dtype: torch.dtype, block_size: int | None, *libraries: PagedLibrary) -> tuple[list[str], list[str]]:
        found = libraries, ("something else is not installed",)
        working, why_not = working_libraries(CPU, dtype, block_size, found)
        return [library.name for library in working], why_not

    names, why_not = told(torch.bfloat16, 512, flash, wrong)
    assert names == ["flash-attn 2.8"]
    assert len(why_not) == 2
    assert why_not[0].startswith("flash-attn 0.1 is not used: it is off by")
    assert why_not[1] == "something else is not installed"
    why = "blocks have 16 tokens, it wants a multiple of 256 (engine.block_size)"
    flash_3 = FlashAttn3(FakeFlashAttn3())
    names, why_not = told(torch.bfloat16, 16, flash, flash_3)
    assert (names, why_not[0]) == (["FlashAttention 3"], f"flash-attn 2.8 is not used: {why}")
    assert why_not[1].startswith("FlashAttention 3 is not used for decodes: ours are as fast there")
    assert told(torch.float32, 256, flash)[1][0] == "flash-attn 2.8 is not used: numbers are float32, it wants 16 bits"
    assert told(torch.bfloat16, None, flash) == ([], [])


def test_what_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find() == ([], ["FlashAttention 3 is not installed", "flash-attn is not installed"])
    monkeypatch.setattr(paged_libraries, "version", lambda _: "2.8.3")
    assert find()[1][1].startswith("flash-attn 2.8.3 cannot be imported (ModuleNotFoundError")


def test_what_may_be_there_is_told_by_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    no_flash_3 = "FlashAttention 3 is not installed"
    assert paged_libraries.installed() == ([], [no_flash_3, "flash-attn is not installed"])
    monkeypatch.setattr(paged_libraries, "version", lambda _: "2.8.3")
    assert paged_libraries.installed() == (["flash-attn 2.8.3"], [no_flash_3])
