"""A client of files and batches that sends few requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import httpx

from alignedserve.store.job import Endpoint

ENDED = ("completed", "failed", "expired", "cancelled")
LOOK_S = 0.5


def jsonl(bodies: Iterable[dict[str, Any]]) -> bytes:
    """Return a file with a line for each body, numbered from 0."""
    fields = {"method": "POST", "url": Endpoint.COMPLETIONS.value}
    lines = ({"custom_id": str(number), **fields, "body": body} for number, body in enumerate(bodies))
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class Batches:
    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=f"{url}/v1", timeout=60, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def upload(self, data: bytes) -> str:
        answer = await self._http.post("/files", data={"purpose": "batch"}, files={"file": ("x.jsonl", data)})
        return str(answer.raise_for_status().json()["id"])

    async def submit(self, file: str) -> str:
        asked = {"input_file_id": file, "endpoint": Endpoint.COMPLETIONS.value, "completion_window": "7d"}
        return str((await self._http.post("/batches", json=asked)).raise_for_status().json()["id"])

    async def look(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self._http.get(f"/batches/{id}")).raise_for_status().json()
        return found

    async def until(self, id: str, *statuses: str) -> dict[str, Any]:
        while (batch := await self.look(id))["status"] not in statuses:
            await asyncio.sleep(LOOK_S)
        return batch

    async def cancel(self, id: str) -> None:
        (await self._http.post(f"/batches/{id}/cancel")).raise_for_status()

    async def num_lines(self, file: str) -> int:
        return (await self._http.get(f"/files/{file}/content")).raise_for_status().content.count(b"\n")
