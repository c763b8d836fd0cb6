"""Draws attainment against size for each family, and against load for the answer."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from alignedserve.core import ServiceClass
from alignedserve.lab.planning.deployments import DeploymentFamily
from alignedserve.lab.planning.outcome import NAMES, Outcome, least_attainment, total
from alignedserve.lab.planning.report import Plan
from alignedserve.lab.reports.plots import label_axis
from alignedserve.loads.figures.plotting import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        points = [(point.rate, total([point.outcome], service).attainment) for point in plan.loads]
        if any(isfinite(kept) for _, kept in points):
            axis.plot(*zip(*points, strict=True), marker="o", label=NAMES[service])
            axis.axhline(plan.promise.least(service), color="#888888", linestyle=":", linewidth=1)
    label_axis(axis, f"attainment of {plan.search.answer}", "arrivals in a second", "share of requests in time")
