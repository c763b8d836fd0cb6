"""HTTP requests of a client in Python: whole answers and streams. What goes wrong is an AskError of one line."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from alignedserve.errors import AskError
from alignedserve.http_client import PATIENCE_S, PLACE, RemoteServer, Tries, said_by, server_at
from alignedserve.progress import StatusLine

Body: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]

_MOST_AT_ONCE = 256  # requests of one call: more than a worker runs in a step, fewer than a queue takes
_HOW: dict[str, Any] = {"silence_s": None, "connect_s": 10.0, "may_take_proxy": False}  # documents may wait for hours
_AGAIN_S = 1.0  # where a server that is full does not say when, as a proxy before it


class _AskedServer(RemoteServer):
    kind = AskError

    def __init__(self, *asked: Any, **how: Any) -> None:
        super().__init__(*asked, **how)
        self._status = StatusLine(sys.stderr)

    def comment(self, text: str) -> None:
        if PLACE.fullmatch(text):
            self._status.show(text)

    def event(self, line: str) -> Answer | None:
        if (found := super().event(line)) is not None:
            self._status.clear()
        return found

    def tries(self) -> Tries:
        return Tries(self.patience_s, _AGAIN_S)

    def lost(self, error: Exception) -> AskError:
        return AskError(f"{self.url} does not answer: {error or type(error).__name__}")

    def refused(self, answer: httpx.Response) -> AskError:
        return AskError(f"the server refuses with {answer.status_code}: {said_by(answer)}")


class ServerCalls:
    """Asks a server with OpenAI's API. One that is full is asked again when it says, for `patience_s` a request."""

    def __init__(
        self, url: str, api_key: str | None = None, patience_s: float = PATIENCE_S, ca: Path | None = None
    ) -> None:
        self.url, self._api_key, self._patience_s, self._ca = server_at(url), api_key, patience_s, ca

    def model(self) -> str:
        """Return the name of the first model that the server lists."""
        with self._server() as server:
            return str(server.tree("GET", "/v1/models")["data"][0]["id"])

    def weights(self) -> dict[str, str]:
        """Return how each worker keeps the weights of its model."""
        with self._server() as server:
            return dict(server.tree("GET", "/status").get("weights", {}))

    def one(self, path: str, body: Body) -> Answer:
        with self._server() as server:
            tries = server.tries()
            while True:
                answer = server.ask("POST", path, json=body, headers=tries.headers)
                if (pause_s := tries.pause_after(answer)) is None:
                    return server.tree_of(server.checked(answer).text)
                time.sleep(pause_s)

    async def all_of(self, path: str, bodies: Sequence[Body], told: Callable[[int], None]) -> list[Answer]:
        """Return the answers in the order of the bodies, and tell how many there are, from none on."""
        slots, num_done = asyncio.Semaphore(_MOST_AT_ONCE), 0

        async def ask(body: Body) -> Answer:
            nonlocal num_done
            async with slots:
                tries = server.tries()
                while True:
                    answer = await http.post(f"{self.url}{path}", json=body, headers=tries.headers)
                    if (pause_s := tries.pause_after(answer)) is None:
                        break
                    await asyncio.sleep(pause_s)
                found = server.tree_of(server.checked(answer).text)
            num_done += 1
            told(num_done)
            return found

        told(num_done)
        async with self._asking() as (server, http):
            tasks = [asyncio.create_task(ask(body)) for body in bodies]
            try:
                return await asyncio.gather(*tasks)
            finally:  # where one failed, or nobody waits any more
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def events(self, path: str, body: Answer) -> Iterator[Answer]:
        """Yield the chunks of a streamed answer; where nobody takes them any more, the request is cancelled."""
        with self._server() as server:
            yield from filter(None, server.events(path, body))

    async def events_async(self, path: str, body: Answer) -> AsyncIterator[Answer]:
        """Yield the same in the caller's event loop."""
        streamed = {**body, "stream": True}
        async with self._asking() as (server, http):
            tries = server.tries()
            while True:
                asking = http.stream("POST", f"{self.url}{path}", json=streamed, headers=tries.headers)
                async with asking as answer:
                    if answer.is_success:
                        async for line in answer.aiter_lines():
                            if chunk := server.event(line):
                                yield chunk
                        return
                    await answer.aread()
                if (pause_s := tries.pause_after(answer)) is None:
                    raise server.refused(answer)
                await asyncio.sleep(pause_s)

    def _server(self) -> _AskedServer:
        return _AskedServer(self.url, self._api_key, self._patience_s, ca=self._ca, **_HOW)

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[tuple[_AskedServer, httpx.AsyncClient]]:
        """Yield the server, which reads what comes, and the client that asks in this event loop."""
        server, limits = self._server(), httpx.Limits(max_connections=_MOST_AT_ONCE)
        with server.failures():
            async with server.in_event_loop(limits=limits) as http:
                yield server, http
