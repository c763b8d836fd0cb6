"""A worker admits a request once its syntax is compiled, and notes that it forgets a request which runs elsewhere, or
whose client has gone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest

from alignedserve.core import Sampling, ServiceClass, StepResult
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.explain.decisions import Kind
from alignedserve.papers.names import SchedulerName
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, CopyIn, PrepareSyntax, RunStep, Send
from alignedserve.protocol.events import MemberJoined, MemberLost, StepDone, SyntaxReady, TimerFired
from alignedserve.protocol.messages import (
    ROUTER,
    AskDecisions,
    Batch,
    Cancel,
    Decisions,
    Holding,
    Inquire,
    Prefill,
    Prefix,
    Progress,
)
from alignedserve.scheduling.policy import Chunking, Policy, Room
from alignedserve.worker.part import REFRESH_S
from alignedserve.worker.setup import WorkerSetup
from tests.samples import LIMITS, POOL_MEMBER, ROUTER_MEMBER, entry, request, said
from tests.worker.cores import MakeCore

FORMED = replace(request("formed"), sampling=Sampling(syntax="start: /a+/"))
PREPARES = PrepareSyntax(FORMED)


def noted(worker: PrefillCore, name: str) -> list[Kind]:
    sent = worker.handle(said("gateway-0", AskDecisions(1, name), 1), 2.0)
    (told,) = [send.message for send in sent if isinstance(send, Send) and isinstance(send.message, Decisions)]
    return [decision.kind for decision in told.findings.decisions]


def test_a_request_that_is_cancelled_is_noted_once() -> None:
    worker = PrefillCore(WorkerSetup(LIMITS))
    worker.handle(said(ROUTER, Prefill(request("a", prompt=8))), 0.0)
    for _ in range(2):
        worker.handle(said(ROUTER, Cancel("a", 0)), 1.0)
    assert noted(worker, "a").count(Kind.DROPPED) == 1


def test_a_later_attempt_is_not_dropped() -> None:
    worker = PrefillCore(WorkerSetup(LIMITS))
    worker.handle(said(ROUTER, Prefill(request("a", prompt=8, attempt=2))), 0.0)
    worker.handle(said(ROUTER, Cancel("a", 1)), 1.0)
    assert Kind.DROPPED not in noted(worker, "a")
    worker.handle(said(ROUTER, Prefill(request("a", prompt=8, attempt=1))), 1.0)
    assert worker.handle(said(ROUTER, Inquire((("a", 2),))), 1.0) == [], "it is not unknown"


def runs(commands: Sequence[Command]) -> list[list[str]]:
    """Return the requests of each step."""
    return [[part.request for part in step.plan.parts] for step in commands if isinstance(step, RunStep)]


@pytest.mark.parametrize("kind", [PrefillCore, decode_core])
class TestSyntaxes:
    def test_no_step_waits_for_one(self, kind: MakeCore) -> None:
        worker = kind(WorkerSetup(LIMITS))
        told = worker.handle(said(ROUTER, Prefill(FORMED)), 0.0)
        assert PREPARES in told
        assert runs(told) == []
        assert runs(worker.handle(said(ROUTER, Prefill(request("plain"))), 0.0)) == [["plain"]]
        assert runs(worker.handle(SyntaxReady("formed", 0), 0.0)) == [], "the step goes on"
        (after,) = runs(worker.handle(StepDone(StepResult(1, (("plain", 7),))), 0.0))
        assert "formed" in after

    def test_it_is_here_meanwhile(self, kind: MakeCore) -> None:
        worker = kind(WorkerSetup(LIMITS))
        worker.handle(said(ROUTER, Prefill(FORMED)), 0.0)
        assert worker.handle(said(ROUTER, Inquire((("formed", 0),))), 0.0) == [], "it is not unknown"
        (told,) = worker.handle(MemberJoined(ROUTER_MEMBER), 0.0)
        assert isinstance(told, Send)
        assert isinstance(told.message, Holding)
        assert told.message.attempts == (("formed", 0),)

    def test_one_that_was_cancelled_does_not_run(self, kind: MakeCore) -> None:
        worker = kind(WorkerSetup(LIMITS))
        worker.handle(said(ROUTER, Prefill(FORMED)), 0.0)
        worker.handle(said(ROUTER, Cancel("formed", 0)), 0.0)
        assert worker.held["requests"] == 0
        assert runs(worker.handle(SyntaxReady("formed", 0), 0.0)) == []

    def test_once_cancelled_it_is_not_kept(self, kind: MakeCore) -> None:
        """What was compiled for it is let go with it."""
        worker, sampling = kind(WorkerSetup(LIMITS)), Sampling(syntax="start: /a+/")
        kept = weakref.ref(sampling)
        worker.handle(said(ROUTER, Prefill(replace(FORMED, sampling=sampling))), 0.0)
        del sampling
        assert kept() is not None
        worker.handle(said(ROUTER, Cancel("formed", 0)), 0.0)
        assert kept() is None

    def test_the_next_attempt_waits_for_its_own(self, kind: MakeCore) -> None:
        worker = kind(WorkerSetup(LIMITS))
        for attempt in (0, 1):
            worker.handle(said(ROUTER, Prefill(replace(FORMED, attempt=attempt))), 0.0)
        assert runs(worker.handle(SyntaxReady("formed", 0), 0.0)) == []
        assert runs(worker.handle(SyntaxReady("formed", 1), 0.0)) == [["formed"]]


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_chat_that_goes_on_without_the_pools_answer_takes_its_seat_at_once(is_lost: bool) -> None:
    """Memory for the document that waits already is lacking, and the chat needs less."""
    policy = Policy(SchedulerName.ROUND_ROBIN, Chunking.FIXED, Room.GROWING)
    worker = decode_core(WorkerSetup(replace(LIMITS, max_batch=4), policy))
    for member in (ROUTER_MEMBER, POOL_MEMBER):
        worker.handle(MemberJoined(member), 0.0)
    asked = {"runs": range(8), "large": range(100, 130), "chat": range(200, 209)}
    for name, prompt in asked.items():
        service = ServiceClass.RT if name == "chat" else ServiceClass.BE
        worker.handle(said(ROUTER, Prefill(replace(request(name), prompt=tuple(prompt), service=service))), 0.0)
        if name == "large":
            worker.handle(said("pool-0", Prefix(name, 0, ())), 0.0)
    goes_on = [(MemberLost(POOL_MEMBER), 0.0)] if is_lost else [(TimerFired("refresh"), n * REFRESH_S) for n in (1, 2)]
    told = [command for event, now in goes_on for command in worker.handle(event, now)]
    progress = [send.message for send in told if isinstance(send, Send) and isinstance(send.message, Progress)]
    assert [each.joined for each in progress] == [(("chat", 0),)]


def test_a_request_joins_when_its_syntax_is_compiled() -> None:
    worker = decode_core(WorkerSetup(LIMITS))
    worker.handle(MemberJoined(POOL_MEMBER), 0.0)
    told = worker.handle(said("pool-0", Batch((entry(FORMED, (5,)), entry(request("plain"), (6,))))), 0.0)
    assert PREPARES in told
    assert [copy.pages for copy in told if isinstance(copy, CopyIn)] == [(6,)], "others overtake it"
    told = worker.handle(SyntaxReady("formed", 0), 0.0)
    assert [copy.pages for copy in told if isinstance(copy, CopyIn)] == [(5,)]


def test_what_the_pool_hands_out_again_keeps_its_syntax() -> None:
    worker, sampling = decode_core(WorkerSetup(LIMITS)), Sampling(syntax="start: /a+/")
    worker.handle(MemberJoined(POOL_MEMBER), 0.0)
    for kept in (sampling, replace(sampling)):
        worker.handle(said("pool-0", Batch((entry(replace(FORMED, sampling=kept), (5,)),))), 0.0)
    held = weakref.ref(sampling)
    del sampling, kept
    joins = worker.handle(SyntaxReady("formed", 0), 0.0)
    assert any(isinstance(command, CopyIn) for command in joins)
    assert held() is not None
