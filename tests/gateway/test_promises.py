"""Tests of what a request is promised: fields, headers and tiers, and which of them wins."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.config.sections import SloConfig
from alignedserve.core import NO_KEY_SALT, Estimate, ServiceClass, Slo
from alignedserve.gateway.access.keys import KeyEntry, KeyRing, Limits, hash_key
from alignedserve.owner.client import Delivered, InLine, Overloaded
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import FakeOwner, Gateway, data_lines

RT, BE = ServiceClass.RT, ServiceClass.BE
USUAL = SloConfig(ttft_ms=800.0, tbt_ms=100.0, flex_jct_s=300.0)


@pytest.fixture
def gateway(text: TextModel, hello: tuple[int, ...]) -> Gateway:
    return Gateway(text, FakeOwner(hello), slo=USUAL)


@pytest.mark.parametrize(("fields", "salt"), [({}, ""), ({"cache_salt": "tenant"}, f"{NO_KEY_SALT}tenant")], ids=str)
def test_prompts_are_shared_within_a_salt(gateway: Gateway, fields: dict[str, Any], salt: str) -> None:
    gateway.chat(**fields)
    assert [request.salt for request in gateway.owner.opened] == [salt]


def test_clients_without_keys_are_one_caller_whatever_salts_they_choose(gateway: Gateway) -> None:
    for salt in (None, "a", "b" * 40, NO_KEY_SALT):
        gateway.chat(cache_salt=salt)
    assert {request.caller for request in gateway.owner.opened} == {""}
    assert len({request.salt for request in gateway.owner.opened}) == 4


@pytest.mark.parametrize(
    ("fields", "estimate"), [({}, None), ({"expected_tokens": 30}, Estimate(30, 60)), ({"expected_tokens": None}, None)]
)
def test_a_client_may_say_how_long_its_answer_will_be(
    gateway: Gateway, fields: dict[str, Any], estimate: Estimate | None
) -> None:
    gateway.chat(**fields)
    assert [request.estimate for request in gateway.owner.opened] == [estimate]


@pytest.mark.parametrize(
    ("fields", "service", "slo", "tier"),
    [
        ({}, RT, Slo(0.8, 0.1), "default"),
        ({"slo": {}}, RT, Slo(0.8, 0.1), "default"),
        ({"service_tier": "auto"}, RT, Slo(0.8, 0.1), "default"),
        ({"service_tier": "default"}, RT, Slo(0.8, 0.1), "default"),
        ({"service_tier": "priority"}, RT, Slo(0.4, 0.05), "priority"),
        ({"service_tier": "flex"}, BE, Slo(jct_s=300.0), "flex"),
        ({"slo": {"ttft_ms": 250}}, RT, Slo(0.25, 0.1), "default"),
        ({"slo": {"tbt_ms": 50.5}}, RT, Slo(0.8, 0.0505), "default"),
        ({"slo": {"jct_ms": 45_000}}, BE, Slo(jct_s=45.0), "flex"),
        ({"slo": {"ttft_ms": 250}, "service_tier": "flex"}, RT, Slo(0.25, 0.1), "default"),
        ({"slo": {"jct_ms": 60_000}, "service_tier": "priority"}, BE, Slo(jct_s=60.0), "flex"),
        ({"slo": {"ttft_ms": 250}, "service_tier": "priority"}, RT, Slo(0.25, 0.05), "priority"),
        ({"slo": {"ttft_ms": 250, "tbt_ms": 50}, "service_tier": "priority"}, RT, Slo(0.25, 0.05), "default"),
    ],
    ids=str,
)
def test_fields_and_tiers(gateway: Gateway, fields: dict[str, Any], service: ServiceClass, slo: Slo, tier: str) -> None:
    answer = gateway.chat(**fields)
    (request,) = gateway.owner.opened
    assert (request.service, answer.json()["service_tier"]) == (service, tier)
    assert (request.slo.ttft_s, request.slo.tbt_s) == pytest.approx((slo.ttft_s, slo.tbt_s)) or service is BE
    assert request.slo.jct_s == slo.jct_s


@pytest.mark.parametrize(("slo", "is_asked"), [(None, False), ({"tbt_ms": 100}, True)])
def test_who_asks_for_nothing_gets_what_the_machine_keeps(
    text: TextModel, hello: tuple[int, ...], slo: dict[str, Any] | None, is_asked: bool
) -> None:
    gateway = Gateway(text, FakeOwner(hello), machine=Slo(6.0, 0.25, is_asked=False))
    gateway.chat(slo=slo)
    (request,) = gateway.owner.opened
    assert request.slo == Slo(6.0, 0.1 if is_asked else 0.25, is_asked=is_asked)


@pytest.mark.parametrize(
    ("headers", "service", "slo"),
    [
        ({"x-slo-ttft-ms": "250"}, RT, Slo(0.25, 0.1)),
        ({"X-SLO-TBT-MS": "50.5"}, RT, Slo(0.8, 0.0505)),
        ({"x-llm-d-slo-ttft-ms": "250", "x-llm-d-slo-tpot-ms": "50"}, RT, Slo(0.25, 0.05)),
        ({"x-slo-ttft-ms": "250", "x-llm-d-slo-ttft-ms": "999"}, RT, Slo(0.25, 0.1)),
        ({"x-slo-jct-ms": "6e4"}, BE, Slo(jct_s=60.0)),
    ],
    ids=str,
)
def test_headers(gateway: Gateway, headers: dict[str, str], service: ServiceClass, slo: Slo) -> None:
    body = {"model": gateway.get("/v1/models").json()["data"][0]["id"], "prompt": "Hi"}
    assert gateway.ask("POST", "/v1/completions", json=body, headers=headers).status_code == 200
    (request,) = gateway.owner.opened
    assert (request.service, request.slo.jct_s) == (service, slo.jct_s)
    assert (request.slo.ttft_s, request.slo.tbt_s) == pytest.approx((slo.ttft_s, slo.tbt_s)) or service is BE


def test_the_body_wins_over_a_header(gateway: Gateway) -> None:
    body = {"model": gateway.get("/v1/models").json()["data"][0]["id"], "prompt": "Hi", "slo": {"ttft_ms": 250}}
    gateway.ask("POST", "/v1/completions", json=body, headers={"x-slo-ttft-ms": "999"})
    assert gateway.owner.opened[0].slo.ttft_s == 0.25


BOUNDED = Limits(least_ttft_ms=500, least_tbt_ms=80, least_priority=-1)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"slo": {"ttft_ms": 499}}, "slo.ttft_ms"),
        ({"slo": {"ttft_ms": 600, "tbt_ms": 79.5}}, "slo.tbt_ms"),
        ({"priority": -2}, "priority"),
    ],
    ids=str,
)
def test_a_key_may_have_bounds_of_what_it_asks_for(
    text: TextModel, hello: tuple[int, ...], fields: dict[str, Any], field: str
) -> None:
    ring = KeyRing([KeyEntry("ann", hash_key("ann"), limits=BOUNDED), KeyEntry("bob", hash_key("bob"))])
    gateway = Gateway(text, FakeOwner(hello), slo=USUAL, keys=ring)
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **fields}
    for name, status in (("ann", 400), ("bob", 200)):
        headers = {"Authorization": f"Bearer {name}"}
        answer = gateway.ask("POST", "/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == status
        if status == 400:
            assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (field, "beyond_key_limit")


def test_a_tier_promises_no_more_than_the_key_allows(text: TextModel, hello: tuple[int, ...]) -> None:
    ring = KeyRing([KeyEntry("ann", hash_key("ann"), limits=BOUNDED)])
    gateway = Gateway(text, FakeOwner(hello), slo=USUAL, keys=ring)
    body = {"model": "demo", "prompt": "Hi", "service_tier": "priority", "priority": -1}
    answer = gateway.ask("POST", "/v1/completions", json=body, headers={"Authorization": "Bearer ann"})
    assert answer.status_code == 200
    assert [request.slo for request in gateway.owner.opened] == [Slo(0.5, 0.08)]


@pytest.mark.parametrize(("least", "priority"), [(None, 0), (-1, 0), (5, 5)])
def test_who_names_no_priority_has_none_before_the_bound(
    text: TextModel, hello: tuple[int, ...], least: int | None, priority: int
) -> None:
    ring = KeyRing([KeyEntry("ann", hash_key("ann"), limits=Limits(least_priority=least))])
    gateway = Gateway(text, FakeOwner(hello), slo=USUAL, keys=ring)
    body = {"model": "demo", "prompt": "Hi"}
    assert gateway.ask("POST", "/v1/completions", json=body, headers={"Authorization": "Bearer ann"}).status_code == 200
    assert [request.priority for request in gateway.owner.opened] == [priority]


def test_every_chunk_of_a_stream_names_the_tier(gateway: Gateway) -> None:
    chunks = data_lines(gateway.chat(stream=True, service_tier="flex"))
    assert {chunk["service_tier"] for chunk in chunks[:-1]} == {"flex"}


def test_a_clients_priority_travels_with_its_request(gateway: Gateway) -> None:
    gateway.chat(priority=-3)
    gateway.chat()
    assert [request.priority for request in gateway.owner.opened] == [-3, 0]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms"),
        ({"slo": {"ttft_ms": "fast"}}, "slo.ttft_ms"),
        ({"slo": {"tbt_ms": -1}}, "slo.tbt_ms"),
        ({"slo": {"jct_ms": 1e13}}, "slo.jct_ms"),
        ({"slo": {"tpot_ms": 5}}, "slo.tpot_ms"),
        ({"slo": 5}, "slo"),
        ({"slo": {"ttft_ms": 100, "jct_ms": 100}}, "slo"),
        ({"slo": {"strict": 1}}, "slo.strict"),
        ({"slo": {"strict": True, "jct_ms": 100}}, "slo.strict"),
        ({"slo": {"strict": True}, "service_tier": "flex"}, "slo.strict"),
        ({"service_tier": "scale"}, "service_tier"),
        ({"priority": 1.5}, "priority"),
        ({"priority": False}, "priority"),
        ({"priority": 2**63}, "priority"),
    ],
    ids=str,
)
def test_nonsense_is_named(gateway: Gateway, fields: dict[str, Any], named: str) -> None:
    answer = gateway.chat(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)
    assert gateway.owner.opened == []


@pytest.mark.parametrize("value", ["", "fast", "-1", "0", "nan", "inf", "1e13"])
def test_nonsense_in_a_header_is_named(gateway: Gateway, value: str) -> None:
    body = {"model": gateway.get("/v1/models").json()["data"][0]["id"], "prompt": "Hi"}
    answer = gateway.ask("POST", "/v1/completions", json=body, headers={"x-slo-ttft-ms": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-slo-ttft-ms")


# --- Promises that no server could keep


@pytest.mark.parametrize(
    ("fields", "is_strict"),
    [
        ({}, False),
        ({"slo": {"ttft_ms": 250}}, False),
        ({"slo": {"strict": None}}, False),
        ({"slo": {"strict": False}}, False),
        ({"slo": {"strict": False, "jct_ms": 100}}, False),
        ({"slo": {"strict": True}}, True),
        ({"slo": {"strict": True, "ttft_ms": 250}}, True),
        ({"slo": {"strict": True, "ttft_ms": 250}, "service_tier": "flex"}, True),
        ({"slo": {"strict": True}, "service_tier": "priority"}, True),
    ],
    ids=str,
)
def test_a_client_may_want_a_refusal_in_place_of_a_late_answer(
    gateway: Gateway, fields: dict[str, Any], is_strict: bool
) -> None:
    assert gateway.chat(**fields).status_code == 200
    assert [request.slo.strict for request in gateway.owner.opened] == [is_strict]


def test_a_best_effort_header_beside_slo_strict_is_refused(gateway: Gateway) -> None:
    body = {"model": gateway.get("/v1/models").json()["data"][0]["id"], "prompt": "Hi", "slo": {"strict": True}}
    answer = gateway.ask("POST", "/v1/completions", json=body, headers={"x-slo-jct-ms": "100"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "slo.strict")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_infeasible", [False, True])
def test_the_answer_says_that_its_ttft_could_not_be_kept(
    text: TextModel, hello: tuple[int, ...], stream: bool, is_infeasible: bool
) -> None:
    first = Delivered(hello[:1], None, is_infeasible=is_infeasible)
    gateway = Gateway(text, FakeOwner(first, hello[1:]), slo=USUAL)
    for answer in (gateway.chat(stream=stream), gateway.complete(stream=stream)):
        assert answer.status_code == 200
        assert answer.headers.get("x-slo-infeasible") == ("ttft" if is_infeasible else None)


def test_an_answer_of_several_choices_says_it_once(text: TextModel, hello: tuple[int, ...]) -> None:
    gateway = Gateway(text, FakeOwner(Delivered(hello[:1], None, is_infeasible=True), hello[1:]), slo=USUAL)
    assert gateway.chat(n=2).headers.get_list("x-slo-infeasible") == ["ttft"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_gives_the_routers_reason(text: TextModel, stream: bool) -> None:
    why = "its prompt alone takes 2.0 s, and its ttft is 1 s: ask for a longer slo.ttft_ms"
    gateway = Gateway(text, FakeOwner(Overloaded(why, 1.0)), slo=USUAL)
    answer = gateway.chat(slo={"strict": True, "ttft_ms": 1000}, stream=stream)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["message"] == why
    assert "x-slo-infeasible" not in answer.headers


PLACES = (Delivered((), None, place=InLine(3, 12.34)), Delivered((), None, place=InLine(0, 4.0)))


def test_a_stream_that_waits_in_line_says_its_place_in_comments(text: TextModel, hello: tuple[int, ...]) -> None:
    """Proxies keep the stream open, clients skip the comments, and people see that something happens."""
    gateway = Gateway(text, FakeOwner(*PLACES, hello))
    for answer in (gateway.chat(stream=True), gateway.complete(stream=True)):
        comments = [line for line in answer.text.split("\n\n") if line.startswith(":")]
        assert comments == [": 3 before you, about 13 s", ": 0 before you, about 4 s"]
        assert (answer.headers["x-queue-before"], answer.headers["x-queue-wait-s"]) == ("3", "12.3")
        assert "server-timing" not in answer.headers, "there are no times yet"
        assert answer.text.endswith("data: [DONE]\n\n")


def test_a_stream_of_several_choices_says_none(text: TextModel, hello: tuple[int, ...]) -> None:
    """One of them may still be refused, by a status."""
    answer = Gateway(text, FakeOwner(*PLACES, hello)).chat(stream=True, n=2)
    assert ":" not in {block[:1] for block in answer.text.split("\n\n")}
    assert (answer.headers["x-queue-before"], answer.headers["x-queue-wait-s"]) == ("3", "12.3")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_streams_of_named_events_say_it_too(text: TextModel, hello: tuple[int, ...], path: str) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if path == "/v1/messages" else {"input": "Hi"}
    most = {"max_tokens": 20} if path == "/v1/messages" else {}
    body = {"model": "demo", "stream": True, **asked, **most}
    answer = Gateway(text, FakeOwner(*PLACES, hello)).ask("POST", path, json=body)
    assert answer.status_code == 200
    assert ": 3 before you, about 13 s\n\n" in answer.text


def test_an_answer_that_waited_in_line_says_it_in_headers(text: TextModel, hello: tuple[int, ...]) -> None:
    answer = Gateway(text, FakeOwner(*PLACES, hello)).chat()
    assert (answer.headers["x-queue-before"], answer.headers["x-queue-wait-s"]) == ("3", "12.3")
    assert "queue;dur=" in answer.headers["server-timing"]
    assert "x-queue-before" not in Gateway(text, FakeOwner(hello)).chat().headers


@pytest.mark.parametrize(("said", "tries"), [("2", 2), ("0", 0), ("", 0), ("-1", 0), ("two", 0), ("1234", 0), ("٣", 0)])
def test_a_client_says_how_often_it_was_refused(gateway: Gateway, said: str, tries: int) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    headers = {"x-stainless-retry-count": said.encode()}
    gateway.ask("POST", "/v1/chat/completions", json=body, headers=headers)
    assert [request.tries for request in gateway.owner.opened] == [tries]


@pytest.mark.parametrize(
    ("settings", "fields", "is_asked"),
    [
        ({}, {}, False),
        ({}, {"service_tier": "auto"}, False),
        ({}, {"slo": {"ttft_ms": 900}}, True),
        ({}, {"service_tier": "priority"}, True),
        ({"slo": SloConfig(ttft_ms=500.0)}, {}, True),
        ({"slo": SloConfig(tbt_ms=50.0)}, {}, True),
    ],
    ids=str,
)
def test_a_promise_is_asked_for_by_the_client_or_the_operator(
    text: TextModel, hello: tuple[int, ...], settings: dict[str, Any], fields: dict[str, Any], is_asked: bool
) -> None:
    """All others wait in line."""
    gateway = Gateway(text, FakeOwner(hello), **settings)
    gateway.chat(**fields)
    assert [request.slo.is_asked for request in gateway.owner.opened] == [is_asked]


def test_who_asks_for_nothing_is_promised_what_the_machine_keeps(text: TextModel, hello: tuple[int, ...]) -> None:
    gateway = Gateway(text, FakeOwner(hello), machine=Slo(6.0, 0.25, is_asked=False))
    gateway.chat()
    assert [request.slo for request in gateway.owner.opened] == [Slo(6.0, 0.25, is_asked=False)]
