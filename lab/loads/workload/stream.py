"""A stream: users of one kind, and the requests that they send."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, lru_cache
from math import inf
from pathlib import Path
from random import Random

from alignedserve.config.setting import setting
from alignedserve.core import Estimate, ServiceClass, Slo
from alignedserve.errors import WorkloadError
from alignedserve.lab.loads.workload.amounts import (
    FORMS,
    Amount,
    DrawnSizes,
    Exponential,
    Fixed,
    LengthSource,
    RecordedLengths,
)
from alignedserve.lab.loads.workload.files import ChatLengths
from alignedserve.lab.loads.workload.pace import ArrivalProcess, AtOnce, Gamma, Recorded

TABLES = Path(__file__).parent / "predictions.json"


class Predictions(str, Enum):
    """Predictions as wrong as those of real predictors, for outputs whose lengths are known.

    A table has what a predictor said of real outputs: for each range of their lengths, how often it said what. The
    tables were compiled from published pairs of predicted and true lengths; predictions.json names the sources.
    """

    EXACT = "exact"
    LMSYS = "lmsys"  # five classes, by a BERT
    SHAREGPT = "sharegpt"  # tokens, by a regression

    def draw(self, length: int, seed: int) -> Estimate | None:
        """Return what the predictor says of an output of this length; None: the length itself."""
        if self is Predictions.EXACT:
            return None
        return prediction_table(self).draw(length, Random(f"{seed}/predicted"))


@dataclass(frozen=True)
class PredictionTable:
    edges: tuple[int, ...]  # between the ranges of true lengths
    said: tuple[Estimate, ...]  # the predictions that there are
    often: tuple[tuple[int, ...], ...]  # how often each was said, of outputs in each range

    def draw(self, length: int, draw: Random) -> Estimate:
        (said,) = draw.choices(self.said, self.often[bisect_right(self.edges, length)])
        return said


@cache
def prediction_table(source: Predictions) -> PredictionTable:
    table = json.loads(TABLES.read_text(encoding="utf-8"))[source.value]
    said = tuple(Estimate(*estimate) for estimate in table["said"])
    return PredictionTable(tuple(table["edges"]), said, tuple(map(tuple, table["often"])))


# ruff: noqa: RUF009  (what it takes for shared defaults are frozen, or fields made by `setting`)


@dataclass(frozen=True)
class StreamPromise:
    """The service class and the deadlines that requests are promised."""

    service: ServiceClass = setting(
        ServiceClass.RT, "rt: a deadline for every token; be: throughput, and a completion window"
    )
    ttft_s: Amount = setting(Fixed(Slo().ttft_s), f"deadline of the first token, in seconds, {FORMS}")
    tbt_s: Amount = setting(Fixed(Slo().tbt_s), f"deadline from token to token, in seconds, {FORMS}")
    jct_s: Amount = setting(Fixed(Slo().jct_s), f"completion window, in seconds, {FORMS}")
    slo_factor: Amount = setting(
        Fixed(1.0), f"factor for the three deadlines of a request, drawn for each request, {FORMS}"
    )
    is_asked: bool = setting(
        True, "whether a request asks for its deadlines; if not, it waits in line for what the server promises"
    )

    def draw(self, draw: Random) -> Slo:
        factor = self.slo_factor.draw(draw)
        ttft_s, tbt_s, jct_s = (factor * deadline.draw(draw) for deadline in (self.ttft_s, self.tbt_s, self.jct_s))
        return _slo(ttft_s, tbt_s, jct_s, self.is_asked)


@lru_cache(maxsize=16)
def _slo(ttft_s: float, tbt_s: float, jct_s: float, is_asked: bool) -> Slo:
    """Return the deadlines: requests with equal deadlines share one object, which the records keep."""
    return Slo(ttft_s, tbt_s, jct_s, is_asked=is_asked)


@dataclass(frozen=True)
class Turns:
    """The turns of a conversation. The prompt of a turn is the conversation so far and some new tokens."""

    turns: Amount = setting(Fixed(1.0), f"turns of a visit, {FORMS}")
    system: int = setting(0, "tokens that all prompts of the stream begin with", least=0)
    think_s: Amount = setting(Exponential(10, 120), f"from an answer to the next turn, in seconds, {FORMS}")


@dataclass(frozen=True)
class ClientLimits:
    """The limits that clients set, and how long they stay."""

    context: int = setting(16_384, "most tokens of a prompt and its output; longer prompts are cut", least=2)
    max_tokens: int = setting(2048, "most output that a request asks for, in tokens", least=1)
    limited_share: float = setting(0.0, "share of requests whose limit is lower, drawn from 1 up", least=0, most=1)
    leaving_share: float = setting(0.0, "share of clients that leave before the end", least=0, most=1)
    patience_s: float = setting(0.5, "mean time until these clients leave, in seconds", above=0)
    caller: str = setting("", "the key, by name, that requests come with; keys share what there is (simulate only)")


@dataclass(frozen=True)
class Foresight:
    """The length of outputs that an oracle tells, exact or with measured errors."""

    predicted: Predictions = setting(
        Predictions.EXACT, "what an oracle says of an output: its length, or what a real predictor said of such lengths"
    )


@dataclass(frozen=True)
class Span:
    """The length of a stream; in a conversation only the first turn counts."""

    num_requests: int | None = setting(None, "number of requests that arrive", least=1)
    first_s: float | None = setting(None, "seconds after the start; no request arrives later", least=0)


@dataclass(frozen=True)
class Stream:
    """Users of one kind. The name is the stream's seed, so other streams do not change it; requests are NAME-NUMBER."""

    name: str = "request"
    arrivals: ArrivalProcess = Gamma()
    lengths: LengthSource = DrawnSizes()
    promise: StreamPromise = StreamPromise()
    turns: Turns = Turns()
    clients: ClientLimits = ClientLimits()
    span: Span = Span()
    notes: tuple[str, ...] = ()  # for the reader of its figures
    foresight: Foresight = Foresight()
    blocks: tuple[tuple[int, ...], ...] = ()  # of a trace with shared blocks: the ids of each prompt
    window_s: float | None = None  # of a trace that is drawn from its windows

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*", self.name):
            raise WorkloadError(f"a stream's name consists of letters, digits, - and _, not {self.name!r}")
        timed = self.span.first_s is not None and not isinstance(self.arrivals, AtOnce)
        if not (self.arrivals.ends or self.span.num_requests is not None or timed):
            raise WorkloadError(f"{self.name} never ends: give it num_requests, or first_s unless all come at once")
        if self.turns.system > self.clients.context - 2:
            raise WorkloadError(f"system must leave room in the context of {self.clients.context} tokens")
        if isinstance(self.lengths, RecordedLengths) and self.turns.turns != Fixed(1.0):
            raise WorkloadError("a trace has requests, not conversations: take its lengths and give them turns")
        if isinstance(self.lengths, ChatLengths) and self.turns.turns != Fixed(1.0):
            raise WorkloadError("turns has no effect: each chat of the file has as many as it has")

    def num_turns(self, number: int, draw: Random) -> int:
        """Return the turns of the visit of this number."""
        lengths = self.lengths
        return len(lengths.chat(number).turns) if isinstance(lengths, ChatLengths) else self.turns.turns.count(draw)

    @property
    def num_requests(self) -> int | None:
        """Return the number of arriving requests, if the settings tell."""
        span = self.span
        if self.turns.turns != Fixed(1.0) or self._has_chats_of_turns:
            return None
        if isinstance(self.arrivals, Recorded):
            within_s = inf if span.first_s is None else span.first_s
            num_within = sum(at <= within_s for at in self.arrivals.after())
            return num_within if span.num_requests is None else min(num_within, span.num_requests)
        return span.num_requests if span.first_s is None else None

    @property
    def _has_chats_of_turns(self) -> bool:
        return isinstance(self.lengths, ChatLengths) and any(len(chat.turns) > 1 for chat in self.lengths.chats)

    def scaled(self, factor: float) -> Stream:
        """Return the stream with its rate times this factor, or unchanged if it has no rate."""
        return replace(self, arrivals=self.arrivals.scaled(factor))

    def within(self, context: int) -> Stream:
        """Return the stream for a deployment whose requests have at most `context` tokens."""
        return replace(self, clients=replace(self.clients, context=min(context, self.clients.context)))

    def at_once(self, most: int) -> Stream:
        """Return at most `most` requests of the stream, all at the start; clients stay and have one turn."""
        in_record = [len(self.lengths.pairs)] if isinstance(self.lengths, RecordedLengths) else []
        clients, turns = replace(self.clients, leaving_share=0.0), replace(self.turns, turns=Fixed(1.0))
        lengths = self.lengths.of_one_turn() if isinstance(self.lengths, ChatLengths) else self.lengths
        span = Span(min(most, *in_record)) if in_record else Span(most)
        return replace(self, arrivals=AtOnce(), lengths=lengths, clients=clients, turns=turns, span=span, window_s=None)
