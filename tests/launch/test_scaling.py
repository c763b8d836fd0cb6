"""Tests of which workers are started, and which are ended."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.config.config import Config
from alignedserve.config.sections import ScaleConfig
from alignedserve.config.topology import Range, Topology
from alignedserve.core import Role
from alignedserve.launch.orders import Scaling, check_scale, scale
from alignedserve.shell.control import ControlError, LauncherOrder, door_of

SPLIT = replace(Config(), topology=Topology.parse("2+3"))
WORKERS = [
    (Role(name.partition("-")[0]), name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")
]


@pytest.mark.parametrize(
    ("wanted", "changed"),
    [
        (LauncherOrder(), Scaling((), ())),
        (LauncherOrder(prefill=2, decode=3), Scaling((), ())),
        (LauncherOrder(prefill=3, decode=1), Scaling(("prefill-2",), ("decode-2", "decode-1"))),
        (LauncherOrder(decode=5), Scaling(("decode-3", "decode-4"), ())),
    ],
)
def test_a_worker_that_came_last_leaves_first(wanted: LauncherOrder, changed: Scaling) -> None:
    assert scale(WORKERS, (), wanted) == changed


def test_a_worker_that_is_leaving_counts_no_more_and_keeps_its_name() -> None:
    assert scale(WORKERS, {"decode-1"}, LauncherOrder(decode=3)) == Scaling(("decode-3",), ())
    assert scale(WORKERS, {"decode-1"}, LauncherOrder(decode=1)) == Scaling((), ("decode-2",))


def test_a_socket_of_too_long_a_name_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ControlError, match="set TMPDIR"):
        door_of(8000)


def test_no_more_and_no_fewer_than_the_deployment_may_have_by_itself() -> None:
    bounded = replace(SPLIT, scale=ScaleConfig(decode=Range(2, 4)))
    check_scale(bounded, LauncherOrder(prefill=9, decode=4))
    with pytest.raises(ControlError, match=r"--decode 5 is not in scale.decode 2-4"):
        check_scale(bounded, LauncherOrder(decode=5))
