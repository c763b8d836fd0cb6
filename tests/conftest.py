"""Settings and fixtures that the tests of every folder share."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from math import inf
from pathlib import Path

import pytest
from hypothesis import settings

from alignedserve.fallbacks import fallbacks, works
from alignedserve.lab.processes import ONE_THREAD
from alignedserve.progress import ProgressBar
from tests import rare, times
from tests.processes import Processes
from tests.times import Timing

SOAK = bool(os.environ.get("SOAK"))
NEW_DRAWS = bool(os.environ.get("NEW_DRAWS"))  # by `python -m tests.draws`


def examples(usual: int) -> int:
    """Return how many examples a property test draws: few in each run, for `make draws` adds new ones to each, and many
    in the long form."""
    return 5 * usual if SOAK else max(1, 3 * usual // 10)


# How long a machine takes for an example is no property of what is tested, so there is no deadline. The examples are
# the same every time, so that a difference between runs comes from a change and not from luck; the long form and `make
# draws` draw new examples, and print how a failure is run again.
IS_NEW = SOAK or NEW_DRAWS
settings.register_profile("ours", deadline=None, derandomize=not IS_NEW, max_examples=examples(100), print_blob=IS_NEW)
settings.load_profile("ours")

# Choose Triton's interpreter before anything imports Triton. With a GPU its kernels are compiled, and tested by
# tests/gpu.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Set these before torch and numpy are loaded. As many test processes run as there are cores, so each computes in one
# thread: two that wait for each other spin, and took 13 times the processor time of one in transformers' passes over
# SmolLM2 on a busy machine. Tests of threads, and workers, set their number themselves; those soon sleep while they
# wait (docs/how/kernels.md).
for _name, _value in (*ONE_THREAD.items(), ("GOMP_SPINCOUNT", "1000")):
    os.environ.setdefault(_name, _value)

# A process in the background ignores SIGINT, and every program that the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests that start whole deployments, and wait for half of their time. Deployments have timeouts long enough for a
# machine that runs three at a time.
WAITS = ("cluster", "end_to_end", "third_party")

# A test of a deployment that others share (tests/end_to_end/conftest.py).
_SHARES = re.compile(r"^(?:async )?def test_\w+\([^)]*\b(?:deployment|shared): Deployment", re.MULTILINE)

_timings: list[Timing] = []


def _processor_s() -> float:
    """Return the processor time of this process, and of processes that it started and that have ended."""
    return sum(os.times()[:4])


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(rare.Plugin(), "rare")
    pluginmanager.register(Processes(by_group, import_for_all, keep_times), "processes")


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly:
        times.begin(times.folder_of(config))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:  # noqa: ARG001  (the hook's name)
    """Collect no garbage while tests are collected: ten thousand of them are made, and all stay."""
    with without_garbage():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with timed(item.nodeid, is_rare=rare.is_rare(item)):
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Time the end of what all tests share by itself: the last test, whichever that is, has not caused it."""
    if nextitem is not None:
        return (yield)
    with timed(times.SHARED):
        return (yield)


@contextmanager
def without_garbage() -> Iterator[None]:
    """Let all that is made stay: nothing looks for garbage among it, now or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def timed(what: str, *, is_rare: bool = False) -> Iterator[None]:
    """Keep what this takes, less what is timed within it."""
    began, processor_s, within = time.monotonic(), _processor_s(), len(_timings)
    try:
        yield
    finally:
        wall_s, used_s = time.monotonic() - began, _processor_s() - processor_s
        inner = _timings[within:]
        wall_s -= sum(timing.wall_s for timing in inner)
        _timings.append(Timing(what, wall_s, used_s - sum(timing.processor_s for timing in inner), is_rare))


def keep_times(config: pytest.Config, process: str) -> None:
    """Keep what this process's tests took (tests/times.py)."""
    if _timings:
        times.keep(_timings, process, times.folder_of(config))


def pytest_sessionfinish(session: pytest.Session) -> None:
    keep_times(session.config, "")


@cache
def in_one_process(file: str) -> str:
    """Return a name that files share whose tests run in one process: a published model is read once, and of each kind
    of deployment that tests share there is one. The tests of a file share its fixtures."""
    path = Path(file)
    if path.parent.name == "real_models":
        return "tests of published models"
    is_there = path.parent.name == "end_to_end" and _SHARES.search((times.ROOT / path).read_text(encoding="utf-8"))
    return "tests of shared deployments" if is_there else file


def by_group(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """Return what runs in one process each, in the order in which it is handed out.

    What takes longest comes first, so that at the end all have little left. Tests of whole deployments wait for half of
    their time, so these and the others are spread over the run alike."""
    groups = dict[str, list[pytest.Item]]()
    for item in items:
        groups.setdefault(in_one_process(item.nodeid.partition("::")[0]), []).append(item)
    known, takes_s = times.numbers()["files_s"], dict[str, float]()
    for name, group in groups.items():
        files = {item.nodeid.partition("::")[0] for item in group}
        takes_s[name] = sum(known.get(file, times.UNKNOWN_S) for file in files)
    places = dict[str, float]()
    for waits in (True, False):
        kind = [name for name, group in groups.items() if waits == any(part in group[0].path.parts for part in WAITS)]
        kind.sort(key=lambda name: -takes_s[name])
        total_s = sum(takes_s[name] for name in kind) or 1.0  # files that take no time may run alone
        places |= {name: sum(takes_s[each] for each in kind[:at]) / total_s for at, name in enumerate(kind)}
    return [groups[name] for name in sorted(groups, key=lambda name: places[name])]


def import_for_all(groups: Sequence[Sequence[pytest.Item]]) -> None:
    """Import what the tests of several files import when they run: else each process takes seconds for that."""
    if sum(group[0].path.parent.name == "engine" for group in groups) > 1:
        with without_garbage():
            import_module("transformers.models.llama.modeling_llama")


@pytest.fixture(autouse=True)
def nothing_falls_back() -> Iterator[None]:
    """Let each test begin as a process does: nothing has failed yet."""
    yield
    for fallback in fallbacks():
        works(fallback.what)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbid access to a model hub: what tests need is in the repository or made by the tests."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def many() -> int:
    """Return how many generated cases a loop over seeds runs; `make soak` runs thousands."""
    return 20_000 if SOAK else 600


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command writes a line each 15 s into a log; here many commands share a process, and some test would get it."""
    monkeypatch.setattr(ProgressBar, "_next_line_at", inf)
