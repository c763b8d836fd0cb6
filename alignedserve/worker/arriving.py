"""Requests that come to a worker, and wait.

    Prefill ─▶ (the syntax is compiled) ─▶ asking ── Prefix ──▶ waiting ──▶ fetching ── CopiedIn ──▶ running, from the
                                             └── no answer ──▶   ▲        (seated)        │     first unknown token on
                                                                 └──── not intact ────────┘

What the pool still has of a prompt's beginning is not computed again. The pool holds these pages for the attempt until
the attempt's Commit or Keep names them, or a Release gives them up. A new attempt drops the attempts before it.
"""

from __future__ import annotations

from alignedserve.explain.decisions import Kind
from alignedserve.protocol.commands import Command, PrepareSyntax
from alignedserve.protocol.events import MemberLost, Received, SyntaxReady
from alignedserve.protocol.messages import AskPrefix, Cancel, Prefill, Prefix
from alignedserve.worker.part import Worker, WorkerPart
from alignedserve.worker.requests import OCCUPYING
from alignedserve.worker.setup import running_of
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.states import State

ANSWER_S = 0.005  # how long a step waits for the pool's answer about a chat, which takes about a millisecond


class Arrivals(WorkerPart):
    """Admits a prompt as soon as the syntax is compiled and the pool has said which pages it has of the prompt.

    A request without a compiled syntax would hold up its step, with all other requests. A new attempt drops the
    attempts before it."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._unanswered: set[WorkerRequest] = set()  # at the last look: these go on at the next look
        self._answered_by = 0.0  # until then the next step waits for the pool's word on a chat's prompt

    def prefill(self, message: Prefill, frame: Received, now: float) -> list[Command]:
        request = message.request
        dropped = self._here.drop(request.id, request.attempt - 1)
        running = running_of(self._policy, request, request.emitted, decode=message.decode)
        if request.sampling.syntax:
            self._here.move(running, State.COMPILING)
            return [*dropped, PrepareSyntax(request)]
        return [*dropped, *self.admit(running, now)]

    def syntax_ready(self, event: SyntaxReady, now: float) -> list[Command]:
        running = self._here.find_attempt((event.request, event.attempt), State.COMPILING)
        return [] if running is None else self.admit(running, now)

    def cancel(self, message: Cancel, frame: Received, now: float) -> list[Command]:
        for running in self._here.named(message.request, *OCCUPYING):
            if running.request.attempt <= message.attempt:
                self._decisions.note(Kind.DROPPED, running.request)
        return self._here.drop(message.request, message.attempt)

    # --- What the pool has of a prompt

    def admit(self, running: WorkerRequest, now: float) -> list[Command]:
        """Ask the pool what it has of a new prompt; where there is nothing to ask, the prompt waits for room."""
        may_have = self._policy.reuse and self._pool.member is not None
        names = self._writer.names.pages_before_last(running) if may_have else ()
        if not names:
            self._queue.admit(running, now)
            return []
        if running.promise.is_rt and not self._has_chat:
            self._answered_by = now + ANSWER_S
        self._here.move(running, State.ASKING)
        return self._pool.send(AskPrefix(*running.key, names, running.request.service))

    @property
    def answered_by(self) -> float:
        """Return until when the next step is to wait for the pool's word on a chat's prompt; 0 where none asks."""
        return self._answered_by if self._has_chat else 0.0

    @property
    def _has_chat(self) -> bool:
        return any(running.promise.is_rt for running in self._here.among(State.ASKING))

    def pool_lost(self, event: MemberLost, now: float) -> None:
        self._queue.add_again(self._here.of(State.ASKING))
        for running in self._here.of(*OCCUPYING, State.WAITING, State.CANDIDATE):
            running.forget_known()

    def answered(self, prefix: Prefix, frame: Received, now: float) -> list[Command]:
        """Let a prompt wait for a seat, with the pages that the pool keeps for the prompt.

        Where the prompt has gone on without the answer and the pool keeps nothing, forget its known pages. Where the
        prompt is not here any more, release what the pool keeps."""
        attempt, pages = (prefix.request, prefix.attempt), prefix.pages
        running = self._here.find_attempt(attempt, State.ASKING, State.WAITING, State.LEAVING, *OCCUPYING)
        if running is None:
            return self._holds.decline(attempt, now) if pages else []
        (self._holds.add if pages else self._holds.discard)(attempt)
        if running.state is State.ASKING:
            running.kept_in_pool(pages)
            self._queue.admit(running, now)
        elif not pages:
            self._writer.forget_parts(running)  # parts follow the known pages, which are to be written now
            running.forget_known()
        return []

    def ask_again(self) -> None:
        """Let prompts that asked before the last look go on without an answer: the ask or the answer was lost."""
        asking = self._here.of(State.ASKING)
        late = [running for running in asking if running in self._unanswered]
        self._unanswered = {running for running in asking if running not in late}
        self._queue.add_again(late)

    @property
    def awaits_answer(self) -> bool:
        return bool(self._here.among(State.ASKING))
