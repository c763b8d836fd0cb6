"""All kinds of clients at once: chats, conversations, clients that leave, wrong requests, documents, a batch job."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from urllib.parse import urlparse

import httpx

from alignedserve.lab.benchmarks.common.batches import ENDED, Batches, jsonl
from alignedserve.lab.benchmarks.common.chats import ANSWER, CHAT, DOCUMENT, SUMMARY
from alignedserve.lab.benchmarks.common.serving import NAME, Answer, ask, ask_chat

_VOCABULARY = 2_000  # of the demo model, about
_TURNS, _THINKS_S = 4, 2.0
_LEAVES_AFTER, _LEAVES_EVERY_S = 4, 3.0  # lines of a stream; seconds
_WRONG_EVERY_S = 2.0
_DOCUMENTS, _DOCUMENTS_EVERY_S = 2, 2.0  # clients with a document each; from a document's end to the next
_LINES, _LINE, _LINE_OUTPUT = 100, (60, 300), (20, 60)  # of a batch; tokens of a line
_BATCHES_EVERY_S = 10.0  # from a batch's end to the next
_WORDS = "the order of last week has not come yet and our address is new please say what we should do now".split()
_REFUSED = re.compile(r"\b(429|503)\b")
# Path, body, and the statuses that may answer it.
_WRONG: list[tuple[str, object, tuple[int, ...]]] = [
    ("/v1/completions", "{", (400, 422)),
    ("/v1/completions", {"model": NAME, "prompt": [1, 2], "max_tokens": -1}, (400, 422)),
    ("/v1/completions", {"model": NAME, "prompt": list(range(3, 1_900)), "max_tokens": 10_000}, (400, 422)),
    ("/v1/completions", {"model": "another", "prompt": "Hi"}, (404,)),
    ("/v1/chat/completions", {"model": NAME, "messages": []}, (400, 422)),
    ("/v1/chat/completions", {"model": NAME, "messages": [{"role": "user"}], "temperature": 9}, (400, 422)),
    ("/v1/chat/completions", {"model": NAME, "messages": "x" * 100_000}, (400, 422)),
    ("/v1/nowhere", {}, (404, 405)),
]


@dataclass
class SeenByClients:
    """What clients have got since it was last taken."""

    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)  # by kind of client
    errors: list[str] = field(default_factory=list)

    def hear(self, answer: Answer) -> None:
        if answer.is_whole:
            self.ttfts.append(answer.ttft_s)
            self.gaps += answer.gaps
        else:
            self.errors.append(f"chat: {answer.status}, {len(answer.tokens)} tokens")


class MixedLoad:
    def __init__(self, url: str, rate: float, seed: int, *, may_refuse: bool = False) -> None:
        """`may_refuse`: an answer 429 or 503 is no error."""
        self._url, self._rate, self._draw, self._may_refuse = url, rate, Random(seed), may_refuse
        self._seen = SeenByClients()
        self._chats: set[asyncio.Task[None]] = set()

    def take(self) -> SeenByClients:
        """Return what was seen since the last call."""
        seen, self._seen = self._seen, SeenByClients()
        if self._may_refuse:
            errors = [error for error in seen.errors if not _REFUSED.search(error)]
            seen.done["refused"] += len(seen.errors) - len(errors)
            seen.errors = errors
        return seen

    async def play(self) -> None:
        """Run all clients until cancelled."""
        kinds: list[Callable[[], Awaitable[None]]] = [self._leave, self._ask_wrongly, self._converse, self._batch]
        kinds += [self._document] * _DOCUMENTS
        try:
            await asyncio.gather(self._come_and_chat(), *map(self._forever, kinds))
        finally:
            for chat in self._chats:
                chat.cancel()

    async def _forever(self, client: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await client()
                self._seen.done[client.__name__.strip("_")] += 1
            except (OSError, httpx.HTTPError, AssertionError) as error:
                self._seen.errors.append(f"{client.__name__}: {error!r}"[:200])
                await asyncio.sleep(1.0)

    async def _come_and_chat(self) -> None:
        while True:
            await self._pause(1 / self._rate)
            chat = asyncio.create_task(self._chat())
            self._chats.add(chat)
            chat.add_done_callback(self._chats.discard)

    async def _chat(self) -> None:
        self._seen.done["chat"] += 1
        try:
            self._seen.hear(await ask(self._url, self._prompt(CHAT), self._draw.randint(*ANSWER)))
        except OSError as error:
            self._seen.errors.append(f"chat: {error!r}")

    async def _converse(self) -> None:
        messages = [{"role": "system", "content": self._text(150)}]
        for _ in range(_TURNS):
            messages.append({"role": "user", "content": self._text(self._draw.randint(5, 60))})
            answer = await ask_chat(self._url, messages, self._draw.randint(*ANSWER))
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            await self._pause(_THINKS_S)

    async def _leave(self) -> None:
        """Ask for a long stream, and close the connection after some tokens."""
        address = urlparse(self._url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        body = json.dumps({"model": NAME, "prompt": self._prompt(CHAT), "max_tokens": 900, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.hostname}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        for _ in range(8 + _LEAVES_AFTER):  # the answer's head has lines too
            await reader.readline()
        writer.close()
        await self._pause(_LEAVES_EVERY_S)

    async def _ask_wrongly(self) -> None:
        path, body, statuses = self._draw.choice(_WRONG)
        content = body if isinstance(body, str) else json.dumps(body)
        async with httpx.AsyncClient(base_url=self._url, timeout=60, trust_env=False) as http:
            answer = await http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code in statuses, f"{path} {content[:60]}: {answer.status_code} {answer.text[:80]}"
        await self._pause(_WRONG_EVERY_S)

    async def _document(self) -> None:
        most = self._draw.randint(*SUMMARY)
        answer = await ask(self._url, self._prompt(DOCUMENT), most, service_tier="flex")
        assert answer.is_whole, f"status {answer.status}"
        await self._pause(_DOCUMENTS_EVERY_S)

    async def _batch(self) -> None:
        batches = Batches(self._url)
        try:
            file = await batches.upload(jsonl(self._line() for _ in range(_LINES)))
            batch = await batches.until(await batches.submit(file), *ENDED)
            assert batch["request_counts"]["completed"] == _LINES, batch["request_counts"]
            assert await batches.num_lines(batch["output_file_id"]) == _LINES
        finally:
            await batches.close()
        await self._pause(_BATCHES_EVERY_S)

    async def _pause(self, mean_s: float) -> None:
        await asyncio.sleep(self._draw.expovariate(1 / mean_s))

    def _line(self) -> dict[str, object]:
        return {"model": NAME, "prompt": self._prompt(_LINE), "max_tokens": self._draw.randint(*_LINE_OUTPUT)}

    def _prompt(self, lengths: tuple[int, int]) -> list[int]:
        return [self._draw.randrange(3, _VOCABULARY) for _ in range(self._draw.randint(*lengths))]

    def _text(self, words: int) -> str:
        return " ".join(self._draw.choices(_WORDS, k=words))
