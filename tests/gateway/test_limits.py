"""Tests of the limits of a key, alone and over several gateways."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.core import Request, Sampling
from alignedserve.gateway.access.keys import ANONYMOUS, Caller, KeyEntry, KeyRing, Limits, hash_key
from alignedserve.gateway.access.ledger import JOB_RUNNER, Ledger
from alignedserve.gateway.http.limits import (
    BYTES_AT_ONCE,
    BYTES_PER_S,
    CONVERTED_TOKENS,
    LEAST_PIECE,
    LUMP,
    REFUSALS_AT_ONCE,
    REFUSALS_PER_S,
    TRIAL_S,
    USUAL_TOKENS,
    BytePace,
    CallerQuota,
    RefusalPace,
    format_time,
)
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.owner.client import Overloaded
from alignedserve.text.syntax_trial import SyntaxTrial, Tried
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import PATIENT_S, FakeOwner, Gateway
from tests.gateway.test_vectors import EMBEDS, VectorOwner
from tests.samples import request

HI = [{"role": "user", "content": "Hi"}]


def caller(name: str = "ann", **limits: int) -> Caller:
    return Caller(name, limits=Limits(**limits))


def refused_for(act: Callable[[], None]) -> int:
    """Return the seconds to wait that a refusal names; 0 if the request is accepted."""
    try:
        act()
    except ApiError as error:
        return int(error.headers["Retry-After"]) if error.status == 429 else -1
    return 0


def left(tab: CallerQuota) -> int:
    return int(tab.headers()["x-ratelimit-remaining-tokens"])


def asked(prompt: int, most: int) -> Request:
    return request(prompt=prompt, max_tokens=most)


def scored(prompt: int, most: int, top: int) -> Request:
    return replace(asked(prompt, most), sampling=Sampling(logprobs=top))


def pay(tab: CallerQuota, asked: Request) -> None:
    tab.pay([asked], len(asked.prompt), has_limit=True)


class WritingOwner(FakeOwner):
    """Writes by its script, and makes vectors at once."""

    def steps_of(self, request: Request) -> tuple[Any, ...]:
        return self.steps if request.pooling is None else VectorOwner().steps_of(request)


class TestTabs:
    def test_requests_come_back_evenly(self) -> None:
        now, ledger = [100.0], Ledger()
        enter = CallerQuota(ledger, caller(requests_per_minute=6), lambda: now[0]).enter
        assert [refused_for(enter) for _ in range(8)] == [0] * 6 + [10, 10]
        now[0] += 9.5
        assert refused_for(enter) == 1
        now[0] += 0.6
        assert [refused_for(enter) for _ in range(2)] == [0, 10]
        now[0] += 1e6
        assert [refused_for(enter) for _ in range(7)] == [0] * 6 + [10]

    def test_tokens_may_be_overdrawn_and_are_waited_for(self) -> None:
        now, ledger = [100.0], Ledger()
        tab = CallerQuota(ledger, caller(tokens_per_minute=600), lambda: now[0])
        tab.admit()
        assert not tab.use(1000)
        assert refused_for(tab.admit) == 41
        assert left(tab) == 0
        now[0] += 40.2
        assert refused_for(tab.admit) == 0

    def test_all_that_a_body_may_cost_is_taken_before_it_begins_and_the_rest_comes_back(self) -> None:
        ledger = Ledger()
        tab = CallerQuota(ledger, caller(tokens_per_minute=600), lambda: 100.0)
        tab.pay([asked(30, 100), asked(30, 100)], prompt_tokens=30, has_limit=True)
        assert left(tab) == 600 - 230
        assert refused_for(lambda: pay(CallerQuota(ledger, tab.caller, lambda: 100.0), asked(1, 400))) == 4
        tab.use(50)
        assert left(tab) == 600 - 230
        tab.settle()
        assert left(tab) == 600 - 80
        tab.close()
        tab.close()
        assert left(tab) == 600 - 80

    def test_each_choice_of_a_scored_prompt_costs_the_prompt_and_its_logits(self) -> None:
        tab = CallerQuota(Ledger(), caller(tokens_per_minute=600), lambda: 100.0)
        echoed = replace(asked(30, 100), sampling=Sampling(logprobs=0, prompt_logprobs=0))
        tab.pay([echoed, echoed], prompt_tokens=30, has_limit=True)
        assert left(tab) == 600 - 2 * (60 + 100)

    def test_a_body_that_was_refused_costs_nothing(self) -> None:
        tab = CallerQuota(Ledger(), caller(tokens_per_minute=600), lambda: 100.0)
        pay(tab, asked(30, 100))
        tab.close(is_refused=True)
        assert left(tab) == 600

    def test_a_body_that_a_minute_cannot_pay_is_never_served(self) -> None:
        tab = CallerQuota(Ledger(), caller(tokens_per_minute=1000), lambda: 100.0)
        with pytest.raises(ApiError, match="may cost 40012 tokens, and this API key is limited to 1000") as refused:
            tab.pay([asked(3, 100)] * 400, prompt_tokens=12, has_limit=True)
        assert (refused.value.status, refused.value.code, left(tab)) == (400, "beyond_key_limit", 1000)

    def test_outputs_without_a_limit_get_a_minute_together(self) -> None:
        """Each takes a usual length before it begins; what comes beyond is taken as it comes."""
        tab = CallerQuota(Ledger(), caller(tokens_per_minute=1000), lambda: 100.0)
        requests = tab.pay([asked(40, 2000)] * 4, prompt_tokens=40, has_limit=False)
        assert [request.max_tokens for request in requests] == [240] * 4
        assert left(tab) == 1000 - 40 - 4 * 125
        tab.use(700)
        assert left(tab) == 1000 - 740 - LUMP
        tab.close()
        assert left(tab) == 1000 - 740
        unlimited = CallerQuota(Ledger(), caller(), lambda: 100.0).pay(
            [asked(40, 2000)], prompt_tokens=40, has_limit=False
        )
        assert [request.max_tokens for request in unlimited] == [2000]

    def test_what_arrives_beyond_is_taken_while_there_is_some(self) -> None:
        now, ledger = [100.0], Ledger()
        tab, other = (CallerQuota(ledger, caller(tokens_per_minute=600), lambda: now[0]) for _ in range(2))
        pay(other, asked(1, 499))
        assert [tab.use(tokens) for tokens in (30, LUMP, 5, 1, 1)] == [True, True, True, True, False]
        assert left(tab) == 0
        now[0] += 1.0
        assert tab.use(1), "what comes back may be used"
        assert other.use(499), "it has paid before"

    def test_log_probabilities_in_flight_are_limited_and_come_back(self) -> None:
        ledger, ann = Ledger(), caller(most_logprobs=1000)
        first, second, third = (CallerQuota(ledger, ann) for _ in range(3))
        first.hold_logprobs([scored(30, 100, top=5)], has_limit=True)
        assert refused_for(lambda: second.hold_logprobs([scored(30, 67, top=5)], has_limit=True)) == 1
        second.hold_logprobs([scored(30, 66, top=5)], has_limit=True)
        third.hold_logprobs([scored(30, 4000, top=5)], has_limit=False, is_streamed=True)
        third.hold_logprobs([asked(30, 4000)], has_limit=True)
        CallerQuota(ledger, caller("bob", most_logprobs=1000)).hold_logprobs([scored(30, 100, top=9)], has_limit=True)
        assert refused_for(lambda: third.hold_logprobs([scored(30, 1, top=5)], has_limit=True)) == 1
        first.close()
        first.close()
        second.close()
        third.hold_logprobs([scored(30, 100, top=9)], has_limit=True)

    def test_log_probabilities_of_outputs_without_a_limit_are_held_as_they_come(self) -> None:
        most = 5 * 2 * USUAL_TOKENS
        ledger, ann = Ledger(), caller(most_logprobs=most)
        first, second = (CallerQuota(ledger, ann) for _ in range(2))
        for tab in (first, second):
            tab.hold_logprobs([scored(30, most // 5, top=4)], has_limit=False)
        assert first.use(USUAL_TOKENS)
        assert not first.use(1), "there is no more room for both"
        second.close()
        assert first.use(USUAL_TOKENS - 1), "alone it has all of it"

    def test_a_body_takes_a_place_for_each_choice(self) -> None:
        ledger, ann = Ledger(), caller(most_open=5)
        first, second = CallerQuota(ledger, ann), CallerQuota(ledger, ann)
        first.admit()
        first.hold_places(4)
        second.admit()
        assert refused_for(lambda: second.hold_places(2)) == 1
        with pytest.raises(ApiError, match="asks for 6 choices, and this API key may have 5 open at once") as refused:
            second.hold_places(6)
        assert (refused.value.status, refused.value.code) == (400, "beyond_key_limit")
        first.close()
        assert refused_for(lambda: second.hold_places(5)) == 0
        assert refused_for(first.admit) == 1

    def test_all_callers_together_have_a_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each choice takes some of the gateway's memory, and without keys nobody has a limit of its own."""
        monkeypatch.setattr("alignedserve.gateway.http.limits.MOST_CHOICES", 10)
        ledger = Ledger()
        first, second = (CallerQuota(ledger, ANONYMOUS) for _ in range(2))
        for tab in (first, second):
            tab.admit()
        first.hold_places(8)
        with pytest.raises(ApiError, match="holds as many choices as it can") as refused:
            second.hold_places(3)
        assert (refused.value.status, refused.value.code) == (503, "server_is_overloaded")
        second.hold_places(2)
        first.close()
        second.hold_places(10)

    def test_vectors_run_in_the_places_that_are_left(self) -> None:
        ledger, ann = Ledger(), caller(most_open=5)
        tabs = [CallerQuota(ledger, ann) for _ in range(3)]
        assert [tab.hold_up_to(4) for tab in tabs] == [4, 1, 0]
        assert CallerQuota(ledger, caller("bob")).hold_up_to(9) == 9

    def test_places_are_given_back(self) -> None:
        ledger, ann = Ledger(), caller(most_open=2)
        tabs = [CallerQuota(ledger, ann) for _ in range(3)]
        assert [refused_for(tab.admit) for tab in tabs] == [0, 0, 1]
        for tab in tabs:
            tab.close()
            tab.close()
        assert [refused_for(tab.admit) for tab in tabs] == [0, 0, 1]

    def test_a_caller_does_not_use_up_the_limit_of_another(self) -> None:
        ledger = Ledger()
        names = [f"caller {number}" for number in range(100)]
        tabs = [CallerQuota(ledger, caller(name, requests_per_minute=1, most_open=1)) for name in names]
        assert [refused_for(tab.enter) or refused_for(tab.admit) for tab in tabs] == [0] * 100
        assert all(refused_for(tab.enter) for tab in tabs)

    def test_no_limits_no_headers(self) -> None:
        tab = CallerQuota(Ledger(), ANONYMOUS)
        assert [refused_for(tab.enter) or refused_for(tab.admit) for _ in range(1000)] == [0] * 1000
        assert tab.headers() == {}

    @given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500)), max_size=60), st.integers(1, 2000))
    def test_over_any_time_no_more_than_the_rate(self, asked: list[tuple[float, int]], per_minute: int) -> None:
        """A key may use a minute's worth at once, then the rate, and exceed it by the size of the last request."""
        now, ledger, taken, most = [100.0], Ledger(), 0, 0
        for after_s, tokens in asked:
            now[0] += after_s
            tab = CallerQuota(ledger, caller(tokens_per_minute=per_minute), lambda: now[0])
            if not refused_for(tab.admit):
                tab.use(tokens)
                taken, most = taken + tokens, max(most, tokens)
            tab.close()
            assert taken <= per_minute * (1 + (now[0] - 100) / 60) + most


class TestSeveralGateways:
    def test_they_share_what_a_key_has(self, tmp_path: Path) -> None:
        first, second = (Ledger(tmp_path / "limits", place) for place in (0, 1))
        ann = caller(requests_per_minute=3, most_open=3)
        tabs = [CallerQuota(ledger, ann, lambda: 100.0) for ledger in (first, second, first, second)]
        assert [refused_for(tab.enter) for tab in tabs] == [0, 0, 0, 20]
        assert [refused_for(tab.admit) for tab in tabs] == [0, 0, 0, 1]
        tabs[1].close()
        assert refused_for(tabs[3].admit) == 0

    def test_lines_of_jobs_leave_chats_their_places_and_take_what_chats_leave(self, tmp_path: Path) -> None:
        ann = caller(most_open=3)
        lines, chats = (CallerQuota(Ledger(tmp_path / "limits", place), ann) for place in (JOB_RUNNER, 0))
        assert (lines.hold_up_to(2), chats.hold_up_to(9)) == (2, 3)
        assert lines.hold_up_to(9) == 2, "three chats have all places now"
        chats.close()
        assert lines.hold_up_to(9) == 3

    def test_the_places_of_a_dead_gateway_are_free_again(self, tmp_path: Path) -> None:
        first, second = (Ledger(tmp_path / "limits", place) for place in (0, 1))
        ann = caller(most_open=3)
        tabs = [CallerQuota(ledger, ann) for ledger in (first, first, second)]
        for tab in tabs:
            tab.admit()
        first.close()
        again = Ledger(tmp_path / "limits", 0)
        assert [refused_for(CallerQuota(again, ann).admit) for _ in range(3)] == [0, 0, 1]

    def test_their_file_is_not_stale_while_a_gateway_has_it(self, tmp_path: Path) -> None:
        path = tmp_path / "limits"
        ledger = Ledger(path)
        fd = os.open(path, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ledger.close()
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)


class TestOverHttp:
    @pytest.fixture(autouse=True)
    def at_one_moment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stop the clock, so that no budget refills, however long a test takes."""
        monkeypatch.setattr(CallerQuota, "__init__", partialmethod(CallerQuota.__init__, now=lambda: 100.0))

    def gateway(self, text: TextModel, owner: FakeOwner, **limits: int) -> Gateway:
        return Gateway(text, owner, keys=KeyRing([KeyEntry("ann", hash_key("key"), limits=Limits(**limits))]))

    def ask(self, gateway: Gateway, path: str, **body: Any) -> httpx.Response:
        headers = {"Authorization": "Bearer key"}
        return gateway.ask("POST", path, json={"model": "demo", **body}, headers=headers)

    def complete(self, gateway: Gateway, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return self.ask(gateway, path, **{"prompt": [5, 6, 7], "ignore_eos": True, "max_tokens": 100, **fields})

    def test_every_answer_says_what_is_left(self, text: TextModel) -> None:
        gateway = self.gateway(text, FakeOwner(*[(5,)] * 100), requests_per_minute=2, tokens_per_minute=6000)
        answers = [self.complete(gateway, path) for path in ("/v1/completions", "/nowhere", *["/v1/completions"] * 2)]
        assert [answer.status_code for answer in answers] == [200, 404, 200, 429]
        for answer, left in zip(answers, (1, 1, 0, 0), strict=True):
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
            assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
            assert answer.headers["x-ratelimit-limit-tokens"] == "6000"
        assert answers[3].headers["retry-after"] == "30"
        error = answers[3].json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert error["message"].startswith("this API key is limited to 2 requests in a minute: try again in ")
        used = 6000 - int(answers[1].headers["x-ratelimit-remaining-tokens"])
        assert used == 103  # 3 tokens of the prompt, 100 of the output

    def test_each_body_that_is_read_for_the_model_is_a_request_and_what_only_looks_is_none(
        self, text: TextModel
    ) -> None:
        gateway = self.gateway(text, WritingOwner((5,)), requests_per_minute=1)
        key = {"Authorization": "Bearer key"}
        looks = [("GET", "/v1/models"), ("GET", "/v1/models/demo"), ("GET", "/version"), ("DELETE", "/v1/responses/x")]

        def look() -> list[int]:
            return [gateway.ask(method, path, headers=key).status_code for method, path in looks * 2]

        assert look() == [200, 200, 200, 404] * 2
        assert self.complete(gateway, max_tokens=1).status_code == 200
        texts = (
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/messages",
            "/v1/embeddings",
            "/tokenize",
        )
        assert [self.complete(gateway, path).status_code for path in texts] == [429] * len(texts)
        assert look() == [200, 200, 200, 404] * 2

    def test_a_caller_that_has_had_its_tokens_is_refused_before_its_body_is_read(self, text: TextModel) -> None:
        gateway = self.gateway(text, FakeOwner(*[(5,)] * 100), tokens_per_minute=103)
        assert [self.complete(gateway).status_code for _ in range(2)] == [200, 429]
        assert self.complete(gateway, prompt="not even a prompt" * 10**6).status_code == 429
        assert len(gateway.owner.opened) == 1

    @pytest.mark.parametrize("limits", [{"most_open": 1}, {"tokens_per_minute": 1000}])
    def test_no_body_is_more_than_its_key_may_ever_have(self, text: TextModel, limits: dict[str, int]) -> None:
        """400 prompts of 100 tokens each are 40 minutes' worth of tokens, in a single place."""
        gateway = self.gateway(text, FakeOwner(*[(5,)] * 100), **limits)
        refused = self.complete(gateway, prompt=[[5]] * 400)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "beyond_key_limit")
        assert gateway.owner.opened == []
        assert self.complete(gateway).status_code == 200, "it has taken neither the place nor the tokens"

    def test_what_an_answer_did_not_use_is_left_at_its_end(self, text: TextModel) -> None:
        gateway = self.gateway(text, FakeOwner((5,), (2,)), tokens_per_minute=1000)
        for used in (5, 10):
            answer = self.complete(gateway, ignore_eos=False)
            assert answer.headers["x-ratelimit-remaining-tokens"] == str(1000 - used)

    def test_a_body_that_the_router_refuses_costs_nothing(self, text: TextModel) -> None:
        gateway = self.gateway(text, FakeOwner(Overloaded("the queue is full", 1.0)), tokens_per_minute=1000)
        assert [self.complete(gateway, prompt=[[5] * 50] * 2).status_code for _ in range(9)] == [429] * 9
        assert self.complete(gateway, "/nowhere").headers["x-ratelimit-remaining-tokens"] == "1000"

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", {"prompt": "Hi", "n": 2}),
            ("/v1/chat/completions", {"messages": HI, "n": 2}),
            ("/v1/responses", {"input": "Hi"}),
            ("/v1/messages", {"messages": HI, "max_tokens": 5}),
            ("/v1/embeddings", {"input": ["Hi", "Hello"]}),
            ("/v1/score", {"text_1": "Hi", "text_2": ["Hello", "Hey"]}),
            ("/v1/rerank", {"query": "Hi", "documents": ["Hello", "Hey"]}),
            ("/tokenize", {"prompt": "Hi"}),
            ("/detokenize", {"tokens": [5]}),
            ("/v1/messages/count_tokens", {"messages": HI}),
        ],
    )
    def test_every_choice_and_every_use_of_a_thread_takes_a_place(
        self, text: TextModel, path: str, body: dict[str, Any]
    ) -> None:
        async def asked() -> None:
            go_on = asyncio.Event()
            gateway = self.gateway(replace(text, pooled=EMBEDS), WritingOwner(go_on, (2,)), most_open=3)
            async with gateway.client() as client:
                headers = {"Authorization": "Bearer key"}

                async def ask(path: str, **body: Any) -> int:
                    return (await client.post(path, json={"model": "demo", **body}, headers=headers)).status_code

                first = asyncio.create_task(ask("/v1/completions", prompt="Hi", n=3))
                while len(gateway.owner.open_now) < 3:
                    await asyncio.sleep(0.001)
                assert await ask(path, **body) == 429
                go_on.set()
                assert [await first, await ask(path, **body)] == [200, 200]

        asyncio.run(asyncio.wait_for(asked(), PATIENT_S))

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/tokenize", {"prompt": "naïve 😀" * 40}),
            ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}] * 30}),
            ("/detokenize", {"tokens": [5] * 400}),
            ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi" * 99}]}),
        ],
    )
    def test_counting_and_converting_costs_a_sixteenth(self, text: TextModel, path: str, body: dict[str, Any]) -> None:
        gateway = self.gateway(text, FakeOwner(), tokens_per_minute=1000)
        answer = self.ask(gateway, path, **body)
        counted = answer.json()
        tokens = len(body.get("tokens", ())) or counted.get("count") or counted["input_tokens"]
        assert tokens > 2 * CONVERTED_TOKENS
        cost = math.ceil(tokens / CONVERTED_TOKENS)
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(1000 - cost)
        refused = self.ask(gateway, path, **body, nothing="known")
        assert (refused.status_code, refused.headers["x-ratelimit-remaining-tokens"]) == (400, str(1000 - cost))
        again = self.ask(gateway, path, **body)
        assert again.headers["x-ratelimit-remaining-tokens"] == str(1000 - 2 * cost), "what was refused cost nothing"

    def test_counting_is_refused_where_no_token_is_left_and_costs_a_minute_at_most(self, text: TextModel) -> None:
        gateway = self.gateway(text, FakeOwner(), tokens_per_minute=20)
        assert [self.ask(gateway, "/detokenize", tokens=[5] * 1000).status_code for _ in range(2)] == [200, 429]
        assert self.ask(gateway, "/nowhere").headers["x-ratelimit-reset-tokens"] == "1m0s"

    def test_a_new_grammar_costs_its_trial_once_also_where_it_is_refused(
        self, text: TextModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def tried(_: SyntaxTrial, syntax: str) -> tuple[str | None, float]:
            return ("too slow", 1.0) if "slow" in syntax else (None, 200 * TRIAL_S)

        monkeypatch.setattr(SyntaxTrial, "_try", tried)
        gateway = self.gateway(text, FakeOwner((5,), (2,)), tokens_per_minute=6000)

        def left(pattern: str) -> tuple[int, int]:
            answer = self.complete(gateway, guided_regex=pattern, ignore_eos=False, max_tokens=None)
            after = self.complete(gateway, "/nowhere")
            return answer.status_code, int(after.headers["x-ratelimit-remaining-tokens"])

        assert left("once") == (200, 6000 - 5 - 200)
        assert left("once") == (200, 6000 - 2 * 5 - 200), "it is known"
        assert left("slow") == (400, 0), "a minute's worth at most"
        assert self.complete(gateway).status_code == 429

    def test_a_trial_tells_no_key_what_another_has_had_tried(
        self, text: TextModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trials = list[str]()
        monkeypatch.setattr(SyntaxTrial, "_try", lambda _, syntax: (trials.append(syntax), (None, 0.3))[1])
        trial, of_ann, of_bob = SyntaxTrial(text.trial.folder), Tried("ann"), Tried("bob")
        for tried in (of_ann, of_ann, of_bob, of_bob):
            assert trial.find_fault("start: /a/", tried) is None
        assert of_ann.cpu_s == of_bob.cpu_s == [0.3]
        assert len(trials) == 2

    def test_a_trial_costs_the_time_that_it_takes(self, text: TextModel) -> None:
        gateway = self.gateway(text, FakeOwner((5,), (2,)), tokens_per_minute=10**6)
        left = [10**6]
        for _ in range(3):
            form: dict[str, Any] = {"guided_regex": "(one|two){1,9}", "ignore_eos": False, "max_tokens": 9}
            assert self.complete(gateway, **form).status_code == 200
            left.append(int(self.complete(gateway, "/nowhere").headers["x-ratelimit-remaining-tokens"]))
        first, second, third = (before - after for before, after in itertools.pairwise(left))
        assert first > second == third == 5

    def test_who_has_no_limits_has_no_row(self, text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(Ledger, "row")
        gateway = Gateway(text, FakeOwner((5,), (2,)))
        for path in ("/v1/completions", "/tokenize"):
            assert gateway.ask("POST", path, json={"model": "demo", "prompt": "Hi"}).status_code == 200

    def test_no_body_takes_all_seats_without_a_key_either(self, text: TextModel) -> None:
        async def asked() -> None:
            go_on = asyncio.Event()
            gateway = Gateway(text, FakeOwner(go_on, (2,)), at_once=32)
            async with gateway.client() as client:
                body = {"model": "demo", "prompt": [[5]] * 1024}
                answer = asyncio.create_task(client.post("/v1/completions", json=body))
                while len(gateway.owner.opened) < 32:
                    await asyncio.sleep(0.001)
                assert (await client.post("/tokenize", json={"prompt": "Hi"})).status_code == 200
                assert len(gateway.owner.opened) == 32
                go_on.set()
                assert len((await answer).json()["choices"]) == 1024
            arrivals = [request.arrival_at for request in gateway.owner.opened]
            assert arrivals[-1] > arrivals[0], "the deadlines of those that waited count from when they run"

        asyncio.run(asyncio.wait_for(asked(), PATIENT_S))

    def test_many_bodies_without_a_limit_get_what_is_left_together(self, text: TextModel) -> None:
        limits = KeyRing([KeyEntry("ann", hash_key("key"), limits=Limits(tokens_per_minute=1000))])

        def used(number: int) -> tuple[int, set[str]]:
            """Ask for so many chats at once; return what the key paid, and how they ended."""

            async def asked() -> tuple[int, set[str]]:
                go_on = asyncio.Event()
                gateway = Gateway(text, FakeOwner(go_on, *[(5,)] * 2000), max_model_len=2048, keys=limits)
                headers, body = {"Authorization": "Bearer key"}, {"model": "demo", "messages": HI, "ignore_eos": True}
                async with gateway.client() as client:
                    post = partial(client.post, "/v1/chat/completions", json=body, headers=headers)
                    chats = [asyncio.create_task(post()) for _ in range(number)]
                    while len(gateway.owner.opened) + sum(chat.done() for chat in chats) < number:
                        await asyncio.sleep(0.001)
                    go_on.set()
                    answers = [await chat for chat in chats]
                served = [answer.json() for answer in answers if answer.status_code == 200]
                assert {answer.status_code for answer in answers} <= {200, 429}
                assert set(gateway.owner.cancelled) <= {request.id for request in gateway.owner.opened}
                assert not gateway.owner.open_now
                ends = {answer["choices"][0]["finish_reason"] for answer in served}
                return sum(answer["usage"]["total_tokens"] for answer in served), ends

            return asyncio.run(asyncio.wait_for(asked(), PATIENT_S))

        assert used(1) == (1000, {"length"})
        together, ends = used(20)
        assert 1000 <= together <= 1000 + 20, "each may have had a token more before it ended"
        assert ends == {"length"}

    def test_ordinary_log_probabilities_run_beside_each_other_without_keys_and_a_flood_does_not(
        self, text: TextModel
    ) -> None:
        async def asked() -> None:
            go_on = asyncio.Event()
            gateway = Gateway(text, FakeOwner(go_on, (5,), (2,)), max_model_len=40_000)
            async with gateway.client() as client:

                def ask(**fields: Any) -> asyncio.Task[httpx.Response]:
                    body = {"model": "demo", "messages": HI, "logprobs": True, "top_logprobs": 20, **fields}
                    return asyncio.create_task(client.post("/v1/chat/completions", json=body))

                chats = [ask() for _ in range(16)]
                while len(gateway.owner.opened) < 16:
                    await asyncio.sleep(0.001)
                refused = await ask(max_tokens=39_000)
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                go_on.set()
                assert [(await chat).status_code for chat in chats] == [200] * 16
                go_on.clear()
                flood = [ask(max_tokens=39_000) for _ in range(32)]
                while sum(body.done() for body in flood) < 31:
                    await asyncio.sleep(0.001)
                go_on.set()
                assert sorted([(await body).status_code for body in flood]) == [200] + [429] * 31
                assert (await ask(max_tokens=39_000)).status_code == 200, "what is over is given back"

        asyncio.run(asyncio.wait_for(asked(), PATIENT_S))

    @pytest.mark.parametrize("leaves", [True, False])
    def test_a_place_is_had_until_the_answer_ends(self, text: TextModel, leaves: bool) -> None:
        async def asked() -> None:
            go_on = asyncio.Event()
            gateway = self.gateway(text, FakeOwner(go_on, (2,)), most_open=1)
            async with gateway.client() as client:
                headers, body = {"Authorization": "Bearer key"}, {"model": "demo", "prompt": "Hi", "stream": True}

                async def complete() -> int:
                    return (await client.post("/v1/completions", json=body, headers=headers)).status_code

                first = asyncio.create_task(complete())
                while not gateway.owner.open_now:
                    await asyncio.sleep(0.001)
                assert await complete() == 429
                if leaves:
                    first.cancel()
                    await asyncio.gather(first, return_exceptions=True)
                go_on.set()
                if not leaves:
                    assert await first == 200
                assert await complete() == 200

        asyncio.run(asyncio.wait_for(asked(), PATIENT_S))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (60, "1m0s"), (90.25, "1m30.25s")],
)
def test_times_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


def test_pages_of_others_are_let_in_only_where_so_configured(text: TextModel) -> None:
    page = {"Origin": "https://page.example"}
    preflight = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    keys = KeyRing([KeyEntry("ann", hash_key("key"))])
    closed = Gateway(text, FakeOwner((2,)), keys=keys)
    opened = Gateway(text, FakeOwner((2,)), keys=keys, cors_origins=("https://page.example",))
    for gateway, origin in ((closed, None), (opened, page["Origin"])):
        asked = gateway.ask("OPTIONS", "/v1/completions", headers=preflight)
        assert asked.headers.get("access-control-allow-origin") == origin
        refused = gateway.get("/v1/models", headers=page)
        assert (refused.status_code, refused.headers.get("access-control-allow-origin")) == (401, origin)
    answer = opened.get("/v1/models", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in answer.headers


class TestRefusals:
    def test_a_caller_with_many_waits_for_them_and_others_do_not(self) -> None:
        now = [100.0]
        pace = RefusalPace(lambda: now[0])
        assert sum(pace.wait_s("ann") for _ in range(REFUSALS_AT_ONCE)) == pytest.approx(0)
        waits = [pace.wait_s("ann") for _ in range(3)]
        assert waits == pytest.approx([number / REFUSALS_PER_S for number in (1, 2, 3)])
        assert pace.wait_s("bob") == 0
        now[0] += 1.0
        assert pace.wait_s("ann") == 0

    def test_none_waits_for_ever(self) -> None:
        now = [100.0]
        pace = RefusalPace(lambda: now[0])
        for _ in range(10_000):
            longest = pace.wait_s("ann")
        now[0] += longest
        assert longest < 10
        assert pace.wait_s("ann") <= 1 / REFUSALS_PER_S

    def test_bytes_of_files_have_a_pace_by_key(self) -> None:
        now = [100.0]
        pace = BytePace(lambda: now[0])
        assert sum(pace.wait_s("ann", LEAST_PIECE) for _ in range(BYTES_AT_ONCE // LEAST_PIECE)) == pytest.approx(0)
        assert pace.wait_s("ann", BYTES_PER_S) == pytest.approx(1)
        assert pace.wait_s("bob", LEAST_PIECE) == 0
        now[0] += 1.0
        assert pace.wait_s("ann", BYTES_PER_S / 2) == pytest.approx(0.5)

    def test_a_full_deployment_refuses_at_once(self, text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
        """A load balancer asks another one then: only a caller that is over its own limit waits for its refusal."""
        held: list[str] = []

        async def hold_back(_: RefusalPace, caller: str) -> None:
            held.append(caller)

        monkeypatch.setattr(RefusalPace, "hold_back", hold_back)
        gateway = Gateway(text, FakeOwner(Overloaded("the queue is full", 1.0)))
        assert (gateway.complete().status_code, held) == (429, [])
        assert (gateway.complete(n=1_000_000).status_code, len(held)) == (400, 1)

    def test_what_has_no_place_is_not_tokenised(self, text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenised: list[str] = []
        prompt_ids = TextModel.prompt_ids

        def noted(self: TextModel, prompt: str, *args: Any) -> Any:
            tokenised.append(prompt)
            return prompt_ids(self, prompt, *args)

        monkeypatch.setattr(TextModel, "prompt_ids", noted)
        ring = KeyRing([KeyEntry("ann", hash_key("key"), limits=Limits(most_open=3))])
        gateway = Gateway(text, FakeOwner((5,), (2,)), keys=ring)
        asked: dict[str, Any] = {"headers": {"Authorization": "Bearer key"}}
        for number, status in ((2, 200), (4, 400)):
            body = {"model": "demo", "prompt": [f"prompt {at} of {number}" for at in range(number)]}
            assert gateway.ask("POST", "/v1/completions", json=body, **asked).status_code == status
        assert {prompt[-1] for prompt in tokenised} == {"2"}

    def test_what_is_held_back_has_no_place(self, text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
        ring = KeyRing([KeyEntry("ann", hash_key("key"), limits=Limits(most_open=1))])
        gateway, held = Gateway(text, FakeOwner((5,), (2,)), keys=ring), list[str]()

        async def hold_back(_: RefusalPace, caller: str) -> None:
            held.append(caller)
            await asyncio.Event().wait()

        monkeypatch.setattr(RefusalPace, "hold_back", hold_back)

        async def ask() -> None:
            async with gateway.client() as client:

                def post(**body: Any) -> asyncio.Task[httpx.Response]:
                    headers = {"Authorization": "Bearer key"}
                    return asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))

                refused = post(model="demo")
                while not held:
                    await asyncio.sleep(0.001)
                assert (await post(model="demo", prompt="Hi")).status_code == 200
                gateway.owner.steps = (asyncio.Event(),)
                first = post(model="demo", prompt="Hi")
                while len(gateway.owner.opened) < 2:
                    await asyncio.sleep(0.001)
                beyond = post(model="demo", prompt="Hi")  # a 429
                while len(held) < 2:
                    await asyncio.sleep(0.001)
                for task in (refused, first, beyond):
                    task.cancel()
                await asyncio.gather(refused, first, beyond, return_exceptions=True)

        asyncio.run(asyncio.wait_for(ask(), PATIENT_S))
