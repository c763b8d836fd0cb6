"""What the keeper does when parts end."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.config.config import Config, load
from alignedserve.launch import keeper
from alignedserve.shell.exit_code import ExitCode
from alignedserve.shell.part import PartSpec
from tests.launch.keepers import ScriptedKeeper


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the keeper a door of its own and nobody to serve; put the handlers of signals back."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(keeper, "announce_when_ready", lambda *_: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def config_of(topology: str) -> Config:
    return load({"topology": topology}, {}, None)


@pytest.mark.parametrize("step_s", [-600.0, 600.0])
def test_each_life_has_a_larger_incarnation_whatever_the_wall_clock_does(
    monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    monkeypatch.setattr(keeper, "QUICK_DEATH_S", 0.0)
    wall, wall_ns, ahead_s = time.time, time.time_ns, [0.0]
    monkeypatch.setattr(time, "time", lambda: wall() + ahead_s[0])
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + int(ahead_s[0] * 1e9))

    def on_start(kept: ScriptedKeeper, spec: PartSpec) -> None:
        ahead_s[0] += step_s
        if spec.name == "router" and len(kept.lives("router")) < 5:
            kept.die(spec)
        elif spec.name == "router":
            signal.raise_signal(signal.SIGTERM)

    kept = ScriptedKeeper(config_of("1+1"), on_start)
    assert kept.run() == ExitCode.STOPPED
    lives = kept.lives("router")
    assert len(lives) == 5
    assert lives == sorted(set(lives))
    assert all(kept.lives(part) == [1] for part in ("pool-0", "prefill-0", "decode-0", "gateway-0"))
