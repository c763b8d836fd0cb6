"""Decode steps of some batch sizes, captured once each and then replayed: the host launches one graph, not hundreds of
kernels.

A captured step reads and writes the same memory each time. So there is one graph for each of some batch sizes, with its
own buffers for tokens, positions and tables; a step of another size runs in the next larger graph. The rows left over
are padding, each a request of one token: K and V go to the scratch block, which belongs to no request, and nothing
reads the logits. All graphs put their logits in one buffer and find their blocks in one table; nothing
else of a graph outlives its replay, so all of them share the memory in which they compute.

The table has a place for each block of each request, so that requests which share a beginning fit too: 2 MB for 256
requests of 2,048 blocks. A step that has more blocks than there are places runs kernel by kernel.

    step of 5 decodes ─▶ size 8:   r r r r r p p p ──▶ logits of the first five
                                   └ own slots ┘ └ scratch

Which pieces of attention run side by side differs from step to step: a graph has the largest possible number of pieces,
and those that a step does not need do nothing (kernels/triton/pieces.py).

`capture` is the device's own way to capture; in tests, anything does that runs the same function again on the same
buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from alignedserve.engine.device.devices import out_of_memory
from alignedserve.engine.inputs import Inputs
from alignedserve.fallbacks import fell_back
from alignedserve.kernels.common.spans import BlockRoom, Lie, StaticSpans

log = logging.getLogger("alignedserve.engine")

_FIRST = (1, 2, 4)
_EACH, _UP_TO, _THEN_EACH = 8, 256, 16  # distance between sizes from 8 on, and beyond 256
_MOST_PLACES = 1 << 22  # of blocks: 32 MB, for 67 million tokens with 16 in each
_MIB = 1 << 20

CAPTURED, STEP_BY_STEP = "captured decode steps", "the host launches each kernel of a step"  # what falls back to what
SHARING = "captured steps of many blocks"

Step: TypeAlias = Callable[[], Tensor]  # from its buffers to logits, [size, vocabulary]
Capture: TypeAlias = Callable[[Step], Step]  # captures a step and returns the function that replays it
Forward: TypeAlias = Callable[[Tensor, StaticSpans], Tensor]  # from tokens and their spans to logits


def sizes(most: int) -> list[int]:
    """Return the batch sizes of the steps that are captured; the last size is `most`."""
    usual = [*_FIRST, *range(_EACH, _UP_TO, _EACH), *range(_UP_TO, most, _THEN_EACH)]
    return [size for size in usual if size < most] + [most]


def places_for(most: int, longest: int, num_blocks: int) -> int:
    """Return the places for the blocks of up to `most` requests of up to `longest` blocks, on a device with
    `num_blocks`.

    There are enough for any step, unless that takes too much memory: then at least for any step without shared blocks.
    """
    return max(num_blocks, min(most * min(longest, num_blocks), _MOST_PLACES))


@dataclass(frozen=True)
class _Graph:
    spans: StaticSpans
    tokens: Tensor
    replay: Step


class DecodeGraphs:
    """The captured decode steps of an engine, by batch size."""

    def __init__(
        self,
        most: int,
        vocabulary: int,
        forward: Forward,
        capture: Capture,
        block_size: int,
        places: int,
        scratch: int,
        device: torch.device,
    ) -> None:
        """Prepare graphs for steps of up to `most` decodes, with a place for each block of each of them; `scratch` is a
        block of no request.

        `vocabulary` is the number of logits of a token.
        """
        self._sizes, self._forward, self._capture = sizes(most), forward, capture
        self._logits = torch.empty((most, vocabulary), device=device)
        self._block_size, self._device = block_size, device
        self._room = BlockRoom(places + most, device)  # each padding row has a block too
        self._padding = Lie(1, 1, (scratch,))
        self._graphs: dict[int, _Graph] = {}

    @property
    def captured(self) -> list[int]:
        """Return the sizes that are captured."""
        return sorted(self._graphs)

    def capture_all(self, free: Callable[[], int], least: int, advance: Callable[[], object] = lambda: None) -> None:
        """Capture all sizes, as long as `least` bytes stay free: the largest first, since the others reuse its memory.
        `advance` is called after each.

        A size that is not captured runs kernel by kernel. A size for which memory is too small is left out, and the
        smaller ones are tried: they may need less.
        """
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
            advance()
        if self._graphs:
            log.info(
                "decode steps of up to %d requests are captured, in %d sizes", max(self._graphs), len(self._graphs)
            )

    def logits(self, lies: Sequence[Lie], inputs: Inputs) -> Tensor | None:
        """Return the logits of a step of these decodes, valid until the next call.

        None if the size is not captured, or if the decodes have more blocks than there are places for.
        """
        graph = self._graphs.get(self._size_for(len(lies)))
        if graph is None:
            return None
        padding = len(graph.spans) - len(lies)
        entries = padding + sum(-(-lie.tokens // self._block_size) for lie in lies)
        if entries > len(self._room):
            fell_back(SHARING, f"captured steps have room for {len(self._room)} blocks", STEP_BY_STEP)
            return None
        graph.spans.place([*lies, *[self._padding] * padding])
        inputs.put(graph.tokens[: len(lies)])
        return graph.replay()[: len(lies)]

    def _size_for(self, count: int) -> int:
        return next((size for size in self._sizes if size >= count), 0)

    def _captured(self, size: int) -> _Graph:
        spans = StaticSpans(size, self._block_size, self._room)
        spans.place([self._padding] * size)
        tokens = torch.zeros(size, dtype=torch.long, device=self._device)
        logits = self._logits[:size]
        return _Graph(spans, tokens, self._capture(lambda: logits.copy_(self._forward(tokens, spans))))


def _out_of_memory(error: BaseException | None) -> str | None:
    """Return why memory was too small, from the first error of a chain: a capture may fail once more while it ends."""
    why = None
    while error is not None:
        why, error = out_of_memory(error) or why, error.__context__
    return why


class CudaCapture:
    """Captures CUDA graphs in memory that they share: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool, self._stream = device, torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __call__(self, step: Step) -> Step:
        self._warm_up(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # other threads may copy
            logits = step()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    def _warm_up(self, step: Step) -> None:
        """Run the step before its capture: work that is done once, such as compiling kernels, is not for a graph."""
        now = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                step()
        now.wait_stream(self._stream)
