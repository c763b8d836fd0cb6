"""A second model that makes vectors beside the one that chats: what a gateway and the job runner make of both."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from alignedserve.core import Role, ServiceClass
from alignedserve.explain.decisions import Decision, Findings, Kind
from alignedserve.explain.story import PartAnswer
from alignedserve.gateway.access.keys import ANONYMOUS, KeyEntry, KeyRing, Limits, hash_key
from alignedserve.gateway.embed_side import VectorModel
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.jobs.answering import Answering, LineRequest
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.protocol.figures import WorkerLoad
from alignedserve.protocol.messages import Figures, Member
from alignedserve.store.job import Endpoint
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, MOST, FakeOwner, Gateway
from tests.gateway.test_vectors import EMBEDS, ENCODES, SCORES, VectorOwner, numbers_of

NAME, LONGEST = "minilm", 40


class Both:
    """A gateway with a model that chats, and one that makes vectors."""

    def __init__(self, text: TextModel, rule: Any = ENCODES, **settings: Any) -> None:
        self.chats, self.texts = FakeOwner((300, 2)), VectorOwner()
        self.texts.members = (Member("decode-embed", Role.DECODE, "node-1", 3, "ipc://there"),)
        model = VectorModel(NAME, self.texts, replace(text, pooled=rule), LONGEST, 2)
        self.gateway = Gateway(replace(text, pooled=EMBEDS), self.chats, embedding=model, **settings)

    def ask(self, path: str, **body: Any) -> Any:
        return self.gateway.ask("POST", path, json={"model": NAME, **body})


@pytest.fixture
def both(text: TextModel) -> Both:
    return Both(text)


def test_vectors_of_its_name_are_its_own(both: Both) -> None:
    answer = both.ask("/v1/embeddings", input=["Hi", "Hello", "there"]).json()
    assert (answer["model"], len(answer["data"])) == (NAME, 3)
    assert [row["embedding"] for row in answer["data"]] == [numbers_of(request) for request in both.texts.opened]
    assert both.chats.opened == []
    assert both.ask("/v1/rerank", query="Hi", documents=["Hello"]).json()["results"]
    assert both.ask("/v1/score", text_1="Hi", text_2="Hello").json()["data"]
    assert both.chats.opened == []


def test_a_reranker_ranks(text: TextModel) -> None:
    both = Both(text, SCORES)
    assert [
        row["index"] for row in both.ask("/v1/rerank", query="Hi", documents=["Hi", "Hello there"]).json()["results"]
    ]
    assert len(both.texts.opened) == 2


def test_all_else_is_the_first_model_s(both: Both) -> None:
    assert both.gateway.chat().json()["choices"][0]["finish_reason"] == "stop"
    assert both.texts.opened == []
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        body = (
            {"messages": [{"role": "user", "content": "Hi"}]} if path.endswith(("chat/completions", "messages")) else {}
        )
        body |= {"prompt": "Hi"} if path == "/v1/completions" else {}
        body |= {"input": "Hi"} if path == "/v1/responses" else {}
        body |= {"max_tokens": 5} if path == "/v1/messages" else {}
        answer = both.ask(path, **body)
        assert answer.status_code == 400, answer.text
        assert (
            f"the model {NAME!r} writes no text here: send texts to /v1/embeddings" in answer.json()["error"]["message"]
        )
    assert both.ask("/v1/embeddings", input="Hi", model="other").status_code == 404


def test_a_text_is_as_long_as_the_model_that_reads_it(both: Both) -> None:
    error = both.ask("/v1/embeddings", input=[[5] * (LONGEST + 1)]).json()["error"]
    assert f"maximum context length is {LONGEST} tokens" in error["message"]
    assert both.ask("/tokenize", prompt="Hi").json()["max_model_len"] == LONGEST
    assert both.ask("/tokenize", prompt="Hi", model=MODEL).json()["max_model_len"] == MOST


def test_models_are_listed(both: Both) -> None:
    cards = both.gateway.get("/v1/models").json()["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [(MODEL, MOST), (NAME, LONGEST)]
    assert cards[1]["promise"] is None
    assert both.gateway.get(f"/v1/models/{NAME}").json() == cards[1]
    assert both.gateway.get("/status").json()["models"] == [MODEL, NAME]


@pytest.mark.parametrize(("learnt", "told"), [(LONGEST // 2, LONGEST // 2), (2 * LONGEST, LONGEST)])
def test_a_model_is_as_long_as_it_has_learnt_to_read(text: TextModel, learnt: int, told: int) -> None:
    both = Both(text, replace(ENCODES, longest=learnt))
    assert both.gateway.get(f"/v1/models/{NAME}").json()["max_model_len"] == told
    error = both.ask("/v1/embeddings", input=[[5] * (told + 1)]).json()["error"]
    assert f"maximum context length is {told} tokens" in error["message"]


def test_status_and_readiness_are_those_of_both(both: Both) -> None:
    parts = [part["name"] for part in both.gateway.get("/status").json()["parts"]]
    assert set(parts) == {"decode-0", "decode-embed"}
    assert both.gateway.get("/ready").status_code == 200
    both.texts.ready = False
    assert [both.gateway.get(path).status_code for path in ("/ready", "/health")] == [503, 503]
    both.texts.lacks_s = 60.0
    assert both.ask("/v1/embeddings", input="Hi").status_code == 503
    assert both.gateway.chat().status_code == 200
    both.texts.lacks_s, both.chats.lacks_s = 0.0, 60.0
    assert both.ask("/v1/embeddings", input="Hi").status_code == 200
    assert both.gateway.chat().status_code == 503


def test_metrics_tell_both_apart(both: Both) -> None:
    both.ask("/v1/embeddings", input=["Hi", "Hello"])
    both.gateway.chat()
    served = "alignedserve:request_success_total{"
    assert both.gateway.metric(f'{served}model_name="{NAME}"') == 2
    assert both.gateway.metric(f'{served}model_name="{MODEL}"') == 1
    both.gateway.app.state.parts.update(Figures(worker=WorkerLoad(), member="decode-embed", slowdown=2.0), NAME)
    both.gateway.app.state.parts.update(Figures(worker=WorkerLoad(), member="decode-0", slowdown=3.0))
    text = both.gateway.get("/metrics").text
    assert f'alignedserve:step_slowdown{{model_name="{NAME}",worker="decode-embed"}} 2.0' in text
    assert f'alignedserve:step_slowdown{{model_name="{MODEL}",worker="decode-0"}} 3.0' in text
    assert text.count("\nprocess_start_time_seconds{") == 1


def test_a_key_pays_for_its_texts(text: TextModel) -> None:
    key = KeyEntry("ann", hash_key("secret"), limits=Limits(tokens_per_minute=20))
    both = Both(text, keys=KeyRing([key]))
    headers = {"Authorization": "Bearer secret"}
    body = {"model": NAME, "input": [[5] * 15]}
    first, second = (both.gateway.ask("POST", "/v1/embeddings", json=body, headers=headers) for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 429)
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 20


def test_a_request_is_explained_by_the_side_that_knows_it(both: Both) -> None:
    noted = Decision(Kind.ARRIVED, 1.0, "req-a", 0, ServiceClass.RT, "")
    both.texts.remembered = [PartAnswer("router", Findings((noted,), (), 0.5))]
    assert both.gateway.get("/v1/requests/req-a/timeline").json()["id"] == "req-a"
    assert both.gateway.get("/v1/requests/req-b/timeline").status_code == 404


def test_lines_of_a_batch_go_to_it(text: TextModel) -> None:
    chats, texts = FakeOwner((2,)), VectorOwner()
    metrics = RequestMetrics(MODEL)
    of_texts = Answering(texts, replace(text, pooled=ENCODES), (NAME,), LONGEST, metrics.of_model(NAME))
    answering = Answering(chats, text, (MODEL,), MOST, metrics, embedding=of_texts)
    assert [answering.serves(name) for name in (MODEL, NAME, "other")] == [True, True, False]

    def answer(endpoint: Endpoint, **body: Any) -> Any:
        line = LineRequest("a", endpoint, {"model": NAME, **body}, 60.0, None, ANONYMOUS)
        return asyncio.run(answering.answer(line, lambda: None))

    answer(Endpoint.EMBEDDINGS, input="Hi")
    assert (len(texts.opened), chats.opened) == (1, [])
    with pytest.raises(ApiError, match="writes no text here"):
        answer(Endpoint.COMPLETIONS, prompt="Hi")
