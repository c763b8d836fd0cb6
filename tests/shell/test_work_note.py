"""What a core was working on when its process ended, as its next life finds it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from alignedserve.locks import NotPrivate
from alignedserve.machine.shared_files import remove_stale
from alignedserve.protocol.messages import Attempt
from alignedserve.protocol.wire import MOST_NAMED
from alignedserve.shell.work_note import WorkNote, read

TWO = (("chat-\u00e4", 3), ("s", 0))


def _dies_at(path: Path, *noted: tuple[Attempt, ...]) -> None:
    note = WorkNote(path)
    for attempts in noted:
        note.on(attempts)
    os.kill(os.getpid(), signal.SIGKILL)


def life(path: Path, *noted: tuple[Attempt, ...]) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_dies_at, args=(path, *noted))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_the_next_life_reads_what_a_killed_one_was_working_on(tmp_path: Path) -> None:
    path = tmp_path / "work"
    life(path, (("earlier", 0),), TWO)
    assert read(path) == TWO
    assert WorkNote(path).left == TWO
    note = WorkNote(path)
    assert note.left == TWO, "the life before may have ended before it could say so"
    note.on((("next", 0),))
    note.on(())
    assert WorkNote(path).left == ()


@pytest.mark.parametrize(
    "noted",
    [
        [],
        [TWO, ()],
        [TWO, tuple((str(number), 0) for number in range(MOST_NAMED + 1))],
        [TWO, (("r" * 10_000, 0),)],
    ],
    ids=["nothing", "a turn that is over", "too many to charge", "too long"],
)
def test_else_there_is_nothing_to_read(tmp_path: Path, noted: list[tuple[Attempt, ...]]) -> None:
    note = WorkNote(tmp_path / "work")
    for attempts in noted:
        note.on(attempts)
    assert WorkNote(tmp_path / "work").left == ()


def test_a_note_that_makes_no_sense_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "work").write_bytes(b"\xff" * 100)
    assert WorkNote(tmp_path / "work").left == ()


def test_no_other_deployment_removes_it_while_its_process_lives(tmp_path: Path) -> None:
    note = WorkNote(tmp_path / "work")
    assert remove_stale(tmp_path, "work") == ()
    note.on(TWO)
    assert WorkNote(tmp_path / "work").left == TWO


def test_of_a_part_on_another_machine_nothing_is_known(tmp_path: Path) -> None:
    assert read(tmp_path / "work") == ()


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "work").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotPrivate):
        WorkNote(tmp_path / "work")
    assert read(tmp_path / "work") == ()


def test_what_goes_on_beside_the_core_is_noted_as_long_as_it_does(tmp_path: Path) -> None:
    """A copy from the pool may end the process while its core turns to other requests, or to none."""
    note, copied = WorkNote(tmp_path / "work"), [("copied", 0)]
    note.under_way = lambda: tuple(copied)
    note.on(TWO)
    assert read(tmp_path / "work") == (*TWO, ("copied", 0))
    note.on(())
    assert read(tmp_path / "work") == (("copied", 0),)
    assert note.attempts == ()
    copied.clear()
    note.on(())
    assert read(tmp_path / "work") == ()
