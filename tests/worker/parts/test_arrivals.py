"""A worker notes that it forgets a request which runs elsewhere, or whose client has gone."""

from __future__ import annotations

from alignedserve.explain.decisions import Kind
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Send
from alignedserve.protocol.messages import ROUTER, AskDecisions, Cancel, Decisions, Prefill
from alignedserve.worker.setup import WorkerSetup
from tests.samples import LIMITS, request, said


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
