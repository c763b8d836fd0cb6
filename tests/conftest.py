"""What the tests of every folder share."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# What a machine takes for an example is no property of what is tested.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Triton's interpreter, before anything imports Triton. With a GPU its kernels are compiled, and tried by tests/gpu.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Where the tests run in the background, SIGINT comes ignored, and every program that they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

SOAK = bool(os.environ.get("SOAK"))

# Where whole deployments are started: with several processes of tests, one of them runs all of these, one after the
# other, so that a deployment has as many cores as it would have for itself, or nearly.
DEPLOYING = {"cluster", "end_to_end", "third_party"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, tests of one file share a process, and with it what their fixtures made."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file, _, _ = nodeid.partition("::")
            return "deployments" if DEPLOYING.intersection(Path(file).parts) else file

    return ByFile(config, log)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reaches for a hub: what it needs is in the repository or made by it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def many() -> int:
    """How many generated cases a loop over seeds goes through; `make soak` goes through thousands."""
    return 20_000 if SOAK else 600
