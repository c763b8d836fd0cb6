"""Tests that KV goes to the arena and comes back bit for bit, or the copy reports that it did not."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.engine.copying import copies as page_copies
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.errors import ArenaError, PlanError
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.protocol.extents import PageBytes, PageKind
from alignedserve.protocol.int8_layout import Int8Layout
from tests.conftest import examples

NUM_BLOCKS, NUM_PAGES = 12, 5
CONFIG = ModelConfig(
    vocab_size=100,
    hidden_size=24,
    num_layers=3,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    max_positions=128,
    dtype="float32",
    eos_tokens=frozenset(),
)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    block_size: int
    page_size: int
    tokens: tuple[int, ...]
    seed: int
    verify: bool
    at_once: int = 1  # pages of a turn; of several, each goes in pieces through buffers, as on a GPU
    two_ended: bool = False  # some blocks are filled from their right end

    def blocks(self, seed: int) -> list[int]:
        count, right = -(-len(self.tokens) // self.block_size), NUM_BLOCKS // 2 if self.two_ended else 0
        turned = random.Random(seed + 1).sample(range(NUM_BLOCKS), right)
        blocks = random.Random(seed).sample(range(NUM_BLOCKS), count)
        return [~block if block in turned else block for block in blocks]

    def pages(self) -> list[int]:
        count = -(-len(self.tokens) // self.page_size)
        return random.Random(self.seed).sample(range(NUM_PAGES), count)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([1, 2, 4]))
    page_size = block_size * draw(st.integers(1, 4))
    most = min(NUM_BLOCKS * block_size, NUM_PAGES * page_size)
    tokens = draw(st.lists(st.integers(0, 99), max_size=most).map(tuple))
    return Case(
        *(draw(st.sampled_from([*BITS])), block_size, page_size, tokens, draw(st.integers(0, 9))),
        *(draw(st.booleans()), draw(st.integers(1, 3)), draw(st.booleans())),
    )


def case(tokens: int = 11, verify: bool = True, dtype: torch.dtype = torch.bfloat16, at_once: int = 1) -> Case:
    return Case(dtype, block_size=4, page_size=8, tokens=tuple(range(tokens)), seed=1, verify=verify, at_once=at_once)


def random_cache(case: Case, seed: int) -> torch.Tensor:
    """Return a cache of random bits, NaNs of every kind among them."""
    shape = (CONFIG.num_layers, 2 * NUM_BLOCKS, case.block_size, CONFIG.kv_dim)
    bits = torch.iinfo(BITS[case.dtype])
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(bits.min, bits.max, shape, dtype=BITS[case.dtype], generator=generator)
    return drawn.view(case.dtype)


def kv(cache: torch.Tensor, blocks: list[int], tokens: int) -> torch.Tensor:
    """[layers, 2, tokens, kv_dim], as bits."""
    halves = cache.view(BITS[cache.dtype])

    def in_order(block: int, half: int) -> torch.Tensor:
        return halves[:, 2 * ~block + half].flip(1) if block < 0 else halves[:, 2 * block + half]

    both = [torch.cat([in_order(block, half) for block in blocks], dim=1)[:, :tokens] for half in (0, 1)]
    return torch.stack(both, dim=1)


@contextmanager
def arena_for(case: Case) -> Iterator[Arena]:
    payload_bytes = CONFIG.kv_bytes(case.page_size, str(case.dtype).removeprefix("torch."))
    with TemporaryDirectory() as directory:
        arena = Arena.create(
            Path(directory, "arena"),
            pages=NUM_PAGES,
            payload_bytes=payload_bytes,
            page_size=case.page_size,
            incarnation=1,
        )
        yield arena
        arena.close()


@contextmanager
def int8_arena(case: Case) -> Iterator[Arena]:
    channels = 2 * CONFIG.num_layers * CONFIG.kv_dim
    sizes = PageBytes(CONFIG.kv_bytes(case.page_size, "bfloat16"), Int8Layout(channels, tokens=case.page_size).size)
    with TemporaryDirectory() as directory:
        path, pages = Path(directory, "arena"), sizes.divide(32)
        made = Arena.create(path, pages=pages, payload_bytes=sizes, page_size=case.page_size, incarnation=1)
        with closing(made) as arena:
            yield arena


def copier(cache: torch.Tensor, arena: Arena, case: Case) -> PageCopier:
    with (
        patch.object(page_copies, "pages_at_once", lambda *_: case.at_once),
        patch.object(page_copies, "goes_in_pieces", lambda _: case.at_once > 1),
        patch.object(page_copies, "_PIECE_BYTES", 2 * arena.payload_bytes // CONFIG.num_layers),
    ):
        made = PageCopier(cache, arena, case.page_size, case.verify)
    assert made.num_turns(NUM_PAGES) == -(-NUM_PAGES // case.at_once)
    return made


@given(case=cases())
@settings(deadline=None)
def test_a_round_trip_through_other_blocks_of_another_cache(case: Case) -> None:
    first, second = random_cache(case, 1), random_cache(case, 2)
    untouched = second.clone()
    here, there = case.blocks(case.seed), case.blocks(case.seed + 1)
    with arena_for(case) as arena:
        copier(first, arena, case).copy_out(here, case.pages(), case.tokens)
        with closing(Arena.attach(arena.path)) as attached:
            assert copier(second, attached, case).copy_in(case.pages(), there, case.tokens)
    if case.tokens:
        count = len(case.tokens)
        assert torch.equal(kv(second, there, count), kv(first, here, count))
    assert torch.equal(*(outside(cache, there, case) for cache in (second, untouched)))


def outside(cache: torch.Tensor, blocks: list[int], case: Case) -> torch.Tensor:
    """Return the bits of a cache without those of the request: other requests' bits, and the free end of its last
    block."""
    bits = cache.view(BITS[cache.dtype]).clone()
    for index in range(len(case.tokens)):
        block, offset = blocks[index // case.block_size], index % case.block_size
        own = max(block, ~block)
        bits[:, 2 * own : 2 * own + 2, -1 - offset if block < 0 else offset] = 0
    return bits


class Device:
    """A device with two streams. Ordered work runs only when somebody waits for it: then the stream that `choose` names
    goes on, or the other if it cannot."""

    def __init__(self, choose: Callable[[], int]) -> None:
        self.choose = choose
        self.streams: list[deque[Callable[[], bool]]] = [deque(), deque()]  # of the thread, and of the link
        self.now, self.most = 0, 0

    def order(self, work: Callable[[], object]) -> None:
        def done() -> bool:
            work()
            return True

        self.streams[self.now].append(done)

    def run_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            turn = self.streams if self.choose() == 0 else reversed(self.streams)
            stream = next(stream for stream in turn if stream and stream[0]())
            stream.popleft()


@pytest.fixture(params=[0, 1], ids=["thread", "link"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Work is ordered in two streams and runs late, so a wait that is missing shows in the KV."""
    device = Device(lambda: request.param)
    order_late(device, monkeypatch)
    yield device
    assert 0 < device.most < 40, "not all pages are queued at once"


def order_late(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    class Marked:
        def __init__(self, _device: torch.device) -> None:
            self.is_reached = False
            device.order(lambda: setattr(self, "is_reached", True))

        def go_behind(self) -> None:
            device.streams[device.now].append(lambda: self.is_reached)

        def wait(self) -> None:
            device.most = max(device.most, sum(map(len, device.streams)))
            device.run_until(lambda: self.is_reached)

    class Streams:
        def __enter__(self) -> None:
            device.now = 1

        def __exit__(self, *_: object) -> None:
            device.now = 0

    monkeypatch.setattr(page_copies, "Mark", Marked)
    monkeypatch.setattr(page_copies, "beside_steps", lambda _: Streams())
    monkeypatch.setattr(page_copies, "finish", lambda _: device.run_until(lambda: not device.streams[0]))
    copy = page_copies._copy
    monkeypatch.setattr(page_copies, "_copy", lambda out, x: device.order(partial(copy, out, x)))


def run_late(owner: Any, name: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    work = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **named: device.order(partial(work, *given, **named)))


def test_pieces_go_through_few_buffers_beside_each_other(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(tokens=8 * NUM_PAGES - 3, verify=False, at_once=NUM_PAGES)
    cache, back = random_cache(given, 1), random_cache(given, 2)
    with arena_for(given) as arena:
        out, into = copier(cache, arena, given), copier(back, arena, given)
        for copies, name in ((out, "gather"), (into, "scatter")):
            monkeypatch.setattr(copies, "_kernels", SimpleNamespace(**{name: getattr(copies._kernels, name)}))
            run_late(copies._kernels, name, device, monkeypatch)
        blocks, pages = range(2 * NUM_PAGES), range(NUM_PAGES)
        out.copy_out(blocks, pages, given.tokens)
        assert not any(device.streams)
        assert into.copy_in(pages, blocks, given.tokens)
        assert not any(device.streams)
    assert torch.equal(kv(back, [*blocks], len(given.tokens)), kv(cache, [*blocks], len(given.tokens)))


def test_int8_pages_go_through_the_same_buffers(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(tokens=8 * NUM_PAGES, verify=False, at_once=NUM_PAGES)
    cache = torch.randn(random_cache(given, 1).shape, generator=torch.Generator().manual_seed(0)).to(given.dtype)
    cache[1, :, :, 3] *= 1e6  # fp16 cannot hold what this channel needs
    at_once, back = torch.zeros_like(cache), torch.zeros_like(cache)
    blocks, pages = range(2 * NUM_PAGES), range(NUM_PAGES)
    with int8_arena(given) as arena:
        whole = copier(cache, arena, replace(given, at_once=1))
        whole.copy_out(blocks, pages, given.tokens)
        packed = list(arena.extents.pages(arena.extents.count - 1, PageKind.KV_INT8))[:NUM_PAGES]
        assert all(map(whole.rewrite, pages, packed))
        assert copier(at_once, arena, replace(given, at_once=1)).copy_in(packed, blocks, given.tokens)
        into = copier(back, arena, given)
        into._link.num_bytes = 300  # a layer of levels has 128, the scales 244
        for work in ("_unpack", "_expand"):
            run_late(into._forms[PageKind.KV_INT8], work, device, monkeypatch)
        assert into.copy_in(packed, blocks, given.tokens)
        assert not any(device.streams)
    assert torch.equal(back, at_once)
    written = 2 * len(blocks)  # K and V of each
    assert (back - cache)[:, :written, :, 4:].abs().max() < 0.1


@given(seed=st.integers(0, 1 << 30), lines=st.integers(17, 50))
@settings(deadline=None, max_examples=examples(40))
def test_int8_pages_are_made_beside_steps_whatever_goes_first(seed: int, lines: int) -> None:
    """The link's stream and the thread's may each be ahead at any time: the new pages, and the KV from there, are those
    of a copier that does one thing after the other."""
    given = case(tokens=8 * NUM_PAGES, at_once=NUM_PAGES)
    cache = torch.randn(random_cache(given, 1).shape, generator=torch.Generator().manual_seed(seed)).to(given.dtype)
    cache[1, :, :, 3] *= 1e6  # fp16 cannot hold what this channel needs
    back, meant = torch.zeros_like(cache), torch.zeros_like(cache)
    blocks, pages = range(2 * NUM_PAGES), range(NUM_PAGES)
    draw = random.Random(seed)
    with int8_arena(given) as arena, pytest.MonkeyPatch.context() as patched:
        one_by_one = copier(cache, arena, replace(given, at_once=1))
        one_by_one.copy_out(blocks, pages, given.tokens)
        *_, first, second = (list(arena.extents.pages(at, PageKind.KV_INT8)) for at in range(arena.extents.count))
        assert all(map(one_by_one.rewrite, pages, first))
        assert copier(meant, arena, replace(given, at_once=1)).copy_in(first[:NUM_PAGES], blocks, given.tokens)
        order_late(device := Device(lambda: draw.randrange(2)), patched)
        beside = copier(back, arena, given)
        beside._link.num_bytes = 16 * lines  # a layer of KV has 256 bytes, the scales 244
        for work in ("_quantise", "_unpack", "_expand"):
            run_late(beside._forms[PageKind.KV_INT8], work, device, patched)
        for page, old, new in zip(pages, first, second, strict=False):
            assert beside.rewrite(page, new)
            assert not any(device.streams), "the answer is given when nothing is under way"
            assert arena.payload(new) == arena.payload(old)
        assert beside.copy_in(second[:NUM_PAGES], blocks, given.tokens)
        assert 0 < device.most < 40
    assert torch.equal(back, meant)


@pytest.mark.parametrize("way", ["_gather", "_scatter"])
def test_pages_that_were_ordered_are_waited_for_where_one_fails(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they are copied to may belong to others as soon as the copy has failed."""
    given, ordered, waited = case(tokens=24, verify=False, at_once=3), list[int](), list[int]()
    order = getattr(PageCopier, way)

    def fails_at_last(copies: PageCopier, part: Any, payload: memoryview) -> object:
        ordered.append(part.page)
        if len(ordered) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return order(copies, part, payload)

    cache = random_cache(given, 1)
    with arena_for(given) as arena:
        copies = copier(cache, arena, given)
        copies.copy_out(range(6), range(3), given.tokens)
        monkeypatch.setattr(PageCopier, way, fails_at_last)
        monkeypatch.setattr(page_copies, "finish", lambda _: waited.append(len(ordered)))
        out, back = partial(copies.copy_out, range(6), range(3)), partial(copies.copy_in, range(3), range(6))
        with pytest.raises(torch.OutOfMemoryError):
            (out if way == "_gather" else back)(given.tokens)
        gc.collect()  # the error keeps the page that failed
    assert waited[-1] == 3


@pytest.mark.parametrize("dtype", [*BITS])
def test_the_layout_of_a_page(dtype: torch.dtype) -> None:
    given = case(dtype=dtype)
    cache = random_cache(given, 1)
    with arena_for(given) as arena:
        arena.payload(3)[:] = b"\7" * arena.payload_bytes
        copier(cache, arena, given).copy_out([5, 2, 8], [0, 3], given.tokens)
        raw = torch.frombuffer(bytearray(arena.payload(3)), dtype=BITS[dtype])
    page = raw.view(CONFIG.num_layers, 2, given.page_size, CONFIG.kv_dim)
    assert torch.equal(page[:, :, :3], kv(cache, [8], 3))
    assert set(page[:, :, 3:].contiguous().view(torch.uint8).flatten().tolist()) == {7}, (
        "the unused tail is left as it is"
    )


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("place", ["first", "last used"])
@pytest.mark.parametrize("page", [0, 3])
def test_a_flipped_bit_is_noticed(page: int, place: str, at_once: int) -> None:
    with written(case(at_once=at_once)) as (copies, arena):
        rows, row_bytes = 2 * CONFIG.num_layers, arena.payload_bytes // (2 * CONFIG.num_layers)
        used = row_bytes if page == 0 else 3 * row_bytes // 8
        arena.payload(page)[0 if place == "first" else (rows - 1) * row_bytes + used - 1] ^= 1
        assert not copies.copy_in([0, 3], [1, 2, 3], case().tokens)


def swap_tokens(page: torch.Tensor, draw: random.Random) -> None:
    first, second = draw.sample(range(3), 2)
    page[:, :, [first, second]] = page[:, :, [second, first]]


def swap_halves(page: torch.Tensor, draw: random.Random) -> None:
    layer = draw.randrange(len(page))
    page[layer] = page[layer].flip(0)


def cut_off(page: torch.Tensor, draw: random.Random) -> None:
    """Lose what was written last."""
    page.view(-1)[draw.randrange(3 * page.shape[-1]) :] = 0


def flip_bits(page: torch.Tensor, draw: random.Random) -> None:
    """Flip bits of the first three tokens."""
    bits = page[:, :, :3].contiguous()
    for _ in range(draw.choice((1, 1, 2, 3, 9))):
        bits.view(-1)[draw.randrange(bits.numel())] ^= 1 << draw.randrange(15)
    page[:, :, :3] = bits


@pytest.mark.parametrize("change", [flip_bits, swap_tokens, swap_halves, cut_off])
@pytest.mark.parametrize("page", [0, 3])
@given(seed=st.integers(0, 1 << 30))
@settings(deadline=None, max_examples=examples(40))
def test_no_changed_page_is_used(change: Callable[[torch.Tensor, random.Random], None], page: int, seed: int) -> None:
    """Page 0 is full, page 3 has three tokens."""
    with written(case()) as (copies, arena):
        rows = torch.frombuffer(arena.payload(page), dtype=torch.int16)
        rows = rows.view(CONFIG.num_layers, 2, case().page_size, CONFIG.kv_dim)
        used = rows[:, :, :3] if page else rows
        before = used.clone()
        change(rows, random.Random(seed))
        assert copies.copy_in([0, 3], [1, 2, 3], case().tokens) is torch.equal(used, before)
        del rows, used


def test_pages_whose_bytes_were_swapped_are_not_used() -> None:
    with written(case()) as (copies, arena), arena.payload(0) as first, arena.payload(3) as second:
        first[:], second[:] = bytes(second), bytes(first)
        assert not copies.copy_in([0, 3], [1, 2, 3], case().tokens)


def test_the_unused_tail_is_not_verified() -> None:
    with written(case()) as (copies, arena):
        arena.payload(3)[-1] ^= 1
        assert copies.copy_in([0, 3], [1, 2, 3], case().tokens)


def test_a_page_written_without_a_checksum_does_not_verify() -> None:
    with written(case(verify=False)) as (copies, arena):
        assert copies.copy_in([0, 3], [1, 2, 3], case().tokens)
        strict = copier(random_cache(case(), 2), arena, case(verify=True))
        assert not strict.copy_in([0, 3], [1, 2, 3], case().tokens)


@pytest.mark.parametrize("verify", [True, False])
def test_the_pages_of_other_tokens_are_not_used(verify: bool) -> None:
    tokens = case().tokens
    with written(case(verify=verify)) as (copies, _):
        assert not copies.copy_in([0, 3], [1, 2, 3], (99, *tokens[1:]))
        assert not copies.copy_in([0, 3], [1, 2, 3], tokens[:-1]), "shorter"
        assert not copies.copy_in([0, 3], [1, 2, 3], (*tokens, 5)), "longer"
        assert not copies.copy_in([3, 0], [1, 2, 3], tokens), "in another order"
        assert not copies.copy_in([0, 1], [1, 2, 3], tokens), "never written"


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("page", [0, 3])
@pytest.mark.parametrize("verify", [True, False])
def test_a_torn_page_is_not_used(verify: bool, page: int, at_once: int) -> None:
    with written(case(verify=verify, at_once=at_once)) as (copies, arena):
        arena.begin_write(page)
        assert not copies.copy_in([0, 3], [1, 2, 3], case().tokens)


def test_a_copy_out_that_fails_leaves_no_page_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with written(case()) as (copies, _):
        with monkeypatch.context() as patched:
            patched.setattr(PageCopier, "_gather", interrupted)
            with pytest.raises(KeyboardInterrupt):
                copies.copy_out([1, 2, 3], [0, 3], case().tokens)
        assert not copies.copy_in([0, 3], [1, 2, 3], case().tokens)


def interrupted(*_: object) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("blocks", "pages", "message"),
    [
        ([1, 2], [0, 3], "2 blocks are too few"),
        ([1, 2, 3], [0], "1 pages are too few"),
        ([1, 2, 12], [0, 3], "0..11"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(blocks: list[int], pages: list[int], message: str) -> None:
    with written(case()) as (copies, _):
        with pytest.raises(PlanError, match=message):
            copies.copy_in(pages, blocks, case().tokens)
        with pytest.raises(PlanError, match=message):
            copies.copy_out(blocks, pages, case().tokens)


def test_an_arena_of_another_model_is_refused() -> None:
    with arena_for(case()) as arena:
        with pytest.raises(ArenaError, match="this model needs 8 tokens in 1536"):
            copier(random_cache(case(dtype=torch.float32), 1), arena, case())
        with pytest.raises(ArenaError, match="do not hold whole blocks"):
            PageCopier(random_cache(case(), 1), arena, page_size=6, verify=True)


@contextmanager
def written(case: Case) -> Iterator[tuple[PageCopier, Arena]]:
    """Write a request's KV into pages 0 and 3."""
    with arena_for(case) as arena:
        copies = copier(random_cache(case, 1), arena, case)
        copies.copy_out([5, 2, 8], [0, 3], case.tokens)
        yield copies, arena


@given(case=cases(), data=st.data())
@settings(deadline=None)
def test_tokens_that_have_no_slot_come_from_where_they_are_kept(case: Case, data: st.DataObject) -> None:
    cache, here, there = random_cache(case, 1), case.blocks(case.seed), case.blocks(case.seed + 1)
    tokens = st.sampled_from(range(len(case.tokens))) if case.tokens else st.nothing()
    lost = sorted(data.draw(st.sets(tokens) if case.tokens else st.just(set[int]())))
    held = kv(cache, here, len(case.tokens)).clone() if case.tokens else None
    spoiled = cache.clone()
    saved = dict[int, torch.Tensor]()
    for token in lost:
        block, at = here[token // case.block_size], token % case.block_size
        block, offset = (~block, case.block_size - 1 - at) if block < 0 else (block, at)
        saved[token] = cache[:, 2 * block : 2 * block + 2, offset].clone()
        spoiled[:, 2 * block : 2 * block + 2, offset] = float("nan")

    def amend(rows: torch.Tensor, tokens: range) -> bool:
        found = [token for token in tokens if token in saved]
        for token in found:
            rows[:, :, token - tokens.start] = saved[token]
        return bool(found)

    with arena_for(case) as arena:
        copier(spoiled, arena, case).copy_out(here, case.pages(), case.tokens, amend=amend)
        assert copier(cache, arena, case).copy_in(case.pages(), there, case.tokens)
    if held is not None:
        assert torch.equal(kv(cache, there, len(case.tokens)), held)
