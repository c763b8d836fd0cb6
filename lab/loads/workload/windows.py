"""Varies a trace by the seed: windows of it, drawn with replacement, one after the other (a block bootstrap).

    trace    | a a   a | b   | c c c |
    drawn    | b   | a a   a | a a   a |

Within a window nothing changes. Where a window comes again, blocks of prompts that no other window has are new blocks;
blocks of several windows, such as those of a system prompt, stay the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from alignedserve.errors import WorkloadError
from alignedserve.lab.loads.workload.amounts import RecordedLengths
from alignedserve.lab.loads.workload.pace import Recorded
from alignedserve.lab.loads.workload.stream import Stream

Blocks = tuple[tuple[int, ...], ...]  # ids of the blocks of each prompt


@dataclass(frozen=True)
class _Coming:
    """A request of the trace that comes, perhaps again."""

    number: int  # in the trace
    at: float
    copy: int  # how often its window has come before


class _TraceWindows:
    """Windows of equal length that fill a trace: the numbers of the requests of each."""

    def __init__(self, times: Sequence[float], about_s: float) -> None:
        lasted_s = times[-1] - times[0]
        if about_s > lasted_s / 2:
            raise WorkloadError(f"window_s must be at most half of the {lasted_s:g} s that the trace lasts")
        count = round(lasted_s / about_s)
        self._times, self._each_s = times, lasted_s / count
        self._requests = [list[int]() for _ in range(count)]
        for number, time in enumerate(times):
            self._requests[min(count - 1, int(count * (time - times[0]) / lasted_s))].append(number)

    def drawn(self, draw: Random) -> list[_Coming]:
        """Draw as many windows as there are, and return their requests in the order of arrival."""
        came, coming, count = Counter[int](), list[_Coming](), len(self._requests)
        for place, window in enumerate(draw.choices(range(count), k=count)):
            later_s, copy = (place - window) * self._each_s, came[window]
            coming += [_Coming(number, self._times[number] + later_s, copy) for number in self._requests[window]]
            came[window] += 1
        return coming

    def shared(self, blocks: Blocks) -> set[int]:
        """Return the blocks that several windows have."""
        windows_of = defaultdict[int, set[int]](set)
        for window, requests in enumerate(self._requests):
            for block in (block for number in requests for block in blocks[number]):
                windows_of[block].add(window)
        return {block for block, windows in windows_of.items() if len(windows) > 1}


def check_window(times: Sequence[float], about_s: float | None) -> None:
    if about_s is not None:
        _TraceWindows(times, about_s)


def varied(stream: Stream, draw: Random) -> Stream:
    """Return the stream with windows of its trace drawn again; one without `window_s` stays as it is."""
    arrivals, lengths = stream.arrivals, stream.lengths
    if stream.window_s is None or not isinstance(arrivals, Recorded) or not isinstance(lengths, RecordedLengths):
        return stream
    windows = _TraceWindows(arrivals.times, stream.window_s)
    coming = windows.drawn(draw)
    return replace(
        stream,
        arrivals=replace(arrivals, times=tuple(request.at for request in coming)),
        lengths=RecordedLengths(tuple(lengths.pairs[request.number] for request in coming)),
        blocks=_blocks(stream.blocks, coming, windows) if stream.blocks else (),
        window_s=None,
    )


def _blocks(blocks: Blocks, coming: Sequence[_Coming], windows: _TraceWindows) -> Blocks:
    shared, step = windows.shared(blocks), 1 + max(block for prompt in blocks for block in prompt)
    return tuple(
        tuple(block if block in shared else block + request.copy * step for block in blocks[request.number])
        for request in coming
    )
