"""How long a model takes to load and how much memory at most: `python -m benchmarks.loading`, about a minute.

Two folders of random weights, made for it: 160 M numbers with as many heads for K and V as for queries, 0.5 B with few
and a large vocabulary. Each is loaded by the engine and by transformers, which is the baseline, in processes of their
own and in turn; the fastest of three counts. Memory is the process's peak beyond what it had before. The engine's is
with what a worker does then, measuring and packing its linear layers; the seconds are without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from safetensors.torch import save_file

from benchmarks.report import report

_RUNS = 3
_LOADERS = ("engine", "transformers")
_DTYPES = ("bfloat16", "float32")  # as it is stored, and converted
_SLACK = 0.05  # of the weights, beyond them and their largest tensor


@dataclass(frozen=True)
class Model:
    name: str
    architecture: str
    kind: str  # as transformers calls it
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    qkv_bias: bool

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        kv_dim = self.hidden // self.heads * self.kv_heads
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            for name, rows in (("q", self.hidden), ("k", kv_dim), ("v", kv_dim)):
                yield f"{prefix}.self_attn.{name}_proj.weight", (rows, self.hidden)
                if self.qkv_bias:
                    yield f"{prefix}.self_attn.{name}_proj.bias", (rows,)
            yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, self.hidden)
            yield f"{prefix}.mlp.gate_proj.weight", (self.inner, self.hidden)
            yield f"{prefix}.mlp.up_proj.weight", (self.inner, self.hidden)
            yield f"{prefix}.mlp.down_proj.weight", (self.hidden, self.inner)
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, self.hidden)

    def config(self) -> dict[str, object]:
        return {
            "architectures": [self.architecture],
            "model_type": self.kind,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
        }


MODELS = (
    Model("160 M", "LlamaForCausalLM", "llama", 768, 3072, 12, 12, 12, 32_000, tied=False, qkv_bias=False),
    Model("0.5 B", "Qwen2ForCausalLM", "qwen2", 896, 4864, 24, 14, 2, 151_936, tied=True, qkv_bias=True),
)


def write(model: Model, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config()))
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02) for name, shape in model.shapes()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


# --- In a process of its own


def load(loader: str, folder: Path, dtype: str) -> None:
    """Prints seconds, bytes of the peak beyond what was there before, and bytes of the weights."""
    if loader == "engine":
        from alignedserve.architectures.model_config import read_config
        from alignedserve.engine.models.choice import load_model
        from alignedserve.engine.models.loading import Loader
        from alignedserve.engine.models.tensors import Tensors
        from alignedserve.kernels.common.linear import Linear
        from alignedserve.kernels.dispatch.dispatcher import choose
        from alignedserve.kernels.dispatch.tuning import tune

        target: torch.dtype = getattr(torch, dtype)
        kernels = choose(torch.device("cpu"), target).kernels
        linears: list[Linear] = []

        def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
            linears.append(kernels.linear(weight, bias))
            return linears[-1]

        before, began = _status("VmRSS"), perf_counter()
        with torch.inference_mode():
            model: object = load_model(read_config(folder), Loader(Tensors(folder), target, kernels, make_linear))
            taken = perf_counter() - began
            tune(linears)
    else:
        from transformers import AutoModelForCausalLM

        before, began = _status("VmRSS"), perf_counter()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        taken = perf_counter() - began
    print(json.dumps([taken, _status("VmHWM") - before]))
    del model


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


# --- All of them


def measure(model: Model, folder: Path, dtype: str) -> None:
    size = torch.empty(0, dtype=getattr(torch, dtype)).itemsize
    numbers = [torch.Size(shape).numel() for _, shape in model.shapes()]
    seconds: dict[str, list[float]] = {loader: [] for loader in _LOADERS}
    peaks: dict[str, list[float]] = {loader: [] for loader in _LOADERS}
    for _ in range(_RUNS):
        for loader in _LOADERS:
            command = [sys.executable, "-m", "benchmarks.loading", "--one", loader, str(folder), dtype]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            took, peak = json.loads(done.stdout.splitlines()[-1])
            seconds[loader].append(took)
            peaks[loader].append(peak / (size * sum(numbers)))
    name = f"{model.name} as {dtype}"
    report(f"{name}: load", min(seconds["engine"]), "s", baseline=min(seconds["transformers"]))
    # While a tensor is converted it is there as it is stored, too.
    goal = 1 + _SLACK + 2 * max(numbers) / (size * sum(numbers))
    peak, theirs = min(peaks["engine"]), min(peaks["transformers"])
    report(f"{name}: peak memory over the weights", peak, "share", baseline=theirs, goal=goal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, metavar=("LOADER", "FOLDER", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        loader, folder, dtype = options.one
        load(loader, Path(folder), dtype)
        return
    with TemporaryDirectory() as scratch:
        for number, model in enumerate(MODELS):
            folder = write(model, Path(scratch) / str(number))
            for dtype in _DTYPES:
                measure(model, folder, dtype)


if __name__ == "__main__":
    main()
