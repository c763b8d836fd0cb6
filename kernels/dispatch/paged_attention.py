"""Attention by the fastest way: our Triton kernel, or another library where it fits (paged_libraries.py).

The fastest way may differ between decodes and chunks, between head shapes, and between orders of magnitude of length.
Each case is measured when it first occurs, on work that has to be done anyway; the answer is kept while the process
lives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from alignedserve.fallbacks import fell_back
from alignedserve.kernels.common.failing import fault_of_kernel
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Spans, StaticSpans
from alignedserve.kernels.dispatch.paged_libraries import PagedLibrary, PagedRequests, fits, pages_of, requests_of
from alignedserve.kernels.triton.kernels import TritonKernels

log = logging.getLogger("alignedserve.kernels")

_TURNS = 3
# Tokens of the longest chunk's request, below which ours attends: such a step is as long as the host takes to launch
# its kernels, and a call of another library takes the host longer.
LEAST_TOKENS = 1_024
_OURS = "Triton"
Seconds = Callable[[Callable[[], object]], float]


def seconds_on_gpu(work: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def nothing_can_be_timed() -> bool:
    """Return whether a graph is being captured: nothing runs then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Fastest:
    """Remember the fastest of several ways for each key."""

    def __init__(self, seconds: Seconds = seconds_on_gpu, cannot: Callable[[], bool] = nothing_can_be_timed) -> None:
        self._seconds, self._cannot = seconds, cannot
        self._chosen: dict[Hashable, str] = {}

    def find(self, key: Hashable, ways: Mapping[str, Callable[[], object]]) -> str:
        """Return the fastest way for the key; the first one where nothing is known and nothing can be timed."""
        asked = (key, *ways)
        if len(ways) == 1 or (asked not in self._chosen and self._cannot()):
            return next(iter(ways))
        if asked not in self._chosen:
            for work in ways.values():
                work()  # compiled, tuned
            taken = {name: min(self._seconds(work) for _ in range(_TURNS)) for name, work in ways.items()}
            self._chosen[asked] = min(taken, key=lambda name: taken[name])
            log.info("attention, %s: %s", key, ", ".join(f"{name} {took * 1e6:.0f} us" for name, took in taken.items()))
        return self._chosen[asked]


class _Failed(Exception):
    def __init__(self, library: PagedLibrary, why: str) -> None:
        super().__init__(why)
        self.library = library


class PagedKernels(TritonKernels):
    """The Triton kernels, with other libraries for attention."""

    def __init__(
        self, libraries: Sequence[PagedLibrary], fastest: Fastest | None = None, least_tokens: int = LEAST_TOKENS
    ) -> None:
        self.name = f"{TritonKernels.name}, for attention also {' and '.join(library.name for library in libraries)}"
        self._libraries, self._fastest = list(libraries), fastest or Fastest()
        self._least_tokens = least_tokens

    def _attend_some(
        self, query: Tensor, cache: Tensor, spans: Spans, out: Tensor, scoring: Scoring, decodes: bool
    ) -> None:
        ours = partial(super()._attend_some, query, cache, spans, out, scoring, decodes)
        able = list[PagedLibrary]()
        if scoring.is_usual and not isinstance(spans, StaticSpans):  # the libraries cannot read static spans
            fit = [library for library in self._libraries if fits(library, query, cache, spans)]
            able = [library for library in fit if library.why_not(decodes) is None]
        requests = requests_of(spans, cache.device, decodes=decodes) if able else None
        if requests is None or (not decodes and requests.most_tokens < self._least_tokens):
            ours()
            return
        kind = (decodes, query.shape[1:], cache.shape[-1], scoring.window)
        key = spans.kept(kind, partial(_key, requests, decodes, query, cache, scoring))
        while True:
            ways = {_OURS: ours}
            ways |= {
                library.name: partial(_attended_by, library, query, cache, requests, out, scoring) for library in able
            }
            try:
                ways[self._fastest.find(key, ways)]()
                return
            except _Failed as failed:
                fell_back(f"attention of {failed.library.name}", str(failed), "the other kernels attend")
                able.remove(failed.library)
                self._libraries.remove(failed.library)


def _key(requests: PagedRequests, decodes: bool, query: Tensor, cache: Tensor, scoring: Scoring) -> str:
    """Return a key for requests and heads that are likely to take about as long."""
    count, longest = (1 << (number - 1).bit_length() for number in (len(requests.tokens), requests.most_tokens))
    what = f"{'decodes' if decodes else 'chunks'} of up to {count} requests of up to {longest} tokens"
    heads, head_dim = query.shape[1:]
    window = "" if scoring.window is None else f", window {scoring.window}"
    return f"{what}, {heads} heads of {head_dim}, {cache.shape[-1] // head_dim} of K{window}"


def _attended_by(
    library: PagedLibrary, query: Tensor, cache: Tensor, requests: PagedRequests, out: Tensor, scoring: Scoring
) -> None:
    k, v = pages_of(cache, query.shape[-1])
    of_theirs = query if requests.rows is None else query.index_select(0, requests.rows)
    try:
        attended = library.attend(of_theirs, k, v, requests, scoring.scale, scoring.window)
    except Exception as error:  # another version may raise anything, also for arguments that it does not know
        raise _Failed(library, fault_of_kernel(error, cache.device)) from error
    if requests.rows is None:
        out.copy_(attended)
    else:
        out.index_copy_(0, requests.rows, attended)
