"""Files and batches over HTTP and a job runner behind them, in one event loop, with an owner that plays scripts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import Batch

from alignedserve.config.config import Config
from alignedserve.config.prices import Prices
from alignedserve.config.sections import JobsConfig
from alignedserve.gateway.access.keys import KeyEntry, KeyRing, Limits, hash_key
from alignedserve.gateway.access.ledger import JOB_RUNNER, Ledger
from alignedserve.gateway.app import make_app
from alignedserve.gateway.batches import BatchRoutes
from alignedserve.gateway.files import FileRoutes
from alignedserve.gateway.responses.keeping import ResponseKeeper
from alignedserve.gateway.settings import GatewaySettings
from alignedserve.jobs.actor import JobRunner
from alignedserve.jobs.answering import Answering
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.store.storage import LazyStorage, data_folder
from alignedserve.store.store import Holder
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, MOST, PATIENT_S, FakeOwner, folder, hello, text  # noqa: F401  (fixtures)
from tests.redis_server import RedisServer

ENDED = ("completed", "failed", "expired", "cancelled")
URL = "/v1/chat/completions"
NO_LIMITS = Limits()
sqlite_only = pytest.mark.parametrize("config", ["sqlite"], indirect=True)


def line(custom_id: str, content: str = "Hi", **fields: Any) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body}).encode()


class Service:
    """The service as clients with two keys see it; tests can stop and start its runner, also with other keys."""

    def __init__(
        self,
        model: TextModel,
        owner: FakeOwner,
        config: Config,
        limits: Limits = NO_LIMITS,
        prices: Prices | None = None,
    ) -> None:
        """`limits` are those of each key."""
        self.owner, self.config, self.text = owner, config, model
        self.keys = keys = KeyRing([KeyEntry(name, hash_key(name), limits=limits) for name in ("ann", "bob")])
        storage, jobs = LazyStorage(config.jobs, Holder("gateway", 1, MODEL, keys.digest)), config.jobs
        self._ledger = data_folder(jobs).with_name("limits")
        batches = BatchRoutes(storage, jobs, lambda: self.runner_away_s, prices)
        job_routes = *FileRoutes(storage, jobs).routes, *batches.routes
        settings = GatewaySettings(served_model_names=(MODEL,), max_model_len=MOST, keys=keys)
        keeper = ResponseKeeper(storage, jobs, lambda: self.runner_away_s)
        self.app = make_app(owner, model, settings, Ledger(self._ledger), job_routes, keeper=keeper)
        self.storage = storage
        self._life, self.runner_away_s = 0, 0.0
        self.metrics = RequestMetrics(prices=prices)  # of lines

    def read_keys(self) -> KeyRing:
        """Return the keys as the runner reads them."""
        return self.keys

    def client(self, key: str = "ann") -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://localhost", headers=headers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[JobRunner]:
        self._life += 1
        ledger = Ledger(self._ledger, JOB_RUNNER)
        answering = Answering(self.owner, self.text, (MODEL,), MOST, self.metrics, ledger=ledger)
        holder = Holder("runner", self._life, MODEL)
        runner = JobRunner(answering, self.config, holder, time.time, read_keys=self.read_keys)
        serving = asyncio.create_task(runner.serve())
        try:
            yield runner
        finally:
            runner.stop()
            await serving
            ledger.close()

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        async def limited() -> None:
            try:
                await asyncio.wait_for(work(), 5 * PATIENT_S)
            finally:
                await (await self.storage()).close()

        asyncio.run(limited())


async def upload(client: httpx.AsyncClient, data: bytes, **fields: str) -> httpx.Response:
    return await client.post("/v1/files", files={"file": ("x.jsonl", data)}, data={"purpose": "batch", **fields})


async def submit(client: httpx.AsyncClient, data: bytes, **fields: Any) -> Any:
    """Upload a file with these bytes, submit its batch, and return the batch."""
    file = (await upload(client, data)).json()
    asked = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h", **fields}
    made = await client.post("/v1/batches", json=asked)
    assert made.status_code == 200, made.text
    return made.json()


async def until(client: httpx.AsyncClient, id: str, holds: Callable[[Any], bool]) -> Any:
    while True:
        got = await client.get(f"/v1/batches/{id}")
        assert got.status_code == 200, got.text
        Batch.model_validate(got.json(), strict=True)
        if holds(got.json()):
            return got.json()
        await asyncio.sleep(0.02)


async def ended(client: httpx.AsyncClient, id: str) -> Any:
    return await until(client, id, lambda batch: batch["status"] in ENDED)


async def rows(client: httpx.AsyncClient, id: str | None) -> list[Any]:
    """Return the lines of a file; none if there is no file."""
    if id is None:
        return []
    return [json.loads(row) for row in (await client.get(f"/v1/files/{id}/content")).text.splitlines()]


@pytest.fixture(params=["sqlite", "redis"])
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    """Make the runner look at the store and at the time more often than usual."""
    monkeypatch.setattr("alignedserve.jobs.actor.POLL_S", 0.05)
    monkeypatch.setattr("alignedserve.jobs.state.TICK_S", 0.1)
    monkeypatch.setattr("alignedserve.jobs.state.FORECAST_S", 0.2)
    monkeypatch.setattr("alignedserve.jobs.actor.RETRIES", 1)
    jobs = JobsConfig(directory=str(tmp_path / "data"))
    if request.param == "sqlite":
        yield Config(jobs=jobs)
        return
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    yield Config(jobs=replace(jobs, store=server.url))
    server.kill()


@pytest.fixture
def service(text: TextModel, hello: tuple[int, ...], config: Config) -> Service:  # noqa: F811
    return Service(text, FakeOwner(*((token,) for token in hello)), config)
