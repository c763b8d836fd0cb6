"""A failing scenario made smaller, as long as it fails by the same rule.

First halves of the faults and of the requests are left out, then quarters, then single ones; then what is left
is made shorter and simpler. Each step that still fails is kept and all of it begins anew, until nothing helps or
the budget is spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from alignedserve.core import ServiceClass
from alignedserve.simulator.faults import Drop, Duplicate, Fault, Freeze, Mute, Reorder, Slow, SlowWorker
from alignedserve.simulator.fuzz import attempt
from alignedserve.simulator.invariants import Rule
from alignedserve.simulator.scenario import Ask, Scenario

BUDGET = 300  # runs

Fails = Callable[[Scenario], bool]
_Part = TypeVar("_Part")


def shrink(scenario: Scenario, rule: Rule, budget: int = BUDGET) -> Scenario:
    return smallest(scenario, lambda smaller: _breaks(smaller, rule), budget)


def _breaks(scenario: Scenario, rule: Rule) -> bool:
    failure = attempt(scenario).failure
    return failure is not None and failure.rule is rule


def smallest(scenario: Scenario, fails: Fails, budget: int) -> Scenario:
    candidates = _smaller(scenario)
    for _ in range(budget):
        candidate = next(candidates, None)
        if candidate is None:
            break
        if fails(candidate):
            scenario, candidates = candidate, _smaller(candidate)
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Each is smaller by something that no other step brings back, so this ends."""
    yield from (replace(scenario, faults=faults) for faults in _with_less(scenario.faults))
    yield from (replace(scenario, asks=asks) for asks in _with_less(scenario.asks) if asks)
    yield from _simpler(scenario)
    yield from (replace(scenario, faults=faults) for faults in _with_one_changed(scenario.faults, _milder))
    yield from (replace(scenario, asks=asks) for asks in _with_one_changed(scenario.asks, _shorter))


def _with_less(parts: tuple[_Part, ...]) -> Iterator[tuple[_Part, ...]]:
    size = len(parts)
    while size:
        for start in range(0, len(parts), size):
            yield parts[:start] + parts[start + size :]
        size //= 2


def _with_one_changed(
    parts: tuple[_Part, ...], changes: Callable[[_Part], Sequence[_Part]]
) -> Iterator[tuple[_Part, ...]]:
    for at, part in enumerate(parts):
        for changed in changes(part):
            if changed != part:
                yield (*parts[:at], changed, *parts[at + 1 :])


def _shorter(ask: Ask) -> Sequence[Ask]:
    return [
        replace(ask, leaves_after_s=None),
        replace(ask, service=ServiceClass.RT),
        replace(ask, num_prompt=(ask.num_prompt + 1) // 2),
        replace(ask, length=(ask.length + 1) // 2),
        replace(ask, max_tokens=min(ask.max_tokens, max(ask.length, ask.max_tokens // 2))),
    ]


def _milder(fault: Fault) -> Sequence[Fault]:
    match fault:
        case Drop() | Duplicate():
            return [replace(fault, frames=1), replace(fault, frames=fault.frames - 1)] if fault.frames > 1 else []
        case Freeze() | Slow() | Reorder() | Mute() | SlowWorker():
            return [replace(fault, for_s=fault.for_s / 2)] if fault.for_s > 0.1 else []
    return []


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    if scenario.topology not in ("colocated", "1+1"):
        yield replace(scenario, topology="1+1")
    if scenario.num_gateways > 1:
        asks = tuple(replace(ask, gateway="gateway-0") for ask in scenario.asks)
        yield replace(scenario, num_gateways=1, asks=asks)
