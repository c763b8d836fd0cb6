"""The arena: a read is right or fails, and no process loses its memory while it lives."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from alignedserve.errors import ArenaError, ArenaTooSmall, LeaseError
from alignedserve.kvpool.arena.arena import Arena, Contents
from alignedserve.machine.shared_files import HolderLock, check_space, is_held, remove_ended, remove_stale
from alignedserve.protocol.extents import PageKind

NAME = "alignedserve-test-node0"
CONTENTS = Contents(PageKind.KV, length=5, token_hash=2**64 - 3)
TEXT = b"KV of five tokens"

ATTACH = "from alignedserve.kvpool.arena.arena import Arena; arena = Arena.attach(path / name)"
HOLD = "from alignedserve.machine.shared_files import HolderLock; lock = HolderLock(path, name)"
SCRIBBLE = f"""
{ATTACH}
import itertools, threading, time
from alignedserve.kvpool.arena.arena import Contents
from alignedserve.protocol.extents import PageKind
def scribble():
    for turn in itertools.count():
        arena.begin_write(1)
        arena.payload(1)[:] = bytes([turn % 256]) * arena.payload_bytes
        arena.end_write(1, Contents(PageKind.KV, {CONTENTS.length}, {CONTENTS.token_hash}))
        time.sleep(0.00005)
threading.Thread(target=scribble, daemon=True).start()
"""
WRITE = f"{ATTACH}; arena.begin_write(0); arena.payload(0)[:4] = b'torn'"


@contextmanager
def process(directory: Path, code: str, name: str = NAME) -> Iterator[subprocess.Popen[str]]:
    """Start another process, which has run the code and lives on."""
    program = (
        f"import pathlib, sys; path, name = pathlib.Path(sys.argv[1]), sys.argv[2]\n{code}\nprint(flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(directory), name],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "\n", "the child died before it was ready"
            yield child
        finally:
            child.kill()


def create(directory: Path, pages: int = 3, incarnation: int = 7) -> Arena:
    return Arena.create(directory / NAME, pages=pages, payload_bytes=5000, page_size=64, incarnation=incarnation)


def write(arena: Arena, page: int = 1, contents: Contents = CONTENTS, checksum: int = 0) -> None:
    arena.begin_write(page)
    arena.payload(page)[: len(TEXT)] = TEXT
    arena.end_write(page, contents, checksum)


def nothing(_: memoryview) -> None:
    pass


def reads(arena: Arena, page: int = 1, contents: Contents = CONTENTS) -> bool:
    return arena.read(page, contents, nothing)


def poke(arena: Arena, page: int, word: int, value: int) -> None:
    """Change a word of a page's header in the file, laid out as in the drawing in arena.py."""
    with arena.path.open("r+b") as file:
        file.seek(4096 + 64 * page + 8 * word)
        file.write(value.to_bytes(8, sys.byteorder))


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = create(tmp_path)
    yield made
    made.close()


# --- One process writes, another reads.


def test_what_a_process_writes_another_process_reads(arena: Arena) -> None:
    write(arena)
    attached = Arena.attach(arena.path, incarnation=7)
    copied: list[bytes] = []
    assert attached.read(1, CONTENTS, lambda payload: copied.append(bytes(payload[: len(TEXT)])))
    assert copied == [TEXT]
    assert (attached.num_pages, attached.payload_bytes, attached.page_size, attached.incarnation) == (3, 5000, 64, 7)
    attached.close()


def test_a_process_has_the_arena_mapped_before_it_writes(tmp_path: Path) -> None:
    """Until then it has next to nothing of an arena of several pieces; where to go on ends with the arena."""
    made = Arena.create(tmp_path / NAME, pages=9, payload_bytes=1 << 20, page_size=16, incarnation=7)
    with closing(made), closing(Arena.attach(made.path)) as attached:
        before, starts = mapped_kb(attached.path), [0]
        while (start := attached.map_ahead(starts[-1])) is not None:
            starts.append(start)
        assert starts == [0, 4 << 20, 8 << 20]
        assert mapped_kb(attached.path) - before > 9 << 10


def mapped_kb(path: Path) -> int:
    """Return how much of the file the system has mapped for this process."""
    kb, is_of_it = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):
            is_of_it = rest[-1] == str(path)
        elif is_of_it and key == "Rss:":
            kb += int(rest[0])
    return kb


def test_payloads_lie_apart_and_aligned(arena: Arena) -> None:
    for page in range(arena.num_pages):
        arena.begin_write(page)
        arena.payload(page)[:] = bytes([page + 1]) * arena.payload_bytes
        arena.end_write(page, CONTENTS)
    assert [set(arena.payload(page)) for page in range(arena.num_pages)] == [{1}, {2}, {3}]
    raw = arena.path.read_bytes()
    assert len(raw) % 4096 == 0
    assert all(raw.index(bytes([page + 1]) * 5000) % 4096 == 0 for page in range(arena.num_pages))
    assert all(reads(arena, page) for page in range(arena.num_pages))


@pytest.mark.parametrize("page", [-1, 3])
def test_a_page_outside_is_refused(arena: Arena, page: int) -> None:
    uses: list[Callable[[int], object]] = [arena.payload, arena.begin_write, lambda page: reads(arena, page)]
    for use in uses:
        with pytest.raises(ArenaError, match=f"page {page} is outside"):
            use(page)


def test_an_end_without_a_beginning_is_refused(arena: Arena) -> None:
    with pytest.raises(ArenaError, match="page 1 is not being written"):
        arena.end_write(1, CONTENTS)


# --- A read is right or fails.


def test_a_page_never_written_is_not_read(arena: Arena) -> None:
    assert not reads(arena)
    assert not reads(arena, contents=Contents(PageKind.KV, 0, 0))


@pytest.mark.parametrize(
    "wrong", [replace(CONTENTS, length=4), replace(CONTENTS, length=6), replace(CONTENTS, token_hash=1)]
)
def test_other_contents_are_not_read(arena: Arena, wrong: Contents) -> None:
    write(arena, contents=wrong)
    copied: list[memoryview] = []
    assert not arena.read(1, CONTENTS, copied.append)
    assert not copied


def test_another_kind_is_not_read(arena: Arena) -> None:
    write(arena)
    poke(arena, page=1, word=2, value=2)
    assert not reads(arena)
    poke(arena, page=1, word=2, value=PageKind.KV)
    assert reads(arena)


def test_a_page_of_another_incarnation_is_not_read(arena: Arena) -> None:
    write(arena)
    poke(arena, page=1, word=1, value=6)
    assert not reads(arena)
    poke(arena, page=1, word=1, value=7)
    assert reads(arena)


def test_a_page_is_not_read_while_it_is_written(arena: Arena) -> None:
    write(arena)
    arena.begin_write(1)
    assert not reads(arena)
    arena.end_write(1, CONTENTS)
    assert reads(arena)


def test_a_write_that_was_killed_is_not_read_and_can_be_written_anew(tmp_path: Path, arena: Arena) -> None:
    write(arena, page=0)
    with process(tmp_path, WRITE) as writer:
        writer.kill()
        writer.wait()
    assert bytes(arena.payload(0)[:4]) == b"torn"
    assert not reads(arena, page=0)
    arena.begin_write(0)
    assert not reads(arena, page=0)
    arena.end_write(0, CONTENTS)
    assert reads(arena, page=0)


def test_a_write_during_the_copy_is_noticed(arena: Arena) -> None:
    write(arena, checksum=9)

    def overtaken(_: memoryview) -> None:
        write(arena, checksum=9)  # the same contents once more: only the generation differs

    assert not arena.read(1, CONTENTS, overtaken)
    assert reads(arena)


def test_a_write_that_began_during_the_copy_is_noticed(arena: Arena) -> None:
    write(arena)
    assert not arena.read(1, CONTENTS, lambda _: arena.begin_write(1))


def test_a_read_beside_a_writer_returns_a_single_write(tmp_path: Path, arena: Arena) -> None:
    copied = bytearray(arena.payload_bytes)
    num_read = 0
    with process(tmp_path, SCRIBBLE):
        for _ in range(20_000):
            if arena.read(1, CONTENTS, lambda payload: copied.__setitem__(slice(None), payload)):
                num_read += 1
                assert copied.count(copied[0]) == len(copied)
    assert num_read > 0


@pytest.mark.parametrize(("stored", "right"), [(9, True), (8, False), (0, False)])
def test_the_checksum_must_be_that_of_the_payload(arena: Arena, stored: int, right: bool) -> None:
    write(arena, checksum=stored)
    assert arena.read(1, CONTENTS, lambda _: 9) is right
    assert reads(arena), "without verification the checksum does not matter"


# --- Which process may have which file.


def test_no_arena(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match=f"no arena at {tmp_path / NAME}"):
        Arena.attach(tmp_path / NAME)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"x" + raw[1:], "not an arena"),
        (lambda _: b"", "not an arena"),
        (lambda raw: raw[:8] + b"\1" + raw[9:], "has layout 1, this AlignedServe has 3"),
        (lambda raw: raw[:-1], "does not have the"),
    ],
)
def test_what_is_not_an_arena_of_this_layout(arena: Arena, change: Callable[[bytes], bytes], message: str) -> None:
    path = arena.path.with_name("changed")
    path.write_bytes(change(arena.path.read_bytes()))
    with pytest.raises(ArenaError, match=message):
        Arena.attach(path)


def test_an_arena_of_another_incarnation_is_refused(arena: Arena) -> None:
    with pytest.raises(ArenaError, match="is of pool incarnation 7, not 8"):
        Arena.attach(arena.path, incarnation=8)


def test_a_new_life_of_the_pool_takes_the_name_and_leaves_the_old_memory(tmp_path: Path, arena: Arena) -> None:
    write(arena)
    later = create(tmp_path, incarnation=8)
    assert reads(arena)
    assert not reads(later)
    arena.unlink()  # too late: the name belongs to the new arena
    Arena.attach(later.path, incarnation=8).close()
    later.unlink()
    assert list(tmp_path.iterdir()) == []
    later.close()


def test_the_name_of_an_earlier_arena_is_taken_away_before_the_next_arena_needs_memory(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late reader must not map the earlier arena: its memory would be free only when that reader closes it."""
    size = arena.path.stat().st_size

    def room_for_one(_: int) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=0 if arena.path.exists() else size, f_frsize=1)

    monkeypatch.setattr(os, "statvfs", room_for_one)
    later = create(tmp_path, incarnation=8)
    Arena.attach(later.path, incarnation=8).close()
    later.close()


def test_an_arena_that_cannot_be_made_leaves_no_earlier_arena_either(tmp_path: Path, arena: Arena) -> None:
    """The pool of the earlier arena has ended: no process may find that arena."""
    with pytest.raises(ArenaTooSmall):
        create(tmp_path, pages=1 << 40, incarnation=8)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArenaError, match="there is no arena"):
        Arena.attach(arena.path)


def test_a_tensor_on_a_payload_keeps_the_mapping(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    arena = create(tmp_path)
    tensor = torch.frombuffer(arena.payload(0), dtype=torch.uint8)
    with pytest.raises(BufferError):
        arena.close()
    assert int(tensor.sum()) == 0
    del tensor
    arena.close()


def test_what_a_process_maps_is_not_stale(tmp_path: Path) -> None:
    create(tmp_path).close()
    with process(tmp_path, ATTACH) as worker:
        assert remove_stale(tmp_path, "alignedserve-") == ()
        assert (tmp_path / NAME).exists()
        worker.kill()
        worker.wait()
        assert remove_stale(tmp_path, "other-") == ()
        assert remove_stale(tmp_path, "alignedserve-", living=NAME[:-1]) == ()
        assert remove_stale(tmp_path, "alignedserve-") == (tmp_path / NAME,)
    assert list(tmp_path.iterdir()) == []


def test_what_an_ending_process_maps_is_removed_once_it_has_ended(tmp_path: Path) -> None:
    create(tmp_path).close()
    with process(tmp_path, ATTACH) as worker:
        with ThreadPoolExecutor() as threads:
            removed = threads.submit(remove_ended, tmp_path, "alignedserve-", NAME)
            with pytest.raises(TimeoutError):
                removed.result(timeout=0.2)
            worker.kill()
            removed.result()
        worker.wait()
    assert list(tmp_path.iterdir()) == []


def test_closing_a_mapping_leaves_the_other_mapping_its_lock(tmp_path: Path, arena: Arena) -> None:
    Arena.attach(arena.path).close()
    assert remove_stale(tmp_path, NAME) == ()


def test_what_a_killed_creator_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """Else each kill at this time would take a pool's size of memory until the launcher starts again."""
    unfinished = """
import os, signal
from alignedserve.kvpool.arena.arena import Arena
os.posix_fallocate = lambda *_: (print(flush=True), signal.pause())
Arena.create(path / name, pages=3, payload_bytes=64, page_size=64, incarnation=1)
"""
    with process(tmp_path, unfinished) as creator:
        assert len(list(tmp_path.iterdir())) == 1
        assert not (tmp_path / NAME).exists()
        assert remove_stale(tmp_path, NAME) == ()
        creator.kill()
        creator.wait()
    with closing(create(tmp_path)):
        assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_holder_is_held_until_it_is_killed(tmp_path: Path) -> None:
    assert not is_held(tmp_path, NAME)
    with process(tmp_path, HOLD) as holder:
        assert is_held(tmp_path, NAME)
        assert not is_held(tmp_path, f"{NAME}-other")
        with pytest.raises(LeaseError, match="lives in another process"):
            HolderLock(tmp_path, NAME)
        assert remove_stale(tmp_path, NAME) == ()
        holder.kill()
        holder.wait()
        assert not is_held(tmp_path, NAME)
    lock = HolderLock(tmp_path, NAME)
    assert is_held(tmp_path, NAME)
    lock.release()
    assert not is_held(tmp_path, NAME)
    assert list(tmp_path.iterdir()) == []


def test_the_lock_file_of_a_dead_holder_is_removed(tmp_path: Path) -> None:
    with process(tmp_path, HOLD) as holder:
        holder.kill()
        holder.wait()
    assert remove_stale(tmp_path, NAME) == (tmp_path / f"{NAME}.lock",)


# --- Space.


def test_too_little_space_is_said_before_a_file_is_made(tmp_path: Path) -> None:
    message = r"MiB free and the KV pool needs \d+ MiB: lower --pool-memory-mb or, in a container, raise its --shm-size"
    with pytest.raises(ArenaTooSmall, match=message):
        create(tmp_path, pages=1 << 40)
    with pytest.raises(ArenaTooSmall):
        check_space(tmp_path, 1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="does not exist"):
        check_space(tmp_path / "shm", 1)


@pytest.mark.parametrize(
    ("error", "raised"), [(errno.ENOSPC, ArenaTooSmall), (errno.EIO, ArenaError), (errno.EINTR, ArenaError)]
)
def test_space_that_goes_meanwhile_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, raised: type[Exception]
) -> None:
    def gone(*_: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", gone)
    with pytest.raises(raised):
        create(tmp_path)
    assert list(tmp_path.iterdir()) == []
