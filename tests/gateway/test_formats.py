"""Tests of output formats: JSON, a schema, a pattern, a grammar. A format that cannot be followed is refused, with a
reason."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from alignedserve.text.syntax import json_syntax, lark_syntax, regex_syntax
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, FakeOwner, Gateway
from tests.rare import rarely

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
ANY = json_syntax({"type": "object"})
CLOSED = {**SCHEMA, "additionalProperties": False}
OF_SCHEMA = json_syntax(CLOSED)


@pytest.fixture
def gateway(text: TextModel, hello: tuple[int, ...]) -> Gateway:
    return Gateway(text, FakeOwner(hello))


def response_format(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "person", **fields}}}


@pytest.mark.parametrize("route", ["chat", "complete"])
@pytest.mark.parametrize(
    ("fields", "syntax"),
    [
        ({"response_format": {"type": "text"}}, ""),
        ({"response_format": {"type": "json_object"}}, ANY),
        (response_format(schema=SCHEMA, strict=True, description="a person"), OF_SCHEMA),
        (response_format(schema=SCHEMA, strict=False), OF_SCHEMA),
        (response_format(), ANY),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_regex": "a+"}, regex_syntax("a+")),
        ({"guided_grammar": 'start: "a"'}, lark_syntax('start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, ANY),
        ({"structured_outputs": {"json_object": True}}, ANY),
        ({"structured_outputs": {"regex": "a+", "json": None}}, regex_syntax("a+")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, lark_syntax('start: "a"')),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, json_syntax(CLOSED, "")),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, json_syntax(CLOSED, " ?")),
    ],
)
def test_the_engine_is_told(gateway: Gateway, route: str, fields: dict[str, Any], syntax: str) -> None:
    assert getattr(gateway, route)(**fields).status_code == 200
    assert gateway.owner.opened[0].sampling.syntax == syntax


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "odd"}, "Invalid type"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"$ref": "#/$defs/missing"}, "does not exist"),
        ({"$ref": "file:///etc/passwd"}, "retriev"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "format": "odd"}, "Unknown format"),
        ({"enum": []}, "Unsatisfiable"),
        ({"$ref": "#"}, "no text follows it; does a $ref or a rule lead to nothing but itself?"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            "no text follows it",
        ),
        ({"x-guidance": {"lenient": True}, "not": {}}, "Unimplemented"),
        ({"description": "x" * 100_001}, "more than 100000 characters"),
        ({"allOf": 5}, "allOf"),
        ({"allOf": None}, "allOf"),
        ({"$ref": [], "properties": {"a": {}}}, "$ref"),
        ({"allOf": [{"$ref": {}}, {"$ref": {}}]}, "$ref"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(gateway: Gateway, schema: dict[str, Any], why: str) -> None:
    answer = gateway.chat(**response_format(schema=schema))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "response_format", "invalid_value")
    assert error["message"].startswith("response_format cannot be followed: ")
    assert why in error["message"]
    assert "\n" not in error["message"]
    assert gateway.owner.opened == []


SLOW = {"type": "integer", "multipleOf": 10_000_019}


def chain(links: int) -> dict[str, Any]:
    """Return a schema whose reference leads to a type over so many others."""
    links_of = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(links)}
    return {"$ref": "#/$defs/d0", "$defs": {**links_of, f"d{links}": {"type": "null"}}}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (response_format(schema=chain(2600)), "a chain that is too long"),
        rarely(
            (
                {"guided_grammar": "\n".join(["start: a0", *(f"a{n}: a{n + 1}" for n in range(2800)), 'a2800: "a"'])},
                "chain",
            )
        ),
        ({"guided_regex": "a?" * 20_000 + "a" * 20_000}, "more than 512 MB of memory"),
    ],
    ids=["schema", "grammar", "memory"],
)
def test_a_form_that_would_hurt_the_process_is_refused(
    gateway: Gateway, fields: dict[str, Any], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each ended the gateway, or held it for minutes: a process of its own tries them, and dies without a word."""
    answer = gateway.chat(**fields)
    assert answer.status_code == 400, answer.text
    assert why in answer.json()["error"]["message"]
    assert gateway.chat(**response_format(schema=chain(20))).status_code == 200
    assert capfd.readouterr().err == ""


def test_chats_do_not_wait_for_the_forms_of_others(gateway: Gateway) -> None:
    async def chat_beside_a_form() -> tuple[list[int], httpx.Response]:
        async with gateway.client() as client:

            def ask(**fields: Any) -> Coroutine[Any, Any, httpx.Response]:
                body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
                return client.post("/v1/chat/completions", json=body)

            form = asyncio.create_task(ask(**response_format(schema={"properties": {"p": SLOW}})))
            await asyncio.sleep(0)
            chats = [(await ask()).status_code for _ in range(3)]
            assert not form.done()
            return chats, await form

    chats, form = asyncio.run(chat_beside_a_form())
    assert chats == [200] * 3
    assert form.status_code == 400
    assert "more than 2 s of a processor" in form.json()["error"]["message"]


def test_a_form_is_tried_though_the_process_that_tried_the_last_was_killed(gateway: Gateway) -> None:
    assert gateway.chat(guided_regex="before+").status_code == 200
    child = gateway.text.trial._child
    assert child is not None
    child.kill()
    assert gateway.chat(guided_regex="after+").status_code == 200


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"child": {"$ref": "#"}}},
        {
            "$defs": {"list": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/list"}}, {"type": "null"}]}},
            "$ref": "#/$defs/list",
        },
    ],
)
def test_a_schema_may_lead_back_to_itself_where_texts_end(gateway: Gateway, schema: dict[str, Any]) -> None:
    assert gateway.chat(**response_format(schema=schema)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a"}}}, "response_format.json_schema"),
        (response_format(name="with space"), "response_format.json_schema.name"),
        (response_format(schema=5), "response_format.json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json_object"}, "response_format"),
        ({"guided_json": "no JSON"}, "guided_json"),
        ({"guided_json": f'{{"description": "{"x" * 100_001}"}}'}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "a" * 100_001}, "guided_regex"),
        ({"guided_grammar": 'start: "a"' + " " * 100_001}, "guided_grammar"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"guided_regex": "a", "ignore_eos": True}, "guided_regex"),
    ],
)
def test_a_wrong_field_is_named(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    answer = gateway.chat(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
