"""How far a simulated deployment kept its promises, over one run or several.

Requests count as in docs/how/simulate.md: one that did not finish, a refused one too, kept nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from math import inf

from alignedserve.core import ServiceClass
from alignedserve.lab.loads.figures.request_figures import attains, has_finished, keeps_jct, keeps_tbt, keeps_ttft
from alignedserve.lab.loads.records.distribution import ratio
from alignedserve.lab.loads.records.records import RequestRecord

_HOPELESS = 5  # times the broken promises that are allowed: a run with more has failed
_FEW = 20  # broken promises, which end no run


@dataclass(slots=True)
class Count:
    """Requests of a class, by broken promises."""

    asked: int = 0
    missed: int = 0
    late_first: int = 0  # the time to the first token was broken
    late_gaps: int = 0  # the time between tokens was broken
    tokens: int = 0  # of finished requests

    def __add__(self, other: Count) -> Count:
        return Count(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    @property
    def attainment(self) -> float:
        return self.without(self.missed)

    def without(self, missed: int) -> float:
        """Return the share of the requests that kept all promises."""
        return ratio(self.asked - missed, self.asked)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    rt: Count
    be: Count
    duration_s: float
    is_cut: bool = False  # it ended early because it was hopeless: it would have missed more

    def of(self, service: ServiceClass) -> Count:
        return self.rt if service is ServiceClass.RT else self.be


@dataclass(frozen=True, slots=True)
class PromisesToKeep:
    """The promises that a deployment has to keep."""

    attain: float  # share of chats that keep all deadlines
    be_attain: float  # share of documents that end within the completion window
    be_tokens_per_s: float | None = None  # output of documents

    def least(self, service: ServiceClass) -> float:
        return self.attain if service is ServiceClass.RT else self.be_attain

    def shortfalls(self, outcomes: Sequence[Outcome]) -> list[str]:
        """Return what is not kept, and by how much; empty if all is kept."""
        found = [text for service in ServiceClass if (text := self._shortfall(outcomes, service))]
        wanted = self.be_tokens_per_s
        if wanted is not None and (speed := be_tokens_per_s(outcomes)) < wanted:
            found.append(f"documents {speed:,.0f} of {wanted:,.0f} tokens/s")
        return found

    def _shortfall(self, outcomes: Sequence[Outcome], service: ServiceClass) -> str:
        count, least = total(outcomes, service), self.least(service)
        if not count.asked or count.attainment >= least:
            return ""
        text = f"{NAMES[service]} {attainment_text(outcomes, service)} of {100 * least:g}%"
        if service is ServiceClass.BE:
            return text
        return f"{text} (TTFT {count.without(count.late_first):.1%}, TBT {count.without(count.late_gaps):.1%})"


NAMES = {ServiceClass.RT: "chats", ServiceClass.BE: "documents"}


def total(outcomes: Iterable[Outcome], service: ServiceClass) -> Count:
    return sum((outcome.of(service) for outcome in outcomes), Count())


def be_tokens_per_s(outcomes: Sequence[Outcome]) -> float:
    return ratio(total(outcomes, ServiceClass.BE).tokens, sum(outcome.duration_s for outcome in outcomes))


def least_attainment(outcomes: Sequence[Outcome]) -> float:
    """Return the lower attainment of the classes that have requests; 0 if none has."""
    counts = [total(outcomes, service) for service in ServiceClass]
    return min((count.attainment for count in counts if count.asked), default=0.0)


def attainment_text(outcomes: Sequence[Outcome], service: ServiceClass) -> str:
    """Return the attainment as text, with `<` where a run ended early."""
    count = total(outcomes, service)
    if not count.asked:
        return "-"
    return f"{'<' if any(outcome.is_cut for outcome in outcomes) else ''}{count.attainment:.1%}"


# --- During a run


class Hopeless(Exception):
    """The run has broken too many promises to go on."""


class RequestTally:
    """Counts the requests of a run as they end."""

    def __init__(self, promise: PromisesToKeep, expected: Mapping[ServiceClass, int | None]) -> None:
        """Raise Hopeless at many broken promises of a class if it is `expected` how many requests come."""
        self._promise, self._expected = promise, expected
        self._counts = {service: Count() for service in ServiceClass}
        self._is_cut = False
        self._first_at, self._last_at = inf, 0.0

    def hear(self, request: RequestRecord) -> None:
        count = self._counts[request.service]
        count.asked += 1
        count.tokens += len(request.token_at) if has_finished(request) else 0
        if request.service is ServiceClass.RT:
            count.missed += not attains(request)
            count.late_first += not keeps_ttft(request)
            count.late_gaps += not keeps_tbt(request)
        else:
            count.missed += not keeps_jct(request)
        self._first_at = min(self._first_at, request.arrival_at)
        self._last_at = max(self._last_at, request.ended_at)
        expected = self._expected.get(request.service)
        if expected is not None and self._is_hopeless(request.service, expected):
            self._is_cut = True
            count.asked = max(count.asked, expected)  # those that did not come yet count as kept
            raise Hopeless

    def _is_hopeless(self, service: ServiceClass, expected: int) -> bool:
        allowed = (1 - self._promise.least(service)) * expected
        return self._counts[service].missed > max(_FEW, _HOPELESS * allowed)

    def outcome(self) -> Outcome:
        duration_s = max(0.0, self._last_at - self._first_at)
        return Outcome(self._counts[ServiceClass.RT], self._counts[ServiceClass.BE], duration_s, self._is_cut)
