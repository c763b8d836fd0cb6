"""Tests that what does not fit into memory is refused before anything is loaded, with the numbers and what to
change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignedserve.architectures.config import Activation
from alignedserve.architectures.families.model_config import ModelConfig
from alignedserve.architectures.vectors import EncoderConfig
from alignedserve.architectures.weight_files import count_numbers
from alignedserve.config.config import Config, load
from alignedserve.errors import ArenaTooSmall, MemoryTooSmall, ModelError
from alignedserve.machine.resources import MachineMemory
from alignedserve.sizing import memory
from alignedserve.sizing.capacity import capacity
from alignedserve.sizing.memory import (
    check_machine,
    check_worker,
    demand,
    shared_memory,
    why_too_small,
    with_pool_memory,
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
ENCODER = EncoderConfig(
    depth=12,
    intermediate_size=3072,
    activation=Activation.GELU,
    norm_eps=1e-12,
    vocab_size=1 << 15,
    hidden_size=768,
    num_layers=1,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    max_positions=512,
    dtype="float32",
    eos_tokens=frozenset(),
    generates=False,
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


def check(folder: Path, available_mb: int | None, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    found = None if available_mb is None else MachineMemory(4096 * MIB, available_mb * MIB, None)
    monkeypatch.setattr(memory, "memory", lambda: found)
    config = load({name.replace("__", "."): value for name, value in changes.items()}, {}, None)
    check_machine(config, MODEL, capacity(config, MODEL), folder)


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


def test_what_fits_and_what_does_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 200 + 512 + STEP_MB + 128
    check(folder, needed, monkeypatch, kvpool__memory_mb=128)
    with pytest.raises(MemoryTooSmall) as refused:
        check(folder, needed - 100, monkeypatch, kvpool__memory_mb=128)
    assert str(refused.value) == (
        f"{needed - 100} MB of memory are available, {needed} are needed: a worker takes 200 MB of weights as bfloat16,"
        f" 512 of KV and {STEP_MB} for a step, the KV pool 128: lower engine.kv_memory_mb from 512 to 412"
    )
    check(folder, needed - 100, monkeypatch, engine__kv_memory_mb=412, kvpool__memory_mb=128)


@pytest.mark.parametrize(("quantization", "weights"), [("int8", 137), ("int4", 121)])
def test_quantised_weights_take_less(
    folder: Path, monkeypatch: pytest.MonkeyPatch, quantization: str, weights: int
) -> None:
    needed = weights + 512 + STEP_MB + 128
    with pytest.raises(MemoryTooSmall, match=f"{weights} MB of weights as {quantization} and bfloat16"):
        check(folder, needed - 2, monkeypatch, engine__quantization=quantization, kvpool__memory_mb=128)
    check(folder, needed, monkeypatch, engine__quantization=quantization, kvpool__memory_mb=128)


def test_a_layer_on_its_way_counts_where_kv_and_steps_take_less(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused layer of two tensors as large as the largest, a byte for each number, is not packed yet."""
    weights, largest, options = 137, 64, {"engine__quantization": "int8", "engine__kv_memory_mb": 64}
    needed = weights + 2 * largest + 64
    check(folder, needed, monkeypatch, kvpool__memory_mb=64, **options)
    with pytest.raises(MemoryTooSmall) as refused:
        check(folder, needed - 2, monkeypatch, kvpool__memory_mb=64, **options)
    assert f"64 of KV and {STEP_MB} for a step, while it loads 128 beside the weights" in str(refused.value)
    assert str(refused.value).endswith("lower kvpool.memory_mb from 64 to 62")
    with pytest.raises(MemoryTooSmall, match="take a smaller model or fewer workers"):
        check(folder, weights + 100, monkeypatch, kvpool__memory_mb=64, **options)
    plain = 200 + 64 + STEP_MB
    check(folder, plain + 64, monkeypatch, engine__kv_memory_mb=64, kvpool__memory_mb=64)


def test_all_workers_and_the_pool_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryTooSmall) as refused:
        check(folder, 1024, monkeypatch, topology="1+1", engine__kv_memory_mb=256, kvpool__memory_mb=128)
    assert "each of 2 workers takes 200 MB" in str(refused.value)
    assert "the KV pool 128: lower engine.kv_memory_mb from 256 to 225" in str(refused.value)
    check(folder, 1024, monkeypatch, topology="1+1", engine__kv_memory_mb=225, kvpool__memory_mb=128)


def test_a_pool_that_takes_all_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = {"topology": "1+1", "engine__kv_memory_mb": 64}
    with pytest.raises(MemoryTooSmall, match=r"lower kvpool\.memory_mb from 1000 to 427"):
        check(folder, 1000, monkeypatch, kvpool__memory_mb=1000, **split)
    check(folder, 1000, monkeypatch, kvpool__memory_mb=427, **split)


@pytest.mark.parametrize(
    ("available", "changes", "advice"),
    [
        (218, {}, "lower engine.max_step_tokens from 512, and engine.kv_memory_mb"),
        (398, {"engine__dtype": "float32"}, "set engine.dtype to bfloat16"),
        (100, {}, "take a smaller model"),
    ],
)
def test_advice_where_less_kv_is_not_enough(
    available: int, changes: dict[str, Any], advice: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MemoryTooSmall) as refused:
        check(folder, available, monkeypatch, kvpool__memory_mb=8, **changes)
    assert advice in str(refused.value)
    assert "\n" not in str(refused.value)


class TestPoolMemory:
    """By default the pool takes the memory of four device caches, and leaves half of what is free."""

    def sized(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, available_mb: int, free_mb: int, **changes: Any
    ) -> Config:
        monkeypatch.setattr(memory, "memory", lambda: MachineMemory(1 << 50, available_mb * MIB, None))
        there = os.statvfs_result((MIB, MIB, 1 << 30, free_mb, free_mb, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _path: there)
        config = load({name.replace("__", "."): value for name, value in changes.items()}, {}, None)
        found = with_pool_memory(config, MODEL, folder)
        check_machine(found, MODEL, capacity(found, MODEL), folder)
        return found

    @pytest.mark.parametrize(
        ("available_mb", "free_mb", "changes", "comes_to"),
        [
            (100_000, 100_000, {}, 4 * 512),
            (100_000, 100_000, {"topology": "1+3", "engine__kv_memory_mb": 100}, 4 * 3 * 100),
            (100_000, 1000, {}, 500),
            (3000, 100_000, {}, 1500),
            (200 + 512 + STEP_MB + 300, 100_000, {}, 300),  # what a worker needs comes first
            (100_000, 64, {"kvpool__memory_mb": 1000}, 1000),
            (100_000, 100_000, {"engine__device": "cuda"}, 50_000),
        ],
    )
    def test_it_comes_to(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        available_mb: int,
        free_mb: int,
        changes: dict[str, Any],
        comes_to: int,
    ) -> None:
        found = self.sized(folder, monkeypatch, available_mb, free_mb, **changes)
        assert found.kvpool.memory_mb == comes_to

    @given(st.integers(800, 1 << 20), st.integers(1, 1 << 20))
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    def test_never_more_than_half_of_anything(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, available_mb: int, free_mb: int
    ) -> None:
        found = self.sized(folder, monkeypatch, available_mb, free_mb).kvpool.memory_mb
        assert found is not None
        assert 1 <= found <= max(1, min(available_mb // 2, free_mb // 2, 4 * 512))

    @pytest.mark.parametrize(
        ("free_mb", "changes", "comes_to"),
        [
            (10_000, {}, 4 * (10_000 - 200 - GPU_STEP_MB - 1024)),
            (10_000, {"engine__kv_memory_mb": 300}, 4 * 300),
            (10_000, {"topology": "1+2", "engine__gpu_reserve_mb": 0}, 8 * (10_000 - 200 - GPU_STEP_MB)),
            (140_000, {}, 100_000),  # half of what is free in shared memory
            (None, {}, 4 * 16_384),
            (100, {}, 4 * 16_384),  # the worker will say that its weights do not fit
        ],
    )
    def test_it_follows_what_gpus_will_have_left_for_kv(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        free_mb: int | None,
        changes: dict[str, Any],
        comes_to: int,
    ) -> None:
        monkeypatch.setattr(memory, "gpu_memory", lambda: None if free_mb is None else free_mb * MIB)
        found = self.sized(folder, monkeypatch, 300_000, 200_000, **{"engine__device": "cuda", **changes})
        assert found.kvpool.memory_mb == pytest.approx(comes_to, abs=8)

    @pytest.mark.parametrize(("topology", "comes_to"), [("1xcolocated", 4), ("1+1", 7)])
    def test_a_model_that_keeps_nothing_has_next_to_none(self, topology: str, comes_to: int, folder: Path) -> None:
        """In the second topology the checks want pages for the longest text."""
        config, model = load({"topology": topology}, {}, None), ENCODER
        found = with_pool_memory(config, model, folder)
        assert found.kvpool.memory_mb == comes_to
        room = capacity(found, model)
        assert demand(found, model, room, folder).cache == 0

    @pytest.mark.parametrize(("free_mb", "comes_to"), [(60, 30), (20, 13), (16, 13)])
    def test_of_little_shared_memory_it_takes_what_the_longest_request_needs(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, free_mb: int, comes_to: int
    ) -> None:
        found = self.sized(folder, monkeypatch, 100_000, free_mb, topology="1+1")
        assert found.kvpool.memory_mb == comes_to

    def test_too_little_shared_memory_is_refused_with_what_to_say_to_docker(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(ArenaTooSmall) as refused:
            self.sized(folder, monkeypatch, 100_000, 14, topology="1+1")
        assert str(refused.value) == (
            "/dev/shm has 14 MB free, and one request of 1024 tokens takes 13 MB of the KV pool there: start the"
            " container with --shm-size=30m or more, lower engine.max_model_len, or serve --topology colocated, which"
            " needs no pool for that"
        )
        assert self.sized(folder, monkeypatch, 100_000, 14).kvpool.memory_mb == 7, "colocated"

    def test_a_pool_smaller_than_a_batch_is_said_to_be(self) -> None:
        for memory_mb, is_small in ((100, True), (300, False)):
            config = load({"kvpool.memory_mb": memory_mb}, {}, None)
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
    config = load({"topology": "2+2"}, {}, None)
    check_worker(config, MODEL, capacity(config, MODEL), folder)
    with pytest.raises(MemoryTooSmall):
        check_machine(config, MODEL, capacity(config, MODEL), folder)


def test_where_nobody_says_what_there_is_nothing_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(folder, None, monkeypatch, engine__kv_memory_mb=1 << 20)


def test_checkpoints_are_counted_for_requests_that_make_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared: dict[str, Any] = {"schedule__room": "growing", "schedule__blocks": "bidirectional"}
    shared |= {"engine__kv_memory_mb": 64, "kvpool__memory_mb": 8}
    least = 200 + 64 + STEP_MB + 8
    check(folder, least, monkeypatch, engine__kv_memory_mb=64, kvpool__memory_mb=8)
    check(folder, least + 64, monkeypatch, **shared)
    check(folder, least, monkeypatch, **shared, schedule__checkpoints=0.0)
    message = r"checkpoints 64: lower schedule.checkpoints from 1 to 0.5"
    with pytest.raises(MemoryTooSmall, match=message):
        check(folder, least + 33, monkeypatch, **shared)


def test_ranks_are_counted_each_with_its_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has the memory for KV that was given."""

    class Divided(ModelConfig):
        divided = ("num_heads", "num_kv_heads")

    monkeypatch.setattr(f"{__name__}.MODEL", Divided(**vars(MODEL)))
    with pytest.raises(MemoryTooSmall) as refused:
        check(folder, 10, monkeypatch, engine__kv_memory_mb=64, engine__tensor_parallel_size=2)
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
        check(folder, 10, monkeypatch, engine__kv_memory_mb=64, engine__tensor_parallel_size=8)
