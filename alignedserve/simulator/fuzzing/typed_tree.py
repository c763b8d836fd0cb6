"""Dataclasses from the trees that JSON gives, by their own types: what is wrong is named, with what belongs there.

The inverse of `dataclasses.asdict`. A union of dataclasses is told apart by `kind`, the name of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


class WrongTree(Exception):
    """Says in a line which key is wrong, and what it must be."""


def typed(of: Any, value: Any, key: str = "") -> Any:
    """The value that a tree says, which stands at this key."""
    kinds = get_args(of) if get_origin(of) in (Union, UnionType) else (of,)
    if value is None and NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    if len(kinds) > 1:
        return _one_of(kinds, value, key)
    return _value(kinds[0], value, key)


def _value(of: Any, value: Any, key: str) -> Any:
    if is_dataclass(of):
        return _dataclass(of, _object(value, key), key)
    if get_origin(of) is tuple:
        if not isinstance(value, list):
            raise _wrong(key, "a list", value)
        return tuple([typed(get_args(of)[0], one, f"{key}[{number}]") for number, one in enumerate(value)])
    if issubclass(of, Enum):
        values = [one.value for one in of]
        if value not in values:
            raise _wrong(key, f"one of {', '.join(values)}", value)
        return of(value)
    fits = type(value) is of or (of is float and type(value) is int)
    if not fits or (of is float and not isfinite(value)):
        raise _wrong(key, _NAMES[of], value)
    return value


def _dataclass(of: Any, tree: Mapping[str, Any], key: str) -> Any:
    hints, known = get_type_hints(of), [one.name for one in fields(of)]
    for name in tree:
        if name not in known:
            raise WrongTree(f"{_below(key, name)} is not known: there are {', '.join(known)}")
    for one in fields(of):
        if one.name not in tree and one.default is MISSING and one.default_factory is MISSING:
            raise WrongTree(f"{_below(key, one.name)} is missing")
    return of(**{name: typed(hints[name], value, _below(key, name)) for name, value in tree.items()})


def _one_of(kinds: tuple[Any, ...], value: Any, key: str) -> Any:
    tree = dict(_object(value, key))
    named = {kind.__name__: kind for kind in kinds}
    kind = tree.pop("kind", None)
    if not isinstance(kind, str) or kind not in named:
        raise _wrong(_below(key, "kind"), f"one of {', '.join(named)}", kind)
    return _dataclass(named[kind], tree, key)


def _object(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(key, "an object", value)
    return value


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _wrong(key: str, wanted: str, value: Any) -> WrongTree:
    return WrongTree(f"{key or 'it'} must be {wanted}, not {value!r:.60}")
