"""Read the configuration of a Hugging Face model folder, without torch, since every part needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from alignedserve.architectures.config import DTYPE_BYTES, ModelConfig
from alignedserve.architectures.families.deepseek import read_deepseek_v2, read_deepseek_v3, read_youtu
from alignedserve.architectures.families.encoders import is_encoder, read_encoder
from alignedserve.architectures.families.gemma import read_gemma, read_gemma2, read_gemma3
from alignedserve.architectures.families.generic import read_generic
from alignedserve.architectures.families.llama import (
    read_glm,
    read_glm4,
    read_llama,
    read_llama4,
    read_mistral,
    read_phi3,
    read_qwen2,
    read_qwen3,
)
from alignedserve.architectures.families.mixtures import (
    read_dots1,
    read_glm4_moe,
    read_gpt_oss,
    read_minimax_m2,
    read_mixtral,
    read_olmoe,
    read_qwen2_moe,
    read_qwen3_moe,
)
from alignedserve.architectures.families.opt import read_opt
from alignedserve.architectures.given import Given, read_json
from alignedserve.architectures.vectors import HEAD, num_labels
from alignedserve.errors import ModelError, UnsupportedModel

__all__ = ["DTYPE_BYTES", "ModelConfig", "read_config", "read_json"]

# The architectures for which the engine has a module (engine/models).
READERS: dict[str, Callable[[Given], ModelConfig]] = {
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
    "GemmaForCausalLM": read_gemma,
    "Gemma2ForCausalLM": read_gemma2,
    "Gemma3ForCausalLM": read_gemma3,
    "Gemma3ForConditionalGeneration": partial(read_gemma3, reads_images=True),
    "Phi3ForCausalLM": read_phi3,
    "GlmForCausalLM": read_glm,
    "Glm4ForCausalLM": read_glm4,
    "OPTForCausalLM": read_opt,
    "Llama4ForCausalLM": read_llama4,
    "Llama4ForConditionalGeneration": partial(read_llama4, reads_images=True),
    "DeepseekV2ForCausalLM": read_deepseek_v2,
    "DeepseekV3ForCausalLM": read_deepseek_v3,
    "Glm4MoeLiteForCausalLM": read_deepseek_v3,
    "YoutuForCausalLM": read_youtu,
    "MixtralForCausalLM": read_mixtral,
    "Qwen2MoeForCausalLM": read_qwen2_moe,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "Dots1ForCausalLM": read_dots1,
    "OlmoeForCausalLM": read_olmoe,
    "Glm4MoeForCausalLM": read_glm4_moe,
    "MiniMaxM2ForCausalLM": read_minimax_m2,
    "GptOssForCausalLM": read_gpt_oss,
}


# The architectures whose decoder has another name by itself.
_DECODERS = {"Gemma3Text": "Gemma3"}


def read_config(folder: Path) -> ModelConfig:
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: name a Hugging Face model folder")
    given = Given(folder / "config.json")
    architectures = given.get("architectures") or ["(none named)"]
    named = architectures if isinstance(architectures, list) else [architectures]
    if len(named) != 1 or type(named[0]) is not str:
        raise UnsupportedModel(
            f"{folder}: config.json must name one architecture, not {', '.join(map(str, named)):.100}"
        )
    if is_encoder(named[0]):
        return read_encoder(given, named[0])
    reader = READERS.get(named[0])
    return _without_words(given, named[0]) if reader is None else reader(given)


def _without_words(given: Given, architecture: str) -> ModelConfig:
    """Return the configuration of a decoder that was saved without its head for words, for its vectors; or of a model
    that transformers runs."""
    for ending in ("Model", HEAD):
        name = architecture.removesuffix(ending)
        reader = READERS.get(f"{_DECODERS.get(name, name)}ForCausalLM")
        if architecture.endswith(ending) and reader is not None:
            if given.get("is_causal") is False or given.get("use_bidirectional_attention"):
                raise UnsupportedModel(f"{given.folder}: {architecture} that sees later tokens is not supported")
            labels = num_labels(given) if ending == HEAD else 0
            return replace(reader(given), generates=False, labels=labels, tied_embeddings=True)
    return read_generic(given, architecture)
