"""A client of files and batches that sends few requests and never waits for a library."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx

from alignedserve.gateway.access.keys import ANONYMOUS
from alignedserve.store.job import Endpoint, Job
from alignedserve.store.sqlite_store import SqliteStore
from alignedserve.store.storage import SQLITE_FILE

ENDED = ("completed", "failed", "expired", "cancelled")
LOOK_S = 0.5


def line(custom_id: str, body: dict[str, Any]) -> bytes:
    whole = {"custom_id": custom_id, "method": "POST", "url": Endpoint.COMPLETIONS.value, "body": body}
    return json.dumps(whole).encode()


def jsonl(bodies: Iterable[dict[str, Any]]) -> bytes:
    """Return a file with a line for each body, numbered from 0."""
    return b"".join(line(str(number), body) + b"\n" for number, body in enumerate(bodies))


class Batches:
    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=f"{url}/v1", timeout=60, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def upload(self, data: bytes) -> str:
        return str((await self._post(data)).raise_for_status().json()["id"])

    async def upload_from(self, path: Path) -> str:
        """Upload a file piece by piece, in a thread."""
        return await asyncio.to_thread(self._upload_from, path)

    def _upload_from(self, path: Path) -> str:
        address, form = f"{self._http.base_url}files", {"purpose": "batch"}
        with path.open("rb") as file:
            answer = httpx.post(address, data=form, files={"file": (path.name, file)}, timeout=60, trust_env=False)
        return str(answer.raise_for_status().json()["id"])

    async def refused(self, size: int) -> int:
        """Return the status of an upload of so many bytes."""
        return (await self._post(b"x" * size)).status_code

    async def _post(self, data: bytes) -> httpx.Response:
        files = {"file": ("x.jsonl", data)}
        return await self._http.post("/files", data={"purpose": "batch"}, files=files)

    async def size(self, file: str) -> int:
        """Download a file and return its bytes."""
        size = 0
        async with self._http.stream("GET", f"/files/{file}/content") as answer:
            async for piece in answer.aiter_bytes(1 << 20):
                size += len(piece)
        return size

    async def submit(self, file: str, window: str = "7d") -> str:
        asked = {"input_file_id": file, "endpoint": Endpoint.COMPLETIONS.value, "completion_window": window}
        return str((await self._http.post("/batches", json=asked)).raise_for_status().json()["id"])

    async def look(self, id: str) -> tuple[dict[str, Any], httpx.Headers]:
        answer = (await self._http.get(f"/batches/{id}")).raise_for_status()
        return answer.json(), answer.headers

    async def until(self, id: str, *statuses: str) -> dict[str, Any]:
        while True:
            batch, _ = await self.look(id)
            if batch["status"] in statuses:
                return batch
            await asyncio.sleep(LOOK_S)

    async def cancel(self, id: str) -> None:
        (await self._http.post(f"/batches/{id}/cancel")).raise_for_status()

    async def num_lines(self, file: str | None) -> int:
        if file is None:
            return 0
        return (await self._http.get(f"/files/{file}/content")).raise_for_status().content.count(b"\n")


async def submit_shorter(data: Path, job: Job) -> None:
    """Write the job's record as the gateway would have written it: the API refuses a window so short."""
    store = await SqliteStore.open(data / SQLITE_FILE)
    await store.add_job(job)
    await store.close()


def job_of(id: str, file: str, created_at: int, window_s: int, weight: float) -> Job:
    ends_at = created_at + window_s
    return Job(id, ANONYMOUS.id, file, Endpoint.COMPLETIONS, f"{window_s} s", created_at, ends_at, weight=weight)
