"""The router and lengths: a prompt is placed with what is predicted of its output, and outputs that end teach it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from alignedserve.core import Choice, Estimate, Request, Sampling, Sketch
from alignedserve.protocol.commands import Command
from alignedserve.protocol.events import TimerFired
from alignedserve.protocol.messages import Cancel, Declare, Heartbeat, Holding, Prefill, Progress, Refused, Submit
from alignedserve.router.state import RouterCore
from alignedserve.scheduling.lengths import LEAST_ENDED, SPREAD
from alignedserve.scheduling.sketch import sketch_of
from tests.router import routers
from tests.router.routers import LIMITS, sent
from tests.samples import member, next_attempt, request, said

NAMES = ("gateway-0", "pool-0", "prefill-0", "decode-0")
A = request("a", max_tokens=50)
SKETCH = sketch_of((1, 2, 3))
ESTIMATE = Estimate(20, SPREAD * 20)


def serving(most_open: int = 100) -> RouterCore:
    return routers.serving(NAMES, replace(LIMITS, most_open=most_open))


def submit(router: RouterCore, request: Request = A, sketch: Sketch | None = SKETCH) -> list[Command]:
    return router.handle(said("gateway-0", Submit(request, sketch)), 3.0)


def ended(router: RouterCore, num_output: int, name: str = "a", by: str = "decode-0") -> list[Command]:
    return router.handle(said(by, Progress(ended=((name, 0),), lengths=(num_output,))), 5.0)


def placed(commands: Sequence[Command]) -> Request:
    ((_, found),) = sent(commands, Prefill)
    return found.request


@pytest.fixture
def router() -> RouterCore:
    """Return a router that has seen as many outputs as it needs, each of 20 tokens."""
    router = serving()
    for number in range(LEAST_ENDED):
        submit(router, replace(A, id=f"past {number}"))
        ended(router, 20, f"past {number}")
    return router


class TestPrediction:
    def test_a_prompt_is_placed_with_its_length(self, router: RouterCore) -> None:
        assert placed(submit(router)) == replace(A, estimate=ESTIMATE)

    def test_a_request_that_waits_for_a_worker_takes_it_along(self, router: RouterCore) -> None:
        router.handle(said("prefill-0", Heartbeat(member("prefill-0", incarnation=2))), 3.0)
        assert placed(submit(router, next_attempt(A))).estimate == ESTIMATE, "of the next attempt too"

    @pytest.mark.parametrize(
        "exact",
        [
            replace(A, stop_tokens=()),
            replace(A, sampling=Sampling(min_tokens=50)),
            replace(A, max_tokens=1),
            replace(A, sampling=Sampling(min_tokens=3, grammar=Choice(((1, 2),)))),
        ],
        ids=["no end", "min_tokens", "one token", "grammar"],
    )
    def test_what_is_known_is_not_predicted(self, router: RouterCore, exact: Request) -> None:
        assert placed(submit(router, exact)) == exact

    def test_nor_is_what_the_client_said_but_it_is_learnt(self, router: RouterCore) -> None:
        for number in range(512):  # that many are in the mean
            hinted = replace(A, id=f"hinted {number}", estimate=Estimate(5, 10))
            assert placed(submit(router, hinted)) == hinted
            ended(router, 7, hinted.id)
        assert placed(submit(router)).estimate == Estimate(7, 7)

    def test_without_a_sketch_nothing_is_predicted(self, router: RouterCore) -> None:
        assert placed(submit(router, sketch=None)) == A

    def test_what_an_earlier_router_placed_goes_on_without(self) -> None:
        """The prediction is with the request at its worker; the router's sketch of it is lost."""
        router = routers.recovering(NAMES)
        router.handle(said("decode-0", Holding((("a", 0),))), 1.1)
        assert router.handle(said("gateway-0", Declare((A,))), 1.2) == []
        router.handle(TimerFired("recovered"), 2.0)
        assert ended(router, 7) == []


class TestLearning:
    @pytest.mark.parametrize("by", ["decode-0", "prefill-0"])
    def test_whoever_ends_it_says_how_long_it_was(self, by: str) -> None:
        router = serving()
        for number in range(LEAST_ENDED):
            submit(router, replace(A, id=f"past {number}"))
            ended(router, 20, f"past {number}", by)
        assert placed(submit(router)).estimate == ESTIMATE

    def test_a_request_without_a_token_or_a_length_teaches_nothing(self) -> None:
        router = serving()
        for _ in range(LEAST_ENDED):
            submit(router)
            ended(router, 0)
            submit(router)
            router.handle(said("decode-0", Progress(ended=(("a", 0),))), 5.0)
        assert placed(submit(router)).estimate is None

    def test_a_request_that_was_cancelled_or_refused_is_forgotten(self) -> None:
        router = serving(most_open=1)
        submit(router)
        assert sent(submit(router, replace(A, id="b")), Refused)
        router.handle(said("gateway-0", Cancel("a", 0)), 4.0)
        assert not any(router.held.values())
