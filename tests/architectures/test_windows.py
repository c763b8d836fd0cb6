"""A config.json of a model that transformers runs says which layers have a window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignedserve.architectures.families.generic import windows_of
from alignedserve.architectures.given import Given


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, (8, 8)),
        ({"use_sliding_window": True}, (8, 8)),
        ({"use_sliding_window": False}, ()),
        ({"layer_types": ["full_attention", "sliding_attention"]}, (None, 8)),
        ({"sliding_window": 64}, ()),
    ],
    ids=str,
)
def test_windows_are_used_unless_the_file_says_otherwise(
    keys: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "starcoder2", "sliding_window": 8, **keys}))
    assert windows_of(Given(config), 2, 64) == windows
