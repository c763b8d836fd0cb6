"""Tests of /v1/embeddings, /v1/score and /v1/rerank: bodies, answers, errors, and the openai client."""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from alignedserve.architectures.vectors import PooledRule, PoolKind
from alignedserve.core import FinishReason, Opening, PooledTask, Request, ServiceClass, Spent
from alignedserve.gateway.access.keys import ANONYMOUS, KeyEntry, KeyRing, Limits, hash_key
from alignedserve.gateway.http.limits import CallerQuota
from alignedserve.gateway.vectors import MOST_INPUTS, all_of
from alignedserve.jobs.answering import Answering, LineRequest
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.owner.client import Delivered, Overloaded
from alignedserve.store.job import Endpoint
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, PATIENT_S, FakeOwner, Gateway
from tests.gateway.test_openai_sdk import run, sdk

EMBEDS = PooledRule(PoolKind.LAST, 3, is_normalised=True)
ENCODES = replace(EMBEDS, kind=PoolKind.MEAN, is_bidirectional=True, generates=False)
SCORES = replace(ENCODES, labels=1)


def numbers_of(request: Request) -> list[float]:
    """Return the vector that the owner gives a request: its tokens decide it."""
    assert request.pooling is not None
    if request.pooling.task is PooledTask.SCORE:
        return [len(request.prompt) / 128]
    return [1.0, float(request.prompt[-1]), 0.5][: request.pooling.dimensions]


class VectorOwner(FakeOwner):
    def steps_of(self, request: Request) -> tuple[Any, ...]:
        if self.steps:
            return self.steps
        vector = array("f", numbers_of(request)).tobytes()
        opening = Opening(num_cached=2, vector=vector)
        return (Delivered((0,), FinishReason.LENGTH, opening=opening, spent=Spent(0.25, 10.0, "rapl")),)


def gateway_of(text: TextModel, rule: PooledRule | None = EMBEDS, *steps: Any) -> Gateway:
    return Gateway(replace(text, pooled=rule), VectorOwner(*steps))


def ask(gateway: Gateway, path: str, **fields: Any) -> Any:
    answer = gateway.ask("POST", path, json={"model": MODEL, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(gateway: Gateway, path: str, status: int = 400, **fields: Any) -> dict[str, Any]:
    answer = gateway.ask("POST", path, json={"model": MODEL, **fields})
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert "\n" not in error["message"]
    return error


def test_each_input_is_a_request_of_its_own(text: TextModel) -> None:
    gateway = gateway_of(text)
    answer = ask(gateway, "/v1/embeddings", input=["Hi", "Hello"], service_tier="flex", priority=3)
    opened = gateway.owner.opened
    assert [request.prompt for request in opened] == [tuple(text.prompt_ids(it)) for it in ("Hi", "Hello")]
    assert len({request.id for request in opened}) == 2
    assert all(request.service is ServiceClass.BE and request.priority == 3 for request in opened)
    assert all(request.max_tokens == 1 and request.pooling is not None for request in opened)
    assert [it["embedding"] for it in answer["data"]] == [numbers_of(request) for request in opened]
    assert [it["index"] for it in answer["data"]] == [0, 1]
    num_tokens = sum(len(request.prompt) for request in opened)
    assert answer["usage"].pop("cost") == {"device_seconds": 0.5, "joules": 20.0, "energy": "rapl"}
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (answer["object"], answer["model"]) == ("list", MODEL)


@pytest.mark.parametrize("given", [[5, 6, 7], [[5, 6, 7], [8]], ["Hi", [8]]])
def test_inputs_may_be_tokens(text: TextModel, given: list[Any]) -> None:
    gateway = gateway_of(text)
    ask(gateway, "/v1/embeddings", input=given)
    prompts = [list(request.prompt) for request in gateway.owner.opened]
    wanted = [given] if isinstance(given[0], int) else [text.prompt_ids(it) if it == "Hi" else it for it in given]
    assert prompts == wanted


def test_base64_are_the_same_numbers(text: TextModel) -> None:
    gateway = gateway_of(text)
    answer = ask(gateway, "/v1/embeddings", input="Hi", encoding_format="base64")
    found = array("f", base64.b64decode(answer["data"][0]["embedding"])).tolist()
    assert found == numbers_of(gateway.owner.opened[0])


@pytest.mark.parametrize("as_text", [False, True])
def test_the_openai_client_reads_embeddings(text: TextModel, as_text: bool) -> None:
    """Without a format the client itself asks for base64, and decodes it."""
    gateway = gateway_of(replace(text, pooled=replace(EMBEDS, dimensions=None)), replace(EMBEDS, dimensions=None))

    async def embeds() -> None:
        async with sdk(gateway) as client:
            form: Any = {} if as_text else {"encoding_format": "float"}
            answer = await client.embeddings.create(model=MODEL, input=["Hi", "Hello"], dimensions=2, **form)
            assert [it.embedding for it in answer.data] == [numbers_of(it) for it in gateway.owner.opened]
            assert answer.usage.prompt_tokens == sum(len(it.prompt) for it in gateway.owner.opened)

    run(embeds)


def test_a_prompt_of_the_folder_begins_each_text(text: TextModel) -> None:
    rule = replace(EMBEDS, prompts={"query": "find: "}, usual_prompt="")
    gateway = gateway_of(text, rule)
    ask(gateway, "/v1/embeddings", input="Hi", prompt_name="query")
    assert list(gateway.owner.opened[0].prompt) == text.prompt_ids("find: Hi")
    error = refused(gateway, "/v1/embeddings", input="Hi", prompt_name="answer")
    assert error["message"] == "prompt_name: the model has no prompt 'answer': query"


def test_vectors_that_need_all_tokens_say_so(text: TextModel) -> None:
    gateway = gateway_of(text, ENCODES)
    ask(gateway, "/v1/embeddings", input="Hi")
    assert gateway.owner.opened[0].runs_whole


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["Hi"] * (MOST_INPUTS + 1)}, "input"),
        ({"input": [99_999]}, "input"),
        ({"input": "Hi", "dimensions": 2}, "dimensions"),
        ({"input": "Hi", "dimensions": 4}, "dimensions"),
        ({"input": "Hi", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "Hi " * 300}, "input"),
        ({"input": "Hi", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "Hi", "truncate_prompt_tokens": 4000}, "truncate_prompt_tokens"),
        ({"input": "Hi", "stream": True}, "stream"),
        ({}, "input"),
    ],
)
def test_wrong_bodies_are_refused_by_name(text: TextModel, fields: dict[str, Any], param: str) -> None:
    gateway = gateway_of(text)
    assert refused(gateway, "/v1/embeddings", **fields)["param"] == param
    assert not gateway.owner.opened


def test_long_texts_can_be_cut(text: TextModel) -> None:
    gateway = gateway_of(text)
    ask(gateway, "/v1/embeddings", input=["Hi " * 300, [5] * 300], truncate_prompt_tokens=-1)
    assert [len(request.prompt) for request in gateway.owner.opened] == [256, 256]


def test_a_text_that_is_cut_ends_as_texts_of_its_model_end(text: TextModel) -> None:
    tokenizer = Tokenizer.from_str(text.tokenizer.to_str())
    tokenizer.post_processor = TemplateProcessing("$A <|end|>", special_tokens=[("<|end|>", 2)])
    gateway = gateway_of(replace(text, tokenizer=tokenizer))
    ask(gateway, "/v1/embeddings", input="Hi " * 300, truncate_prompt_tokens=4)
    assert gateway.owner.opened[0].prompt == (*text.encoding("Hi " * 300, None, False).ids[:3], 2)


def test_trained_dimensions_are_taken_and_others_refused(text: TextModel) -> None:
    gateway = gateway_of(text, replace(EMBEDS, dimensions=(2,)))
    answer = ask(gateway, "/v1/embeddings", input="Hi", dimensions=2)
    assert len(answer["data"][0]["embedding"]) == 2
    error = refused(gateway, "/v1/embeddings", input="Hi", dimensions=1)
    assert error["message"] == "dimensions: this model's vectors can have 2, 3 numbers, not 1"


@pytest.mark.parametrize(("rule", "makes"), [(ENCODES, "embeddings"), (SCORES, "scores")])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_a_model_of_vectors_does_not_chat(text: TextModel, rule: PooledRule, makes: str, path: str) -> None:
    gateway = gateway_of(text, rule)
    messages = {"messages": [{"role": "user", "content": "Hi"}]}
    asked: dict[str, Any] = {"/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}.get(path, messages)
    more = {"max_tokens": 5} if path == "/v1/messages" else {}
    error = refused(gateway, path, **asked, **more)
    assert f"this model makes {makes} and writes no text" in error["message"]
    assert not gateway.owner.opened
    assert gateway.get("/health").status_code == 200


def test_a_reranker_makes_no_embeddings(text: TextModel) -> None:
    assert (
        "makes scores and no embeddings" in refused(gateway_of(text, SCORES), "/v1/embeddings", input="Hi")["message"]
    )


def test_a_head_of_several_numbers_gives_no_scores(text: TextModel) -> None:
    gateway = gateway_of(text, replace(SCORES, labels=3))
    error = refused(gateway, "/v1/score", text_1="a", text_2="b")
    assert error["message"] == "this model has a head of 3 numbers: only a head of one number gives scores"


def test_another_model_is_not_served(text: TextModel) -> None:
    answer = gateway_of(text).ask("POST", "/v1/embeddings", json={"model": "other", "input": "Hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "items")])
def test_a_head_scores_each_pair(text: TextModel, names: tuple[str, str]) -> None:
    gateway = gateway_of(text, SCORES)
    answer = ask(gateway, "/v1/score", **dict(zip(names, ("Hi", ["Hello", "Hello you"]), strict=True)))
    opened = gateway.owner.opened
    assert [request.prompt for request in opened] == [
        tuple(text.encoding("Hi", other, True).ids) for other in ("Hello", "Hello you")
    ]
    assert [it["score"] for it in answer["data"]] == [numbers_of(request)[0] for request in opened]
    assert [(it["object"], it["index"]) for it in answer["data"]] == [("score", 0), ("score", 1)]


@pytest.mark.parametrize("path", ["/v1/score", "/v1/rerank"])
def test_a_long_text_does_not_stand_in_many_pairs(text: TextModel, path: str) -> None:
    """A small body would take much memory; a few pairs, and documents as long as the query, may be as long as ever."""
    gateway, query = gateway_of(text, SCORES), "the sea is calm " * 40
    one, several = ("text_1", "text_2") if path == "/v1/score" else ("query", "documents")
    many: dict[str, Any] = {one: query, several: ["a"] * 2_000}
    error = refused(gateway, path, **many)
    assert "pairs have" in error["message"]
    assert "send fewer at a time" in error["message"]
    assert not gateway.owner.opened
    ask(gateway, path, **many | {several: ["a"] * 20})
    assert len(gateway.owner.opened) == 20


def test_a_question_is_scored_beside_as_many_titles_as_a_body_takes(text: TextModel) -> None:
    gateway = gateway_of(text, SCORES)
    ask(gateway, "/v1/rerank", query="the sea is calm " * 8, documents=["A title of usual length"] * 2_048)
    assert len(gateway.owner.opened) == 2_048


def test_without_a_head_the_score_is_a_cosine(text: TextModel) -> None:
    gateway = gateway_of(text)
    answer = ask(gateway, "/score", text_1=["Hi", "Hello"], text_2=["Hello", "Hi"])
    assert len(gateway.owner.opened) == 2, "a text that comes twice is run once"
    one, other = map(numbers_of, gateway.owner.opened)
    cosine = sum(a * b for a, b in zip(one, other, strict=True)) / math.dist(one, [0] * 3) / math.dist(other, [0] * 3)
    assert [it["score"] for it in answer["data"]] == pytest.approx([cosine, cosine])


@pytest.mark.parametrize(
    "fields",
    [{"text_1": "a"}, {"text_1": "a", "items": "b"}, {"text_1": ["a", "b"], "text_2": ["c"] * 3}, {}],
)
def test_scores_need_pairs(text: TextModel, fields: dict[str, Any]) -> None:
    assert refused(gateway_of(text), "/v1/score", **fields)["param"] == "text_1"


def test_scores_of_so_many_texts_and_another_number_name_both(text: TextModel) -> None:
    error = refused(gateway_of(text), "/v1/score", queries=["a", "b"], items=["c"] * 3)
    assert error["param"] == "queries"
    assert "has 2 texts and items has 3: one text, or as many" in error["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_relevance(text: TextModel, path: str) -> None:
    gateway, documents = gateway_of(text, SCORES), ["one", "one and two and three", {"text": "one and two"}]
    answer = ask(gateway, path, query="Hi", documents=documents)
    assert [it["index"] for it in answer["results"]] == [1, 2, 0]
    assert answer["results"][1]["document"] == {"text": "one and two"}
    scores = [it["relevance_score"] for it in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    few = ask(gateway, path, query="Hi", documents=documents, top_n=1, return_documents=False)
    assert [sorted(it) for it in few["results"]] == [["index", "relevance_score"]]


def test_an_error_cancels_the_rest(text: TextModel) -> None:
    gateway = gateway_of(text, EMBEDS, Overloaded("no room", 2.0))
    answer = gateway.ask("POST", "/v1/embeddings", json={"model": MODEL, "input": ["Hi", "Hello"]})
    assert answer.status_code == 429
    assert not gateway.owner.open_now


def test_work_that_is_cancelled_has_ended_when_its_error_is_told() -> None:
    ended = False

    async def fails() -> None:
        raise ValueError("broken")

    async def goes_on() -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(9):
                await asyncio.sleep(0)
            ended = True

    async def check() -> None:
        with pytest.raises(ValueError, match="broken"):
            await all_of([fails, goes_on], 2)
        assert ended

    run(check)


def test_what_waits_has_not_begun_and_results_keep_their_order() -> None:
    begun, first = list[int](), asyncio.Event()

    async def ask(number: int) -> int:
        begun.append(number)
        if number == 0:
            await first.wait()
        return number

    async def check() -> None:
        asking = asyncio.create_task(all_of((partial(ask, number) for number in range(4)), 2))
        while len(begun) < 4:
            await asyncio.sleep(0)
        assert begun == [0, 1, 2, 3], "one of the two runs the others while the first waits"
        first.set()
        assert await asking == [0, 1, 2, 3]

    run(check)


def test_numbers_that_are_not_finite_are_an_error(text: TextModel) -> None:
    gateway = gateway_of(text, EMBEDS, Delivered((), FinishReason.ERROR))
    assert refused(gateway, "/v1/embeddings", 500, input="Hi")["code"] == "generation_failed"


def test_metrics_count_prompts_and_no_output(text: TextModel) -> None:
    gateway = gateway_of(text)
    ask(gateway, "/v1/embeddings", input=["Hi", "Hello"])
    name = '{class="rt"}'
    num_tokens = sum(len(request.prompt) for request in gateway.owner.opened)
    assert gateway.metric(f"alignedserve:prompt_tokens_total{name}") == num_tokens
    assert gateway.metric(f"alignedserve:generation_tokens_total{name}") == 0


def test_inputs_run_in_the_places_that_their_key_has_left(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallerQuota, "__init__", partialmethod(CallerQuota.__init__, now=lambda: 100.0))

    class Counting(VectorOwner):
        most = 0

        def steps_of(self, request: Request) -> tuple[Any, ...]:
            self.most = max(self.most, len(self.open_now))
            return super().steps_of(request)

    owner, limits = Counting(), Limits(most_open=4, tokens_per_minute=1000)
    keys = KeyRing([KeyEntry("ann", hash_key("key"), limits=limits)])
    gateway = Gateway(replace(text, pooled=EMBEDS), owner, keys=keys)
    body = {"model": MODEL, "input": [[5, 6]] * 100}
    answer = gateway.ask("POST", "/v1/embeddings", json=body, headers={"Authorization": "Bearer key"})
    assert (answer.status_code, len(answer.json()["data"]), owner.most) == (200, 100, 4)
    assert answer.headers["x-ratelimit-remaining-tokens"] == "800"


def test_a_key_with_all_inputs_that_it_can_hold_leaves_others_theirs(
    text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs beyond the places that a key has left wait here, and take its gateway's memory."""
    monkeypatch.setattr("alignedserve.gateway.http.limits.MOST_CHOICES", 64)
    go_on = asyncio.Event()

    class Holding(VectorOwner):
        def steps_of(self, request: Request) -> tuple[Any, ...]:
            return (go_on, *super().steps_of(request))

    keys = KeyRing([KeyEntry(name, hash_key(name), limits=Limits(most_open=16)) for name in ("ann", "bob")])
    owner = Holding()
    gateway = Gateway(replace(text, pooled=EMBEDS), owner, keys=keys)

    async def asked() -> None:
        async with gateway.client() as client:

            def embed(key: str) -> asyncio.Task[Any]:
                body, headers = {"model": MODEL, "input": [[5, 6]] * 8}, {"Authorization": f"Bearer {key}"}
                return asyncio.create_task(client.post("/v1/embeddings", json=body, headers=headers))

            flood = [embed("ann") for _ in range(8)]
            while sum(task.done() for task in flood) < 4:
                await asyncio.sleep(0.001)
            before, other = len(owner.opened), embed("bob")
            while len({request.caller for request in owner.opened[before:]} - {owner.opened[0].caller}) < 1:
                await asyncio.sleep(0.001)
            go_on.set()
            assert (await other).status_code == 200
            ends = [(await task).status_code for task in flood]
            assert {*ends} == {200, 429}
            assert ends.count(429) >= 4
            assert (await embed("ann")).status_code == 200

    asyncio.run(asyncio.wait_for(asked(), PATIENT_S))


def test_a_line_of_a_batch_is_embedded(text: TextModel) -> None:
    owner = VectorOwner()
    answering = Answering(owner, replace(text, pooled=EMBEDS), (MODEL,), 256, RequestMetrics())
    line = LineRequest("line-1", Endpoint.EMBEDDINGS, {"model": MODEL, "input": ["Hi", "Hello"]}, 60.0, None, ANONYMOUS)
    answer = asyncio.run(answering.answer(line, lambda: None))
    assert [it["embedding"] for it in answer["data"]] == [numbers_of(request) for request in owner.opened]
    assert all(request.service is ServiceClass.BE and request.slo.jct_s == 60.0 for request in owner.opened)
