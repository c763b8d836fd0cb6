"""The cores of both workers, for tests of what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from alignedserve.decode_worker.state import DecodeCore
from alignedserve.worker.setup import WorkerSetup

MakeCore: TypeAlias = Callable[[WorkerSetup], DecodeCore]
