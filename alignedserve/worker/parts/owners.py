"""Send the tokens of requests to their owners: each token once, and again where a frame was lost.

The worker keeps what it has emitted until the owner has it. A lost frame is sent again: at the latest REFRESH_S later,
or at once where the link's numbers show the gap (LinkGap) or the other side says so (Missed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from alignedserve.core import OWNERS, Chunk, Decode, FinishReason, StepResult
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import Event, MemberLost, Received, TimerFired
from alignedserve.protocol.messages import Acknowledge, Resend
from alignedserve.worker.dropping import Dropping
from alignedserve.worker.outputs import Outputs
from alignedserve.worker.parts.part import REFRESH, CorePart
from alignedserve.worker.step.arrival_forecast import ArrivalForecast
from alignedserve.worker.step.device_pages import DevicePages
from alignedserve.worker.step.running import Running

# Requests to which a step has brought a token or their end, and why they ended, if they did.
Emitted: TypeAlias = Iterator[tuple[Running, FinishReason | None]]


class Owners(CorePart):
    def __init__(self, coming: ArrivalForecast, pages: DevicePages, dropping: Dropping) -> None:
        self.outputs = Outputs()
        self._coming, self._pages, self._dropping = coming, pages, dropping

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(message=Resend() as asked):
                return [*self.outputs.resend(asked)]
            case Received(message=Acknowledge(requests)):
                self.outputs.forget(requests)
            case MemberLost(member) if member.role in OWNERS:
                self.outputs.lose_owner(member.name)
            case TimerFired(name) if name == REFRESH:
                return [*self.outputs.remind()]
        return []

    def emitted(
        self,
        parts: Iterable[Chunk | Decode],
        result: StepResult,
        find: Callable[[str], Running | None],
        began_at: float,
        now: float,
    ) -> Emitted:
        """Emit what the parts of a step brought to requests that are still here, and yield those requests.

        Nothing is kept of a request that has left; its next attempt, which has other pairs, may be here by now.
        """
        tokens, unsampled = dict(result.tokens), set(result.unsampled)
        logprobs, scores, vectors = dict(result.logprobs), dict(result.prompt_logprobs), dict(result.vectors)
        emit, size = self.outputs.emit, self._pages.page_size
        drops = self._dropping.is_on
        for part in parts:  # one for each token
            request = part.request
            running = find(request)
            if running is None:
                continue
            pairs = part.pairs  # nearly always the same tuple: then there is no need to ask
            if not (pairs and pairs is running.pairs) and not running.is_at(part):
                continue
            if isinstance(part, Decode):
                running.prefix += 1
                if size and not running.prefix % size:
                    self._pages.publish(running)
            else:
                running.end_chunk(part, began_at, scores.get(request, ()))
                if vectors:
                    running.vector = vectors.get(request, b"")
                self._pages.publish(running)
                running.promise.served(now)
            if drops:
                self._dropping.drop(running)
            token, finish = tokens.get(request), None
            if token is not None:
                if not running.output and running.promise.is_rt:
                    self._coming.learn(running, now)
                finish = running.emit(token, now, logprobs.get(request) if logprobs else None)
            elif request in unsampled:
                finish = FinishReason.DOUBT if running.came_with_kv else FinishReason.ERROR
                self._pages.forget(running)
            else:
                continue
            emit(running, finish)
            yield running, finish

    def flush(self) -> list[Command]:
        """Send what is new, one frame to each owner."""
        return [*self.outputs.flush()]

    def drop(self, request: str, attempt: int) -> list[Command]:
        self.outputs.drop(request, attempt)
        return []

    def repeat(self, to: str) -> list[Command]:
        return [*self.outputs.remind(to)]

    @property
    def awaits_answer(self) -> bool:
        return self.outputs.num_kept > 0
