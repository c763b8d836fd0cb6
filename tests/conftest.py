"""What the tests of every folder share."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

SOAK = bool(os.environ.get("SOAK"))

# What a machine takes for an example is no property of what is tested. The examples are the same every time, so that a
# run says something of what was changed, and not of luck; the long form draws new ones.
settings.register_profile("ours", deadline=None, derandomize=not SOAK)
settings.load_profile("ours")

# Triton's interpreter, before anything imports Triton. With a GPU its kernels are compiled, and tried by tests/gpu.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Before torch is loaded: its threads sleep soon while they wait, as a worker's do (docs/how/kernels.md). There are more
# threads than cores, and tests of kernels took four times as long on a busy machine while they spun.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Where the tests run in the background, SIGINT comes ignored, and every program that they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# With several processes of tests: first those that start whole deployments, and mostly wait, then what takes long, and
# at last what fills the gaps. Parts of a deployment have patience enough for a machine that has two at a time.
FIRST = ("cluster", "end_to_end", "third_party")
THEN = ("simulator", "engine", "demo_model", "kernels")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, tests of a file share a process, and with it what their fixtures made; files go out in their order."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)  # stable


def _turn(item: pytest.Item) -> int:
    parts = item.path.parts
    return 0 if any(part in parts for part in FIRST) else 1 if any(part in parts for part in THEN) else 2


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reaches for a hub: what it needs is in the repository or made by it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def many() -> int:
    """How many generated cases a loop over seeds goes through; `make soak` goes through thousands."""
    return 20_000 if SOAK else 600
