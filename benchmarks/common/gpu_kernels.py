"""Single kernels on a GPU: sampling, int8 pages, and what attention makes of lengths that differ."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from alignedserve.core import Sampling
from alignedserve.engine.copying.int8_pages import Int8Pages
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.spans import Lie, Spans, slots_of
from alignedserve.kernels.dispatch.dispatcher import Kernels, choose
from alignedserve.kernels.dispatch.paged_attention import Fastest, PagedKernels
from alignedserve.kernels.dispatch.paged_libraries import PAGE as PAGE_OF_LIBRARIES
from alignedserve.kernels.dispatch.probing import working_libraries
from benchmarks.common.gpu_shapes import BLOCK_SIZE, PAGE, Model, left_out, seconds
from benchmarks.report import report

SAMPLINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(0.8),
    "top_k_50": Sampling(0.8, top_k=50),
    "top_p_0.95": Sampling(0.8, top_p=0.95),
    "top_k_50_top_p_0.95": Sampling(0.8, top_k=50, top_p=0.95),
}


class KernelBench:
    def __init__(self, model: Model) -> None:
        self.model, self.device = model, torch.device("cuda", 0)

    def sampling(self) -> None:
        """Time sampling for 64 requests against torch on the same GPU, which waits for the GPU more than once."""
        rows, columns = 64, self.model.vocabulary
        generator = torch.Generator(self.device).manual_seed(0)
        logits = 3 * torch.randn(rows, columns, device=self.device, generator=generator)
        own, chance = choose(self.device, torch.bfloat16).kernels, random.Random(0)
        numbers = [chance.random() for _ in range(rows)]
        for name, wish in SAMPLINGS.items():
            took, with_torch = (
                seconds(partial(_drawn, kernels, logits, [wish] * rows, numbers)) for kernels in (own, Reference())
            )
            report(f"draw_{name}_{columns}", took * 1e6, "us", baseline=with_torch * 1e6)
        tokens = torch.zeros(rows, dtype=torch.long, device=self.device)
        took, with_torch = (
            seconds(partial(kernels.logprobs, logits, tokens, [5] * rows)) for kernels in (own, Reference())
        )
        report(f"logprobs_5_{columns}", took * 1e6, "us", baseline=with_torch * 1e6)

    def int8(self) -> None:
        """Time a page to int8 and back into its blocks, both on the GPU, against the same page as it is."""
        shape, dtype = (2 * self.model.layers, PAGE, self.model.kv_dim), torch.bfloat16
        kernels = choose(self.device, dtype).kernels
        pages = Int8Pages(*shape, dtype, kernels, self.device)
        page = torch.randn(shape, dtype=dtype).pin_memory()
        pinned: Any = torch.empty(pages.layout.size, dtype=torch.uint8).pin_memory().numpy()
        payload = memoryview(pinned)
        slots = slots_of(torch.arange(PAGE // BLOCK_SIZE), torch.zeros(PAGE // BLOCK_SIZE).bool(), BLOCK_SIZE)
        blocks = (self.model.layers, 2 * PAGE // BLOCK_SIZE, BLOCK_SIZE, shape[2])
        cache = torch.empty(blocks, dtype=dtype, device=self.device)
        as_it_is = page.view(self.model.layers, 2, PAGE, shape[2])
        plain = seconds(lambda: kernels.scatter(cache, slots, as_it_is))
        compressed = seconds(lambda: pages.compress(page, payload))
        expanded = seconds(lambda: pages.expand(payload, cache, slots))
        report(f"page_in_int8_{self.model.name}", expanded * 1e6, "us", baseline=plain * 1e6)
        report(f"page_to_int8_{self.model.name}", compressed * 1e6, "us", baseline=plain * 1e6)

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
        return seconds(lambda: kernels.attend(query, cache, spans, head_dim**-0.5))


def _drawn(
    kernels: Kernels, logits: torch.Tensor, wishes: Sequence[Sampling], numbers: Sequence[float]
) -> torch.Tensor:
    return kernels.draw(logits.clone(), wishes, numbers)


class Fixed(Fastest):
    """A choice that is always the same library, whatever is faster."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def find(self, key: Hashable, ways: Mapping[str, Callable[[], object]]) -> str:
        return self._name
