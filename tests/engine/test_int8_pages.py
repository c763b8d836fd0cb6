"""Tests of int8 pages: what comes back is close enough to keep answers the same, or nothing comes back at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.core import Chunk, Decode, KvForm, Sampling, StepPlan
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.engine import Engine
from alignedserve.engine.forms.int8_pages import Int8Pages
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.dispatch.dispatcher import choose
from alignedserve.kvpool.arena.arena import Arena, Contents
from alignedserve.protocol.extents import Extents, PageBytes, PageKind
from alignedserve.protocol.int8_layout import Int8Layout
from alignedserve.protocol.page_names import chained_hashes
from tests.demo_conversations import conversations
from tests.gpu.cases import compressed
from tests.rare import rarely

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "alignedserve" / "demo_model"
PAGE, BLOCK, PROMPTS, ANSWER = 64, 16, 2, 48
GROUPS, CHANNELS = 2, 300
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pages_of(dtype: torch.dtype) -> Int8Pages:
    return Int8Pages(GROUPS, PAGE, CHANNELS, dtype, choose(torch.device("cpu"), dtype).kernels)


def there_and_back(rows: torch.Tensor) -> torch.Tensor | None:
    """Compress the rows and expand them again; return None if the page keeps them as they are."""
    pages = pages_of(rows.dtype)
    payload = memoryview(bytearray(b"\x5a" * pages.layout.size))
    if not compressed(pages, rows, payload):
        return None
    cache = torch.zeros(GROUPS // 2, 2, PAGE, CHANNELS, dtype=rows.dtype)
    for piece, expand in pages_of(rows.dtype).pieces(payload, cache, torch.arange(PAGE), 1):
        expand(piece)
    return cache.view(rows.shape)


def drawn(seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (4 * torch.rand(GROUPS, 1, CHANNELS, generator=generator) - 2)
    shifts = torch.randn(GROUPS, 1, CHANNELS, generator=generator)
    return (sizes * (torch.randn(GROUPS, PAGE, CHANNELS, generator=generator) + shifts)).to(dtype)


@given(seed=st.integers(0, 999), dtype=st.sampled_from(DTYPES))
@settings(deadline=None, max_examples=30)
def test_a_number_comes_back_within_a_step(seed: int, dtype: torch.dtype) -> None:
    rows = drawn(seed, dtype)
    back = there_and_back(rows)
    assert back is not None
    step = (rows.float().amax(1) - rows.float().amin(1)) / 255
    rounding = rows.float().abs() * torch.finfo(dtype).eps
    assert ((back.float() - rows.float()).abs() <= 1.001 * step[:, None] + rounding).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_constants_zeros_extremes_and_denormals_survive(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    rows = drawn(1, dtype)
    constants = [0.0, 1.0, -3.14159, info.max, info.min, info.smallest_normal, info.smallest_normal / 16]
    for at, constant in enumerate(constants):
        rows[at % GROUPS, :, at] = constant
    rows[0, :, 20] = torch.linspace(-1, 1, PAGE).to(dtype) * info.max
    rows[1, :, 21] = torch.arange(PAGE).to(dtype) * info.smallest_normal / 64
    back = there_and_back(rows)
    assert back is not None
    for at in range(len(constants)):
        assert torch.equal(back[at % GROUPS, :, at], rows[at % GROUPS, :, at])
    assert back.isfinite().all()
    for group, channel in ((0, 20), (1, 21)):
        there, was = back[group, :, channel].double(), rows[group, :, channel].double()
        assert (there - was).abs().max() <= 0.011 * (was.max() - was.min())


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_compressed(odd: float) -> None:
    rows = drawn(1, torch.bfloat16)
    rows[1, 63, 69] = odd
    assert there_and_back(rows) is None


def test_too_many_channels_that_fp16_cannot_hold_are_not_compressed() -> None:
    rows = drawn(1, torch.float32)
    most = Int8Layout(GROUPS * CHANNELS, PAGE).most_wide
    rows[0, :, :most] *= 1e9
    assert there_and_back(rows) is not None
    rows[1, :, 0] *= 1e9
    assert there_and_back(rows) is None


@given(channels=st.integers(1024, 200_000))
def test_a_page_takes_little_more_than_half_of_bf16(channels: int) -> None:
    size = Int8Layout(channels, PAGE).size
    assert size <= 0.54 * channels * PAGE * 2
    sizes = PageBytes(channels * PAGE * 2, size)
    assert sizes.divide(80).kv_int8 == 15


# --- On real activations


@contextmanager
def arena_of(engine: Engine) -> Iterator[Arena]:
    model = engine.config
    channels = 2 * model.num_layers * model.kv_dim
    sizes = PageBytes(channels * PAGE * engine.dtype.itemsize, Int8Layout(channels, PAGE).size)
    with TemporaryDirectory() as directory:
        path = Path(directory, "arena")
        arena = Arena.create(path, pages=sizes.divide(32), payload_bytes=sizes, page_size=PAGE, incarnation=1)
        yield arena
        arena.close()


def prompts() -> list[tuple[int, ...]]:
    """Return long prompts that the demo model was trained to answer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    chats = [asked.messages for asked in conversations() if asked.kind == "extract_json"][:PROMPTS]
    return [tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) for chat in chats]


def engine_of(dtype: str) -> Engine:
    return Engine(DEMO, num_blocks=80, block_size=BLOCK, dtype=dtype)


def ran(engine: Engine, tokens: Sequence[int], blocks: Sequence[int]) -> int:
    chunk = Chunk("a", tuple(tokens), 0, KvForm(tuple(blocks)), Sampling())
    return engine.step(StepPlan(1, (chunk,))).tokens[0][1]


def decoded(engine: Engine, token: int, start: int, blocks: Sequence[int]) -> int:
    decode = Decode("a", token, start, KvForm(tuple(blocks)), Sampling(), 0)
    return engine.step(StepPlan(1, (), (decode,))).tokens[0][1]


@pytest.mark.parametrize("dtype", ["bfloat16", rarely("float32")])
def test_attention_and_greedy_tokens_hardly_change(dtype: str) -> None:
    """One engine has KV as computed, the other has KV that came back from int8; both are fed the tokens of the
    first."""
    plain, lossy = engine_of(dtype), engine_of(dtype)
    same = num = 0
    for prompt in prompts():
        blocks = range(-(-(len(prompt) + ANSWER) // BLOCK))
        token = ran(plain, prompt, blocks)
        with arena_of(plain) as arena:
            through_int8(plain, lossy, arena, prompt, blocks)
        assert attention_error(plain, lossy, len(prompt), blocks) <= 0.01
        for start in range(len(prompt), len(prompt) + ANSWER):
            of_plain, of_lossy = (decoded(engine, token, start, blocks) for engine in (plain, lossy))
            same, num, token = same + (of_plain == of_lossy), num + 1, of_plain
    assert num == PROMPTS * ANSWER
    assert same >= 0.99 * num


def through_int8(plain: Engine, lossy: Engine, arena: Arena, prompt: tuple[int, ...], blocks: range) -> None:
    out, back = (PageCopier(engine.cache, arena, PAGE, verify=True) for engine in (plain, lossy))
    pages = list(range(-(-len(prompt) // PAGE)))
    full = len(prompt) // PAGE
    assert full >= 1
    out.copy_out(blocks, pages, prompt)
    into = list(arena.extents.pages(arena.extents.count - 1, PageKind.KV_INT8))[:full]
    assert all(out.rewrite(page, new) for page, new in zip(pages, into, strict=False))
    assert back.copy_in(into + pages[full:], blocks, prompt)


def attention_error(plain: Engine, lossy: Engine, tokens: int, blocks: Sequence[int]) -> float:
    """Return the largest error of all layers: with the last tokens' K as queries, relative to the output from plain
    KV."""
    model, kernels = plain.config, choose(torch.device("cpu"), plain.dtype).kernels
    queries, errors = 32, []
    spans = Spans([QuerySpan(queries, tokens, blocks)], BLOCK)
    for layer in range(model.num_layers):
        slots = spans.new_slots
        k = plain.cache[layer].view(-1, model.kv_dim)[slots]
        query = k.view(queries, model.num_kv_heads, model.head_dim).repeat_interleave(
            model.num_heads // model.num_kv_heads, 1
        )
        scoring = Scoring(model.scale(layer))
        of_plain, of_lossy = (
            kernels.attend(query, engine.cache[layer], spans, scoring).float() for engine in (plain, lossy)
        )
        errors.append(float((of_lossy - of_plain).norm() / of_plain.norm()))
    return max(errors)


# --- In the arena


def test_a_page_that_changed_or_is_not_full_is_not_compressed() -> None:
    engine = engine_of("bfloat16")
    tokens = tuple(range(100, 200))
    ran(engine, tokens, range(7))
    with arena_of(engine) as arena:
        copier = PageCopier(engine.cache, arena, PAGE, verify=True)
        copier.copy_out(range(7), (0, 1), tokens)
        into = arena.extents.pages(2, PageKind.KV_INT8)[0]
        assert not copier.rewrite(1, into), "36 tokens"
        assert not copier.rewrite(5, into), "never written"
        assert not copier.rewrite(into, into + 1), "no page of KV"
        arena.payload(0)[7] ^= 1
        assert not copier.rewrite(0, into), "another checksum"
        assert arena.contents(into) is None
        copier.copy_out(range(7), (0, 1), tokens)
        assert copier.rewrite(0, into)
        arena.payload(into)[7] ^= 1
        assert not copier.copy_in((into, 1), range(7), tokens)


def test_a_page_with_numbers_that_are_not_finite_stays_as_it_is() -> None:
    engine = engine_of("bfloat16")
    tokens = tuple(range(100, 164))
    ran(engine, tokens, range(4))
    engine.cache[3, 2, 5, 17] = float("nan")
    with arena_of(engine) as arena:
        copier = PageCopier(engine.cache, arena, PAGE, verify=False)
        copier.copy_out(range(4), (0,), tokens)
        into = arena.extents.pages(1, PageKind.KV_INT8)[0]
        assert not copier.rewrite(0, into)
        assert not copier.copy_in((into,), range(4), tokens)
        assert copier.copy_in((0,), range(4), tokens)


def test_what_lay_in_an_extent_before_it_changed_its_kind_is_no_longer_read() -> None:
    """A reader that still has the old number must not read bytes of other pages with it."""
    sizes, extents = PageBytes(4096, 2000), Extents(2, kv=2, kv_int8=4)
    with TemporaryDirectory() as directory:
        arena = Arena.create(Path(directory, "a"), pages=extents, payload_bytes=sizes, page_size=4, incarnation=1)
        (token_hash,) = chained_hashes((1, 2, 3, 4), 4)
        old, new = Contents(PageKind.KV, 4, token_hash), Contents(PageKind.KV_INT8, 4, token_hash)
        for page in (0, 1, 2):
            arena.begin_write(page)
            arena.end_write(page, old)
        first = extents.pages(0, PageKind.KV_INT8)[0]
        arena.begin_write(first)
        assert not any(arena.read(page, old, lambda _: None) for page in (0, 1))
        assert arena.read(2, old, lambda _: None), "in another extent"
        arena.end_write(first, new)
        assert arena.read(first, new, lambda _: None)
        assert arena.contents(first) == new
        arena.close()
