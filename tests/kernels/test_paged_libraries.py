"""Tests that FlashAttention 3 and flash-attn get the right arguments, and are used only where they work.

Neither is needed: functions of the same names and arguments stand in their place, compute in torch, and refuse
what the libraries refuse.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from alignedserve.errors import NotCaptured
from alignedserve.kernels.common.failing import guard
from alignedserve.kernels.common.placing import StepMemory
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import LongChunks, QuerySpan, Spans, StaticSpans, StepSize
from alignedserve.kernels.dispatch import paged_libraries, probing
from alignedserve.kernels.dispatch.paged_attention import LONG_CHUNK, Fastest, PagedKernels
from alignedserve.kernels.dispatch.paged_libraries import (
    PAGE,
    FlashAttn,
    FlashAttn3,
    PagedLibrary,
    find,
)
from alignedserve.kernels.dispatch.probing import working_libraries
from alignedserve.kernels.triton.launch import interpreting
from tests.conftest import examples
from tests.kernels.samples import threads
from tests.rare import rarely

CPU = torch.device("cpu")
REFERENCE = Reference()
TRITON = "Triton"
HALVES = (torch.float16, torch.bfloat16)

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
    dtypes: Sequence[torch.dtype] = HALVES,
) -> torch.Tensor:
    """Attend for one request: its queries, which are its last tokens, see as many tokens to each side as `window`
    says."""
    for pages in (k, v):
        assert pages.shape[1] % page == 0, "Paged KV cache block size must be divisible by 256"
        assert pages.stride(-1) == 1
        assert pages.dtype is query.dtype
    assert query.dtype in dtypes
    own = table[: -(-tokens // k.shape[1])].long()
    k, v = (pages[own].flatten(0, 1)[:tokens] for pages in (k, v))
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
    """The part of flash_attn_interface of FlashAttention 3 that we call.

    A graph would keep the addresses and the numbers of the host of each call: `asked` has them."""

    def __init__(self, dtypes: Sequence[torch.dtype] = HALVES) -> None:
        self.asked = list[tuple[Any, ...]]()
        self._dtypes = dtypes

    @property
    def calls(self) -> int:
        return len(self.asked)

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
        assert cache_seqlens.is_contiguous()
        assert page_table.stride(-1) == 1
        lies = cu_seqlens_q, cache_seqlens, page_table
        self.asked.append((*((part.data_ptr(), part.shape) for part in lies), max_seqlen_q, softmax_scale, window_size))
        most_tokens = page_table.shape[1] * k_cache.shape[1]
        run = of_each(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, max_seqlen_q, most_tokens, page_table)
        return run(softmax_scale, (window_size[0], 0), 1, self._dtypes)


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
        assert cu_seqlens_k.is_contiguous()
        assert cu_seqlens_k.dtype is torch.int32
        self.calls.append("chunks")
        return of_each(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), max_seqlen_q, max_seqlen_k, block_table)(
            softmax_scale, (window_size[0], 0)
        )


def of_each(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    tokens: torch.Tensor,
    most_queries: int,
    most_tokens: int,
    table: torch.Tensor,
) -> Callable[..., torch.Tensor]:
    """Return attention by requests. Rows of no request are left as they are, which is anything; the numbers of the host
    are bounds."""
    assert cu_q.dtype is tokens.dtype is table.dtype is torch.int32
    assert cu_q.is_contiguous()
    queries = cu_q.tolist()
    assert table.shape[0] == len(tokens) == len(queries) - 1
    assert 0 <= queries[0] <= queries[-1] <= len(q)
    assert 1 <= max(cu_q.diff().tolist()) <= most_queries
    assert max(tokens.tolist()) <= most_tokens

    def run(scale: float, window: Any, page: int = PAGE, dtypes: Sequence[torch.dtype] = HALVES) -> torch.Tensor:
        out = torch.full_like(q, torch.nan)
        for a, b, n, own in zip(queries, queries[1:], tokens.tolist(), table, strict=False):
            assert (a < b) == (n > 0), "a request of no queries has no tokens"
            assert 0 <= b - a <= n
            if n:
                pages = own[: -(-n // k.shape[1])]
                assert 0 <= int(pages.min()) <= int(pages.max()) < len(k)
                out[a:b] = attended(q[a:b], k, v, own, n, scale, window, page, dtypes)
        return out

    return run


class _Case:
    def __init__(
        self, lengths: Sequence[tuple[int, int]], *, block_size: int = PAGE, kv_heads: int = 2, right: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        made, blocks, head_dim = list[QuerySpan](), 0, 16
        for queries, tokens in lengths:
            its = tuple(range(blocks + -(-tokens // block_size), blocks, -1))
            blocks += len(its)
            made.append(QuerySpan(queries, tokens, (~its[0], *its[1:]) if right else its))
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
    case.check(PagedKernels([flash], preferring(flash.name), long_chunk=0), window)
    kinds = {"decode" if queries == 1 else "chunks" for queries, _ in lengths}
    assert set(module.calls) == kinds
    third = FakeFlashAttn3()
    flash_3 = FlashAttn3(third)
    for block_size in (16, PAGE):
        _Case(lengths, kv_heads=kv_heads, block_size=block_size).check(
            PagedKernels([flash_3], preferring(flash_3.name), long_chunk=0), window
        )
    assert third.calls == (2 if "chunks" in kinds else 0), "decodes are left to ours"


def test_short_chunks_are_left_to_ours() -> None:
    third = FakeFlashAttn3()
    flash_3 = FlashAttn3(third)
    for tokens, calls in ((LONG_CHUNK - 1, 0), (LONG_CHUNK, 1)):
        _Case(((2, tokens),), block_size=64).check(PagedKernels([flash_3], preferring(flash_3.name)))
        assert third.calls == calls


CAPTURED, PAGES = StepSize(24, 4, 4, long=LongChunks(10, 6)), 24


def captured_lies(seed: int, block_size: int) -> list[QuerySpan]:
    """Return a step that fills its size: decodes, some of them in blocks that are filled from the right; then chunks,
    one of them long; then padding of one row, of several, or none."""
    chance = random.Random(seed)
    free = chance.sample(range(PAGES), PAGES)
    padding = chance.choice((0, 1, 5))
    queries = [1] * chance.randint(0, 4 - (padding == 1))
    left = CAPTURED.rows - len(queries) - padding
    while left:
        is_last = len(queries) - queries.count(1) == 2 or left < 4
        queries.append(left if is_last else chance.randint(2, left - 2))
        left -= queries[-1]
    lies = list[QuerySpan]()
    for count in queries:
        tokens = count + chance.choice((0, 1, 2 * block_size)) + 10 * (count > 1)
        blocks = tuple(free.pop() for _ in range(-(-tokens // block_size)))
        is_turned = count == 1 and chance.random() < 0.5
        lies.append(QuerySpan(count, tokens, tuple(~block for block in blocks) if is_turned else blocks))
    scratch = (PAGES,) * -(-padding // block_size)
    return lies + [QuerySpan(padding, padding, scratch)] * bool(padding)


@given(first=st.integers(0, 1 << 30), window=st.sampled_from((None, 7)))
@settings(deadline=None, max_examples=examples(4))
@pytest.mark.parametrize("block_size", [16, rarely(PAGE)])
def test_in_captured_steps_they_attend_for_the_chunks_of_any_mix(
    block_size: int, first: int, window: int | None
) -> None:
    """Two layers share a step. A graph would call with the addresses and bounds of its capture, whatever comes."""
    third, second = FakeFlashAttn3(), FakeFlashAttn()
    library: PagedLibrary = FlashAttn3(third) if block_size < PAGE else FlashAttn(second)
    kernels = PagedKernels([library], long_chunk=10)
    memory = StepMemory(60, CAPTURED.rows, CPU, CAPTURED.chunks * 6)
    spans = StaticSpans(CAPTURED, captured_lies(first, block_size), block_size, memory)
    generator = torch.Generator().manual_seed(first)
    for seed in range(first, first + 3):  # the first one has four chunks for 0, and the next one three
        lies = captured_lies(seed, block_size)
        spans.place(lies)
        for _ in range(2):
            cache = torch.randn(2 * (PAGES + 1), block_size, 16, generator=generator).bfloat16()
            query = torch.randn(CAPTURED.rows, 2, 8, generator=generator).bfloat16()
            got = kernels.attend(query, cache, spans, Scoring(0.25, window))
            expected = REFERENCE.attend(query.float(), cache.float(), Spans(lies, block_size), Scoring(0.25, window))
            torch.testing.assert_close(got.float(), expected, rtol=0, atol=0.03)
    assert third.calls + second.calls.count("chunks") == 6
    assert "decode" not in second.calls, "decodes are left to ours"
    assert len({*third.asked}) <= 1


def test_a_captured_step_whose_chunks_do_not_lie_side_by_side_is_refused() -> None:
    lies = [QuerySpan(10, 12, (0,)), QuerySpan(1, 5, (1,)), QuerySpan(13, 13, (2,))]
    memory = StepMemory(60, CAPTURED.rows, CPU, CAPTURED.chunks * 6)
    kernels = PagedKernels([FlashAttn3(FakeFlashAttn3())], long_chunk=10)
    spans = StaticSpans(CAPTURED, lies, 16, memory)
    with pytest.raises(ValueError, match="must lie side by side"):
        kernels.attend(torch.zeros(24, 2, 8).bfloat16(), torch.zeros(6, 16, 16).bfloat16(), spans, Scoring(1.0))


def test_a_library_that_fails_in_a_captured_step_leaves_that_step_uncaptured(caplog: pytest.LogCaptureFixture) -> None:
    """What replaces a kernel that fails does not take the place of ours: captured steps would be lost."""

    class Failing(FakeFlashAttn3):
        def flash_attn_with_kvcache(self, *_: Any, **__: Any) -> torch.Tensor:
            raise RuntimeError("operation not permitted when stream is capturing")

    kernels = PagedKernels([FlashAttn3(Failing())], long_chunk=10)
    guard(kernels, ("attend",), CPU)
    memory = StepMemory(60, CAPTURED.rows, CPU, CAPTURED.chunks * 6)
    spans = StaticSpans(CAPTURED, captured_lies(1, 16), 16, memory)
    query, cache = torch.zeros(24, 2, 8).bfloat16(), torch.zeros(2 * PAGES + 2, 16, 16).bfloat16()
    with pytest.raises(
        NotCaptured, match="attention of FlashAttention 3 failed: RuntimeError: operation not permitted"
    ):
        kernels.attend(query, cache, spans, Scoring(1.0))
    assert kernels.captures
    assert kernels.long_chunk == 0, "no library is left"
    assert [record.message.partition(":")[0] for record in caplog.records] == ["attention of FlashAttention 3"]


def test_what_they_cannot_read_triton_attends_to() -> None:
    module = FakeFlashAttn()
    flash = FlashAttn(module)
    kernels = PagedKernels([flash], preferring(flash.name), long_chunk=0)
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

    kernels = PagedKernels([flash], Fastest(seconds, lambda: cannot[0]), long_chunk=0)
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
    kernels = PagedKernels([flash], preferring(flash.name), long_chunk=0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            _Case(((1, 5),)).check(kernels)
    said = "attention of flash-attn 1.0: the other kernels attend (TypeError: got an unexpected keyword argument"
    assert [record.message.startswith(said) for record in caplog.records] == [True]


class Wrong(FakeFlashAttn):
    def flash_attn_with_kvcache(self, *args: Any, **options: Any) -> torch.Tensor:
        return 2 * super().flash_attn_with_kvcache(*args, **options)


class WrongByBounds(FakeFlashAttn3):
    """Takes bounds of the host for the numbers of the step."""

    def flash_attn_with_kvcache(self, *args: Any, **options: Any) -> torch.Tensor:
        is_bound = options["max_seqlen_q"] > int(options["cu_seqlens_q"].diff().max())
        return super().flash_attn_with_kvcache(*args, **options).mul(1 + is_bound)


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
    assert told(torch.bfloat16, 16, FlashAttn3(WrongByBounds()))[0] == [], "it would be wrong in captured steps"
    assert told(torch.float32, 256, flash)[1][0] == "flash-attn 2.8 is not used: numbers are float32, it wants 16 bits"
    assert told(torch.bfloat16, None, flash) == ([], [])


@pytest.mark.parametrize(("capability", "is_tried"), [((8, 0), False), ((9, 0), True), ((10, 0), False)])
def test_flash_attention_3_is_not_even_tried_on_other_gpus(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_tried: bool
) -> None:
    """Its package has kernels for 9.0 alone, and ends the process where one does not start."""
    tried = list[str]()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(probing, "_fault_of_library", lambda library, *_: tried.append(library.name))
    libraries = [FlashAttn3(FakeFlashAttn3()), FlashAttn(FakeFlashAttn())]
    working, why_not = working_libraries(torch.device("cuda"), torch.bfloat16, PAGE, (libraries, []))
    assert [library.name for library in working] == tried == ["FlashAttention 3"] * is_tried + ["flash-attn"]
    had = ".".join(map(str, capability))
    why = f"FlashAttention 3 is not used: it is for GPUs of compute capability 9.0, this one has {had}"
    assert (why in why_not) is not is_tried


def test_what_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find() == ([], ["FlashAttention 3 is not installed", "flash-attn is not installed"])
    monkeypatch.setattr(paged_libraries, "version", lambda _: "2.8.3")
    assert find()[1][1].startswith("flash-attn 2.8.3 cannot be imported (ModuleNotFoundError")


def test_what_may_be_there_is_told_by_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    no_flash_3 = "FlashAttention 3 is not installed"
    assert paged_libraries.installed() == ([], [no_flash_3, "flash-attn is not installed"])
    monkeypatch.setattr(paged_libraries, "version", lambda _: "2.8.3")
    assert paged_libraries.installed() == (["flash-attn 2.8.3"], [no_flash_3])
