"""Make a failing scenario smaller while it still breaks the same rule.

Leave out all faults first, then halves, quarters and single faults; then requests in the same way; then make the rest
simpler, milder and shorter. Keep each smaller scenario that still fails. Repeat until no step helps, or the budget is
spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, takewhile
from typing import Any, TypeVar

from alignedserve.core import ServiceClass
from alignedserve.lab.fuzzing.fuzz import attempt
from alignedserve.lab.fuzzing.invariants import Rule
from alignedserve.lab.fuzzing.scenario import Ask, JobAsk, Scenario
from alignedserve.lab.simulator.machines.faults import DropFrames, Duplicate, Fault

BUDGET = 300  # runs

Fails = Callable[[Scenario], bool]
_Part = TypeVar("_Part")


def shrink(scenario: Scenario, rule: Rule, budget: int = BUDGET) -> Scenario:
    return smallest(scenario, lambda smaller: _breaks(smaller, rule), budget)


def _breaks(scenario: Scenario, rule: Rule) -> bool:
    failure = attempt(scenario).failure
    return failure is not None and failure.rule is rule


def smallest(scenario: Scenario, fails: Fails, budget: int) -> Scenario:
    tries = count()

    def first_that_fails(candidates: Iterable[Scenario]) -> Scenario | None:
        affordable = takewhile(lambda _: next(tries) < budget, candidates)
        return next((candidate for candidate in affordable if fails(candidate)), None)

    before = None
    while before != scenario:
        before = scenario
        for smaller in _STEPS:
            while found := first_that_fails(smaller(scenario)):
                scenario = found
    return scenario


# --- Steps. No step adds what another step took away, so the repetition ends.


def _with_less(parts: tuple[_Part, ...]) -> Iterator[tuple[_Part, ...]]:
    size = len(parts)
    while size:
        for start in range(0, len(parts), size):
            yield parts[:start] + parts[start + size :]
        size //= 2


def _with_some_changed(
    parts: tuple[_Part, ...], changes: Callable[[_Part], Sequence[_Part]]
) -> Iterator[tuple[_Part, ...]]:
    """Yield the parts with all of them changed in one way, then with single parts changed."""
    ways = [changes(part) for part in parts]
    yield from (changed for changed in zip(*ways, strict=False) if changed != parts)
    for at, part in enumerate(parts):
        for changed in ways[at]:
            if changed != part:
                yield (*parts[:at], changed, *parts[at + 1 :])


def _shorter(ask: Ask) -> Sequence[Ask]:
    return [
        replace(ask, leaves_after_s=None),
        replace(ask, num_alike=0),
        replace(ask, service=ServiceClass.RT),
        replace(ask, num_prompt=(ask.num_prompt + 1) // 2),
        replace(ask, length=(ask.length + 1) // 2),
        replace(ask, max_tokens=min(ask.max_tokens, max(ask.length, ask.max_tokens // 2))),
    ]


def _shorter_job(job: JobAsk) -> Sequence[JobAsk]:
    shorter = [replace(job, cancel_after_s=None)]
    if len(job.lines) > 1:
        half = len(job.lines) // 2
        shorter += [replace(job, lines=lines) for lines in (job.lines[:half], job.lines[half:], job.lines[:-1])]
    return shorter


def _milder(fault: Fault) -> Sequence[Fault]:
    if isinstance(fault, DropFrames | Duplicate):
        return [replace(fault, frames=1), replace(fault, frames=fault.frames - 1)] if fault.frames > 1 else []
    lasts = "still_s" if hasattr(fault, "still_s") else "for_s"
    seconds: Any = getattr(fault, lasts, 0.0)
    return [replace(fault, **{lasts: seconds / 2})] if seconds > 0.1 else []


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    if scenario.topology not in ("colocated", "1+1"):
        yield replace(scenario, topology="1+1")
    if scenario.nodes > 1:
        yield replace(scenario, nodes=scenario.nodes - 1)
    if scenario.num_gateways > 1:
        asks = tuple(replace(ask, gateway="gateway-0") for ask in scenario.asks)
        yield replace(scenario, num_gateways=1, asks=asks)


_STEPS: Sequence[Callable[[Scenario], Iterator[Scenario]]] = (
    lambda large: (replace(large, faults=faults) for faults in _with_less(large.faults)),
    lambda large: (replace(large, jobs=jobs) for jobs in _with_less(large.jobs)),
    lambda large: (replace(large, asks=asks) for asks in _with_less(large.asks) if asks),
    _simpler,
    lambda large: (replace(large, faults=faults) for faults in _with_some_changed(large.faults, _milder)),
    lambda large: (replace(large, jobs=jobs) for jobs in _with_some_changed(large.jobs, _shorter_job)),
    lambda large: (replace(large, asks=asks) for asks in _with_some_changed(large.asks, _shorter)),
)
