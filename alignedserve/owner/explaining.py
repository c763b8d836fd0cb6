"""Ask all parts what they decided about a request, and tell the story once they have answered.

A part that does not answer in time, or dies meanwhile, costs a line that says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from alignedserve.core import WORKERS
from alignedserve.explain.story import PartAnswer, clock_lag_s, tell
from alignedserve.protocol.commands import Command, Send, SetTimer, TellStory
from alignedserve.protocol.messages import ROUTER, AskDecisions, Decisions, Member

ANSWER_S = 2.0  # a worker hears the question after the step that runs
_TIMER = "story "  # and its number; timers of requests have no space in their names


@dataclass(slots=True)
class _Question:
    request: str
    asked_at: float
    silent: set[str]  # parts that have not answered
    answers: list[PartAnswer] = field(default_factory=list)


class Explanations:
    def __init__(self) -> None:
        self._open: dict[int, _Question] = {}

    def ask(self, number: int, request: str, members: Iterable[Member], now: float) -> list[Command]:
        asked = [ROUTER, *(member.name for member in members if member.role in WORKERS)]
        self._open[number] = _Question(request, now, set(asked))
        question = AskDecisions(number, request)
        return [*(Send(name, question) for name in asked), SetTimer(f"{_TIMER}{number}", now + ANSWER_S)]

    def hear(self, part: str, answer: Decisions, now: float) -> list[Command]:
        question = self._open.get(answer.number)
        if question is None or part not in question.silent:
            return []
        question.silent.discard(part)
        lag_s = clock_lag_s(answer.now, question.asked_at, now)
        question.answers.append(PartAnswer(part, answer.findings, lag_s))
        return [] if question.silent else self._tell(answer.number)

    def has_timer(self, name: str) -> bool:
        return name.startswith(_TIMER)

    def end(self, timer: str) -> list[Command]:
        """Tell the story without the parts that did not answer in time."""
        return self._tell(int(timer.removeprefix(_TIMER)))

    def _tell(self, number: int) -> list[Command]:
        asked = self._open.pop(number, None)
        if asked is None:
            return []
        return [TellStory(number, tell(asked.request, asked.answers, asked.silent, asked.asked_at))]
