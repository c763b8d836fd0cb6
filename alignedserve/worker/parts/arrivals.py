"""Obey the messages to a worker about single requests: run a prompt, drop it, expect an output of some length."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command, PrepareSyntax
from alignedserve.protocol.events import Event, Received, SyntaxReady
from alignedserve.protocol.messages import Attempt, Cancel, Expect, Prefill
from alignedserve.worker.parts.common import Common
from alignedserve.worker.parts.part import CorePart
from alignedserve.worker.parts.queue import PromptQueue
from alignedserve.worker.setup import running_of
from alignedserve.worker.step.running import Running


class Arrivals(CorePart):
    """Admits prompts, and drops requests: a new attempt drops the attempts before it.

    A request with a syntax is admitted when that is compiled. Otherwise its first step would wait for it, with all
    others in that step."""

    def __init__(self, common: Common, admit: Callable[[Running, float], list[Command]]) -> None:
        self._roster, self._policy, self._admit = common.roster, common.policy, admit
        self._decisions = common.decisions
        self._preparing: dict[Attempt, Running] = {}  # whose syntaxes are being compiled

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(message=Prefill(request, decode)):
                dropped = self._roster.drop(request.id, request.attempt - 1)
                running = running_of(self._policy, request, request.emitted)
                running.decode = decode
                if request.sampling.syntax:
                    self._preparing[running.key] = running
                    return [*dropped, PrepareSyntax(request)]
                return [*dropped, *self._admit(running, now)]
            case SyntaxReady(request, attempt) if (request, attempt) in self._preparing:
                return self._admit(self._preparing.pop((request, attempt)), now)
            case Received(message=Expect(request, attempt, estimate)) if (request, attempt) in self._preparing:
                self._preparing[request, attempt].expect(estimate, self._policy, now)
            case Received(message=Cancel(request=request, attempt=attempt)):
                self._note_dropped(request, attempt)
                return self._roster.drop(request, attempt)
        return []

    def drop(self, request: str, attempt: int) -> list[Command]:
        for key in [key for key in self._preparing if key[0] == request and key[1] <= attempt]:
            del self._preparing[key]
        return []

    def attempts(self) -> list[Attempt]:
        return [*self._preparing]

    def _note_dropped(self, request: str, attempt: int) -> None:
        for running in self._roster.occupants():
            if running.request.id == request and running.request.attempt <= attempt:
                self._decisions.note(Kind.DROPPED, running.request)


class Expectations(CorePart):
    """Passes on how long the output of a request is expected to be."""

    def __init__(
        self,
        common: Common,
        queue: PromptQueue,
        named: Callable[[str], Iterable[Running]],
        elsewhere: Callable[[Expect, float], list[Command]],
    ) -> None:
        """`named` returns at least the requests of a name that do not wait; `elsewhere` passes on what is not here."""
        self._policy, self._queue, self._named, self._elsewhere = common.policy, queue, named, elsewhere

    def hear(self, event: Event, now: float) -> list[Command]:
        match event:
            case Received(message=Expect() as told):
                return self._expect(told, now)
        return []

    def _expect(self, told: Expect, now: float) -> list[Command]:
        waiting, attempt = self._queue.waiting, (told.request, told.attempt)
        candidates = (*waiting.named(told.request), *self._named(told.request))
        here = [running for running in candidates if running.key == attempt]
        for running in here:
            running.expect(told.estimate, self._policy, now)
            waiting.refile(running)
        return [] if here else self._elsewhere(told, now)
