"""A decode worker whose blocks two requests may share: chats join and grow, and no request has to leave."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.core import Chunk, Request, ServiceClass, StepResult, WorkerLimits
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.lab.fuzzing.worker_views import num_preemptions, slots_of
from alignedserve.protocol.commands import (
    Command,
    RunStep,
)
from alignedserve.protocol.events import Event, StepDone
from alignedserve.protocol.form_orders import CopySlots
from alignedserve.protocol.messages import ROUTER, Cancel, Prefill
from alignedserve.scheduling.policy import Policy, Room
from alignedserve.worker.setup import WorkerSetup
from tests.samples import request, said

SHARED = Policy(room=Room.GROWING, memory="two_ended")
LIMITS = WorkerLimits(num_blocks=4, block_size=4, page_size=8, max_step_tokens=16, max_batch=4)


def chat(name: str = "chat", prompt: int = 2, max_tokens: int = 3) -> Request:
    return request(name, prompt, max_tokens)


def document(name: str = "document", prompt: int = 13, max_tokens: int = 4) -> Request:
    return replace(request(name, prompt, max_tokens), service=ServiceClass.BE)


class Worker:
    """Run a colocated worker whose engine always samples token 7."""

    def __init__(self, policy: Policy = SHARED, limits: WorkerLimits = LIMITS) -> None:
        self.core = decode_core(WorkerSetup(limits, policy))
        self.ordered: list[Command] = []
        self.now = 0.0

    def hears(self, event: Event) -> list[Command]:
        self.ordered += (new := self.core.handle(event, self.now))
        return new

    def asked(self, request: Request) -> list[Command]:
        return self.hears(said(ROUTER, Prefill(replace(request, arrival_at=self.now))))

    @property
    def step(self) -> RunStep:
        """Return the newest step that was ordered."""
        return next(command for command in reversed(self.ordered) if isinstance(command, RunStep))

    def steps(self) -> list[Command]:
        """End the newest step, and return the commands that follow."""
        self.now += 0.01
        plan = self.step.plan
        sampled = tuple((part.request, 7) for part in plan.parts if part.sampling is not None)
        return self.hears(StepDone(StepResult(plan.number, sampled), 0.01))

    @property
    def runs(self) -> list[str]:
        return [part.request for part in self.step.plan.parts]


def with_a_document(policy: Policy = SHARED) -> Worker:
    """Return a worker whose document decodes and has all blocks; the last block has an empty slot at the next step."""
    worker = Worker(policy)
    worker.asked(document())
    worker.steps()
    return worker


def sharing(worker: Worker) -> set[int]:
    """Return the blocks with two requests."""
    shared = slots_of(worker.core.memory)
    assert shared is not None
    return {*shared.left} & {*shared.right}


def copies(commands: list[Command]) -> list[CopySlots]:
    return [command for command in commands if isinstance(command, CopySlots)]


class TestAChat:
    def test_joins_where_a_document_has_all_memory(self) -> None:
        worker = with_a_document()
        worker.asked(chat())
        first = worker.steps()
        assert "chat" in worker.runs
        (chunk,) = worker.step.plan.chunks
        assert min(chunk.kv.blocks) >= 0
        assert sharing(worker)
        assert num_preemptions(worker.core) == 0
        assert [type(command) for command in first if isinstance(command, CopySlots | RunStep)][-1] is RunStep

    def test_and_the_document_run_together_until_they_meet(self) -> None:
        worker = with_a_document()
        worker.asked(chat(prompt=1, max_tokens=1))
        worker.steps()
        assert set(worker.runs) == {"chat", "document"}
        while worker.core.held["requests"]:
            worker.steps()
        assert not copies(worker.ordered)

    def test_has_the_slots_that_it_takes_sent_away_before_its_step(self) -> None:
        worker = with_a_document()
        worker.asked(chat(prompt=3))
        commands = worker.steps()
        (copy,) = copies(commands)
        assert copy.checkpoints
        assert commands.index(copy) < commands.index(worker.step)
        assert worker.runs == ["chat"]

    def test_that_has_ended_gives_the_document_its_slots_back(self) -> None:
        worker = with_a_document()
        worker.asked(chat(prompt=3))
        while "document" not in worker.runs or worker.core.held["requests"] == 2:
            worker.steps()
        sent = [slot for copy in copies(worker.ordered) for slot, _ in copy.checkpoints]
        back = [slot for copy in copies(worker.ordered) for _, slot in copy.restores]
        assert sorted(back) == sorted(sent)
        while worker.core.held["requests"]:
            worker.steps()
        assert num_preemptions(worker.core) == 0, "nothing was computed twice"
        assert worker.core.held == {"requests": 0, "blocks": 0, "pages": 0, "outputs": 2}

    def test_that_is_cancelled_keeps_its_slots_to_the_end_of_the_step(self) -> None:
        worker = with_a_document()
        worker.asked(chat(prompt=3))
        worker.steps()
        before = sharing(worker)
        worker.hears(said(ROUTER, Cancel("chat", 0)))
        assert sharing(worker) == before != set(), "the step writes there"
        worker.steps()
        assert not sharing(worker)
        assert worker.runs == ["document"]

    def test_finds_a_seat_however_many_documents_are_seated(self) -> None:
        """The chat also finds a place in a step: one of the documents is paused, and keeps what it has."""
        worker = Worker(limits=replace(LIMITS, max_batch=2))
        for name in ("document", "other"):
            worker.asked(document(name, prompt=3, max_tokens=5))
        worker.steps()
        worker.steps()
        worker.asked(chat())
        worker.steps()
        assert "chat" in worker.runs
        assert len(worker.runs) <= 2
        assert worker.core.held["requests"] == 3
        while worker.core.held["requests"]:
            worker.steps()
        assert num_preemptions(worker.core) == 0

    def test_has_a_document_leave_where_nothing_can_be_kept_of_it(self) -> None:
        worker = with_a_document(replace(SHARED, memory="two_ended:0.0"))
        worker.asked(chat(prompt=1, max_tokens=7))
        while worker.core.held["requests"]:
            worker.steps()
        assert num_preemptions(worker.core) == 1
        assert not any(copy.checkpoints for copy in copies(worker.ordered))


class TestADocument:
    def test_fills_its_blocks_from_the_right(self) -> None:
        worker = with_a_document()
        (decode,) = worker.step.plan.decodes
        assert max(decode.kv.blocks) < 0

    def test_that_comes_waits_while_another_lacks_slots(self) -> None:
        worker = with_a_document()
        worker.asked(chat(prompt=3, max_tokens=7))
        worker.steps()
        assert copies(worker.ordered)
        worker.asked(document("newer", prompt=1, max_tokens=1))
        runs = list[list[str]]()
        while worker.core.held["requests"]:
            worker.steps()
            runs.append(worker.runs)
        came = next(at for at, names in enumerate(runs) if "newer" in names)
        assert any("document" in names for names in runs[: came + 1])

    def test_goes_on_from_where_it_was(self) -> None:
        """Each token of the paused document runs once, in order."""
        worker = with_a_document()
        worker.asked(chat(prompt=3))
        ran = list[int]()
        while worker.core.held["requests"]:
            for part in worker.step.plan.parts:
                if part.request == "document":
                    ran += range(part.start, part.start + (len(part.tokens) if isinstance(part, Chunk) else 1))
            worker.steps()
        assert ran == sorted(set(ran))


def test_the_request_that_came_first_gets_its_slots_back_first() -> None:
    """One of two chats ends, which makes room for one of two documents."""
    worker = Worker(limits=replace(LIMITS, num_blocks=12, max_step_tokens=64))
    worker.asked(document("first", prompt=14, max_tokens=20))
    worker.asked(document("second", prompt=14, max_tokens=10))
    worker.steps()
    worker.steps()
    worker.asked(chat("stays", prompt=13, max_tokens=10))
    worker.asked(chat("goes", prompt=17, max_tokens=2))
    worker.steps()
    assert set(worker.runs) == {"stays", "goes"}
    assert any(copy.checkpoints for copy in copies(worker.ordered))
    while set(worker.runs) <= {"stays", "goes"}:
        worker.steps()
    assert [name for name in worker.runs if name != "stays"] == ["first"]
