"""The HTTP application: OpenAI's routes over an owner of requests.

What asks for tokens goes: body -> ChatRequest or CompletionRequest (openai_types) -> a Request for each choice
(admission) -> deliveries of their owner (generation) -> pieces of text (reading) -> JSON, whole or in chunks (shapes,
streaming). What of it knows nothing of HTTP serves whoever has bodies from elsewhere: `parsed`, `requests_of`,
`Reader`, and `answer_of`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, TypeAlias, TypeVar

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from alignedserve.errors import AlignedServeError
from alignedserve.gateway.access.keys import Scope
from alignedserve.gateway.access.ledger import Ledger
from alignedserve.gateway.files import Route
from alignedserve.gateway.generation import Generation
from alignedserve.gateway.http.bodies import Bodies
from alignedserve.gateway.http.metrics import Meter, Metrics
from alignedserve.gateway.http.middleware import AroundRequests, caller_of, record_of, tab_of
from alignedserve.gateway.http.refusing import on_api_error, on_http_error
from alignedserve.gateway.openai.admission import GatewaySettings, Origin, requests_of
from alignedserve.gateway.openai.errors import beyond_scope, draining, no_such_model, not_ready
from alignedserve.gateway.openai.parsing import parsed
from alignedserve.gateway.openai.promises import promised
from alignedserve.gateway.openai.reading import Reader
from alignedserve.gateway.openai.shapes import Shape, shape_of
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.gateway.openapi import document
from alignedserve.gateway.streaming import EventStream, unless_gone, whole
from alignedserve.gateway.tokenising import DetokenizeRequest, TokenizeRequest, detokenized, tokenized
from alignedserve.owner.client import OwnerClient
from alignedserve.text.text_model import TextModel

__all__ = ["GatewaySettings", "make_app"]

PATIENCE_S = 30.0  # a worker that died is back by then: until then requests wait for it
TOKENISERS = 2  # threads, of which large bodies have one; the library has no lock on Python while it works


def make_app(
    client: OwnerClient,
    text: TextModel,
    settings: GatewaySettings,
    ledger: Ledger | None = None,
    of_jobs: Sequence[Route] = (),
) -> FastAPI:
    """`of_jobs` are the routes of files and batches, where there are any.

    Set `app.state.draining` to refuse new requests while those that are open go on, and `app.state.series` where
    there are other gateways; tell `app.state.metrics` what other parts say of themselves."""
    app = FastAPI(title="AlignedServe", openapi_url=None, redirect_slashes=False)
    app.state.draining = False
    app.state.metrics = metrics = Metrics()
    app.state.series = metrics.alone
    app.add_middleware(AroundRequests, keys=settings.keys, ledger=ledger or Ledger(), metrics=metrics, now=client.now)
    if origins := settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
        )
    app.add_exception_handler(AlignedServeError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    routes = _Routes(app, client, text, settings, metrics, has_jobs=bool(of_jobs))
    for method, path, scope, answer in (
        ("GET", "/health", None, routes.health),
        ("GET", "/ready", None, routes.ready),
        ("GET", "/metrics", None, routes.metrics),
        ("GET", "/status", None, routes.status),
        ("GET", "/v1/models", Scope.GENERATE, routes.models),
        ("GET", "/v1/models/{name:path}", Scope.GENERATE, routes.model),
        ("POST", "/v1/chat/completions", Scope.GENERATE, routes.chat),
        ("POST", "/v1/completions", Scope.GENERATE, routes.completions),
        ("POST", "/tokenize", Scope.GENERATE, routes.tokenize),
        ("POST", "/detokenize", Scope.GENERATE, routes.detokenize),
        ("GET", "/openapi.json", Scope.GENERATE, routes.openapi),
        ("GET", "/version", Scope.GENERATE, routes.version),
    ):
        app.add_route(path, answer if scope is None else _within(scope, answer), methods=[method])
    for method, path, of_job in of_jobs:
        app.add_route(path, _within(Scope.BATCH, of_job), methods=[method])
    return app


Asking = TypeVar("Asking", ChatRequest, CompletionRequest)
Body = TypeVar("Body", TokenizeRequest, DetokenizeRequest)
_Answer = Callable[[HttpRequest], Awaitable[Response]]
_Convert: TypeAlias = Callable[[Body, TextModel, int], dict[str, Any]]
_Begun: TypeAlias = tuple[Callable[..., Awaitable[Response]], Generation, Shape, Meter]


def _within(scope: Scope, answer: _Answer) -> _Answer:
    """For callers whose key has this scope; what has none is open (middleware.PROBES)."""

    async def answered(http: HttpRequest) -> Response:
        if scope not in caller_of(http).scopes:
            raise beyond_scope(scope.value)
        return await answer(http)

    return answered


class _Routes:
    def __init__(
        self,
        app: FastAPI,
        client: OwnerClient,
        text: TextModel,
        settings: GatewaySettings,
        metrics: Metrics,
        has_jobs: bool,
    ) -> None:
        self._app, self._client, self._text, self._settings, self._metrics = app, client, text, settings, metrics
        self._bodies = Bodies(settings.body_limit_bytes, settings.body_limit_s)
        self._tokenisers = ThreadPoolExecutor(TOKENISERS, thread_name_prefix="tokenise")
        self._began_at, self._has_jobs = int(time.time()), has_jobs

    async def chat(self, http: HttpRequest) -> Response:
        return await self._generate(http, ChatRequest)

    async def completions(self, http: HttpRequest) -> Response:
        return await self._generate(http, CompletionRequest)

    async def models(self, _: HttpRequest) -> Response:
        cards = [self._card(name) for name in self._settings.served_model_names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if name not in self._settings.served_model_names:
            raise no_such_model(name)
        return JSONResponse(self._card(name))

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(self, _: HttpRequest) -> Response:
        if self._app.state.draining:
            raise draining()
        if not self._client.ready:
            raise not_ready()
        return JSONResponse({"status": "ready"})

    async def status(self, _: HttpRequest) -> Response:
        """For operators, who see nobody's requests here: which parts there are, and where."""
        parts = [
            {"name": one.name, "role": one.role.value, "node": one.node, "address": one.address}
            for one in self._client.members
        ]
        state = "draining" if self._app.state.draining else "ready" if self._client.ready else "not ready"
        models, scale = list(self._settings.served_model_names), dict(self._settings.scale)
        return JSONResponse({"state": state, "models": models, "parts": parts, "scale": scale})

    async def metrics(self, _: HttpRequest) -> Response:
        told = await self._app.state.series() + self._metrics.series_of_parts()
        return Response(told, media_type=CONTENT_TYPE_LATEST)

    async def _generate(self, http: HttpRequest, kind: type[Asking]) -> Response:
        if self._app.state.draining:
            raise draining()
        if self._client.lacks_s > PATIENCE_S:
            raise not_ready()
        tab_of(http).sit()
        async with self._bodies.read(http) as sent, self._bodies.turn(sent):
            answer, *begun = await self._begun(http, parsed(kind, sent))
        return await answer(http, *begun)

    async def _begun(self, http: HttpRequest, body: ChatRequest | CompletionRequest) -> _Begun:
        """All that is still needed once the body is not."""
        self._check_model(body.model)
        record, tab = record_of(http), tab_of(http)
        promise = promised(body, http.headers, self._settings.slo)
        origin = Origin(record.id, self._client.name, record.began_at, tab.caller)
        asked = body, promise, origin, self._text, self._settings.max_model_len
        # In a thread: other clients' tokens cannot wait for long prompts. In few: each may take much memory.
        requests = await asyncio.get_running_loop().run_in_executor(self._tokenisers, requests_of, *asked)
        shape = shape_of(body, requests, promise.tier, self._text)
        record.service, record.prompt_tokens = promise.service, shape.prompt_tokens
        tab.take(shape.prompt_tokens)
        meter = Meter(self._metrics, record, promise.service, self._client.now, tab.take, promise.slo)
        readers = [Reader.of(body, self._text) for _ in requests]
        generation = Generation(self._client, requests, readers, meter)
        return self._stream if body.stream else self._whole, generation, shape, meter

    async def tokenize(self, http: HttpRequest) -> Response:
        return await self._converted(http, TokenizeRequest, tokenized)

    async def detokenize(self, http: HttpRequest) -> Response:
        return await self._converted(http, DetokenizeRequest, detokenized)

    async def _converted(self, http: HttpRequest, kind: type[Body], convert: _Convert[Body]) -> Response:
        async with self._bodies.read(http) as sent, self._bodies.turn(sent):
            body = parsed(kind, sent)
            self._check_model(body.model)
            asked = body, self._text, self._settings.max_model_len
            told = await asyncio.get_running_loop().run_in_executor(self._tokenisers, convert, *asked)
        return JSONResponse(told)

    async def openapi(self, _: HttpRequest) -> Response:
        return JSONResponse(document(self._has_jobs))

    async def version(self, _: HttpRequest) -> Response:
        return JSONResponse({"version": version("alignedserve")})

    def _check_model(self, named: str | None) -> None:
        if named is not None and named not in self._settings.served_model_names:
            raise no_such_model(named)

    async def _whole(self, http: HttpRequest, generation: Generation, shape: Shape, meter: Meter) -> Response:
        try:
            answer = await unless_gone(http.receive, whole(generation, shape, meter))
            return JSONResponse(answer, headers=shape.headers)
        finally:
            await generation.close()

    async def _stream(self, http: HttpRequest, generation: Generation, shape: Shape, meter: Meter) -> Response:
        try:
            await unless_gone(http.receive, generation.begin())
        except BaseException:
            await generation.close()
            raise
        return EventStream(generation, shape, meter, self._settings.stalled_client_s)

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._began_at,
            "owned_by": "alignedserve",
            "max_model_len": self._settings.max_model_len,
        }
