"""Tests that batches, uploads and responses in the background keep to the limits of their key, also once it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partialmethod
from typing import Any

import httpx
import pytest

from alignedserve.config.config import Config
from alignedserve.core import Request
from alignedserve.errors import ConfigError
from alignedserve.gateway.access.keys import KeyEntry, KeyRing, Limits, Scope, hash_key
from alignedserve.gateway.http.limits import FILE_BYTES, CallerQuota
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, FakeOwner
from tests.jobs.conftest import URL, Service, ended, line, rows, sqlite_only, submit, until, upload

pytestmark = sqlite_only
_RUNS = ("queued", "in_progress")
LINES = 12  # of a batch: more than the limits below let run at once


class Held(FakeOwner):
    """An owner whose requests wait until they may go on, where their prompts say so."""

    def __init__(self, text: TextModel, hello: Sequence[int]) -> None:
        super().__init__()
        self._text, self._hello, self.go_on = text, hello, asyncio.Event()

    def steps_of(self, request: Request) -> tuple[Any, ...]:
        held = (self.go_on,) if "held" in self._text.decode(request.prompt) else ()
        return (*held, self._hello)

    async def has_open(self, number: int) -> None:
        while len(self.open_now) < number:
            await asyncio.sleep(0.001)

    async def has_open_at_most(self, number: int) -> None:
        while len(self.open_now) > number:
            await asyncio.sleep(0.001)


def batch_of(content: str) -> bytes:
    return b"\n".join(line(str(number), content) for number in range(LINES))


def chat(client: httpx.AsyncClient, content: str = "Hi") -> asyncio.Task[httpx.Response]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    return asyncio.create_task(client.post(URL, json=body))


async def other_key_is_served(service: Service) -> None:
    """Let a batch of another key run from its upload to its end: so the job runner has had turns enough."""
    async with service.client("bob") as bob:
        assert (await ended(bob, (await submit(bob, batch_of("Hi")))["id"]))["request_counts"]["completed"] == LINES


def test_lines_take_their_keys_places_and_keep_no_chat_out(
    text: TextModel, hello: tuple[int, ...], config: Config
) -> None:
    owner = Held(text, hello)
    service = Service(text, owner, config, Limits(most_open=4))

    async def check() -> None:
        async with service.client() as client, service.running():
            batches = [await submit(client, batch_of("held")) for _ in range(2)]
            await owner.has_open(4)
            await other_key_is_served(service)
            assert len(owner.open_now) == 4
            held = [chat(client, "held") for _ in range(4)]
            await owner.has_open(8)
            assert (await chat(client)).status_code == 429
            owner.go_on.set()
            assert [(await answer).status_code for answer in held] == [200] * 4
            assert [(await ended(client, batch["id"]))["request_counts"]["completed"] for batch in batches] == [
                LINES
            ] * 2
            assert (await chat(client)).status_code == 200

    service.run(check)


def test_lines_wait_while_chats_have_all_places_of_their_key(
    text: TextModel, hello: tuple[int, ...], config: Config
) -> None:
    owner = Held(text, hello)
    service = Service(text, owner, config, Limits(most_open=3))

    async def check() -> None:
        async with service.client() as client, service.running():
            chats = [chat(client, "held") for _ in range(3)]
            await owner.has_open(3)
            batch = await submit(client, batch_of("Hi"))
            await other_key_is_served(service)
            assert (await until(client, batch["id"], lambda _: True))["request_counts"]["completed"] == 0
            owner.go_on.set()
            await asyncio.gather(*chats)
            assert (await ended(client, batch["id"]))["request_counts"]["completed"] == LINES

    service.run(check)


def test_a_batch_does_not_keep_chats_out_of_the_only_place(
    text: TextModel, hello: tuple[int, ...], config: Config
) -> None:
    owner = Held(text, hello)
    service = Service(text, owner, config, Limits(most_open=1))

    async def check() -> None:
        async with service.client() as client, service.running():
            batch = await submit(client, batch_of("held"))
            await owner.has_open(1)
            assert (await chat(client)).status_code == 200
            beside = chat(client, "held")
            await owner.has_open(2)
            assert (await chat(client)).status_code == 429
            owner.go_on.set()
            assert (await beside).status_code == 200
            assert (await ended(client, batch["id"]))["request_counts"]["completed"] == LINES

    service.run(check)


def test_the_batches_of_a_revoked_key_end_with_what_is_done(
    text: TextModel, hello: tuple[int, ...], config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Held(text, hello)
    service = Service(text, owner, config)

    async def check() -> None:
        async with service.client() as client, service.client("bob") as bob:
            async with service.running():
                batch = await submit(client, b"\n".join([line("done"), line("left", "held")]))
                await until(client, batch["id"], lambda state: state["request_counts"]["completed"] == 1)
                others = await submit(bob, b"\n".join([line("done"), line("left", "held")]))
                await until(bob, others["id"], lambda state: state["request_counts"]["completed"] == 1)
            unread = await submit(client, batch_of("Hi"))
            num_opened = len(owner.opened)
            owner.go_on.set()
            service.keys = KeyRing([KeyEntry("bob", hash_key("bob"))])
            async with service.running():
                for id, total in ((batch["id"], 2), (unread["id"], 0)):
                    gone = await ended(client, id)
                    assert (gone["status"], gone["request_counts"]["total"]) == ("cancelled", total)
                    assert [problem["code"] for problem in gone["errors"]["data"]] == ["key_revoked"]
                    assert any(
                        f"{id} of ann is cancelled: the API key that asked for this batch has been revoked" in message
                        for message in caplog.messages
                    )
                batch = await ended(client, batch["id"])
                assert [row["custom_id"] for row in await rows(client, batch["output_file_id"])] == ["done"]
                (error,) = await rows(client, batch["error_file_id"])
                assert (error["custom_id"], error["error"]["code"]) == ("left", "key_revoked")
                assert (await ended(bob, others["id"]))["request_counts"]["completed"] == 2
            assert len(owner.opened) == num_opened + 1, "no line of the revoked key has run"

    service.run(check)


def test_a_batch_whose_results_use_up_the_quota_ends_with_what_is_done(
    text: TextModel, hello: tuple[int, ...], config: Config
) -> None:
    """Results counted for nothing: a batch wrote 346 times its input."""
    owner = Held(text, hello)
    service = Service(text, owner, replace(config, jobs=replace(config.jobs, quota_mb=1)))

    async def check() -> None:
        async with service.client() as client, service.client("bob") as bob:
            lines = b"\n".join([line("done"), line("left", "held")])
            filler = 1_000_000 - 2 * len(lines)
            assert (await upload(client, b"x" * filler)).status_code == 200
            for each in (client, bob):
                batch = await submit(each, lines)
                async with service.running():
                    await until(each, batch["id"], lambda state: state["request_counts"]["completed"] == 1)
                    assert (await upload(each, b"x" * len(lines))).status_code == (413 if each is client else 200)
                    if each is bob:
                        owner.go_on.set()
                    batch = await ended(each, batch["id"])
                assert batch["status"] == ("cancelled" if each is client else "completed")
                if each is client:
                    assert [problem["code"] for problem in batch["errors"]["data"]] == ["quota_exceeded"]
                    assert [row["custom_id"] for row in await rows(each, batch["output_file_id"])] == ["done"]
                    (error,) = await rows(each, batch["error_file_id"])
                    assert (error["custom_id"], error["error"]["code"]) == ("left", "quota_exceeded")

    service.run(check)


@pytest.mark.parametrize("taken", [Scope.BATCH, Scope.GENERATE, None], ids=["batch", "generate", "the key"])
def test_what_runs_ends_once_its_scope_is_taken_and_all_else_goes_on(
    text: TextModel, hello: tuple[int, ...], config: Config, taken: Scope | None
) -> None:
    """A key that lost a scope, or its entry, ran its batches on until the job runner began again."""
    owner = Held(text, hello)
    service = Service(text, owner, config)

    async def check() -> None:
        async with service.client() as client, service.running():
            batch = await submit(client, b"\n".join([line("done"), line("left", "held")]))
            await until(client, batch["id"], lambda state: state["request_counts"]["completed"] == 1)
            asked = {"model": MODEL, "input": "held", "background": True}
            response = (await client.post("/v1/responses", json=asked)).json()["id"]
            await owner.has_open(2)
            scopes = frozenset({Scope.BATCH, Scope.GENERATE} - {taken})
            entry = KeyEntry("ann", hash_key("ann"), scopes)
            service.keys = KeyRing([] if taken is None else [entry], is_closed=True)
            await owner.has_open_at_most(0 if taken is None else 1)
            owner.go_on.set()
            gone = await ended(client, batch["id"])
            runs = taken is Scope.GENERATE
            assert (gone["status"], gone["request_counts"]["completed"]) == (
                ("completed", 2) if runs else ("cancelled", 1)
            )
            assert [problem["code"] for problem in gone.get("errors", {"data": []})["data"]] == (
                [] if runs else ["key_revoked"]
            )
            while (said := (await client.get(f"/v1/responses/{response}")).json())["status"] in _RUNS:
                await asyncio.sleep(0.01)
            assert said["status"] == ("completed" if taken is Scope.BATCH else "cancelled")

    service.run(check)


def test_the_batch_of_a_key_that_is_newer_than_the_job_runner_waits_until_its_keys_can_be_read_and_runs(
    text: TextModel, hello: tuple[int, ...], config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway that died and began again knows the key; the job runner read the file before."""
    unreadable = "keys.yaml is not valid YAML"

    class Edited(Service):
        is_whole = True

        def read_keys(self) -> KeyRing:
            if not self.is_whole:
                raise ConfigError(unreadable)
            return self.keys

    service = Edited(text, FakeOwner(hello), config)
    all_keys, service.keys = service.keys, KeyRing([KeyEntry("bob", hash_key("bob"))])

    async def check() -> None:
        async with service.client() as client, service.running():
            await other_key_is_served(service)
            service.is_whole = False
            batch = await submit(client, batch_of("Hi"))
            while not any(unreadable in message for message in caplog.messages):
                await asyncio.sleep(0.01)
            await other_key_is_served(service)
            assert (await until(client, batch["id"], lambda _: True))["status"] == "validating"
            assert sum(unreadable in message for message in caplog.messages) == 1
            service.keys, service.is_whole = all_keys, True
            assert (await ended(client, batch["id"]))["request_counts"]["completed"] == LINES

    service.run(check)


def test_a_response_in_the_background_pays_as_its_key(
    text: TextModel, hello: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CallerQuota, "__init__", partialmethod(CallerQuota.__init__, now=lambda: 100.0))
    service = Service(text, FakeOwner(hello), config, Limits(tokens_per_minute=1000))

    async def check() -> None:
        async with service.client() as client, service.running():
            body = {"model": MODEL, "input": "Hi", "background": True, "max_output_tokens": 100}
            begun = (await client.post("/v1/responses", json=body)).json()
            while (got := await client.get(f"/v1/responses/{begun['id']}")).json()["status"] != "completed":
                await asyncio.sleep(0.02)
            used = got.json()["usage"]["total_tokens"]
            assert got.headers["x-ratelimit-remaining-tokens"] == str(1000 - used)

    service.run(check)


def test_files_and_batches_are_no_requests_of_the_minute(
    text: TextModel, hello: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that looked at its batch each second used up the requests of its chats, and then saw neither."""
    monkeypatch.setattr(CallerQuota, "__init__", partialmethod(CallerQuota.__init__, now=lambda: 100.0))
    service = Service(text, FakeOwner(hello), config, Limits(requests_per_minute=1))

    async def check() -> None:
        async with service.client() as client, service.running():
            batch = await ended(client, (await submit(client, batch_of("Hi")))["id"])
            assert len(await rows(client, batch["output_file_id"])) == LINES
            for path in ("/v1/files", f"/v1/files/{batch['input_file_id']}", "/v1/batches"):
                assert (await client.get(path)).headers["x-ratelimit-remaining-requests"] == "1"
            assert [(await chat(client)).status_code for _ in range(2)] == [200, 429]
            assert (await ended(client, batch["id"]))["status"] == "completed"

    service.run(check)


def test_an_uploaded_file_costs_its_key_tokens(
    text: TextModel, hello: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CallerQuota, "__init__", partialmethod(CallerQuota.__init__, now=lambda: 100.0))
    service = Service(text, FakeOwner(hello), config, Limits(tokens_per_minute=100))

    async def check() -> None:
        async with service.client() as client:

            async def sent(num_bytes: int, **fields: str) -> tuple[int, int]:
                answer = await upload(client, b"x" * num_bytes, **fields)
                after = await client.get("/v1/files")
                return answer.status_code, int(after.headers["x-ratelimit-remaining-tokens"])

            assert await sent(40 * FILE_BYTES) == (200, 59)  # with what is beside the file
            assert await sent(40 * FILE_BYTES, purpose="none") == (400, 59)
            assert await sent(400 * FILE_BYTES) == (200, 0), "no file is larger than what its key may ever send"
            assert (await sent(1))[0] == 429

    service.run(check)
