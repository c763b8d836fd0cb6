"""Tests of the Responses API with OpenAI's own client and types: responses, their events, kept conversations."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from alignedserve.config.sections import JobsConfig
from alignedserve.core import FinishReason, Opening
from alignedserve.gateway import responding
from alignedserve.gateway.access.keys import ANONYMOUS, KeyEntry, KeyRing, hash_key
from alignedserve.gateway.http.limits import LOOK_BYTES
from alignedserve.gateway.openai.writing import PART_BYTES
from alignedserve.gateway.responses.keeping import ResponseKeeper
from alignedserve.owner.client import Delivered
from alignedserve.store.sqlite_store import SqliteStore
from alignedserve.store.storage import LazyStorage
from alignedserve.store.store import Holder, StoredResponse
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, PATIENT_S, Connection, FakeOwner, Gateway, ids_of
from tests.gateway.test_openai_sdk import HELLO, run, sdk
from tests.gateway.test_tools import PARAMETERS, SAID_BY_HERMES, hermes, prompt_of  # noqa: F401  (a fixture)

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
PATH = "/v1/responses"


def keeping(folder: Path) -> ResponseKeeper:
    jobs = JobsConfig(directory=str(folder))
    return ResponseKeeper(LazyStorage(jobs, Holder("gateway", 1)), jobs)


async def add(folder: Path, response: StoredResponse) -> None:
    storage = await LazyStorage(JobsConfig(directory=str(folder)), Holder("gateway", 1))()
    await storage.store.add_response(response, 1 << 40)
    await storage.close()


def saying(text: TextModel, said: str, folder: Path | None = None, **settings: Any) -> Gateway:
    owner = FakeOwner(*((token,) for token in (*ids_of(text, said), text.eos_ids[0])))
    return Gateway(text, owner, keeper=None if folder is None else keeping(folder), **settings)


@pytest.fixture
def gateway(text: TextModel, tmp_path: Path) -> Gateway:
    return saying(text, HELLO, tmp_path)


def ask(gateway: Gateway, **fields: Any) -> httpx.Response:
    return gateway.ask("POST", PATH, json={"model": MODEL, "input": "Hi", **fields})


def events_of(answer: httpx.Response) -> list[Any]:
    """Return the events of a stream, each held against its published type."""
    blocks = answer.text.removesuffix("\n\n").split("\n\n")
    events = []
    for number, block in enumerate(blocks):
        named, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert named == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(EVENT.validate_python(event))
        assert events[-1].type == event["type"]
    return events


def test_usage_says_what_of_the_prompt_was_known(text: TextModel) -> None:
    pieces = Delivered((300,), None, opening=Opening(num_cached=3)), Delivered((301,), FinishReason.LENGTH)
    answer = ask(Gateway(text, FakeOwner(*pieces))).json()
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 3


def test_openais_client_gets_a_response_and_goes_on(gateway: Gateway) -> None:
    async def talks() -> None:
        async with sdk(gateway) as client:
            first: Any = await client.responses.create(model=MODEL, input="Hi", instructions="Be brief.")
            assert (first.output_text, first.status, first.store) == (HELLO, "completed", True)
            assert first.usage is not None
            assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
            assert (first.temperature, first.tool_choice, first.tools) == (0.0, "auto", [])
            assert await client.responses.retrieve(first.id) == first
            with pytest.raises(openai.BadRequestError, match="is not streamed"):
                await client.responses.retrieve(first.id, stream=True)
            second = await client.responses.create(model=MODEL, input="And now?", previous_response_id=first.id)
            assert second.previous_response_id == first.id
            items: list[Any] = [item async for item in client.responses.input_items.list(second.id)]
            assert [item.content[0].text for item in items] == ["And now?"]
            await client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(first.id)
            with pytest.raises(openai.BadRequestError) as raised:
                await client.responses.create(model=MODEL, input="Hm", previous_response_id=second.id)
            assert raised.value.code == "previous_response_not_found"

    run(talks)
    shown = prompt_of(gateway)
    assert shown.count("Hi") == 1
    assert shown.index("Hi") < shown.index("Hello") < shown.index("And now?")
    assert "Be brief." not in shown, "instructions are of one turn"


def test_openais_client_streams_it(gateway: Gateway) -> None:
    async def streams() -> None:
        async with sdk(gateway) as client, client.responses.stream(model=MODEL, input="Hi") as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
            assert final.output_text == HELLO
            assert kinds.count("response.output_text.delta") > 3
            assert await client.responses.retrieve(final.id) is not None

    run(streams)


def test_its_events_are_the_published_ones(gateway: Gateway) -> None:
    events = events_of(ask(gateway, stream=True, include=["message.output_text.logprobs"], top_logprobs=2))
    kinds = [event.type.removeprefix("response.") for event in events]
    opened = ["created", "in_progress", "output_item.added", "content_part.added"]
    closed = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds == [*opened, *["output_text.delta"] * (len(kinds) - 8), *closed]
    assert events[0].response.status == events[1].response.status == "in_progress"
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == HELLO
    final = events[-1].response
    assert final.output[0].id == events[2].item.id == events[5].item_id
    assert len(final.output[0].content[0].logprobs[0].top_logprobs) == 2
    assert final.output == [events[-2].item]


def test_the_client_calls_a_function_and_answers(hermes: TextModel, tmp_path: Path) -> None:  # noqa: F811
    gateway = saying(hermes, SAID_BY_HERMES, tmp_path)
    whole: Any = Response.model_validate(ask(gateway, tools=[WEATHER]).json())
    message, call = whole.output
    assert (message.type, call.type) == ("message", "function_call")
    assert (call.name, call.arguments) == ("weather", '{"city": "Rom"}')
    events = events_of(ask(gateway, tools=[WEATHER], stream=True))
    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(parts) > 2, "not all at once"
    assert "".join(parts) == events[-3].arguments == '{"city": "Rom"}'
    assert [event.item.type for event in events if event.type == "response.output_item.done"] == [
        "message",
        "function_call",
    ]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    for given in (
        {"previous_response_id": whole.id, "input": [output]},
        {"input": [{"role": "user", "content": "Hi"}, *(item.model_dump() for item in whole.output), output]},
        {
            "input": [
                {"role": "user", "content": "Hi"},
                *({"type": "item_reference", "id": item.id} for item in whole.output),
                output,
            ]
        },
    ):
        assert ask(gateway, tools=[WEATHER], **given).status_code == 200
        shown = prompt_of(gateway)
        assert '{"name": "weather", "arguments": {"city": "Rom"}}' in shown
        assert shown.index("Let me see.") < shown.index("It rains.")


def test_a_conversation_may_begin_with_a_call(hermes: TextModel) -> None:  # noqa: F811
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rom"}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "It rains."}
    gateway = saying(hermes, "x")
    assert ask(gateway, tools=[WEATHER], input=[call, output]).status_code == 200
    shown = prompt_of(gateway)
    assert shown.index('{"name": "weather", "arguments": {"city": "Rom"}}') < shown.index("It rains.")


def test_a_demanded_call_and_a_schema_are_followed(hermes: TextModel) -> None:  # noqa: F811
    gateway = saying(hermes, hermes.call_format.write([("weather", {"city": "Rom"})]))
    for choice in ("required", {"type": "function", "name": "weather"}):
        assert ask(gateway, tools=[WEATHER], tool_choice=choice).json()["output"][0]["type"] == "function_call"
        assert gateway.owner.opened[-1].sampling.syntax
    form = {"type": "json_schema", "name": "city", "schema": PARAMETERS, "strict": True}
    answer = ask(gateway, text={"format": form})
    assert answer.json()["text"]["format"]["name"] == "city"
    assert gateway.owner.opened[-1].sampling.syntax


def test_an_answer_that_is_cut_is_incomplete(gateway: Gateway) -> None:
    body = ask(gateway, max_output_tokens=2).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert events_of(ask(gateway, max_output_tokens=2, stream=True))[-1].type == "response.incomplete"
    long = ask(gateway, max_output_tokens=100_000)
    assert long.headers["x-max-tokens"] == str(gateway.owner.opened[-1].max_tokens)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": "Hi " * 1000}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
        ({"background": True, "store": False}, "store"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    answer = ask(gateway, **fields)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["param"] == param
    assert "messages" not in answer.json()["error"]["message"]


def test_what_clients_send_by_default_is_taken(gateway: Gateway) -> None:
    defaults = {
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "metadata": {"a": "b"},
        "user": "u",
        "tools": [],
        "background": False,
        "stream_options": {"include_obfuscation": False},
    }
    answer = ask(gateway, **defaults)
    assert answer.status_code == 200, answer.text
    ignored = answer.headers["x-ignored-fields"].split(", ")
    assert {"include.reasoning.encrypted_content", "prompt_cache_key", "reasoning.effort"} <= set(ignored)
    assert answer.json()["metadata"] == {"a": "b"}


def test_nothing_is_kept_where_the_client_or_the_deployment_keeps_nothing(text: TextModel, tmp_path: Path) -> None:
    for gateway, fields in ((saying(text, HELLO, tmp_path), {"store": False}), (saying(text, HELLO), {})):
        body = ask(gateway, **fields).json()
        assert body["store"] is False
        assert gateway.get(f"{PATH}/{body['id']}").status_code == 404


def test_a_key_sees_its_own_responses_only(text: TextModel, tmp_path: Path) -> None:
    ring = KeyRing([KeyEntry(name, hash_key(name)) for name in ("ann", "bob")])
    gateway = saying(text, HELLO, tmp_path, keys=ring)
    ann, bob = ({"headers": {"Authorization": f"Bearer {name}"}} for name in ("ann", "bob"))
    asked = {"model": MODEL, "input": "Hi"}
    id = gateway.ask("POST", PATH, json=asked, **ann).json()["id"]
    assert gateway.get(f"{PATH}/{id}", **ann).status_code == 200
    for method, path in (("GET", id), ("DELETE", id), ("GET", f"{id}/input_items"), ("POST", f"{id}/cancel")):
        assert gateway.ask(method, f"{PATH}/{path}", **bob).status_code == 404
    assert gateway.ask("POST", PATH, json={**asked, "previous_response_id": id}, **bob).status_code == 400


def test_an_error_in_a_stream_fails_the_response(text: TextModel) -> None:
    gateway = Gateway(text, FakeOwner(ids_of(text, HELLO), RuntimeError("unforeseen")))
    last = events_of(ask(gateway, stream=True))[-1]
    assert (last.type, last.response.status, last.response.error.code) == (
        "response.failed",
        "failed",
        "server_error",
    )
    assert "unforeseen" not in last.response.error.message


def test_input_items_come_page_by_page(gateway: Gateway) -> None:
    id = ask(gateway, input=[{"role": "user", "content": str(number)} for number in range(5)]).json()["id"]
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = gateway.get(f"{PATH}/{id}/input_items", params={"limit": "2", "order": "asc", **after}).json()
        seen += [item["content"][0]["text"] for item in page["data"]]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert seen == ["0", "1", "2", "3", "4"]


# --- What is kept may be large, and a small body may name it many times


LOGPROBS: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
TOKENS = 400


@pytest.fixture
def large(text: TextModel, tmp_path: Path) -> Gateway:
    owner = FakeOwner(*((300 + number % 100,) for number in range(TOKENS)))
    return Gateway(text, owner, keeper=keeping(tmp_path), max_model_len=1 << 17, body_limit_bytes=100_000)


def most_memory(work: Callable[[], httpx.Response]) -> tuple[httpx.Response, int]:
    """Return the answer of some work, and the most memory that it had."""
    tracemalloc.start()
    answer = work()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return answer, most


def references(answer: httpx.Response, number: int) -> Any:
    return [{"type": "item_reference", "id": answer.json()["output"][0]["id"]}] * number


def test_a_response_is_read_once_however_often_a_body_names_it(large: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reference once decoded all of it: 20 of them held up the gateway for six seconds, 150 took 1.9 GB."""
    first = ask(large, max_output_tokens=TOKENS, **LOGPROBS)
    reads: list[str] = []
    read = SqliteStore.response

    async def counted(self: SqliteStore, owner: str, id: str) -> StoredResponse | None:
        reads.append(id)
        return await read(self, owner, id)

    monkeypatch.setattr(SqliteStore, "response", counted)
    named, most = most_memory(lambda: ask(large, input=references(first, 20), max_output_tokens=1))
    assert (named.status_code, reads) == (200, [first.json()["id"]])
    assert most < 12 * len(first.content)
    said = first.json()["output"][0]["content"][0]["text"]
    assert prompt_of(large).count(said.strip()) == 20
    kept = large.get(f"{PATH}/{named.json()['id']}/input_items")
    assert [item["content"][0]["text"] for item in kept.json()["data"]] == [said] * 20
    assert len(kept.content) < len(first.content), "the log-probabilities are not kept again"


def test_what_a_body_names_is_not_decoded_again(large: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read the items of an answer with log-probabilities took the event loop 7 to 44 ms for each reference."""
    first = ask(large, max_output_tokens=TOKENS, **LOGPROBS)
    monkeypatch.setattr("alignedserve.store.store._field", None)
    said = first.json()["output"][0]["content"][0]["text"]
    for body in (
        {"input": references(first, 2)},
        {"previous_response_id": first.json()["id"], "input": "Go on"},
    ):
        assert ask(large, **body, max_output_tokens=1).status_code == 200
        assert said.strip() in prompt_of(large)


def test_what_a_body_brings_in_is_limited_as_a_body_is(large: Gateway) -> None:
    long = ask(large, input=[{"role": "user", "content": "a" * 30_000}], max_output_tokens=1).json()["id"]
    item = large.get(f"{PATH}/{long}/input_items").json()["data"][0]["id"]
    refused = ask(large, input=[{"id": item}] * 4)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_large")
    assert "more than 100000 bytes" in refused.json()["error"]["message"]
    assert ask(large, input=[{"id": item}] * 3, max_output_tokens=1).status_code == 200
    for _ in range(3):
        continued = ask(large, previous_response_id=long, input="a" * 30_000, max_output_tokens=1)
        long = continued.json()["id"]
    refused = ask(large, previous_response_id=long)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")


def test_a_kept_response_is_shown_and_continued_without_being_decoded(large: Gateway) -> None:
    """As trees, an answer with log-probabilities takes six times its length, and more than one holds up heartbeats."""
    first = ask(large, max_output_tokens=TOKENS, **LOGPROBS)
    id = first.json()["id"]
    shown, most = most_memory(lambda: large.get(f"{PATH}/{id}"))
    assert shown.json() == first.json()
    assert most < 5 * len(first.content)
    continued, most = most_memory(lambda: ask(large, previous_response_id=id, max_output_tokens=1))
    assert continued.status_code == 200
    assert most < 5 * len(first.content)
    assert first.json()["output"][0]["content"][0]["text"].strip() in prompt_of(large)


async def begun(gateway: Gateway, path: str, go_on: asyncio.Event) -> tuple[Connection, asyncio.Task[None]]:
    """Begin to read an answer, and read no more of it than its first part until `go_on` is set."""
    path, _, query = path.partition("?")
    slow, has_part = Connection(path, b""), asyncio.Event()
    slow.scope |= {"method": "GET", "query_string": query.encode()}

    async def send(message: Any) -> None:
        if message.get("body"):
            has_part.set()
            await go_on.wait()
        await slow.send(message)

    reading = asyncio.create_task(gateway.app(slow.scope, slow.receive, send))
    await asyncio.wait_for(has_part.wait(), PATIENT_S)
    return slow, reading


async def refused_beside(gateway: Gateway, path: str) -> None:
    """Read an answer slowly, and check that another is refused meanwhile and comes afterwards, in small parts."""
    go_on = asyncio.Event()
    async with gateway.client() as client:
        slow, reading = await begun(gateway, path, go_on)
        refused = await client.get(path)
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        go_on.set()
        await asyncio.wait_for(reading, PATIENT_S)
        parts = [message.get("body", b"") for message in slow.sent]
        assert max(map(len, parts)) < 3 * PART_BYTES
        assert (await client.get(path)).content == b"".join(parts)


def test_a_key_that_reads_slowly_holds_few_kept_responses(large: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{PATH}/{ask(large, max_output_tokens=TOKENS, **LOGPROBS).json()['id']}"
    monkeypatch.setattr(responding, "MOST_SENT_BYTES", 600_000)  # it has 400 kB
    asyncio.run(refused_beside(large, path))


def test_a_key_that_reads_slowly_holds_few_inputs(large: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of an input was one body, and no number of them was too many."""
    items = [{"role": "user", "content": "a" * 1_000} for _ in range(90)]
    id = ask(large, input=items, max_output_tokens=1).json()["id"]
    monkeypatch.setattr(responding, "MOST_SENT_BYTES", 150_000)
    asyncio.run(refused_beside(large, f"{PATH}/{id}/input_items?limit=100"))


def test_a_key_looks_at_so_many_bytes_of_responses_in_a_minute(
    text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look reads all of the record, also one at a single item."""
    monkeypatch.setattr(responding, "MOST_ROWS", 20)
    gateway = saying(text, HELLO, tmp_path, max_model_len=1 << 17)
    id = ask(gateway, input="a" * 10 * LOOK_BYTES).json()["id"]
    looks = [gateway.get(f"{PATH}/{id}{more}").status_code for more in ("/input_items?limit=1", "", "")]
    assert looks == [200, 200, 429]
    assert gateway.ask("DELETE", f"{PATH}/{id}").status_code == 200, "what frees something is not refused"


def test_input_items_are_sent_as_they_are_kept(text: TextModel, tmp_path: Path) -> None:
    """All of them were decoded on the event loop, whatever was asked for."""
    id = "resp_" + 32 * "0"
    items = [msgspec.Raw(b'{"id" :"msg_%d", "content":  []}' % number) for number in range(3)]
    answer = msgspec.Raw(b'{"id":"%s","status":"completed","output":[]}' % id.encode())
    asyncio.run(add(tmp_path, StoredResponse(id, ANONYMOUS.id, 0, 1 << 40, items, answer)))
    gateway = Gateway(text, FakeOwner(), keeper=keeping(tmp_path))
    page = gateway.get(f"{PATH}/{id}/input_items?limit=2&order=asc")
    assert b",".join(map(bytes, map(memoryview, items[:2]))) in page.content
    assert page.content.endswith(b'"first_id":"msg_0","last_id":"msg_1","has_more":true}')


def test_an_answer_that_is_read_slowly_does_not_hold_the_input_that_is_kept_with_it(
    text: TextModel, tmp_path: Path
) -> None:
    """An input of 4 MB with an answer of 64 KB held sixty times what was counted."""
    keeper, readers, id = keeping(tmp_path), 8, "resp_" + 32 * "0"
    answer = msgspec.Raw(msgspec.json.encode({"id": id, "status": "completed", "output": [], "x": "a" * 65_536}))
    item = msgspec.Raw(b'"%s"' % (b"b" * (2 << 20)))
    kept = StoredResponse(id, ANONYMOUS.id, 0, 1 << 40, [item], answer)
    gateway = Gateway(text, FakeOwner(), keeper=keeper)

    async def check() -> None:
        await add(tmp_path, kept)
        go_on = asyncio.Event()
        tracemalloc.start()
        reading = [await begun(gateway, f"{PATH}/{id}", go_on) for _ in range(readers)]
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        go_on.set()
        await asyncio.gather(*(task for _, task in reading))
        assert held < readers * len(memoryview(item)) / 4

    asyncio.run(check())


def test_log_probabilities_that_a_client_sends_back_are_not_kept(gateway: Gateway) -> None:
    part = {"type": "output_text", "text": "Hm", "logprobs": [{"token": "Hm"}] * 1000}
    for item in (
        {"role": "assistant", "content": [part]},
        {"type": "function_call_output", "call_id": "call_1", "output": [part]},
        {"type": "reasoning", "summary": [part]},
    ):
        id = ask(gateway, input=[item, {"role": "user", "content": "Go on"}]).json()["id"]
        assert "Hm" in (kept := gateway.get(f"{PATH}/{id}/input_items").text)
        assert "token" not in kept
