"""Read the configuration of a Hugging Face model folder, without torch, since every part needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from alignedserve.architectures.config import DTYPE_BYTES, ModelConfig
from alignedserve.architectures.deepseek import read_deepseek_v2, read_deepseek_v3, read_youtu
from alignedserve.architectures.generic import read_generic
from alignedserve.architectures.given import Given, read_json
from alignedserve.architectures.gpt_neox import read_gpt_neox
from alignedserve.architectures.llama import read_llama, read_mistral, read_qwen2, read_qwen3
from alignedserve.architectures.opt import read_opt
from alignedserve.errors import ModelError, UnsupportedModel

__all__ = ["DTYPE_BYTES", "ModelConfig", "read_config", "read_json"]

# The architectures for which the engine has a module (engine/models).
READERS: dict[str, Callable[[Given], ModelConfig]] = {
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
    "OPTForCausalLM": read_opt,
    "GPTNeoXForCausalLM": read_gpt_neox,
    "DeepseekV2ForCausalLM": read_deepseek_v2,
    "DeepseekV3ForCausalLM": read_deepseek_v3,
    "Glm4MoeLiteForCausalLM": read_deepseek_v3,
    "YoutuForCausalLM": read_youtu,
}


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
    return READERS[named[0]](given) if named[0] in READERS else read_generic(given, named[0])
