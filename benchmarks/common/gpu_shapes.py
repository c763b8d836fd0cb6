"""Models that GPUs are measured with, how work on a GPU is timed, and attention of lengths that differ."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Lie, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels, choose
from alignedserve.kernels.dispatch.paged_attention import Fastest, PagedKernels
from alignedserve.kernels.dispatch.paged_libraries import PAGE as PAGE_OF_LIBRARIES
from alignedserve.kernels.dispatch.probing import working_libraries
from benchmarks.report import report

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


class AttentionBench:
    def __init__(self, model: Model) -> None:
        self.model, self.device = model, torch.device("cuda", 0)

    def alignment(self) -> None:
        """Time one layer's attention: few long requests among short, against as many of their mean length. gamma2 is
        that of the cost model (docs/how/cost_model.md), from these two batches."""
        for long in (4096, 16_384):
            mixed = [32] * 60 + [long] * 4
            even = [sum(mixed) // len(mixed)] * len(mixed)
            bubble = len(mixed) * max(mixed) - sum(mixed)
            for name, kernels, block_size in self.attentions():
                aligned, skewed = (self.attention(kernels, lengths, block_size) for lengths in (even, mixed))
                title = f"{self.model.name}_{long}_{name}"
                report(f"skew_{title}", skewed * 1e6, "us", baseline=aligned * 1e6)
                report(f"gamma2_{title}", (skewed - aligned) / bubble, "s/token")

    def attentions(self) -> Iterator[tuple[str, Kernels, int]]:
        """Yield kernels with their block size, which libraries choose themselves."""
        yield "triton", choose(self.device, torch.bfloat16).kernels, BLOCK_SIZE
        yield "torch", Reference(), BLOCK_SIZE
        yield "triton_of_256", choose(self.device, torch.bfloat16).kernels, PAGE_OF_LIBRARIES
        working, why_not = working_libraries(self.device, torch.bfloat16, PAGE_OF_LIBRARIES)
        for library in working:
            if library.why_not(True) is None:
                yield library.name.replace(" ", "_"), PagedKernels([library], Fixed(library.name)), PAGE_OF_LIBRARIES
        for why in why_not:
            left_out("skew", why)

    def attention(self, kernels: Kernels, lengths: Sequence[int], block_size: int) -> float:
        head_dim, kv_heads = self.model.hidden // self.model.heads, self.model.kv_heads
        counts = [-(-length // block_size) for length in lengths]
        pairs = random.Random(0).sample(range(sum(counts)), sum(counts))
        lies = [Lie(1, length, tuple(pairs.pop() for _ in range(n))) for length, n in zip(lengths, counts, strict=True)]
        shape = (2 * sum(counts), block_size, kv_heads * head_dim)
        cache = torch.randn(shape, device=self.device).bfloat16()
        query = torch.randn(len(lengths), self.model.heads, head_dim, device=self.device).bfloat16()
        spans = Spans(lies, block_size)
        return seconds(lambda: kernels.attend(query, cache, spans, Scoring(head_dim**-0.5)))


class Fixed(Fastest):
    """A choice that is always the same library, whatever is faster."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def find(self, key: Hashable, ways: Mapping[str, Callable[[], object]]) -> str:
        return self._name
