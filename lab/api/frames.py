"""Tables of a run: a dataframe of pandas or polars where one of them is installed, else columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeAlias

Columns: TypeAlias = Mapping[str, Sequence[Any]]
Frame: TypeAlias = Any  # pandas.DataFrame, polars.DataFrame, or dict[str, list]

_LIBRARIES = ("pandas", "polars")


def columns_of(titles: Sequence[str], rows: Iterable[Iterable[Any]]) -> Columns:
    table = [*map(tuple, rows)]
    return {title: [row[place] for row in table] for place, title in enumerate(titles)}


def frame_of(columns: Columns) -> Frame:
    for library in _LIBRARIES:
        with suppress(ImportError):
            return import_module(library).DataFrame(columns)
    return columns
