"""Tests that vectors go from blocks to the rows of a page and back, every bit of them, and nothing else is touched."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.common.spans import slots_of
from alignedserve.kernels.dispatch.dispatcher import Kernels
from tests.kernels.every import on_all_kernels, on_native_kernels

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    layers: int
    blocks: int
    block_size: int
    kv_dim: int
    slots: tuple[int, ...]
    page_tokens: int  # tokens of the page; the rows are its first rows
    seed: int

    @property
    def cache(self) -> torch.Tensor:
        return anything((self.layers, 2 * self.blocks, self.block_size, self.kv_dim), self.dtype, self.seed)

    @property
    def page(self) -> torch.Tensor:
        return anything((self.layers, 2, self.page_tokens, self.kv_dim), self.dtype, self.seed + 1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    blocks, block_size = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4, 16]))
    k_slots = [2 * block * block_size + offset for block in range(blocks) for offset in range(block_size)]
    slots = draw(
        st.one_of(st.just(k_slots), st.lists(st.sampled_from(k_slots), unique=True), of_blocks(blocks, block_size))
    )
    return Case(
        *(draw(st.sampled_from([*BITS])), draw(st.integers(1, 3)), blocks, block_size),
        *(draw(st.sampled_from([1, 5, 24, 64])), tuple(slots)),
        page_tokens=len(slots) + draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 9)),
    )


def of_blocks(blocks: int, block_size: int) -> st.SearchStrategy[list[int]]:
    """Draw the slots of some blocks, each filled from its left or its right end; the last block may be partly
    filled."""
    return st.tuples(
        st.permutations(range(blocks)), st.lists(st.booleans(), min_size=blocks, max_size=blocks), st.integers(0, 20)
    ).map(lambda drawn: block_slots(drawn[0], drawn[1], block_size)[: max(0, blocks * block_size - drawn[2])])


def block_slots(blocks: list[int], from_right: list[bool], block_size: int) -> list[int]:
    turned = [~block if right else block for block, right in zip(blocks, from_right, strict=True)]
    slots: list[int] = slots_of(torch.tensor(turned), block_size).tolist()
    return slots


def anything(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bits, NaNs of every kind among them."""
    bits = torch.iinfo(BITS[dtype])
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(bits.min, bits.max, shape, dtype=BITS[dtype], generator=generator).view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.dtype])


def of_slot(cache: torch.Tensor, slot: int) -> torch.Tensor:
    """Return K and V of a token, [layers, 2, kv_dim]."""
    block, offset = divmod(slot, cache.shape[2])
    return cache[:, block : block + 2, offset]


@on_all_kernels
@given(case=cases())
@settings(deadline=None)
def test_rows_are_what_lies_at_the_slots(kernels: Kernels, case: Case) -> None:
    cache, page, rows = case.cache, case.page, len(case.slots)
    kernels.gather(cache, torch.tensor(case.slots, dtype=torch.long), page[:, :, :rows])
    for token, slot in enumerate(case.slots):
        assert torch.equal(bits(page)[:, :, token], of_slot(bits(cache), slot))
    assert torch.equal(bits(page)[:, :, rows:], bits(case.page)[:, :, rows:]), "the rest of the page is left as it is"
    assert torch.equal(bits(cache), bits(case.cache))


@on_all_kernels
@given(case=cases())
@settings(deadline=None)
def test_slots_hold_what_is_in_the_rows_and_others_what_they_held(kernels: Kernels, case: Case) -> None:
    cache, page, rows = case.cache, case.page, len(case.slots)
    kernels.scatter(cache, torch.tensor(case.slots, dtype=torch.long), page[:, :, :rows])
    expected = bits(case.cache)
    for token, slot in enumerate(case.slots):
        of_slot(expected, slot)[:] = bits(page)[:, :, token]
    assert torch.equal(bits(cache), expected)
    assert torch.equal(bits(page), bits(case.page))


@on_all_kernels
@given(case=cases())
@settings(deadline=None)
def test_a_copy_that_sums_up_copies_the_same_and_returns_zlibs_crc32(kernels: Kernels, case: Case) -> None:
    slots = torch.tensor(case.slots, dtype=torch.long)
    for copy, copy_and_sum in ((kernels.gather, kernels.gather_and_sum), (kernels.scatter, kernels.scatter_and_sum)):
        (cache, page), (other_cache, other_page) = ((case.cache, case.page) for _ in range(2))
        rows = other_page[:, :, : len(slots)]
        copy(cache, slots, page[:, :, : len(slots)])
        assert copy_and_sum(other_cache, slots, rows) == crc_of(rows)
        assert torch.equal(bits(other_cache), bits(cache))
        assert torch.equal(bits(other_page), bits(page))


def crc_of(rows: torch.Tensor) -> int:
    return zlib.crc32(bits(rows.contiguous()).numpy().tobytes())


LARGE = Case(torch.bfloat16, 3, 40, 16, 776, tuple(block_slots([*range(39, -1, -2)], [False, True] * 10, 16)), 333, 1)


@on_all_kernels
def test_a_copy_that_is_large_enough_to_go_past_the_caches(kernels: Kernels) -> None:
    """Rows begin far from a cache line; copies run in threads, from either end of the blocks."""
    slots, cache, page = torch.tensor(LARGE.slots), LARGE.cache, LARGE.page
    rows = page[:, :, 5 : 5 + len(slots)]
    kernels.gather(cache, slots, rows)
    for token in range(len(slots)):
        assert torch.equal(bits(rows)[:, :, token], of_slot(bits(cache), LARGE.slots[token]))
    assert torch.equal(bits(page)[:, :, :5], bits(LARGE.page)[:, :, :5])
    back = anything(tuple(cache.shape), cache.dtype, 7)
    kernels.scatter(back, slots, rows)
    again = LARGE.page[:, :, : len(slots)]
    kernels.gather(back, slots, again)
    assert torch.equal(bits(again), bits(rows.contiguous()))
    assert kernels.gather_and_sum(cache, slots, again) == kernels.scatter_and_sum(back, slots, rows) == crc_of(rows)
    assert torch.equal(bits(again), bits(rows.contiguous()))


@on_all_kernels
def test_rows_may_be_strided(kernels: Kernels) -> None:
    cache, slots = anything((2, 8, 4, 6), torch.float32, 1), torch.tensor([9, 8, 16, 17])
    wide = torch.zeros(2, 2, 4, 10)
    kernels.gather(cache, slots, wide[..., 2:8])
    packed = torch.zeros(2, 2, 4, 6)
    kernels.gather(cache, slots, packed)
    assert torch.equal(bits(wide)[..., 2:8], bits(packed))
    assert not wide[..., :2].any()
    assert not wide[..., 8:].any()


@on_native_kernels
@pytest.mark.parametrize("slot", [-1, 12, 16, 1 << 60])
def test_a_slot_outside_the_cache_is_refused(kernels: Kernels, slot: int) -> None:
    """The V of slot 12 would lie behind the last block."""
    cache, rows = torch.zeros(2, 4, 4, 8), torch.ones(2, 2, 2, 8)
    for copy in (kernels.gather, kernels.scatter):
        with pytest.raises(IndexError, match="outside the 4 blocks"):
            copy(cache, torch.tensor([0, slot]), rows)
    assert not cache.any()
    assert rows.all()


@on_native_kernels
def test_what_does_not_fit_is_refused(kernels: Kernels) -> None:
    cache, slots = torch.zeros(2, 4, 4, 8), torch.tensor([0, 1])
    for rows in (torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 2, 8).bfloat16(), torch.zeros(2, 2, 2, 16)[..., ::2]):
        with pytest.raises(ValueError, match="rows are"):
            kernels.gather(cache, slots, rows)
    with pytest.raises(ValueError, match="int64"):
        kernels.gather(cache, slots.int(), torch.zeros(2, 2, 2, 8))
