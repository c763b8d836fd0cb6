"""Tests of random weights: every family runs on them, and workers, starts and ranks have the same."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.quantization import Quantization
from alignedserve.config.config import load as load_config
from alignedserve.core import Sampling
from alignedserve.engine.engine import Engine
from alignedserve.engine.models.families.choice import load as load_any
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.weights.dummy import DummyWeights
from alignedserve.engine.weights.tensors import Cut
from alignedserve.errors import ConfigError
from alignedserve.kernels.common.reference import Reference
from alignedserve.sizing.capacity import capacity
from alignedserve.sizing.memory import demand
from tests.engine.test_models import FolderOf
from tests.engine.test_ranks import FAMILIES, Both, said
from tests.engine.transformers_families import make as family_of
from tests.models import gqa
from tests.rare import thinned

SMALL = {"engine.load_format": "dummy", "engine.dtype": "float32", "engine.kv_memory_mb": 64, "kvpool.memory_mb": 64}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def shapes_of(folder: Path, here: Path) -> Path:
    """Return a folder with the configuration of a model alone."""
    here.mkdir()
    shutil.copy(folder / "config.json", here)
    return here


def alone(folder: Path, quantization: Quantization = Quantization.NONE) -> Engine:
    return Engine(
        folder,
        num_blocks=40,
        block_size=8,
        dtype="float32",
        quantization=quantization,
        tensors_of=lambda _: DummyWeights(),
    )


@pytest.mark.parametrize("name", thinned(FAMILIES, usual=3))  # test_ranks.py cuts the weights of all
def test_two_ranks_and_another_start_say_what_one_rank_says(
    name: str, folder_of: FolderOf, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    folder, sampling = shapes_of(folder_of(name), tmp_path / "shapes"), Sampling()
    expected = said(alone(folder), sampling)
    assert len({tuple(output) for output in expected}) > 1, "the outputs depend on the prompts"
    assert said(alone(folder), sampling) == expected
    assert said(Both(folder, pool, tensors_of=lambda _: DummyWeights()), sampling) == expected


@pytest.mark.parametrize("quantization", thinned((Quantization.INT8, Quantization.INT4), usual=1))
def test_quantised_ones_are_the_same_on_all_ranks(
    quantization: Quantization, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    folder = shapes_of(
        gqa(tmp_path / "model", hidden_size=256, intermediate_size=512, head_dim=64), tmp_path / "shapes"
    )
    both = Both(folder, pool, tensors_of=lambda _: DummyWeights(), quantization=quantization)
    assert said(both, Sampling()) == said(alone(folder, quantization), Sampling())


@pytest.mark.parametrize(
    ("family", "quantization"),
    thinned(product(("gpt2", "granite", "hunyuan_v1_moe"), (Quantization.NONE, Quantization.INT8)), usual=2),
)
def test_models_of_transformers_are_the_same_at_every_start(
    family: str, quantization: Quantization, tmp_path: Path
) -> None:
    folder = shapes_of(family_of(tmp_path / family, family), tmp_path / "shapes")
    torch.manual_seed(1)
    first = said(alone(folder, quantization), Sampling())
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    assert said(alone(folder, quantization), Sampling()) == first
    assert torch.equal(torch.random.get_rng_state(), state), "the numbers that others draw are not changed"


def test_parts_are_cut_out_of_the_same_whole() -> None:
    def read(shape: tuple[int, ...], cut: Cut | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        out = torch.empty(shape, dtype=dtype)
        DummyWeights().read_into(out, "a.weight", cut=cut)
        return out

    whole = read((900, 384))
    assert torch.equal(read((300, 384), Cut(0, 450, 900)), whole[450:750])
    assert torch.equal(read((900, 96), Cut(1, 192, 384)), whole[:, 192:288])
    assert torch.equal(read((900, 384), dtype=torch.bfloat16), whole.bfloat16())
    stack = read((5, 60, 70))
    assert torch.equal(read((1, 60, 70), Cut(0, 3, 5)), stack[3:4])
    strided = torch.empty(384, 900).t()
    DummyWeights().read_into(strided, "a.weight")
    assert torch.equal(strided, whole)


def test_the_numbers_of_a_name_never_change() -> None:
    """Workers of two versions, of which one takes over from the other, have one model."""
    out = torch.empty(2, 3)
    DummyWeights().read_into(out, "a.weight")
    numbers = [-0.0038886759, -0.0291050579, 0.0293442886, -0.0320803560, -0.0210691914, 0.0181805044]
    assert out.flatten().tolist() == pytest.approx(numbers, abs=1e-9)


def test_numbers_are_as_wide_apart_as_those_that_models_begin_with_and_have_full_rank() -> None:
    one, other = torch.empty(2, 1000, 384)
    DummyWeights().read_into(one, "a.weight")
    DummyWeights().read_into(other, "b.weight")
    assert float(one.std()) == pytest.approx(0.02, rel=0.01)
    assert abs(float(one.mean())) < 1e-4
    assert abs(float((one * other).mean())) < 0.02 * float(one.var())
    singular = torch.linalg.svdvals(one) / float(one.std())
    assert float(singular[0]) < 1.05 * (math.sqrt(1000) + math.sqrt(384)), "rows are as independent as if drawn"
    assert float(singular[-1]) > 0.9 * (math.sqrt(1000) - math.sqrt(384))


@pytest.mark.parametrize("name", thinned(FAMILIES, usual=8))
def test_about_as_many_numbers_are_planned_as_are_made(name: str, folder_of: FolderOf) -> None:
    folder, kernels = folder_of(name), Reference()
    loader = Loader(DummyWeights(), torch.float32, kernels, partial(kernels.layer, dtype=torch.float32))
    with torch.inference_mode():
        load_any(folder, read_config(folder), loader)
    config, model = load_config(dict(SMALL), {}, None), read_config(folder)
    assert demand(config, model, capacity(config, model), folder).weights == pytest.approx(loader.num_bytes, rel=0.35)


def test_plans_of_real_sizes_are_close(tmp_path: Path) -> None:
    """Llama 3.1 8B has 8.03 billion numbers, Qwen3 30B-A3B 30.5, DeepSeek V2 Lite 15.7, as their makers say."""
    found = {name: read_config(_written(tmp_path / name, name)).numbers / 1e9 for name in _REAL}
    assert found["llama"] == pytest.approx(8.03, rel=0.01)
    assert found["qwen3_moe"] == pytest.approx(30.5, rel=0.01)
    assert found["deepseek_v2"] == pytest.approx(15.7, rel=0.01)


_ROTARY = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "dtype": "bfloat16"}
_REAL = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "vocab_size": 102400,
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
}


def _written(folder: Path, name: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": name, **_ROTARY, **_REAL[name]}))
    return folder


def test_what_our_loader_does_not_make_of_plain_numbers_is_refused(tmp_path: Path) -> None:
    folder = gqa(tmp_path / "model")
    config = load_config(dict(SMALL), {}, None)
    read = (folder / "config.json").read_text()
    (folder / "config.json").write_text(read.replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1))
    with pytest.raises(ConfigError, match=r"load_format dummy makes plain numbers.*fp8 of 8-bit floats"):
        capacity(config, read_config(folder))
