"""Steps of some sizes, captured once each and then replayed: the host launches one graph, not hundreds of kernels.

A captured step reads and writes the same memory each time. So there is one graph for each of some sizes, with places of
its own for tokens, positions and tables; a step of another size runs in the next larger graph. Steps of decodes alone
have sizes of their own, and steps with prompts others; the rows left over are padding. K and V of these rows go to the
scratch block, which belongs to no request, and nothing reads the logits. All that a step reads is sent in one copy
(kernels/common/placing.py), but for tokens that only the device has. All graphs put their logits in one buffer, their
tokens in another, where the next step finds them, and find their blocks in one table; nothing else of a graph outlives
its replay, so all of them share the memory in which they compute.

The table has a place for each block of each request, so that requests which share a beginning fit too: 2 MB for 256
requests of 2,048 blocks. A step that has more blocks than there are places runs kernel by kernel.

    step of 5 decodes ───────────▶ size 8:   r r r r r p p p ──▶ logits of the first five
                                             └ own slots ┘ └ scratch: three requests of one token
    and with 8 tokens of a prompt ▶ size 16: r r r r r c c c c c c c c p p p ──▶ logits of the rows that are wanted
                                                                       └ scratch: a chunk of three tokens

A graph draws its tokens by a table (`Sampler.table`). A step whose logits are edited first, or that has to tell
log-probabilities, is replayed with a table of greedy rows; the sampler draws from its logits as from others. Where
drawing fails while a step is captured, as on a device that cannot compile the kernel, the sampler draws for all. Edits
differ from request to request in length and kind, and those of a grammar are known only once the token before is, so a
graph would need room and kernels for all of them in each step.

Which pieces of attention run side by side differs from step to step: a graph has the largest possible number of pieces,
and those that a step does not need do nothing (kernels/triton/pieces.py).

Where another library may attend for chunks of long requests (`LongChunks`), the larger sizes with prompts are captured
once more, with that library. A graph stays where it takes a chunk behind 8,000 tokens faster than the usual one, and a
step that suits it runs in it. Decodes beside the chunks, and all other steps, are left to ours.

Where a worker has memory for adapters, each size is captured again with the kernels of adapters. These look up on the
device which rows have which adapter, and where it lies: a graph serves adapters that are loaded later, of any rank.

`capture` is the device's own way to capture; in tests, anything does that runs the same function again on the same
buffers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from alignedserve.engine.device.devices import out_of_memory
from alignedserve.engine.device.ranks import ALONE, RankLinks
from alignedserve.engine.inputs import Inputs
from alignedserve.errors import NotCaptured, RankLost
from alignedserve.fallbacks import fell_back
from alignedserve.kernels.common.adapters import StaticAdapters, StepAdapters
from alignedserve.kernels.common.drawing import NONE
from alignedserve.kernels.common.failing import fault_of_kernel, in_a_line
from alignedserve.kernels.common.placing import Section, StepMemory
from alignedserve.kernels.common.spans import LongChunks, QuerySpan, StaticSpans, StepSize
from alignedserve.kernels.dispatch.tuning import Seconds, seconds_on_gpu

log = logging.getLogger("alignedserve.engine")

_FIRST = (1, 2, 4)
_EACH, _UP_TO, _THEN_EACH = 8, 256, 16  # distance between sizes from 8 on, and beyond 256
# Steps with prompts: larger ones keep a GPU busy for longer than the host takes to launch their kernels.
_WITH_PROMPTS = (16, 32, 64, 128, 192, 256, 320, 384, 512, 640)
_MOST_CHUNKS = 33  # one of them, or one decode, is padding: for each attention may have a piece that does nothing
# Another library's chunks: at most, one of them padding, since a table of blocks is sent for each; and the rows of the
# step at least, below which attention is a small part of it.
_MOST_LONG, _LEAST_LONG_ROWS = 9, 128
_BEHIND = 8_000  # tokens before the chunk by which the two graphs of a size are compared
_WORTH, _TURNS = 0.97, 3  # what the library's graph may take of the usual one's time, and how often each is timed
_MOST_PLACES = 1 << 22  # of blocks: 32 MB, for 67 million tokens with 16 in each
_MIB = 1 << 20

CAPTURED, STEP_BY_STEP = "captured steps", "the host launches each kernel of a step"  # what falls back to what
SHARING = "captured steps of many blocks"
DRAWING, DRAWN_BEHIND = "drawing in captured steps", "tokens are drawn behind them"

Step: TypeAlias = Callable[[], Tensor]  # from its buffers to logits, [rows, vocabulary]
Capture: TypeAlias = Callable[[Step], Step]  # captures a step and returns the function that replays it
# Takes tokens, their spans, and the rows that are wanted (None: all); returns the logits of these rows.
Forward: TypeAlias = Callable[[Tensor, StaticSpans, Tensor | None], Tensor]
Draw: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]  # as Kernels.draw_by
MakeTable: TypeAlias = Callable[[], Tensor | None]  # by which a step draws its tokens; None where it cannot


def sizes(most: int) -> list[int]:
    """Return the batch sizes of the steps that are captured; the last size is `most`."""
    usual = [*_FIRST, *range(_EACH, _UP_TO, _EACH), *range(_UP_TO, most, _THEN_EACH)]
    return [size for size in usual if size < most] + [most]


def sizes_with_prompts(most: int) -> list[int]:
    """Return the tokens of the steps with prompts that are captured, where no step has more than `most` tokens."""
    return [size for size in _WITH_PROMPTS if size < most] + [most] * (0 < most <= _WITH_PROMPTS[-1])


def places_for(most: int, longest: int, num_blocks: int) -> int:
    """Return the places for the blocks of up to `most` requests of up to `longest` blocks, on a device with
    `num_blocks`.

    There are enough for any step, unless that takes too much memory: then at least for any step without shared blocks.
    """
    return max(num_blocks, min(most * min(longest, num_blocks), _MOST_PLACES))


@dataclass(frozen=True)
class _Graph:
    spans: StaticSpans
    tokens: Section
    sources: Section  # for each token its row among those of the step before, or a row of NONE
    rows: Section | None  # whose logits are wanted; None: all
    table: Section | None  # by which tokens are drawn; None: they are not
    replay: Step

    def fill(self, inputs: Inputs, known: int, wanted: Sequence[int], table: Tensor | None) -> None:
        """Fill all sections, of which `spans` fills its own."""
        inputs.fill(self.tokens, self.sources, known)
        if self.rows is not None:
            self.rows.fill(wanted)
        if self.table is not None:
            self.table.host.zero_()
            if table is not None:
                self.table.host.view(len(table), -1)[:, : len(wanted)] = table


class Computed(NamedTuple):
    """What a step has computed of the rows that are wanted, valid until the next step."""

    logits: Tensor
    tokens: Tensor | None = None  # where the step has drawn them itself


class StepGraphs:
    """The captured steps of an engine, by size."""

    def __init__(
        self,
        most: int,
        most_tokens: int,
        vocabulary: int,
        forward: Forward,
        capture: Capture,
        block_size: int,
        places: int,
        scratch: int,
        device: torch.device,
        draw: Draw | None = None,
        adapters: StaticAdapters | None = None,
        only_prompts: bool = False,
        long: LongChunks | None = None,
        seconds: Seconds = seconds_on_gpu,
    ) -> None:
        """Prepare graphs for steps of up to `most` decodes, and for steps with prompts of up to `most_tokens` tokens,
        with a place for each block of each request; `scratch` is a block of no request, behind all others.

        `vocabulary` is the number of logits of a token. Without `draw` no step draws tokens. With `only_prompts` there
        are no graphs for decodes alone, with `adapters` there are graphs for steps with adapters, too: `forward` finds
        those of the step there. `long` says which chunks another library may attend for.
        """
        self._sizes = [] if only_prompts else [StepSize(size, size) for size in sizes(most)]
        self._sizes += [StepSize(size, min(size, most + 1), _MOST_CHUNKS) for size in sizes_with_prompts(most_tokens)]
        if adapters is not None:
            self._sizes += [size._replace(adapted=True) for size in self._sizes]
        self._forward, self._capture, self._draw, self._adapters = forward, capture, draw, adapters
        self._draw_fault: Exception | None = None  # in the newest capture
        self._seconds = seconds
        self.compared = dict[StepSize, tuple[float, float]]()  # seconds by a library, and by ours
        self._logits = torch.empty((most, vocabulary), device=device)
        self._drawn = torch.full((most + 1,), NONE, device=device)  # tokens of the newest step; the last stays NONE
        self._block_size, self._scratch, largest = block_size, scratch, max(most, most_tokens)
        table = 0 if long is None else _MOST_LONG * long.pages
        self._memory = StepMemory(places + largest, largest, device, table)  # padding has blocks too
        self._graphs: dict[StepSize, _Graph] = {}
        self._long = dict[StepSize, StepSize]()  # for a usual size with prompts that with a library's attention
        for size in self._sizes if long is not None else ():
            alike = size._replace(chunks=_MOST_LONG, long=long)
            if size.chunks and size.rows >= _LEAST_LONG_ROWS and alike.holds(self._filling(alike)):
                self._long[size] = alike

    def __len__(self) -> int:
        """Return how many sizes there are, captured or not."""
        return len(self._sizes) + len(self._long)

    @property
    def rows(self) -> list[int]:
        """Return the numbers of rows of all sizes, captured or not."""
        return sorted({size.rows for size in self._sizes})

    @property
    def captured(self) -> list[StepSize]:
        """Return the sizes that are captured."""
        return [size for size in (*self._sizes, *self._long.values()) if size in self._graphs]

    @property
    def kinds(self) -> str:
        """Return which kinds of steps without adapters are captured, in words."""
        usual = [size for size in self._sizes if size in self._graphs]  # the kernels' name says which libraries attend
        return ", ".join(dict.fromkeys(_kind(size) for size in usual if not size.adapted))

    @property
    def left_out(self) -> str:
        """Return which sizes are not captured, in words."""
        missing = dict[str, list[str]]()
        for size in self._sizes:
            if size not in self._graphs:
                missing.setdefault(_kind(size), []).append(str(size.rows))
        return " and of ".join(f"{', '.join(rows)} {kind}" for kind, rows in missing.items())

    def capture_all(
        self,
        free: Callable[[], int],
        least: int,
        advance: Callable[[], object] = lambda: None,
        ranks: RankLinks = ALONE,
    ) -> None:
        """Capture all sizes, as long as `least` bytes stay free: those of decodes first, those with adapters last, and
        of each kind the largest first, since the smaller ones reuse its memory. `advance` is called after each.

        A size that is not captured runs kernel by kernel. A size for which memory is too small is left out, and the
        smaller ones are tried: they may need less.

        A captured step sums its padding too, so a size is captured on every rank or on none. A rank whose memory ends
        in the middle of a step would leave the others waiting for what it was to add: before they capture it together,
        each rank captures it apart, and keeps that until the memory is used again.
        """
        for size in sorted(self._sizes, key=lambda size: (size.adapted, size.chunks, -size.rows)):
            if ranks.together(free()) < least:
                log.warning("%s and fewer are not captured: less than %d MB are free", _named(size), least // _MIB)
                break
            if (graph := self._captured_on_all(size, ranks)) is not None:
                self._graphs[size] = graph
            advance()
        for usual, size in sorted(self._long.items(), key=lambda sizes: (sizes[0].adapted, -sizes[0].rows)):
            if usual not in self._graphs:
                continue
            if ranks.together(free()) < least or (graph := self._captured_on_all(size, ranks)) is None:
                break
            if not ranks.together(int(graph.spans.are_read_by_library)):
                break  # no library attends for such a model, or such a cache
            if ranks.together(int(self._is_faster(size, graph, self._graphs[usual]))):
                self._graphs[size] = graph
            advance()
        counts = Counter(map(_kind, self.captured))
        for kind, largest in {_kind(size): size for size in self.captured}.items():
            log.info("%s are captured, in %d sizes", _named(largest, "up to "), counts[kind])

    def _captured_on_all(self, size: StepSize, ranks: RankLinks) -> _Graph | None:
        """Return the graph of a size, or None where one rank has too little memory, or a library fails on one."""
        graph, why = None, "another rank has too little memory"
        try:
            with ranks.apart():
                graph = self._captured_drawing(size)
        except (RuntimeError, MemoryError, NotCaptured) as error:
            found = _out_of_memory(error)
            if found is None and size.long is None:
                raise
            why = found or in_a_line(error)
        if ranks.together(int(graph is not None)) and graph is not None:
            return graph if ranks.size == 1 else self._captured_together(size)
        log.warning("%s are not captured: %s", _named(size), why)
        return None

    def _is_faster(self, size: StepSize, by_library: _Graph, by_ours: _Graph) -> bool:
        took = list[float]()
        for graph in (by_library, by_ours):
            graph.fill(Inputs((), {}, None), len(self._drawn) - 1, (), None)
            graph.spans.place(self._filling(size))
            took.append(min(self._seconds(graph.replay) for _ in range(_TURNS)))
        theirs, ours = self.compared[size] = took[0], took[1]
        log.info("%s: %.2f ms by another library, %.2f by ours", _named(size), 1e3 * theirs, 1e3 * ours)
        return theirs <= _WORTH * ours

    def replay(
        self,
        lies: Sequence[QuerySpan],
        inputs: Inputs,
        wanted: Sequence[int],
        make_table: MakeTable = lambda: None,
        adapters: StepAdapters | None = None,
    ) -> Computed | None:
        """Return the logits of these rows of a step, and with a table the tokens that it draws of them.

        None if the step's size is not captured, or if its requests do not fit that size, or have more blocks than there
        are places for.
        """
        rows = len(inputs.tokens)
        has_prompts = rows > len(lies) or [*wanted] != [*range(rows)]
        usual = self._size_for(rows, has_prompts, adapters is not None)
        if usual not in self._graphs:
            return None
        padding = self._padding(usual, usual.rows - rows)
        lies, alike = [*lies, *padding], (self._long.get(usual, usual), usual)
        size = next((size for size in alike if size in self._graphs and size.holds(lies, len(padding))), None)
        if size is None or len(wanted) > min(size.rows, len(self._logits)):
            return None
        graph = self._graphs[size]
        room = len(self._memory.blocks.host)
        if sum(-(-lie.tokens // self._block_size) for lie in lies) > room:
            fell_back(SHARING, f"captured steps have room for {room} blocks", STEP_BY_STEP)
            return None
        if inputs.rows and inputs.unread is not None and inputs.unread.data_ptr() != self._drawn.data_ptr():
            if len(inputs.unread) >= len(self._drawn):
                return None
            self._drawn[: len(inputs.unread)].copy_(inputs.unread)  # a step that was not captured has drawn them
        table = None if graph.table is None else make_table()
        graph.fill(inputs, len(self._drawn) - 1, wanted, table)
        graph.spans.place(lies)
        if adapters is not None and self._adapters is not None:
            self._adapters.place(adapters)
        return Computed(graph.replay()[: len(wanted)], None if table is None else self._drawn[: len(wanted)])

    def _size_for(self, rows: int, has_prompts: bool, has_adapters: bool) -> StepSize:
        """Return the size for a step; where no decodes alone are captured, their rows are like those of prompts."""
        fitting = (
            size
            for size in self._sizes
            if size.rows >= rows and size.adapted is has_adapters and (size.chunks or not has_prompts)
        )
        return next(fitting, StepSize(0, 0))

    def _padding(self, size: StepSize, rows: int) -> list[QuerySpan]:
        """Return what fills the rows that are left over: requests of one token each, or one chunk."""
        each = rows if size.chunks else 1
        return [QuerySpan(each, each, (self._scratch,) * -(-each // self._block_size))] * (rows // max(1, each))

    def _captured_drawing(self, size: StepSize) -> _Graph:
        """Capture the size, without drawing where that fails: so will all later ones be."""
        self._draw_fault = None
        try:
            return self._captured(size)
        except Exception:
            if (fault := self._draw_fault) is None:
                raise
        fell_back(DRAWING, fault_of_kernel(fault, self._logits.device), DRAWN_BEHIND)
        self._draw = None
        return self._captured(size)

    def _filling(self, size: StepSize) -> list[QuerySpan]:
        """Return what a size is captured with: padding, or for a library one chunk behind as many tokens as there may
        be. These are of blocks before the scratch block, which are only read; a request's last block may be cut."""
        if size.long is None:
            return self._padding(size, size.rows)
        own = -(-size.rows // self._block_size)
        before = max(0, min(_BEHIND // self._block_size, size.long.pages - 1 - own, self._scratch))
        return [QuerySpan(size.rows, before * self._block_size + size.rows, (*range(before), *(self._scratch,) * own))]

    def _captured(self, size: StepSize) -> _Graph:
        filling = self._filling(size)
        spans, logits = StaticSpans(size, filling, self._block_size, self._memory), self._logits[: size.rows]
        tokens, sources = (spans.section(size.rows, torch.long) for _ in range(2))
        rows = spans.section(len(logits), torch.long) if size.chunks else None
        draw = self._draw
        table = None if draw is None else spans.section(5 * len(logits), torch.double)

        def step() -> Tensor:
            sampled = torch.maximum(tokens.device, self._drawn.index_select(0, sources.device))  # NONE becomes 0
            logits.copy_(self._forward(sampled, spans, None if rows is None else rows.device))
            if draw is not None and table is not None:
                try:
                    draw(logits, table.device.view(5, -1), self._drawn[: len(logits)])
                except Exception as error:
                    self._draw_fault = error
                    raise
            return logits

        graph = _Graph(spans, tokens, sources, rows, table, step)
        graph.fill(Inputs((), {}, None), len(self._drawn) - 1, (), None)
        spans.place(filling)
        return replace(graph, replay=self._capture(step))

    def _captured_together(self, size: StepSize) -> _Graph:
        try:
            return self._captured(size)
        except (RuntimeError, MemoryError) as error:
            if (why := _out_of_memory(error)) is None:
                raise
            raise RankLost(f"too little memory to capture {_named(size)}, which fitted before: {why}") from error


def _named(size: StepSize, about: str = "") -> str:
    return f"{'steps' if size.chunks else 'decode steps'} of {about}{size.rows} {_kind(size)}"


def _kind(size: StepSize) -> str:
    """Return what a size counts, in words: "tokens with prompts and adapters", for example."""
    prompts = "prompts" if size.long is None else "prompts of long requests"
    beside = [*(prompts,) * bool(size.chunks), *("adapters",) * size.adapted]
    return ("tokens" if size.chunks else "requests") + " with " * bool(beside) + " and ".join(beside)


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
