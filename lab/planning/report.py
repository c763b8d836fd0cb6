"""Writes what a search found as text and pictures for people, and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignedserve.cli.plotting import new_figure, save_figure
from alignedserve.core import ServiceClass
from alignedserve.lab.loads.figures.tables import table
from alignedserve.lab.planning.deployments import DeploymentFamily, PlannedDeployment
from alignedserve.lab.planning.outcome import (
    NAMES,
    Outcome,
    PromisesToKeep,
    attainment_text,
    be_tokens_per_s,
    least_attainment,
    total,
)
from alignedserve.lab.planning.search import Search
from alignedserve.lab.reports.figures import figure_tree
from alignedserve.lab.reports.plots import label_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_FORMAT = 1
_TITLES = ("an hour", "chats", "documents", "tokens/s")


@dataclass(frozen=True)
class Plan:
    """A search that has ended, or that was interrupted."""

    search: Search
    promise: PromisesToKeep
    most: int  # workers
    question: Mapping[str, Any]  # as the user asked it
    took_s: float
    is_interrupted: bool = False
    loads: Sequence[tuple[float, Outcome]] = field(default_factory=tuple)  # the answer at other arrivals in a second
    notes: Sequence[str] = field(default_factory=tuple)  # for the reader


# --- Text


def plan_text(plan: Plan) -> str:
    parts = [_headline(plan), table([["", "workers", *_TITLES, "found"], *_family_rows(plan)])]
    if plan.search.is_checked:
        title = f"check, seeds {', '.join(map(str, plan.search.fresh))}"
        parts.append(table([[title, *_TITLES, "found"], *_check_rows(plan)]))
    if plan.loads:
        rows = [[f"{rate:.3g}/s", *_kept([outcome])] for rate, outcome in plan.loads]
        parts.append(table([["the answer at", *_TITLES[1:]], *rows]))
    return "\n\n".join([*parts, *plan.notes]) + "\n"


def _headline(plan: Plan) -> str:
    took = f"{sum(map(len, plan.search.found.values()))} simulations, {plan.took_s:.0f} s"
    answer = plan.search.answer
    if answer is not None:
        state = "" if plan.search.is_checked else ", not checked: interrupted"
        gpus = f"{answer.gpus} GPU{'s' if answer.gpus > 1 else ''}"
        return f"{answer}: {gpus}, {answer.price:.2f} an hour ({took}{state})"
    if plan.is_interrupted:
        return f"interrupted: nothing was found yet that keeps the promises ({took})"
    return f"nothing keeps the promises with up to {plan.most} workers ({took}){_nearest(plan)}"


def _nearest(plan: Plan) -> str:
    """Return what the deployment lacks that comes nearest."""
    found = plan.search.found
    if not found:
        return ": by the estimate no device can do this work: let more --workers be, or promise less"

    def nearness(deployment: PlannedDeployment) -> tuple[float, float]:
        outcomes = plan.search.outcomes(deployment)
        return least_attainment(outcomes), be_tokens_per_s(outcomes)

    nearest = max(found, key=nearness)
    lacks = "; ".join(plan.promise.shortfalls(plan.search.outcomes(nearest)))
    return f": {nearest} comes nearest, with {lacks}"


def _family_rows(plan: Plan) -> Iterator[list[str]]:
    """Yield a row for each family: its smallest size that holds, or the largest that does not."""
    search = plan.search
    for family in search.families:
        found = search.of_family(family)
        holding = [size for size in found if search.holds(family.of_size(size))]
        size = min(holding) if holding else max(found, default=None)
        if size is None:
            yield [str(family), "-", "-", "-", "-", "-", _why_not(plan, family)]
        else:
            yield [str(family), *_cells(plan, family.of_size(size))]


def _why_not(plan: Plan, family: DeploymentFamily) -> str:
    """Return why no size of the family was simulated."""
    if family.least > plan.most:
        return f"hopeless below {family.least:,} workers" if family.least < 10_000 else "too slow for the TBT"
    least = family.of_size(family.least)
    return f"at least {least.topology}, {least.price:.2f} an hour: dearer than the answer"


def _check_rows(plan: Plan) -> Iterator[list[str]]:
    answer = plan.search.answer
    assert answer is not None
    checked = [answer, *(other for other in answer.neighbours if other in plan.search.found)]
    for deployment in sorted(checked, key=lambda found: (found.size, found.topology.prefill_workers)):
        _, *cells = _cells(plan, deployment)
        yield [str(deployment.topology), *cells]


def _cells(plan: Plan, deployment: PlannedDeployment) -> list[str]:
    outcomes = plan.search.outcomes(deployment)
    lacks = plan.promise.shortfalls(outcomes)
    return [str(deployment.topology), f"{deployment.price:.2f}", *_kept(outcomes), "; ".join(lacks) or "keeps all"]


def _kept(outcomes: Sequence[Outcome]) -> list[str]:
    speed = be_tokens_per_s(outcomes)
    has_documents = total(outcomes, ServiceClass.BE).asked > 0
    return [
        attainment_text(outcomes, ServiceClass.RT),
        attainment_text(outcomes, ServiceClass.BE),
        f"{speed:,.0f}" if has_documents else "-",
    ]


# --- JSON


def plan_document(plan: Plan) -> str:
    """Return the plan as JSON: only `took_s` differs between two runs of the same question."""
    search, answer = plan.search, plan.search.answer
    tree = {
        "format": _FORMAT,
        "question": dict(plan.question),
        "promise": asdict(plan.promise),
        "took_s": plan.took_s,
        "is_interrupted": plan.is_interrupted,
        "is_checked": search.is_checked,
        "answer": None if answer is None else _deployment_tree(plan, answer),
        "families": [_family_tree(plan, family) for family in search.families],
        "deployments": [_deployment_tree(plan, deployment) for deployment in search.found],
        "loads": [{"rate": rate, **_outcome_tree(outcome)} for rate, outcome in plan.loads],
    }
    return json.dumps(tree, indent=1, allow_nan=False) + "\n"


def _family_tree(plan: Plan, family: DeploymentFamily) -> dict[str, Any]:
    sizes = sorted(plan.search.of_family(family))
    return {"device": family.offer.device, "kind": family.kind, "least": family.least, "simulated": sizes}


def _deployment_tree(plan: Plan, deployment: PlannedDeployment) -> dict[str, Any]:
    outcomes = plan.search.outcomes(deployment)
    return {
        "device": deployment.offer.device,
        "topology": str(deployment.topology),
        "gpus": deployment.gpus,
        "price": deployment.price,
        "holds": plan.search.holds(deployment),
        "lacks": plan.promise.shortfalls(outcomes),
        "runs": {str(seed): _outcome_tree(run) for seed, run in sorted(plan.search.found[deployment].items())},
    }


def _outcome_tree(outcome: Outcome) -> dict[str, Any]:
    return {
        "rt_attainment": figure_tree(outcome.rt.attainment),
        "be_attainment": figure_tree(outcome.be.attainment),
        "be_tokens_per_s": figure_tree(be_tokens_per_s([outcome])),
        "requests": outcome.rt.asked + outcome.be.asked,
        "is_cut": outcome.is_cut,
    }


# --- Pictures


def plot_plan(plan: Plan, path: Path) -> None:
    figure = new_figure(13 if plan.loads else 8, 5)
    axes = figure.subplots(1, 2 if plan.loads else 1, squeeze=False)[0]
    _draw_sizes(plan, axes[0])
    if plan.loads:
        _draw_loads(plan, axes[1])
    save_figure(figure, path)


def _draw_sizes(plan: Plan, axis: Axes) -> None:
    """Draw the lower of both classes' attainments; an arrow down where a run ended early, so that it would be lower."""
    for number, family in enumerate(plan.search.families):
        found = plan.search.of_family(family)
        if found:
            _draw_family(family, found, f"C{number}", axis)
    answer = plan.search.answer
    if answer is not None:
        place = answer.price, least_attainment(plan.search.outcomes(answer))
        axis.annotate(str(answer), place, xytext=(4, -14), textcoords="offset points")
    axis.axhline(plan.promise.attain, color="#888888", linestyle=":", linewidth=1)
    label_axis(axis, "attainment against size", "price of all workers, an hour", "share of requests in time")


def _draw_family(family: DeploymentFamily, found: Mapping[int, list[Outcome]], colour: str, axis: Axes) -> None:
    prices = [family.of_size(size).price for size in found]
    kept = [least_attainment(outcomes) for outcomes in found.values()]
    axis.plot(prices, kept, color=colour, label=str(family))
    for price, share, outcomes in zip(prices, kept, found.values(), strict=True):
        marker = "v" if any(outcome.is_cut for outcome in outcomes) else "o"
        axis.plot(price, share, marker=marker, color=colour)


def _draw_loads(plan: Plan, axis: Axes) -> None:
    for service in ServiceClass:
        points = [(rate, total([outcome], service).attainment) for rate, outcome in plan.loads]
        if any(isfinite(kept) for _, kept in points):
            axis.plot(*zip(*points, strict=True), marker="o", label=NAMES[service])
            axis.axhline(plan.promise.least(service), color="#888888", linestyle=":", linewidth=1)
    label_axis(axis, f"attainment of {plan.search.answer}", "arrivals in a second", "share of requests in time")
