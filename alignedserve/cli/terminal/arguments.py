"""Types of flags' values, with errors that say what is wanted, and checks of which flags go together.

A flag that would be ignored is refused, since its user expects something of it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection
from dataclasses import field, fields
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from alignedserve.errors import ConfigError

Value = TypeVar("Value")


class Once(argparse.Action):
    """Stores the value and notes that it was given; a second value is refused, since the first would be ignored."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        assert flag is not None
        if flag in given(namespace):
            raise ConfigError(f"{flag} is given twice")
        namespace.given = given(namespace) | {flag}
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)


class Each(argparse.Action):
    """Adds the value to the values that were given before it."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        assert flag is not None
        namespace.given = given(namespace) | {flag}
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), values))


def given(args: argparse.Namespace) -> frozenset[str]:
    """Return the flags that were written, those too that only repeat a default."""
    flags: frozenset[str] = getattr(args, "given", frozenset())
    return flags


def only_one(args: argparse.Namespace, *flags: str) -> str | None:
    """Return which of these flags was written; refuse two of them."""
    here = [flag for flag in flags if flag in given(args)]
    if len(here) > 1:
        raise ConfigError(f"{here[0]} and {here[1]} exclude each other")
    return here[0] if here else None


def check_goes_with(args: argparse.Namespace, flag: str, others: tuple[str, ...], here: Collection[str]) -> None:
    """Refuse the flag where none of the others is among `here`, the flags that are in force, defaults included."""
    if flag in given(args) and not set(here) & set(others):
        *first, last = others
        raise ConfigError(f"{flag} goes only with {' or '.join(filter(None, (', '.join(first), last)))}")


# --- Values


def whole(least: int) -> Callable[[str], int]:
    return _parser(int, lambda value: value >= least, f"a whole number of {least} or more")


def wholes(least: int) -> Callable[[str], tuple[int, ...]]:
    return _list_of(whole(least), f"whole numbers of {least} or more, such as 1,2,3")


def above_zero(text: str) -> float:
    return _parser(float, lambda value: 0 < value < inf, "a number above 0")(text)


def zero_or_more(text: str) -> float:
    return _parser(float, lambda value: 0 <= value < inf, "a number of 0 or more")(text)


def share(text: str) -> float:
    return _parser(float, lambda value: 0 < value <= 1, "a share above 0 and up to 1")(text)


def all_above_zero(text: str) -> tuple[float, ...]:
    return _list_of(above_zero, "numbers above 0, such as 5,10,20")(text)


def file(text: str) -> Path:
    """Return the path of a file or folder; an empty name would mean the current folder, and is refused."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must be the name of a file or folder, not empty")
    return Path(text)


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold."""
    folder = path.parent
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a folder: name a file")
    if not os.path.isdir(folder):
        raise ConfigError(f"{path} cannot be written: {folder} is not a folder")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written: Permission denied")
    if len(os.fsencode(path.name)) > 255:
        raise ConfigError(f"{path.name:.40}... cannot be written: File name too long")


def filled(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _parser(kind: Callable[[str], Value], is_taken: Callable[[Value], bool], wanted: str) -> Callable[[str], Value]:
    def parse(text: str) -> Value:
        try:
            value = kind(text)
        except ValueError:
            raise _wrong(wanted, text) from None
        if not is_taken(value):
            raise _wrong(wanted, text)
        return value

    return parse


def _list_of(parse_item: Callable[[str], Value], wanted: str) -> Callable[[str], tuple[Value, ...]]:
    def parse(text: str) -> tuple[Value, ...]:
        try:
            values = tuple(map(parse_item, text.split(",")))
        except argparse.ArgumentTypeError:
            raise _wrong(wanted, text) from None
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text!r:.60} names one of them twice")
        return values

    return parse


def _wrong(wanted: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"must be {wanted}, not {text!r:.60}")


Flags = TypeVar("Flags")
AddsFlag = Callable[[argparse._ActionsContainer], None]


def flag(metavar: str | None, help: str, default: Any = None, **how: Any) -> Any:
    """Declare a flag of the field's name, or of this `name`; what it takes is what argparse takes. A `group` begins
    with it."""
    return field(default=default, metadata={"metavar": metavar, "help": help, "action": Once, **how})


last = partial(flag, action="store")  # a flag whose last value counts: an alias of the shell may have given one before


def switch(help: str, **how: Any) -> Any:
    """Declare a flag that takes no value."""
    return flag(None, help, default=False, nargs=0, const=True, **how)


def argument(metavar: str, help: str | None = None, **how: Any) -> Any:
    """Declare an argument that is no flag."""
    return field(metadata={"metavar": metavar, "help": help, "name": None, **how})


def flag_of(add: AddsFlag, default: Any = None) -> Any:
    """Declare a flag that several commands have: this function adds it."""
    return field(default=default, metadata={"add": add})


def add_flags(parser: argparse.ArgumentParser, declared: type) -> None:
    group: argparse._ActionsContainer = parser
    for one in fields(declared):
        how = dict(one.metadata)
        if (title := how.pop("group", None)) is not None:
            group = parser.add_argument_group(title)
        if (add := how.get("add")) is not None:
            add(group)
        elif (name := how.pop("name", f"--{one.name.replace('_', '-')}")) is None:
            group.add_argument(one.name, **how)
        else:
            group.add_argument(name, dest=one.name, default=one.default, **how)


def flags_of(args: argparse.Namespace, declared: type[Flags]) -> Flags:
    """Return what the command line says of these flags."""
    kind: Any = declared  # a dataclass, which types cannot ask for
    return declared(**{one.name: getattr(args, one.name) for one in fields(kind) if hasattr(args, one.name)})
