"""Where vectors lie: what kernels/reference.py draws, and every kernel counts on."""

from __future__ import annotations

import torch

from alignedserve.kernels.reference import k_slots, write_slots


def test_k_slots_are_those_of_the_even_blocks_in_the_order_of_the_pairs() -> None:
    assert k_slots((1, 0, 5), 4).tolist() == [8, 9, 10, 11, 0, 1, 2, 3, 40, 41, 42, 43]
    assert k_slots((3, 2), 1).tolist() == [6, 4]


def test_no_pairs_have_no_slots() -> None:
    """A request without KV: its slots are an index like any other."""
    slots = k_slots((), 4)
    assert slots.shape == (0,)
    assert torch.zeros(8)[slots].shape == (0,)


def test_k_lies_in_the_even_block_of_a_pair_and_v_in_the_odd() -> None:
    block_size, kv_dim = 4, 2
    cache = torch.zeros(6, block_size, kv_dim)
    k = torch.arange(1.0, 6.0)[:, None].expand(5, kv_dim)
    write_slots(cache, k_slots((2, 0), block_size)[:5], k, -k)
    assert cache[4, :, 0].tolist() == [1, 2, 3, 4]
    assert cache[0, :, 0].tolist() == [5, 0, 0, 0]
    assert torch.equal(cache[1::2], -cache[::2])
    assert not cache[2:4].any(), "nothing was written to the pair between"
