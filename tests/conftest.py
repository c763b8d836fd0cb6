"""Settings and fixtures that the tests of every folder share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from alignedserve.cli.terminal.progress import ProgressBar
from alignedserve.fallbacks import fallbacks, works

SOAK = bool(os.environ.get("SOAK"))

# How long a machine takes for an example is no property of what is tested, so there is no deadline. The examples are
# the same every time, so that a difference between runs comes from a change and not from luck; the long form draws new
# examples.
settings.register_profile("ours", deadline=None, derandomize=not SOAK)
settings.load_profile("ours")

# Choose Triton's interpreter before anything imports Triton. With a GPU its kernels are compiled, and tested by
# tests/gpu.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Set this before torch is loaded: its threads soon sleep while they wait, as a worker's do (docs/how/kernels.md). There
# are more threads than cores, and tests of kernels took four times as long on a busy machine while threads spun.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# The second thread of numpy's library spins too: it took a quarter of the time of tests that simulate.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A process in the background ignores SIGINT, and every program that the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Order for several test processes: first the tests that start whole deployments, and mostly wait, then those that take
# long, and last those that fill the gaps. Deployments have timeouts long enough for a machine that runs two at a time.
FIRST = ("cluster", "end_to_end", "third_party")
THEN = ("real_models", "simulator", "engine", "demo_model", "kernels")
_ON_RAY = "tests that share a deployment on Ray"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run a file's tests in one process (with `-n`), so that they share fixtures; hand out files in their order.

    Tests that share a deployment on Ray run together too, whatever their file.
    """
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    scheduling = LoadFileScheduling(config, log)
    by_file = scheduling._split_scope
    scheduling._split_scope = lambda test: _ON_RAY if "end_to_end" in test and "[1+1-ray" in test else by_file(test)
    return scheduling


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)  # a stable sort


def _turn(item: pytest.Item) -> int:
    parts = item.path.parts
    return 0 if any(part in parts for part in FIRST) else 1 if any(part in parts for part in THEN) else 2


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
