"""The locks have what the project asks for, each file by its hash."""

from __future__ import annotations

from pathlib import Path

import pytest

import lock


@pytest.mark.parametrize("name", lock.EXTRAS)
def test_a_lock_has_all_that_is_asked_for(name: str) -> None:
    assert list(lock.missing(name)) == [], "run: python tools/lock.py"


def test_what_a_lock_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (lock.LOCKS / "serve.txt").read_text()
    monkeypatch.setattr(lock, "LOCKS", tmp_path)
    (tmp_path / "serve.txt").write_text(text.replace("fastapi==", "elsewhere==").replace("redis==", "redis==0."))
    assert [wanted.partition(">")[0] for wanted in lock.missing("serve.txt")] == ["fastapi", "redis"]


@pytest.mark.parametrize("name", lock.EXTRAS)
def test_each_version_has_hashes(name: str) -> None:
    entries = lock.entries((lock.LOCKS / name).read_text())
    assert entries
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []


def test_torch_and_what_only_its_cuda_build_brings_is_left_out() -> None:
    assert not {"torch", "nvidia-cublas", "triton"} & lock.locked((lock.LOCKS / "serve.txt").read_text()).keys()
