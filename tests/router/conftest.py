"""Fixture of a router that serves."""

from __future__ import annotations

import pytest

from alignedserve.router.state import RouterCore
from tests.router.routers import serving


@pytest.fixture
def router() -> RouterCore:
    return serving()
