"""What the benchmarks of a GPU share: their command line, the shapes of models, and how work is timed."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from alignedserve.lab.benchmarks.common.report import command, several

BLOCK_SIZE, PAGE = 16, 64
RUNS = 20


DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")  # a CPU: of a dry run


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
    head_dim: int = 128

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
            "head_dim": self.head_dim,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "eos_token_id": 2,
        }

    @property
    def num_read(self) -> int:
        """Return how many numbers of the weights a step reads: all but the embedding."""
        return self.layers * (self.attention + 3 * self.hidden * self.inner) + self.vocabulary * self.hidden

    @property
    def attention(self) -> int:
        """Return how many numbers the weights of a layer's attention have."""
        return 2 * self.hidden * (self.heads * self.head_dim + self.kv_dim)

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of a token's K and V."""
        return 2 * 2 * self.layers * self.kv_dim


@dataclass(frozen=True)
class ExpertModel(Model):
    """A mixture of experts, as Qwen3's: `inner` is the size of one expert."""

    experts: int = 128
    chosen: int = 8

    @property
    def config(self) -> dict[str, Any]:
        own = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": self.inner}
        chosen = {"num_experts": self.experts, "num_experts_per_tok": self.chosen, "norm_topk_prob": True}
        return super().config | own | chosen | {"decoder_sparse_step": 1, "mlp_only_layers": []}

    @property
    def num_read(self) -> int:
        """Return how many numbers of the weights a step of one token reads."""
        experts = self.hidden * self.experts + self.chosen * 3 * self.hidden * self.inner
        return self.layers * (self.attention + experts) + self.vocabulary * self.hidden


MODELS = {
    "7b": Model("llama_7b_mha", kv_heads=32, inner=11_008, vocabulary=32_000),
    "8b": Model("llama_8b_gqa", kv_heads=8, inner=14_336, vocabulary=128_256),
    # Four layers of Qwen3-30B-A3B.
    "moe": ExpertModel("qwen3_moe_4_layers", kv_heads=4, inner=768, vocabulary=151_936, hidden=2048, layers=4),
    "tiny": Model("tiny", kv_heads=2, inner=128, vocabulary=2_048, hidden=64, heads=4, layers=2, head_dim=16),
}


def about() -> dict[str, str]:
    """Return what a run's figures depend on."""
    gpu = torch.cuda.get_device_name(0) if DEVICE.type == "cuda" else "none"
    day = time.strftime("%Y-%m-%d")
    return {"gpu": gpu, "torch": torch.__version__, "command": " ".join(sys.argv[1:]), "date": day}


def asked(doc: str | None, program: str, parts: Sequence[str]) -> tuple[list[str], Model]:
    """Return the parts and the model that the command line names, and print what the figures depend on."""
    parser = command(doc)
    parser.add_argument("--only", type=several(str, parts), default=[*parts], help="parts, with commas (default: all)")
    parser.add_argument("--model", choices=[*MODELS], default="8b", help="whose shapes")
    options = parser.parse_args()
    if DEVICE.type != "cuda" and options.model != "tiny":
        sys.exit(f"lab.benchmarks.{program}: no GPU: torch sees none here")
    print(json.dumps(about()), flush=True)
    return options.only, MODELS[options.model]


def all_tried(parts: Sequence[str], work: Callable[[str], object]) -> bool:
    """Do the work of each part, also after one that fails: time on a GPU is short. Return whether none failed."""
    went_well = True
    for part in parts:
        try:
            work(part)
        except Exception as error:
            went_well = False
            traceback.print_exc()
            left_out(part, f"{type(error).__name__}: {str(error)[:200]}")
    return went_well


def synchronise() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], object]) -> float:
    synchronise()
    began = time.perf_counter()
    work()
    synchronise()
    return time.perf_counter() - began


def seconds(work: Callable[[], object], runs: int = RUNS) -> float:
    for _ in range(3):  # compiled, tuned, warm
        work()
    return median(timed(work) for _ in range(runs))


def replayed(work: Callable[[], object], times: int = 1) -> float:
    """Return the seconds of work that is captured `times` times in one graph, of each."""
    if DEVICE.type != "cuda":
        return seconds(work)
    work()
    synchronise()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    return seconds(graph.replay) / times


def kernels_of(work: Callable[[], object], runs: int = 3) -> dict[str, tuple[float, float]]:
    """Return how long the GPU computed for each kernel in a run of the work, in seconds, and how often, the mean of
    some runs. On a CPU: of each operator of torch."""
    from torch.profiler import ProfilerActivity, profile

    work()
    activity = ProfilerActivity.CUDA if DEVICE.type == "cuda" else ProfilerActivity.CPU
    synchronise()
    with profile(activities=[activity]) as profiled:
        for _ in range(runs):
            work()
        synchronise()
    found = {}
    for event in profiled.key_averages():
        took = event.self_device_time_total if DEVICE.type == "cuda" else event.self_cpu_time_total
        if took:
            found[event.key] = took * 1e-6 / runs, event.count / runs
    return found


def busy(work: Callable[[], object]) -> float:
    """Return the seconds for which the GPU computes in a run of the work."""
    return sum(took for took, _ in kernels_of(work).values())


def left_out(name: str, why: str) -> None:
    print(json.dumps({"name": name, "left_out": why}), flush=True)
