"""What a setting is: its names, its type and what it takes.

A setting has one home, a field of the dataclasses in config.py: type, default, range, help and flag are read
from there, by the loader, by the command line and by the checks. Its other names follow from its path:

    path      server.port                  a place in the YAML file, and in `config.dump`
    variable  ALIGNEDSERVE_SERVER_PORT
    flag      --port                       sections other than server and engine keep a prefix: --log-level
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from types import NoneType
from typing import Any, cast, get_args, get_type_hints

PREFIX = "ALIGNEDSERVE_"


def setting(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    aliases: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """A field with all that is to be known of it; `aliases` are vLLM's flags for the same."""
    about = {"help": help, "least": least, "above": above, "most": most, "aliases": aliases, "secret": secret}
    return field(default=default, repr=not secret, metadata=about)


@dataclass(frozen=True)
class Setting:
    """One leaf of the tree: what it takes and how it is called."""

    path: str
    kind: type  # str, int, float, bool, an Enum, or what has a classmethod `parse` for text
    optional: bool
    default: Any
    about: Mapping[str, Any]  # the field's metadata

    @property
    def help(self) -> str:
        return cast(str, self.about["help"])

    @property
    def secret(self) -> bool:
        return cast(bool, self.about["secret"])

    @property
    def variable(self) -> str:
        return PREFIX + self.path.upper().replace(".", "_")

    @property
    def flags(self) -> tuple[str, ...]:
        section, _, name = self.path.rpartition(".")
        prefix = {"": "", "server": "", "engine": "", "kvpool": "pool-"}.get(section, f"{section}-")
        return (f"--{prefix}{name.replace('_', '-')}", *self.about["aliases"])

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(one.value for one in self.kind) if issubclass(self.kind, Enum) else ()

    def problem(self, value: Any) -> str | None:
        """Why a value of the right type cannot be taken."""
        if value is None or self.kind not in (str, int, float):
            return None
        if isinstance(value, str):
            return None if value.strip() else "must not be empty"
        least, above, most = self.about["least"], self.about["above"], self.about["most"]
        if isinstance(value, float) and not math.isfinite(value):
            return f"must be a finite number, not {value}"
        if least is not None and value < least:
            return f"must be {least} or more, not {value}"
        if above is not None and value <= above:
            return f"must be more than {above}, not {value}"
        if most is not None and value > most:
            return f"must be {most} or less, not {value}"
        return None


def settings_of(part: type, above: str = "") -> Iterator[Setting]:
    """Every leaf of a tree of dataclasses."""
    hints = get_type_hints(part)
    for one in fields(part):
        path = f"{above}{one.name}"
        if is_section(one):
            yield from settings_of(hints[one.name], f"{path}.")
        else:
            inner = [kind for kind in get_args(hints[one.name]) if kind is not NoneType]
            kind = inner[0] if inner else hints[one.name]
            yield Setting(path, kind, bool(inner), one.default, one.metadata)


def leaves(part: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every path and the value that stands there."""
    for one in fields(part):
        path, value = f"{above}{one.name}", getattr(part, one.name)
        if is_section(one):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def is_section(one: Field[Any]) -> bool:
    """A field that `setting` did not make holds a section."""
    return not one.metadata
