"""Tests that a deployment runs no code of the folder in which `serve` is typed."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.end_to_end.deployment import ANSWER_S, NAME, deployed
from tests.hostile_folder import imported, make_hostile


@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_files_named_like_modules_are_not_imported(tmp_path: Path, launcher: str) -> None:
    folder = make_hostile(tmp_path / "hostile")
    flags = ("--set", "schedule.predictor=hash")  # its side process is one more
    with deployed(*flags, topology="1+1", launcher=launcher, typed_in=folder) as deployment:
        body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        answer = httpx.post(f"{deployment.url}/v1/chat/completions", json=body, timeout=ANSWER_S, trust_env=False)
        assert answer.status_code == 200, answer.text
    assert imported(folder) == []
