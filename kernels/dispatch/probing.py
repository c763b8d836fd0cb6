"""Try each kernel, and the attention of other libraries, on a few numbers before anything depends on them.

A kernel that does not compile, or is wrong on this device, is replaced by the torch reference, with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alignedserve.architectures.routing import Clamp, Routing, Scores
from alignedserve.core import Sampling
from alignedserve.fallbacks import fell_back
from alignedserve.kernels.common.adapters import AdapterPart, AdapterWeights, LayerAdapter, StepAdapters
from alignedserve.kernels.common.blocked import BlockedWeight
from alignedserve.kernels.common.decoder import Heads, Inner, Norm
from alignedserve.kernels.common.experts import ExpertWeights
from alignedserve.kernels.common.failing import in_a_line
from alignedserve.kernels.common.int8_kv import dequantise_vectors
from alignedserve.kernels.common.placing import StepMemory
from alignedserve.kernels.common.quantised import quantised
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import LongChunks, QuerySpan, Spans, StaticSpans, StepSize
from alignedserve.kernels.dispatch.paged_libraries import PagedLibrary, find, misfit, pages_of, requests_of, unable

_OFF = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}  # far above rounding errors, far below a fault
_SIZE, _BLOCK_SIZE = 32, 16


def working_libraries(
    device: torch.device,
    dtype: torch.dtype,
    block_size: int | None,
    found: tuple[Sequence[PagedLibrary], Sequence[str]] | None = None,
) -> tuple[list[PagedLibrary], list[str]]:
    """Return the libraries that attend to such blocks as the reference does, and why the others are not used."""
    if block_size is None:
        return [], []
    (libraries, lacking), reference, why_not = found or find(), Reference(), list[str]()
    working: list[PagedLibrary] = []
    for library in libraries:
        if (why := unable(library, device) or misfit(library, dtype, block_size)) is not None:
            why_not.append(f"{library.name} is not used: {why}")
            continue
        if (fault := _fault_of_library(library, reference, device, dtype, block_size)) is not None:
            fell_back(f"attention of {library.name}", fault, "the other kernels attend")
            why_not.append(f"{library.name} is not used: {fault}")
            continue
        working.append(library)
        if (limit := library.why_not(True)) is not None:
            why_not.append(f"{library.name} is not used for decodes: {limit}")
    return working, [*why_not, *lacking]


def _fault_of_library(
    library: PagedLibrary, reference: Reference, device: torch.device, dtype: torch.dtype, page: int
) -> str | None:
    """Return why the library is wrong, if it is: on decodes and chunks, with and without a window and NaN."""
    generator = torch.Generator().manual_seed(0)
    kv_heads, head_dim = 2, 64
    lengths = (300, 7, 600, 40, 520)
    made, blocks = list[QuerySpan](), 0
    for queries, tokens in zip((1, 1, 1, 30, 11), lengths, strict=True):
        its = tuple(range(blocks + (-(-tokens // page)), blocks, -1))
        blocks += len(its)
        made.append(QuerySpan(queries, tokens, its))
    spans = Spans(made, page)
    cache = torch.full((2 * (blocks + 1), page, kv_heads * head_dim), torch.nan, dtype=dtype, device=device)
    vectors = cache.view(-1, cache.shape[-1])
    for span in range(len(made)):
        slots = spans.slots(span).to(device)
        for half in (slots, slots + page):
            vectors[half] = torch.randn(len(half), vectors.shape[1], generator=generator).to(device, dtype)
    query = torch.randn(spans.num_rows, 2 * kv_heads, head_dim, generator=generator).to(device, dtype)
    try:
        captured = requests_of(_static(spans, made, device), device, decodes=False)
        for window in (None, 100):
            expected = reference.attend(query, cache, spans, Scoring(0.1, window)).float()
            for decodes in (True, False):
                requests = requests_of(spans, device, decodes=decodes)
                if library.why_not(decodes) is not None or requests is None:
                    continue
                assert requests.rows is not None, "there are decodes and chunks"
                own = query.index_select(0, requests.rows)
                got = library.attend(own, *pages_of(cache, head_dim), requests, 0.1, window).float()
                off = [float((got - expected.index_select(0, requests.rows)).abs().max())]
                if not decodes and captured is not None:
                    whole = library.attend(query, *pages_of(cache, head_dim), captured, 0.1, window).float()
                    off.append(float((whole - expected).index_select(0, requests.rows).abs().max()))
                if not all(of <= _OFF[dtype] for of in off):
                    return f"it is off by {max(off):.2g}"
    except Exception as error:
        return in_a_line(error)
    return None


def _static(spans: Spans, lies: Sequence[QuerySpan], device: torch.device) -> StaticSpans:
    """Return the same requests as in a captured step with room for more chunks, and for longer ones."""
    room = StepSize(spans.num_rows, len(lies), 2 * len(lies), long=LongChunks(1, len(spans.blocks)))
    memory = StepMemory(len(spans.blocks), room.rows, device, room.chunks * len(spans.blocks))
    return StaticSpans(room, lies, spans.block_size, memory)


def broken(kernels: Reference, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Return the broken kernels by name, with the reason."""
    reference = Reference()
    faults = {name: _fault(trial, kernels, reference, device, dtype) for name, trial in _TRIALS.items()}
    return {name: why for name, why in faults.items() if why is not None}


def replace(kernels: Reference, names: Iterable[str]) -> None:
    """Replace these kernels by the reference, in place."""
    for name in names:
        setattr(kernels, name, getattr(Reference(), name))


Trial = Callable[[Reference, Callable[..., Tensor]], Tensor]


def _fault(
    trial: Trial, kernels: Reference, reference: Reference, device: torch.device, dtype: torch.dtype
) -> str | None:
    def run(tried: Reference) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return trial(tried, lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)).float().cpu()

    try:
        off = float((run(kernels) - run(reference)).abs().max())
    except Exception as error:  # compilers, drivers and libraries raise anything: the reference replaces the kernel
        return in_a_line(error)
    return None if off <= _OFF[dtype] else f"it is off by {off:.2g}"


def _spans() -> Spans:
    """Return a decode and a chunk that are long enough for several programs to attend to a tile."""
    return Spans([QuerySpan(1, 150, (2, ~0, *range(4, 12))), QuerySpan(5, 141, (1, 3, *range(12, 19)))], _BLOCK_SIZE)


def _cache(made: Callable[..., Tensor]) -> Tensor:
    return made(2 * 19, _BLOCK_SIZE, _SIZE)


def _attended(kernels: Reference, made: Callable[..., Tensor]) -> Tensor:
    """Return what two layers of a step attend to: the second one finds the counters as the first one leaves them."""
    spans = _spans()
    layers = [(made(6, 4, _SIZE // 2), _cache(made)) for _ in range(2)]
    return torch.cat([kernels.attend(query, cache, spans, Scoring(0.2)) for query, cache in layers])


def _in_place(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    change(x)
    return x


def _turned(kernels: Reference, made: Callable[..., Tensor]) -> Tensor:
    """Return queries that are normed and rotated, beside the cache with K and V, in numbers and in int8."""
    # Small norms: near 8 one rounding of bf16 is 0.06, and a right kernel may be off by three.
    out, norms = list[Tensor](), (made(_SIZE // 2) / 4, made(_SIZE // 2) / 4)
    for cache in (_cache(made), torch.zeros(2 * 19, _BLOCK_SIZE, _SIZE + 4, dtype=torch.int8, device=norms[0].device)):
        angles = made(6, 5).float(), made(6, 5).float()
        query = kernels.rotate_and_write(cache, _spans(), made(6, 4 * _SIZE), Heads(4, 2, _SIZE // 2, *norms), angles)
        kept = cache if cache.dtype is query.dtype else dequantise_vectors(cache.flatten(0, 1), _SIZE // 2)
        out += [query.flatten(), kept.to(query.dtype).flatten()]
    return torch.cat(out)


def _attended_new(kernels: Reference, made: Callable[..., Tensor]) -> Tensor:
    """Return what decodes attend to that are rotated and written, by one kernel or by two, beside the cache; some are
    cut, and two layers find the same counters."""
    spans = Spans([QuerySpan(1, 150, (2, ~0, *range(4, 12))), QuerySpan(1, 141, (1, 3, *range(12, 19)))], _BLOCK_SIZE)
    out = list[Tensor]()
    for norms in ((made(_SIZE // 2), made(_SIZE // 2)), (None, None)):
        cache, qkv, angles = _cache(made), made(2, 4 * _SIZE), (made(2, 5).float(), made(2, 5).float())
        of = cache, spans, qkv, Heads(4, 2, _SIZE // 2, *norms), angles
        attended = kernels.attend_new(*of, Scoring(0.2))
        if attended is None:
            attended = kernels.attend(kernels.rotate_and_write(*of), cache, spans, Scoring(0.2))
        out += [attended.flatten(), cache.flatten()]
    return torch.cat(out)


def _gathered(kernels: Reference, made: Callable[..., Tensor]) -> Tensor:
    out = torch.empty(1, 2, 3, _SIZE, dtype=made(1).dtype)
    kernels.gather(_cache(made)[None], torch.tensor([3, 40, 70]), out)
    return out


def _levels(kernels: Reference, made: Callable[..., Tensor]) -> Tensor:
    rows = made(2, 5, _SIZE)
    q = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    least, step = torch.empty((2, 2, _SIZE), dtype=torch.float32, device=rows.device)
    kernels.quantise(rows, q, least, step)
    mean: Tensor = least + q.float().mean(1) * step
    return mean


def _allowed(kernels: Reference, made: Callable[..., Tensor]) -> Tensor:
    """Return whether each token may come where two of three rows have a mask."""
    logits, masks = made(3, 1001).float(), torch.arange(2 * 1001).view(2, 1001) % 3 == 0
    kernels.allow(logits, [2, 0], [*masks])
    return logits.isfinite()


def _sampled(kernels: Reference, made: Callable[..., Tensor]) -> Tensor:
    """Return tokens that are drawn in each way."""
    logits = 3 * made(len(_DRAWN), 1000).float()
    return kernels.draw(logits, _DRAWN, [0.1 + 0.2 * number for number in range(len(_DRAWN))])


def _logprobs(kernels: Reference, made: Callable[..., Tensor]) -> Tensor:
    logits = made(3, 300).float()
    told = kernels.logprobs(logits, torch.tensor([5, 0, 299], device=logits.device), [4, 4, 4])
    return torch.cat([told.of_token[:, None], told.tokens, told.values, told.counts[:, None]], dim=1)


def _multiplied(kernels: Reference, made: Callable[..., Tensor]) -> Tensor:
    """Return products with weights of 4 bits in groups, and of 8 bits for rows that are whole numbers exactly."""
    x = (made(5, 160) * 40).round().clamp(-126, 126) / 64
    x[:, 0] = 127 / 64
    out = list[Tensor]()
    for bits, group in ((4, 32), (8, 160)):
        weight = BlockedWeight.from_weight(quantised(made(70, 160) / 16, bits, group))
        out.append(torch.empty((5, 70), dtype=torch.float32, device=x.device))
        kernels.multiply(x, weight, made(70), out[-1])
    return torch.cat(out)


def _few_rows(kernels: Reference, made: Callable[..., Tensor]) -> Tensor:
    """Return products of one row and of several, normed, gated and added."""
    out = list[Tensor]()
    for rows in (1, 5):
        norm, x = Norm(made(160), None, 1e-5, centred=False), made(rows, 160)
        out.append(kernels.few_rows(x, made(70, 160) / 16, made(70), norm))
        out.append(kernels.few_rows(x, made(140, 160) / 16, None, inner=Inner.SILU))
        out.append(kernels.few_rows(x, made(70, 160) / 16, None, out=made(rows, 70)))
    return torch.cat([each.flatten() for each in out])


def _added_and_normed(kernels: Reference, made: Callable[..., Tensor]) -> Tensor:
    """Add parts to rows and norm them, by both kinds of norm and once with a norm of the parts; return both."""
    out = list[Tensor]()
    for centred, is_normed in ((False, False), (False, True), (True, False)):
        norm, after = (Norm(made(_SIZE), made(_SIZE) if centred else None, 1e-5, centred) for _ in range(2))
        x = made(3, _SIZE)
        out += x, kernels.add_and_norm(x, made(3, _SIZE), norm, after if is_normed else None)
    return torch.cat(out)


def _adapted(kernels: Reference, made: Callable[..., Tensor]) -> Tensor:
    """Return the outputs of rows with either of two adapters, and with none, for a layer of two parts."""

    def part(outs: int, rank: int, *at: int) -> AdapterPart:
        return AdapterPart.from_matrix(made(outs, rank) / 4, *at)

    first = LayerAdapter(made(12, 70) / 8, (part(40, 4, 0, 0), part(70, 8, 4, 40)))
    second = LayerAdapter(made(20, 70) / 8, (part(70, 20, 0, 40),))
    rows = {AdapterWeights([None, first]): [5, 0, 2], AdapterWeights([None, second]): [3]}
    return _in_place(made(6, 110), lambda out: kernels.adapt(StepAdapters.from_rows(rows), 1, made(6, 70), out))


def _routed(kernels: Reference, made: Callable[..., Tensor]) -> Tensor:
    """Return the share of each expert, by the best of all and by the best of the best groups."""
    out = list[Tensor]()
    for scores, groups, bias in ((Scores.SOFTMAX, 1, None), (Scores.SIGMOID, 4, made(12).float() / 4)):
        routing = Routing(experts=12, chosen=3, scores=scores, groups=groups, chosen_groups=min(2, groups))
        chosen, shares = kernels.route(made(5, 12).float(), routing, bias)
        out.append(torch.zeros(5, 12, device=shares.device).scatter_(1, chosen, shares))
    return torch.cat(out)


def _by_experts(kernels: Reference, made: Callable[..., Tensor]) -> Tensor:
    """Return what the experts of rows make: several of each row and one row alone, with biases and without."""
    out = list[Tensor]()
    for rows, clamp in ((5, None), (1, None), (5, Clamp(limit=1.0, slope=1.5))):
        ups, downs = made(4, 48, _SIZE) / 6, made(4, _SIZE, 24) / 5
        layers = [
            [kernels.linear(each, made(each.shape[0]) if clamp else None) for each in weights]
            for weights in (ups, downs)
        ]
        weights = ExpertWeights(layers[0], layers[1], clamp, 2, clamp is not None)
        x, chosen = made(rows, _SIZE), made(rows, 4).topk(2, dim=1).indices
        out.append(
            _in_place(made(rows, _SIZE), partial(kernels.add_experts, x, weights, chosen, made(rows, 2).float()))
        )
    return torch.cat(out)


def _expanded(kernels: Reference, made: Callable[..., Tensor]) -> Tensor:
    cache = _cache(made)[None]
    levels = made(1, 2, 3, _SIZE).abs().mul(50).clamp(0, 255).to(torch.uint8)
    kernels.expand(cache, _AT, levels, made(1, 2, _SIZE).float(), made(1, 2, _SIZE).float().abs() / 100)
    return cache


_DRAWN = (
    Sampling(),
    Sampling(0.7),
    Sampling(0.9, top_k=20),
    Sampling(1.2, top_p=0.8, min_p=0.01),
    Sampling(0.5, top_k=50, top_p=0.9),
)
_AT = torch.tensor([3, 40, 70])
_TRIALS: dict[str, Trial] = {
    "write": lambda kernels, made: _in_place(
        _cache(made), lambda cache: kernels.write(cache, _spans(), made(6, _SIZE), made(6, _SIZE))
    ),
    "rotate_and_write": _turned,
    "attend": _attended,
    "attend_new": _attended_new,
    "attend_latent": lambda kernels, made: kernels.attend_latent(
        made(6, 4, 2 * _SIZE), _cache(made), _spans(), 0.2, _SIZE + 20
    ),
    "rms_norm": lambda kernels, made: kernels.rms_norm(made(3, _SIZE), made(_SIZE), 1e-5),
    "layer_norm": lambda kernels, made: kernels.layer_norm(made(3, _SIZE), made(_SIZE), made(_SIZE), 1e-5),
    "add_and_norm": _added_and_normed,
    "rotate": lambda kernels, made: _in_place(
        made(3, 2, _SIZE), lambda x: kernels.rotate(x, made(3, 8).float(), made(3, 8).float())
    ),
    "silu_mul": lambda kernels, made: kernels.silu_mul(made(3, 2 * _SIZE)),
    "gelu_mul": lambda kernels, made: kernels.gelu_mul(made(3, 2 * _SIZE)),
    "multiply": _multiplied,
    "few_rows": _few_rows,
    "route": _routed,
    "add_experts": _by_experts,
    "adapt": _adapted,
    "gather": _gathered,
    "scatter": lambda kernels, made: _in_place(
        _cache(made)[None], lambda cache: kernels.scatter(cache, _AT, made(1, 2, 3, _SIZE))
    ),
    "allow": _allowed,
    "draw": _sampled,
    "logprobs": _logprobs,
    "quantise": _levels,
    "expand": _expanded,
}
KERNELS = _TRIALS.keys()
