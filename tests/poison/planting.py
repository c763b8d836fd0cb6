"""What runs in the processes of a deployment: functions that strike where the armed request comes by.

    tests ── armed: place, way, seed ──▶ folder ◀── id: as soon as a gateway or the job runner has given it one
                                           │ ▲
                  each wrapped function ◀──┘ └── strikes: a line for each

One request is armed at a time. A wrapped function of another place costs a look at a file.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tests.poison.places import PLACES, SEEN, Place

STEP_S = 5.0  # the limit of a step, and of a copy, where it is not known what they take
_ANSWERS = ContextVar("answers", default=False)  # whether this task of a gateway answers the armed request
_ENTRIES = ("alignedserve.gateway.starting:parse_body", "alignedserve.owner.shell:Owner.open")
_LIMITS = {
    "alignedserve.executor.worker_process": ("UNKNOWN_S",),
    "alignedserve.executor.work_watch": ("ON_GPU_S",),
    "alignedserve.shell.bounded_threads": ("WORK_S",),
}


class PlantedPanic(BaseException):
    """Stands for what libraries in Rust raise where they panic."""


class Armed(NamedTuple):
    place: str
    way: str
    marks: Sequence[str]

    def is_in(self, things: Any) -> bool:
        return any(mark in text for text in map(repr, things) for mark in self.marks)


class Plant:
    """The armed request, as the processes of a deployment see it."""

    def __init__(self, folder: Path) -> None:
        self._armed, self._ids, self._strikes = folder / "armed", folder / "ids", folder / "strikes"
        self._known: tuple[object, Armed | None] = None, None  # what was read, and when those files had changed

    def armed(self) -> Armed | None:
        """Return the armed request, and read its files only where they have changed: steps wait for this."""
        try:
            changed = self._armed.stat().st_mtime_ns, self._ids.stat().st_size
            if self._known[0] != changed:
                told, ids = json.loads(self._armed.read_text()), self._ids.read_text().split()
                self._known = changed, Armed(told["place"], told["way"], [*told["marks"], *ids])
        except FileNotFoundError:
            return None
        return self._known[1]

    def learn(self, id: str) -> None:
        with self._ids.open("a") as file:
            file.write(f"{id}\n")

    def strike(self, way: str) -> None:
        with self._strikes.open("a") as file:
            file.write(f"{os.getpid()} {way}\n")
        if way == SEEN:
            return
        match way:
            case "SIGKILL" | "SIGSEGV":
                os.kill(os.getpid(), signal.Signals[way])
            case "exit 0":
                os._exit(0)
            case "keeps the lock":
                ctypes.PyDLL(None).sleep(10**6)
            case "error":
                raise ZeroDivisionError("planted")
            case "MemoryError":
                raise MemoryError
            case "RecursionError":
                raise RecursionError("planted")
            case "panic":
                raise PlantedPanic("planted")
        while True:
            time.sleep(1.0)

    def wrap(self, place: Place, inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def outer(*given: Any, **named: Any) -> Any:
            armed = self.armed()
            if armed is not None and armed.place == place.name:
                searched = (*given, *named.values()) if place.when is None else place.when(*given, **named)
                if armed.is_in(searched) or (_ANSWERS.get() and place.when is None):
                    self.strike(armed.way)
            return inner(*given, **named)

        return outer

    def wrap_entry(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Learn the id of the armed request, and in which task a gateway answers it."""

        @wraps(inner)
        def outer(*given: Any) -> Any:
            armed = self.armed()
            if armed is not None and armed.is_in(given[1:]):
                _ANSWERS.set(True)
                if (id := getattr(given[1], "id", None)) is not None:
                    self.learn(id)
            return inner(*given)

        return outer


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader, done: Callable[[ModuleType], None]) -> None:
        self._inner, self._done = inner, done

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._done(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Calls `done` with each of these modules as soon as it is loaded."""

    def __init__(self, modules: set[str], done: Callable[[ModuleType], None]) -> None:
        self._modules, self._done = modules, done

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self._modules:
            return None
        self._modules.remove(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = _Loader(spec.loader, self._done)
        return spec


def plant(folder: Path) -> None:
    """Wrap all places, those of modules that are loaded later as soon as they are."""
    planted = Plant(folder)

    def done(module: ModuleType) -> None:
        for place in PLACES:
            _replace(module, place.at, lambda inner, place=place: planted.wrap(place, inner))
        for entry in _ENTRIES:
            _replace(module, entry, planted.wrap_entry)
        for limit in _LIMITS.get(module.__name__, ()):
            setattr(module, limit, STEP_S)

    modules = {at.partition(":")[0] for at in (*_ENTRIES, *(place.at for place in PLACES))} | _LIMITS.keys()
    for name in modules & sys.modules.keys():
        done(sys.modules[name])
    sys.meta_path.insert(0, _Finder(modules - sys.modules.keys(), done))


def _replace(module: ModuleType, at: str, wrapped: Callable[[Any], Any]) -> None:
    named, _, path = at.partition(":")
    if named != module.__name__:
        return
    *within, name = path.split(".")
    owner = getattr(module, within[0]) if within else module
    setattr(owner, name, wrapped(getattr(owner, name)))
