"""Tests of copies beside the steps: they reach only the pages of the pool that they name, even if that pool goes
meanwhile."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.core import Sampling, StepPlan
from alignedserve.engine.copying import aside
from alignedserve.engine.copying.aside import AsideCopies
from alignedserve.engine.copying.copies import PageCopier
from alignedserve.engine.device.devices import Mark
from alignedserve.engine.device.pace import CopyPace
from alignedserve.engine.engine import Engine
from alignedserve.executor.hands import EngineHands
from alignedserve.kernels.common.threads import compute_alone, openmp_libraries
from alignedserve.kvpool.arena.arena import Arena
from alignedserve.protocol.commands import CopyIn, CopyOut, PrepareSyntax, ReceiveKv, RunStep, SendKv
from alignedserve.protocol.events import CopiedIn, CopiedOut, Event, KvReceived, KvSent, PageCompressed, SyntaxReady
from alignedserve.protocol.extents import Extents, PageBytes, PageKind
from alignedserve.protocol.form_orders import CompressPage
from alignedserve.protocol.int8_layout import Int8Layout
from alignedserve.protocol.rank_orders import Copying
from tests.engine.test_hands import BLOCK_SIZE, BLOCKS, NEXT_POOL, OTHER_BLOCKS, PAGE_SIZE, PAGES, TOKENS, create
from tests.kernels.samples import threads as torch_threads
from tests.samples import POOL_MEMBER, request

DEADLINE_S = 60.0


@pytest.fixture
def engine(folder_of: Callable[[str], Path], engine_of: Callable[[Path, int], Engine]) -> Engine:
    engine = engine_of(folder_of("gqa-untied"), BLOCK_SIZE)
    engine.cache.normal_(generator=torch.Generator().manual_seed(1))
    return engine


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena"


@pytest.fixture
def arena_of(engine: Engine, path: Path) -> Iterator[Callable[[int], Arena]]:
    with ExitStack() as arenas:
        yield lambda incarnation: arenas.enter_context(closing(create(engine, path, incarnation)))


class Bench:
    def __init__(self, engine: Engine, path: Path, pace: CopyPace | None = None) -> None:
        self.hands = EngineHands(engine, path, PAGE_SIZE, verify=True, pace=pace)
        self._posted: queue.Queue[Event | Exception] = queue.Queue()

    def begin(self, command: Copying | SendKv | ReceiveKv | PrepareSyntax) -> None:
        assert self.hands.begin_aside(command, self._posted.put)

    def posted(self) -> Event | Exception:
        return self._posted.get(timeout=DEADLINE_S)


def out(number: int, pool: str = "pool-0.1", start: int = 0) -> CopyOut:
    return CopyOut(number, pool, BLOCKS, PAGES[start // PAGE_SIZE :], TOKENS, start, aside=True)


def back(number: int, pool: str = "pool-0.1", tokens: tuple[int, ...] = TOKENS) -> CopyIn:
    return CopyIn(number, pool, PAGES, OTHER_BLOCKS, tokens, aside=True)


def test_there_and_back(engine: Engine, path: Path, arena_of: Callable[[int], Arena]) -> None:
    bench = Bench(engine, path)
    arena_of(1)
    bench.hands.meet(POOL_MEMBER)
    for command, said in (
        (out(1), CopiedOut(1)),
        (out(2, start=PAGE_SIZE), CopiedOut(2)),
        (back(3), CopiedIn(3, True)),
    ):
        bench.begin(command)
        assert bench.posted() == said
    for to, of in zip(OTHER_BLOCKS[:2], BLOCKS[:2], strict=True):
        assert torch.equal(engine.cache[:, 2 * to : 2 * to + 2], engine.cache[:, 2 * of : 2 * of + 2])
    bench.begin(back(4, tokens=(99, *TOKENS[1:])))
    assert bench.posted() == CopiedIn(4, intact=False), "not what is in the pages"
    bench.begin(CopyIn(5, "pool-0.1", PAGES, OTHER_BLOCKS[:1], TOKENS, aside=True))
    assert bench.posted() == CopiedIn(5, intact=False), "a plan that cannot be ends no thread"
    bench.begin(back(6))
    assert bench.posted() == CopiedIn(6, intact=True)
    bench.hands.part_from(POOL_MEMBER)


def test_a_copy_that_waits_for_its_turn_keeps_no_arena_open(engine: Engine, path: Path) -> None:
    """Else a worker ended with its pool where the pool died during a copy."""
    copier = PageCopier(engine.cache, create(engine, path, 1), PAGE_SIZE, verify=True)
    turns = copier.pages_out(BLOCKS, PAGES, TOKENS), copier.pages_in(PAGES, OTHER_BLOCKS, TOKENS)
    assert [next(each) for each in turns] == [True, True]
    copier.close()


@pytest.mark.parametrize("panics", [False, True], ids=["impossible", "panic"])
def test_a_copy_that_fails_is_reported_before_it_is_answered(
    engine: Engine, arena_of: Callable[[int], Arena], monkeypatch: pytest.MonkeyPatch, panics: bool
) -> None:
    """The failure is told first, so that no plan uses a device that is lost. What a library in Rust raises where it
    panics is no Exception."""

    def panic(*_: object) -> None:
        raise BaseException("a bug")

    if panics:
        monkeypatch.setattr(PageCopier, "pages_in", panic)
    copies, told = AsideCopies(PAGE_SIZE, CopyPace(), failed=lambda: told.append("failed")), list[object]()
    arena = arena_of(1)
    copies.attach(PageCopier(engine.cache, arena, PAGE_SIZE, verify=True), "pool-0.1")
    answered = threading.Event()

    def post(event: Event) -> None:
        told.append(event)
        answered.set()

    copies.add(CopyIn(5, "pool-0.1", PAGES, OTHER_BLOCKS[:1], TOKENS, aside=True), post)
    assert answered.wait(DEADLINE_S)
    assert told == ["failed", CopiedIn(5, intact=False)]


def test_the_arena_is_mapped_while_nothing_else_is_done(engine: Engine, arena_of: Callable[[int], Arena]) -> None:
    pace, mapped, copied, ended = CopyPace(), list[int](), threading.Event(), threading.Event()

    def map_ahead(start: int) -> int | None:
        mapped.append(start)
        if start == 2:
            ended.set()
        return start + 1 if start < 2 else None

    copies = AsideCopies(PAGE_SIZE, pace)
    with pace.step():
        copies.attach(PageCopier(engine.cache, arena_of(1), PAGE_SIZE, verify=True), "pool-0.1", map_ahead)
        copies.add(out(1), lambda _: copied.set())
        assert copied.wait(DEADLINE_S)
        assert mapped == []
    assert ended.wait(DEADLINE_S)
    assert mapped == [0, 1, 2]


def test_a_copy_goes_behind_what_was_ordered_before_it(
    engine: Engine, arena_of: Callable[[int], Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, another stream still computes what the copy needs."""
    seen, answered = list[tuple[str, str]](), threading.Event()

    class Noted(Mark):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            seen.append(("ordered", threading.current_thread().name))

        def go_behind(self) -> None:
            seen.append(("behind", threading.current_thread().name))

    def gather(*args: Any, **named: Any) -> Iterator[bool]:
        seen.append(("copied", threading.current_thread().name))
        return pages_out(*args, **named)

    pages_out = PageCopier.pages_out
    monkeypatch.setattr(aside, "Mark", Noted)
    monkeypatch.setattr(PageCopier, "pages_out", gather)
    copies = AsideCopies(PAGE_SIZE, CopyPace())
    copies.attach(PageCopier(engine.cache, arena_of(1), PAGE_SIZE, verify=True), "pool-0.1")
    copies.add(out(1), lambda _: answered.set())
    assert answered.wait(DEADLINE_S)
    assert seen == [("ordered", threading.current_thread().name), ("behind", "aside"), ("copied", "aside")]


def test_who_adds_a_copy_does_not_wait_for_a_page(
    engine: Engine, arena_of: Callable[[int], Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that begins steps adds copies: on a GPU it would begin the next step milliseconds late."""
    begun, goes_on, answers = threading.Event(), threading.Event(), queue.Queue[Event]()
    pages_out = PageCopier.pages_out

    def slow(*args: Any, **named: Any) -> Iterator[bool]:
        for turn in pages_out(*args, **named):
            begun.set()
            assert goes_on.wait(DEADLINE_S)
            yield turn

    monkeypatch.setattr(PageCopier, "pages_out", slow)
    copies = AsideCopies(PAGE_SIZE, CopyPace())
    copies.attach(PageCopier(engine.cache, arena_of(1), PAGE_SIZE, verify=True), "pool-0.1")
    copies.add(out(1), answers.put)
    assert begun.wait(DEADLINE_S)
    adding = threading.Thread(target=copies.add, args=(out(2), answers.put), daemon=True)
    adding.start()
    adding.join(DEADLINE_S / 10)
    is_added = not adding.is_alive()
    goes_on.set()
    assert is_added
    assert [answers.get(timeout=DEADLINE_S) for _ in range(2)] == [CopiedOut(1), CopiedOut(2)]
    copies.close()


def test_all_copies_have_one_stream(
    engine: Engine, arena_of: Callable[[int], Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, no other stream can use again the memory that one stream has worked with."""
    streams, answers = list[torch.device](), queue.Queue[Event]()

    def beside_steps(device: torch.device) -> AbstractContextManager[object]:
        streams.append(device)
        return nullcontext()

    monkeypatch.setattr(aside, "beside_steps", beside_steps)
    copies = AsideCopies(PAGE_SIZE, CopyPace())
    copies.attach(PageCopier(engine.cache, arena_of(1), PAGE_SIZE, verify=True), "pool-0.1")
    for number in (1, 2):
        copies.add(out(number), answers.put)
        assert answers.get(timeout=DEADLINE_S) == CopiedOut(number)
    assert streams == [engine.device]


def test_the_thread_ends_before_the_process_does(engine: Engine, path: Path, arena_of: Callable[[int], Arena]) -> None:
    """Else the end of Python aborts a process that copies: a worker that was cast out ended with signal 6."""
    before = set(threading.enumerate())
    bench = Bench(engine, path)
    arena_of(1)
    bench.hands.meet(POOL_MEMBER)
    for number in range(100):
        bench.begin(out(number))
    bench.hands.close()
    assert set(threading.enumerate()) <= before


def test_without_its_pool_a_copy_comes_to_nothing(engine: Engine, path: Path, arena_of: Callable[[int], Arena]) -> None:
    bench = Bench(engine, path)
    bench.begin(back(1))
    assert bench.posted() == CopiedIn(1, intact=False)
    arena_of(2)
    bench.hands.meet(NEXT_POOL)
    bench.begin(out(2, "pool-0.2"))
    assert bench.posted() == CopiedOut(2)
    before = engine.cache.clone()
    bench.begin(back(3, "pool-0.1"))
    assert bench.posted() == CopiedIn(3, intact=False), "the same pages of its successor are somebody else's"
    assert torch.equal(engine.cache, before)
    bench.hands.part_from(NEXT_POOL)


def test_a_pool_that_goes_in_mid_copy_is_let_go(engine: Engine, path: Path, arena_of: Callable[[int], Arena]) -> None:
    """During a step the copy has to wait until time for its turn is saved. By then the pool has gone."""
    pace = CopyPace(share=1e-9)
    bench = Bench(engine, path, pace)
    arena = arena_of(1)
    bench.hands.meet(POOL_MEMBER)
    bench.begin(out(1))
    assert bench.posted() == CopiedOut(1)
    with pace.step():
        bench.begin(back(2))
        bench.hands.part_from(POOL_MEMBER)
    assert bench.posted() == CopiedIn(2, intact=False)
    assert arena.num_pages == 3, "and it is ours alone: it can be closed"


def test_other_work_is_not_for_beside_the_steps(engine: Engine, path: Path) -> None:
    bench = Bench(engine, path)
    assert not bench.hands.begin_aside(RunStep(StepPlan(1)), lambda _: None)
    assert not bench.hands.begin_aside(CopyIn(1, "pool-0.1", PAGES, BLOCKS, TOKENS), lambda _: None)


def test_a_page_is_made_int8_beside_steps_where_a_gpu_does_it(
    engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it would compute with the cores of the step."""
    bench, (layers, _, _, kv_dim) = Bench(engine, path), engine.cache.shape
    extents, into = Extents(3, kv=1, kv_int8=1), 5  # the int8 page of the last extent
    page_bytes = 2 * layers * PAGE_SIZE * kv_dim * engine.cache.dtype.itemsize
    sizes = PageBytes(page_bytes, Int8Layout(2 * layers * kv_dim, PAGE_SIZE).size)
    assert not bench.hands.begin_aside(CompressPage(7, "pool-0.1", 0, into), lambda _: None)
    monkeypatch.setattr("alignedserve.engine.forms.performing.CPU", torch.device("meta"))
    made = Arena.create(path, pages=extents, payload_bytes=sizes, page_size=PAGE_SIZE, incarnation=1)
    with closing(made) as arena:
        bench.hands.meet(POOL_MEMBER)
        bench.begin(CopyOut(1, "pool-0.1", BLOCKS, (0, 1), TOKENS, aside=True))
        assert bench.posted() == CopiedOut(1)
        for page, is_full in ((1, False), (0, True)):
            bench.begin(CompressPage(7, "pool-0.1", page, into))
            assert bench.posted() == PageCompressed("pool-0.1", 7, is_full)
        written, rewritten = arena.contents(0), arena.contents(into)
        assert written is not None
        assert rewritten == replace(written, kind=PageKind.KV_INT8)
        bench.hands.part_from(POOL_MEMBER)
        bench.begin(CompressPage(8, "pool-0.1", 0, into))
        assert bench.posted() == PageCompressed("pool-0.1", 8, done=False)


def test_syntaxes_are_compiled_during_a_step(engine: Engine, path: Path) -> None:
    pace = CopyPace(share=1e-9)
    bench = Bench(engine, path, pace)
    with pace.step():
        bench.begin(PrepareSyntax(replace(request("r", attempt=1), sampling=Sampling(syntax="start: /a+/"))))
        assert bench.posted() == SyntaxReady("r", 1)


def test_where_all_goes_through_the_arena_nothing_is_sent(engine: Engine, path: Path) -> None:
    bench = Bench(engine, path)
    bench.begin(SendKv(1, "decode-0.1", BLOCKS, TOKENS))
    assert bench.posted() == KvSent(1, "decode-0.1", ok=False)
    bench.begin(ReceiveKv(2, "prefill-0.1", BLOCKS, TOKENS))
    assert bench.posted() == KvReceived(2, "prefill-0.1", intact=False)


def test_a_thread_that_computes_alone_leaves_the_others_as_they_are() -> None:
    def threads_here() -> set[int]:
        return {ctypes.CDLL(name).omp_get_max_threads() for name in openmp_libraries()}

    seen: list[set[int]] = []

    def alone() -> None:
        compute_alone()
        seen.append(threads_here())
        torch.ones(1 << 16).add(1.0)  # large enough for several threads
        seen.append(threads_here())

    with torch_threads(2):
        before, beside = threads_here(), threading.Thread(target=alone)
        beside.start()
        beside.join()
        assert 2 in before
        assert (seen, threads_here()) == ([{1}, {1}], before)
