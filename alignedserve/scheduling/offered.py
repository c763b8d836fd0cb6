"""Schedulers and memories that are found by name: the papers' (alignedserve.papers), and schedulers that installed
packages offer.

A package offers a subclass of `Scheduler` as an entry point:

    [project.entry-points."alignedserve.schedulers"]
    mine = "my_package.scheduler:Mine"

`--set schedule.scheduler=mine` plans with it. `my_package.scheduler:Mine` says the same, where that can be imported.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from alignedserve.errors import ConfigError

PAPERS = "alignedserve.papers"  # found by name: the product imports nothing of it, and runs without it
NO_PAPERS = f"is part of {PAPERS}, which is not installed"
ENTRY_POINTS = "alignedserve.schedulers"


@cache
def of_papers(part: str) -> Any:
    """Return this module of the papers; None where the package is not installed."""
    return import_module(f"{PAPERS}.{part}") if find_spec(PAPERS) is not None else None


def block_use(memory: str) -> Any:
    """Return how a memory of the papers uses blocks. Raises ConfigError."""
    papers = of_papers("rules")
    if papers is None:
        raise ConfigError(f"schedule.memory {memory!r:.40} {NO_PAPERS}")
    return papers.block_use_of(memory)


@cache
def offered(name: str) -> Any:
    """Return the class of the scheduler that a package offers under this name. Raises ConfigError."""
    from importlib.metadata import EntryPoint, entry_points  # here: few deployments look for any

    points = entry_points(group=ENTRY_POINTS)
    if ":" not in name and name not in points.names:
        also = f", and {', '.join(sorted(points.names))} of installed packages" if points.names else ""
        raise ConfigError(
            f"schedule.scheduler {name!r:.40} is not known: choose {_known()}{also}, or offer it as an entry point of"
            f" {ENTRY_POINTS}"
        )
    point = EntryPoint(name, name, ENTRY_POINTS) if ":" in name else points[name]
    try:
        found = point.load()
    except Exception as error:
        why = f"{type(error).__name__}: {error!s:.200}"
        raise ConfigError(f"schedule.scheduler {name!r:.60} cannot be imported: {why}") from None
    if not hasattr(found, "rules") or not hasattr(found, "plan"):
        raise ConfigError(f"schedule.scheduler {name!r:.60} is no scheduler: write a subclass of Scheduler")
    return found


def _known() -> str:
    papers = of_papers("names")
    return "aligned" if papers is None else ", ".join(known.value for known in papers.SchedulerName)
