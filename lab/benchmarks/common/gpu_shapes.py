"""What the benchmarks of a GPU share: their command line, the shapes of models, and how work is timed."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from alignedserve.lab.benchmarks.common.report import command, several
from alignedserve.lab.devices.devices import MODELS as KNOWN
from alignedserve.lab.devices.devices import Model

BLOCK_SIZE, PAGE = 16, 64
RUNS = 20


DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")  # a CPU: of a dry run


_TINY = Model("tiny", 2, 64, heads=4, kv_heads=2, ffn_size=128, vocabulary=2_048, head_dim=16)
MODELS = {
    "7b": replace(KNOWN["llama-2-7b"], name="llama_7b_mha"),
    "8b": replace(KNOWN["llama-3.1-8b"], name="llama_8b_gqa"),
    "moe": replace(KNOWN["qwen3-30b-a3b"], name="qwen3_moe_4_layers", layers=4),
    "moe-fp8": replace(KNOWN["qwen3-30b-a3b"], name="qwen3_moe_4_layers_fp8", layers=4),  # experts in blocks of 128
    "moe-fp8-whole": replace(KNOWN["qwen3-30b-a3b"], name="qwen3_moe_fp8"),  # 31 GB
    "tiny": _TINY,
    "tiny-moe": replace(_TINY, name="tiny_moe", experts=8, chosen=2, expert_size=64),
    "tiny-moe-fp8": replace(_TINY, name="tiny_moe_fp8", experts=8, chosen=2, expert_size=64),
}


def config_of(model: Model) -> dict[str, Any]:
    """Return what a folder of the model has as config.json: a Llama, or a mixture of experts as Qwen3's."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eos_token_id": 2,
    }
    if model.experts:
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": model.experts}
        config |= {"moe_intermediate_size": model.expert_size, "num_experts_per_tok": model.chosen}
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return config


def head_weights(model: Model) -> int:
    return model.vocabulary * model.hidden_size


def num_read(model: Model) -> int:
    """Return how many numbers of the weights a step of one token reads: all but the embedding and other experts."""
    return model.active_weights + head_weights(model)


def step_bytes(model: Model, batch: int, prefix: int, expert_bytes: float = 2) -> float:
    """Return the bytes that a step of decodes reads: of experts those that random choices of its rows hit, with
    `expert_bytes` for a weight, of all else each weight in bf16, and the KV."""
    expert, all_experts = 3 * model.mixtures * model.hidden_size * model.expert_size, model.experts or 1
    hit = all_experts * (1 - (1 - model.chosen / all_experts) ** batch)
    others = num_read(model) - expert * model.chosen
    return 2 * others + expert_bytes * expert * hit + batch * prefix * model.kv_bytes


def kv_dim(model: Model) -> int:
    return model.kv_heads * model.head_dim


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
    if DEVICE.type != "cuda" and not options.model.startswith("tiny"):
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
    is_dry = DEVICE.type != "cuda"
    for _ in range(0 if is_dry else 3):  # compiled, tuned, warm
        work()
    return median(timed(work) for _ in range(1 if is_dry else runs))


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
