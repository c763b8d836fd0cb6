"""The tokens that a worker has emitted: sent to the owners once a step, kept until the owners have them.

All tokens of a step that go to the same owner travel in one frame. A frame before it says what metered requests have
used, at the first token here, at their end and whenever TELL_S have come together: all of it, so a later frame makes
good for a lost one. A request whose client leaves amid a step is charged with that step when it has
ended, though not with a step that was planned ahead behind it.

Where a frame with tokens is lost, the owner sees the gap and asks again: at the latest REFRESH_S later, or at once
where the link's numbers show the gap (LinkGap) or the owner says so (Missed). So a request's tokens stay here until the
owner acknowledges the last token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from alignedserve.core import NO_OPENING, Spent
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import MemberLost, Received, TimerFired
from alignedserve.protocol.messages import Acknowledge, Attempt, Output, RequestUse, Resend, Tokens, Used
from alignedserve.worker.part import REFRESH, CorePart
from alignedserve.worker.step.request import WorkerRequest

# An owner is told again after a request has used this much more of the worker's time. So an answer that ends by a stop
# string, or by the client's leaving, is charged to within 20 ms. The requests of a worker share one second each second,
# so a worker tells at most 50 times a second, besides first tokens and ends.
TELL_S = 0.02
MOST_ENDED = 10_000  # an owner that never acknowledges must not fill the memory


def _last(running: WorkerRequest) -> int:
    """Return the index of what came last."""
    return len(running.output) - (running.finish is None or running.finish.has_token)


def _since(running: WorkerRequest, index: int) -> Output:
    """Return what this attempt emitted of the output from an index on."""
    request = running.request
    logprobs = tuple(running.logprobs[max(0, index - len(request.emitted)) :]) if running.logprobs else ()
    opening = NO_OPENING if index else running.opening
    told = None if opening == NO_OPENING else opening
    return Output(request.id, request.attempt, index, tuple(running.output[index:]), running.finish, logprobs, told)


class Outputs(CorePart):
    """The outputs that the owners of requests may not have whole yet."""

    def __init__(self, energy_source: str = "") -> None:
        self.energy_source = energy_source
        self._kept: dict[str, WorkerRequest] = {}  # in the order of first tokens, then of last tokens
        self._new: dict[str, list[Output]] = defaultdict(list)  # owner -> what the next frame carries
        self._used: dict[str, list[RequestUse]] = defaultdict(list)  # the same
        self._left: dict[str, tuple[WorkerRequest, int]] = {}  # dropped requests, with the last step that may run them

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def attempts(self) -> Mapping[Attempt, bool]:
        """Return the attempts with kept outputs, and whether each has ended."""
        return {kept.key: kept.finish is not None for kept in self._kept.values()}

    def emit(self, running: WorkerRequest) -> None:
        """Add the last token of the output to the owner's frame; an error comes after the last token."""
        request, output, finish = running.request, running.output, running.finish
        name = request.id
        if finish or self._kept.get(name) is not running:
            self._kept.pop(name, None)
            self._kept[name] = running
            if len(self._kept) > MOST_ENDED:
                self._drop_oldest_ended()
        if len(output) == 1 or running.logprobs or running.prompt_logprobs or (finish and not finish.has_token):
            new = _since(running, _last(running))
        else:  # nearly always, and once for each token
            new = Output(name, request.attempt, len(output) - 1, (output[-1],), finish)
        self._new[request.owner].append(new)
        if (running.spent_s > running.tells_beyond_s or finish is not None) and request.is_metered and running.spent_s:
            self._tell_use(running)

    def tell_use_of_chunk(self, running: WorkerRequest) -> None:
        """Tell what a request has used before the first token, after every further TELL_S of use."""
        if running.spent_s > max(running.tells_beyond_s, TELL_S) and running.request.is_metered:
            self._tell_use(running)

    def leave_amid_step(self, running: WorkerRequest, last: int) -> None:
        """Note that a request is dropped, which the steps in flight, up to the number `last`, may still run."""
        if running.request.is_metered:
            self._left[running.request.id] = running, last

    def charge_left(self, request: str, tokens: int, spent_s: float, joules: float) -> None:
        """Charge a dropped request with its part of the step that has ended."""
        if (left := self._left.pop(request, None)) is not None:
            running, _ = left
            running.ran(tokens, spent_s, joules)
            self._tell_use(running)

    @property
    def has_left(self) -> bool:
        return bool(self._left)

    def steps_ended(self, all_to: int) -> None:
        """Forget the dropped requests that no step runs any more: all steps up to this number have ended."""
        if self._left:
            self._left = {name: left for name, left in self._left.items() if left[1] > all_to}

    def _tell_use(self, running: WorkerRequest) -> None:
        spent_s, request = running.spent_s, running.request
        running.tells_beyond_s = spent_s + TELL_S
        spent = Spent(spent_s, running.spent_joules, self.energy_source)
        self._used[request.owner].append(RequestUse(request.id, request.attempt, spent))

    def flush(self) -> list[Command]:
        """Send one frame to each owner, and another frame before it if there is use to report."""
        frames: list[Command] = [Send(owner, Used(tuple(uses))) for owner, uses in self._used.items()]
        frames += [Send(owner, Tokens(tuple(outputs))) for owner, outputs in self._new.items()]
        self._new.clear()
        self._used.clear()
        return frames

    # --- Where a frame, or its acknowledgement, may have been lost

    def resend(self, asked: Resend, frame: Received, now: float) -> list[Command]:
        """Send all output from an index on; where the attempt is not here, the owner starts the next attempt."""
        kept = self._kept.get(asked.request)
        if kept is None or kept.request.attempt != asked.attempt or asked.index > _last(kept):
            return []
        return [Send(kept.request.owner, Tokens((_since(kept, asked.index),)))]

    def timer_fired(self, event: TimerFired, now: float) -> list[Command]:
        return self._remind() if event.name == REFRESH else []

    def repeat(self, to: str) -> list[Command]:
        return self._remind(to)

    def _remind(self, owner: str | None = None) -> list[Command]:
        """Send the last tokens of requests that have ended, to this owner or to all."""
        ended = [kept for kept in self._kept.values() if kept.finish and owner in (None, kept.request.owner)]
        return [Send(kept.request.owner, Tokens((_since(kept, _last(kept)),))) for kept in ended]

    @property
    def awaits_answer(self) -> bool:
        return self.num_kept > 0

    # --- Requests that are not emitted here any more

    def acknowledged(self, message: Acknowledge, frame: Received, now: float) -> None:
        self.forget(message.requests)

    def forget(self, requests: Iterable[str]) -> None:
        """Forget requests that the owners have whole, or that another member emits from now on."""
        for request in requests:
            self._kept.pop(request, None)

    def drop(self, request: str, attempt: int) -> None:
        kept = self._kept.get(request)
        if kept is not None and kept.request.attempt <= attempt:
            del self._kept[request]

    def owner_lost(self, event: MemberLost, now: float) -> None:
        """Forget the requests of an owner that will never acknowledge anything."""
        owner = event.member.name
        self.forget([name for name, kept in self._kept.items() if kept.request.owner == owner])
        self._new.pop(owner, None)
        self._used.pop(owner, None)

    def _drop_oldest_ended(self) -> None:
        oldest = next((name for name, kept in self._kept.items() if kept.finish), None)
        self.forget([oldest] if oldest else [])
