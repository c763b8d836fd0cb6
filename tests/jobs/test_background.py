"""Tests of responses in the background: batch jobs of one line, which no list of batches shows."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from alignedserve.config.config import Config
from alignedserve.core import ServiceClass
from alignedserve.errors import Conflict
from alignedserve.gateway.batches import RUNNER_PATIENCE_S
from alignedserve.owner.client import GivenUp
from alignedserve.store.job import Job
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, FakeOwner
from tests.jobs.conftest import Service, ended, rows, sqlite_only, submit

HELLO = "Hello, naïve 😀!"
PATH = "/v1/responses"


async def begin(client: httpx.AsyncClient, **fields: Any) -> Any:
    made = await client.post(PATH, json={"model": MODEL, "input": "Hi", "background": True, **fields})
    assert made.status_code == 200, made.text
    Response.model_validate(made.json())
    assert (made.json()["status"], made.json()["background"]) == ("queued", True)
    return made.json()


async def over(client: httpx.AsyncClient, id: str) -> Any:
    while True:
        body = (await client.get(f"{PATH}/{id}")).json()
        Response.model_validate(body)
        if body["status"] not in ("queued", "in_progress"):
            return body
        await asyncio.sleep(0.02)


def test_a_response_is_made_in_the_background_and_goes_on(service: Service) -> None:
    async def check() -> None:
        async with service.client() as client, service.running():
            shown = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
            begun = await begin(client, metadata={"for": "ann"}, **shown)
            body = await over(client, begun["id"])
            assert (body["status"], body["output"][0]["content"][0]["text"]) == ("completed", HELLO)
            assert {len(entry["top_logprobs"]) for entry in body["output"][0]["content"][0]["logprobs"]} == {2}
            assert body["id"] == begun["id"]
            assert body["output"][0]["id"].startswith(f"msg_{begun['id'].removeprefix('resp_')}")
            assert (body["metadata"], body["service_tier"]) == ({"for": "ann"}, "flex")
            assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"]
            assert service.owner.opened[-1].service is ServiceClass.BE
            again = await over(client, (await begin(client, input="So?", previous_response_id=begun["id"]))["id"])
            assert again["previous_response_id"] == begun["id"]
            prompt = service.text.decode(service.owner.opened[-1].prompt)
            assert prompt.index("Hi") < prompt.index("Hello") < prompt.index("So?")
            assert (await client.get("/v1/batches")).json()["data"] == []
            assert (await client.get("/v1/files")).json()["data"] == []
            storage = await service.storage()
            assert await asyncio.to_thread(storage.blobs.sizes) == {}, "its files are gone once it has ended"

    service.run(check)


@sqlite_only
def test_it_survives_a_restart_of_the_job_runner(text: TextModel, hello: tuple[int, ...], config: Config) -> None:
    goes_on = asyncio.Event()
    service = Service(text, FakeOwner((hello[0],), goes_on, hello[1:]), config)

    async def check() -> None:
        async with service.client() as client:
            async with service.running():
                id = (await begin(client))["id"]
                while not service.owner.opened:
                    await asyncio.sleep(0.02)
                assert (await client.get(f"{PATH}/{id}")).json()["status"] == "in_progress"
            goes_on.set()
            async with service.running():
                assert (await over(client, id))["output"][0]["content"][0]["text"] == HELLO
            first, second = service.owner.opened
            assert first.sampling.seed == second.sampling.seed, "another try says the same"

    service.run(check)


@sqlite_only
def test_it_is_cancelled_or_deleted_while_it_runs(text: TextModel, hello: tuple[int, ...], config: Config) -> None:
    service = Service(text, FakeOwner((hello[0],), asyncio.Event()), config)

    async def check() -> None:
        async with service.client() as client, service.running():
            for end in ("cancel", "delete"):
                num_before = len(service.owner.opened)
                id = (await begin(client))["id"]
                while len(service.owner.opened) == num_before:
                    await asyncio.sleep(0.02)
                if end == "cancel":
                    for _ in range(2):
                        assert (await client.post(f"{PATH}/{id}/cancel")).json()["status"] == "cancelled"
                    assert (await over(client, id))["status"] == "cancelled"
                else:
                    assert (await client.delete(f"{PATH}/{id}")).json()["deleted"]
                    assert (await client.get(f"{PATH}/{id}")).status_code == 404
                while service.owner.open_now:
                    await asyncio.sleep(0.02)

    service.run(check)


@sqlite_only
def test_a_job_that_changes_meanwhile_is_cancelled_all_the_same(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with service.client() as client:
            id, store = (await begin(client))["id"], (await service.storage()).store
            save = store.save_job

            async def changed(_: Job) -> Job:
                monkeypatch.setattr(store, "save_job", save)
                raise Conflict("it has changed")

            monkeypatch.setattr(store, "save_job", changed)
            assert (await client.post(f"{PATH}/{id}/cancel")).json()["status"] == "cancelled"

    service.run(check)


@sqlite_only
def test_inputs_have_a_quota(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.gateway.responses.keeping._MOST_FILES", 1)

    async def check() -> None:
        async with service.client() as client:
            await begin(client)
            refused = await client.post(PATH, json={"model": MODEL, "input": "Hi", "background": True})
            assert (refused.status_code, refused.json()["error"]["code"]) == (413, "quota_exceeded")

    service.run(check)


@sqlite_only
def test_what_cannot_run_is_refused_at_once_or_fails(text: TextModel, config: Config) -> None:
    service = Service(text, FakeOwner(GivenUp("nothing came of it", 0.0)), config)

    async def check() -> None:
        async with service.client() as client, service.running():
            asked = {"model": MODEL, "input": "Hi", "background": True}
            for fields, param in (({"input": "Hi " * 1000}, "input"), ({"store": False}, "store")):
                refused = await client.post(PATH, json={**asked, **fields})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
            cut = await client.post(PATH, json={**asked, "max_output_tokens": 10_000})
            assert 0 < int(cut.headers["x-max-tokens"]) < 10_000
            failed = await over(client, cut.json()["id"])
            assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
            assert "nothing came of it" in failed["error"]["message"]
            service.runner_away_s = RUNNER_PATIENCE_S + 1
            assert (await client.post(PATH, json=asked)).status_code == 503

    service.run(check)


@sqlite_only
def test_a_batch_has_responses_too(service: Service) -> None:
    async def check() -> None:
        async with service.client() as client, service.running():
            asked = [{"input": "Hi"}, {"input": "Hi", "previous_response_id": "resp_1"}]
            lines = [
                {"custom_id": str(number), "method": "POST", "url": PATH, "body": {"model": MODEL, **fields}}
                for number, fields in enumerate(asked)
            ]
            batch = await submit(client, "\n".join(map(json.dumps, lines)).encode(), endpoint=PATH)
            batch = await ended(client, batch["id"])
            assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
            assert batch["usage"]["output_tokens"] > 0
            (good,) = await rows(client, batch["output_file_id"])
            assert Response.model_validate(good["response"]["body"]).output_text == HELLO
            (bad,) = await rows(client, batch["error_file_id"])
            assert bad["response"]["body"]["error"]["param"] == "previous_response_id"

    service.run(check)
