"""A plugin of pytest: run the tests that CHOSEN_TESTS lists, in its order, and write the first that fails to a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_CHOSEN, _FAILED = Path(os.environ["CHOSEN_TESTS"]), Path(os.environ["FAILED_TEST"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    chosen = {name: place for place, name in enumerate(_CHOSEN.read_text(encoding="utf-8").splitlines())}
    items[:] = sorted((item for item in items if item.nodeid in chosen), key=lambda item: chosen[item.nodeid])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and not _FAILED.exists():
        _FAILED.write_text(report.nodeid, encoding="utf-8")
