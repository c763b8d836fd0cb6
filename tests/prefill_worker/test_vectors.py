"""A prompt that asks for a vector ends on the prefill worker: it needs no pages, and nothing of it is handed on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import (
    POOLED,
    Estimate,
    FinishReason,
    Opening,
    Pooling,
    Request,
    ServiceClass,
    StepFailure,
    StepResult,
)
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, RunStep, Send
from alignedserve.protocol.events import MemberJoined, StepDone
from alignedserve.protocol.messages import ROUTER, AskPrefix, Output, Prefill, Prefix, Progress, Resend, Tokens
from alignedserve.scheduling.policy import Policy
from alignedserve.worker.setup import WorkerSetup
from tests.samples import LIMITS, POOL_MEMBER, request, said

VECTOR = b"\x00\x00\x80?"


def asking(name: str, prompt: int = 3, service: ServiceClass = ServiceClass.BE, is_whole: bool = True) -> Request:
    made = replace(request(name, prompt, max_tokens=1), stop_tokens=(), estimate=Estimate(1, 1), service=service)
    return replace(made, pooling=Pooling(is_whole=is_whole))


@pytest.fixture
def worker() -> PrefillCore:
    core = PrefillCore(WorkerSetup(LIMITS, Policy()))
    core.handle(MemberJoined(POOL_MEMBER), 0.0)
    return core


def steps(commands: list[Command]) -> list[RunStep]:
    return [command for command in commands if isinstance(command, RunStep)]


def to_pool(commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, Send) and command.to == POOL_MEMBER.name]


def ended(worker: PrefillCore, *names: str) -> list[Command]:
    vectors = tuple((name, VECTOR) for name in names)
    tokens = tuple((name, POOLED) for name in names)
    return worker.handle(StepDone(StepResult(1, tokens, vectors=vectors)), 0.1)


@pytest.mark.parametrize("service", ServiceClass)
def test_it_runs_without_pages_and_ends(worker: PrefillCore, service: ServiceClass) -> None:
    begun = worker.handle(said(ROUTER, Prefill(asking("a", service=service))), 0.0)
    (step,) = steps(begun)
    assert [chunk.pooling for chunk in step.plan.chunks] == [Pooling(is_whole=True)]
    commands = ended(worker, "a")
    output = Output("a", 0, 0, (POOLED,), FinishReason.LENGTH, opening=Opening(waited_s=0.1, vector=VECTOR))
    sent = [command for command in commands if isinstance(command, Send) and isinstance(command.message, Tokens)]
    assert sent == [Send("gateway-0", Tokens((output,)))]
    assert not to_pool([*begun, *commands])
    progress = [it.message for it in commands if isinstance(it, Send) and isinstance(it.message, Progress)]
    assert [it.ended for it in progress] == [(("a", 0),)]


def test_the_vector_comes_again_where_its_frame_was_lost(worker: PrefillCore) -> None:
    worker.handle(said(ROUTER, Prefill(asking("a"))), 0.0)
    first = [it for it in ended(worker, "a") if isinstance(it, Send) and isinstance(it.message, Tokens)]
    assert worker.handle(said("gateway-0", Resend("a", 0, 0)), 0.2) == first


def test_texts_share_a_step_and_none_is_cut(worker: PrefillCore) -> None:
    """A step has 8 tokens: the third text has to wait for the next."""
    worker.handle(said(ROUTER, Prefill(asking("a", 3))), 0.0)
    for name in ("b", "c", "d"):
        worker.handle(said(ROUTER, Prefill(asking(name, 4))), 0.0)
    (step,) = steps(ended(worker, "a"))
    assert [len(chunk.tokens) for chunk in step.plan.chunks] == [4, 4]


def test_a_text_that_the_device_has_no_memory_for_is_given_up(worker: PrefillCore) -> None:
    """It cannot be cut, so smaller steps would not help: its owner hears that the attempt is lost."""
    worker.handle(said(ROUTER, Prefill(asking("a"))), 0.0)
    commands = worker.handle(StepDone(StepResult(1, (), failure=StepFailure("too little memory"))), 0.1)
    progress = [it.message for it in commands if isinstance(it, Send) and isinstance(it.message, Progress)]
    assert [it.lost for it in progress] == [(("a", 0),)]


def test_a_prompt_whose_last_token_counts_runs_in_chunks(worker: PrefillCore) -> None:
    asked = worker.handle(said(ROUTER, Prefill(asking("a", 12, is_whole=False))), 0.0)
    assert [type(it.message) for it in to_pool(asked) if isinstance(it, Send)] == [AskPrefix]
    (step,) = steps(worker.handle(said(POOL_MEMBER.name, Prefix("a", 0, ())), 0.0))
    (chunk,) = step.plan.chunks
    assert (len(chunk.tokens), chunk.pooling) == (8, None)
