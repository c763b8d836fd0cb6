"""Write what the tests here hold later code to: `pytest tests/released/write.py`, at a release (CONTRIBUTING.md).

The stores are made by a gateway and a job runner, at a time long after now, so that what they keep does not expire. The
runner is stopped in the middle of a batch.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import time
import zlib
from base64 import b64encode
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from alignedserve.config.config import Config
from alignedserve.core import Request
from alignedserve.gateway.access.budgets import FILE, Budgets
from alignedserve.jobs.actor import JobRunner
from alignedserve.kvpool.arena.arena import Arena, Contents
from alignedserve.protocol.extents import PageKind
from alignedserve.store import redis_store, sqlite_store
from alignedserve.store.job import Forecast, Job, LineResult
from alignedserve.store.storage import SQLITE, SQLITE_FILE, data_folder
from alignedserve.store.store import StoredFile, StoredResponse
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, FakeOwner
from tests.jobs.conftest import Service, ended, line, submit, until
from tests.released.wire import Wire, described

DATA = Path(__file__).with_name("data")
WIRE = DATA / "wire.json"
RECORDS = DATA / "records.json"
KEPT = (StoredFile, Job, LineResult, StoredResponse, Forecast)
ARENA, CONTENTS, PAGE = DATA / "arena.base64", Contents(PageKind.KV, 8, 2**64 - 3), b"KV of eight tokens"
SCHEMAS = {"sqlite": len(sqlite_store.MIGRATIONS), "redis": len(redis_store.MIGRATIONS)}
AT = 4_000_000_000.0  # in the year 2096
PATH = "/v1/responses"


def test_write_wire() -> None:
    DATA.mkdir(exist_ok=True)
    WIRE.write_text(_written(asdict(Wire.of_this_code())), encoding="utf-8")


def test_write_records() -> None:
    RECORDS.write_text(_written({"schemas": SCHEMAS, "types": described(KEPT)}), encoding="utf-8")


def test_write_arena(tmp_path: Path) -> None:
    with closing(Arena.create(tmp_path / "arena", pages=2, payload_bytes=64, page_size=8, incarnation=5)) as arena:
        arena.begin_write(1)
        arena.payload(1)[: len(PAGE)] = PAGE
        arena.end_write(1, CONTENTS)
        ARENA.write_text(b64encode(zlib.compress((tmp_path / "arena").read_bytes())).decode() + "\n", encoding="utf-8")


class _Stalling(FakeOwner):
    """Answers this many requests, and lets the others wait."""

    most = 1_000

    def steps_of(self, request: Request) -> tuple[Any, ...]:
        return self.steps if len(self.opened) <= self.most else (asyncio.Event(),)


def test_write_store(text: TextModel, hello: tuple[int, ...], config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    later, now = AT - time.time(), time.time
    monkeypatch.setattr(time, "time", lambda: now() + later)
    monkeypatch.setattr("tests.jobs.conftest.JobRunner", partial(JobRunner, wall=lambda: time.time()))
    owner = _Stalling(*((token,) for token in hello))
    service = Service(text, owner, config)

    ids: dict[str, str] = {}

    async def ask(client: httpx.AsyncClient, **fields: Any) -> str:
        return str((await client.post(PATH, json={"model": MODEL, "input": "Hi", **fields})).json()["id"])

    async def serve() -> None:
        async with service.client() as client, service.running():
            ids["whole"] = (await submit(client, b"\n".join([line("a"), line("b", temperature=9)])))["id"]
            await ended(client, ids["whole"])
            ids["response"] = await ask(client)
            owner.most = len(owner.opened) + 1
            ids["half"] = (await submit(client, b"\n".join([line("c"), line("d", temperature=9), line("e")])))["id"]
            counts = {"completed": 1, "failed": 1, "total": 3}
            await until(client, ids["half"], lambda batch: batch["request_counts"] == counts)
            ids["background"] = await ask(client, background=True)
        async with service.client() as client:
            ids["new"] = (await submit(client, line("f")))["id"]

    service.run(serve)
    budgets = Budgets(data_folder(config.jobs) / FILE, lambda: AT)
    budgets.use("ann", 1_200)
    budgets.exchange()
    kept = kept_at(config)
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(data_folder(config.jobs) / "files", kept / "files")
    (kept / "ids.json").write_text(_written(ids), encoding="utf-8")
    (kept / "spent.sql").write_text(_sql(data_folder(config.jobs) / FILE), encoding="utf-8")
    if config.jobs.store == SQLITE:
        (kept / "jobs.sql").write_text(_sql(data_folder(config.jobs) / SQLITE_FILE), encoding="utf-8")
    else:
        (kept / "redis.jsonl").write_text(_redis(config.jobs.store), encoding="utf-8")


def kept_at(config: Config) -> Path:
    """Return the folder of the store of this kind."""
    return DATA / ("sqlite" if config.jobs.store == SQLITE else "redis")


def _sql(path: Path) -> str:
    """Return the statements that make the file again."""
    with closing(sqlite3.connect(path)) as file:
        version = file.execute("PRAGMA user_version").fetchone()[0]
        return "\n".join([*file.iterdump(), f"PRAGMA user_version = {version};", ""])


def _redis(url: str) -> str:
    """Return the commands that make all keys again, a line of JSON each."""
    commands: list[list[Any]] = []
    with Redis.from_url(url, decode_responses=True) as redis:
        for key in sorted(redis.scan_iter()):
            match redis.type(key):
                case "string":
                    commands.append(["SET", key, redis.get(key)])
                case "hash":
                    commands.append(["HSET", key, *(word for pair in redis.hgetall(key).items() for word in pair)])
                case "zset":
                    scored = redis.zrange(key, 0, -1, withscores=True)
                    commands.append(["ZADD", key, *(word for name, score in scored for word in (score, name))])
                case kind:
                    pytest.fail(f"{key} is a {kind}")
    return "".join(f"{json.dumps(command)}\n" for command in commands)


def _written(tree: Any, depth: int = 2) -> str:
    """Return JSON with a line for each entry of the tree and of its branches."""
    if not depth or not isinstance(tree, dict):
        return json.dumps(tree)
    entries = ",\n".join(f"{json.dumps(name)}: {_written(value, depth - 1)}" for name, value in tree.items())
    return f"{{\n{entries}\n}}" + "\n" * (depth == 2)
