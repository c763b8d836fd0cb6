"""The timeline of a request: for the key that sent it, in three forms."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest

from alignedserve.core import Request
from alignedserve.explain.decisions import DecisionRing, Kind
from alignedserve.explain.story import PartAnswer
from alignedserve.gateway import explaining
from alignedserve.gateway.access.keys import KeyEntry, KeyRing, Scope, hash_key
from alignedserve.gateway.explaining import MOST_A_MINUTE
from alignedserve.owner.client import GivenUp, Overloaded
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import FakeOwner, Gateway

ANN, BOB, CAROL = "key-of-ann", "key-of-bob", "key-of-carol"


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    entries = [("ann", ANN, [Scope.GENERATE]), ("bob", BOB, [Scope.GENERATE]), ("carol", CAROL, [Scope.BATCH])]
    ring = KeyRing([KeyEntry(name, hash_key(key), frozenset(scopes)) for name, key, scopes in entries])
    return Gateway(text, FakeOwner((5,), (2,)), keys=ring)


def remember(gateway: Gateway, request: Request) -> None:
    """Let a worker remember that the request ended."""
    ring = DecisionRing()
    ring.note(Kind.QUEUED, request, number=3, tokens=2)
    ring.now = 1.0
    ring.note(Kind.ENDED, request, tokens=2, why="stop")
    gateway.owner.remembered = [PartAnswer("decode-0", ring.about(request.id))]


def ask(gateway: Gateway, key: str = ANN, **headers: str) -> httpx.Response:
    body = {"model": "demo", "prompt": "Hi"}
    sent = {"Authorization": f"Bearer {key}", **headers}
    answer = gateway.ask("POST", "/v1/completions", json=body, headers=sent)
    remember(gateway, gateway.owner.opened[-1])
    return answer


def timeline(gateway: Gateway, name: str, key: str = ANN, form: str = "json") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return gateway.get(f"/v1/requests/{name}/timeline", params={"format": form}, headers=headers)


def test_a_request_is_found_by_its_header_and_by_the_id_of_its_answer(gateway: Gateway) -> None:
    answer = ask(gateway)
    for name in (answer.headers["x-request-id"], answer.json()["id"]):
        told = timeline(gateway, name)
        assert told.status_code == 200, told.text
        assert told.json()["id"] == gateway.owner.opened[-1].id
    assert told.json()["outcome"] == "ended after 1.00 s"
    assert [decision["kind"] for decision in told.json()["decisions"]] == ["queued", "ended"]
    assert told.json()["stages"][0]["stage"] == "queue"


def test_a_request_is_found_by_the_name_that_its_client_gave_it(gateway: Gateway) -> None:
    answer = ask(gateway, **{"x-request-id": "my-own"})
    assert answer.headers["x-request-id"] == "my-own"
    assert timeline(gateway, "my-own").json()["id"] == gateway.owner.opened[-1].id
    assert timeline(gateway, "my-own", BOB).status_code == 404


def test_only_the_key_that_sent_it_may_ask(gateway: Gateway) -> None:
    name = ask(gateway).headers["x-request-id"]
    refused = timeline(gateway, name, BOB)
    assert refused.status_code == 404
    assert refused.json() == timeline(gateway, name, CAROL).json(), "nothing tells whether it exists"
    assert refused.json()["error"]["code"] == "request_not_found"
    assert gateway.get(f"/v1/requests/{name}/timeline").status_code == 401


def test_a_key_for_batches_alone_may_ask_for_its_lines(gateway: Gateway) -> None:
    name = ask(gateway).headers["x-request-id"]
    salt = KeyEntry("carol", hash_key(CAROL)).caller.salt
    line = gateway.owner.opened[-1]
    remember(gateway, replace(line, salt=salt))
    assert timeline(gateway, name, CAROL).status_code == 200
    assert timeline(gateway, name, ANN).status_code == 404


def test_what_no_part_remembers_is_not_found(gateway: Gateway) -> None:
    told = timeline(gateway, "req-unknown")
    assert (told.status_code, told.json()["error"]["type"]) == (404, "not_found_error")
    assert "req-unknown" in told.json()["error"]["message"]


def test_a_caller_may_not_ask_without_end(gateway: Gateway) -> None:
    answers = [timeline(gateway, "req-unknown") for _ in range(2 * MOST_A_MINUTE)]  # each second allows one more
    told = [answer.status_code for answer in answers]
    assert told[:MOST_A_MINUTE] == [404] * MOST_A_MINUTE
    refused = answers[told.index(429)]
    assert int(refused.headers["retry-after"]) >= 1
    assert timeline(gateway, "req-unknown", BOB).status_code == 404, "others may"


def test_as_text_and_as_a_trace(gateway: Gateway) -> None:
    name = ask(gateway).headers["x-request-id"]
    text = timeline(gateway, name, form="text")
    assert text.headers["content-type"].startswith("text/plain")
    assert "queued; 2 tokens to compute" in text.text
    trace = json.loads(timeline(gateway, name, form="perfetto").text)
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "i"}
    assert timeline(gateway, name, form="yaml").json()["error"]["param"] == "format"


@pytest.mark.parametrize("error", [Overloaded, GivenUp])
def test_a_refusal_names_the_command_that_tells_why(text: TextModel, error: type[Overloaded]) -> None:
    refused = Gateway(text, FakeOwner(error("the queue is full", 2.0, command="alignedserve explain req-7"))).chat()
    assert refused.json()["error"]["message"] == "the queue is full (see `alignedserve explain req-7`)"


def test_numbers_of_others_are_for_keys_that_see_the_dashboard(gateway: Gateway, text: TextModel) -> None:
    assert "3 prompts" not in timeline(gateway, ask(gateway).headers["x-request-id"], form="text").text
    ring = KeyRing([KeyEntry("ann", hash_key(ANN), frozenset({Scope.GENERATE, Scope.DASHBOARD}))])
    for seeing in (Gateway(text, FakeOwner((5,), (2,)), keys=ring), Gateway(text, FakeOwner((5,), (2,)))):
        assert "queued behind 3 prompts" in timeline(seeing, ask(seeing).headers["x-request-id"], form="text").text


TOO_HOT = {"model": "demo", "prompt": "Hi", "temperature": 9}


def refused(gateway: Gateway, key: str = ANN, **headers: str) -> str:
    """Return the id of a request that is a 400."""
    sent = {"Authorization": f"Bearer {key}", **headers}
    answer = gateway.ask("POST", "/v1/completions", json=TOO_HOT, headers=sent)
    assert answer.status_code == 400
    return str(answer.headers["x-request-id"])


@pytest.mark.parametrize("named", [{}, {"x-request-id": "my-own"}])
def test_why_a_request_was_refused_is_told_to_the_key_that_sent_it(gateway: Gateway, named: dict[str, str]) -> None:
    name = refused(gateway, **named)
    why = "refused with 400 (invalid_value): temperature: Input should be less than or equal to 2"
    text = timeline(gateway, name, form="text").text
    assert text.startswith("req-")
    assert f": POST /v1/completions, {why}" in text
    told = timeline(gateway, name).json()
    assert told["outcome"].startswith(why)
    assert (told["object"], told["stages"], told["decisions"]) == ("request.timeline", [], [])
    assert told["began_at"] <= told["ended_at"]
    assert timeline(gateway, name, BOB).status_code == 404
    assert timeline(gateway, name, form="perfetto").json()["error"]["param"] == "format"


def test_the_last_refusals_are_remembered_and_no_more(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "MOST_FAULTS", 2)
    names = [refused(gateway) for _ in range(3)]
    assert [timeline(gateway, name).status_code for name in names] == [404, 200, 200]


def test_a_story_is_told_where_parts_know_one(gateway: Gateway) -> None:
    gateway.owner.steps = (Overloaded("the queue is full", 2.0),)
    name = ask(gateway).headers["x-request-id"]
    assert timeline(gateway, name).json()["outcome"] == "ended after 1.00 s"
