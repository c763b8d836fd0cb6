"""A stream: users of one kind, and what they ask for."""

# ruff: noqa: RUF009  (what it takes for shared defaults are frozen, or fields made by `setting`)

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import inf
from random import Random

from alignedserve.config.setting import setting
from alignedserve.core import ServiceClass, Slo
from alignedserve.errors import WorkloadError
from alignedserve.simulator.workload.amounts import FORMS, Amount, Exponential, Fixed
from alignedserve.simulator.workload.lengths import DrawnSizes, LengthSource, RecordedLengths
from alignedserve.simulator.workload.pace import ArrivalProcess, AtOnce, Gamma, Recorded


@dataclass(frozen=True)
class StreamPromise:
    """What requests are promised."""

    service: ServiceClass = setting(ServiceClass.RT, "rt: a deadline for every token; be: throughput, and a window")
    ttft_s: Amount = setting(Fixed(Slo().ttft_s), f"deadline of the first token, in seconds, {FORMS}")
    tbt_s: Amount = setting(Fixed(Slo().tbt_s), f"deadline from token to token, in seconds, {FORMS}")
    jct_s: Amount = setting(Fixed(Slo().jct_s), f"completion window, in seconds, {FORMS}")
    slo_factor: Amount = setting(Fixed(1.0), f"drawn for each request, its three deadlines are times that, {FORMS}")

    def draw(self, draw: Random) -> Slo:
        factor = self.slo_factor.draw(draw)
        ttft_s, tbt_s, jct_s = (factor * one.draw(draw) for one in (self.ttft_s, self.tbt_s, self.jct_s))
        return Slo(ttft_s, tbt_s, jct_s)


@dataclass(frozen=True)
class Turns:
    """What makes a visit a conversation. The prompt of a turn is all that was said so far, and some new tokens."""

    turns: Amount = setting(Fixed(1.0), f"turns of a visit, {FORMS}")
    system: int = setting(0, "tokens that all prompts of the stream begin with", least=0)
    think_s: Amount = setting(Exponential(10, 120), f"from an answer to the next turn, in seconds, {FORMS}")


@dataclass(frozen=True)
class ClientLimits:
    """What they limit, and how long they stay."""

    context: int = setting(16_384, "most tokens of a prompt and its output; longer prompts are cut", least=2)
    max_tokens: int = setting(2048, "most output that a request asks for, in tokens", least=1)
    limited_share: float = setting(0.0, "share of requests that ask for less, drawn from 1 up", least=0, most=1)
    leaving_share: float = setting(0.0, "share of clients that go before the end", least=0, most=1)
    patience_s: float = setting(0.5, "of those that go, on average, in seconds", above=0)


@dataclass(frozen=True)
class Span:
    """How much of it there is; of conversations the first turns count."""

    num_requests: int | None = setting(None, "as many arrive", least=1)
    first_s: float | None = setting(None, "none arrives later than so many seconds after the start", least=0)


@dataclass(frozen=True)
class Stream:
    """Its name seeds it, so that it stays the same whatever is beside it; requests are called NAME-NUMBER."""

    name: str = "request"
    arrivals: ArrivalProcess = Gamma()
    lengths: LengthSource = DrawnSizes()
    promise: StreamPromise = StreamPromise()
    turns: Turns = Turns()
    clients: ClientLimits = ClientLimits()
    span: Span = Span()
    notes: tuple[str, ...] = ()  # what the reader of its figures should know

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*", self.name):
            raise WorkloadError(f"a stream's name is of letters, digits, - and _, not {self.name!r}")
        if not self._ends:
            raise WorkloadError(f"{self.name} never ends: give it num_requests, or first_s unless all come at once")
        if self.turns.system > self.clients.context - 2:
            raise WorkloadError(f"system must leave room in the context of {self.clients.context} tokens")
        if isinstance(self.lengths, RecordedLengths) and self.turns.turns != Fixed(1.0):
            raise WorkloadError("a trace has requests, not conversations: take its lengths and give them turns")

    @property
    def _ends(self) -> bool:
        timed = self.span.first_s is not None and not isinstance(self.arrivals, AtOnce)
        return self.arrivals.ends or self.span.num_requests is not None or timed

    @property
    def num_requests(self) -> int | None:
        """As many arrive, where that follows from what is asked for."""
        span = self.span
        if self.turns.turns != Fixed(1.0):
            return None
        if isinstance(self.arrivals, Recorded):
            within_s = inf if span.first_s is None else span.first_s
            times = sum(at <= within_s for at in self.arrivals.after())
            return times if span.num_requests is None else min(times, span.num_requests)
        return span.num_requests if span.first_s is None else None

    def scaled(self, factor: float) -> Stream:
        """At so many times the rate, if it has one."""
        return replace(self, arrivals=self.arrivals.scaled(factor))

    def within(self, context: int) -> Stream:
        """For a deployment of this context."""
        return replace(self, clients=replace(self.clients, context=min(context, self.clients.context)))
