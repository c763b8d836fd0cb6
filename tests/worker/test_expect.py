"""A prediction follows its request: the worker that has the request uses it, and hands it on with the request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import Estimate, ServiceClass, StepResult
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.kvpool.state import PoolCore
from alignedserve.papers.names import SchedulerName
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, CopyOut, RunStep, Send
from alignedserve.protocol.events import CopiedOut, MemberJoined, StepDone
from alignedserve.protocol.messages import AskBatch, AskPages, Batch, Commit, Expect, LeasePages, Prefill
from alignedserve.scheduling.policy import Grouping, Policy, Room
from alignedserve.worker.setup import WorkerSetup
from tests.samples import LIMITS, POOL_MEMBER, entry, request, said

SHORTEST = Policy(SchedulerName.SHORTEST, grouping=Grouping.FCFS, reuse=False)
A, B = (request(name, max_tokens=100) for name in "ab")


def told(name: str, mean: int, attempt: int = 0) -> Expect:
    return Expect(name, attempt, Estimate(mean, 2 * mean))


def ran(commands: list[Command]) -> list[str]:
    return [part.request for command in commands if isinstance(command, RunStep) for part in command.plan.parts]


class TestPrefillWorker:
    @pytest.fixture
    def worker(self) -> PrefillCore:
        """Return a worker that runs prompts one at a time: a long prompt runs, and others wait."""
        core = PrefillCore(WorkerSetup(replace(LIMITS, max_step_tokens=3), SHORTEST))
        core.handle(MemberJoined(POOL_MEMBER), 0.0)
        assert ran(core.handle(said("router", Prefill(request("first", max_tokens=1))), 0.0)) == ["first"]
        for new_request in (A, B):
            core.handle(said("router", Prefill(new_request)), 0.0)
        return core

    @pytest.mark.parametrize("which", ["a", "b"])
    def test_a_request_that_waits_is_ordered_anew(self, worker: PrefillCore, which: str) -> None:
        """The other request is expected to have a hundred tokens of output."""
        assert worker.handle(said("router", told(which, 99)), 0.0) == []
        assert ran(worker.handle(StepDone(StepResult(1, (("first", 0),))), 0.0)) == [which], (
            "the others are taken to say a hundred tokens"
        )

    def test_what_has_gone_on_is_for_the_pool_to_tell(self, worker: PrefillCore) -> None:
        assert worker.handle(said("router", told("gone", 9)), 0.0) == [Send("pool-0", told("gone", 9))]
        assert worker.handle(said("router", told("a", 9, attempt=1)), 0.0) == [Send("pool-0", told("a", 9, attempt=1))]

    def test_the_pool_gets_it_with_the_request(self, worker: PrefillCore) -> None:
        worker.handle(said("router", told("a", 9)), 0.0)
        worker.handle(StepDone(StepResult(1, (("first", 0),))), 0.0)
        through = worker.handle(StepDone(StepResult(2, (("a", 5),))), 0.0)
        [ask] = [
            command.message
            for command in through
            if isinstance(command, Send) and isinstance(command.message, AskPages)
        ]
        leased = worker.handle(said("pool-0", LeasePages((0,), ask.number)), 0.0)
        [copy] = [command for command in leased if isinstance(command, CopyOut)]
        copied = worker.handle(CopiedOut(copy.number), 0.0)
        [commit] = [
            command.message for command in copied if isinstance(command, Send) and isinstance(command.message, Commit)
        ]
        assert commit.entry.request.estimate == Estimate(9, 18)


class TestPool:
    @pytest.fixture
    def pool(self) -> PoolCore:
        core = PoolCore(4, 4, SHORTEST)
        core.handle(said("prefill-0", AskPages(4, 1)), 0.0)
        for page, new_request in enumerate((A, B)):
            core.handle(said("prefill-0", Commit(entry(new_request, (page,)))), 0.0)
        return core

    @pytest.mark.parametrize("which", ["a", "b"])
    def test_a_request_that_waits_is_ordered_anew(self, pool: PoolCore, which: str) -> None:
        estimate = told(which, 99)
        assert pool.handle(said("router", estimate), 0.0) == []
        [batch] = [
            command for command in pool.handle(said("decode-0", AskBatch(1000, 1)), 0.0) if isinstance(command, Send)
        ]
        assert isinstance(batch.message, Batch)
        assert [entry.request.id for entry in batch.message.entries] == [which], (
            "the others are taken to say a hundred tokens"
        )

    def test_a_request_that_was_handed_out_is_told_of_there(self, pool: PoolCore) -> None:
        pool.handle(said("decode-0", AskBatch(1000, 2)), 0.0)
        assert pool.handle(said("prefill-0", told("a", 9)), 0.0) == [Send("decode-0", told("a", 9))]
        assert pool.handle(said("prefill-0", told("a", 9, attempt=1)), 0.0) == []
        assert pool.handle(said("prefill-0", told("nobody", 9)), 0.0) == []


class TestDecodeWorker:
    @pytest.fixture
    def worker(self) -> DecodeCore:
        core = decode_core(WorkerSetup(replace(LIMITS, num_blocks=40), replace(SHORTEST, room=Room.WHOLE)))
        core.handle(MemberJoined(POOL_MEMBER), 0.0)
        return core

    def test_what_runs_there_and_what_has_no_room_yet_are_told_of(self, worker: DecodeCore) -> None:
        long = replace(request("long", max_tokens=150), estimate=Estimate(100, 150))
        worker.handle(said("pool-0", Batch((entry(long, (1,)), entry(A, (2,))))), 0.0)
        assert worker.memory.free_share == pytest.approx(1 - 39 / 40), "who comes second has no room"
        assert worker.handle(said("pool-0", told("a", 9)), 0.0) == []
        assert worker.handle(said("pool-0", told("long", 120)), 0.0) == []
        [waiting] = worker.here.candidates.waiting
        assert waiting.running.request.estimate == waiting.entry.request.estimate == Estimate(9, 18)
        [running] = [occupant for occupant in worker.here.occupants() if occupant.request.id == "long"]
        assert running.request.estimate == Estimate(120, 240)

    def test_nobody_is_told_of_what_is_not_here(self, worker: DecodeCore) -> None:
        assert worker.handle(said("pool-0", told("nobody", 9)), 0.0) == []


def test_a_prediction_moves_no_plan_of_steps() -> None:
    """The due times of a document do not depend on its predicted output: only its place among others does."""
    worker = decode_core(WorkerSetup(LIMITS, Policy()))
    document = replace(A, service=ServiceClass.BE)
    worker.handle(said("router", Prefill(document)), 0.0)
    [running] = [*worker.queue.waiting, *worker.here.occupants()]
    before = running.promise.due_at(0.0)
    worker.handle(said("router", told("a", 2)), 0.0)
    assert running.promise.due_at(0.0) == before
