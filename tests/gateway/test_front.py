"""The pages that need no key: what runs here, and the OpenAPI document in HTML."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from html import unescape

import pytest
from jinja2 import Environment

from alignedserve.gateway.access.keys import KeyEntry, KeyRing, hash_key
from alignedserve.gateway.openapi import document
from alignedserve.gateway.pages import docs_page
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, Connection, FakeOwner, Gateway

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    return Gateway(text, FakeOwner())


def test_a_program_is_told_in_json_what_runs_here(gateway: Gateway) -> None:
    told = gateway.get("/").json()
    assert (told["name"], told["models"]) == ("AlignedServe", [MODEL])
    for path in told["links"].values():
        assert gateway.get(path).status_code == 200, path


def test_a_browser_gets_a_page(gateway: Gateway) -> None:
    answer = gateway.get("/", headers=BROWSER)
    assert answer.headers["content-type"].startswith("text/html")
    assert MODEL in answer.text
    assert 'href="docs"' in answer.text
    assert 'href="dashboard"' in answer.text


def test_without_a_chat_template_its_page_completes_texts(text: TextModel) -> None:
    for template, completes in ((text.template, False), (None, True)):
        page = Gateway(replace(text, template=template), FakeOwner()).get("/", headers=BROWSER).text
        assert ("goes on with your text" in page, '<section id="talk" aria-label="Chat" data-completes>' in page) == (
            completes,
            completes,
        )


def test_a_browser_s_page_is_compiled_once(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes milliseconds of the event loop, and the page needs no key."""
    page = gateway.get("/", headers=BROWSER).text
    monkeypatch.setattr(Environment, "compile", None)
    assert gateway.get("/", headers=BROWSER).text == page


@pytest.mark.parametrize(("path", "most"), [("/docs", 16 << 10), ("/openapi.json", 32 << 10)])
def test_a_page_is_packed_once_and_sent_plain_only_where_that_is_asked(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, path: str, most: int
) -> None:
    """Of 3,500 connections that read nothing each held 87 kB of it, without a key."""
    plain = gateway.get(path, headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    monkeypatch.setattr("alignedserve.gateway.pages.gzip.compress", None)
    packed = gateway.get(path, headers={"Accept-Encoding": "br, gzip"})
    assert (packed.headers["content-encoding"], packed.text) == ("gzip", plain.text)
    assert int(packed.headers["content-length"]) < most
    assert int(plain.headers["content-length"]) == len(plain.content)


def test_plain_pages_that_nobody_reads_are_few_and_held_in_pieces(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.gateway.pages.MOST_PLAIN", 2)

    def look(**headers: str) -> Connection:
        client = Connection("/docs", b"")
        client.scope |= {"method": "GET", "headers": [(b"accept-encoding", headers["takes"].encode())]}
        return client

    async def check() -> None:
        stuck = [look(takes="identity") for _ in range(2)]
        for client in stuck:
            client.reads.clear()
        looking = [asyncio.create_task(gateway.app(it.scope, it.receive, it.send)) for it in stuck]
        for _ in range(20):
            await asyncio.sleep(0)
        others = [look(takes=encoding) for encoding in ("identity", "gzip")]
        for client in others:
            await gateway.app(client.scope, client.receive, client.send)
        assert [client.sent[0]["status"] for client in others] == [503, 200]
        for client in stuck:
            client.reads.set()
        await asyncio.gather(*looking)
        for client in stuck:
            pieces = [message["body"] for message in client.sent[1:]]
            assert (max(map(len, pieces)), sum(map(len, pieces)) > 80_000) == (16 << 10, True)
        await gateway.app((again := look(takes="identity")).scope, again.receive, again.send)
        assert again.sent[0]["status"] == 200

    asyncio.run(check())


def test_with_keys_it_needs_none_and_names_no_model(text: TextModel) -> None:
    closed = Gateway(text, FakeOwner(), keys=KeyRing([KeyEntry("ann", hash_key("key"))]))
    assert set(closed.get("/").json()) == {"name", "links"}
    page = closed.get("/", headers=BROWSER)
    assert page.status_code == closed.get("/docs").status_code == 200
    assert MODEL not in page.text
    assert "asks for an API key" in page.text


def test_the_docs_name_every_route_and_every_field(gateway: Gateway) -> None:
    page, described = gateway.get("/docs").text, document(with_jobs=False)
    for path, methods in described["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in page
    for field in described["components"]["schemas"]["ChatRequest"]["properties"]:
        assert f"<code>{field}</code>" in page
    needed = "<code>{}</code></td><td>(?:(?!</tr>).)*required</td></tr>"
    assert [bool(re.search(needed.format(field), page)) for field in ("messages", "temperature")] == [True, False]
    anchors = set(re.findall(r'id="(\w+)"', page))
    assert set(re.findall(r'href="#(\w+)"', page)) <= anchors


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_they_load_nothing(gateway: Gateway, path: str) -> None:
    answer = gateway.get(path, headers=BROWSER)
    assert re.findall(r"(?:src|href)=\W*(?:\w+:|//)(?!,)", answer.text.replace('"data:,"', "")) == []
    assert "://" not in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


def test_the_docs_try_each_route_that_takes_no_file() -> None:
    described = document(with_jobs=True)
    page = docs_page(described)
    calls = set(re.findall(r'data-call="(\w+ [^"]+)"', page))
    every = {f"{method.upper()} {path}" for path, methods in described["paths"].items() for method in methods}
    assert every - calls == {"POST /v1/files"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_the_bodies_of_the_docs_are_taken(gateway: Gateway, path: str) -> None:
    page = gateway.get("/docs").text
    (shown,) = re.findall(rf'data-call="POST {path}"><textarea[^>]*>([^<]*)<', page)
    gateway.owner.steps = ((5,), (2,))
    assert gateway.ask("POST", path, json=json.loads(unescape(shown).replace("MODEL", MODEL))).status_code == 200
