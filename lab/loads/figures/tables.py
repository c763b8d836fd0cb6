"""Rows as text for people and as CSV; requests as rows, with times in seconds since their run began."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import Any

from alignedserve.errors import SimulateError, file_errors
from alignedserve.lab.loads.figures.request_figures import (
    attains,
    end_to_end_s,
    gaps_s,
    has_finished,
    in_time,
    mean_tpot_s,
    ttft_s,
)
from alignedserve.lab.loads.records.distribution import percentile
from alignedserve.lab.loads.records.records import RequestRecord


def write(path: Path, text: str) -> None:
    with file_errors(SimulateError, path):
        path.write_text(text, encoding="utf-8")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as text, the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_aligned(row, widths) for row in rows)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    others = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
    return "   ".join([row[0].ljust(widths[0]), *others]).rstrip()


REQUEST_TITLES = (
    "id", "service", "job", "outcome", "arrival_s", "ended_s", "prompt_tokens", "output_tokens",
    "ttft_s", "mean_tpot_s", "p99_tbt_s", "end_to_end_s", "attained", "tokens_in_time", "preempted", "refused",
)  # fmt: skip


def request_row(request: RequestRecord, began_at: float) -> Iterator[Any]:
    yield from (request.id, request.service.value, request.job, request.outcome.value)
    yield from (request.arrival_at - began_at, request.ended_at - began_at)
    yield from (request.num_prompt, len(request.token_at))
    yield from (ttft_s(request), mean_tpot_s(request), percentile(gaps_s(request), 99))
    yield end_to_end_s(request) if has_finished(request) else None
    yield from (int(attains(request)), sum(in_time(request)), request.num_preempted, request.refused)


def csv_text(titles: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    file = StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(titles)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return file.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.9g}" if isfinite(value) else ""
    return value


class Unit(Enum):
    """The unit of a figure: the factor that a table multiplies by, and the suffix of the number."""

    NUMBER = (1.0, "")
    SHARE = (100.0, " %")
    SECONDS = (1.0, " s")
    MILLISECONDS = (1000.0, " ms")
    PER_SECOND = (1.0, "/s")

    def show(self, value: float, spread: float = 0.0) -> str:
        factor, suffix = self.value
        if not isfinite(value):
            return "-"
        around = f" ± {_digits(spread * factor)}" if spread else ""
        return f"{_digits(value * factor)}{around}{suffix}"


def _digits(value: float) -> str:
    size = abs(value)
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.3g}"
