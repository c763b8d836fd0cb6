"""Settings and fixtures that the tests of every folder share."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite
from hypothesis import settings

from alignedserve.cli.terminal.progress import ProgressBar
from alignedserve.fallbacks import fallbacks, works
from alignedserve.machine.one_thread import ONE_THREAD
from tests import rare, times
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

# Order for several test processes: first the tests that start whole deployments, and wait for a third of their time,
# then what takes longest, so that at the end all have little left. Deployments have timeouts long enough for a machine
# that runs three at a time.
FIRST = ("cluster", "end_to_end", "third_party")

# A test of a deployment that others share (tests/end_to_end/conftest.py).
_SHARES = re.compile(r"^(?:async )?def test_\w+\([^)]*\b(?:deployment|shared): Deployment", re.MULTILINE)

_timings: list[Timing] = []


def _processor_s() -> float:
    """Return the processor time of this process, and of processes that it started and that have ended."""
    return sum(os.times()[:4])


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(rare.Plugin(), "rare")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    if not config.option.collectonly:
        times.begin(times.folder_of(config))
    if config.getoption("numprocesses", None):
        rewrite_asserts_once(config, sorted(Path(__file__).parent.rglob("test_*.py")))


def rewrite_asserts_once(config: pytest.Config, tests: Iterable[Path]) -> None:
    """Compile the tests that nobody has compiled yet, as pytest does. On a fresh clone each process would do that by
    itself, for 40 % of the time that it collects."""
    for test in tests:
        compiled = rewrite.get_cache_dir(test) / f"{test.stem}{rewrite.PYC_TAIL}"
        if compiled.exists() or sys.dont_write_bytecode or not rewrite.try_makedirs(compiled.parent):
            continue
        with suppress(
            SyntaxError, AttributeError, KeyError, TypeError
        ):  # each process says where, or compiles by itself
            source_hash, code = rewrite._rewrite_test(test, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, compiled)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:  # noqa: ARG001  (the hook's name)
    """Collect no garbage while tests are collected: ten thousand of them are made, and all stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with timed(item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Time the end of what all tests share by itself: the last test, whichever that is, has not caused it."""
    if nextitem is not None:
        return (yield)
    with timed(times.SHARED):
        return (yield)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Keep what this takes, less what is timed within it."""
    began, processor_s, within = time.monotonic(), _processor_s(), len(_timings)
    try:
        yield
    finally:
        wall_s, used_s = time.monotonic() - began, _processor_s() - processor_s
        inner = _timings[within:]
        wall_s -= sum(timing.wall_s for timing in inner)
        _timings.append(Timing(what, wall_s, used_s - sum(timing.processor_s for timing in inner)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep what this run's tests took (tests/times.py)."""
    worker = getattr(session.config, "workerinput", {}).get("workerid", "")
    if _timings:
        times.keep(_timings, f"-{worker}" if worker else "", times.folder_of(session.config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run in one process what shares much (with `-n`), and hand it out in the order of its files."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return in_one_process(nodeid.partition("::")[0])

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@cache
def in_one_process(file: str) -> str:
    """Return a name that files share whose tests run in one process: a published model is read once, and of each kind
    of deployment that tests share there is one. The tests of a file share its fixtures."""
    path = Path(file)
    if path.parent.name == "real_models":
        return "tests of published models"
    is_there = path.parent.name == "end_to_end" and _SHARES.search((times.ROOT / path).read_text(encoding="utf-8"))
    return "tests of shared deployments" if is_there else file


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):
        return
    files = {item.nodeid: item.nodeid.partition("::")[0] for item in items}
    together, known = dict[str, float](), times.numbers()["files_s"]
    for file in dict.fromkeys(files.values()):
        name = in_one_process(file)
        together[name] = together.get(name, 0.0) + known.get(file, times.UNKNOWN_S)

    def turn(item: pytest.Item) -> tuple[bool, float, str]:
        name = in_one_process(files[item.nodeid])
        return not any(part in item.path.parts for part in FIRST), -together[name], name

    items.sort(key=turn)  # a stable sort


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
