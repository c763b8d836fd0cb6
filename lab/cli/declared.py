"""Flags that are declared once, as the fields of a dataclass: the parser and the options are made of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, TypeVar

from alignedserve.cli.terminal.arguments import Once

Flags = TypeVar("Flags")
AddsFlag = Callable[[argparse._ActionsContainer], None]


def flag(metavar: str | None, help: str, default: Any = None, **how: Any) -> Any:
    """Declare a flag of the field's name; what it takes is what argparse takes."""
    return field(default=default, metadata={"metavar": metavar, "help": help, "action": Once, **how})


def flag_of(add: AddsFlag) -> Any:
    """Declare a flag that several commands have: this function adds it."""
    return field(default=(), metadata={"add": add})


def add_flags(group: argparse._ActionsContainer, declared: type) -> None:
    for one in fields(declared):
        if (add := one.metadata.get("add")) is not None:
            add(group)
        else:
            group.add_argument(f"--{one.name.replace('_', '-')}", default=one.default, **one.metadata)


def flags_of(args: argparse.Namespace, declared: type[Flags]) -> Flags:
    """Return what the command line says of these flags."""
    kind: Any = declared  # a dataclass, which types cannot ask for
    return declared(**{one.name: getattr(args, one.name) for one in fields(kind) if hasattr(args, one.name)})
