"""Models that GPUs are measured with, and how work on a GPU is timed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

BLOCK_SIZE, PAGE = 16, 64
RUNS = 20


@dataclass(frozen=True)
class Model:
    """A Llama of random weights."""

    name: str
    kv_heads: int
    inner: int
    vocabulary: int
    hidden: int = 4096
    heads: int = 32
    layers: int = 32

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "eos_token_id": 2,
        }

    @property
    def num_read(self) -> int:
        """Return how many numbers of the weights a step reads: all but the embedding."""
        kv = self.hidden * self.kv_heads // self.heads
        layer = 2 * self.hidden**2 + 2 * self.hidden * kv + 3 * self.hidden * self.inner
        return self.layers * layer + self.vocabulary * self.hidden

    @property
    def kv_dim(self) -> int:
        return self.hidden * self.kv_heads // self.heads

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of a token's K and V."""
        return 2 * 2 * self.layers * self.kv_dim


MODELS = {
    "7b": Model("llama_7b_mha", kv_heads=32, inner=11_008, vocabulary=32_000),
    "8b": Model("llama_8b_gqa", kv_heads=8, inner=14_336, vocabulary=128_256),
}


def timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def seconds(work: Callable[[], object]) -> float:
    for _ in range(3):  # compiled, tuned, warm
        work()
    return median(timed(work) for _ in range(RUNS))


def left_out(name: str, why: str) -> None:
    print(json.dumps({"name": name, "left_out": why}), flush=True)
