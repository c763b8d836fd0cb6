"""Tests that models in GGUF files give the logits of transformers with the same numbers, expanded to fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.gguf.places import Kind
from alignedserve.architectures.model_source import resolve
from alignedserve.architectures.weight_files import quantised_bytes
from alignedserve.engine.engine import Engine
from alignedserve.engine.models.families.choice import load_model
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.weights.forms import weights_of
from alignedserve.engine.weights.tensors import Cut
from alignedserve.kernels.common import quantised
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.library import Library
from alignedserve.kernels.native.kernels import Native
from tests.engine.driver import Driver, prompt_of
from tests.engine.test_models import TOKENS, furthest, logits_of
from tests.engine.test_quantised_models import loaded_bytes
from tests.gguf_files import Written, written
from tests.models import BASE, Make, gqa, llama, made, qwen2, qwen3
from tests.rare import rarely, thinned
from tests.reference import CLOSE, Tally, compare

_WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}  # rows of whole blocks
FAMILIES: dict[str, tuple[str, Make]] = {
    "llama": ("llama", lambda folder: gqa(folder, **_WIDE)),
    "llama-tied": ("llama", lambda folder: llama(folder, attention_bias=True, **_WIDE)),
    "qwen2": ("qwen2", lambda folder: qwen2(folder, use_sliding_window=False, **_WIDE)),
    "qwen3": ("qwen3", lambda folder: qwen3(folder, head_dim=64, **_WIDE)),
}


def medium(name: str) -> Kind:
    """Return the kind of a tensor as llama.cpp's mixture Q4_K_M has it."""
    parts = ("attn_v", "attn_qkv", "ffn_down", "token_embd", "output.")
    return Kind.Q6_K if any(part in name for part in parts) else Kind.Q4_K


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def check(made: Written) -> None:
    folder, tokens = resolve(str(made.path)), prompt_of(1, TOKENS)
    with torch.inference_mode():
        expected = made.reference(torch.tensor([tokens])).logits[0]
    for kernels in (Reference(), Native(Library())):
        assert furthest(logits_of(folder, tokens, kernels=kernels), expected) < CLOSE


@pytest.mark.parametrize("name", [*map(rarely, ("llama", "qwen2")), "llama-tied", "qwen3"])
def test_every_family_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, make = FAMILIES[name]
    check(written(make(tmp_path / "model"), tmp_path / "model.gguf", architecture, medium))


def _llama3(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.array(FACTORS, np.float32))


def _linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.5)


def _yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(40)


FACTORS = [1.0] * 12 + [1.0 + pair / 7 for pair in range(20)]  # of the pairs of a head of 64 numbers
SCALINGS: dict[str, tuple[dict[str, Any], Callable[[gguf.GGUFWriter], None]]] = {
    "factors": ({"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS, "factor": 1.0}, _llama3),
    "linear": ({"rope_type": "linear", "factor": 2.5}, _linear),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}, _yarn),
}


@pytest.mark.parametrize("name", thinned(SCALINGS, usual=1))
def test_scaled_positions_turn_as_in_transformers(name: str, tmp_path: Path) -> None:
    scaling, more = SCALINGS[name]
    rope = {"rope_theta": 500.0, "original_max_position_embeddings": 160, **scaling}
    folder = gqa(tmp_path / "model", rope_parameters=rope, **_WIDE)
    check(written(folder, tmp_path / "model.gguf", "llama", lambda _: Kind.F32, more))


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": FACTORS,
    "long_factor": [2 * factor for factor in FACTORS],
    "original_max_position_embeddings": 80,
}


def _long(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_orig_ctx_len(80)
    for length in ("short", "long"):
        writer.add_tensor(f"rope_factors_{length}.weight", np.array(LONG[f"{length}_factor"], np.float32))


OTHERS: dict[str, tuple[dict[str, Any], Callable[[gguf.GGUFWriter], None] | None]] = {
    "gemma": ({"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}, None),
    "gemma3": (
        {"num_hidden_layers": 6, "sliding_window": 11, "query_pre_attn_scalar": 64, "tie_word_embeddings": True},
        lambda writer: writer.add_sliding_window(11),
    ),
    "phi3": (
        {"sliding_window": 11, "original_max_position_embeddings": 160, "pad_token_id": None},
        lambda writer: writer.add_sliding_window(11),
    ),
    "phi3-long": ({"original_max_position_embeddings": 80, "pad_token_id": None, "rope_parameters": LONG}, _long),
}


@pytest.mark.parametrize("name", ["phi3", *map(rarely, ("gemma", "gemma3", "phi3-long"))])
def test_gemma_and_phi_say_what_transformers_says(name: str, tmp_path: Path) -> None:
    changes, more = OTHERS[name]
    name = name.removesuffix("-long")
    sizes = {"head_dim": 64, "num_key_value_heads": 2, **_WIDE} if name != "phi3" else _WIDE
    config = transformers.CONFIG_MAPPING["gemma3_text" if name == "gemma3" else name](**{**BASE, **sizes, **changes})
    file = written(made(tmp_path / "model", config, 1, torch.float32), tmp_path / "model.gguf", name, medium, more)
    folder, tally = resolve(str(file.path)), Tally()
    # Query and K get the wider form of V beside them.
    assert quantised_bytes(folder, 4) == pytest.approx(loaded_bytes(folder, torch.float32), rel=0.15)
    engine = Engine(folder, num_blocks=16, block_size=16, dtype="float32")
    driver = Driver(engine, 0)
    live = driver.start("r", prompt_of(1, 40), 20)
    driver.prefill(live, [7, 16])
    compare(file.reference, live.prompt, driver.generate(live, 20), tally)
    tally.check()


def test_greedy_output_is_that_of_transformers(tmp_path: Path) -> None:
    made, tally = written(gqa(tmp_path / "model", **_WIDE), tmp_path / "model.gguf", "llama", medium), Tally()
    driver = Driver(Engine(resolve(str(made.path)), num_blocks=16, block_size=16, dtype="float32"), 0)
    live = driver.start("r", prompt_of(1, 40), 60)
    driver.prefill(live, [7, 16])
    compare(made.reference, live.prompt, driver.generate(live, 60), tally)
    tally.check()


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q4_0, Kind.Q6_K])
def test_ranks_read_their_parts(kind: Kind, tmp_path: Path) -> None:
    folder = resolve(str(written(gqa(tmp_path / "model", **_WIDE), tmp_path / "a.gguf", "llama", lambda _: kind).path))
    weights = weights_of(folder)
    for layer, shape in (("self_attn.q_proj", (256, 256)), ("mlp.down_proj", (256, 512))):
        name = f"model.layers.1.{layer}"
        whole = torch.empty(shape)
        weights.read_into(whole, f"{name}.weight")
        for dim, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
            share = shape[dim] // 2
            expected = whole.narrow(dim, rank * share, share)
            part = torch.empty(expected.shape)
            cut = Cut(dim, rank * share, shape[dim])
            weights.read_into(part, f"{name}.weight", cut=cut)
            assert torch.equal(part, expected)
            found = weights.quantised(name, (part.shape[0], part.shape[1]), cut)
            assert (found is None) == kind.is_float
            assert found is None or torch.equal(found.expanded(), expected)


@pytest.mark.parametrize("name", thinned(FAMILIES, usual=1))
def test_blocks_that_are_unpacked_some_rows_at_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, make = FAMILIES[name]
    folder = resolve(str(written(make(tmp_path / "model"), tmp_path / "model.gguf", architecture, medium).path))
    tokens = prompt_of(1, 30)
    expected = logits_of(folder, tokens)
    monkeypatch.setattr(quantised, "_AT_ONCE", 5 * 256)
    assert torch.equal(logits_of(folder, tokens), expected)


@pytest.mark.parametrize(("name", "kind"), thinned(zip(FAMILIES, cycle((Kind.Q4_K, Kind.Q8_0)), strict=False), usual=2))
def test_planning_knows_the_bytes(name: str, kind: Kind, tmp_path: Path) -> None:
    architecture, make = FAMILIES[name]
    folder = resolve(str(written(make(tmp_path / "model"), tmp_path / "model.gguf", architecture, lambda _: kind).path))
    config = read_config(folder)
    planned = quantised_bytes(folder, 2)
    kernels = Reference()
    loader = Loader(weights_of(folder), torch.bfloat16, kernels, partial(kernels.layer, dtype=torch.bfloat16))
    load_model(config, loader)
    assert 0.85 * planned < loader.num_bytes < 1.15 * planned


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q8_0])
def test_a_table_beside_its_head_keeps_a_byte_for_each_number(kind: Kind, tmp_path: Path) -> None:
    """Expanded it took two or four, and seconds of a start."""
    folder = resolve(str(written(gqa(tmp_path / "model", **_WIDE), tmp_path / "a.gguf", "llama", lambda _: kind).path))
    config, weights = read_config(folder), weights_of(folder)
    assert not config.tied_embeddings
    size = config.vocab_size, config.hidden_size
    loader = Loader(weights, torch.bfloat16, Reference(), partial(Reference().layer, dtype=torch.bfloat16))
    table = loader.embedding("model.embed_tokens.weight", *size, tied=False)
    found = weights.quantised("model.embed_tokens", size)
    assert found is not None
    assert loader.num_bytes == found.num_bytes < 1.3 * size[0] * size[1]
    tokens = torch.tensor([[3, 0], [1, 3]])
    assert torch.equal(table(tokens), found.expanded().bfloat16()[tokens])


@pytest.mark.parametrize("kind", thinned(Kind, usual=4))  # test_gguf_blocks.py unpacks blocks of all
def test_every_kind_has_the_logits_of_transformers(kind: Kind, tmp_path: Path) -> None:
    check(written(gqa(tmp_path / "model", **_WIDE), tmp_path / "model.gguf", "llama", lambda _: kind))
