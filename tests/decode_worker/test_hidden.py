"""A decode worker that keeps requests as KV or as hidden vectors: how requests begin, and which of them become KV."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from alignedserve.core import Request, ServiceClass, WorkerLimits
from alignedserve.cost.fit import OnlineCost
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.lab.fuzzing.worker_views import blocks_of, num_preemptions, weighed
from alignedserve.lab.simulator.machines.engine import CheckedHands, Costs, TokenStory, story_from
from alignedserve.protocol.commands import (
    Command,
    RunStep,
)
from alignedserve.protocol.events import Event
from alignedserve.protocol.form_orders import ProjectKv
from alignedserve.protocol.messages import ROUTER, Cancel, Prefill
from alignedserve.scheduling.policy import Policy, Room
from alignedserve.worker.setup import WorkerSetup
from tests.conftest import examples
from tests.samples import request, said

HYBRID = Policy(room=Room.GROWING, memory="hybrid")
LIMITS = WorkerLimits(num_blocks=9, block_size=4, page_size=8, max_step_tokens=32, max_batch=4)
STEP_S, TOKEN_S = 0.01, 1e-4  # the time of making K and V of a hidden token, as the worker believes


class Believed(OnlineCost):
    def learn(self, shape: object, seconds: float) -> None: ...


class Worker:
    """Colocated worker whose engine notices wrong vectors: it keeps a tag in place of each vector."""

    def __init__(self, policy: Policy = HYBRID, token_s: float = TOKEN_S) -> None:
        self.core = decode_core(WorkerSetup(LIMITS, policy, Believed((), token_s)))
        self.stories: dict[str, TokenStory] = {}
        costs = Costs(hidden_token_s=token_s)
        self.hands = CheckedHands(self.stories, costs, LIMITS, lambda _: None)
        self.work: deque[Command] = deque()
        self.done: list[Command] = []
        self.now = 0.0

    def hears(self, event: Event) -> None:
        for command in self.core.handle(event, self.now):
            if isinstance(command, (RunStep, ProjectKv)):
                self.work.append(command)

    def asked(self, name: str, prompt: int, max_tokens: int = 8, service: ServiceClass = ServiceClass.RT) -> Request:
        new_request = replace(request(name, prompt, max_tokens), service=service, arrival_at=self.now)
        self.stories[name] = story_from(new_request, max_tokens)
        self.hears(said(ROUTER, Prefill(new_request)))
        return new_request

    def works(self) -> None:
        """Do one piece of work."""
        command = self.work.popleft()
        self.now += STEP_S
        event = self.hands.finish(command, STEP_S)
        self.done.append(command)
        if event is not None:
            self.hears(event)

    def until_idle(self) -> None:
        for _ in range(3000):
            if not self.work:
                return
            self.works()
        raise AssertionError("it never ends")

    def kinds(self, name: str) -> list[str]:
        """Return the kind of cache with which each step ran the request."""
        plans = [command.plan for command in self.done if isinstance(command, RunStep)]
        return [part.kv.form for plan in plans for part in plan.parts if part.request == name]


def crowded(token_s: float = TOKEN_S) -> Worker:
    """Return a worker whose first request keeps six of nine blocks, and whose next needs four, or two as hidden."""
    worker = Worker(token_s=token_s)
    worker.asked("first", prompt=21, max_tokens=4)
    worker.works()
    worker.asked("next", prompt=14, max_tokens=12)
    return worker


class TestWhoWaits:
    def test_begins_as_hidden_once_it_has_waited_long_enough(self) -> None:
        """Hidden vectors pay after 2 * 2 * 14 * 0.3 ms of waiting: two requests, fourteen tokens."""
        worker, asked_at = crowded(token_s=3e-4), STEP_S
        while not worker.kinds("next"):
            worker.works()
        assert worker.kinds("next") == ["hidden"]
        assert worker.now - STEP_S - asked_at == pytest.approx(0.02), "the first step to begin after that"
        worker.until_idle()
        assert num_preemptions(worker.core) == 0

    def test_becomes_kv_without_a_second_prefill_when_memory_comes_free(self) -> None:
        worker = crowded()
        worker.until_idle()
        (projected,) = [command for command in worker.done if isinstance(command, ProjectKv)]
        kinds = worker.kinds("next")
        assert (projected.request, kinds[0], kinds[-1]) == ("next", "hidden", "")
        chunks = [c for command in worker.done if isinstance(command, RunStep) for c in command.plan.chunks]
        assert [chunk.request for chunk in chunks] == ["first", "next"]
        hybrid = weighed(worker.core.memory)
        assert hybrid is not None
        assert (hybrid.num_hidden, hybrid.num_projected) == (1, 1)

    def test_waits_where_hidden_would_delay_others_too_much(self) -> None:
        worker = crowded(token_s=0.1)
        worker.until_idle()
        assert {*worker.kinds("next")} == {""}

    def test_leaves_the_blocks_that_others_grow_into(self) -> None:
        """Three blocks are free: the next would fill them as hidden, and the first soon need one."""
        worker = Worker()
        worker.asked("first", prompt=21, max_tokens=8)
        worker.works()
        worker.asked("next", prompt=20, max_tokens=3)
        worker.until_idle()
        assert {*worker.kinds("next")} == {""}
        assert num_preemptions(worker.core) == 0

    def test_is_kv_where_there_is_memory(self) -> None:
        worker = Worker()
        worker.asked("a", 5)
        worker.asked("b", 5)
        worker.until_idle()
        assert {*worker.kinds("a"), *worker.kinds("b")} == {""}


class TestBestEffort:
    def test_counts_no_more_than_the_reading_speed(self) -> None:
        """Waiting beyond 0.1875 s adds no worth to the request, and hidden vectors would cost twice that."""
        worker = Worker(token_s=0.0125)
        worker.asked("first", 21, 4)
        worker.works()
        worker.asked("next", 14, 12, ServiceClass.BE)
        worker.now += 100.0
        worker.until_idle()
        assert {*worker.kinds("next")} == {""}


class AnyOrder(RuleBasedStateMachine):
    """Requests come and go; each block is free or has a single owner, and every step finds what it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.worker, self.names = Worker(token_s=1e-6), 0

    @rule(
        prompt=st.integers(1, 20),
        output=st.integers(1, 11),
        service=st.sampled_from([*ServiceClass]),
        ago=st.sampled_from((0.0, 1.0)),
    )
    def comes(self, prompt: int, output: int, service: ServiceClass, ago: float) -> None:
        self.names += 1
        self.worker.now += ago
        self.worker.asked(f"r{self.names}", prompt, output, service)

    @rule(number=st.integers(1, 30))
    def goes(self, number: int) -> None:
        self.worker.hears(said(ROUTER, Cancel(f"r{number}", 0)))

    @rule(pieces=st.integers(1, 12))
    def work(self, pieces: int) -> None:
        for _ in range(pieces):
            if self.worker.work:
                self.worker.works()

    @invariant()
    def every_block_is_there_once(self) -> None:
        assert sorted(blocks_of(self.worker.core)) == [*range(LIMITS.num_blocks)]

    def teardown(self) -> None:
        self.worker.until_idle()
        held = self.worker.core.held
        assert (held["requests"], held["blocks"]) == (0, 0)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(deadline=None, max_examples=examples(20), stateful_step_count=40)
