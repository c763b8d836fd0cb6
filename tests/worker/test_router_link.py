"""What a worker tells for metrics, about once a second: what it has now, and what it has counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from alignedserve.core import Estimate, Role, ServiceClass, Slo, StepResult
from alignedserve.cost.fit import OnlineCost, Point
from alignedserve.cost.model import Kind, Shape, Uncertainty
from alignedserve.cost.promising import LearntPromise, machine_promise
from alignedserve.decode_worker.by_policy import decode_core
from alignedserve.decode_worker.state import DecodeCore
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.events import Event, MemberJoined, StepDone, TimerFired
from alignedserve.protocol.figures import RATIOS, STEP_S, STEP_TOKENS, ByClass, WorkerLoad
from alignedserve.protocol.messages import ROUTER, Figures, Member, Prefill
from alignedserve.worker.setup import WorkerSetup
from tests.samples import LIMITS, request, said

ANYTHING = TimerFired("anything")


@pytest.fixture(params=[PrefillCore, decode_core])
def worker(request: pytest.FixtureRequest) -> DecodeCore:
    """Return each kind of worker without a pool, so that the decode worker is colocated."""
    core: DecodeCore = request.param(WorkerSetup(LIMITS))
    return core


def told(commands: list[Command]) -> list[WorkerLoad]:
    sent = [command.message for command in commands if isinstance(command, Send) and command.to == ROUTER]
    return [message.worker for message in sent if isinstance(message, Figures) and message.worker is not None]


def load_after(worker: DecodeCore, event: Event, now: float) -> WorkerLoad:
    (load,) = told(worker.handle(event, now))
    return load


def counts(bounds: tuple[float, ...], *values: float) -> tuple[int, ...]:
    """Return the buckets that hold these values."""
    below = [sum(value <= bound for value in values) for bound in (*bounds, float("inf"))]
    return tuple(here - before for here, before in zip(below, [0, *below], strict=False))


def test_requests_in_steps_and_requests_that_wait_are_told_by_class(worker: DecodeCore) -> None:
    chat = replace(request("chat", prompt=8), slo=Slo(ttft_s=3.0))
    worker.handle(said(ROUTER, Prefill(chat)), 0.5)
    for name in ("first", "second"):
        prompt = replace(request(name, prompt=24), service=ServiceClass.BE)
        worker.handle(said(ROUTER, Prefill(prompt)), 0.5)
    load = load_after(worker, ANYTHING, 1.0)
    assert load.running == ByClass(rt=1)
    assert load.waiting == ByClass(be=2)
    assert load.used > 0
    assert load.slack_s == pytest.approx(2.0), "its first token is due 3 s after it came"


def test_steps_are_counted_by_their_tokens_and_their_time(worker: DecodeCore) -> None:
    worker.handle(said(ROUTER, Prefill(request("a", prompt=10, max_tokens=1))), 0.1)
    worker.handle(StepDone(StepResult(1, ()), 0.2), 0.3)
    worker.handle(StepDone(StepResult(2, (("a", 7),)), 0.01), 0.4)
    load = load_after(worker, ANYTHING, 1.0)
    assert (load.step_tokens.buckets, load.step_tokens.total) == (counts(STEP_TOKENS, 8, 2), 10)
    assert load.step_s.buckets == counts(STEP_S, 0.2, 0.01)
    assert load.step_s.total == pytest.approx(0.21)
    assert sum(load.step_ratio.buckets) == 1, "of the first step there was no prediction: no time was known"
    assert (load.running, load.waiting, load.slack_s) == (ByClass(), ByClass(), None)


def test_an_output_is_measured_by_what_was_predicted(worker: DecodeCore) -> None:
    predicted = replace(request("a", max_tokens=1), estimate=Estimate(4, 8))
    worker.handle(said(ROUTER, Prefill(predicted)), 0.1)
    worker.handle(said(ROUTER, Prefill(request("b", max_tokens=1))), 0.1)
    worker.handle(StepDone(StepResult(1, (("a", 7),)), 0.1), 0.2)
    worker.handle(StepDone(StepResult(2, (("b", 7),)), 0.1), 0.3)
    load = load_after(worker, ANYTHING, 1.0)
    assert (load.length_ratio.buckets, load.length_ratio.total) == (counts(RATIOS, 0.25), 0.25)


def test_it_is_told_at_most_once_a_second_and_only_where_it_has_changed(worker: DecodeCore) -> None:
    times = [0.0, 0.4, 1.0, 1.2, 1.9, 2.0, 3.0]
    assert [now for now in times if told(worker.handle(ANYTHING, now))] == [1.0]
    assert not told(worker.handle(said(ROUTER, Prefill(request("a"))), 3.1))
    assert told(worker.handle(ANYTHING, 4.0))


@pytest.mark.parametrize("writes_text", [True, False])
@pytest.mark.parametrize("kind", [PrefillCore, decode_core])
def test_what_the_machine_can_promise_is_told_to_each_router(
    kind: Callable[[WorkerSetup], DecodeCore], writes_text: bool
) -> None:
    """A model that writes no text promises nothing."""
    steps = [(tokens, 0.1 + 6e-3 * tokens) for tokens in (1, 16, 64, 256, 512)]
    points = [Point(Shape.build([(tokens, 0)], beside), s) for tokens, s in steps for beside in ([], [1000] * 7)]
    points += [Point(Shape.build(prefixes=[1000] * number), 0.1 + 6e-3 * number) for number in (1, 4, 16)]
    limits = replace(LIMITS, num_blocks=2000, max_step_tokens=512, max_batch=16)
    exact = dict.fromkeys(Kind, Uncertainty(0.05, 0.1))
    cost = OnlineCost(points, known=exact)
    promise = machine_promise(cost.model, limits, 8192) if writes_text else None
    assert promise is None or promise.ttft_s > 5
    worker = kind(WorkerSetup(limits, cost=cost, promise=LearntPromise(limits, 8192) if writes_text else None))
    router = MemberJoined(Member(ROUTER, Role.ROUTER, "local", 1, ""))
    for now in (1.0, 2.0):
        sent = [command.message for command in worker.handle(router, now) if isinstance(command, Send)]
        assert [message.promise for message in sent if isinstance(message, Figures)] == [promise]


def test_documents_that_sit_out_a_step_are_told() -> None:
    """The board would show that no document ever gives way to chats, or to documents of other lengths."""
    worker = decode_core(WorkerSetup(LIMITS))
    worker.log.counts.num_held_back, worker.log.counts.num_grouped = 3, 2
    (sent,) = [each for each in worker.handle(ANYTHING, 1.0) if isinstance(each, Send)]
    assert isinstance(sent.message, Figures)
    assert sent.message.steps is not None
    assert (sent.message.steps.held_back, sent.message.steps.grouped) == (3, 2)
