"""Tests of a command's progress where nobody looks at a terminal: a log gets a line now and then."""

from __future__ import annotations

from io import StringIO

import pytest

from alignedserve import progress
from alignedserve.progress import ProgressBar


def test_a_log_gets_a_line_now_and_then_from_all_bars_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    now, log = 0.0, StringIO()
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    monkeypatch.setattr(ProgressBar, "_next_line_at", 15.0)
    for second in range(40):
        now = float(second)
        with ProgressBar("runs", log) as bar:
            bar.show(second, 40)
    assert [line.split("] ")[1] for line in log.getvalue().splitlines()] == ["15 of 40", "30 of 40"]
