"""Tests that documents run less beside chats that fill the memory, and use all the time that is left beside few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from alignedserve.core import KvForm
from alignedserve.schedulers.aligned import LEAST, crowded_s
from alignedserve.worker.step.request import WorkerRequest
from alignedserve.worker.step.view import StepContext, StepView
from tests.worker.step.test_selection import chat, document, moment, seating, select, waits

PAIRS = 100
CHATS_S = 0.014  # of a step of four chats


def chats_with(pairs: int, num: int = 4) -> list[WorkerRequest]:
    """Return chats that hold so many pairs together."""
    chats = [chat(f"c{number}", 0.9, output=3) for number in range(num)]
    for running in chats:
        running.kv = KvForm((0,) * (pairs // num))
    return chats


def view_of(here: Sequence[WorkerRequest], at: StepContext) -> StepView:
    return StepView((), (), waits((), at), at, replace(seating(0, at), total=PAIRS), here)


def bound_s(seated: Sequence[WorkerRequest]) -> float:
    return crowded_s(view_of(seated, moment()))


def test_documents_have_all_time_where_memory_is_plenty() -> None:
    assert bound_s([*chats_with(40), document("d", output=3)]) == inf
    assert bound_s([]) == bound_s([document("d", output=3)]) == inf


def test_chats_among_themselves_have_no_such_bound() -> None:
    assert bound_s(chats_with(100)) == inf


def test_the_more_memory_chats_hold_the_shorter_steps_are() -> None:
    bounds = [bound_s([*chats_with(pairs), document("d", output=3)]) for pairs in range(44, 101, 8)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] < 3 * CHATS_S
    assert bounds[-1] == pytest.approx(LEAST * CHATS_S, rel=0.05)


def test_a_crowded_step_is_short() -> None:
    at = moment()
    seated = [*chats_with(96), *(document(f"d{number}", output=3) for number in range(20))]
    crowded = replace(at, calm_s=crowded_s(view_of(seated, at)))
    assert select(seated, [], [], at).predicted_s > 2 * CHATS_S
    assert select(seated, [], [], crowded).predicted_s <= LEAST * CHATS_S
