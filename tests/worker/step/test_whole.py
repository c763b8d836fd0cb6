"""Prompts that run whole: no step has a part of one, whatever the policy, and each has its turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import Estimate, Pooling
from alignedserve.papers.names import SchedulerName
from alignedserve.scheduling.policy import Chunking, Policy, Room
from alignedserve.worker.step.request import WorkerRequest
from tests.worker.step.test_selection import chat, document, moment, ran, select

POLICIES = [
    Policy(),
    Policy(),
    Policy(SchedulerName.FCFS),
    Policy(SchedulerName.FCFS, chunking=Chunking.FIXED),
    Policy(chunking=Chunking.NONE),
    Policy(room=Room.CHUNKS),
]


def whole(running: WorkerRequest) -> WorkerRequest:
    asked = replace(
        running.request, pooling=Pooling(is_whole=True), max_tokens=1, estimate=Estimate(1, 1), stop_tokens=()
    )
    return replace(running, request=asked)


def test_a_text_that_does_not_fit_waits_for_the_next_step() -> None:
    prompts = [whole(chat("a", 0.9, prompt=300)), whole(chat("b", 0.95, prompt=300))]
    assert ran(select([], prompts, [], moment())) == [("a", 300)]


def test_a_text_that_exactly_fits_runs_beside_others() -> None:
    """A budget of fewer tokens than are left does not keep a text out of the step that has places for all of it."""
    prompts = [whole(chat("a", 0.9, prompt=300)), whole(chat("b", 0.95, prompt=212))]
    at = moment(Policy(budget_pivots=0.1))
    at.pivot = 4000  # a budget of 400 tokens
    assert ran(select([], prompts, [], at)) == [("a", 300), ("b", 212)]


def test_a_text_longer_than_any_step_runs_alone() -> None:
    prompts = [whole(chat("a", 0.9, prompt=700)), whole(chat("b", 0.95, prompt=40))]
    assert ran(select([], prompts[:1], [], moment())) == [("a", 700)]
    assert ran(select([], prompts, [], moment())) in ([("a", 700)], [("b", 40)])


def test_a_text_of_a_document_waits_where_chats_leave_it_no_time() -> None:
    decodes = [chat("a", 0.03, output=3)]
    assert ran(select(decodes, [whole(document("d", prompt=400))], [], moment())) == [("a", 1)]
    assert ran(select(decodes, [whole(document("d", prompt=100))], [], moment())) == [("a", 1), ("d", 100)]


def test_the_first_real_time_text_runs_all_the_same() -> None:
    decodes = [chat("a", 0.0111, output=3)]
    assert ("b", 400) in ran(select(decodes, [whole(chat("b", 0.05, prompt=400))], [], moment()))


def test_a_text_gets_its_seat_with_memory_for_all_of_it() -> None:
    policy = Policy(room=Room.CHUNKS)
    assert ran(select([], [], [whole(document("d", prompt=64))], moment(policy), free=3)) == []
    assert ran(select([], [], [whole(document("d", prompt=64))], moment(policy), free=4)) == [("d", 64)]


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
@given(
    texts=st.lists(
        st.tuples(st.integers(1, 900), st.booleans(), st.booleans(), st.floats(0.001, 2.0)), min_size=1, max_size=12
    ),
    num_decodes=st.integers(0, 3),
    room=st.sampled_from([16, 64, 512]),
    free=st.integers(60, 200),
)
def test_no_step_has_a_part_of_one(
    policy: Policy, texts: list[tuple[int, bool, bool, float]], num_decodes: int, room: int, free: int
) -> None:
    decodes = [chat(f"c{number}", 0.02, output=3) for number in range(num_decodes)]
    waiting = []
    for number, (length, is_rt, is_whole, left_s) in enumerate(texts):
        made = chat(f"t{number}", left_s, length) if is_rt else document(f"t{number}", length)
        waiting.append(whole(made) if is_whole else made)
    found = select(decodes, [], waiting, moment(policy, room), free)
    lengths = {running.request.id: len(running.request.prompt) for running in waiting if running.request.runs_whole}
    for chunk in found.chunks:
        if chunk.request in lengths:
            assert (chunk.start, len(chunk.tokens)) == (0, lengths[chunk.request])
            assert chunk.pooling is not None
            assert chunk.sampling is None
    tokens = sum(len(chunk.tokens) for chunk in found.chunks) + len(found.decodes)
    assert tokens <= room or len(found.chunks) == 1, "only a text that no step has room for exceeds it, by itself"
    if not decodes and not policy.ordering.is_by_arrival:
        assert ran(found), "where nothing decodes a text runs"
