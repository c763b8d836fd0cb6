"""A prefill worker reports its backlog of prompts to the router, which places prompts and refuses chats by it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from alignedserve.core import Request, StepResult
from alignedserve.cost.fit import Point
from alignedserve.cost.model import Shape
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, RunStep, Send
from alignedserve.protocol.events import MemberJoined, StepDone
from alignedserve.protocol.messages import ROUTER, Backlog, Cancel, Prefill, Progress
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.setup import WorkerSetup
from tests.cost.fitted import cost_of
from tests.samples import LIMITS, POOL_MEMBER, request, said

TOKEN_S = 0.001
SHAPES = [Shape.build([(tokens, prefix)]) for tokens in (1, 2, 4, 8) for prefix in (0, 8)]


@pytest.fixture
def worker() -> PrefillCore:
    """Return a worker whose step of 8 tokens takes 8 ms, with memory for 32 tokens."""
    costs = cost_of([Point(shape, TOKEN_S * shape.tokens) for shape in SHAPES])
    core = PrefillCore(WorkerSetup(LIMITS, Policy(reuse=False), costs))
    core.handle(MemberJoined(POOL_MEMBER), 0.0)
    return core


def comes(worker: PrefillCore, request: Request) -> list[Command]:
    return worker.handle(said(ROUTER, Prefill(request)), 0.0)


def stepped(worker: PrefillCore, number: int, *tokens: tuple[str, int]) -> list[Command]:
    return worker.handle(StepDone(StepResult(number, tokens)), 0.0)


def told(commands: Sequence[Command]) -> list[Backlog]:
    return [
        command.message.backlog
        for command in commands
        if isinstance(command, Send) and command.to == ROUTER and isinstance(command.message, Progress)
    ]


def test_after_every_step_the_router_hears_what_is_left(worker: PrefillCore) -> None:
    commands, left, number = comes(worker, request("a", prompt=16)), 16, 0
    while left:
        [ran] = [len(command.plan.chunks[0].tokens) for command in commands if isinstance(command, RunStep)]
        left, number = left - ran, number + 1
        commands = stepped(worker, number, *([] if left else [("a", 7)]))
        [backlog] = told(commands)
        assert backlog.prompt_token_s == pytest.approx(TOKEN_S, rel=0.2)
        assert backlog.prompts_s == backlog.rt_prompts_s == pytest.approx(left * backlog.prompt_token_s)
    assert number > 1


def test_it_hears_too_when_what_waits_without_a_step_is_cancelled(worker: PrefillCore) -> None:
    comes(worker, request("a", prompt=24))
    comes(worker, request("b", prompt=20))
    for number in (1, 2):
        stepped(worker, number)
    [waits] = told(stepped(worker, 3, ("a", 7)))
    assert waits.prompts_s == pytest.approx(20 * waits.prompt_token_s), "no memory for it before a is in the pool"
    [nothing] = told(worker.handle(said(ROUTER, Cancel("b", 0)), 0.0))
    assert nothing.prompts_s == 0.0
