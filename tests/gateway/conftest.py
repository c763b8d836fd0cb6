"""A model folder without weights, and an owner that plays scripted tokens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from shutil import copyfile
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.core import NO_OPENING, NOTHING_SPENT, Logprob, Opening, Request, Role
from alignedserve.errors import AlignedServeError
from alignedserve.explain.story import PartAnswer, Story, tell
from alignedserve.gateway import app as gateway_app
from alignedserve.gateway.access.adapters import Adapters
from alignedserve.gateway.access.ledger import Ledger
from alignedserve.gateway.app import make_app
from alignedserve.gateway.embed_side import VectorModel
from alignedserve.gateway.openapi import document
from alignedserve.gateway.pages import docs_page
from alignedserve.gateway.responses.keeping import ResponseKeeper
from alignedserve.gateway.settings import GatewaySettings
from alignedserve.owner.client import Delivered, Settle, ignore
from alignedserve.protocol.messages import Member
from alignedserve.text.text_model import TextModel
from alignedserve.tracing.traces import Traces
from tests.exposition import value

MODEL, MOST = "demo", 256
PATIENT_S = 60.0  # seconds: longer than any request in these tests takes, however slow the machine is


@pytest.fixture(autouse=True, scope="session")
def one_document() -> Iterator[None]:
    """Make the OpenAPI document and its page once: they take most of the time of an application, and a thousand are
    made."""
    documents = cache(document)
    pages = cache(lambda has_jobs: docs_page(documents(has_jobs)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway_app, "document", documents)
        patch.setattr(gateway_app, "docs_page", lambda described: pages(described is documents(True)))
        yield


class FakeOwner:
    """An owner that plays a script for each request, so that deliveries, faults and waits come exactly where a test
    wants them.

    A script's step is a tuple of tokens, a whole delivery, an exception to raise, or an event to wait for. The
    finish is decided as in the engine, by the request's own limits; log-probabilities are `scripted_logprob`s.
    """

    name = "gateway-0"
    members: tuple[Member, ...] = (Member("decode-0", Role.DECODE, "node-1", 7, "tcp://10.0.0.2:1"),)

    def __init__(self, *steps: Any) -> None:
        self.steps = steps
        self.ready, self.lacks_s = True, 0.0
        self.late: dict[str, float] = {}
        self.opened: list[Request] = []
        self.cancelled: list[str] = []
        self.open_now: set[str] = set()
        self.used = NOTHING_SPENT  # what a request that is cancelled has used
        self.remembered: list[PartAnswer] = []  # what parts answer about each request
        self.paused: list[str] = []
        self.resumed: list[str] = []
        self.unread: set[str] = set()  # requests that have deliveries which were not read
        self._waiting: dict[str, asyncio.Future[None]] = {}  # requests whose next step waits for an event

    def now(self) -> float:
        return time.monotonic()

    async def open(self, request: Request, settle: Settle = ignore) -> AsyncGenerator[Delivered, None]:
        self.opened.append(request)
        self.open_now.add(request.id)
        finished = False
        try:
            async for delivered in self._play(request):
                finished = delivered.finish is not None
                yield delivered
        finally:
            await asyncio.sleep(0)  # real clean-up may also wait here while its task is being cancelled
            self.open_now.discard(request.id)
            if not finished:
                self.cancelled.append(request.id)
                settle(self.used)

    def pause(self, request: str) -> None:
        self.paused.append(request)

    def resume(self, request: str) -> None:
        self.resumed.append(request)

    def has_unread(self, request: str) -> bool:
        return request in self.unread

    def end(self, request: str, error: AlignedServeError) -> None:
        if request in self._waiting:
            self._waiting.pop(request).set_exception(error)

    async def story(self, request: str) -> Story:
        return tell(request, self.remembered, (), self.now())

    async def _unless_ended(self, request: str, step: asyncio.Event) -> None:
        ended = self._waiting[request] = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(step.wait())
        try:
            await asyncio.wait({waiting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()
        finally:
            waiting.cancel()
            self._waiting.pop(request, None)

    def steps_of(self, request: Request) -> tuple[Any, ...]:
        return self.steps

    async def _play(self, request: Request) -> AsyncGenerator[Delivered, None]:
        index = 0
        for step in self.steps_of(request):
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                await self._unless_ended(request.id, step)
                continue
            if isinstance(step, Delivered):
                yield step
                if step.finish:
                    return
                continue
            ends = [request.finish(index + at, token) for at, token in enumerate(step)]
            finish = next((end for end in ends if end), None)
            tokens = tuple(step[: ends.index(finish) + 1] if finish else step)
            yield Delivered(tokens, finish, *_scripted_logprobs(request, index, tokens))
            index += len(step)
            if finish:
                return


def scripted_logprob(place: int, top: int) -> Logprob:
    """Return the log-probability of the token at this place of prompt or output. The likeliest tokens are 300, 301,
    ..."""
    return Logprob(-1.0 - place, tuple((300 + rank, -0.5 - rank) for rank in range(top)))


def _scripted_logprobs(request: Request, index: int, tokens: tuple[int, ...]) -> tuple[tuple[Logprob, ...], Opening]:
    top, of_prompt = request.sampling.logprobs, request.sampling.prompt_logprobs
    output = () if top is None else tuple(scripted_logprob(index + at, top) for at in range(len(tokens)))
    if of_prompt is None or index:
        return output, NO_OPENING
    return output, Opening(tuple(scripted_logprob(at, of_prompt) for at in range(1, len(request.prompt))))


class Gateway:
    """An application and its fake owner, called over ASGI."""

    def __init__(
        self,
        text: TextModel,
        owner: FakeOwner,
        traces: Traces | None = None,
        keeper: ResponseKeeper | None = None,
        adapters: Adapters | None = None,
        ledger: Ledger | None = None,
        embedding: VectorModel | None = None,
        **settings: Any,
    ) -> None:
        self.owner, self.text = owner, text
        given: dict[str, Any] = {"served_model_names": (MODEL,), "max_model_len": MOST, **settings}
        made = GatewaySettings(**given)
        more: dict[str, Any] = {"traces": traces, "keeper": keeper, "adapters": adapters, "embedding": embedding}
        self.app: FastAPI = make_app(owner, text, made, ledger, **more)

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        if "content" in given:
            given["headers"] = {"Content-Type": "application/json", **given.get("headers", {})}

        async def asked() -> httpx.Response:
            async with self.client() as client:
                return await asyncio.wait_for(client.request(method, path, **given), PATIENT_S)

        return asyncio.run(asked())

    def get(self, path: str, **given: Any) -> httpx.Response:
        return self.ask("GET", path, **given)

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
        return self.ask("POST", "/v1/chat/completions", json=body)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.ask("POST", "/v1/completions", json={"model": MODEL, "prompt": "Hi", **fields})

    def metric(self, wanted: str) -> float:
        return value(self.get("/metrics").text, wanted)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(DEMO_FOLDER / name, made / name)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": 2048, "max_position_embeddings": 2048}
    (made / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes, **ids}))
    (made / "generation_config.json").write_text(json.dumps({"do_sample": False, **ids}))
    return made


@pytest.fixture(scope="session")
def text(folder: Path) -> TextModel:
    return TextModel.load(folder)


def ids_of(text: TextModel, written: str) -> tuple[int, ...]:
    return tuple(text.tokenizer.encode(written, add_special_tokens=False).ids)


@pytest.fixture
def hello(text: TextModel) -> tuple[int, ...]:
    """Return the tokens of an answer, with its end token."""
    return (*ids_of(text, "Hello, naïve 😀!"), text.eos_ids[0])


def data_lines(streamed: httpx.Response) -> list[Any]:
    """Return the events of a stream as objects; [DONE] stays text."""
    assert streamed.text.endswith("\n\n")
    blocks = streamed.text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    payloads = [block.removeprefix("data: ") for block in blocks]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


class Connection:
    """A client at the level of ASGI, which can leave or stop reading at a chosen moment."""

    def __init__(self, path: str, body: bytes) -> None:
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("client", 1),
            "server": ("gateway", 80),
        }
        self._body = [{"type": "http.request", "body": body, "more_body": False}]
        self.left, self.reads = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.sent: list[Any] = []

    async def receive(self) -> Any:
        if self._body:
            return self._body.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message)


@contextmanager
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[Any]]:
    """Yield the fields of the log lines that the gateway writes inside the block."""
    lines: list[Any] = []
    caplog.clear()
    with caplog.at_level("INFO", logger="alignedserve.gateway"):
        yield lines
    lines += [record.__dict__["fields"] for record in caplog.records if record.levelname == "INFO"]
