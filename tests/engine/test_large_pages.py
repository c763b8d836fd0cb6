"""Tests that the memory of large results is made once, and is never reused while a result is held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from alignedserve.engine.device import large_pages
from alignedserve.engine.device.large_pages import KeptMemory


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> KeptMemory:
    monkeypatch.setattr(large_pages, "_LARGEST_KEPT", 1 << 12)
    monkeypatch.setattr(large_pages, "_KEPT", 1 << 16)
    return KeptMemory()


def test_the_next_is_of_the_same_memory_once_nobody_holds_the_last(kept: KeptMemory) -> None:
    first = kept.empty((4, 1024), torch.float32)
    at = first.data_ptr()
    view = first[1:]
    del first
    assert kept.empty((4, 1024), torch.float32).data_ptr() != at, "a part of it is held"
    del view
    second = kept.empty((4, 1024), torch.float32)
    at = second.data_ptr()
    del second
    assert kept.empty((2, 1024), torch.float32).data_ptr() == at, "a smaller one fits too"


def test_what_is_held_keeps_its_numbers(kept: KeptMemory) -> None:
    held = [kept.empty((1024, 2), torch.float32).fill_(number) for number in range(3)]
    assert [tensor.unique().tolist() for tensor in held] == [[0], [1], [2]]


def test_a_larger_tensor_has_memory_of_its_own(kept: KeptMemory) -> None:
    kept.empty((1024,), torch.float32).zero_()
    assert kept.empty((4096,), torch.float32).fill_(1).sum() == 4096


@pytest.mark.parametrize("count", [8, 1 << 20])
def test_the_small_and_the_very_large_are_not_kept(kept: KeptMemory, count: int) -> None:
    kept.empty((count,), torch.float32).zero_()
    assert kept._memory is None


def test_that_there_is_none_is_too_little_memory() -> None:
    """A step that gets this error ends with a result that reports it; any other error would end the worker."""
    with pytest.raises(MemoryError, match="has no 68719476736 MB"):
        large_pages.zeros((1 << 56,), torch.uint8)


def test_a_device_cache_is_mapped_ahead_of_the_steps_and_keeps_its_numbers() -> None:
    """Else a step that writes to the first of a large page waits until the system has cleared it, in every layer."""
    cache = large_pages.zeros((3, 40, 16, 8192), torch.bfloat16)  # 10 MB a layer
    cache[1, 7] = 2.0
    before = mapped_kb()
    large_pages.map_ahead(cache, 2, 0.0)
    assert mapped_kb() - before < 1 << 10, "there was no time"
    large_pages.map_ahead(cache, 2, 60.0, most_bytes=12 << 20)
    assert 9 << 10 < mapped_kb() - before < 20 << 10, "what nothing is written to is for others"
    large_pages.map_ahead(cache, 2, 60.0)
    assert mapped_kb() - before > 23 << 10
    assert cache.sum() == 2.0 * cache[1, 7].numel()


def test_a_system_that_maps_nothing_ahead_maps_as_steps_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "POPULATE_WRITE", 12345)  # a system that does not know it
    cache, before = large_pages.zeros((2, 640, 16, 1024), torch.bfloat16), mapped_kb()
    large_pages.map_ahead(cache, 2, 60.0)
    assert mapped_kb() - before < 1 << 10
    assert not cache.any()


def mapped_kb() -> int:
    return int(next(row for row in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in row).split()[1])
