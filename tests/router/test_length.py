"""The router and lengths: no request waits for its prediction, which follows it; outcomes train the predictor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from alignedserve.core import Choice, Estimate, Request, Sampling, ServiceClass, Sketch
from alignedserve.protocol.commands import Command, Learn, Predict, Retrain, Send
from alignedserve.protocol.events import Predicted, TimerFired
from alignedserve.protocol.messages import Cancel, Declare, Expect, Heartbeat, Holding, Prefill, Progress, Submit
from alignedserve.router.prediction.length import FIRST_TRAINING
from alignedserve.router.state import RouterCore, RouterLimits
from alignedserve.scheduling.policy import Policy, Predictor
from tests.samples import ROUTER_MEMBER, member, next_attempt, request, said

NAMES = ("gateway-0", "pool-0", "prefill-0", "decode-0")
A = request("a", max_tokens=50)
SKETCH = Sketch(b"counts")
ESTIMATE = Estimate(20, 40)
ASKED = Predict("a", 0, SKETCH, 3)
ANSWER = Predicted("a", 0, ESTIMATE)
TOLD = Expect("a", 0, ESTIMATE)


def serving(predictor: Predictor = Predictor.HASH, names: Sequence[str] = NAMES, recovered: bool = True) -> RouterCore:
    policy = Policy(predictor=predictor)
    router = RouterCore(ROUTER_MEMBER, RouterLimits(100, heartbeat_s=0.5, death_s=3.0, policy=policy), 0.0)
    for name in names:
        router.handle(said(name, Heartbeat(member(name))), 0.1)
    router.handle(TimerFired("gathered"), 1.0)
    if recovered:
        router.handle(TimerFired("recovered"), 2.0)
    return router


@pytest.fixture
def router() -> RouterCore:
    return serving()


def submit(router: RouterCore, request: Request = A, sketch: Sketch | None = SKETCH) -> list[Command]:
    return router.handle(said("gateway-0", Submit(request, sketch)), 3.0)


def ended(router: RouterCore, num_output: int, attempt: int = 0, by: str = "decode-0") -> list[Command]:
    return router.handle(said(by, Progress(ended=(("a", attempt),), lengths=(num_output,))), 5.0)


class TestPrediction:
    def test_a_prompt_is_placed_at_once_and_told_of_later(self, router: RouterCore) -> None:
        assert submit(router) == [ASKED, Send("prefill-0", Prefill(A))]
        assert router.handle(ANSWER, 3.1) == [Send("prefill-0", TOLD)]

    @pytest.mark.parametrize(("by", "stage"), [("pool-0", "committed"), ("decode-0", "joined")])
    def test_it_is_told_where_the_request_is_by_then(self, router: RouterCore, by: str, stage: str) -> None:
        submit(router)
        progress: dict[str, Any] = {stage: (("a", 0),)}
        router.handle(said(by, Progress(**progress)), 3.1)
        assert router.handle(ANSWER, 3.2) == [Send(by, TOLD)]

    def test_a_request_that_waits_for_a_worker_takes_it_along(self) -> None:
        router = serving(names=("gateway-0", "pool-0"))
        assert submit(router) == [ASKED]
        assert router.handle(ANSWER, 3.1) == []
        placed = router.handle(said("prefill-0", Heartbeat(member("prefill-0"))), 3.2)
        assert placed[-1] == Send("prefill-0", Prefill(replace(A, estimate=ESTIMATE)))

    def test_an_answer_that_says_nothing_new_is_told_to_nobody(self, router: RouterCore) -> None:
        submit(router)
        router.handle(ANSWER, 3.1)
        assert router.handle(ANSWER, 3.2) == []

    def test_an_answer_that_never_comes_holds_up_nothing(self, router: RouterCore) -> None:
        submit(router)
        assert ended(router, 7) == [Learn(SKETCH, 3, 7)]
        assert not any(router.held.values())

    def test_an_answer_that_comes_too_late_is_nobodys(self, router: RouterCore) -> None:
        submit(router)
        ended(router, 7)
        assert router.handle(ANSWER, 6.0) == []

    def test_the_next_attempt_is_asked_for_again(self, router: RouterCore) -> None:
        submit(router)
        again = submit(router, next_attempt(A))
        assert Predict("a", 1, SKETCH, 3) in again
        assert router.handle(ANSWER, 3.1) == [], "that was of the attempt before"
        assert router.handle(replace(ANSWER, attempt=1), 3.2) == [Send("prefill-0", replace(TOLD, attempt=1))]

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
    def test_what_is_known_is_not_asked_for(self, router: RouterCore, exact: Request) -> None:
        assert submit(router, exact) == [Send("prefill-0", Prefill(exact))]
        assert ended(router, 7) == []

    def test_nor_is_what_the_client_said_but_it_is_learnt(self, router: RouterCore) -> None:
        hinted = replace(A, estimate=Estimate(5, 10))
        assert submit(router, hinted) == [Send("prefill-0", Prefill(hinted))]
        assert ended(router, 7) == [Learn(SKETCH, 3, 7)]

    @pytest.mark.parametrize("predictor", [Predictor.OFF, Predictor.CONSTANT, Predictor.ORACLE])
    def test_without_a_predictor_that_learns_nobody_is_asked(self, predictor: Predictor) -> None:
        router = serving(predictor)
        assert submit(router) == [Send("prefill-0", Prefill(A))]
        assert ended(router, 7) == []

    def test_without_a_sketch_nothing_is_predicted(self, router: RouterCore) -> None:
        assert submit(router, sketch=None) == [Send("prefill-0", Prefill(A))]

    def test_what_an_earlier_router_placed_goes_on_without(self) -> None:
        """The prediction is with the request at its worker; the router's sketch of it is lost."""
        router = serving(recovered=False)
        router.handle(said("decode-0", Holding((("a", 0),))), 1.1)
        assert router.handle(said("gateway-0", Declare((A,))), 1.2) == []
        router.handle(TimerFired("recovered"), 2.0)
        assert ended(router, 7) == []


class TestLearning:
    def test_whoever_ends_it_says_how_long_it_was(self, router: RouterCore) -> None:
        submit(router)
        assert ended(router, 1, by="prefill-0") == [Learn(SKETCH, 3, 1)]

    @pytest.mark.parametrize(
        ("num_output", "estimate", "learnt"),
        [(50, Estimate(60, 90), False), (50, Estimate(50, 90), True), (50, Estimate(10, 20), True), (50, None, True)],
    )
    def test_what_was_cut_off_sooner_than_predicted_says_nothing(
        self, router: RouterCore, num_output: int, estimate: Estimate | None, learnt: bool
    ) -> None:
        submit(router)
        if estimate is not None:
            router.handle(Predicted("a", 0, estimate), 3.1)
        assert ended(router, num_output) == ([Learn(SKETCH, 3, num_output)] if learnt else [])

    def test_a_request_without_a_token_or_a_length_does_not_teach_either(self, router: RouterCore) -> None:
        submit(router)
        assert ended(router, 0) == []
        submit(router)
        assert router.handle(said("decode-0", Progress(ended=(("a", 0),))), 5.0) == []
        assert not any(router.held.values())

    def test_a_request_that_was_cancelled_is_not_learnt(self, router: RouterCore) -> None:
        submit(router)
        router.handle(said("gateway-0", Cancel("a", 0)), 4.0)
        assert not any(router.held.values())
        assert ended(router, 7) == []

    def test_it_is_fitted_anew_as_more_is_known(self, router: RouterCore) -> None:
        at = []
        for number in range(1, 1000):
            submit(router)
            if Retrain() in ended(router, 7):
                at.append(number)
        assert at[:4] == [FIRST_TRAINING, 24, 36, 54]
        assert len(at) < 15

    def test_after_a_fit_documents_that_wait_are_asked_for_again(self, router: RouterCore) -> None:
        """Only those whose lengths the router predicts: a chat is soon through, and a client knows best."""
        document = replace(A, id="document", service=ServiceClass.BE)
        submit(router, document)
        submit(router, replace(document, id="hinted", estimate=Estimate(5, 10)))
        submit(router, replace(A, id="chat"))
        for _ in range(FIRST_TRAINING - 1):
            submit(router)
            assert ended(router, 7) == [Learn(SKETCH, 3, 7)]
        submit(router)
        assert ended(router, 7) == [Learn(SKETCH, 3, 7), Retrain(), replace(ASKED, request="document")]
