"""Each policy has the memory that the table names for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.papers.memory.hybrid import HybridMemory, WeighedMemory
from alignedserve.papers.memory.two_ended import TwoEndedMemory
from alignedserve.papers.names import SchedulerName
from alignedserve.scheduling.policy import Chunking, Policy, Room
from alignedserve.worker.memory import PlainMemory
from alignedserve.worker.setup import WorkerSetup
from tests.samples import LIMITS
from tests.worker.step.test_selection import choose, document, moment, waits

GROWING = Policy(room=Room.GROWING)
PLAIN = Policy(SchedulerName.APT_SERVE, Chunking.NONE, Room.GROWING, memory="weighed")


@pytest.mark.parametrize(
    ("policy", "memory"),
    [
        (GROWING, PlainMemory),
        (replace(GROWING, memory="two_ended"), TwoEndedMemory),
        (replace(GROWING, memory="hybrid"), HybridMemory),
        (PLAIN, WeighedMemory),  # a knapsack weighs requests as KV, too
    ],
    ids=["plain", "shared", "hybrid", "knapsack"],
)
def test_a_policy_has_its_memory(policy: Policy, memory: type[PlainMemory]) -> None:
    assert policy.problem is None
    assert type(decode_core(WorkerSetup(LIMITS, policy)).memory) is memory


def test_one_seat_where_blocks_are_shared_is_for_one_request() -> None:
    policy = replace(GROWING, memory="two_ended")
    memory, at = decode_core(WorkerSetup(replace(LIMITS, block_size=16), policy)).memory, moment(policy)
    waiting = waits([document("a", prompt=10), document("b", prompt=10)], at)
    found = choose([], [], waiting, at, memory.seating(1, waiting, at))
    assert [running.request.id for running in found.admitted] == ["a"]


def test_only_blocks_of_one_request_are_written_to_beside_the_steps() -> None:
    assert GROWING.block_use.why_not_direct is None
    assert replace(GROWING, memory="two_ended").block_use.why_not_direct is not None


def test_documents_are_not_put_in_order_where_none_has_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """To put them in order counts promises as missed, and takes long while a chat waits for memory at each event."""
    memory = decode_core(WorkerSetup(LIMITS, GROWING)).memory

    def fail(*_: object) -> None:
        raise AssertionError("documents are put in order")

    monkeypatch.setattr("alignedserve.worker.memory.as_they_leave", fail)
    assert memory.yielding(LIMITS.block_size, memory.context(0.0)) == []
    assert memory.yielding(10**9, memory.context(0.0)) == []
