"""HTTP requests of a client in Python: whole answers and streams. What goes wrong is an AskError of one line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import httpx

from alignedserve.errors import AskError
from alignedserve.http_client import RemoteServer, said_by, server_at

Body: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]

_MOST_AT_ONCE = 256  # requests of one call: more than a worker runs in a step, fewer than a queue takes
_HOW: dict[str, Any] = {"silence_s": None, "connect_s": 10.0, "may_take_proxy": False}  # documents may wait for hours
_BUSY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
_AGAIN_S = 1.0  # where the server does not say when


class _AskedServer(RemoteServer):
    kind = AskError

    def lost(self, error: Exception) -> AskError:
        return AskError(f"{self.url} does not answer: {error or type(error).__name__}")

    def refused(self, answer: httpx.Response) -> AskError:
        return AskError(f"the server refuses with {answer.status_code}: {said_by(answer)}")


class ServerCalls:
    """Asks a server with OpenAI's API."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url, self._api_key = server_at(url), api_key

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
            return server.tree("POST", path, json=body)

    async def all_of(self, path: str, bodies: Sequence[Body], told: Callable[[int], None]) -> list[Answer]:
        """Return the answers in the order of the bodies, and tell how many there are. A busy server is asked again."""
        slots, num_done = asyncio.Semaphore(_MOST_AT_ONCE), 0

        async def ask(body: Body) -> Answer:
            nonlocal num_done
            async with slots:
                while (answer := await http.post(f"{self.url}{path}", json=body)).status_code in _BUSY:
                    await asyncio.sleep(float(answer.headers.get("Retry-After", _AGAIN_S)))
                found = server.tree_of(server.checked(answer).text)
            num_done += 1
            told(num_done)
            return found

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
        async with self._asking() as (server, http), http.stream("POST", f"{self.url}{path}", json=streamed) as answer:
            if not answer.is_success:
                await answer.aread()
            server.checked(answer)
            async for line in answer.aiter_lines():
                if chunk := server.event(line):
                    yield chunk

    def _server(self) -> _AskedServer:
        return _AskedServer(self.url, self._api_key, **_HOW)

    @asynccontextmanager
    async def _asking(self) -> AsyncIterator[tuple[_AskedServer, httpx.AsyncClient]]:
        """Yield the server, which reads what comes, and the client that asks in this event loop."""
        server, limits = self._server(), httpx.Limits(max_connections=_MOST_AT_ONCE)
        with server.failures():
            async with server.in_event_loop(limits=limits) as http:
                yield server, http
