"""HTTP requests of a client in Python: whole answers and streams. What goes wrong is an AskError of one line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import httpx

from alignedserve.cli.remote.server import said_by
from alignedserve.errors import AskError

Body: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]

_MOST_AT_ONCE = 256  # requests of one call: more than a worker runs in a step, fewer than a queue takes
_TIMEOUT = httpx.Timeout(None, connect=10.0)  # a document may wait for hours behind others
_BUSY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
_AGAIN_S = 1.0  # where the server does not say when
_DATA, _DONE = "data: ", "[DONE]"


class ServerCalls:
    """Asks a server with OpenAI's API."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._verify = not self._url.startswith("http:")  # reading all certificates takes longer than a question

    @property
    def url(self) -> str:
        return self._url

    def model(self) -> str:
        """Return the name of the first model that the server lists."""
        with self._plainly(), self._client() as http:
            return str(_answer(http.get(f"{self._url}/v1/models"))["data"][0]["id"])

    def weights(self) -> dict[str, str]:
        """Return how each worker keeps the weights of its model."""
        with self._plainly(), self._client() as http:
            return dict(_answer(http.get(f"{self._url}/status")).get("weights", {}))

    def one(self, path: str, body: Body) -> Answer:
        with self._plainly(), self._client() as http:
            return _answer(http.post(f"{self._url}{path}", json=body))

    async def all_of(self, path: str, bodies: Sequence[Body], told: Callable[[int], None]) -> list[Answer]:
        """Return the answers in the order of the bodies, and tell how many there are. A busy server is asked again."""
        slots, num_done = asyncio.Semaphore(_MOST_AT_ONCE), 0

        async def ask(body: Body) -> Answer:
            nonlocal num_done
            async with slots:
                while (response := await http.post(f"{self._url}{path}", json=body)).status_code in _BUSY:
                    await asyncio.sleep(float(response.headers.get("Retry-After", _AGAIN_S)))
                answer = _answer(response)
            num_done += 1
            told(num_done)
            return answer

        with self._plainly():
            async with self._async_client() as http:
                tasks = [asyncio.create_task(ask(body)) for body in bodies]
                try:
                    return await asyncio.gather(*tasks)
                finally:  # where one failed, or nobody waits any more
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

    def events(self, path: str, body: Body) -> Iterator[Answer]:
        """Yield the chunks of a streamed answer; where nobody takes them any more, the request is cancelled."""
        with (
            self._plainly(),
            self._client() as http,
            http.stream("POST", f"{self._url}{path}", json={**body, "stream": True}) as response,
        ):
            if response.is_error:
                response.read()
                _answer(response)
            yield from filter(None, map(_chunk, response.iter_lines()))

    async def events_async(self, path: str, body: Body) -> AsyncIterator[Answer]:
        """Yield the same in the caller's event loop."""
        with self._plainly():
            async with (
                self._async_client() as http,
                http.stream("POST", f"{self._url}{path}", json={**body, "stream": True}) as response,
            ):
                if response.is_error:
                    await response.aread()
                    _answer(response)
                async for line in response.aiter_lines():
                    if chunk := _chunk(line):
                        yield chunk

    def _client(self) -> httpx.Client:
        return httpx.Client(headers=self._headers, timeout=_TIMEOUT, trust_env=False, verify=self._verify)

    def _async_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=_MOST_AT_ONCE)
        options: dict[str, Any] = {"trust_env": False, "verify": self._verify, "limits": limits}
        return httpx.AsyncClient(headers=self._headers, timeout=_TIMEOUT, **options)

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AskError(f"{self._url} does not answer: {error or type(error).__name__}") from error


def _answer(response: httpx.Response) -> Answer:
    """Return the answer, or raise what the server complains of."""
    if response.is_success:
        return dict(response.json())
    raise AskError(f"the server refuses with {response.status_code}: {said_by(response)}")


def _chunk(line: str) -> Answer | None:
    """Return the chunk of a line of server-sent events; None where the line has none."""
    if not line.startswith(_DATA) or line == _DATA + _DONE:
        return None
    chunk = dict(json.loads(line.removeprefix(_DATA)))
    if "error" in chunk:
        raise AskError(f"the server gave up: {chunk['error']['message']}")
    return chunk
