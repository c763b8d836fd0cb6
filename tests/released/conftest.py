"""The fixtures of a service with jobs, on each kind of store."""

from __future__ import annotations

from tests.gateway.conftest import folder, hello, text
from tests.jobs.conftest import config

__all__ = ["config", "folder", "hello", "text"]
