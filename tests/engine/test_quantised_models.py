"""Tests that a model whose layers are quantised while it is loaded gives the logits and the words of transformers with
the same quantised weights, expanded to fp32, also where two ranks share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.quantization import Quantization
from alignedserve.config.config import load as load_config
from alignedserve.engine.engine import Engine
from alignedserve.engine.models.families.choice import load as load_any
from alignedserve.engine.models.loading import Loader
from alignedserve.engine.weights.forms import weights_of
from alignedserve.errors import ConfigError
from alignedserve.kernels.common import quantised
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kernels.library import Library
from alignedserve.kernels.native.kernels import Native
from alignedserve.sizing.capacity import capacity
from alignedserve.sizing.memory import demand
from tests.engine.driver import Driver, prompt_of
from tests.engine.expanded import expanded_reference
from tests.engine.test_models import ROUNDED, TOKENS, FolderOf, furthest, logits_of
from tests.engine.test_ranks import Both
from tests.engine.transformers_families import make as family_of
from tests.models import MODELS, gqa, llama
from tests.rare import rarely, thinned
from tests.reference import CLOSE, Tally, compare

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
SMALL = {"engine.dtype": "float32", "engine.kv_memory_mb": 64, "kvpool.memory_mb": 64}
QUANTIZED = [Quantization.INT8, Quantization.INT4]


def kernels_here() -> list[Kernels]:
    return [Reference(), Native(Library())]


@pytest.mark.parametrize(("name", "quantization"), thinned(product(MODELS, QUANTIZED), usual=7))
def test_logits_are_those_of_the_expanded_weights(name: str, quantization: Quantization, folder_of: FolderOf) -> None:
    folder, tokens = folder_of(name), prompt_of(1, TOKENS)
    with torch.inference_mode():
        expected = expanded_reference(folder, quantization)(torch.tensor([tokens])).logits[0]
    for kernels in kernels_here():
        assert furthest(logits_of(folder, tokens, kernels=kernels, quantization=quantization), expected) < CLOSE


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "quantization"), [("qwen2", Quantization.INT4), rarely(("opt", Quantization.INT8))])
def test_triton_kernels_say_the_same(name: str, quantization: Quantization, folder_of: FolderOf) -> None:
    """They run in Triton's interpreter."""
    kernels_of = pytest.importorskip("alignedserve.kernels.triton.kernels", reason="Triton is not installed")
    if not pytest.importorskip("alignedserve.kernels.triton.launch").interpreting():
        pytest.skip("Triton compiles here: tests/gpu runs engines on the GPU")
    folder, tokens = folder_of(name), prompt_of(1, 9)
    with torch.inference_mode():
        expected = expanded_reference(folder, quantization)(torch.tensor([tokens])).logits[0]
    found = logits_of(folder, tokens, kernels=kernels_of.TritonKernels(), quantization=quantization)
    assert furthest(found, expected) < CLOSE


@pytest.mark.parametrize(("name", "quantization"), thinned(product(ROUNDED, QUANTIZED), usual=5))
def test_in_bf16_they_are_near(name: str, quantization: Quantization, folder_of: FolderOf) -> None:
    folder, tokens = folder_of(name), prompt_of(1, TOKENS)
    exact = logits_of(folder, tokens, quantization=quantization)
    near = logits_of(folder, tokens, torch.bfloat16, Native(Library()), quantization=quantization)
    assert float((near - exact).norm() / exact.norm()) < 0.25  # random networks enlarge errors


def compare_greedy(engine: Any, network: Any, tally: Tally, label: str) -> None:
    """Compare two requests: one in chunks, the other beside its decodes."""
    driver = Driver(engine, 0)
    first, second = driver.start("first", prompt_of(3, 30), 20), driver.start("second", prompt_of(4, 9), 20)
    driver.prefill(first, [7, 16])
    driver.run(first, second, parts=[second.chunk(9), first.decode()])
    driver.run(first, second, parts=[first.decode(), second.decode()])
    for live in (first, second):
        compare(network, live.prompt, driver.generate(live, 20), tally, f"{label}, {live.name}")


@pytest.mark.parametrize(("name", "quantization"), thinned(product(MODELS, QUANTIZED), usual=3))
def test_greedy_output_is_that_of_the_expanded_weights(
    name: str, quantization: Quantization, folder_of: FolderOf, tally: Tally
) -> None:
    engine = Engine(folder_of(name), num_blocks=30, dtype="float32", quantization=quantization)
    compare_greedy(engine, expanded_reference(folder_of(name), quantization), tally, f"{name}, {quantization.value}")


@pytest.mark.parametrize(
    ("name", "quantization"), thinned(product(("gqa-untied", "qwen2", "phi3"), QUANTIZED), usual=2)
)
def test_layers_that_are_quantised_some_rows_at_a_time(
    name: str, quantization: Quantization, folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tokens = folder_of(name), prompt_of(1, TOKENS)
    at_once = [logits_of(folder, tokens, kernels=kernels, quantization=quantization) for kernels in kernels_here()]
    monkeypatch.setattr(quantised, "_AT_ONCE", 150)
    for kernels, expected in zip(kernels_here(), at_once, strict=True):
        assert torch.equal(logits_of(folder, tokens, kernels=kernels, quantization=quantization), expected)


# --- Ranks


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


IN_PARTS = ("qwen2", "mha-tied", "opt", "deepseek-v3", "qwen2-moe", "llama4", "phi3", "glm4")


@pytest.mark.parametrize(("name", "quantization"), thinned(product(IN_PARTS, QUANTIZED), usual=2))
def test_two_ranks_have_the_weights_of_one(
    name: str, quantization: Quantization, folder_of: FolderOf, pool: ThreadPoolExecutor, tally: Tally, tmp_path: Path
) -> None:
    folder = gqa(tmp_path / name, intermediate_size=96) if name == "gqa-untied" else folder_of(name)
    both = Both(folder, pool, quantization=quantization)
    compare_greedy(both, expanded_reference(folder, quantization), tally, f"{name}, {quantization.value}, two ranks")


def test_ranks_that_would_cut_small_groups_are_refused(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    folder = gqa(tmp_path / "odd", intermediate_size=136)
    with pytest.raises(ConfigError, match=r"ranks cannot divide its inputs.*set engine\.tensor_parallel_size to 1"):
        Both(folder, pool, quantization=Quantization.INT4)


# --- What is planned


def loaded_bytes(folder: Path, dtype: torch.dtype, quantization: Quantization = Quantization.NONE) -> int:
    kernels = Reference()
    make_linear = partial(kernels.layer, dtype=dtype)
    loader = Loader(weights_of(folder), dtype, kernels, make_linear, quantization=quantization)
    with torch.inference_mode():
        load_any(folder, read_config(folder), loader)
    return loader.num_bytes


PLANNED: dict[str, Callable[[Path], Path]] = {
    "untied": lambda folder: gqa(folder, **WIDE),
    "tied": lambda folder: llama(folder, **WIDE),
    "gpt2": partial(family_of, family="gpt2", hidden_size=512, max_position_embeddings=32, n_inner=2048),
    **{family: partial(family_of, family=family, **WIDE) for family in ("gemma3_text", "phi", "mixtral")},
    "hunyuan_v1_moe": partial(family_of, family="hunyuan_v1_moe", **WIDE),
}


@pytest.mark.parametrize(("name", "quantization"), thinned(product(PLANNED, QUANTIZED), usual=3))
def test_as_many_bytes_are_planned_as_weights_take(name: str, quantization: Quantization, tmp_path: Path) -> None:
    folder = PLANNED[name](tmp_path / name)
    config, model = load_config({"engine.quantization": quantization.value, **SMALL}, {}, None), read_config(folder)
    planned = demand(config, model, capacity(config, model), folder).weights
    assert planned == pytest.approx(loaded_bytes(folder, torch.float32, quantization), rel=0.05)
