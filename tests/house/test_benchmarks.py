"""Tests that each benchmark says what it measures when it is asked for help, and measures nothing then."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted(
    path.stem
    for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_help_is_printed_and_nothing_is_measured(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert shown.startswith("usage: ")
    assert path.read_text(encoding="utf-8").splitlines()[0].strip('"') in shown, "the help is the module's docstring"
