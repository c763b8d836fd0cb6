"""Random models of the sizes that benchmarks compare engines on: nobody's weights are needed to time them.

    python -m lab.benchmarks.common.models llama160m FOLDER    # writes one
    python -m lab.benchmarks.common.models FILE.gguf FOLDER    # a GGUF file expanded to bf16, for vLLM

The tokenizer is the demo model's: prompts are token ids, so any tokenizer will do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch

from alignedserve.architectures.model_source import DEMO_FOLDER

VOCAB = 8_000  # prompts draw from this number of first tokens
POSITIONS = {"llama160m": 4096, "opt125m": 2048, "gqa500m": 4096}


def llama160m(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    return saved(LlamaForCausalLM, LlamaConfig(vocab_size=32_000, **sizes, **_SHARED), folder)


def gqa500m(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    more = {**_SHARED, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return saved(LlamaForCausalLM, LlamaConfig(vocab_size=151_936, **sizes, **more), folder)


def opt125m(folder: Path) -> Path:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=50_272,
        hidden_size=768,
        ffn_dim=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=POSITIONS["opt125m"],
        word_embed_proj_dim=768,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return saved(OPTForCausalLM, config, folder)


_SHARED: dict[str, Any] = {
    "max_position_embeddings": POSITIONS["llama160m"],
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MAKERS: dict[str, Callable[[Path], Path]] = {"llama160m": llama160m, "opt125m": opt125m, "gqa500m": gqa500m}


def saved(kind: Any, config: Any, folder: Path) -> Path:
    """Save a random model of the configuration, which `kind` makes, in bf16."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = kind(config)
    # Straight in bf16: half a billion numbers in fp32 first would take memory and time for nothing.
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1) if "norm" in name and name.endswith("weight") else parameter.normal_(0, 0.02)
    model.tie_weights()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(DEMO_FOLDER / name, folder / name)
    return folder


def expand(network: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write the weights of a model of transformers, which may be of a GGUF file, as a plain folder."""
    config = deepcopy(network.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(network)(config).to(dtype)  # what was read from a GGUF file refuses to be saved
    plain.load_state_dict(network.state_dict())
    plain.save_pretrained(folder)


def expand_file(file: Path, folder: Path) -> None:
    """Write a GGUF file in bf16, as a folder that other engines read."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    of: dict[str, Any] = {"gguf_file": file.name}
    expand(AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **of), folder, torch.bfloat16)
    AutoTokenizer.from_pretrained(file.parent, **of).save_pretrained(folder)


if __name__ == "__main__":
    what, to = sys.argv[1], Path(sys.argv[2])
    expand_file(Path(what), to) if what.endswith(".gguf") else MAKERS[what](to)
