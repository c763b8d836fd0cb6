"""What an engine says of itself while it starts: each stage with how much of it is done, in the end all of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from alignedserve.core import WorkerLimits
from alignedserve.cost.trials import Bounds, trials
from alignedserve.engine.engine import Engine
from alignedserve.engine.graphs import sizes
from alignedserve.engine.profiling import Meter, measure
from alignedserve.errors import ArenaTooSmall
from alignedserve.kernels.common.reference import Reference
from alignedserve.kernels.dispatch.rehearsing import REHEARSED, rehearse
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.machine import shared_files
from alignedserve.signs import Stage
from tests.models import MAX_POSITIONS

LIMITS = WorkerLimits(num_blocks=120, block_size=4, page_size=8, max_step_tokens=64, max_batch=8)


class Noted:
    """Notes the stages, and what was done of each."""

    def __init__(self) -> None:
        self.totals: dict[Stage, int] = {}
        self.done: dict[Stage, list[int]] = {}
        self._now = Stage.LIBRARIES

    def stage(self, stage: Stage, total: int = 0) -> None:
        self._now, self.totals[stage] = stage, total
        self.done[stage] = []

    def advance(self, done: int = 1) -> None:
        self.done[self._now].append(done)


@pytest.fixture
def noted() -> Noted:
    return Noted()


@pytest.fixture
def engine(folder_of: Callable[[str], Path], noted: Noted) -> Engine:
    noted.stage(Stage.WEIGHTS)  # said with the bytes by whoever knows them beforehand
    folder = folder_of("gqa-untied")
    return Engine(
        folder,
        num_blocks=120,
        block_size=4,
        dtype="float32",
        tune_s=1e-3,
        has_graphs=True,
        signs=noted,
        kernels=Static(),
    )


class Static(Reference):
    captures = True


def test_weights_are_counted_tensor_by_tensor_and_layers_shape_by_shape(engine: Engine, noted: Noted) -> None:
    assert len(noted.done[Stage.WEIGHTS]) > engine.config.num_layers
    largest = engine.config.vocab_size * engine.config.hidden_size * 4
    assert max(noted.done[Stage.WEIGHTS]) <= 4 * largest, "no tensor is a stage of its own"
    assert list(noted.done) == [Stage.WEIGHTS, Stage.LAYERS]
    assert len(noted.done[Stage.LAYERS]) == noted.totals[Stage.LAYERS] > 1


def test_captured_steps_are_counted_also_those_that_do_not_fit(engine: Engine, noted: Noted) -> None:
    def capture(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        if len(noted.done[Stage.GRAPHS]) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return step

    engine.capture(6, capture, lambda: 1 << 40, 0)
    assert noted.totals[Stage.GRAPHS] == sum(noted.done[Stage.GRAPHS]) == len(sizes(6))


def test_steps_that_are_measured_are_counted(engine: Engine, noted: Noted) -> None:
    wanted = trials(Bounds(LIMITS, MAX_POSITIONS))[:8]
    measure(Meter(engine), wanted, budget_s=60.0, signs=noted)
    assert noted.totals[Stage.STEPS] == sum(noted.done[Stage.STEPS]) == 3 * len(wanted)


def test_kernels_that_are_tried_are_counted(noted: Noted) -> None:
    noted.stage(Stage.KERNELS, REHEARSED)
    rehearse(Reference(), torch.zeros(40, 16, 8), torch.float32, 4, 4, 50, 300, advance=noted.advance)
    assert sum(noted.done[Stage.KERNELS]) == REHEARSED


def test_the_pools_memory_is_made_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: Noted) -> None:
    monkeypatch.setattr(shared_files, "_FILLED_AT_ONCE", 1 << 16)
    noted.stage(Stage.POOL)
    path = tmp_path / "arena"
    arena = Arena.create(path, pages=40, payload_bytes=10_000, page_size=8, incarnation=1, advance=noted.advance)
    pieces = noted.done[Stage.POOL]
    assert sum(pieces) == path.stat().st_size
    assert len(pieces) > 5
    assert max(pieces) == 1 << 16
    arena.unlink()


def test_pieces_that_did_fit_are_given_back_where_the_next_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says how much is free, and others need what is."""
    monkeypatch.setattr(shared_files, "_FILLED_AT_ONCE", 1 << 16)
    allocate = os.posix_fallocate

    def full(fd: int, offset: int, length: int) -> None:
        if offset >= 1 << 17:
            raise OSError(28, "No space left on device")
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (tmp_path / "file").open("wb") as file:
        with pytest.raises(ArenaTooSmall):
            shared_files.fill(tmp_path, file.fileno(), 1 << 18)
        assert os.fstat(file.fileno()).st_size == 0
