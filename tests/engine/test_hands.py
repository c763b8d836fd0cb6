"""Tests of a worker's hands: copies reach the pages of the pool that they name, and of no other pool."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alignedserve.config.config import dump, load
from alignedserve.core import Role, StepPlan, StepResult
from alignedserve.engine.copying.aside import AsideCopies
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.device import pinning
from alignedserve.engine.engine import Engine
from alignedserve.errors import DeviceLost
from alignedserve.executor import copies
from alignedserve.executor import loading as engine_loading
from alignedserve.executor.building import RankParts
from alignedserve.executor.copies import end_where_lost
from alignedserve.executor.hands import EngineHands
from alignedserve.executor.loading import use_threads
from alignedserve.fallbacks import fallbacks
from alignedserve.kernels.common import failing as failing_kernels
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.machine import resources
from alignedserve.machine.shared_files import remove_stale
from alignedserve.protocol.commands import CopyIn, CopyOut, RunStep
from alignedserve.protocol.events import CopiedIn, CopiedOut, Event
from alignedserve.protocol.form_orders import CopySlots
from alignedserve.shell.clock import ClockOrigin
from alignedserve.shell.part import PartSpec, Place
from alignedserve.signs import ExitCode
from tests.kernels.samples import threads as torch_threads
from tests.samples import GATEWAY_MEMBER, POOL_MEMBER, member

BLOCK_SIZE, PAGE_SIZE = 4, 8
NEXT_POOL = member("pool-0", 2)
TOKENS = tuple(range(1, 12))
BLOCKS, OTHER_BLOCKS, PAGES = (3, 1, 4), (5, 9, 2), (2, 0)


@pytest.fixture
def engine(folder_of: Callable[[str], Path], engine_of: Callable[[Path, int], Engine]) -> Engine:
    engine = engine_of(folder_of("gqa-untied"), BLOCK_SIZE)
    engine.cache.normal_(generator=torch.Generator().manual_seed(1))
    return engine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena"


def create(engine: Engine, path: Path, incarnation: int) -> Arena:
    layers, _, _, kv_dim = engine.cache.shape
    payload_bytes = layers * 2 * PAGE_SIZE * kv_dim * engine.cache.dtype.itemsize
    return Arena.create(path, pages=3, payload_bytes=payload_bytes, page_size=PAGE_SIZE, incarnation=incarnation)


@pytest.fixture
def arena_of(engine: Engine, path: Path) -> Iterator[Callable[[int], Arena]]:
    """Return a function that makes arenas as successive lives of the pool do, under the same name."""
    with ExitStack() as arenas:
        yield lambda incarnation: arenas.enter_context(closing(create(engine, path, incarnation)))


@pytest.fixture
def hands(engine: Engine, path: Path) -> EngineHands:
    return EngineHands(engine, path, PAGE_SIZE, verify=True)


@pytest.mark.parametrize(
    ("cores", "workers", "asked", "threads"),
    [
        (8, 1, None, 7),
        (8, 2, None, 3),
        (2, 1, None, 2),
        (2, 2, None, 1),
        (0.5, 1, None, 1),
        (3.9, 1, None, 2),
        (4, 9, None, 1),
        (2, 2, 3, 3),
    ],
)
def test_a_worker_computes_with_its_share_of_the_cores_that_may_be_used(
    monkeypatch: pytest.MonkeyPatch, cores: float, workers: int, asked: int | None, threads: int
) -> None:
    monkeypatch.setattr(resources, "usable_cores", lambda: cores)
    with torch_threads(1):
        use_threads(asked, workers)
        assert torch.get_num_threads() == threads


def copy_out(hands: EngineHands, number: int, pool: str) -> Event | None:
    return hands.perform(CopyOut(number, pool, BLOCKS, PAGES, TOKENS))


def copy_in(hands: EngineHands, number: int, pool: str) -> Event | None:
    return hands.perform(CopyIn(number, pool, PAGES, OTHER_BLOCKS, TOKENS))


def test_a_copy_is_named_by_its_number(hands: EngineHands, engine: Engine, arena_of: Callable[[int], Arena]) -> None:
    arena_of(1)
    hands.meet(POOL_MEMBER)
    assert copy_out(hands, 7, "pool-0.1") == CopiedOut(7)
    assert copy_in(hands, 8, "pool-0.1") == CopiedIn(8, intact=True)
    blocks = engine.cache
    for to, of in zip(OTHER_BLOCKS[:2], BLOCKS[:2], strict=True):
        assert torch.equal(blocks[:, 2 * to : 2 * to + 2], blocks[:, 2 * of : 2 * of + 2])
    hands.part_from(POOL_MEMBER)


def test_what_the_device_no_longer_holds_is_written_from_its_checkpoint(
    engine: Engine, path: Path, arena_of: Callable[[int], Arena]
) -> None:
    arena_of(1)
    hands, kept = EngineHands(engine, path, PAGE_SIZE, verify=True, num_on_host=2), engine.cache.clone()
    hands.meet(POOL_MEMBER)
    slot = BLOCKS[0] * BLOCK_SIZE + 1
    hands.perform(CopySlots(checkpoints=((slot, 1),)))
    engine.cache[:, 2 * BLOCKS[0] : 2 * BLOCKS[0] + 2, 1] = 0.0
    hands.perform(CopySlots(copy=7, saved=((1, 1),)))
    assert copy_out(hands, 7, "pool-0.1") == CopiedOut(7)
    assert copy_in(hands, 8, "pool-0.1") == CopiedIn(8, intact=True)
    for to, of in zip(OTHER_BLOCKS[:2], BLOCKS[:2], strict=True):
        assert torch.equal(engine.cache[:, 2 * to : 2 * to + 2], kept[:, 2 * of : 2 * of + 2])
    hands.part_from(POOL_MEMBER)


def test_an_arena_that_is_not_pinned_is_mapped_ahead(
    hands: EngineHands, arena_of: Callable[[int], Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[object]()
    monkeypatch.setattr(AsideCopies, "attach", lambda *arguments: given.append(arguments[-1]))
    arena_of(1)
    hands.meet(POOL_MEMBER)
    hands.part_from(POOL_MEMBER)
    assert callable(given[0])


def test_the_pages_of_a_successor_are_not_touched(hands: EngineHands, arena_of: Callable[[int], Arena]) -> None:
    """The same page numbers belong to another request there; the copy was ordered before we heard of the successor."""
    arena_of(1)
    hands.meet(POOL_MEMBER)
    hands.part_from(POOL_MEMBER)
    arena = arena_of(2)
    for page in PAGES:
        arena.payload(page)[:] = b"\7" * arena.payload_bytes
    hands.meet(NEXT_POOL)
    assert copy_out(hands, 7, "pool-0.1") == CopiedOut(7)
    assert all(bytes(arena.payload(page)) == b"\7" * arena.payload_bytes for page in PAGES)
    hands.part_from(NEXT_POOL)


def test_the_pages_of_a_successor_are_not_read(
    hands: EngineHands, engine: Engine, arena_of: Callable[[int], Arena]
) -> None:
    """The copy is refused even if the pages hold the same tokens: only the pool knows to which request they belong."""
    arena_of(2)
    hands.meet(NEXT_POOL)
    copy_out(hands, 6, "pool-0.2")
    before = engine.cache.clone()
    assert copy_in(hands, 7, "pool-0.1") == CopiedIn(7, intact=False)
    assert torch.equal(engine.cache, before)
    assert copy_in(hands, 8, "pool-0.2") == CopiedIn(8, intact=True)
    hands.part_from(NEXT_POOL)


def test_a_copy_for_which_memory_is_too_little_is_not_done(
    hands: EngineHands, arena_of: Callable[[int], Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not copied cannot be read, and the worker goes on; another error ends it."""
    arena_of(1)
    hands.meet(POOL_MEMBER)

    def fails(error: Exception) -> None:
        def gather(*_: object) -> None:
            raise error

        for name in ("_gather", "_scatter"):
            monkeypatch.setattr(PageCopier, name, gather)

    fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 MiB"))
    assert copy_out(hands, 1, "pool-0.1") == CopiedOut(1)
    monkeypatch.undo()
    assert copy_in(hands, 2, "pool-0.1") == CopiedIn(2, intact=False)
    copy_out(hands, 3, "pool-0.1")
    fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 MiB"))
    assert copy_in(hands, 4, "pool-0.1") == CopiedIn(4, intact=False)
    fails(RuntimeError("an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal"):
        copy_in(hands, 5, "pool-0.1")
    monkeypatch.undo()
    assert copy_in(hands, 6, "pool-0.1") == CopiedIn(6, intact=True)
    gc.collect()  # errors that are raised by a function which holds them keep its arguments, which lie in the arena
    hands.part_from(POOL_MEMBER)


def test_without_a_pool_nothing_is_copied(hands: EngineHands, arena_of: Callable[[int], Arena]) -> None:
    assert copy_out(hands, 1, "pool-0.1") == CopiedOut(1)
    arena_of(1)
    hands.meet(POOL_MEMBER)
    copy_out(hands, 2, "pool-0.1")
    hands.part_from(POOL_MEMBER)
    assert copy_in(hands, 3, "pool-0.1") == CopiedIn(3, intact=False)


def test_a_pool_that_has_gone_again_is_logged(
    hands: EngineHands, arena_of: Callable[[int], Arena], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("alignedserve").propagate = True
    arena_of(2)
    hands.meet(POOL_MEMBER)
    assert ["is of pool incarnation 2, not 1" in message for message in caplog.messages] == [True]
    assert copy_in(hands, 1, "pool-0.1") == CopiedIn(1, intact=False)
    hands.meet(NEXT_POOL)
    assert copy_out(hands, 2, "pool-0.2") == CopiedOut(2)
    assert copy_in(hands, 3, "pool-0.2") == CopiedIn(3, intact=True)
    hands.part_from(NEXT_POOL)


def test_the_arena_of_a_lost_pool_is_mapped_no_more(hands: EngineHands, engine: Engine, path: Path) -> None:
    """A mapped old arena would take memory that the next arena needs."""
    with closing(create(engine, path, 1)):
        hands.meet(POOL_MEMBER)
        copy_out(hands, 1, "pool-0.1")
    hands.part_from(GATEWAY_MEMBER)
    assert remove_stale(path.parent, path.name) == (), "we map it"
    hands.part_from(POOL_MEMBER)
    assert remove_stale(path.parent, path.name) == (path,)


@pytest.mark.parametrize(
    ("role", "settings", "ahead", "falls_back"),
    [
        (Role.DECODE, {"engine.device": "cuda"}, 1, False),
        (Role.DECODE, {"engine.device": "cuda", "preset": "aligned-shared"}, 0, True),
        (Role.DECODE, {"engine.device": "cuda", "preset": "aligned-shared", "engine.look_ahead": "0"}, 0, False),
        (Role.DECODE, {"preset": "aligned-shared"}, 0, False),
        (Role.PREFILL, {"engine.device": "cuda", "schedule.helps": "false"}, 1, False),
        (Role.PREFILL, {"engine.device": "cuda", "preset": "aligned-shared"}, 0, True),
    ],
)
def test_a_gpu_that_plans_no_step_ahead_says_why(
    role: Role, settings: dict[str, str], ahead: int, falls_back: bool
) -> None:
    tree = dump(load(settings, {}, None))
    spec = PartSpec(role, "decode-0", "local", "test", "127.0.0.1", "tcp://127.0.0.1:9", tree, ClockOrigin.read())
    assert engine_loading.steps_ahead(Place(spec)) == ahead
    assert [fallback.what for fallback in fallbacks()] == ["steps planned ahead"] * falls_back


class FakeCudart:
    """Records registered memory; refuses memory beyond some bytes, as a limit of locked memory does. While it is
    `held`, no piece is registered."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most, self.registered = most, dict[int, int]()
        self.asked, self.held = threading.Event(), threading.Lock()

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        self.asked.set()
        with self.held:
            if sum(self.registered.values()) + size > self.most:
                return 2
            self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def pinned(hands: EngineHands) -> None:
    """Return when the arena's memory is pinned, or as much of it as can be."""
    pinner = hands._copies._pinner
    assert pinner is not None
    pinner.wait()


def pinning_hands(engine: Engine, path: Path, cudart: FakeCudart) -> EngineHands:
    return EngineHands(engine, path, PAGE_SIZE, verify=True, cudart=cudart)


def test_the_arena_is_pinned_in_pieces_for_as_long_as_it_is_mapped(
    engine: Engine, path: Path, arena_of: Callable[[int], Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "PIECE_BYTES", 1)  # an extent each
    cudart = FakeCudart()
    hands, arena = pinning_hands(engine, path, cudart), arena_of(1)
    hands.meet(POOL_MEMBER)
    pinned(hands)
    pieces = sorted(cudart.registered.items())
    assert len(pieces) == arena.extents.count > 1
    assert [start + size for start, size in pieces[:-1]] == [start for start, _ in pieces[1:]], "no gap, no overlap"
    assert sum(size for _, size in pieces) >= sum(len(arena.payload(page)) for page in range(len(PAGES)))
    copy_out(hands, 1, "pool-0.1")
    assert copy_in(hands, 2, "pool-0.1") == CopiedIn(2, intact=True)
    hands.part_from(POOL_MEMBER)
    assert not cudart.registered
    arena_of(2)
    hands.meet(NEXT_POOL)
    pinned(hands)
    assert len(cudart.registered) == arena.extents.count
    hands.part_from(NEXT_POOL)
    assert not fallbacks()


def test_copies_go_on_while_memory_is_pinned(
    engine: Engine, path: Path, arena_of: Callable[[int], Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver takes its time for the first piece; when the pool goes meanwhile, no other piece is pinned."""
    monkeypatch.setattr(pinning, "PIECE_BYTES", 1)
    cudart = FakeCudart()
    hands = pinning_hands(engine, path, cudart)
    arena_of(1)
    with cudart.held:
        hands.meet(POOL_MEMBER)
        assert cudart.asked.wait(60)
        copy_out(hands, 1, "pool-0.1")
        assert copy_in(hands, 2, "pool-0.1") == CopiedIn(2, intact=True)
        assert not cudart.registered
        ending = threading.Thread(target=hands.part_from, args=(POOL_MEMBER,))
        ending.start()
        assert hands._copies._pinner is not None
        assert hands._copies._pinner._is_stopped.wait(60)
    ending.join()
    assert not cudart.registered


def test_memory_that_cannot_be_pinned_serves_all_the_same(
    engine: Engine, path: Path, arena_of: Callable[[int], Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could be pinned before the limit stays so; a limit that was raised is noticed at the next pool."""
    monkeypatch.setattr(pinning, "PIECE_BYTES", 1)
    ((_, size), *_) = arena_of(1).pieces(1)
    cudart = FakeCudart(most=size)
    hands = pinning_hands(engine, path, cudart)
    hands.meet(POOL_MEMBER)
    pinned(hands)
    assert len(cudart.registered) == 1
    (told,) = fallbacks()
    assert told.what == "pinned memory"
    assert told.why.startswith(
        "cudaHostRegister says 2 after 0 of the KV pool's 0 MiB: raise the limit of locked memory"
    )
    copy_out(hands, 1, "pool-0.1")
    assert copy_in(hands, 2, "pool-0.1") == CopiedIn(2, intact=True)
    hands.part_from(POOL_MEMBER)
    assert not cudart.registered
    cudart.most *= 100
    arena_of(2)
    hands.meet(NEXT_POOL)
    pinned(hands)
    assert not fallbacks()
    hands.part_from(NEXT_POOL)


def test_a_worker_that_ends_pins_no_more(engine: Engine, path: Path, arena_of: Callable[[int], Arena]) -> None:
    cudart = FakeCudart()
    hands = pinning_hands(engine, path, cudart)
    arena_of(1)
    hands.meet(POOL_MEMBER)
    hands.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "pinning"]
    hands.part_from(POOL_MEMBER)
    assert not cudart.registered


GONE = "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_a_device_that_is_lost_ends_the_worker_with_a_line(hands: EngineHands, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: StepPlan) -> StepResult:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(hands._engine, "step", failing)
    with pytest.raises(RuntimeError, match="CUDA error"):
        hands.perform(RunStep(StepPlan(1)))
    monkeypatch.setattr(failing_kernels, "loss", lambda _: GONE)
    with pytest.raises(DeviceLost, match=r"^cpu computes nothing any more \(RuntimeError: CUDA.*is restarted$"):
        hands.perform(RunStep(StepPlan(1)))


def test_a_thread_that_finds_the_device_lost_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker may run no step that would notice the loss."""
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    end_where_lost(torch.device("cpu"))
    assert ended == []
    monkeypatch.setattr(copies, "loss", lambda _: GONE)
    end_where_lost(torch.device("cpu"))
    assert ended == [ExitCode.DEVICE_LOST]
    assert f"cpu computes nothing any more ({GONE})" in caplog.text


@pytest.mark.parametrize(("device", "ranks", "is_beside"), [("cuda", 1, True), ("cpu", 1, False), ("cuda", 2, False)])
def test_copies_go_beside_the_steps_of_a_gpu_that_has_its_model_for_itself(
    device: str, ranks: int, is_beside: bool
) -> None:
    engine: Any = SimpleNamespace(device=torch.device(device), ranks=SimpleNamespace(size=ranks))
    nothing: Any = None
    assert RankParts(nothing, engine, nothing, nothing, nothing, nothing).copies_beside is is_beside
