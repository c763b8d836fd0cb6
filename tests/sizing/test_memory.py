"""Tests that what does not fit into memory is refused before anything is loaded, with the numbers and what to
change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.architectures.weight_files import count_numbers
from alignedserve.config.config import load
from alignedserve.errors import MemoryTooSmall, ModelError
from alignedserve.machine.resources import MachineMemory
from alignedserve.sizing import memory
from alignedserve.sizing.capacity import capacity
from alignedserve.sizing.memory import (
    FreeMemory,
    check_machine,
    check_worker,
    demand,
    shared_memory,
    why_too_small,
)

MIB = 1 << 20
MODEL = ModelConfig(
    vocab_size=1 << 15,
    hidden_size=1024,
    num_layers=8,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    max_positions=1024,
    dtype="bfloat16",
    eos_tokens=frozenset({2}),
)
STEP_MB = 23  # rounded up: 512 tokens of 10.5 Ki numbers in 2 bytes, 64 rows of logits in 2 and in 4
GPU_STEP_MB = 90  # 2,048 tokens and 256 rows


def shard(path: Path, **shapes: tuple[str, list[int]]) -> None:
    header = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, shape) in shapes.items()}
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model folder of 100 Mi numbers, which are 200 MB in bf16."""
    shard(tmp_path / "model.safetensors", a=("BF16", [64, MIB]), b=("F32", [36, MIB]), mask=("BOOL", [9, MIB]))
    return tmp_path


def check(folder: Path, available_mb: int | None, **changes: Any) -> None:
    free = FreeMemory(None if available_mb is None else available_mb * MIB, 1 << 50)
    config = load(
        {"engine.kv_memory_mb": 512} | {name.replace("__", "."): value for name, value in changes.items()}, {}, None
    )
    check_machine(config, MODEL, capacity(config, MODEL), folder, free)


def test_numbers_are_counted_in_all_shards(folder: Path) -> None:
    assert count_numbers(folder) == 100 * MIB
    shard(folder / "one", a=("F16", [3, 4]), odd=("I8", [7]))
    shard(folder / "two", b=("F64", []))
    places = {"a": "one", "odd": "one", "b": "two"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert count_numbers(folder) == 13


@pytest.mark.parametrize("content", [b"", b"\x10", b"\xff" * 8, (3).to_bytes(8, "little") + b"[1]", b"\0" * 9])
def test_a_file_without_a_header(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="cannot be read"):
        count_numbers(folder)


def test_what_fits_and_what_does_not(folder: Path) -> None:
    needed = 200 + 512 + STEP_MB + 128
    check(folder, needed, kvpool__memory_mb=128)
    with pytest.raises(MemoryTooSmall) as refused:
        check(folder, needed - 100, kvpool__memory_mb=128)
    assert str(refused.value) == (
        f"{needed - 100} MB of memory are available, {needed} are needed: a worker takes 200 MB of weights as bfloat16,"
        f" 512 of KV and {STEP_MB} for a step, the KV pool 128: lower --kv-memory-mb from 512 to 412"
    )
    check(folder, needed - 100, engine__kv_memory_mb=412, kvpool__memory_mb=128)


@pytest.mark.parametrize(("quantization", "weights"), [("int8", 137), ("int4", 121)])
def test_quantised_weights_take_less(folder: Path, quantization: str, weights: int) -> None:
    needed = weights + 512 + STEP_MB + 128
    with pytest.raises(MemoryTooSmall, match=f"{weights} MB of weights as {quantization} and bfloat16"):
        check(folder, needed - 2, engine__quantization=quantization, kvpool__memory_mb=128)
    check(folder, needed, engine__quantization=quantization, kvpool__memory_mb=128)


def test_a_layer_on_its_way_counts_where_kv_and_steps_take_less(folder: Path) -> None:
    """A fused layer of two tensors as large as the largest, a byte for each number, is not packed yet."""
    weights, largest, options = 137, 64, {"engine__quantization": "int8", "engine__kv_memory_mb": 64}
    needed = weights + 2 * largest + 64
    check(folder, needed, kvpool__memory_mb=64, **options)
    with pytest.raises(MemoryTooSmall) as refused:
        check(folder, needed - 2, kvpool__memory_mb=64, **options)
    assert f"64 of KV and {STEP_MB} for a step, while it loads 128 beside the weights" in str(refused.value)
    assert str(refused.value).endswith("lower --pool-memory-mb from 64 to 62")
    with pytest.raises(MemoryTooSmall, match="take a smaller model or fewer workers"):
        check(folder, weights + 100, kvpool__memory_mb=64, **options)
    plain = 200 + 64 + STEP_MB
    check(folder, plain + 64, engine__kv_memory_mb=64, kvpool__memory_mb=64)


def test_all_workers_and_the_pool_count(folder: Path) -> None:
    with pytest.raises(MemoryTooSmall) as refused:
        check(folder, 1024, topology="1+1", engine__kv_memory_mb=256, kvpool__memory_mb=128)
    assert "each of 2 workers takes 200 MB" in str(refused.value)
    assert "the KV pool 128: lower --kv-memory-mb from 256 to 225" in str(refused.value)
    check(folder, 1024, topology="1+1", engine__kv_memory_mb=225, kvpool__memory_mb=128)


def test_a_pool_that_takes_all_of_it(folder: Path) -> None:
    split = {"topology": "1+1", "engine__kv_memory_mb": 64}
    with pytest.raises(MemoryTooSmall, match=r"lower --pool-memory-mb from 1000 to 427"):
        check(folder, 1000, kvpool__memory_mb=1000, **split)
    check(folder, 1000, kvpool__memory_mb=427, **split)


@pytest.mark.parametrize(
    ("available", "changes", "advice"),
    [
        (218, {}, "lower --max-step-tokens from 512, and --kv-memory-mb"),
        (398, {"engine__dtype": "float32"}, "say --dtype bfloat16"),
        (100, {}, "take a smaller model"),
    ],
)
def test_advice_where_less_kv_is_not_enough(available: int, changes: dict[str, Any], advice: str, folder: Path) -> None:
    with pytest.raises(MemoryTooSmall) as refused:
        check(folder, available, kvpool__memory_mb=8, **changes)
    assert advice in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_pool_smaller_than_a_batch_is_said_to_be() -> None:
    for memory_mb, is_small in ((100, True), (300, False)):
        config = load({"kvpool.memory_mb": memory_mb, "engine.kv_memory_mb": 512}, {}, None)
        assert (why_too_small(config, capacity(config, MODEL)) is not None) == is_small


def test_the_table_of_tokens_is_on_its_way_where_weights_are_random(folder: Path) -> None:
    """Random weights are made layer by layer: two layers of whole numbers at once, of a byte each."""
    config = load({"engine.load_format": "dummy", "engine.quantization": "int8"}, {}, None)
    assert demand(config, MODEL, capacity(config, MODEL), folder).loading == 2 * (1 << 15) * MODEL.hidden_size


def test_device_caches_that_others_map_are_in_shared_memory_too() -> None:
    flags = {"engine.kv_memory_mb": 64, "kvpool.memory_mb": 128, "topology": "1+2"}
    config = load(flags, {}, None)
    mapped = load(flags | {"transport": "ipc"}, {}, None)
    room = capacity(config, MODEL)
    caches = shared_memory(mapped, MODEL, room) - shared_memory(config, MODEL, room)
    assert caches == 3 * room.cache_bytes(MODEL) > 0
    assert shared_memory(mapped, MODEL, room, with_pool=False) == caches


def test_a_worker_counts_itself_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory", lambda: MachineMemory(4096 * MIB, 800 * MIB, None))
    config = load({"topology": "2+2", "engine.kv_memory_mb": 512, "kvpool.memory_mb": 64}, {}, None)
    room = capacity(config, MODEL)
    check_worker(config, MODEL, room, folder)
    with pytest.raises(MemoryTooSmall):
        check_machine(config, MODEL, room, folder, FreeMemory(800 * MIB, 1 << 50))


def test_a_worker_in_place_of_another_needs_no_memory_for_kv_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory", lambda: MachineMemory(4096 * MIB, 300 * MIB, None))
    config = load({"engine.kv_memory_mb": 512}, {}, None)
    check_worker(config, MODEL, capacity(config, MODEL), folder, replaces=True)
    with pytest.raises(MemoryTooSmall):
        check_worker(config, MODEL, capacity(config, MODEL), folder)


def test_where_nobody_says_what_there_is_nothing_is_refused(folder: Path) -> None:
    check(folder, None, engine__kv_memory_mb=1 << 20)


def test_checkpoints_are_counted_for_requests_that_make_them(folder: Path) -> None:
    shared: dict[str, Any] = {"schedule__room": "growing", "schedule__memory": "two_ended"}
    shared |= {"engine__kv_memory_mb": 64, "kvpool__memory_mb": 8}
    least = 200 + 64 + STEP_MB + 8
    check(folder, least, engine__kv_memory_mb=64, kvpool__memory_mb=8)
    check(folder, least + 64, **shared)
    check(folder, least, **shared | {"schedule__memory": "two_ended:0"})
    message = r"checkpoints 64: set schedule.memory from two_ended to two_ended:0.5"
    with pytest.raises(MemoryTooSmall, match=message):
        check(folder, least + 33, **shared)


def test_ranks_are_counted_each_with_its_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has the memory for KV that was given."""

    class Divided(ModelConfig):
        divided = ("num_heads", "num_kv_heads")

    monkeypatch.setattr(f"{__name__}.MODEL", Divided(**vars(MODEL)))
    with pytest.raises(MemoryTooSmall) as refused:
        check(folder, 10, engine__kv_memory_mb=64, engine__tensor_parallel_size=2)
    assert "each of 2 ranks takes" in str(refused.value)
    assert "64 of KV" in str(refused.value)


def test_heads_that_several_ranks_keep_are_counted_on_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 8 ranks keeps one of the 4 heads of K and V: its weights take 2 MB, and an eighth of all weights has half
    of them."""

    class Copied(ModelConfig):
        divided = ("num_heads", "num_kv_heads")
        copies_kv = True

    monkeypatch.setattr(f"{__name__}.MODEL", Copied(**vars(MODEL)))
    with pytest.raises(MemoryTooSmall, match=f"each of 8 ranks takes {64 + (200 - 64) // 8 + 1} MB of weights"):
        check(folder, 10, engine__kv_memory_mb=64, engine__tensor_parallel_size=8)
