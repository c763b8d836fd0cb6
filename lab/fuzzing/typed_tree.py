"""Build dataclasses from JSON trees by the types of their fields. An error names the wrong key and the wanted value.

This is the inverse of `dataclasses.asdict`. In a union of dataclasses, `kind` holds the name of the class.
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
    """A tree has a wrong key or value. The message says in a line which key, and what it must be."""


def typed(wanted: Any, value: Any, key: str = "") -> Any:
    """Return a value of this type, built from the tree at this key."""
    kinds = get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)
    if value is None and NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    if len(kinds) > 1:
        return _union(kinds, value, key)
    return _value(kinds[0], value, key)


def _value(wanted: Any, value: Any, key: str) -> Any:
    if is_dataclass(wanted):
        return _dataclass(wanted, _object(value, key), key)
    if get_origin(wanted) is tuple:
        if not isinstance(value, list):
            raise _wrong(key, "a list", value)
        return tuple([typed(get_args(wanted)[0], member, f"{key}[{number}]") for number, member in enumerate(value)])
    if issubclass(wanted, Enum):
        values = [member.value for member in wanted]
        if value not in values:
            raise _wrong(key, f"one of {', '.join(values)}", value)
        return wanted(value)
    fits = type(value) is wanted or (wanted is float and type(value) is int)
    if not fits or (wanted is float and not isfinite(value)):
        raise _wrong(key, _NAMES[wanted], value)
    return value


def _dataclass(wanted: Any, tree: Mapping[str, Any], key: str) -> Any:
    hints, known = get_type_hints(wanted), [field.name for field in fields(wanted)]
    for name in tree:
        if name not in known:
            raise WrongTree(f"{_below(key, name)} is not known: there are {', '.join(known)}")
    for field in fields(wanted):
        if field.name not in tree and field.default is MISSING and field.default_factory is MISSING:
            raise WrongTree(f"{_below(key, field.name)} is missing")
    return wanted(**{name: typed(hints[name], value, _below(key, name)) for name, value in tree.items()})


def _union(kinds: tuple[Any, ...], value: Any, key: str) -> Any:
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
