"""All kinds of clients at once: chats, conversations, clients that leave, wrong requests, documents, a batch job.

Streams are played by the client of `alignedserve bench`: prompts as token ids, those of conversations as messages.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from alignedserve.cli.remote.options import BatchOptions
from alignedserve.http_client import RemoteServer
from alignedserve.lab.bench.core import Dialect
from alignedserve.lab.bench.job import file_of, lines_of
from alignedserve.lab.bench.wording import IdWording, WordWording
from alignedserve.lab.benchmarks.common.serving import NAME, player_of
from alignedserve.lab.benchmarks.common.simulating import save_load
from alignedserve.lab.cli.bench import ServedJob
from alignedserve.lab.loads.figures.request_figures import gaps_s, has_finished, ttft_s
from alignedserve.lab.loads.workload.spec import read_workload

_ENDLESS_S = 1e9
_CHAT = {"prompt": "32-256", "output": "16-96"}
_DOCUMENTS = {"name": "documents", "service": "be", "prompt": "512-1024", "output": "32-128", "rate": 0.5}
_TALK = {"name": "talk", "prompt": "5-60", "output": "16-96", "turns": 4, "system": 150, "think_s": "exp:2:60"}
_TALK |= {"arrivals": "closed", "replace": True, "in_flight": 1}
_LEAVES = {"name": "leave", "prompt": "32-256", "output": 900, "leaving_share": 1, "patience_s": 0.5, "rate": 0.3}
_BATCH = "sizes:service=be,prompt=60-300,output=20-60,arrivals=at_once,num_requests=100"
_WEEK_S = 7 * 86_400.0
_WRONG_EVERY_S, _BATCHES_EVERY_S = 2.0, 10.0  # means
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

    ttfts: list[float] = field(default_factory=list)  # of chats, as the gaps
    gaps: list[float] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)  # by kind of client
    errors: list[str] = field(default_factory=list)


class MixedLoad:
    def __init__(self, url: str, rate: float, seed: int, *, may_refuse: bool = False) -> None:
        """`may_refuse`: an answer 429 or 503 is no error."""
        self._url, self._draw, self._may_refuse = url, Random(seed), may_refuse
        self._seen = SeenByClients()
        self._known = set[str]()  # requests that have been taken
        chats = {"name": "chat", "rate": rate, **_CHAT}
        with TemporaryDirectory() as folder:
            ids = save_load(Path(folder) / "ids.yaml", _ENDLESS_S, chats, _LEAVES, _DOCUMENTS)
            words = save_load(Path(folder) / "words.yaml", _ENDLESS_S, _TALK)
            wordings = {ids: IdWording(Random()), words: WordWording(Random())}
            self._plays = [player_of(url, file, wording, seed) for file, wording in wordings.items()]

    def take(self) -> SeenByClients:
        """Return what was seen since the last call."""
        seen, self._seen = self._seen, SeenByClients()
        for _, test in self._plays:
            for request in test.record().requests:
                if request.id not in self._known:
                    self._known.add(request.id)
                    kind = request.id.partition("-")[0]
                    seen.done[kind] += 1
                    if kind == "chat" and has_finished(request):
                        seen.ttfts.append(ttft_s(request))
                        seen.gaps += gaps_s(request)
            for kind, found in test.failures.items():
                seen.errors += [f"{kind}: {failure.text}"[:200] for failure in found]
            test.failures.clear()
        if self._may_refuse:
            errors = [error for error in seen.errors if not _REFUSED.search(error)]
            seen.done["refused"] += len(seen.errors) - len(errors)
            seen.errors = errors
        return seen

    async def play(self) -> None:
        """Run all clients until they are stopped."""
        own = [asyncio.create_task(self._forever(client)) for client in (self._ask_wrongly, self._batch)]
        try:
            await asyncio.gather(*(player.play() for player, _ in self._plays))
        finally:
            for task in own:
                task.cancel()
            await asyncio.gather(*own, return_exceptions=True)

    def stop(self) -> None:
        for player, _ in self._plays:
            player.stop()

    async def _forever(self, client: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await client()
                self._seen.done[client.__name__.strip("_")] += 1
            except Exception as error:
                self._seen.errors.append(f"{client.__name__}: {error!r}"[:200])
                await asyncio.sleep(1.0)

    async def _ask_wrongly(self) -> None:
        path, body, statuses = self._draw.choice(_WRONG)
        content = body if isinstance(body, str) else json.dumps(body)
        async with RemoteServer(self._url, None, silence_s=60.0).in_event_loop() as http:
            headers = {"Content-Type": "application/json"}
            answer = await http.post(f"{self._url}{path}", content=content, headers=headers)
        assert answer.status_code in statuses, f"{path} {content[:60]}: {answer.status_code} {answer.text[:80]}"
        await asyncio.sleep(self._draw.expovariate(1 / _WRONG_EVERY_S))

    async def _batch(self) -> None:
        lines = lines_of(read_workload(_BATCH), self._draw.getrandbits(31))
        text = file_of(lines, IdWording(Random()), Dialect(NAME))
        job = await ServedJob.submit(BatchOptions(f"{self._url}/v1"), text, "/v1/completions", _WEEK_S)
        try:
            await job.follow(lambda _look: None)
            assert job.looks[-1].completed == len(lines), job.looks[-1]
        finally:
            await job.cancel()
        await asyncio.sleep(self._draw.expovariate(1 / _BATCHES_EVERY_S))
