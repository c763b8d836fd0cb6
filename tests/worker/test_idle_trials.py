"""An idle worker that takes its machine to be slow measures it again, a short step at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import StepFailure, StepPlan, StepResult, WorkerLimits
from alignedserve.cost.fit import OnlineCost, Point
from alignedserve.cost.model import Shape, shape_of
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, RunStep, SetTimer
from alignedserve.protocol.events import MemberJoined, StepDone, TimerFired
from alignedserve.protocol.messages import ROUTER, Prefill, Retire
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.setup import WorkerSetup
from alignedserve.worker.steps import AGAIN_S, IDLE_S
from tests.cost.fitted import cost_of
from tests.samples import LIMITS, ROUTER_MEMBER, request, said
from tests.worker.cores import MakeCore

TOKEN_S = 0.001
SHAPES = [
    Shape.build([(tokens, 0)] if tokens else [], prefixes=[16] * decodes)
    for tokens in (0, 8, 16, 32)
    for decodes in (0, 1, 2, 4)
    if tokens or decodes
]
POINTS = [Point(shape, TOKEN_S * shape.tokens) for shape in SHAPES]
CORES = (decode_core, PrefillCore)


class Machine:
    """A worker whose profile was taken on a machine that was `slowdown` times as slow; its steps take `speed` times
    as long as on a quiet one."""

    def __init__(
        self,
        kind: MakeCore = decode_core,
        slowdown: float = 2.0,
        speed: float = 1.0,
        look_ahead: int = 0,
        looks_first: bool = False,
    ) -> None:
        limits = WorkerLimits(num_blocks=100, block_size=4, page_size=8, max_step_tokens=64, max_batch=8)
        self.cost = cost_of(POINTS, slowdown=slowdown)
        setup = WorkerSetup(limits, Policy(reuse=False), self.cost, look_ahead=look_ahead, looks_first=looks_first)
        self.core = kind(setup)
        self.speed, self.now = speed, 0.0
        self.ran, self.steps = list[StepPlan](), list[StepPlan]()  # of all, those that have not ended
        self.timer_at: float | None = None
        self.do(self.core.handle(MemberJoined(ROUTER_MEMBER), 0.0))

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case RunStep(plan):
                    self.ran.append(plan)
                    self.steps.append(plan)
                case SetTimer("idle trials", at):
                    self.timer_at = at

    def wait(self, seconds: float) -> None:
        """Let time pass: timers fire, and steps end."""
        until = self.now + seconds
        while self.steps or (self.timer_at is not None and self.timer_at <= until):
            if self.steps:
                self.end_step()
            elif self.timer_at is not None:
                self.now, self.timer_at = max(self.now, self.timer_at), None
                self.do(self.core.handle(TimerFired("idle trials"), self.now))
        self.now = max(self.now, until)

    def fail_step(self) -> None:
        result = StepResult(self.steps.pop(0).number, (), failure=StepFailure("no memory"))
        self.do(self.core.handle(StepDone(result, 0.001), self.now))

    def end_step(self) -> None:
        plan = self.steps.pop(0)
        seconds = self.speed * TOKEN_S * shape_of(plan).tokens
        self.now += seconds
        tokens = tuple((part.request, 7) for part in plan.parts if part.sampling is not None)
        self.do(self.core.handle(StepDone(StepResult(plan.number, tokens), seconds), self.now))


@pytest.mark.parametrize("kind", CORES)
def test_an_idle_worker_finds_that_its_machine_is_quiet_by_now(
    kind: MakeCore,
) -> None:
    machine = Machine(kind)
    shape = SHAPES[0]
    assert machine.cost.model.seconds(shape) == pytest.approx(2 * TOKEN_S * shape.tokens, rel=0.05)
    machine.wait(IDLE_S / 2)
    assert not machine.ran
    machine.wait(IDLE_S)
    assert machine.ran
    assert machine.cost.slowdown == pytest.approx(1.0, rel=0.05)
    assert machine.cost.model.seconds(shape) == pytest.approx(TOKEN_S * shape.tokens, rel=0.05)
    assert not any(machine.core.held.values()), "trials leave nothing on the device"
    num = len(machine.ran)
    machine.wait(10 * AGAIN_S)
    assert len(machine.ran) == num, "a quiet machine is not measured again"


@pytest.mark.parametrize("kind", CORES)
@pytest.mark.parametrize("speed", [1.0, 3.0])
def test_a_worker_that_starts_with_an_earlier_profile_looks_once_how_fast_the_machine_is(
    kind: MakeCore, speed: float
) -> None:
    machine = Machine(kind, slowdown=1.0, speed=speed, looks_first=True)
    machine.wait(IDLE_S / 2)
    num = len(machine.ran)
    assert num == 9
    assert machine.cost.slowdown == pytest.approx(speed, rel=0.05)
    machine.speed = 1.0
    machine.wait(3 * AGAIN_S)
    assert len(machine.ran) == (num if speed == 1.0 else 2 * num), "as a machine that is known to be slow"


def test_a_machine_that_stays_slow_is_measured_again_after_a_while() -> None:
    machine = Machine(speed=2.0)
    machine.wait(2 * IDLE_S)
    num = len(machine.ran)
    assert machine.cost.slowdown == pytest.approx(2.0, rel=0.05)
    machine.wait(AGAIN_S - 2 * IDLE_S)
    assert len(machine.ran) == num
    machine.speed = 1.0
    machine.wait(2 * IDLE_S)
    assert len(machine.ran) == 2 * num
    assert machine.cost.slowdown == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("kind", CORES)
def test_a_request_waits_for_one_trial_at_most(kind: MakeCore) -> None:
    machine = Machine(kind)
    machine.now = IDLE_S
    machine.do(machine.core.handle(TimerFired("idle trials"), machine.now))
    assert len(machine.steps) == 1
    new = request("a", max_tokens=1)
    machine.do(machine.core.handle(said(ROUTER, Prefill(new)), machine.now))
    machine.end_step()
    assert [chunk.request for chunk in machine.ran[1].chunks] == ["a"]
    assert machine.cost.slowdown == 2.0, "one trial tells too little"


@pytest.mark.parametrize("kind", CORES)
def test_a_trial_that_fails_is_not_tried_again_at_once(kind: MakeCore) -> None:
    machine = Machine(kind)
    machine.now = IDLE_S
    machine.do(machine.core.handle(TimerFired("idle trials"), machine.now))
    machine.fail_step()
    assert not machine.steps
    assert not any(machine.core.held.values())
    machine.wait(AGAIN_S / 2)
    assert len(machine.ran) == 1
    machine.wait(AGAIN_S)
    assert machine.cost.slowdown == pytest.approx(1.0, rel=0.05)


def test_a_profile_that_predicts_no_time_ends_no_worker() -> None:
    """Its measuring ended before the first step."""
    machine = Machine()
    machine.cost = OnlineCost([], slowdown=2.0)
    machine.core = decode_core(WorkerSetup(LIMITS, Policy(reuse=False), machine.cost))
    machine.do(machine.core.handle(MemberJoined(ROUTER_MEMBER), 0.0))
    machine.wait(3 * AGAIN_S)
    assert machine.cost.slowdown == 2.0


@pytest.mark.parametrize(("slowdown", "retires"), [(1.2, False), (2.0, True)])
def test_nothing_is_measured_where_there_is_nothing_to_learn(slowdown: float, retires: bool) -> None:
    machine = Machine(slowdown=slowdown)
    if retires:
        machine.do(machine.core.handle(said(ROUTER, Retire("decode-0", 1)), machine.now))
    machine.wait(10 * IDLE_S)
    assert not machine.ran


def test_a_worker_without_a_profile_runs_no_trials() -> None:
    core = decode_core(WorkerSetup(replace(LIMITS, num_blocks=100)))
    assert not any(isinstance(command, SetTimer) for command in core.handle(MemberJoined(ROUTER_MEMBER), 0.0))
