"""What a worker has emitted: sent to the owners once a step, kept until they have it.

A token travels in one frame of its step and gateway. Where a frame is lost, the owner sees the gap
and asks again; so a request's tokens stay here until the owner acknowledges the last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from alignedserve.core import FinishReason, Request
from alignedserve.messages import Output, Resend, Send, Tokens

MOST_ENDED = 10_000  # an owner that never acknowledges must not fill the memory


@dataclass
class _Kept:
    request: Request
    output: list[int]  # the worker's own list: it grows there
    finish: FinishReason | None = None


class Outputs:
    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}  # in the order of their first token, then of their last
        self._new: dict[str, list[Output]] = defaultdict(list)  # owner -> what the coming frame carries

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def emit(self, request: Request, output: list[int], finish: FinishReason | None) -> None:
        """The last token of `output` is new."""
        kept = self._kept.get(request.id)
        if kept is None or kept.request is not request or finish:
            self._kept.pop(request.id, None)
            self._kept[request.id] = _Kept(request, output, finish)
            if len(self._kept) > MOST_ENDED:
                self._drop_oldest_ended()
        self._new[request.owner].append(
            Output(request.id, request.attempt, len(output) - 1, (output[-1],), finish),
        )

    def flush(self) -> list[Send]:
        """One frame for each owner."""
        frames = [Send(owner, Tokens(tuple(outputs))) for owner, outputs in self._new.items()]
        self._new.clear()
        return frames

    def resend(self, asked: Resend) -> list[Send]:
        """Everything from the index on; nothing where the attempt is not here: then the owner starts the next."""
        kept = self._kept.get(asked.request)
        if kept is None or kept.request.attempt != asked.attempt or asked.index >= len(kept.output):
            return []
        request, tokens = kept.request, tuple(kept.output[asked.index :])
        again = Output(request.id, request.attempt, asked.index, tokens, kept.finish)
        return [Send(request.owner, Tokens((again,)))]

    def remind(self, owner: str | None = None) -> list[Send]:
        """The last token of what has ended, to one owner or to all: it, or its acknowledgement, may have been lost."""
        ended = [kept for kept in self._kept.values() if kept.finish and owner in (None, kept.request.owner)]
        frames = []
        for kept in ended:
            request, last = kept.request, len(kept.output) - 1
            output = Output(request.id, request.attempt, last, (kept.output[last],), kept.finish)
            frames.append(Send(request.owner, Tokens((output,))))
        return frames

    def forget(self, requests: Iterable[str]) -> None:
        for request in requests:
            self._kept.pop(request, None)

    def drop(self, request: str, attempt: int) -> None:
        """The request up to this attempt is not wanted any more."""
        kept = self._kept.get(request)
        if kept is not None and kept.request.attempt <= attempt:
            del self._kept[request]

    def owner_lost(self, owner: str) -> None:
        """It will never acknowledge anything; what it has not been sent yet nobody waits for."""
        self.forget([name for name, kept in self._kept.items() if kept.request.owner == owner])
        self._new.pop(owner, None)

    def _drop_oldest_ended(self) -> None:
        oldest = next((name for name, kept in self._kept.items() if kept.finish), None)
        self.forget([oldest] if oldest else [])
