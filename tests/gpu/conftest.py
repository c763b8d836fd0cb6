"""`python -m pytest --confcutdir=tests/gpu tests/gpu`: torch, Triton, transformers, numpy and pytest are enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

WHY_NOT = "no GPU: torch sees none here"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))
