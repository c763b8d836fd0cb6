"""The declaration of a setting: its names, its type, its range, and how it is reached.

A setting has one home, a field of the dataclasses in config.py. The loader, the command line, the checks and the
reference page (tools/reference_pages.py) read type, default, range and help text from there. Its names follow from its
path:

    path      server.port                  a place in the YAML file, in `--set`, and in `config.dump`
    variable  ALIGNEDSERVE_SERVER_PORT
    flag      --port                       sections other than server and engine keep a prefix: --log-level
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from functools import cache, partial
from types import NoneType
from typing import Any, get_args, get_type_hints

PREFIX = "ALIGNEDSERVE_"


class Reach(Enum):
    """The places where a setting can be changed."""

    COMMON = "common"  # by flag, variable and file; `serve --help` shows it
    RARE = "rare"  # the same, and only `serve --help-all` shows it
    EXPERIMENT = "experiment"  # by a preset or `--set` alone: a paper's reproduction, an ablation or a test needs it


def setting(
    default: Any,
    help: str,
    *,
    reach: Reach = Reach.RARE,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    aliases: tuple[str, ...] = (),
    secret: bool = False,
    reloads: bool = False,
) -> Any:
    """Return a dataclass field with all that is to be known of the setting; `aliases` are vLLM's flags for the same.
    One that `reloads` may change while the deployment serves: the parts take it from `Place.live`."""
    about = {"help": help, "reach": reach, "least": least, "above": above, "most": most, "aliases": aliases}
    return field(default=default, repr=not secret, metadata={**about, "secret": secret, "reloads": reloads})


common = partial(setting, reach=Reach.COMMON)
experiment = partial(setting, reach=Reach.EXPERIMENT)


@dataclass(frozen=True)
class Setting:
    """A leaf of the tree: which values it takes and what it is called."""

    path: str
    kind: type  # str, int, float, bool, an Enum, or a class with a classmethod `parse` for text
    optional: bool
    default: Any
    # What `setting` was told of it.
    help: str
    reach: Reach
    least: float | None
    above: float | None
    most: float | None
    aliases: tuple[str, ...]
    secret: bool
    reloads: bool

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def variable(self) -> str:
        return PREFIX + self.path.upper().replace(".", "_")

    @property
    def flag(self) -> str:
        name = self.path.rpartition(".")[2]
        prefix = {"": "", "server": "", "engine": "", "kvpool": "pool-"}.get(self.section, f"{self.section}-")
        return f"--{prefix}{name.replace('_', '-')}"

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the flags that set it: an experiment has none, and is said as `--set PATH=VALUE`."""
        return () if self.reach is Reach.EXPERIMENT else (self.flag, *self.aliases)

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(choice.value for choice in self.kind) if issubclass(self.kind, Enum) else ()

    @property
    def placeholder(self) -> str:
        """Return what stands for the value behind the flag: its choices, or a word for its type."""
        names = {int: "N", float: "X"}
        return "|".join(self.choices) or names.get(self.kind, self.path.rpartition(".")[2].upper())

    def problem(self, value: Any) -> str | None:
        """Return why a value of the right type cannot be taken, or None."""
        if value is None or self.kind not in (str, int, float):
            return None
        if isinstance(value, str):
            return None if value.strip() else "must not be empty"
        if isinstance(value, float) and not math.isfinite(value):
            return f"must be a finite number, not {value}"
        if self.least is not None and value < self.least:
            return f"must be {self.least} or more, not {value}"
        if self.above is not None and value <= self.above:
            return f"must be more than {self.above}, not {value}"
        if self.most is not None and value > self.most:
            return f"must be {self.most} or less, not {value}"
        return None


_hints_of = cache(get_type_hints)  # they are compiled each time


def settings_of(part: type, above: str = "") -> Iterator[Setting]:
    """Yield every leaf of a tree of dataclasses."""
    hints = _hints_of(part)
    for declared in fields(part):
        path = f"{above}{declared.name}"
        if is_section(declared):
            yield from settings_of(hints[declared.name], f"{path}.")
        else:
            inner = [kind for kind in get_args(hints[declared.name]) if kind is not NoneType]
            kind = inner[0] if inner else hints[declared.name]
            yield Setting(path, kind, bool(inner), declared.default, **declared.metadata)


def leaves(part: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every path with the value that stands there."""
    for declared in fields(part):
        path, value = f"{above}{declared.name}", getattr(part, declared.name)
        if is_section(declared):
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def is_section(declared: Field[Any]) -> bool:
    """Return whether the field holds a section: `setting` did not make it."""
    return not declared.metadata
