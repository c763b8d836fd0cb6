"""Decode steps of some sizes, captured once each and then replayed: the host launches one graph, not hundreds of
kernels.

A captured step reads and writes the same memory each time. So there is one for each of some sizes, with buffers of its
own for tokens, positions and tables; a step of other size runs in the next larger one. The rows that are left over are
padding: each is a request of one token, whose K and V go to the scratch pair, which nobody has, and whose logits nobody
looks at. All put their logits in one buffer, so that nothing else of one outlives its replay, and the memory in which
one computes serves them all.

    step of 5 decodes ─▶ size 8:   r r r r r p p p ──▶ logits of the first five
                                   └ own slots ┘ └ scratch

Which pieces of attention run side by side differs from step to step: there are as many as there ever can be, and those
that a step does not need do nothing (kernels/triton/schedule.py).

`capture` is what the device has for it; anything that runs the same function again, on the same buffers, does for
tests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from alignedserve.engine.device.memory import out_of_memory
from alignedserve.engine.inputs import Inputs
from alignedserve.kernels.common.spans import Lie
from alignedserve.kernels.common.static_spans import StaticSpans

log = logging.getLogger("alignedserve.engine")

_EACH = 8  # sizes from 8 on are so far apart
_FIRST = (1, 2, 4)
_MIB = 1 << 20

Step: TypeAlias = Callable[[], torch.Tensor]  # from its buffers to logits, [size, vocabulary]
Capture: TypeAlias = Callable[[Step], Step]  # what replays it
Forward: TypeAlias = Callable[[torch.Tensor, StaticSpans], torch.Tensor]  # of tokens that lie there


def sizes(most: int) -> list[int]:
    """Of steps that are captured; the last one is `most`."""
    usual = [*_FIRST, *range(_EACH, most, _EACH)]
    return [size for size in usual if size < most] + [most]


@dataclass(frozen=True)
class _Graph:
    spans: StaticSpans
    tokens: torch.Tensor
    replay: Step


class DecodeGraphs:
    def __init__(
        self,
        most: int,
        words: int,
        forward: Forward,
        capture: Capture,
        block_size: int,
        most_pairs: int,
        scratch: int,
        device: torch.device,
    ) -> None:
        """Of steps of up to `most` decodes, which have `most_pairs` together; `scratch` is a pair beside those. `words`
        are those of the vocabulary."""
        self._sizes, self._forward, self._capture = sizes(most), forward, capture
        self._logits = torch.empty((most, words), device=device)
        self._block_size, self._device = block_size, device
        self._most_pairs = most_pairs + most  # a padding row has one too
        self._padding = Lie(1, 1, (scratch,))
        self._graphs: dict[int, _Graph] = {}

    @property
    def captured(self) -> list[int]:
        """Sizes."""
        return sorted(self._graphs)

    def capture_all(self, free: Callable[[], int], least: int) -> None:
        """The largest first, whose memory the others use again; as long as `least` bytes stay free. What is not
        captured runs kernel by kernel, as one for which there is too little memory: a smaller one may have enough."""
        for size in reversed(self._sizes):
            if free() < least:
                log.warning(
                    "decode steps of %d requests and fewer are not captured: less than %d MB are free",
                    *(size, least // _MIB),
                )
                break
            try:
                self._graphs[size] = self._captured(size)
            except (RuntimeError, MemoryError) as error:
                why = _out_of_memory(error)
                if why is None:
                    raise
                log.warning("decode steps of %d requests are not captured: %s", size, why)
        if self._graphs:
            log.info(
                "decode steps of up to %d requests are captured, in %d sizes", max(self._graphs), len(self._graphs)
            )

    def logits(self, lies: Sequence[Lie], inputs: Inputs) -> torch.Tensor | None:
        """Of a step of these decodes; None where none of that size is captured. They hold until the next call."""
        graph = self._graphs.get(self._size_for(len(lies)))
        if graph is None:
            return None
        padding = len(graph.spans) - len(lies)
        graph.spans.place([*lies, *[self._padding] * padding])
        inputs.put(graph.tokens[: len(lies)])
        return graph.replay()[: len(lies)]

    def _size_for(self, count: int) -> int:
        return next((size for size in self._sizes if size >= count), 0)

    def _captured(self, size: int) -> _Graph:
        spans = StaticSpans(size, self._block_size, self._most_pairs, self._device)
        spans.place([self._padding] * size)
        tokens = torch.zeros(size, dtype=torch.long, device=self._device)
        logits = self._logits[:size]
        return _Graph(spans, tokens, self._capture(lambda: logits.copy_(self._forward(tokens, spans))))


def _out_of_memory(error: BaseException | None) -> str | None:
    """A capture that breaks off may fail once more as it ends: what came first counts."""
    why = None
    while error is not None:
        why, error = out_of_memory(error) or why, error.__context__
    return why


class CudaCapture:
    """One graph after the other, in memory that they share: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool, self._stream = device, torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __call__(self, step: Step) -> Step:
        self._warm_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # others may copy meanwhile
            logits = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay

    def _warm_up(self, step: Step) -> None:
        """What is done once is not for a graph: kernels are compiled, libraries set up."""
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                step()
        now.wait_stream(self._stream)
