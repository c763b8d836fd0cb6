"""Reads CSV files of requests: `arrival_s,prompt_tokens,output_tokens`, and other columns that are passed over."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from alignedserve.errors import WorkloadError
from alignedserve.simulator.workload.lengths import Pair

_TIME, _PROMPT, _OUTPUT = "arrival_s", "prompt_tokens", "output_tokens"


def read_lengths(path: Path) -> tuple[Pair, ...]:
    return tuple(_pair(row, where) for where, row in _rows(path, (_PROMPT, _OUTPUT)))


def read_trace(path: Path) -> tuple[tuple[float, ...], tuple[Pair, ...]]:
    """When requests arrived, and how long they were."""
    times: list[float] = []
    pairs: list[Pair] = []
    for where, row in _rows(path, (_TIME, _PROMPT, _OUTPUT)):
        times.append(_time(row, where, times[-1] if times else -math.inf))
        pairs.append(_pair(row, where))
    return tuple(times), tuple(pairs)


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str | None]]]:
    """Each line with its place."""
    empty = True
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            _check_columns(path, reader.fieldnames or (), columns)
            for row in reader:
                empty = False
                yield f"{path} line {reader.line_num}", row
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path} is not a CSV file: {error}") from None
    if empty:
        raise WorkloadError(f"{path} has no requests")


def _check_columns(path: Path, given: Sequence[str], needed: tuple[str, ...]) -> None:
    for column in needed:
        if column not in given:
            raise WorkloadError(f"{path} has no column {column}: its first line must name {', '.join(needed)}")


def _time(row: dict[str, str | None], where: str, last: float) -> float:
    text = row[_TIME]
    if not text:
        raise WorkloadError(f"{where}: {_TIME} is empty: a file of lengths alone is read as lengths:PATH, with a rate")
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if not math.isfinite(time):
        raise WorkloadError(f"{where}: {_TIME} must be a number of seconds, not {text!r}")
    if time < last:
        raise WorkloadError(f"{where}: {_TIME} {text} is earlier than the line before: sort the file by it")
    return time


def _pair(row: dict[str, str | None], where: str) -> Pair:
    return _tokens(row, _PROMPT, where), _tokens(row, _OUTPUT, where)


def _tokens(row: dict[str, str | None], column: str, where: str) -> int:
    text = row[column] or ""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise WorkloadError(f"{where}: {column} must be a whole number of 1 or more, not {text!r}")
    return int(text)
