"""Tests of how much fits into memory, and of the error where it is too little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from alignedserve.architectures.families.llama import LlamaConfig
from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.architectures.rope import Rope
from alignedserve.config.config import Config, load
from alignedserve.core import AttentionPattern, Fold
from alignedserve.errors import ConfigError
from alignedserve.sizing.capacity import capacity

MIB = 1 << 20
# 8 layers, K and V, 4 heads of 64, in bf16: 8 KiB a token, so 128 tokens in a MiB.
MODEL = ModelConfig(
    vocab_size=32_000,
    hidden_size=1024,
    num_layers=8,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    max_positions=4096,
    dtype="bfloat16",
    eos_tokens=frozenset({2}),
)


def config(**changes: Any) -> Config:
    """Make a configuration from names with `__` in place of dots. Its sizes are decided, as those of every part are."""
    given = {name.replace("__", "."): value for name, value in changes.items()}
    cache = {} if given.get("engine.device") == "cuda" else {"engine.kv_memory_mb": 512}
    return load(cache | {"kvpool.memory_mb": 2048} | given, {}, None)


def split(**changes: Any) -> Config:
    return config(**{"topology": "1+1", **changes})


def test_the_numbers() -> None:
    got = capacity(split(engine__kv_memory_mb=100, kvpool__memory_mb=65), MODEL)
    assert (got.dtype, got.max_model_len) == ("bfloat16", 4096)
    assert got.limits.num_blocks == 100 * 128 // 16
    assert got.page_bytes == 64 * 8192
    assert got.num_pages == 65 * MIB // got.page_bytes == 130
    assert (got.limits.block_size, got.limits.page_size) == (16, 64)
    assert (got.limits.max_step_tokens, got.limits.max_batch) == (
        config().engine.step_tokens,
        config().engine.seats,
    )


def test_memory_for_the_windows_of_all_layers_is_enough_for_requests_of_any_length() -> None:
    little = {"engine__kv_memory_mb": 6, "kvpool__memory_mb": 8}  # 768 tokens, and 16 pages of 64
    windowed = replace(MODEL, windows=(512,) * 8)
    limits = capacity(split(**little), windowed).limits
    assert (limits.reach, limits.most_held, limits.num_tokens) == (512, 512 + 64, 768)
    mixed = replace(MODEL, windows=(*(512,) * 7, None))
    for keeps_all in (MODEL, mixed):
        with pytest.raises(ConfigError, match="one request may have 4096"):
            capacity(split(**little), keeps_all)
    with pytest.raises(ConfigError, match="one request may have 4096"):
        capacity(split(schedule__room="whole", **little), windowed)
    enough = {"engine__kv_memory_mb": 100}
    assert capacity(split(**enough), mixed).limits.fold == Fold(AttentionPattern(512), 8)
    assert capacity(split(schedule__room="whole", **enough), mixed).limits.fold is None
    with pytest.raises(ConfigError, match="one request may have 576"):
        capacity(split(**little | {"engine__kv_memory_mb": 4}), windowed)


def test_kv_in_int8_takes_a_byte_for_a_number_and_two_for_a_head() -> None:
    of_bf16 = capacity(split(engine__kv_memory_mb=100), MODEL)
    got = capacity(split(engine__kv_memory_mb=100, engine__kv_dtype="int8"), MODEL)
    assert got.page_bytes == 64 * 8 * 2 * 4 * (64 + 2)
    assert got.limits.num_tokens == 100 * MIB // (16 * 8 * 2 * 4 * 66) * 16 > 1.9 * of_bf16.limits.num_tokens
    assert got.num_pages > 1.9 * of_bf16.num_pages
    assert got.dtype == "bfloat16"


def test_heads_of_an_odd_size_have_no_place_for_scales() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.kv_dtype cannot be int8: this model has heads of 63 numbers"):
        capacity(split(engine__kv_dtype="int8"), replace(MODEL, head_dim=63))


def test_on_a_gpu_the_cache_is_what_is_left_there() -> None:
    """Only a worker whose weights are loaded knows how much is left."""
    gpu = {"topology": "colocated", "engine__device": "cuda"}
    assert capacity(config(**gpu), MODEL).limits.num_tokens == 0
    assert capacity(config(**gpu), MODEL, left=100 * MIB).limits.num_tokens == 100 * 128
    assert capacity(config(**gpu, engine__kv_memory_mb=50), MODEL, left=100 * MIB).limits.num_tokens == 50 * 128
    with pytest.raises(ConfigError, match=r"^31 MB are left for KV on this GPU, which hold 3968 tokens, one request"):
        capacity(config(**gpu), MODEL, left=31 * MIB)


def test_a_wider_type_holds_half_as_much() -> None:
    half = capacity(split(), MODEL)
    full = capacity(split(engine__dtype="float32"), MODEL)
    assert full.dtype == "float32"
    assert full.page_bytes == 2 * half.page_bytes
    assert (half.limits.num_blocks, half.num_pages) == (2 * full.limits.num_blocks, 2 * full.num_pages)


def test_larger_blocks_and_pages() -> None:
    got = capacity(split(engine__block_size=64, kvpool__page_size=128), MODEL)
    assert got.limits.num_blocks == 512 * 128 // 64
    assert got.page_bytes == 128 * 8192


def test_a_shorter_request_needs_less() -> None:
    assert capacity(split(engine__max_model_len=1000), MODEL).max_model_len == 1000
    short = capacity(split(engine__max_model_len=128, engine__kv_memory_mb=1, kvpool__memory_mb=1), MODEL)
    assert (short.limits.num_blocks, short.num_pages) == (8, 2)


def test_what_just_fits_and_what_just_does_not() -> None:
    capacity(split(engine__kv_memory_mb=32, kvpool__memory_mb=32), MODEL)
    with pytest.raises(ConfigError) as refused:
        capacity(split(engine__kv_memory_mb=31), MODEL)
    assert str(refused.value) == (
        "--kv-memory-mb 31 holds 3968 tokens, but one request may have 4096: --kv-memory-mb 32 does, or lower"
        " --max-model-len to 3968"
    )
    with pytest.raises(ConfigError) as refused:
        capacity(split(kvpool__memory_mb=31), MODEL)
    assert str(refused.value) == (
        "--pool-memory-mb 31 holds 3968 tokens, but one request may have 4096: --pool-memory-mb 37 does, or lower"
        " --max-model-len to 3968"
    )


def test_the_advice_of_the_error_works() -> None:
    capacity(split(engine__kv_memory_mb=31, engine__max_model_len=3968), MODEL)
    capacity(split(kvpool__memory_mb=31, engine__max_model_len=3968), MODEL)


def test_a_colocated_engine_needs_no_pool() -> None:
    capacity(config(topology="colocated", kvpool__memory_mb=1), MODEL)
    with pytest.raises(ConfigError, match=r"--kv-memory-mb 1 holds 128 tokens"):
        capacity(config(topology="colocated", engine__kv_memory_mb=1), MODEL)


def test_memory_for_not_even_one_block_or_page() -> None:
    """No shorter request would help then, so the error does not suggest it."""
    for changes in (
        {"engine__kv_memory_mb": 1, "engine__block_size": 256, "kvpool__page_size": 256},
        {"kvpool__memory_mb": 1, "kvpool__page_size": 256},
    ):
        with pytest.raises(ConfigError, match="1 holds 0 tokens") as refused:
            capacity(split(**changes), MODEL)
        assert "max-model-len" not in str(refused.value)


def test_more_than_the_model_was_made_for() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 5000 exceeds the model's 4096"):
        capacity(split(engine__max_model_len=5000), MODEL)


def llama(num_kv_heads: int) -> LlamaConfig:
    """Return a model as wide as Llama 3 8B, or with as many heads for K and V as Llama 2 7B."""
    return LlamaConfig(
        vocab_size=32_000,
        hidden_size=4096,
        num_layers=2,
        num_heads=32,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        max_positions=4096,
        dtype="bfloat16",
        eos_tokens=frozenset({2}),
        intermediate_size=11_008,
        norm_eps=1e-5,
        rope=Rope(10_000.0, 128),
        tied_embeddings=False,
    )


def test_a_device_does_not_mix_kinds_where_hidden_does_not_pay() -> None:
    """The hidden vector of Llama 3 8B is larger than its K and V."""
    capacity(config(schedule__memory="hybrid"), llama(32))
    with pytest.raises(
        ConfigError, match=r"schedule.memory cannot be hybrid: .*4096 instead of 2048 .*: set it to plain"
    ):
        capacity(config(schedule__memory="hybrid"), llama(8))


@pytest.mark.parametrize("compression", ["auto", "int8"])
def test_a_pool_that_compresses_is_cut_into_extents(compression: str) -> None:
    got = capacity(split(kvpool__compression=compression, kvpool__memory_mb=100), MODEL)
    assert got.num_pages == 100 * MIB // got.page_bytes == 200
    assert (got.extents.count, got.extents.kv, got.extents.kv_int8) == (25, 8, 15)


def test_an_extent_that_is_not_whole_is_left_out() -> None:
    got = capacity(split(kvpool__compression="int8", kvpool__memory_mb=101), MODEL)
    assert (got.num_pages, got.extents.count) == (200, 25)


def test_ranks_each_have_a_share_of_what_is_kept() -> None:
    """Every rank's device has as much memory as was given; the pool's memory is for all ranks together."""
    given = {"kvpool__memory_mb": 1024}
    alone, shared = (capacity(split(engine__tensor_parallel_size=ranks, **given), llama(32)) for ranks in (1, 2))
    assert shared.limits.num_blocks == 2 * alone.limits.num_blocks
    assert (shared.num_pages, 2 * shared.page_bytes) == (alone.num_pages, alone.page_bytes)
