"""Copies from the pool that go on beside the steps of a decode worker: what runs meanwhile, and whose the blocks
are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest

from alignedserve.core import Request, StepPlan, StepResult, WorkerLimits
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.lab.fuzzing.worker_views import blocks_of
from alignedserve.protocol.commands import Command, CopyIn, RunStep, Send
from alignedserve.protocol.events import CopiedIn, Event, MemberJoined, MemberLost, StepDone
from alignedserve.protocol.messages import ROUTER, Batch, Cancel, Prefill, Prefix, Progress, Release
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.setup import WorkerSetup
from tests.samples import POOL_MEMBER, ROUTER_MEMBER, entry, request, said

LIMITS = WorkerLimits(num_blocks=12, block_size=4, page_size=8, max_step_tokens=8, max_batch=4)
PLAIN = Policy(reuse=False)
A, B, C = (request(name, max_tokens=30) for name in "abc")


class Bench:
    """A decode worker whose steps and copies the test ends."""

    def __init__(self, policy: Policy = PLAIN, look_ahead: int = 0) -> None:
        self.core = decode_core(WorkerSetup(LIMITS, policy, look_ahead=look_ahead, copies_beside=True))
        self.plans, self.copies, self.said = list[StepPlan](), list[CopyIn](), list[object]()
        self._num_ended = 0
        self.hears(MemberJoined(POOL_MEMBER))
        self.hears(MemberJoined(ROUTER_MEMBER))

    def hears(self, event: Event) -> list[Command]:
        commands = self.core.handle(event, 0.0)
        for command in commands:
            match command:
                case RunStep(plan):
                    self.plans.append(plan)
                case CopyIn():
                    self.copies.append(command)
                case Send(message=message):
                    self.said.append(message)
        return commands

    def gets(self, asked: Request, page: int = 5) -> CopyIn:
        """Hand the request out to the worker, and return the copy that it orders."""
        self.hears(said("pool-0", Batch((entry(asked, (page,)),))))
        return self.copies[-1]

    def joins(self, asked: Request, page: int = 5) -> None:
        self.hears(CopiedIn(self.gets(asked, page).number, intact=True))

    def ends_step(self) -> None:
        plan = self.plans[self._num_ended]
        self._num_ended += 1
        self.hears(StepDone(StepResult(plan.number, tuple((part.request, 9) for part in plan.parts))))

    @property
    def running(self) -> list[str]:
        """Return the requests of the step that runs."""
        return names(self.plans[self._num_ended])

    @property
    def num_runs(self) -> int:
        """Return how many steps were ordered and have not ended."""
        return len(self.plans) - self._num_ended

    @property
    def lost(self) -> list[tuple[str, int]]:
        return [key for message in self.said if isinstance(message, Progress) for key in message.lost]


def names(plan: StepPlan) -> list[str]:
    return [part.request for part in plan.parts]


def blocks_in(plans: Iterable[StepPlan]) -> set[int]:
    return {block for plan in plans for part in plan.parts for block in part.kv.blocks}


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_others_decode_while_the_pages_of_a_request_are_copied(look_ahead: int) -> None:
    bench = Bench(look_ahead=look_ahead)
    bench.joins(A)
    copy = bench.gets(B, page=6)
    assert copy.aside
    first = len(bench.plans)
    for _ in range(4):
        bench.ends_step()
        assert bench.running == ["a"]
        assert bench.num_runs == 1 + look_ahead, "steps are planned ahead as if nothing were copied"
    assert not blocks_in(bench.plans[first:]) & set(copy.blocks), "nobody else has its blocks"
    num_planned = len(bench.plans)
    bench.hears(CopiedIn(copy.number, intact=True))
    while len(bench.plans) == num_planned:
        bench.ends_step()
    assert names(bench.plans[num_planned]) == ["a", "b"], "it is in the first step that is planned from then on"


def test_a_worker_that_has_nothing_else_waits_for_the_copy() -> None:
    bench = Bench()
    copy = bench.gets(A)
    assert not bench.plans
    bench.hears(CopiedIn(copy.number, intact=True))
    assert bench.running == ["a"]


def test_a_request_that_is_cancelled_meanwhile_has_its_blocks_until_the_copy_has_ended() -> None:
    bench = Bench()
    bench.joins(A)
    copy = bench.gets(B, page=6)
    bench.hears(said(ROUTER, Cancel("b", 0)))
    assert Release("b", 0) in bench.said
    assert sorted(bench.core.here.attempts()) == [("a", 0)]
    other = bench.gets(C, page=7)
    assert not set(other.blocks) & set(copy.blocks)
    for _ in range(3):
        bench.ends_step()
    assert not blocks_in(bench.plans) & set(copy.blocks)
    taken = bench.core.held["blocks"]
    bench.hears(CopiedIn(copy.number, intact=True))
    assert bench.core.held["blocks"] == taken - len(copy.blocks)
    assert "b" not in bench.running


def test_the_next_attempt_does_not_get_the_blocks_of_the_one_that_is_copied() -> None:
    bench = Bench()
    copy = bench.gets(A)
    again = bench.gets(replace(A, attempt=1), page=6)
    assert not set(again.blocks) & set(copy.blocks)
    bench.hears(CopiedIn(copy.number, intact=False))
    assert not bench.plans
    assert not bench.lost
    bench.hears(CopiedIn(again.number, intact=True))
    assert bench.running == ["a"]


def test_when_the_pool_is_lost_others_go_on_and_the_request_is_lost_at_the_end_of_its_copy() -> None:
    bench = Bench()
    bench.joins(A)
    copy = bench.gets(B, page=6)
    bench.hears(MemberLost(POOL_MEMBER))
    bench.ends_step()
    assert bench.running == ["a"]
    assert not bench.lost
    bench.hears(CopiedIn(copy.number, intact=False))
    assert bench.lost == [("b", 0)]
    assert bench.core.log.counts.num_refused == 0, "its pages were not wrong: they have gone"


def test_a_copy_that_is_not_intact_is_refused_while_others_run() -> None:
    bench = Bench()
    bench.joins(A)
    copy = bench.gets(B, page=6)
    taken = bench.core.held["blocks"]
    bench.hears(CopiedIn(copy.number, intact=False))
    assert (bench.lost, bench.core.log.counts.num_refused) == ([("b", 0)], 1)
    assert bench.core.held["blocks"] == taken - len(copy.blocks)
    bench.ends_step()
    assert bench.running == ["a"]


class TestPrefixes:
    """Prompts that go on from pages which the pool knows."""

    PAGES = (4, 5)

    def bench(self) -> tuple[Bench, CopyIn]:
        """Return a worker where one request decodes, and the pages of a prompt are being copied."""
        bench = Bench(Policy())
        bench.joins(A)
        bench.hears(said(ROUTER, Prefill(request("long", prompt=20, max_tokens=5))))
        bench.hears(said("pool-0", Prefix("long", 0, self.PAGES)))
        bench.ends_step()
        assert bench.copies[-1].pages == self.PAGES
        assert bench.copies[-1].aside
        return bench, bench.copies[-1]

    def test_others_decode_while_they_are_copied_and_the_prompt_goes_on_from_there(self) -> None:
        bench, copy = self.bench()
        for _ in range(3):
            assert bench.running == ["a"]
            bench.ends_step()
        assert not blocks_in(bench.plans) & set(copy.blocks)
        bench.hears(CopiedIn(copy.number, intact=True))
        bench.ends_step()
        (chunk,) = bench.plans[-1].chunks
        assert (chunk.request, chunk.start) == ("long", 16)
        assert bench.running == ["long", "a"]

    def test_what_is_not_intact_is_computed(self) -> None:
        bench, copy = self.bench()
        bench.hears(CopiedIn(copy.number, intact=False))
        bench.ends_step()
        (chunk,) = bench.plans[-1].chunks
        assert (chunk.request, chunk.start) == ("long", 0)

    def test_a_prompt_that_is_cancelled_has_its_blocks_until_the_copy_has_ended(self) -> None:
        bench, copy = self.bench()
        bench.hears(said(ROUTER, Cancel("long", 0)))
        taken = bench.core.held["blocks"]
        bench.ends_step()
        assert bench.core.held["blocks"] == taken
        bench.hears(CopiedIn(copy.number, intact=True))
        assert bench.core.held["blocks"] < taken
        assert bench.running == ["a"]

    def test_what_the_pool_keeps_for_a_prompt_that_was_cancelled_is_released(self) -> None:
        """The prompt had asked twice; only its blocks are here when the second answer comes."""
        bench, _ = self.bench()
        bench.hears(said(ROUTER, Cancel("long", 0)))
        bench.said.clear()
        bench.hears(said("pool-0", Prefix("long", 0, self.PAGES)))
        assert bench.said == [Release("long", 0)]


def test_where_slots_move_copies_come_between_steps() -> None:
    bench = Bench(Policy(memory="two_ended"))
    bench.joins(A)
    copy = bench.gets(B, page=6)
    assert not copy.aside
    bench.ends_step()
    assert not bench.num_runs, "the step waits: what is copied is to be in it"
    bench.hears(CopiedIn(copy.number, intact=True))
    assert bench.running == ["a", "b"]


def test_no_step_and_no_other_copy_writes_to_blocks_that_are_being_copied_to() -> None:
    """Requests come, end and are cancelled by chance, on a device that is short of memory."""
    for seed in range(24):
        draw, bench, serial = Random(seed), Bench(look_ahead=seed % 2), 0
        under_way = dict[int, CopyIn]()
        for _ in range(80):
            num_plans, num_copies = len(bench.plans), len(bench.copies)
            match draw.choice(("gets", "ends", "ends", "copied", "cancel")):
                case "gets":
                    serial += 1
                    length = draw.randint(4, 12)
                    asked = request(f"{serial}", prompt=draw.randint(1, 7), max_tokens=length)
                    bench.hears(said("pool-0", Batch((entry(asked, (serial,)),))))
                case "ends" if bench.num_runs:
                    bench.ends_step()
                case "copied" if under_way:
                    number = draw.choice([*under_way])
                    del under_way[number]
                    bench.hears(CopiedIn(number, intact=draw.random() < 0.9))
                case "cancel" if bench.core.here.attempts():
                    bench.hears(said(ROUTER, Cancel(*draw.choice(bench.core.here.attempts()))))
            for copy in bench.copies[num_copies:]:
                assert not any({*copy.blocks} & {*other.blocks} for other in under_way.values())
                under_way[copy.number] = copy
            written = {block for copy in under_way.values() for block in copy.blocks}
            assert not blocks_in(bench.plans[num_plans:]) & written
            assert sorted(blocks_of(bench.core)) == [*range(LIMITS.num_blocks)]
