"""The source of policies: a Python file, or a package that offers them as an entry point `alignedserve.policies`.

The text of a file travels with the configuration, so that all parts run the same policies wherever they are. A package
has to be installed wherever a part runs.
"""

from __future__ import annotations

import linecache
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import isabstract, isclass, signature
from pathlib import Path
from types import ModuleType
from typing import Any

from alignedserve.errors import ConfigError
from alignedserve.policies.guard import told
from alignedserve.policies.kinds import KINDS, OwnPolicy, PolicyKind

ENTRY_POINTS = "alignedserve.policies"


@dataclass(frozen=True)
class PolicySource:
    name: str  # of the file, or of the entry point
    text: str | None = None  # the file's; None: it is an entry point

    @classmethod
    def parse(cls, said: str) -> PolicySource:
        """Return the source of this name, or the source whose `str` this is. Raises ConfigError."""
        name, is_whole, text = said.partition("\n")
        if is_whole:
            return cls(name, text)
        if not name.endswith(".py") and not Path(name).is_file():
            return cls(name)
        try:
            return cls(name, Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"the policy {name} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"the policy {name} cannot be read: it is not text in UTF-8") from None

    def decides(self, kind: PolicyKind) -> bool:
        return kind in classes_of(self)

    def make(self, kind: PolicyKind, *given: Any) -> OwnPolicy:
        """Return a new policy for this decision, made with what is given. Raises ConfigError."""
        return made(self, kind, *given)

    def __str__(self) -> str:
        """Return all of it as a text that `parse` takes."""
        return self.name if self.text is None else f"{self.name}\n{self.text}"


@dataclass(frozen=True)
class GivenPolicies(PolicySource):
    """Classes of Python code that starts parts in its own process, as simulations do: they have no text."""

    classes: tuple[type[OwnPolicy], ...] = ()

    @classmethod
    def of_classes(cls, *classes: type) -> GivenPolicies:
        return cls(" and ".join(given.__name__ for given in classes), classes=classes)


@cache
def classes_of(source: PolicySource) -> Mapping[PolicyKind, type[OwnPolicy]]:
    """Import the source, and return its class for each decision that it makes. Raises ConfigError."""
    try:
        defined = [it for home in _homes(source) for it in _classes_in(home)]
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"the policy {source.name} cannot be imported: {told(error, source.name)}") from None
    all_found = [found for found in defined if not isabstract(found)]
    classes = {found.kind: found for found in all_found}
    if len(classes) < len(all_found):
        raise ConfigError(f"the policy {source.name} has two classes for one decision: {_names(all_found)}")
    if not classes and (unwritten := [found for found in defined if hasattr(found, "method")]):
        first = unwritten[0]
        raise ConfigError(f"the policy {source.name} has no method {first.method} in its class {first.__name__}")
    if not classes:
        names = f"{_names(KINDS)}, Scheduler"
        raise ConfigError(f"the policy {source.name} has no class for a decision: write a subclass of {names}")
    return classes


def check(source: PolicySource | None) -> PolicySource | None:
    """Return the source after its policies were made once. Raises ConfigError."""
    if source is not None:
        for kind, policy in classes_of(source).items():
            made(source, kind, *policy.made_with)
    return source


def made(source: PolicySource, kind: PolicyKind, *given: Any) -> OwnPolicy:
    """Return a new policy. Raises ConfigError."""
    policy = classes_of(source)[kind]
    try:
        found = policy(*given)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the policy {source.name} cannot make {policy.__name__}: {told(error, source.name)}"
        ) from None
    asked = next(base for base in reversed(policy.__mro__) if policy.method in vars(base))
    wanted = [*signature(getattr(asked, policy.method)).parameters][1:]
    if not _takes(getattr(found, policy.method), len(wanted)):
        method = f"{policy.__name__}.{policy.method}"
        raise ConfigError(
            f"the policy {source.name} is asked with {' and '.join(wanted)}, which {method} does not take"
        )
    return found


def _takes(method: Callable[..., Any], number: int) -> bool:
    try:
        signature(method).bind(*range(number))
    except TypeError:
        return False
    return True


def _homes(source: PolicySource) -> Sequence[Any]:
    """Return the module of a source, or its classes."""
    if isinstance(source, GivenPolicies):
        return source.classes
    return [_offered(source.name) if source.text is None else _imported(source.name, source.text)]


def _imported(name: str, text: str) -> ModuleType:
    module = ModuleType(f"policy_{zlib.crc32(text.encode()):08x}_{Path(name).stem}")
    module.__file__ = name
    sys.modules[module.__name__] = module  # dataclasses of the file look for it
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name  # for tracebacks, on any machine
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def _offered(name: str) -> Any:
    from importlib.metadata import entry_points  # here: few deployments look for any

    offered = entry_points(group=ENTRY_POINTS)
    if name not in offered.names:
        there = f": there are {', '.join(sorted(offered.names))}" if offered.names else ""
        raise ConfigError(f"the policy {name!r:.60} is neither a file nor an entry point of {ENTRY_POINTS}{there}")
    return offered[name].load()


def _classes_in(found: Any) -> Iterable[type[OwnPolicy]]:
    """Return the policies of a module that are defined there, or the class itself."""
    if isclass(found):
        members = [found]
    else:
        members = [it for it in vars(found).values() if isclass(it) and it.__module__ == found.__name__]
    return [it for it in members if issubclass(it, OwnPolicy)]


def _names(classes: Iterable[type]) -> str:
    return ", ".join(kind.__name__ for kind in classes)
