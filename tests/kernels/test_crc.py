"""Tests that every kernel's CRC-32 is zlib's, and that changed bytes have another."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.dispatch.dispatcher import Kernels
from tests.conftest import SOAK
from tests.kernels.every import on_all_kernels


def anything(rows: int, num_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, num_bytes), dtype=torch.uint8, generator=generator)


@on_all_kernels
@given(
    rows=st.integers(1, 5),
    num_bytes=st.one_of(st.integers(0, 300), st.integers(400, 9_000)),
    skipped=st.integers(0, 70),
    apart=st.sampled_from([0, 1, 64, 100]),
    seed=st.integers(0, 9),
)
@settings(deadline=None)
def test_it_is_zlibs(kernels: Kernels, rows: int, num_bytes: int, skipped: int, apart: int, seed: int) -> None:
    """Rows of any size begin anywhere, with other bytes between them."""
    own = anything(rows, skipped + num_bytes + apart, seed)[:, skipped : skipped + num_bytes]
    assert kernels.crc32(own) == zlib.crc32(own.contiguous().numpy().tobytes())


@on_all_kernels
@pytest.mark.parametrize("num_bytes", [1, 63, 64, 511, 512, 3 * 512 + 64 + 7])
def test_a_flipped_bit_of_every_byte_is_noticed(kernels: Kernels, num_bytes: int) -> None:
    """In the long form every bit."""
    own = anything(1, num_bytes, 1)
    right = kernels.crc32(own)
    for at in range(num_bytes):
        for bit in range(8) if SOAK else (at % 8,):
            own[0, at] ^= 1 << bit
            assert kernels.crc32(own) != right
            own[0, at] ^= 1 << bit
    assert kernels.crc32(own) == right


@on_all_kernels
@given(first=st.integers(0, 40_000), flipped=st.integers(1, 2**32 - 1), second=st.integers(0, 40_000))
@settings(deadline=None)
def test_every_burst_and_every_two_bits_are_noticed(kernels: Kernels, first: int, flipped: int, second: int) -> None:
    """A burst is any change within 32 bits in a row."""
    own = anything(1, 5_008, 2)
    right = kernels.crc32(own)
    if first != second:
        assert kernels.crc32(flip(flip(own, first, 1), second, 1)) != right
    assert kernels.crc32(flip(own, first, flipped)) != right


def flip(own: torch.Tensor, at: int, flipped: int) -> torch.Tensor:
    """Return the bytes with some of the bits from `at` on flipped."""
    changed = own.clone()
    for place, byte in enumerate((flipped << at % 8).to_bytes(5, "little"), at // 8):
        changed[0, place] ^= byte
    return changed
