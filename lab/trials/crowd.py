"""People who ask at once, beside documents or alone: what each of them gets, by a simulation of the same cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from random import Random

from alignedserve.core import Request, Sampling, ServiceClass, Slo
from alignedserve.lab.loads.figures.request_figures import gaps_s, ttft_s
from alignedserve.lab.loads.records.distribution import percentile
from alignedserve.lab.loads.records.records import RequestRecord
from alignedserve.lab.loads.workload import Arrival
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.simulator.clients import GivenLoad
from alignedserve.lab.simulator.machines.clock import Priority
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import FIRST_ARRIVAL_AT, Settings
from alignedserve.lab.trials.building import settings_of

ANSWER = 100  # tokens of each answer
REFUSES_NONE = "schedule.refuse_ttfts=0"
_DOCUMENTS, _IN, _OUT = 16, 256, (24, 48)  # in flight, the tokens of their prompts, the range of those of outputs
_VOCAB = 30_000
_SEEN_S = 60.0  # that documents are watched beside chats at most


@dataclass(frozen=True, slots=True)
class Crowd:
    people: int
    prompt: int  # tokens
    slo: Slo


@dataclass(frozen=True, slots=True)
class CrowdFigures:
    people: int
    prompt: int  # tokens
    first_token_s: float  # the 95th percentile
    gap_s: float  # the 99th
    documents_tokens_s: float  # the output of documents beside them until the last answer, in a minute at most


@cache  # to fit a profile takes longer than many a simulation
def _settings(trial: SimulationTrial) -> Settings:
    return replace(settings_of(trial), record=False)


class _HasSeen(Exception):
    """Raised when the last answer is there, or documents ran beside chats for a minute: the rest is of no interest."""


class _CrowdLoad(GivenLoad):
    """Documents that are always in flight, if any, and chats that come once as many documents have ended."""

    def __init__(self, crowd: Crowd, num_documents: int) -> None:
        super().__init__(())
        self._crowd, self._num_documents = crowd, num_documents
        self._numbers, self._draw, self._num_ended = count(), Random(0), 0
        self.asked_at = FIRST_ARRIVAL_AT
        self.on_asked: Callable[[float], None] = lambda _: None

    def start(self, now: float) -> list[Arrival]:
        return [self._document(now) for _ in range(self._num_documents)] or self._chats(now)

    def ended(self, request: str, now: float, _answer: tuple[int, ...] | None) -> list[Arrival]:
        if request.startswith("chat"):
            return []
        self._num_ended += 1
        chats = self._chats(now) if self._num_ended == self._num_documents else []
        return [self._document(now), *chats]

    def _chats(self, now: float) -> list[Arrival]:
        self.asked_at, crowd = now, self._crowd
        self.on_asked(now)
        return [self._arrival("chat", now, crowd.prompt, ANSWER, crowd.slo) for _ in range(crowd.people)]

    def _document(self, now: float) -> Arrival:
        return self._arrival("document", now, _IN, self._draw.randint(*_OUT), None)

    def _arrival(self, name: str, at: float, prompt: int, output: int, slo: Slo | None) -> Arrival:
        request = Request(
            id=f"{name}-{next(self._numbers)}",
            owner="gateway-0",
            attempt=0,
            prompt=tuple(self._draw.choices(range(_VOCAB), k=prompt)),  # none begins like another
            emitted=(),
            sampling=Sampling(),
            max_tokens=output,
            stop_tokens=(),
            service=ServiceClass.BE if slo is None else ServiceClass.RT,
            slo=slo or Slo(),
            arrival_at=at,
        )
        return Arrival(request, output, None)


def figures_of(trial: SimulationTrial, crowd: Crowd) -> CrowdFigures:
    """Simulate the crowd twice, alone and beside documents."""
    chats, _ = _run(trial, crowd, 0)
    _, documents_tokens_s = _run(trial, crowd, _DOCUMENTS)
    firsts, gaps = [ttft_s(chat) for chat in chats], [gap for chat in chats for gap in gaps_s(chat)]
    return CrowdFigures(crowd.people, crowd.prompt, percentile(firsts, 95), percentile(gaps, 99), documents_tokens_s)


def _run(trial: SimulationTrial, crowd: Crowd, num_documents: int) -> tuple[Sequence[RequestRecord], float]:
    """Return what became of the chats, and the documents' tokens a second meanwhile."""
    load = _CrowdLoad(crowd, num_documents)
    simulation = Simulation(_settings(trial), asked=())
    clients = simulation.clients
    clients.load = load
    chats, token_at = list[RequestRecord](), list[float]()

    def hear(record: RequestRecord) -> None:
        if not record.id.startswith("chat"):
            token_at.extend(record.token_at)
            return
        chats.append(record)
        if len(chats) == crowd.people:
            raise _HasSeen

    def end() -> None:
        raise _HasSeen

    agenda, clients.on_end = simulation.world.agenda, hear
    if num_documents:
        load.on_asked = lambda now: agenda.at(now + _SEEN_S, Priority.CLIENT, end)
    with suppress(_HasSeen):
        simulation.run()
    documents = [client for client in clients.kept.values() if client.request.service is ServiceClass.BE]
    token_at += [at for client in documents for at in client.token_at]
    began_at, ended_at = load.asked_at, agenda.now
    return chats, sum(began_at < at <= ended_at for at in token_at) / (ended_at - began_at)
