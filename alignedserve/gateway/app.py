"""The HTTP application: OpenAI's routes in front of an owner of requests.

The way of a completion:

    body ─▶ ChatRequest or CompletionRequest   openai/parsing, openai/types
         ─▶ a Request for each choice          openai/requests
         ─▶ what their owner delivers          generation
         ─▶ pieces of text                     openai/reading
         ─▶ JSON, whole or in chunks           openai/shapes, streaming

`parse_body`, `make_requests`, `AnswerReader` and `make_shape` know nothing of HTTP: the job runner uses them too.
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
from alignedserve.gateway.files import Answer, HttpRoute
from alignedserve.gateway.generation import Generation
from alignedserve.gateway.http.bodies import Bodies
from alignedserve.gateway.http.error_responses import on_api_error, on_http_error
from alignedserve.gateway.http.metrics import Metrics, RequestMeter
from alignedserve.gateway.http.middleware import RequestMiddleware, caller_of, record_of, tab_of
from alignedserve.gateway.http.origins import Origins
from alignedserve.gateway.openai.errors import beyond_scope, draining, no_such_model, not_ready
from alignedserve.gateway.openai.parsing import parse_body
from alignedserve.gateway.openai.promises import make_promise
from alignedserve.gateway.openai.reading import AnswerReader
from alignedserve.gateway.openai.requests import Origin, make_requests
from alignedserve.gateway.openai.shapes import AnswerShape, make_shape
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.gateway.openapi import document
from alignedserve.gateway.settings import GatewaySettings
from alignedserve.gateway.streaming import EventStream, unless_gone, whole_answer
from alignedserve.gateway.tokenising import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from alignedserve.owner.client import OwnerClient
from alignedserve.text.text_model import TextModel

PATIENCE_S = 30.0  # requests wait so long for workers to be ready: a worker that died is back by then
TOKENISERS = 2  # threads, of which large bodies use one; the library releases Python's lock while it works


def make_app(
    client: OwnerClient,
    text: TextModel,
    settings: GatewaySettings,
    ledger: Ledger | None = None,
    job_routes: Sequence[HttpRoute] = (),
) -> FastAPI:
    """Return the application; `job_routes` are the routes of files and batches, if the deployment has them.

    Set `app.state.draining` to refuse new requests while open requests run on. Set `app.state.series` if there are
    other gateways. Give figures that other parts report to `app.state.metrics`."""
    app = FastAPI(title="AlignedServe", openapi_url=None, redirect_slashes=False)
    app.state.draining = False
    app.state.metrics = metrics = Metrics()
    app.state.series = metrics.series_alone
    app.add_middleware(
        RequestMiddleware,
        keys=settings.keys,
        origins=Origins(settings.cors_origins, settings.names),
        ledger=ledger or Ledger(),
        metrics=metrics,
        now=client.now,
    )
    if origins := settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
        )
    app.add_exception_handler(AlignedServeError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    routes = _Routes(app, client, text, settings, metrics, has_jobs=bool(job_routes))
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
        app.add_route(path, answer if scope is None else _restrict(scope, answer), methods=[method])
    for method, path, answer_job in job_routes:
        app.add_route(path, _restrict(Scope.BATCH, answer_job), methods=[method])
    return app


GenerationBody = TypeVar("GenerationBody", ChatRequest, CompletionRequest)
TextBody = TypeVar("TextBody", TokenizeRequest, DetokenizeRequest)
_Convert: TypeAlias = Callable[[TextBody, TextModel, int], dict[str, Any]]
_Begun: TypeAlias = tuple[Callable[..., Awaitable[Response]], Generation, AnswerShape, RequestMeter]


def _restrict(scope: Scope, answer: Answer) -> Answer:
    """Return a route for callers whose key has this scope; routes without a scope are open (middleware.PROBES)."""

    async def answer_in_scope(http: HttpRequest) -> Response:
        if scope not in caller_of(http).scopes:
            raise beyond_scope(scope.value)
        return await answer(http)

    return answer_in_scope


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
        """Answer which parts are running, and where. Operators read this; it shows nothing of any request."""
        parts = [
            {"name": member.name, "role": member.role.value, "node": member.node, "address": member.address}
            for member in self._client.members
        ]
        state = "draining" if self._app.state.draining else "ready" if self._client.ready else "not ready"
        models, scale = list(self._settings.served_model_names), dict(self._settings.scale)
        return JSONResponse({"state": state, "models": models, "parts": parts, "scale": scale})

    async def metrics(self, _: HttpRequest) -> Response:
        series = await self._app.state.series() + self._metrics.series_of_parts()
        return Response(series, media_type=CONTENT_TYPE_LATEST)

    async def _generate(self, http: HttpRequest, kind: type[GenerationBody]) -> Response:
        if self._app.state.draining:
            raise draining()
        if self._client.lacks_s > PATIENCE_S:
            raise not_ready()
        tab_of(http).take_place()
        async with self._bodies.read(http) as sent, self._bodies.turn(sent):
            answer, *begun = await self._begin(http, parse_body(kind, sent))
        return await answer(http, *begun)

    async def _begin(self, http: HttpRequest, body: ChatRequest | CompletionRequest) -> _Begun:
        """Return how to answer and what that needs, so that the body's memory is free while the requests run."""
        self._check_model(body.model)
        record, tab = record_of(http), tab_of(http)
        promise = make_promise(body, http.headers, self._settings.slo)
        origin = Origin(record.id, self._client.name, record.began_at, tab.caller)
        arguments = body, promise, origin, self._text, self._settings.max_model_len
        # In a thread, so that other clients' tokens do not wait for long prompts; in few threads, because each may
        # take much memory.
        requests = await asyncio.get_running_loop().run_in_executor(self._tokenisers, make_requests, *arguments)
        shape = make_shape(body, requests, promise.tier, self._text)
        record.service, record.prompt_tokens = promise.service, shape.prompt_tokens
        tab.take(shape.prompt_tokens)
        meter = RequestMeter(self._metrics, record, promise.service, self._client.now, tab.take, promise.slo)
        readers = [AnswerReader.from_body(body, self._text) for _ in requests]
        generation = Generation(self._client, requests, readers, meter)
        return self._stream if body.stream else self._whole, generation, shape, meter

    async def tokenize(self, http: HttpRequest) -> Response:
        return await self._convert(http, TokenizeRequest, tokenize)

    async def detokenize(self, http: HttpRequest) -> Response:
        return await self._convert(http, DetokenizeRequest, detokenize)

    async def _convert(self, http: HttpRequest, kind: type[TextBody], convert: _Convert[TextBody]) -> Response:
        async with self._bodies.read(http) as sent, self._bodies.turn(sent):
            body = parse_body(kind, sent)
            self._check_model(body.model)
            arguments = body, self._text, self._settings.max_model_len
            answer = await asyncio.get_running_loop().run_in_executor(self._tokenisers, convert, *arguments)
        return JSONResponse(answer)

    async def openapi(self, _: HttpRequest) -> Response:
        return JSONResponse(document(self._has_jobs))

    async def version(self, _: HttpRequest) -> Response:
        return JSONResponse({"version": version("alignedserve")})

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._settings.served_model_names:
            raise no_such_model(name)

    async def _whole(
        self, http: HttpRequest, generation: Generation, shape: AnswerShape, meter: RequestMeter
    ) -> Response:
        try:
            answer = await unless_gone(http.receive, whole_answer(generation, shape, meter))
            return JSONResponse(answer, headers={**shape.headers, **generation.headers})
        finally:
            await generation.close()

    async def _stream(
        self, http: HttpRequest, generation: Generation, shape: AnswerShape, meter: RequestMeter
    ) -> Response:
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
