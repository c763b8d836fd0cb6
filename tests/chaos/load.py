"""Clients that ask the same questions, keep files, responses and batches, and meet limits, while things go wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random

from tests.chaos.recording import Client, Question, Seen, sha256

_APART_S = 0.2  # between an error and the client's next question, and between looks at a batch
_MOST_WAIT_S = 8.0  # as long as a refused client waits, whatever it is told
_KEPT_APART_S = 0.4  # between what a keeper does
_FILE_BYTES = (1, 100_000)


class Load:
    """Clients that each ask one question after another until they are told to stop."""

    def __init__(self, client: Client, questions: Sequence[Question], clients: int, seed: int) -> None:
        self._client, self._questions = client, questions
        self._draws = [Random(seed * 1000 + number) for number in range(clients)]
        self._is_over = False

    def stop(self) -> None:
        self._is_over = True

    async def run(self) -> None:
        """Return when each client has its last answer."""
        await asyncio.gather(*map(self._ask, self._draws))

    async def _ask(self, draw: Random) -> None:
        while not self._is_over:
            seen = await self._client.ask(draw.choice(self._questions))
            if not seen.is_good:  # half of the clients come again when they are told to, as SDKs do
                await asyncio.sleep(draw.choice((_APART_S, min(seen.retry_after, _MOST_WAIT_S))))


class Keeper:
    """Uploads files and stores responses, lists, reads and deletes them, and looks for what it has deleted."""

    def __init__(self, client: Client, questions: Sequence[Question], seed: int) -> None:
        self._client, self._questions, self._draw = client, questions, Random(seed)
        self._paths: list[str] = []  # of all that was acknowledged, and perhaps deleted
        self._is_over = False

    def stop(self) -> None:
        self._is_over = True

    async def run(self) -> None:
        while not self._is_over:
            await self.step()
            await asyncio.sleep(_KEPT_APART_S)

    async def step(self) -> None:
        what = self._draw.choice(("upload", "store", "read", "read", "list", "delete"))
        if what == "upload" or not self._paths:
            content = self._draw.randbytes(self._draw.randint(*_FILE_BYTES))
            self._keep("/v1/files/{}/content", await upload(self._client, content))
        elif what == "store":
            self._keep("/v1/responses/{}", await self._client.ask(self._draw.choice(self._questions)))
        elif what == "list":
            await self._client.call("GET", "/v1/files?limit=10000")
        elif what == "read":
            await self._client.call("GET", self._draw.choice(self._paths))
        else:
            await self._client.call("DELETE", self._draw.choice(self._paths).removesuffix("/content"))

    def _keep(self, path: str, made: Seen) -> None:
        if made.is_good and "thing" in made.end:
            self._paths.append(path.format(made.end["thing"]))

    async def read_all(self) -> None:
        for path in (*self._paths, "/v1/files?limit=10000"):
            await self._client.call("GET", path)


async def upload(client: Client, content: bytes, questions: Sequence[Question] = ()) -> Seen:
    told = {"sha256": sha256(content), "size": len(content), "lines": [question.name for question in questions]}
    return await client.call("POST", "/v1/files", told, files={"file": ("x.jsonl", content)}, data={"purpose": "batch"})


async def run_batch(client: Client, questions: Sequence[Question]) -> None:
    """Submit a batch of these questions, look at it until it has ended, and read its files, whatever parts are away.
    Where a store has forgotten it, submit it again: the oracle knows whether it may have."""
    content = "\n".join(_line(number, question) for number, question in enumerate(questions)).encode()
    while True:
        file = await _until_good(partial(upload, client, content, questions))
        body = {"input_file_id": file.end["thing"], "endpoint": questions[0].path, "completion_window": "7d"}
        submit = partial(client.call, "POST", "/v1/batches", {"input": file.end["thing"]}, json=body)
        batch = await _until_good(submit)
        while batch.end.get("state") in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(_APART_S)
            path = f"/v1/batches/{batch.end['thing']}"
            batch = await _until_good(partial(client.call, "GET", path))
        files = [batch.end[name] for name in ("output", "errors") if name in batch.end]
        reads = [await _until_good(partial(client.call, "GET", f"/v1/files/{id}/content")) for id in files]
        if batch.is_good and all(read.is_good for read in reads):
            return


async def _until_good(call: Callable[[], Awaitable[Seen]]) -> Seen:
    """Call until the answer is good, or says that there is no such thing."""
    while not (seen := await call()).is_good and seen.status != 404:
        await asyncio.sleep(_APART_S)
    return seen


def _line(number: int, question: Question) -> str:
    body = {name: value for name, value in question.body.items() if not name.startswith("stream")}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": question.path, "body": body})
