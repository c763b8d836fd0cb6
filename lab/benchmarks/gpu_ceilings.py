"""Measure what a GPU can do, and how near attention comes to it; no engine is loaded.

    python -m lab.benchmarks.gpu_ceilings                       # all parts, at an 8B's shapes
    python -m lab.benchmarks.gpu_ceilings --only attention
    python -m lab.benchmarks.gpu_ceilings --model tiny          # tried on a CPU

`ceilings` are copies, products, each layer of the model at some numbers of rows, read from memory each time, and what a
launch costs; products of few rows also by our kernel (`own`), with what is beside them. `draws` are tokens drawn from
logits, masks of grammars, and the head's logits in fp32 by one product. `attention` compares ours, over blocks of 16
tokens, with FlashAttention 3 on the same blocks where it is installed, and prompts with torch's own; and decodes that
are rotated and written by the same kernel (`written`) with what two kernels take. `alignment` has few long requests
among short.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F

from alignedserve.core import Sampling
from alignedserve.kernels.common.decoder import Heads, Inner, Norm
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import QuerySpan, Spans
from alignedserve.kernels.dispatch.dispatcher import Kernels, choose
from alignedserve.kernels.dispatch.paged_attention import Fastest, PagedKernels
from alignedserve.kernels.dispatch.paged_libraries import PAGE as PAGE_OF_LIBRARIES
from alignedserve.kernels.dispatch.probing import working_libraries
from alignedserve.lab.benchmarks.common.gpu_shapes import (
    BLOCK_SIZE,
    DEVICE,
    all_tried,
    asked,
    busy,
    kv_dim,
    left_out,
    replayed,
    seconds,
)
from alignedserve.lab.benchmarks.common.report import report
from alignedserve.lab.devices.devices import Model

PARTS = ("ceilings", "draws", "attention", "alignment")
ROWS = (1, 2, 4, 8, 32, 64, 128, 256)
_MOST_FEW = 8  # rows of products by a kernel of our own
LAUNCHES = 299  # kernels in a captured step of the 8B, by cuBLAS
DRAWN = {"greedy": Sampling(), "plain": Sampling(0.8), "top_p": Sampling(0.8, top_p=0.95), "top_k": Sampling(0.8, 50)}
DECODES, CHUNKS = ((1, 1000), (32, 1000), (128, 1000), (16, 8000)), (2048, 8192)
IS_DRY = DEVICE.type != "cuda"


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def ceilings(model: Model) -> None:
    size = 1 << (24 if IS_DRY else 30)
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    out, numbers = torch.empty_like(source), source.view(torch.int32)
    copied = 2 * size / seconds(lambda: out.copy_(source))
    report("memory_bandwidth", copied / 1e9, "GB/s")
    report("reading", size / seconds(lambda: numbers.sum(dtype=torch.int32)) / 1e9, "GB/s")
    edge = 512 if IS_DRY else 8192
    a, b = randn(edge, edge), randn(edge, edge)
    report("products", 2 * edge**3 / seconds(lambda: a @ b) / 1e12, "TFLOP/s")
    one = torch.zeros(1, device=DEVICE)
    report("kernel_in_a_graph", replayed(lambda: one.add_(1), LAUNCHES) * 1e6, "us")
    report("launch_by_the_host", seconds(lambda: [one.add_(1) for _ in range(100)]) * 1e4, "us")
    kernels = choose(DEVICE, torch.bfloat16).kernels
    for name, outputs, inputs in _layers(model):
        weights = [randn(outputs, inputs) for _ in range(3)]  # together more than the second-level cache
        for rows in ROWS:
            x, y = randn(rows, inputs), randn(rows, outputs)

            def run(x: torch.Tensor = x, y: torch.Tensor = y, weights: list[torch.Tensor] = weights) -> None:
                for weight in weights:
                    torch.mm(x, weight.t(), out=y)

            took = replayed(run) / len(weights)
            moved = 2 * (outputs * inputs + rows * (outputs + inputs))
            report(f"layer_{name}_rows_{rows}", took * 1e6, "us", baseline=moved / copied * 1e6)
            if name != "head" and rows <= _MOST_FEW:
                own = replayed(partial(_few_rows, kernels, name, x, y, weights)) / len(weights)
                report(f"layer_{name}_rows_{rows}_own", own * 1e6, "us", baseline=took * 1e6)
                report(f"layer_{name}_rows_{rows}_own_bandwidth", moved / own / 1e9, "GB/s")


def _few_rows(kernels: Kernels, name: str, x: torch.Tensor, y: torch.Tensor, weights: list[torch.Tensor]) -> None:
    """Compute products as a layer's decoder does, with what is beside them."""
    norm = Norm(weights[0][0, : x.shape[1]], None, 1e-5, centred=False) if len(x) == 1 else None
    for weight in weights:
        if name in ("out", "down"):
            kernels.few_rows(x, weight, None, out=y)
        else:
            kernels.few_rows(x, weight, None, norm, Inner.SILU if name == "gate_up" else None)


def _layers(model: Model) -> Iterator[tuple[str, int, int]]:
    queries = model.heads * model.head_dim
    yield "qkv", queries + 2 * kv_dim(model), model.hidden_size
    yield "out", model.hidden_size, queries
    yield "gate_up", 2 * model.ffn_size, model.hidden_size
    yield "down", model.hidden_size, model.ffn_size
    yield "head", model.vocabulary, model.hidden_size


def draws(model: Model) -> None:
    """Time the kernels alone, masks with what the host does, for logits as a model has them and for flat ones."""
    kernels, words = choose(DEVICE, torch.bfloat16).kernels, model.vocabulary
    for rows in (1, 64, 256):
        numbers, flat = [(row + 0.5) / rows for row in range(rows)], randn(rows, words).float()
        for spread, name in ((3.0, ""), (0.5, "_flat")):
            logits = flat * spread
            for kind, sampling in DRAWN.items():
                took = busy(partial(kernels.draw, logits, [sampling] * rows, numbers))
                report(f"draw_{kind}{name}_rows_{rows}", took * 1e6, "us")
        masks = [torch.rand(words) < 0.5 for _ in range(rows)]
        report(f"masks_rows_{rows}", seconds(partial(kernels.allow, flat, range(rows), masks)) * 1e6, "us")
    weight = randn(words, model.hidden_size).t()
    for x in () if IS_DRY else (randn(rows, model.hidden_size) for rows in ROWS):  # torch has it on GPUs alone
        took = replayed(partial(torch.mm, x, weight, out_dtype=torch.float32))
        in_two = replayed(lambda x=x: torch.mm(x, weight).float())
        report(f"head_in_fp32_rows_{len(x)}", took * 1e6, "us", baseline=in_two * 1e6)


# --- Attention


def attention(model: Model) -> None:
    kernels, scale = choose(DEVICE, torch.bfloat16).kernels, model.head_dim**-0.5
    flash = _flash_attention_3()
    for batch, length in DECODES:
        name, work = f"attend_{batch}x{length}", Attending(model, [length] * batch, BLOCK_SIZE)
        took = busy(partial(work.by, kernels))
        report(name, took * 1e6, "us")
        report(f"{name}_bandwidth", work.cache.nbytes / took / 1e9, "GB/s")
        two, one = (replayed(partial(work.written_by, kernels, in_one)) for in_one in (False, True))
        report(f"{name}_written", one * 1e6, "us", baseline=two * 1e6)
        if flash is not None:
            theirs = busy(partial(work.by_flash, flash))
            report(f"{name}_flash_attn_3", theirs * 1e6, "us", baseline=took * 1e6)
            off = (work.by(kernels).float() - work.by_flash(flash).view(work.query.shape).float()).abs().max()
            report(f"{name}_flash_attn_3_off", float(off), "1", goal=0.05)
    for tokens in CHUNKS:
        work = Attending(model, [tokens], BLOCK_SIZE, queries=tokens)
        took = busy(partial(work.by, kernels))
        flops = 2 * tokens**2 * model.heads * model.head_dim
        report(f"attend_prompt_{tokens}", flops / took / 1e12, "TFLOP/s")
        q, k, v = (randn(1, heads, tokens, model.head_dim) for heads in (model.heads, model.kv_heads, model.kv_heads))
        theirs = busy(partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, scale=scale, enable_gqa=True))
        report(f"attend_prompt_{tokens}_torch", flops / theirs / 1e12, "TFLOP/s")
        if flash is not None:
            theirs = busy(partial(work.by_flash, flash))
            report(f"attend_prompt_{tokens}_flash_attn_3", flops / theirs / 1e12, "TFLOP/s")


def _flash_attention_3() -> Callable[..., torch.Tensor] | None:
    if IS_DRY:
        left_out("flash_attn_3", "it needs a GPU")
        return None
    try:
        found: Callable[..., torch.Tensor] = import_module("flash_attn_interface").flash_attn_with_kvcache
    except ImportError as error:
        left_out("flash_attn_3", f"it is not installed: {error}")
        return None
    return found


class Attending:
    """Attention of one layer for requests of these lengths, with `queries` each, in blocks at random places."""

    def __init__(self, model: Model, lengths: Sequence[int], block_size: int, queries: int = 1) -> None:
        self.lengths, self.queries, self.scoring = lengths, queries, Scoring(model.head_dim**-0.5)
        counts = [-(-length // block_size) for length in lengths]
        blocks = random.Random(0).sample(range(sum(counts)), sum(counts))
        self.tables = [tuple(blocks.pop() for _ in range(count)) for count in counts]
        lies = [QuerySpan(queries, length, own) for length, own in zip(lengths, self.tables, strict=True)]
        self.cache = randn(2 * sum(counts), block_size, kv_dim(model))
        self.heads = Heads(model.heads, model.kv_heads, model.head_dim)
        self.qkv = randn(queries * len(lengths), (model.heads + 2 * model.kv_heads) * model.head_dim)
        self.query = self.qkv[:, : model.heads * model.head_dim].unflatten(1, (-1, model.head_dim)).contiguous()
        drawn = torch.randn(len(self.qkv), model.head_dim // 2, device=DEVICE)
        self.angles = drawn.cos(), drawn.sin()
        self.spans = Spans(lies, block_size)

    def by(self, kernels: Kernels) -> torch.Tensor:
        return kernels.attend(self.query, self.cache, self.spans, self.scoring)

    def written_by(self, kernels: Kernels, in_one: bool) -> torch.Tensor:
        """Rotate and write the new tokens, too."""
        of = self.cache, self.spans, self.qkv, self.heads, self.angles
        attended = kernels.attend_new(*of, self.scoring) if in_one else None
        if attended is None:
            return kernels.attend(kernels.rotate_and_write(*of), self.cache, self.spans, self.scoring)
        return attended

    def by_flash(self, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Attend with FlashAttention 3; requests are equally long."""
        kept = self.spans.kept("flash", lambda: torch.tensor(self.tables, dtype=torch.int32, device=DEVICE))
        lengths = self.spans.kept("lengths", lambda: torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE))
        heads = self.query.shape[-1]
        k, v = (self.cache[at::2].unflatten(-1, (-1, heads)) for at in (0, 1))
        query = self.query.view(len(self.lengths), self.queries, -1, heads)
        scale = self.scoring.scale
        return attend(query, k, v, cache_seqlens=lengths, page_table=kept, softmax_scale=scale, causal=True)


def alignment(model: Model) -> None:
    """Time one layer's attention: few long requests among short, against equally many of the mean length. gamma2 is
    that of the cost model (docs/how/steps.md), from these two batches."""
    for long in (4096, 16_384):
        mixed = [32] * 60 + [long] * 4
        even = [sum(mixed) // len(mixed)] * len(mixed)
        bubble = len(mixed) * max(mixed) - sum(mixed)
        for name, kernels, block_size in _attentions():
            aligned, skewed = (
                busy(partial(Attending(model, lengths, block_size).by, kernels)) for lengths in (even, mixed)
            )
            title = f"{model.name}_{long}_{name}"
            report(f"skew_{title}", skewed * 1e6, "us", baseline=aligned * 1e6)
            report(f"gamma2_{title}", (skewed - aligned) / bubble, "s/token")


def _attentions() -> Iterator[tuple[str, Kernels, int]]:
    """Yield kernels with their block size, which libraries choose themselves."""
    yield "ours", choose(DEVICE, torch.bfloat16).kernels, BLOCK_SIZE
    yield "torch", Reference(), BLOCK_SIZE
    working, why_not = working_libraries(DEVICE, torch.bfloat16, PAGE_OF_LIBRARIES)
    for library in working:
        if library.why_not(True) is None:
            yield library.name.replace(" ", "_"), PagedKernels([library], OneLibrary(library.name)), PAGE_OF_LIBRARIES
    for why in why_not:
        left_out("skew", why)


class OneLibrary(Fastest):
    """A choice that is always the same library, whatever is faster."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def find(self, key: Hashable, ways: Mapping[str, Callable[[], object]]) -> str:
        return self._name


MEASURED = {"ceilings": ceilings, "draws": draws, "attention": attention, "alignment": alignment}


def main() -> int:
    parts, model = asked(__doc__, "gpu_ceilings", PARTS)
    return 0 if all_tried(parts, lambda part: MEASURED[part](model)) else 1


if __name__ == "__main__":
    sys.exit(main())
