"""Tests of the sizes that nobody named: fifteen models that are much used, on machines with 8, 16 and 24 GB."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.architectures.config import Activation
from alignedserve.architectures.families.model_config import ModelConfig, read_config
from alignedserve.architectures.vectors import EncoderConfig
from alignedserve.config.config import Config, load
from alignedserve.errors import AlignedServeError, ArenaTooSmall, ConfigError, MemoryTooSmall
from alignedserve.sizing.capacity import Capacity, capacity
from alignedserve.sizing.memory import FreeMemory, check_machine, demand, machine_demand, num_workers, why_too_small
from alignedserve.sizing.sizes import LEAST_CONTEXT, told, with_sizes
from tests.sizing.published import PUBLISHED, write

MIB, GIB = 1 << 20, 1 << 30
_FOLDER = TemporaryDirectory(prefix="alignedserve-published-")
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


@cache
def published(name: str) -> tuple[ModelConfig, Path]:
    folder = Path(_FOLDER.name, name)
    folder.mkdir()
    return read_config(write(name, folder)), folder


def machine(gib: float, shared_gib: float | None = None, gpu_gib: float | None = None) -> FreeMemory:
    shared = gib if shared_gib is None else shared_gib
    return FreeMemory(int(gib * GIB), int(shared * GIB), None if gpu_gib is None else int(gpu_gib * GIB))


def asked(flags: Mapping[str, Any]) -> Config:
    return load({"engine.load_format": "dummy", "engine.device": "cpu"} | dict(flags), {}, None)


def sized(name: str, free: FreeMemory, **flags: Any) -> tuple[Config, Capacity]:
    """Plan as the launcher does."""
    model, folder = published(name)
    config = asked({path.replace("__", "."): value for path, value in flags.items()})
    config = with_sizes(config, model, folder, free)
    room = capacity(config, model)
    check_machine(config, model, room, folder, free)
    return config, room


TOO_LARGE = {8: {"Llama-3.1-8B", "Qwen2.5-7B", "Qwen3-8B", "Mistral-7B-v0.3", "Phi-4-mini"}}
TOO_LARGE[16] = TOO_LARGE[8] - {"Phi-4-mini"}
TOO_LARGE[24] = set()
TOO_LARGE = {gib: {*names, "Llama-3.1-70B"} for gib, names in TOO_LARGE.items()}
TOO_LARGE_AT_4_BITS = {("Qwen3-8B", 8), *(("Llama-3.1-70B", gib) for gib in TOO_LARGE)}  # its tables stay as they are


@pytest.mark.parametrize("gib", [8, 16, 24])
@pytest.mark.parametrize("name", PUBLISHED)
def test_each_model_starts_without_flags_or_is_said_to_be_too_large(name: str, gib: int) -> None:
    if name in TOO_LARGE[gib]:
        with pytest.raises(MemoryTooSmall, match=r"^\d+ MB of memory may be used \(\d+ are free, 15% stay") as refused:
            sized(name, machine(gib))
        message = str(refused.value)
        assert "\n" not in message
        if (name, gib) in TOO_LARGE_AT_4_BITS:
            assert message.endswith(": take a smaller model or fewer workers")
            return
        sized(name, machine(gib), engine__quantization=message.split(": say --quantization ")[1].split(",")[0])
        return
    config, room = sized(name, machine(gib))
    model, folder = published(name)
    engine = config.engine
    assert machine_demand(config, model, room, folder) <= 0.85 * gib * GIB
    assert engine.max_model_len is not None
    assert engine.max_model_len >= 4096 or engine.max_model_len == model.max_positions
    assert None not in (engine.kv_memory_mb, engine.max_batch, engine.max_step_tokens, engine.threads)
    assert why_too_small(config, room) is None


@pytest.mark.parametrize(
    ("name", "gib", "context"),
    [
        ("Qwen2.5-1.5B", 24, 32_768),
        ("Llama-3.2-1B", 24, 131_072),
        ("Llama-3.2-1B", 8, 102_400),
        ("Llama-3.1-8B", 24, 30_720),
        ("Qwen3-0.6B", 24, 40_960),
        ("TinyLlama-1.1B", 8, 2048),
    ],
)
def test_the_context_is_the_models_or_the_longest_that_fits(name: str, gib: int, context: int) -> None:
    assert sized(name, machine(gib))[0].engine.max_model_len == context


def test_quantised_a_7b_fits_into_8_gb() -> None:
    config, _ = sized("Mistral-7B-v0.3", machine(8), engine__quantization="int4")
    assert (config.engine.max_model_len or 0) > 8000


_NAMED = {
    "engine.kv_memory_mb": st.integers(1, 20_000),
    "engine.max_model_len": st.integers(1, 8192),
    "kvpool.memory_mb": st.integers(1, 8000),
    "engine.max_batch": st.integers(1, 128),
    "engine.max_step_tokens": st.integers(128, 4096),
    "engine.threads": st.integers(1, 64),
}


@given(st.data())
def test_what_is_decided_fits_and_what_is_named_stays(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(PUBLISHED)))
    model, folder = published(name)
    paths = data.draw(st.sets(st.sampled_from(sorted(_NAMED)), max_size=3))
    named = {path: data.draw(_NAMED[path]) for path in sorted(paths)}
    named["engine.max_model_len"] = min(named.get("engine.max_model_len", 1 << 30), model.max_positions)
    if "engine.max_model_len" not in paths:
        del named["engine.max_model_len"]
    topology = data.draw(st.sampled_from(["colocated", "2xcolocated", "1+1", "1+3"]))
    flags = {"topology": topology, "engine.quantization": data.draw(st.sampled_from(["none", "int8", "int4"])), **named}
    free = FreeMemory(data.draw(st.integers(1, 64)) * GIB, data.draw(st.integers(16, 32_000)) * MIB)
    config = asked(flags)
    try:
        config = with_sizes(config, model, folder, free)
        room = capacity(config, model)
        check_machine(config, model, room, folder, free)
    except AlignedServeError:
        return
    for path, value in named.items():
        section, field = path.split(".")
        assert getattr(getattr(config, section), field) == value
    assert free.usable is not None
    if not {"engine.kv_memory_mb", "kvpool.memory_mb"} & paths:
        assert machine_demand(config, model, room, folder) <= free.usable, "15 % stay free"
    assert (config.kvpool.memory_mb or 0) * MIB <= free.shared or "kvpool.memory_mb" in paths
    longest = config.engine.max_model_len
    assert longest is not None
    assert min(LEAST_CONTEXT, longest) <= longest <= model.max_positions
    assert room.limits.least_held(longest) <= room.limits.num_tokens
    if not config.topology.colocated:
        assert room.limits.least_held(longest) <= room.num_pages * config.page_size
    assert config.engine.max_batch is not None
    assert room.limits.num_tokens <= config.engine.max_batch * longest + 16 * MIB or "engine.kv_memory_mb" in paths


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen3-0.6B"])
def test_more_memory_is_never_a_shorter_context(name: str) -> None:
    contexts = [sized(name, machine(gib))[0].engine.max_model_len or 0 for gib in range(4, 40, 2)]
    assert contexts == sorted(contexts)


def test_the_pool_never_takes_more_than_half_of_shared_memory() -> None:
    config, _ = sized("Qwen2.5-1.5B", machine(24, shared_gib=1))
    assert config.kvpool.memory_mb == 510
    config, _ = sized("Qwen2.5-1.5B", machine(24, shared_gib=1), topology="1+1")
    assert config.kvpool.memory_mb == 510
    assert config.engine.max_model_len == 510 * MIB // (28 * 1024 * 64) * 64, "what its pages hold"


def test_too_little_shared_memory_is_refused_with_what_to_say_to_docker() -> None:
    with pytest.raises(ArenaTooSmall) as refused:
        sized("Qwen2.5-1.5B", machine(24, shared_gib=16 / 1024), topology="1+1")
    assert str(refused.value) == (
        "/dev/shm has 16 MB free, and one request of 512 tokens takes 30 MB of the KV pool there: start the container"
        " with --shm-size=64m or more, or serve --topology colocated, which needs no pool for that"
    )
    assert sized("Qwen2.5-1.5B", machine(24, shared_gib=16 / 1024))[0].kvpool.memory_mb == 6


class TestNamedNumbers:
    """Only these are refused, in words of flags and with what is free."""

    def test_kv_memory_shortens_the_context(self) -> None:
        config, _ = sized("Qwen2.5-1.5B", machine(24), engine__kv_memory_mb=512)
        assert (config.engine.kv_memory_mb, config.engine.max_model_len) == (512, 18_720)

    def test_too_little_kv_memory(self) -> None:
        with pytest.raises(ConfigError) as refused:
            sized("Qwen2.5-1.5B", machine(24), engine__kv_memory_mb=1)
        assert str(refused.value) == (
            "--kv-memory-mb 1 holds 32 tokens, too few for any use: --kv-memory-mb 14 holds 512; 24576 MB are free"
        )

    def test_two_that_exclude_each_other(self) -> None:
        with pytest.raises(ConfigError) as refused:
            sized("Qwen2.5-1.5B", machine(24), engine__kv_memory_mb=512, engine__max_model_len=32_768)
        assert str(refused.value) == (
            "--kv-memory-mb 512 holds 18720 tokens, but one request may have 32768: --kv-memory-mb 896 does, or lower"
            " --max-model-len to 18720"
        )

    def test_a_context_that_memory_does_not_hold(self) -> None:
        with pytest.raises(ConfigError) as refused:
            sized("Llama-3.2-3B", machine(8), engine__max_model_len=131_072)
        message = str(refused.value)
        assert message.startswith("--max-model-len 131072 needs 14336 MB for KV in each worker, and")
        fits = int(message.split("lower --max-model-len to ")[1].split(",")[0])
        assert sized("Llama-3.2-3B", machine(8), engine__max_model_len=fits)[0].engine.max_model_len == fits

    def test_more_kv_memory_than_there_is(self) -> None:
        with pytest.raises(MemoryTooSmall, match=r"^8192 MB of memory .*: lower --kv-memory-mb from 9000 to \d+$"):
            sized("Llama-3.2-1B", machine(8), engine__kv_memory_mb=9000)

    def test_a_larger_pool_than_there_is_memory(self) -> None:
        with pytest.raises(MemoryTooSmall, match=r"the KV pool 9000: lower --pool-memory-mb from 9000 to 4\d\d\d$"):
            sized("Llama-3.2-1B", machine(8), kvpool__memory_mb=9000)

    def test_mapped_caches_that_shared_memory_cannot_hold(self) -> None:
        with pytest.raises(ArenaTooSmall, match=r"16 MB free, .* take \d+ there with transport ipc"):
            sized("Llama-3.2-1B", machine(8, shared_gib=16 / 1024), topology="1+1", transport="ipc")

    def test_a_pool_leaves_less_for_kv(self) -> None:
        with_4, with_1 = (
            sized("Qwen3-0.6B", machine(8), kvpool__memory_mb=size)[0].engine.kv_memory_mb or 0 for size in (4096, 1024)
        )
        assert with_4 < with_1 <= with_4 + 3072 + 128


def test_steps_are_smaller_where_memory_is_short() -> None:
    config, _ = sized("Gemma-3-270m", machine(0.75))
    assert (config.engine.max_batch or 64) < 64
    config, _ = sized("Gemma-3-270m", machine(0.75), engine__max_batch=50)
    assert (config.engine.max_batch, config.engine.max_step_tokens) == (50, 64)


def test_an_encoder_keeps_no_kv_and_takes_next_to_no_pool(tmp_path: Path) -> None:
    config = load({"engine.load_format": "auto", "engine.device": "cpu"}, {}, None)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    config = with_sizes(config, ENCODER, tmp_path, machine(2))
    room = capacity(config, ENCODER)
    assert config.kvpool.memory_mb is not None
    assert config.kvpool.memory_mb < 128
    assert config.engine.max_model_len == 512
    assert demand(config, ENCODER, room, tmp_path).cache == 0


def test_a_system_that_does_not_tell_its_memory_refuses_nothing() -> None:
    _, room = sized("Llama-3.1-8B", FreeMemory(None, 64 * GIB), engine__max_model_len=100_000)
    assert room.max_model_len == 100_000
    config, room = sized("Llama-3.1-8B", FreeMemory(None, 64 * GIB))
    assert room.max_model_len == config.engine.max_model_len
    assert room.max_model_len > LEAST_CONTEXT


def test_caches_that_others_map_are_in_shared_memory_too() -> None:
    config, room = sized("Qwen2.5-1.5B", machine(24, shared_gib=4), topology="1+1", transport="ipc")
    assert (num_workers(config) * (config.engine.kv_memory_mb or 0) + (config.kvpool.memory_mb or 0)) <= 4096 - 2
    assert room.max_model_len == 32_768


class TestGpus:
    """A worker takes what its GPU has left; the context is decided before by what the driver tells."""

    def on_gpu(self, name: str, gpu_gib: float | None, **flags: Any) -> Config:
        model, folder = published(name)
        paths = {path.replace("__", "."): value for path, value in flags.items()}
        config = asked({"engine.device": "cuda"} | paths)
        return with_sizes(config, model, folder, machine(64, gpu_gib=gpu_gib))

    @pytest.mark.parametrize(
        ("gpu_gib", "fewest", "most"), [(24, 40_000, 60_000), (40, 131_072, 131_072), (None, 131_072, 131_072)]
    )
    def test_the_context_fits(self, gpu_gib: float | None, fewest: int, most: int) -> None:
        config = self.on_gpu("Llama-3.1-8B", gpu_gib)
        assert config.engine.kv_memory_mb is None
        assert fewest <= (config.engine.max_model_len or 0) <= most

    def test_the_worker_then_finds_it_held(self) -> None:
        config = self.on_gpu("Llama-3.1-8B", 24)
        model, folder = published("Llama-3.1-8B")
        needs = demand(config, model, capacity(config, model), folder)
        left = 24 * GIB - 500 * MIB - needs.weights - needs.step - GIB  # CUDA itself takes some 500 MB
        capacity(config, model, left)

    @pytest.mark.parametrize(
        ("gpu_gib", "flags", "comes_to"),
        [
            (24, {}, 31_104),
            (24, {"engine__kv_memory_mb": 300}, 1200),
            (80, {}, 32_767),  # half of what the machine has free
            (None, {}, 32_767),
        ],
    )
    def test_the_pool_has_four_of_its_caches(self, gpu_gib: float | None, flags: dict[str, Any], comes_to: int) -> None:
        found = self.on_gpu("Llama-3.1-8B", gpu_gib, **flags).kvpool.memory_mb
        assert found == pytest.approx(comes_to, abs=8)

    def test_a_named_context_stays(self) -> None:
        assert self.on_gpu("Llama-3.1-8B", 24, engine__max_model_len=100_000).engine.max_model_len == 100_000


def test_a_text_that_becomes_a_vector_is_as_long_as_the_folder_says(tmp_path: Path) -> None:
    config, free = load({"engine.load_format": "auto", "engine.device": "cpu"}, {}, None), machine(8)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    sized = with_sizes(config, ENCODER, tmp_path, free)
    lines = [told(config, sized, ENCODER, capacity(sized, ENCODER), free, longest)[0] for longest in (256, None)]
    assert lines == [
        "context: 256 tokens of a text, as the model's folder says",
        "context: 512 tokens, all that the model has (--max-model-len)",
    ]


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ({"engine.max_step_tokens": 9_999_999}, r"lower --max-step-tokens from 9999999 to \d+$"),
        (
            {"engine.max_batch": 9_999_999},
            r"lower --max-step-tokens from 9999999 to \d+, and --max-batch from 9999999$",
        ),
    ],
)
def test_a_step_that_is_too_large_names_its_flag(flags: dict[str, Any], advice: str) -> None:
    with pytest.raises(MemoryTooSmall, match=advice) as refused:
        with_sizes(asked(flags), *published("Llama-3.2-1B"), machine(8))
    fits = int(str(refused.value).partition(" to ")[2].partition(",")[0])
    with_sizes(asked({"engine.max_step_tokens": fits}), *published("Llama-3.2-1B"), machine(8))


def test_who_runs_a_model_without_a_module_of_ours_is_told(tmp_path: Path) -> None:
    bloom = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_embed": 64, "n_layer": 2, "n_head": 4}
    (tmp_path / "config.json").write_text(json.dumps({**bloom, "vocab_size": 97}))
    model, free = read_config(tmp_path), machine(8)
    config = load({"engine.load_format": "dummy", "engine.device": "cpu"}, {}, None)
    sized = with_sizes(config, model, tmp_path, free)
    line, *_ = told(config, sized, model, capacity(sized, model), free)
    assert line == "model: transformers runs BloomForCausalLM; models with a module of ours are faster"


def test_each_size_is_told_in_a_line_with_its_flag() -> None:
    model, _ = published("Llama-3.2-1B")
    free = machine(8)
    config, room = sized("Llama-3.2-1B", free, engine__threads=2)
    assert told(asked({}), config, model, room, free) == [
        "context: 102,400 of the model's 131,072 tokens (--max-model-len, --kv-memory-mb)",
        "kv: 3,200 MB of 8,192 MB free for 102,400 tokens (--kv-memory-mb)",
        "pool: 1,282 MB of shared memory (--pool-memory-mb)",
        "steps: up to 64 requests and 512 tokens on 2 threads (--max-batch, --max-step-tokens, --threads)",
    ]
    free = replace(machine(64), gpu=80 * GIB)
    config = with_sizes(asked({"engine.device": "cuda", "engine.threads": 1}), *published("Llama-3.2-1B"), free)
    assert told(asked({}), config, model, capacity(config, model), free)[:2] == [
        "context: 131,072 tokens, all that the model has (--max-model-len)",
        "kv: what a GPU has left beside the weights (--kv-memory-mb, --gpu-reserve-mb)",
    ]
