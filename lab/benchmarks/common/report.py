"""Build the command line of every benchmark, and print a figure as a JSON line: baseline, goal and CPU beside it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection
from typing import TypeVar

from alignedserve.machine.resources import processor_name

T = TypeVar("T")
_missed: list[str] = []  # names of figures


def command(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the module's docstring, with the defaults of its options."""
    return argparse.ArgumentParser(description=doc, formatter_class=_Help)


class _Help(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.help or ""
        has_default = action.default not in (None, False, argparse.SUPPRESS)
        return shown + " (default: %(default)s)" if has_default and "default" not in shown else shown


def several(kind: Callable[[str], T], known: Collection[T] = ()) -> Callable[[str], list[T]]:
    """Return a parser for an option with values that are separated by commas, all of them known if any is."""

    def values(text: str) -> list[T]:
        found = [kind(value) for value in text.split(",") if value]
        if unknown := [value for value in found if known and value not in known]:
            raise argparse.ArgumentTypeError(f"no {unknown[0]}: there are {', '.join(map(str, known))}")
        return found

    return values


def report(
    name: str,
    value: float,
    unit: str,
    *,
    baseline: float | None = None,
    goal: float | None = None,
    at_least: bool = False,
) -> None:
    """Print a figure, and note when it misses its goal: it is larger, or, with `at_least`, smaller."""
    ratio = value / baseline if baseline else None
    met = None if goal is None else value >= goal if at_least else value <= goal
    if met is False:
        _missed.append(name)
    figures = {"value": value, "baseline": baseline, "ratio": ratio, "goal": goal}
    rounded = {key: None if figure is None else float(f"{figure:.4g}") for key, figure in figures.items()}
    line = {"name": name, "value": rounded["value"], "unit": unit, **rounded, "met": met, "cpu": processor_name()}
    print(json.dumps(line), flush=True)


def status() -> int:
    """Return the exit status of a benchmark: 1 if a figure has missed its goal."""
    return 1 if _missed else 0
