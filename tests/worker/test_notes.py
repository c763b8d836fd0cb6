"""A worker tells the router of its backlog when a request has moved on, or when the router believes something else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.protocol.messages import Backlog, Progress
from alignedserve.worker.log import Notes, WorkerCounts
from tests.worker.step.test_selection import chat, document

FREE = 7


def ahead(all_s: float, rt_s: float = 0.0) -> Backlog:
    return Backlog(all_s, 0.001, rt_s, 0.002, 0.001)


def told(notes: Notes, backlog: Backlog, now: float) -> Progress | None:
    return notes.report(lambda: backlog, FREE, now)


@pytest.fixture
def notes() -> Notes:
    """Return the notes of a worker that told at 10.0 of a backlog of two seconds, of which one is of chats."""
    notes = Notes()
    notes.note("joined", ("a", 0))
    assert told(notes, ahead(2.0, 1.0), 10.0) == Progress(joined=(("a", 0),), free_blocks=FREE, backlog=ahead(2.0, 1.0))
    return notes


def test_nothing_is_told_of_a_backlog_that_runs_off_as_it_was_told(notes: Notes) -> None:
    for seconds in (0.5, 1.0, 1.5, 2.0, 5.0):
        left = ahead(max(0.0, 2.0 - seconds), max(0.0, 1.0 - seconds))
        assert told(notes, left, 10.0 + seconds) is None


def test_a_backlog_that_does_not_run_off_is_told_once_it_has_drifted(notes: Notes) -> None:
    still = ahead(2.0, 1.0)
    assert told(notes, still, 10.2) is None
    assert told(notes, still, 10.4) == Progress(free_blocks=FREE, backlog=still)
    assert told(notes, still, 10.6) is None, "it drifts from what was told last"
    assert told(notes, still, 10.8) == Progress(free_blocks=FREE, backlog=still)


@pytest.mark.parametrize("backlog", [ahead(2.0, 0.4), ahead(1.2, 0.8), ahead(3.0, 0.8), ahead(1.8, 1.2)])
def test_the_wait_of_chats_and_of_all_count_alike(notes: Notes, backlog: Backlog) -> None:
    """The router believes 1.8 and 0.8 seconds."""
    assert told(notes, backlog, 10.2) == Progress(free_blocks=FREE, backlog=backlog)


def test_it_is_not_looked_at_more_often_than_ten_times_a_second(notes: Notes) -> None:
    def never() -> Backlog:
        raise AssertionError

    assert notes.report(never, FREE, 10.05) is None
    assert told(notes, ahead(9.0), 10.11) is not None


def test_what_has_moved_on_is_told_at_once(notes: Notes) -> None:
    notes.note("ended", ("a", 0))
    assert told(notes, ahead(2.0, 1.0), 10.0) == Progress(ended=(("a", 0),), free_blocks=FREE, backlog=ahead(2.0, 1.0))


def test_so_is_less_to_run(notes: Notes) -> None:
    notes.has_less_to_run = True
    assert told(notes, ahead(1.9, 0.9), 10.05) == Progress(free_blocks=FREE, backlog=ahead(1.9, 0.9))
    assert told(notes, ahead(1.9, 0.9), 10.06) is None


@given(st.lists(st.tuples(st.floats(0.1, 1.0), st.floats(0.0, 5.0), st.floats(0.0, 5.0)), max_size=30))
def test_after_each_look_the_router_is_hardly_wrong(looks: list[tuple[float, float, float]]) -> None:
    notes, now, believed, believed_at = Notes(), 0.0, Backlog(), 0.0
    for passed_s, all_s, rt_s in looks:
        now += passed_s
        if (progress := told(notes, ahead(all_s, rt_s), now)) is not None:
            believed, believed_at = progress.backlog, now
        for is_s, was_s in ((all_s, believed.prompts_s), (rt_s, believed.rt_prompts_s)):
            assert abs(is_s - max(0.0, was_s - (now - believed_at))) <= 0.25 + 1e-9


def test_steps_are_counted_by_the_batches_of_their_decodes() -> None:
    counts, (guest, first, other) = WorkerCounts(), (document(name, output=1) for name in "abc")
    first.batch, other.batch = 1, 2
    for decodes in ([guest], [first], [guest, first], [first, other], [guest, first, other], []):
        counts.count_decodes(decodes)
    assert counts.by_batches == [1, 2, 2]


@pytest.mark.parametrize(("runs", "held_back"), [("c", 2), ("cd", 1), ("cde", 0), ("d", 0)])
def test_documents_that_a_step_of_chats_leaves_out_are_counted(runs: str, held_back: int) -> None:
    counts, here = WorkerCounts(), {"c": chat("c", 1.0, output=1), **{name: document(name, output=1) for name in "de"}}
    counts.count_held_back(here.values(), [here[name] for name in runs])
    assert counts.num_held_back == held_back
