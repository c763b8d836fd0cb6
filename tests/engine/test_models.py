"""Tests that every family and every option of it gives the logits of transformers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alignedserve.architectures.families.llama import LlamaConfig
from alignedserve.architectures.families.model_config import read_config
from alignedserve.architectures.quantization import Quantization
from alignedserve.engine.models.rope import Rotation
from alignedserve.kernels.common.linear import BUCKETS, Linear, Tuning, Way
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.dispatcher import Kernels
from alignedserve.kernels.library import Library
from alignedserve.kernels.native.kernels import Native
from alignedserve.lab.benchmarks.common.one_pass import OnePass
from tests.engine.driver import prompt_of
from tests.kernels.every import PACKING
from tests.models import MAX_POSITIONS, MODELS, OPTIONS, STORED, gqa, llama
from tests.rare import rarely, thinned
from tests.reference import CLOSE, attention_of

FolderOf = Callable[[str], Path]
ReferenceOf = Callable[[Path], Any]
BLOCK_SIZE, TOKENS = 16, 100
BF16_STEP = 2.0**-8  # half the distance from 1 to the next number: the most that rounding changes


def logits_of(
    folder: Path,
    tokens: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    kernels: Kernels | None = None,
    made: Callable[[Linear], None] | None = None,
    quantization: Quantization = Quantization.NONE,
) -> torch.Tensor:
    """Return the logits of every token, in one pass; `made` gets each linear layer once all is loaded."""
    network = OnePass(folder, dtype, kernels or Reference(), quantization)
    if made is not None:
        with torch.inference_mode():
            for linear in network.linears:
                made(linear)
    return network(tokens)


def furthest(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest logit."""
    return float((ours - expected).abs().max() / expected.abs().max())


FAMILIES = "gemma glm qwen3-moe olmoe glm4-moe minimax-m2 dots1 glm4-moe-lite".split()
VARIANTS = [name for name in OPTIONS if name not in FAMILIES]


@pytest.mark.parametrize("name", [*MODELS, *STORED, *FAMILIES, *map(rarely, VARIANTS)])
def test_logits_are_those_of_transformers(name: str, folder_of: FolderOf, reference_of: ReferenceOf) -> None:
    folder, tokens = folder_of(name), prompt_of(1, TOKENS)
    with torch.inference_mode():
        expected = reference_of(folder)(torch.tensor([tokens])).logits[0]
    assert furthest(logits_of(folder, tokens), expected) < CLOSE


# Rounding may send a token to another expert, and nothing bounds what that changes: here each token takes all experts.
MIXTURES = ("deepseek-v2", "deepseek-v3", "mixtral", "gpt-oss", "qwen2-moe", "llama4")
ROUNDED = [*(name for name in MODELS if name not in MIXTURES), *(name for name in OPTIONS if "all-experts" in name)]

NARROW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("name", "dtype"), thinned(product(ROUNDED, NARROW), usual=7))
def test_narrow_types_stay_within_their_rounding(
    name: str, dtype: torch.dtype, folder_of: FolderOf, reference_of: ReferenceOf
) -> None:
    """The distance from fp32 is at most that of transformers in the same type, plus a share, and within 20 roundings of
    bf16."""
    folder, tokens = folder_of(name), prompt_of(2, TOKENS)
    narrow = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **attention_of(folder)).eval()
    with torch.inference_mode():
        exact = reference_of(folder)(torch.tensor([tokens])).logits[0]
        rounded = narrow(torch.tensor([tokens])).logits[0].float()
    off = furthest(logits_of(folder, tokens, dtype), exact)
    assert off < 20 * BF16_STEP
    assert off < 2 * furthest(rounded, exact)


@pytest.mark.skipif(not PACKING, reason="no kernel for packed weights: it takes AVX512-bf16")
@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_say_the_same(tied: bool, tmp_path: Path, reference_of: ReferenceOf) -> None:
    """The head is packed too, where it shares its memory with the table of the words."""
    folder = llama(tmp_path, vocab_size=176, intermediate_size=80, tie_word_embeddings=tied)
    tokens, packed = prompt_of(3, TOKENS), []

    def pack(linear: Linear) -> None:
        linear.use(Tuning({linear.shape: (Way.PACKED,) * len(BUCKETS)}))
        packed.append(linear.packed)

    with torch.inference_mode():
        exact = reference_of(folder)(torch.tensor([tokens])).logits[0]
    kernels = Native(Library(PACKING[-1]))
    off = furthest(logits_of(folder, tokens, torch.bfloat16, kernels, pack), exact)
    assert packed == [True] * 9, "of each layer four, and the head"
    assert off < 20 * BF16_STEP
    assert off < 2 * furthest(logits_of(folder, tokens, torch.bfloat16), exact)


@pytest.mark.parametrize("kind", ["default", "llama3", "yarn"])
def test_late_positions_turn_by_the_reference_s_angles(kind: str, tmp_path: Path) -> None:
    """At position 100,000 a frequency that differs in its last bit differs by hundredths of a radian."""
    more: dict[str, Any] = {
        "default": {},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"factor": 4.0},
    }[kind]
    if more:
        more["original_max_position_embeddings"] = 8192
    rope = {"rope_type": kind, "rope_theta": 500_000.0, **more}
    folder = gqa(tmp_path / "long", head_dim=32, max_position_embeddings=131_072, rope_parameters=rope)
    rotary = transformers.AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    config = read_config(folder)
    assert isinstance(config, LlamaConfig)
    rotation = Rotation(config.rope)
    for positions in (torch.tensor([0, 1, 999]), torch.tensor([0, 1, 999, 100_000, 131_071])):
        expected = rotary(torch.empty(0), positions[None])
        for ours, both_halves in zip(rotation.at(positions), expected, strict=True):
            assert torch.equal(ours.repeat(1, 2), both_halves[0])


def test_a_window_is_missed_where_it_is_left_out(folder_of: FolderOf, reference_of: ReferenceOf) -> None:
    """This shows that the comparison with a window could fail."""
    windowed = reference_of(folder_of("mistral"))
    window, windowed.config.sliding_window = windowed.config.sliding_window, MAX_POSITIONS
    try:
        with torch.inference_mode():
            without = windowed(torch.tensor([prompt_of(1, TOKENS)])).logits[0]
    finally:
        windowed.config.sliding_window = window
    assert furthest(logits_of(folder_of("mistral"), prompt_of(1, TOKENS)), without) > 100 * CLOSE


def test_what_is_scaled_differs_from_what_is_not(folder_of: FolderOf, tmp_path: Path) -> None:
    tokens = prompt_of(1, TOKENS)
    plain = llama(tmp_path / "plain", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    for name in ("llama-linear", "llama-yarn-options", "llama-proportional"):
        assert furthest(logits_of(folder_of(name), tokens), logits_of(plain, tokens)) > 10 * CLOSE, name
