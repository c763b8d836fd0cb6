"""Flags that are declared once, as the fields of a dataclass: the parser and the options are made of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import field, fields
from functools import partial
from typing import Any, TypeVar

from alignedserve.cli.terminal.arguments import Once

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
