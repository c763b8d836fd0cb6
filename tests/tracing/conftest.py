"""The model folder of the gateway's tests, and a receiver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.conftest import folder, text
from tests.tracing.receiver import Receiver, receiving

__all__ = ["folder", "text"]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server
