"""A workload from a table in Python: rows, columns, or a dataframe of pandas or polars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from alignedserve.core import ServiceClass
from alignedserve.errors import WorkloadError
from alignedserve.lab.loads.workload.build import trace_stream
from alignedserve.lab.loads.workload.files import TRACE_COLUMNS, FileRequests, Row, trace_of_rows
from alignedserve.lab.loads.workload.load import Mixture

Table: TypeAlias = Mapping[str, Iterable[Any]] | Sequence[Mapping[str, Any]] | Any  # Any: a dataframe

_SERVICE = "service"
_NAME = "trace"  # of the stream, as of a trace that is read from a file
_SOURCE = Path("the table")


def trace_of(table: Table, **keys: Any) -> Mixture:
    """Return the workload of a table with `arrival_s`, `prompt_tokens` and `output_tokens`, as of a trace in a file.

    A column `service` says which requests are `rt` and which `be`; `keys` are those of a trace, such as ttft_s=0.5.
    """
    rows = _rows(table)
    if not rows or _SERVICE not in rows[0]:
        return Mixture((trace_stream(_NAME, _read(rows), dict(keys)),))
    if _SERVICE in keys:
        raise WorkloadError(f"{_SERVICE} is a column of the table, and a key: leave one of them out")
    of_class: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        of_class.setdefault(str(row[_SERVICE]), []).append(row)
    if wrong := sorted({*of_class} - {service.value for service in ServiceClass}):
        raise WorkloadError(f"the table: {_SERVICE} must be rt or be, not {wrong[0]!r:.40}")
    return Mixture(
        tuple(trace_stream(name, _read(of_class[name]), keys | {_SERVICE: name}) for name in sorted(of_class))
    )


def _rows(table: Table) -> list[Mapping[str, Any]]:
    """Return the rows in the order of arrival."""
    if hasattr(table, "columns") and not isinstance(table, Mapping):  # a dataframe
        table = {str(name): list(table[name]) for name in table.columns}
    if isinstance(table, Mapping):
        table = _turned(table)
    if not isinstance(table, Sequence) or not all(isinstance(row, Mapping) for row in table):
        raise WorkloadError("the table must be rows, columns by their names, or a dataframe")
    for column in TRACE_COLUMNS:
        if any(column not in row for row in table):
            raise WorkloadError(f"the table has no {column}: it needs {', '.join(TRACE_COLUMNS)}")
    try:
        return sorted(table, key=lambda row: float(row[TRACE_COLUMNS[0]]))
    except (TypeError, ValueError):
        raise WorkloadError(f"the table: {TRACE_COLUMNS[0]} must be a number of seconds, in each row") from None


def _turned(columns: Mapping[str, Iterable[Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of columns."""
    names, values = [*columns], [[*column] for column in columns.values()]
    if len({len(column) for column in values}) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in zip(names, values, strict=True))
        raise WorkloadError(f"the columns of the table are not equally long: {lengths}")
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def _read(rows: Iterable[Mapping[str, Any]]) -> FileRequests:
    texts = ({name: str(row[name]) for name in TRACE_COLUMNS} for row in rows)
    numbered: Iterable[tuple[str, Row]] = ((f"the table, row {number}", {**text}) for number, text in enumerate(texts))
    return trace_of_rows(numbered, _SOURCE)
