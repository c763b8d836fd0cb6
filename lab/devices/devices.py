"""The GPUs and models of simulated workers: their sizes and speeds, and the names that users write.

A device is some GPUs of a kind that share a model: `a100-80-opt-13b-tp2` are two A100s of 80 GB with OPT-13B.
roofline.py computes how long its steps take, unless they were measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from alignedserve.architectures.quantization import Quantization
from alignedserve.errors import ProfileError

_GB = 1e9
_USED = 0.9  # share of a GPU's memory that is used (vLLM's default)
_LEAST = 2048  # tokens: with room for fewer, a device is refused
_BF16 = 2  # bytes
_MANY = 1 << 20  # weights: the bytes of one follow from theirs
_QUANTIZATIONS = [quantization.value for quantization in Quantization]
_MOST_RANKS = 8  # GPUs of a node


@dataclass(frozen=True)
class Gpu:
    """The speed of one GPU: the peaks that its data sheet states, and the shares of them that kernels reach."""

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    tflops: float  # of bf16 with sums in fp32, without sparsity
    processors: int  # streaming multiprocessors
    pcie_gb_s: float  # one way, as copies reach in practice
    nvlink_gb_s: float | None = None  # one way; None: another GPU is reached over PCIe
    sum_us: float = 13.3  # an all-reduce of two GPUs takes this and its bytes over
    sum_gb_s: float = 18.5  # of an all-reduce
    bandwidth_share: float = 0.8  # of the peak, which linear layers reach
    tflops_share: float = 0.7  # the same of the TFLOP/s
    attention_share: float = 0.54  # of the TFLOP/s, in the attention of prompts
    unequal_share: float | None = None  # of the way from the mean to the longest prefix; None: as was measured


@dataclass(frozen=True)
class Model:
    """The shape of a model in bf16, or of one whose layers are quantised while they are loaded."""

    name: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    ffn_size: int
    vocabulary: int
    head_dim: int = 128
    gated: bool = True  # whether the MLP has three matrices, and not two
    tied: bool = False  # whether the output layer is the embedding
    quantization: str = Quantization.NONE.value  # as engine.quantization has it
    kv_rank: int | None = None  # what K and V of all heads are made of (latent attention); None: K and V are kept
    turned_dim: int = 64  # the numbers of K that turn, which are kept beside it
    query_rank: int | None = None  # what queries are compressed to, with kv_rank; None: they are not compressed
    experts: int | None = None  # of a layer; None: all layers are dense
    chosen: int = 1  # experts of a token
    expert_size: int = 0  # the inner size of an expert
    shared_size: int = 0  # the inner size of what all tokens take beside their experts
    dense_layers: int = 0  # the first layers, which have no experts

    def __post_init__(self) -> None:
        if self.quantization not in _QUANTIZATIONS:
            raise ProfileError(f"model: quantization cannot be {self.quantization!r:.40}, it is none, int8 or int4")
        if self.experts and not (self.expert_size and self.chosen <= self.experts and self.dense_layers <= self.layers):
            raise ProfileError(
                "model: a mixture has an expert_size, no more chosen than experts, and no more dense_layers than layers"
            )

    @property
    def weights(self) -> int:
        """Return the number of weights in all layers."""
        return self._weights_with(self.experts or 0)

    @property
    def active_weights(self) -> int:
        """Return the number of weights in layers that a token is multiplied with: only some experts."""
        return self._weights_with(self.chosen)

    def _weights_with(self, experts: int) -> int:
        attention = sum(inputs * outputs for inputs, outputs in self.attention(self.heads, self.kv_heads))
        matrix = (2 + self.gated) * self.hidden_size
        mixture = matrix * (experts * self.expert_size + self.shared_size) + self.hidden_size * (self.experts or 0)
        dense = matrix * self.ffn_size
        return int(self.layers * attention + self.mixtures * mixture + (self.layers - self.mixtures) * dense)

    @property
    def mixtures(self) -> int:
        """Return the number of layers that have experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def attention(self, heads: float, kv_heads: float) -> tuple[tuple[float, float], ...]:
        """Return the inputs and outputs of each matrix of attention in a layer with these numbers of heads."""
        hidden, values = self.hidden_size, heads * self.head_dim
        if self.kv_rank is None:
            return (hidden, values + 2 * kv_heads * self.head_dim), (values, hidden)
        queries = values + heads * self.turned_dim
        ranks = (self.query_rank,) if self.query_rank else ()
        made = tuple(pairwise((hidden, *ranks, queries)))
        of_heads = (values, self.kv_rank)  # a head's query goes into the space of what is kept, and its sum out of it
        return (*made, (hidden, self.compared), of_heads, of_heads, (values, hidden))

    @property
    def compared(self) -> int:
        """Return the size of a head's query as attention compares it with what is kept."""
        return self.head_dim if self.kv_rank is None else self.kv_rank + self.turned_dim

    @property
    def summed(self) -> int:
        """Return the size of what attention sums up for a head."""
        return self.kv_rank or self.head_dim

    def kept(self, kv_heads: float) -> float:
        """Return how many numbers of a token a layer with `kv_heads` heads of K and V keeps."""
        return 2 * kv_heads * self.head_dim if self.kv_rank is None else self.compared

    def experts_read(self, tokens: float) -> float:
        """Return how many experts of a layer `tokens` tokens choose together, if each is as likely as any other."""
        experts = self.experts or 0
        return experts * (1 - (1 - self.chosen / experts) ** tokens) if experts else 0.0

    @property
    def weights_gb(self) -> float:
        head = self.vocabulary * self.hidden_size
        return round(self._bytes_of(self.weights, 0 if self.tied else head, head) / _GB, 2)

    @property
    def layer_byte(self) -> float:
        """Return the bytes of a weight in a layer, with its share of scales."""
        return self._bytes_of(_MANY, 0, 0) / _MANY

    @property
    def head_byte(self) -> float:
        """Return the bytes of a weight in the output layer."""
        return self._bytes_of(0, 0, _MANY) / _MANY

    def _bytes_of(self, layers: int, embedding: int, head: int) -> int:
        return Quantization(self.quantization).num_bytes(layers, embedding, head, _BF16)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of what is kept of a token, in all layers."""
        return int(_BF16 * self.layers * self.kept(self.kv_heads))


@dataclass(frozen=True)
class Device:
    """GPUs that share a model: tensor-parallel ranks."""

    gpu: Gpu
    model: Model
    ranks: int = 1

    def __post_init__(self) -> None:
        if not (1 <= self.ranks <= _MOST_RANKS and self._divides(self.ranks)):
            raise ProfileError(
                f"{self.model.name} has {self.model.heads} heads, which {self.ranks} GPUs cannot share: take"
                f" 1 to {_MOST_RANKS} that divide them"
            )

    @property
    def kv_bytes(self) -> int:
        """Return the bytes that all ranks keep of a token: each its heads of K and V, or the compressed vector."""
        copies = max(1, self.ranks // (self.model.kv_heads if self.model.kv_rank is None else 1))
        return copies * self.model.kv_bytes

    @property
    def kv_tokens(self) -> int:
        """Return the tokens that the memory holds beside the weights; refuse a device without room for them."""
        if self._room < _LEAST:
            raise ProfileError(
                f"{self.model.name} does not fit on {self.ranks} x {self.gpu.name}: its weights take"
                f" {self.model.weights_gb:.1f} GB of the {self._used_gb:.1f} that can be used, and {_LEAST:,} tokens"
                f" need room beside them: take {self._remedy}"
            )
        return self._room

    @property
    def _used_gb(self) -> float:
        return _USED * self.ranks * self.gpu.memory_gb

    @property
    def _room(self) -> int:
        return int((self._used_gb - self.model.weights_gb) * _GB / self.kv_bytes)

    @property
    def _remedy(self) -> str:
        more = (replace(self, ranks=ranks) for ranks in range(self.ranks + 1, _MOST_RANKS + 1) if self._divides(ranks))
        return next((f"{device.ranks} of them" for device in more if device._room >= _LEAST), "larger GPUs")

    def _divides(self, ranks: int) -> bool:
        return not self.model.heads % ranks

    def all_reduce(self, source: str) -> dict[str, Any]:
        """Return a profile's all-reduce. In a ring each rank sends the bytes 2 (n - 1) / n times, in 2 (n - 1) turns:
        once if n is 2; its latency was measured to grow with n."""
        sent = 2 * (self.ranks - 1) * _BF16 * self.model.hidden_size // self.ranks
        latency_us = self.gpu.sum_us * self.ranks / 2
        return {"latency_us": latency_us, "gb_s": self.gpu.sum_gb_s, "token_bytes": sent, "source": source}


# Memory: what a process finds on A100, H100, L40S and V100 (PyTorch's total_memory); 1, 4 and 8 A100s then keep the 12,
# 21 and 264 GB for KV that vLLM's paper (2023, table 1) states for OPT-13B, 66B and 175B. Of RTX cards the nominal
# size, with which measured runs of Llama-3.1 were simulated: its large logits take memory too.
# Peaks and processors: NVIDIA's data sheets (A100 2021, H100 SXM 2023, L40S 2023, V100 SXM2 2020, which has fp16 alone)
# and white papers (Ada 2022, RTX Blackwell 2025). Copies: the link's bandwidth less what copies usually lose.
# Sums: A100 and RTX PRO 6000 as in their profiles; H100 fitted to Vidur's h100_dgx of 2 to 8 ranks; L40S
# (PCIe 4) half of PCIe 5; V100 half of A100. RTX 4090s do not reach each other: half of what LLMServingSim takes for
# that over PCIe 5.
# Shares of bandwidth and TFLOP/s: fitted to linear layers, on one GPU, of Llama-2-7B (A100, H100; Vidur) and
# Llama-3.1-8B (RTX; LLMServingSim); the L40S as the A40 (Vidur), also a card with GDDR6 and ECC. Share in attention:
# measured with FlashAttention-2 (RTX; A100 by cached tokens), the L40S as the RTX PRO 6000, the H100 by
# FlashAttention-3's paper. Shares of the V100 as the A100: nothing measured is there.
_GPUS = {
    #                            GB   GB/s  TFLOP/s SMs PCIe NVLink  sum: us, GB/s      shares
    "a100-40": Gpu("A100 40GB", 42.3, 1555, 312.0, 108, 25, 300.0, 6.8, 142.0, 0.80, 0.70, 0.62),
    "a100-80": Gpu("A100 80GB", 85.0, 2039, 312.0, 108, 25, 300.0, 6.8, 142.0, 0.80, 0.70, 0.62),
    "h100": Gpu("H100", 85.0, 3350, 989.0, 132, 50, 450.0, 6.5, 250.0, 0.80, 0.68, 0.60),
    "l40s": Gpu("L40S", 47.7, 864, 362.0, 142, 25, None, 13.3, 18.5, 0.78, 0.74, 0.54),
    "rtx4090": Gpu("RTX 4090", 24.0, 1008, 165.2, 128, 25, None, 20.0, 8.0, 0.96, 1.00, 0.80),
    "rtxpro6000": Gpu("RTX PRO 6000", 96.0, 1792, 503.8, 188, 50, None, 13.3, 36.9, 0.84, 0.84, 0.54),
    "v100": Gpu("V100 32GB", 34.1, 900, 125.0, 80, 12, 150.0, 6.8, 71.0, 0.80, 0.70, 0.62),
}
GPUS: Mapping[str, Gpu] = MappingProxyType(_GPUS)
# The highest power of a board, in watts, by NVIDIA's data sheets; A100, H100 and V100 are the SXM boards.
_WATTS = {"a100": 400, "h100": 700, "l40s": 350, "rtx4090": 450, "rtxpro6000": 600, "v100": 300}


def _opt(size: str, layers: int, hidden_size: int, heads: int) -> Model:
    vocabulary = 50_272
    return Model(
        f"OPT-{size}", layers, hidden_size, heads, heads, 4 * hidden_size, vocabulary, hidden_size // heads, False, True
    )


# Each model's config.json states these numbers.
_MODELS = (
    _opt("6.7B", 32, 4096, 32),
    _opt("13B", 40, 5120, 40),
    _opt("30B", 48, 7168, 56),
    _opt("66B", 64, 9216, 72),
    _opt("175B", 96, 12_288, 96),
    Model("BLOOM-176B", 70, 14_336, 112, 112, 57_344, 250_880, gated=False, tied=True),
    Model("CodeLlama-34b", 48, 8192, 64, 8, 22_016, 32_000),
    Model(
        "DeepSeek-V2-Lite",
        27,
        2048,
        16,
        16,
        10_944,
        102_400,
        kv_rank=512,
        experts=64,
        chosen=6,
        expert_size=1408,
        shared_size=2816,
        dense_layers=1,
    ),
    Model(
        "DeepSeek-V3",
        61,
        7168,
        128,
        128,
        18_432,
        129_280,
        query_rank=1536,
        kv_rank=512,
        experts=256,
        chosen=8,
        expert_size=2048,
        shared_size=2048,
        dense_layers=3,
    ),
    Model("Llama-2-7B", 32, 4096, 32, 32, 11_008, 32_000),
    Model("Llama-2-13B", 40, 5120, 40, 40, 13_824, 32_000),
    Model("Llama-2-70B", 80, 8192, 64, 8, 28_672, 32_000),
    Model("Llama-3.1-8B", 32, 4096, 32, 8, 14_336, 128_256),
    Model("Llama-3.1-70B", 80, 8192, 64, 8, 28_672, 128_256),
    Model("Mixtral-8x7B", 32, 4096, 32, 8, 14_336, 32_000, experts=8, chosen=2, expert_size=14_336),
    Model("Qwen3-30B-A3B", 48, 2048, 32, 4, 6144, 151_936, experts=128, chosen=8, expert_size=768),
    Model("Qwen3-32B", 64, 5120, 64, 8, 25_600, 151_936),
    Model("Yi-34B", 60, 7168, 56, 8, 20_480, 64_000),
)
MODELS: Mapping[str, Model] = MappingProxyType({model.name.lower(): model for model in _MODELS})
_BITS = "|".join(quantization.value for quantization in Quantization if quantization.bits)
_MODEL = rf"({'|'.join(map(re.escape, MODELS))})(?:-({_BITS}))?"
_NAME = re.compile(rf"({'|'.join(GPUS)})-({_MODEL})-tp([1-9])")
HOW_NAMED = (
    f"GPU-MODEL-tpN, such as a100-80-opt-13b-tp1, with a GPU of {', '.join(GPUS)} and a model of {', '.join(MODELS)},"
    " in bf16, or quantised with -int8 or -int4 after its name"
)


def model_named(name: str) -> Model | None:
    """Return the model of such a name as `opt-13b` or `opt-13b-int4`, if it is one."""
    found = re.fullmatch(_MODEL, name)
    if not found:
        return None
    model, quantization = MODELS[found[1]], found[2]
    return replace(model, name=f"{model.name}-{quantization}", quantization=quantization) if quantization else model


def named(name: str) -> Device | None:
    """Return the device of such a name as `h100-llama-3.1-70b-tp4`, if it is one."""
    found = _NAME.fullmatch(name)
    model = model_named(found[2]) if found else None
    return Device(GPUS[found[1]], model, int(found[5])) if found and model else None


def watts_of(name: str) -> int | None:
    """Return the most that each GPU of a named device takes; None where that is not known."""
    return _WATTS.get(name.partition("-")[0])


def names_with_one_gpu() -> list[str]:
    """Return the names of all devices of one GPU."""
    return [f"{gpu}-{model}-tp1" for gpu in GPUS for model in MODELS]
