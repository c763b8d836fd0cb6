"""Custom policies in the router: they place, admit and predict, and its bounds hold besides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from alignedserve.core import Estimate, Rejection, Request, Sampling, ServiceClass
from alignedserve.explain.decisions import Kind
from alignedserve.policies.guard import OwnPolicies
from alignedserve.policies.source import PolicySource
from alignedserve.protocol.commands import Command, Send
from alignedserve.protocol.messages import AskDecisions, Decisions, Died, Prefill, Refused, Submit
from alignedserve.router.state import RouterCore
from alignedserve.scheduling.policy import Policy
from tests.router.routers import LIMITS, NAMES, beat, serving
from tests.samples import next_attempt, request, said

PLACEMENT, ADMISSION = "PlacementPolicy", "AdmissionPolicy"
IN_TURNS = """\
from alignedserve.policies import *
class InTurns(PlacementPolicy):
    turn = -1
    def worker(self, request, workers):
        self.turn += 1
        return workers[self.turn % len(workers)].name
"""


def router_with(text: str, names: tuple[str, ...] = NAMES) -> RouterCore:
    policy = Policy(own=OwnPolicies(PolicySource("own.py", text)))
    return serving(names, replace(LIMITS, policy=policy))


def answering(kind: str, method: str, answer: str) -> str:
    return f"from alignedserve.policies import *\nclass Own({kind}):\n    def {method}: return {answer}\n"


def submitted(router: RouterCore, asked: Request, owner: str = "gateway-0") -> list[Command]:
    return router.handle(said(owner, Submit(replace(asked, owner=owner))), 3.0)


def placed_on(commands: list[Command]) -> list[str]:
    return [each.to for each in commands if isinstance(each, Send) and isinstance(each.message, Prefill)]


class TestPlacement:
    def test_it_names_the_worker_and_is_asked_once_for_each_attempt(self) -> None:
        router = router_with(IN_TURNS)
        asked = [request("a"), request("b"), next_attempt(request("a"))]
        assert [placed_on(submitted(router, each)) for each in asked] == [["prefill-0"], ["prefill-1"], ["prefill-0"]]

    def test_it_is_offered_workers_that_are_there(self) -> None:
        text = answering(PLACEMENT, "worker(self, request, workers)", "seen.append(workers) or workers[-1].name")
        router = router_with(f"seen = []\n{text}")
        assert placed_on(submitted(router, request("a"))) == ["prefill-1"]
        router.handle(said("launcher", Died("prefill-1", 1)), 3.0)
        assert placed_on(submitted(router, request("b"))) == ["prefill-0"]

    def test_without_workers_it_is_asked_when_one_comes(self) -> None:
        router = router_with(IN_TURNS, ("gateway-0", "pool-0", "decode-0"))
        assert placed_on(submitted(router, request("a"))) == []
        assert placed_on(router.handle(said("prefill-0", beat("prefill-0")), 3.1)) == ["prefill-0"]


class TestAdmission:
    @pytest.mark.parametrize("service", ServiceClass)
    def test_a_refusal_names_the_policy_and_is_no_longer_than_a_minute(self, service: ServiceClass) -> None:
        router = router_with(answering(ADMISSION, "refuse(self, request, load)", "1e6"))
        refused = Refused("a", 0, Rejection.POLICY, "the policy own.py refuses it", 60.0)
        assert submitted(router, replace(request("a"), service=service)) == [Send("gateway-0", refused)]

    def test_later_attempts_and_lines_of_jobs_are_not_refused(self) -> None:
        router = router_with(answering(ADMISSION, "refuse(self, request, load)", "0"), (*NAMES, "jobs-0"))
        assert placed_on(submitted(router, next_attempt(request("a")))) == ["prefill-0"]
        line = replace(request("b"), service=ServiceClass.BE)
        assert placed_on(submitted(router, line, "jobs-0")) == ["prefill-1"]

    def test_bounds_hold_besides(self) -> None:
        router = router_with(answering(ADMISSION, "refuse(self, request, load)", "None"))
        reasons = [
            each.message.reason
            for name in "abcd"
            for each in submitted(router, request(name))
            if isinstance(each, Send) and isinstance(each.message, Refused)
        ]
        assert reasons == [Rejection.OPEN]

    def test_it_sees_the_load(self) -> None:
        body = "None if (load.num_open, load.num_waiting, request.prompt) == (2, 2, (1, 2, 3)) else 9"
        router = router_with(answering(ADMISSION, "refuse(self, request, load)", body))
        for name in "ab":
            submitted(router, next_attempt(request(name)))
        assert len(placed_on(submitted(router, request("c")))) == 1


class TestPredictor:
    def estimate(self, asked: Request, answer: str) -> Estimate | None:
        router = router_with(answering("PredictorPolicy", "length(self, request)", answer))
        [prefill] = [each.message for each in submitted(router, asked) if isinstance(each, Send)]
        assert isinstance(prefill, Prefill)
        return prefill.request.estimate

    def test_its_length_goes_with_the_request(self) -> None:
        assert self.estimate(request("a", max_tokens=100), "7.2") == Estimate(8, 16)
        assert self.estimate(request("a", max_tokens=100), "1e300") == Estimate(100, 200)

    def test_its_length_is_told_to_whoever_asks_about_the_request(self) -> None:
        router = router_with(answering("PredictorPolicy", "length(self, request)", "7.2"))
        submitted(router, request("a", max_tokens=100))
        [told] = router.handle(said("gateway-0", AskDecisions(1, "a")), 3.0)
        assert isinstance(told, Send)
        assert isinstance(told.message, Decisions)
        predicted = [noted for noted in told.message.findings.decisions if noted.kind is Kind.PREDICTED]
        assert [(noted.tokens, noted.number) for noted in predicted] == [(8, 16)]

    def test_what_the_client_states_or_fixes_stays(self) -> None:
        stated = replace(request("a", max_tokens=100), estimate=Estimate(3, 6))
        assert self.estimate(stated, "50") == Estimate(3, 6)
        fixed = replace(request("a", max_tokens=100), sampling=Sampling(min_tokens=100))
        assert self.estimate(fixed, "50") is None

    def test_without_an_answer_the_default_predicts(self) -> None:
        assert self.estimate(request("a"), "1 / 0") is None
