"""Run with `python -m pytest --confcutdir=tests/gpu tests/gpu`: torch, Triton, transformers, numpy and pytest are
enough."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

WHY_NOT = "no GPU: torch sees none here"
_SMALL_CHOICES = 4  # tile sizes of attention with the fewest tokens; fp32 can use only these


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))


@pytest.fixture
def unmeasured(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fix the tiles instead of measuring: to find the fastest for each of many shapes takes minutes.
    Each test has one of the choices: different tests differ, and a test has the same choice every time."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from alignedserve.kernels.triton.launch import with_choice

    with with_choice(zlib.crc32(request.node.nodeid.encode()) % _SMALL_CHOICES):
        yield


@pytest.fixture
def by_triton(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test in which a kernel failed: torch would replace it and give the right result, which would hide the
    failure."""
    yield
    failed = [record.getMessage() for record in caplog.get_records("call") if "takes its place" in record.getMessage()]
    assert not failed
