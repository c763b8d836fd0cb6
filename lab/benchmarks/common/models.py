"""Random models of the sizes that benchmarks compare engines on: nobody's weights are needed to time them.

    python -m lab.benchmarks.common.models llama160m FOLDER    # writes one

Their tokenizer is the demo model's: prompts are token ids, so any tokenizer will do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch

from alignedserve.architectures.model_source import DEMO_FOLDER

VOCAB = 8_000  # prompts draw from the first so many tokens
POSITIONS = {"llama160m": 4096, "opt125m": 2048, "gqa500m": 4096}


def llama160m(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    return saved(LlamaForCausalLM, LlamaConfig(vocab_size=32_000, **sizes, **_SHARED), folder)


def mistral160m(folder: Path, window: int, positions: int) -> Path:
    """Make a model whose layers all have this window."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    more = {**_SHARED, "num_key_value_heads": 12, "sliding_window": window, "max_position_embeddings": positions}
    return saved(MistralForCausalLM, MistralConfig(vocab_size=32_000, **sizes, **more), folder)


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


KINDS = ("Q8_0", "Q4_0")


def random_gguf(path: Path, kind: str) -> Path:
    """Write a GGUF file of random weights in the shape of Llama 3.2 1B, the same in all layers.

    Its vocabulary is the demo model's with fillers; the table of tokens, which is the head too, has 8 bits.
    """
    import gguf
    import numpy as np

    hidden, inner, layers, heads, kv_heads, words = 2048, 8192, 16, 32, 8, 128_256
    draw, types = np.random.default_rng(0), gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(POSITIONS["llama160m"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(500_000)
    writer.add_vocab_size(words)
    described = json.loads((DEMO_FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    ids = described["model"]["vocab"] | {token["content"]: token["id"] for token in described["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens + [f"<filler {at}>" for at in range(len(tokens), words)])
    writer.add_token_types([gguf.TokenType.NORMAL] * words)
    writer.add_token_merges([" ".join(merge) for merge in described["model"]["merges"]])
    writer.add_eos_token_id(0)

    def matrix(rows: int, columns: int, stored: str) -> Any:
        return gguf.quantize(draw.normal(0, 0.02, (rows, columns)).astype(np.float32), types[stored])

    kv, norm = hidden // heads * kv_heads, np.ones(hidden, np.float32)
    shapes = {
        "attn_q": (hidden, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, hidden),
    }
    shapes |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    layer = {name: matrix(*shape, kind) for name, shape in shapes.items()}
    writer.add_tensor("token_embd.weight", matrix(words, hidden, "Q8_0"), raw_dtype=types["Q8_0"])
    writer.add_tensor("output_norm.weight", norm)
    for at in range(layers):
        for name, numbers in layer.items():
            writer.add_tensor(f"blk.{at}.{name}.weight", numbers, raw_dtype=types[kind])
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{at}.{name}.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


if __name__ == "__main__":
    MAKERS[sys.argv[1]](Path(sys.argv[2]))
