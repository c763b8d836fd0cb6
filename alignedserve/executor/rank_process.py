"""Another rank of a worker as a process: it has no core and no shell, and does what rank 0 does."""

from __future__ import annotations

from alignedserve.engine.engine import Engine
from alignedserve.executor.building import build_rank
from alignedserve.executor.leading import follow
from alignedserve.protocol.wire import MOST_FRAME_BYTES
from alignedserve.shell.part import Place


def run_rank(place: Place) -> None:
    """Follow rank 0 for as long as it lives; RankLost when it has gone."""
    with build_rank(place, Engine) as built:
        assert built.team is not None, "a worker's only rank is rank 0"
        follow(built.team, built.hands(), MOST_FRAME_BYTES)
