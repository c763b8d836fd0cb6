"""Tests that a key which is taken back counts at once: what it has open ends with an honest error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from alignedserve.gateway.access.keys import KeyEntry, KeyRing, KeysFile, Limits, Scope, hash_key, make_key
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, PATIENT_S, Connection, FakeOwner, Gateway, data_lines
from tests.gateway.test_vectors import EMBEDS

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": "Hi"},
    "/v1/responses": {"model": MODEL, "input": "Hi", "store": False},
    "/v1/messages": {**CHAT, "max_tokens": 100},
}


def without(scope: Scope) -> KeyRing:
    """Return a ring in which ann's key lacks this scope, and bob's has all."""
    scopes = {"ann": frozenset(Scope) - {scope}, "bob": frozenset(Scope)}
    return KeyRing([KeyEntry(name, hash_key(name), of_key) for name, of_key in scopes.items()])


def ring(*keys: str) -> KeyRing:
    return KeyRing([KeyEntry(key.partition(" ")[0], hash_key(key), frozenset(Scope)) for key in keys])


class Revoking(Gateway):
    """A gateway whose requests get one token, and wait for ever, until keys change."""

    def __init__(self, text: TextModel, before: KeyRing, *steps: Any) -> None:
        self.never = asyncio.Event()
        super().__init__(text, FakeOwner(*steps, self.never), keys=before)
        self.ring = before

    def asked(self, asks: list[tuple[str, dict[str, Any], str]], after: KeyRing) -> list[httpx.Response]:
        """Ask with these keys, change the keys when all are open, and return the answers."""

        async def all_of() -> list[httpx.Response]:
            async with self.client() as client:
                asking = [
                    asyncio.create_task(client.post(path, json=body, headers={"Authorization": f"Bearer {key}"}))
                    for path, body, key in asks
                ]
                while len(self.owner.open_now) < len(asks):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
                self.ring.take(after)
                for _ in range(2):  # a gateway looks each second
                    self.app.state.end_revoked()
                ended, going_on = await asyncio.wait(asking, timeout=1)
                for task in going_on:
                    task.cancel()
                return [task.result() for task in asking if task in ended]

        return asyncio.run(asyncio.wait_for(all_of(), PATIENT_S))


@pytest.mark.parametrize("steps", [((5,),), ()], ids=["amid its tokens", "while it waits"])
@pytest.mark.parametrize("path", PATHS)
def test_its_answers_end_and_others_go_on(text: TextModel, path: str, steps: tuple[Any, ...]) -> None:
    gateway = Revoking(text, ring("ann", "bob"), *steps)
    asks: list[tuple[str, dict[str, Any], str]] = [
        (path, {**PATHS[path], "stream": is_streamed}, key) for is_streamed in (True, False) for key in ("ann", "bob")
    ]
    streamed, whole = gateway.asked(asks, ring("bob"))
    assert len(gateway.owner.cancelled) == 4, "those of ann by the gateway, those of bob by the test"
    assert whole.status_code == 401
    assert "has been revoked" in whole.text
    assert (streamed.status_code, "has been revoked" in streamed.text) == (200 if steps else 401, True)
    if steps and "completions" in path:
        assert data_lines(streamed)[-2]["error"]["code"] == "key_revoked"
        assert data_lines(streamed)[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": ["Hi"] * 40}),
        ("/v1/score", {"text_1": "Hi", "text_2": ["a", "b"]}),
        ("/v1/rerank", {"query": "Hi", "documents": ["a", "b"]}),
    ],
)
def test_its_vectors_end_and_others_go_on(text: TextModel, path: str, fields: dict[str, Any]) -> None:
    gateway = Revoking(replace(text, pooled=EMBEDS), ring("ann", "bob"))
    asks = [(path, {"model": MODEL, **fields}, key) for key in ("ann", "bob")]
    (ended,) = gateway.asked(asks, ring("bob"))
    assert (ended.status_code, ended.json()["error"]["code"]) == (401, "key_revoked")
    assert gateway.owner.open_now == set()


@pytest.mark.parametrize("after", [lambda: ring("bob"), lambda: without(Scope.GENERATE)], ids=["the key", "its scope"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/embeddings", "/v1/messages/count_tokens"])
def test_a_body_that_is_still_to_come_ends(text: TextModel, path: str, after: Callable[[], KeyRing]) -> None:
    """A client may send a body slowly, and an upload for minutes."""
    gateway = Gateway(text, FakeOwner(), keys=(keys := ring("ann")))

    async def left() -> None:
        body = Connection(path, b"{")
        body.scope["headers"] += [(b"authorization", b"Bearer ann")]
        body._body[0]["more_body"] = True
        answering = asyncio.create_task(gateway.app(body.scope, body.receive, body.send))
        await asyncio.sleep(0.05)
        keys.take(without(Scope.BATCH))
        gateway.app.state.end_revoked()
        await asyncio.sleep(0)
        assert not answering.done()
        keys.take(after())
        gateway.app.state.end_revoked()
        await answering
        assert body.sent[0]["status"] == 401
        assert b"has been revoked" in body.sent[1]["body"]

    asyncio.run(asyncio.wait_for(left(), PATIENT_S))


class LateBody(Connection):
    """A client whose body comes when `sends` is set."""

    def __init__(self, path: str, body: bytes) -> None:
        super().__init__(path, body)
        self.scope["headers"] += [(b"authorization", b"Bearer ann")]
        self.sends = asyncio.Event()

    async def receive(self) -> Any:
        await self.sends.wait()
        return await super().receive()


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/chat/completions", CHAT), ("/v1/embeddings", {"model": MODEL, "input": "Hi"})]
)
def test_a_body_whose_last_bytes_come_as_its_key_is_revoked_ends(
    text: TextModel, path: str, fields: dict[str, Any], turns: int
) -> None:
    """On Python 3.11 asyncio.wait_for drops a cancellation that comes in the turn in which the body is whole. So the
    next look has to end the request, as it then is."""
    gateway = Revoking(replace(text, pooled=EMBEDS) if "embeddings" in path else text, ring("ann"))

    async def left() -> None:
        body = LateBody(path, json.dumps(fields).encode())
        answering = asyncio.create_task(gateway.app(body.scope, body.receive, body.send))
        await asyncio.sleep(0.05)
        body.sends.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        gateway.ring.take(ring("bob"))
        gateway.app.state.end_revoked()
        while not (answering.done() or gateway.owner.open_now):
            await asyncio.sleep(0.01)
        gateway.app.state.end_revoked()
        await asyncio.wait({answering}, timeout=5)
        assert answering.done()
        assert body.sent[0]["status"] == 401
        assert b"has been revoked" in body.sent[1]["body"]

    asyncio.run(asyncio.wait_for(left(), PATIENT_S))


def test_an_answer_is_ended_once(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, ended = Revoking(text, ring("ann"), (5,)), list[str]()
    ends = gateway.owner.end
    monkeypatch.setattr(gateway.owner, "end", lambda id, error: (ended.append(id), ends(id, error)))
    gateway.asked([("/v1/completions", PATHS["/v1/completions"], "ann")], ring("bob"))
    assert len(ended) == 1


def test_a_file_without_keys_lets_nobody_in(text: TextModel, tmp_path: Path) -> None:
    """The last key of a file was not taken back by deleting its entry."""
    path = tmp_path / "keys.yaml"
    make_key(path, "ann", Scope, Limits())
    keys = KeysFile(None, str(path))
    path.write_text("keys: []\n")
    assert not keys.read().knows_name("ann")
    assert keys.ring.caller(None) is None
    gateway = Gateway(text, FakeOwner(), keys=keys.ring)
    assert gateway.ask("POST", "/v1/completions", json=PATHS["/v1/completions"]).status_code == 401
    key = make_key(path, "bob", Scope, Limits())
    assert keys.read().caller(key) is not None


def test_all_choices_of_a_body_end(text: TextModel) -> None:
    gateway = Revoking(text, ring("ann"), (5,))
    body = {**PATHS["/v1/completions"], "n": 3, "stream": True}
    (answer,) = gateway.asked([("/v1/completions", body, "ann")] * 1, ring("bob"))
    assert answer.text.count("has been revoked") == 1
    assert gateway.owner.open_now == set()


@pytest.mark.parametrize(
    ("after", "ends"),
    [
        (lambda: ring("ann new"), True),
        (lambda: ring("ann", "bob"), False),
        (lambda: without(Scope.GENERATE), True),
        (lambda: without(Scope.DASHBOARD), False),
    ],
    ids=["replaced under its name", "another is added", "its scope is taken", "another scope is taken"],
)
def test_a_key_and_not_its_name_counts(text: TextModel, after: Callable[[], KeyRing], ends: bool) -> None:
    gateway = Revoking(text, ring("ann"), (5,))
    answers = gateway.asked([("/v1/completions", PATHS["/v1/completions"], "ann")], after())
    assert [answer.status_code for answer in answers] == ([401] if ends else [])


def test_what_was_open_without_a_key_ends_where_keys_are_needed_now(text: TextModel) -> None:
    gateway = Revoking(text, KeyRing(()), (5,))
    (answer,) = gateway.asked([("/v1/completions", PATHS["/v1/completions"], "none")], ring("ann"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("after", [lambda: ring("bob"), lambda: without(Scope.DASHBOARD)], ids=["the key", "its scope"])
def test_an_open_live_page_ends(text: TextModel, after: Callable[[], KeyRing]) -> None:
    gateway = Revoking(text, ring("ann", "bob"))
    page = "/dashboard/events"

    async def watched() -> tuple[bool, bool]:
        async with gateway.client() as client:
            asking = [
                asyncio.create_task(client.get(page, headers={"Authorization": f"Bearer {key}"}))
                for key in ("ann", "bob")
            ]
            while gateway.app.state.dashboard.num_open < 2:
                await asyncio.sleep(0.01)
            gateway.ring.take(after())
            gateway.app.state.end_revoked()
            await asyncio.wait({asking[0]}, timeout=5)
            found = asking[0].done(), asking[1].done()
            asking[1].cancel()
            gateway.app.state.dashboard.end()
            return found

    assert asyncio.run(asyncio.wait_for(watched(), PATIENT_S)) == (True, False)
