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

from alignedserve.errors import NotCaptured
from alignedserve.fallbacks import fell_back
from alignedserve.kernels.common.decoder import Angles, Heads
from alignedserve.kernels.common.failing import fault_of_kernel
from alignedserve.kernels.common.scoring import Scoring
from alignedserve.kernels.common.spans import Spans, StaticSpans
from alignedserve.kernels.dispatch.paged_libraries import PagedLibrary, PagedRequests, fits, pages_of, requests_of
from alignedserve.kernels.dispatch.tuning import Seconds, seconds_on_gpu
from alignedserve.kernels.triton.kernels import TritonKernels

log = logging.getLogger("alignedserve.kernels")

_TURNS = 3
# Another library may attend for chunks if one of their requests has at least this many tokens, in captured steps and in
# others. For shorter requests both take the GPU equally long, and the host takes longer to call the library.
LONG_CHUNK = 1_024
_OURS = "Triton"


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
    """The Triton kernels, with other libraries for attention.

    Which is the fastest for captured steps, StepGraphs measures: whole steps, replayed."""

    def __init__(
        self, libraries: Sequence[PagedLibrary], fastest: Fastest | None = None, long_chunk: int = LONG_CHUNK
    ) -> None:
        self.name = f"{TritonKernels.name}, for attention also {' and '.join(library.name for library in libraries)}"
        self._libraries, self._fastest = list(libraries), fastest or Fastest()
        self._long_chunk = long_chunk

    @property
    def long_chunk(self) -> int:
        return self._long_chunk if self._libraries else 0

    def attend_new(
        self, cache: Tensor, spans: Spans, qkv: Tensor, heads: Heads, angles: Angles | None, scoring: Scoring
    ) -> Tensor | None:
        """Return None where another library may attend to decodes."""
        if not isinstance(spans, StaticSpans) and any(library.why_not(True) is None for library in self._libraries):
            return None
        return super().attend_new(cache, spans, qkv, heads, angles, scoring)

    def _attend_some(
        self, query: Tensor, cache: Tensor, spans: Spans, out: Tensor, scoring: Scoring, decodes: bool
    ) -> Tensor:
        ours = partial(super()._attend_some, query, cache, spans, out, scoring, decodes)
        able = list[PagedLibrary]()
        if scoring.is_usual and (not isinstance(spans, StaticSpans) or (spans.size.long is not None and not decodes)):
            fit = [library for library in self._libraries if fits(library, query, cache, spans)]
            able = [library for library in fit if library.why_not(decodes) is None]
        requests = requests_of(spans, cache.device, decodes=decodes) if able else None
        if requests is None or (not decodes and requests.most_tokens < self._long_chunk):
            return ours()
        kind = (decodes, query.shape[1:], cache.shape[-1], scoring.window)
        key = spans.kept(kind, partial(_key, requests, decodes, query, cache, scoring))
        while True:
            ways: dict[str, Callable[[], Tensor]] = {
                library.name: partial(_attended_by, library, query, cache, requests, out, scoring) for library in able
            }
            try:
                if isinstance(spans, StaticSpans):
                    return next(iter(ways.values()))()
                ways = {_OURS: ours, **ways}
                return ways[self._fastest.find(key, ways)]()
            except _Failed as failed:
                fell_back(f"attention of {failed.library.name}", str(failed), "the other kernels attend")
                able.remove(failed.library)
                self._libraries.remove(failed.library)
                if isinstance(spans, StaticSpans):  # what was captured until here can no more be used
                    raise NotCaptured(f"attention of {failed.library.name} failed: {failed}") from failed


def _key(requests: PagedRequests, decodes: bool, query: Tensor, cache: Tensor, scoring: Scoring) -> str:
    """Return a key for requests and heads that are likely to take about as long."""
    count, longest = (1 << (number - 1).bit_length() for number in (len(requests.tokens), requests.most_tokens))
    what = f"{'decodes' if decodes else 'chunks'} of up to {count} requests of up to {longest} tokens"
    heads, head_dim = query.shape[1:]
    window = "" if scoring.window is None else f", window {scoring.window}"
    return f"{what}, {heads} heads of {head_dim}, {cache.shape[-1] // head_dim} of K{window}"


def _attended_by(
    library: PagedLibrary, query: Tensor, cache: Tensor, requests: PagedRequests, out: Tensor, scoring: Scoring
) -> Tensor:
    k, v = pages_of(cache, query.shape[-1])
    of_theirs = query if requests.rows is None else query.index_select(0, requests.rows)
    try:
        attended = library.attend(of_theirs, k, v, requests, scoring.scale, scoring.window)
    except Exception as error:  # another version may raise anything, also for arguments that it does not know
        raise _Failed(library, fault_of_kernel(error, cache.device)) from error
    return attended.contiguous() if requests.rows is None else out.index_copy_(0, requests.rows, attended)
