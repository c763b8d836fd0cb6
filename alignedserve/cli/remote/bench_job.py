"""The batch job of a load test: submits its lines, looks at it until its chats have ended, and then cancels it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from alignedserve.bench.job import Look
from alignedserve.cli.remote.batch import ENDED, BatchApi, BatchOptions, Unreachable
from alignedserve.errors import BatchError

_LOOK_S = 0.5  # between two looks at the job
_DAY_S, _HOUR_S, _MINUTE_S = 86_400, 3600, 60


@dataclass
class ServedJob:
    """A job on a server. Times are seconds since it was submitted.

    One HTTP client asks for all of it: to make a client keeps the interpreter for tens of milliseconds, in which no
    token of a chat would be read.
    """

    server: BatchApi
    id: str
    submitted_at: float
    looks: list[Look]

    @classmethod
    async def submit(cls, options: BatchOptions, file: str, endpoint: str, window_s: float) -> ServedJob:
        server = BatchApi(options)
        id = await asyncio.to_thread(_submit, server, file, endpoint, _window(window_s))
        return cls(server, id, perf_counter(), [])

    async def follow(self, on_look: Callable[[Look], None]) -> None:
        """Look at the job until it has ended."""
        while await self.look(on_look) not in ENDED:
            await asyncio.sleep(_LOOK_S)

    async def look(self, on_look: Callable[[Look], None] = lambda _: None) -> str:
        """Look at the job once, and return its status; a server that does not answer is asked again next time."""
        try:
            batch, _ = await asyncio.to_thread(self.server.look, self.id)
        except Unreachable:
            return ""
        counts, usage = batch.get("request_counts") or {}, batch.get("usage") or {}
        at = perf_counter() - self.submitted_at
        self.looks.append(Look(at, counts.get("completed", 0), counts.get("failed", 0), usage.get("output_tokens", 0)))
        on_look(self.looks[-1])
        return str(batch.get("status"))

    async def cancel(self) -> None:
        """Cancel the job, unless it has ended, and ask no more."""
        with suppress(BatchError):
            await asyncio.to_thread(self.server.post, f"/batches/{self.id}/cancel", {})
        self.server.close()


def _submit(server: BatchApi, text: str, endpoint: str, window: str) -> str:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "lines.jsonl"
        file.write_text(text, encoding="utf-8")
        asked = {"input_file_id": server.upload(file)["id"], "endpoint": endpoint, "completion_window": window}
        return str(server.post("/batches", asked)["id"])


def _window(seconds: float) -> str:
    """Return a completion window as the API takes it; OpenAI's own server knows a day only."""
    if seconds >= _DAY_S:
        return "24h" if seconds == _DAY_S else f"{min(7, int(seconds / _DAY_S))}d"
    return f"{int(seconds / _HOUR_S)}h" if seconds % _HOUR_S == 0 else f"{max(10, int(seconds / _MINUTE_S))}m"
