"""Finds papers and figures by the names that users write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from alignedserve.config.sources import hint
from alignedserve.errors import SimulateError
from alignedserve.lab.reproduce import accelgen, aligned_serve, alise, apt_serve, bros
from alignedserve.lab.reproduce.figure import Paper

_PAPERS = (aligned_serve.PAPER, bros.PAPER, alise.PAPER, accelgen.PAPER, apt_serve.PAPER)
PAPERS: Mapping[str, Paper] = {paper.name: paper for paper in _PAPERS}


def chosen(name: str | None, numbers: Sequence[str] | None) -> tuple[Paper, ...]:
    """Return the paper of this name with the figures of these numbers; without a name all papers."""
    if name is None:
        return _PAPERS
    if name not in PAPERS:
        raise SimulateError(f"there is no paper {name!r:.40}: there are {', '.join(PAPERS)}{hint(name, PAPERS)}")
    return (PAPERS[name] if numbers is None else _with_figures(PAPERS[name], numbers),)


def _with_figures(paper: Paper, numbers: Sequence[str]) -> Paper:
    found = {figure.number: figure for figure in paper.figures}
    for number in numbers:
        if number not in found:
            known = ", ".join(found)
            raise SimulateError(f"{paper.name} has no figure {number!r:.40} here: it has {known}{hint(number, found)}")
    return replace(paper, figures=tuple(found[number] for number in dict.fromkeys(numbers)))
