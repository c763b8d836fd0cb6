"""The clock of processes, while the wall clock of their machine is set forward and back."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from alignedserve.shell.clock import Clock, ClockOrigin

HOURS = 3600.0 * 7


@pytest.mark.parametrize("step_s", [-HOURS, HOURS])
def test_parts_that_start_before_and_after_a_step_of_the_wall_clock_agree(
    monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    origin = ClockOrigin.read()
    before = Clock(origin)
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + step_s)
    after = Clock(origin)
    assert before.now() <= after.now() <= before.now()
    due_at = before.now() + HOURS
    assert 0 < after.until(due_at) <= HOURS


def test_a_part_on_another_machine_goes_by_its_own_wall_clock() -> None:
    here = ClockOrigin.read()
    elsewhere = replace(here, boot="another machine", began_at=here.began_at - HOURS)
    assert Clock(elsewhere).now() - Clock(here).now() == pytest.approx(0.0, abs=HOURS / 2)
