"""/tokenize, /detokenize and /version."""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

from alignedserve.gateway.openai.requests import MOST_CONVERTED
from alignedserve.gateway.openai.writing import PART_BYTES
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, MOST, Connection, FakeOwner, Gateway, ids_of

SAID = [{"role": "user", "content": "naïve 😀"}]


@pytest.fixture
def gateway(text: TextModel) -> Gateway:
    return Gateway(text, FakeOwner())


def tokenize(gateway: Gateway, **fields: Any) -> Any:
    answer = gateway.ask("POST", "/tokenize", json=fields)
    return answer.raise_for_status().json()


def test_a_text_is_tokenised_as_a_prompt_is(gateway: Gateway, text: TextModel) -> None:
    ids = ids_of(text, "naïve 😀")
    assert tokenize(gateway, prompt="naïve 😀") == {
        "count": 1 + len(ids),
        "max_model_len": MOST,
        "tokens": [1, *ids],
        "token_strs": None,
    }
    plain = tokenize(gateway, model=MODEL, prompt="Hi there", add_special_tokens=False, return_token_strs=True)
    assert "".join(plain["token_strs"]) == "Hi there"


def test_a_conversation_is_tokenised_as_a_chat_is(gateway: Gateway, text: TextModel) -> None:
    assert tokenize(gateway, messages=SAID)["tokens"] == text.chat_ids(SAID)
    closed = tokenize(gateway, messages=SAID, add_generation_prompt=False)["tokens"]
    assert text.chat_ids(SAID)[: len(closed)] == closed


def test_there_and_back(gateway: Gateway) -> None:
    for written in ("naïve 😀", "<|user|>Hi<|end|>", ""):
        tokens = tokenize(gateway, prompt=written, add_special_tokens=False)["tokens"]
        assert gateway.ask("POST", "/detokenize", json={"tokens": tokens}).json() == {"prompt": written}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": SAID}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": SAID, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {"tokens": [2048]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_a_wrong_field_is_named(gateway: Gateway, path: str, fields: dict[str, Any], param: str) -> None:
    answer = gateway.ask("POST", path, json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_another_model_is_not_there(gateway: Gateway) -> None:
    assert gateway.ask("POST", "/tokenize", json={"model": "other", "prompt": "a"}).status_code == 404


def test_the_version_is_told(gateway: Gateway) -> None:
    assert gateway.get("/version").json() == {"version": version("alignedserve")}


def test_a_version_that_is_not_installed_is_no_error(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("alignedserve.gateway.app.version", absent)
    assert gateway.get("/version").json() == {"version": "uninstalled"}
    assert gateway.get("/").status_code == 200


def test_a_text_that_is_much_too_long_is_not_tokenised(gateway: Gateway) -> None:
    answer = gateway.ask("POST", "/tokenize", json={"prompt": "ab " * 100_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert tokenize(gateway, prompt="ab " * 500)["count"] > MOST, "but one that is a little"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs"])
def test_what_a_template_is_given_beside_messages_is_not_tokenised_either(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    """Of a tool's description of 2.8 MB, /tokenize once made a million tokens, which took 700 MB."""

    def never(*_: object) -> None:
        raise AssertionError("a template is given megabytes")

    monkeypatch.setattr("alignedserve.text.text_model.TextModel.chat_ids", never)
    long = "word " * 600_000
    given = {
        "tools": [{"type": "function", "function": {"name": "f", "description": long}}],
        "chat_template_kwargs": {"date_string": long},
    }
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], field: given[field]}
    answer = gateway.ask("POST", path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_long_context_is_not_tokenised_many_times_over(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner(), max_model_len=MOST_CONVERTED // 2)
    for path, body in (("/tokenize", {"prompt": "a " * 1_900_000}), ("/detokenize", {"tokens": [5] * 1_900_000})):
        answer = gateway.ask("POST", path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_large_answer_comes_in_parts(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner(), max_model_len=2048)
    body = json.dumps({"prompt": "ab " * 12_000, "return_token_strs": True}).encode()

    async def parts() -> list[bytes]:
        connection = Connection("/tokenize", body)
        await gateway.app(connection.scope, connection.receive, connection.send)
        return [message.get("body", b"") for message in connection.sent]

    sent = asyncio.run(parts())
    assert max(map(len, sent)) < 2 * PART_BYTES < sum(map(len, sent))
    answer = json.loads(b"".join(sent))
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > 12_000
