"""Tests of what a web page may do with a server that asks for no key, by the headers that browsers send."""

from __future__ import annotations

from typing import Any

import pytest

from alignedserve.gateway.access.keys import KeyEntry, KeyRing, hash_key
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, FakeOwner, Gateway

PAGE = "https://page.example"
CHAT = "/v1/chat/completions"
COMPLETION = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}
KEYS = KeyRing([KeyEntry("ann", hash_key("key"))])


def gateway(text: TextModel, **settings: Any) -> Gateway:
    return Gateway(text, FakeOwner((5,)), **settings)


def ask_as(asked: Gateway, host: str, **headers: str) -> int:
    return asked.get("/v1/models", headers={"Host": host, **headers}).status_code


def post_from(asked: Gateway, **headers: str) -> int:
    return asked.ask("POST", "/v1/completions", json=COMPLETION, headers=headers).status_code


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.:80", "app.localhost:1", "127.0.0.1:8000", "[::1]:8000", "10.0.0.2"],
)
def test_addresses_and_localhost_are_answered(text: TextModel, host: str) -> None:
    assert ask_as(gateway(text), host) == 200


@pytest.mark.parametrize(
    "host",
    [
        *("page.example", "page.example:8000", "localhost.page.example", "127.0.0.1.example", ""),
        *("localhost:80:page.example", "[::1", "[::1]page.example"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/files", "/metrics", "/status", "/nowhere"])
def test_a_name_that_is_not_the_servers_reads_nothing(text: TextModel, host: str, path: str) -> None:
    """A page that has its own name lead here (DNS rebinding) sends that name as the host."""
    answer = gateway(text).get(path, headers={"Host": host})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (421, "unknown_host", "invalid_request_error")
    assert "--cors-origins" in error["message"]


def test_each_host_is_checked_where_there_are_several(text: TextModel) -> None:
    both = [("Host", "localhost"), ("Host", "page.example")]
    assert gateway(text).get("/v1/models", headers=both).status_code == 421


def test_names_of_the_server_and_of_its_origins_are_answered(text: TextModel) -> None:
    named = gateway(text, names=("Big-Machine",), cors_origins=("https://Chat.example:444",))
    assert [ask_as(named, host) for host in ("big-machine:80", "chat.example", "page.example")] == [200, 200, 421]
    assert ask_as(gateway(text, cors_origins=("*",)), "page.example") == 200


def test_a_server_with_keys_has_any_name(text: TextModel) -> None:
    with_keys = gateway(text, keys=KEYS)
    assert ask_as(with_keys, "page.example", Authorization="Bearer key") == 200
    assert ask_as(with_keys, "page.example") == 401
    assert post_from(with_keys, Authorization="Bearer key", Origin=PAGE, **{"Sec-Fetch-Site": "cross-site"}) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": PAGE, "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://localhost.page.example:3000", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://127.0.0.1.page.example", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://app.localhost:3000", "Sec-Fetch-Site": "same-site"},
        {"Origin": "http://10.0.0.2:3000", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "ftp://localhost:3000"},
        {"Origin": PAGE},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_a_page_of_another_origin_has_nothing_done(text: TextModel, headers: dict[str, str]) -> None:
    asked = gateway(text)
    answer = asked.ask("POST", "/v1/completions", json=COMPLETION, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin")
    assert asked.owner.opened == []
    assert "access-control-allow-origin" not in answer.headers


LOCAL = ("http://localhost:3000", "https://localhost", "http://127.0.0.1:5173", "http://[::1]:80")
ASKING = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}


@pytest.mark.parametrize("origin", LOCAL)
def test_pages_of_this_machine_may_come(text: TextModel, origin: str) -> None:
    """Who serves such a page runs a program here, which reaches the server anyway."""
    asked = gateway(text)
    allowed = asked.ask("OPTIONS", CHAT, headers={"Origin": origin, **ASKING})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, origin)
    headers = {"Origin": origin, "Sec-Fetch-Site": "same-site"}
    answer = asked.ask("POST", "/v1/completions", json=COMPLETION, headers=headers)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
    assert "access-control-allow-credentials" not in answer.headers, "what a browser keeps of a user stays unsaid"
    rebound = asked.ask("POST", "/v1/completions", json=COMPLETION, headers={**headers, "Host": "page.example"})
    assert rebound.status_code == 421


@pytest.mark.parametrize("settings", [{"is_exposed": True}, {"cors_origins": (PAGE,)}, {"cors_origins": ("none",)}])
def test_they_may_not_where_others_reach_it_or_pages_are_named(text: TextModel, settings: dict[str, Any]) -> None:
    asked = gateway(text, **settings)
    for origin in LOCAL:
        assert post_from(asked, Origin=origin, **{"Sec-Fetch-Site": "same-site"}) == 403
        assert asked.ask("OPTIONS", CHAT, headers={"Origin": origin, **ASKING}).status_code == 405
    assert ask_as(asked, "") == 421


def test_a_page_with_a_key_may_come_from_this_machine_too(text: TextModel) -> None:
    with_keys = gateway(text, keys=KEYS)
    asks = {"Origin": LOCAL[0], **ASKING}
    assert with_keys.ask("OPTIONS", CHAT, headers=asks).status_code == 200, "browsers ask without the key"
    assert post_from(with_keys, Origin=LOCAL[0], Authorization="Bearer key") == 200
    assert post_from(with_keys, Origin=LOCAL[0]) == 401


@pytest.mark.parametrize("settings", [{}, {"keys": KEYS}, {"is_exposed": True}])
def test_a_page_that_asks_in_vain_is_told_the_flag(text: TextModel, settings: dict[str, Any]) -> None:
    answer = gateway(text, **settings).ask("OPTIONS", CHAT, headers={"Origin": PAGE, **ASKING})
    message = answer.json()["error"]["message"]
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert message == f"{CHAT} does not take OPTIONS: start the server with --cors-origins {PAGE} for this page"
    assert not any(name.startswith("access-control") for name in answer.headers)
    plain = gateway(text, **settings).ask("OPTIONS", CHAT)
    assert (plain.status_code, plain.json()["error"]["message"]) == (405, f"{CHAT} does not take OPTIONS")


def test_a_form_of_another_origin_stores_no_file(text: TextModel) -> None:
    """Browsers send forms without asking first."""
    files, headers = {"file": ("a.jsonl", b"{}")}, {"Origin": PAGE, "Sec-Fetch-Site": "cross-site"}
    assert gateway(text).ask("POST", "/v1/files", files=files, headers=headers).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "http://localhost"},
    ],
)
def test_own_pages_and_programs_are_served(text: TextModel, headers: dict[str, str]) -> None:
    assert post_from(gateway(text), **headers) == 200


def test_pages_that_are_let_in_are_served(text: TextModel) -> None:
    for origins in ((PAGE,), ("*",)):
        asked = gateway(text, cors_origins=origins)
        assert post_from(asked, Origin=PAGE, **{"Sec-Fetch-Site": "cross-site"}) == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_only_json_is_read_as_json(text: TextModel, path: str, content_type: str) -> None:
    """A page may send text to every server without asking first, but JSON only where the server lets it."""
    asked = gateway(text, keys=KEYS)
    headers = {"Content-Type": content_type, "Authorization": "Bearer key"}
    answer = asked.ask("POST", path, content=b"{}", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_content_type")
    assert asked.owner.opened == []


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON; charset=utf-8", "application/json ;a=b"]
)
def test_json_is_known_by_its_type(text: TextModel, content_type: str) -> None:
    body = b'{"model": "%s", "prompt": "Hi", "max_tokens": 1}' % MODEL.encode()
    headers = {"Content-Type": content_type}
    assert gateway(text).ask("POST", "/v1/completions", content=body, headers=headers).status_code == 200
