"""The HTTP application: OpenAI's routes in front of an owner of requests.

The way of a completion:

    body ─▶ ChatRequest or CompletionRequest   openai/strict, openai/types
         ─▶ a Request for each choice          openai/requests
         ─▶ what their owner delivers          generation
         ─▶ pieces of text                     openai/reading
         ─▶ JSON, whole or in chunks           openai/shapes, exchanges

`parse_body`, `make_requests`, `AnswerReader` and `make_shape` know nothing of HTTP: the job runner uses them too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from json import dumps
from typing import Any, TypeAlias, TypeVar

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from alignedserve.config.sections import JobsConfig
from alignedserve.core import Adapter
from alignedserve.errors import AdapterError, AlignedServeError
from alignedserve.fallbacks import fallbacks
from alignedserve.gateway.access.adapters import Adapters
from alignedserve.gateway.access.keys import ANONYMOUS, USUAL_SCOPES, Scope
from alignedserve.gateway.access.ledger import Ledger
from alignedserve.gateway.dashboard import Dashboard, GatewayHead
from alignedserve.gateway.embed_side import VectorModel
from alignedserve.gateway.embedding import VectorRoutes
from alignedserve.gateway.exchanges import ChatExchange, answer_body, ignored_header
from alignedserve.gateway.files import Answer, HttpRoute, list_object
from alignedserve.gateway.http.error_responses import on_api_error, on_http_error
from alignedserve.gateway.http.middleware import PAGE, OpenCalls, RequestMiddleware, caller_of, tab_of
from alignedserve.gateway.http.origins import Origins, PagesOfOrigins
from alignedserve.gateway.http.scraping import Scrapes
from alignedserve.gateway.llama_cpp import LlamaRoutes
from alignedserve.gateway.messages import MessageRoutes
from alignedserve.gateway.openai.errors import ApiError, draining, invalid, not_ready
from alignedserve.gateway.openai.requests import detokenize, tokenize
from alignedserve.gateway.openai.shapes import make_shape
from alignedserve.gateway.openai.streaming import json_response
from alignedserve.gateway.openai.types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FimRequest,
    LoadAdapter,
    TokenizeRequest,
    UnloadAdapter,
    unread_variables,
)
from alignedserve.gateway.openapi import document
from alignedserve.gateway.pages import JSON, docs_page, front_answer, page_answer
from alignedserve.gateway.responding import ResponseRoutes
from alignedserve.gateway.responses.keeping import ResponseKeeper
from alignedserve.gateway.settings import GatewaySettings
from alignedserve.gateway.starting import Starter
from alignedserve.metrics.parts import PartMetrics
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.owner.client import OwnerClient
from alignedserve.text.text_model import TextModel
from alignedserve.tracing.traces import Traces


def make_app(
    client: OwnerClient,
    text: TextModel,
    settings: GatewaySettings,
    ledger: Ledger | None = None,
    job_routes: Sequence[HttpRoute] = (),
    traces: Traces | None = None,
    keeper: ResponseKeeper | None = None,
    adapters: Adapters | None = None,
    embedding: VectorModel | None = None,
) -> FastAPI:
    """Return the application; `job_routes` are the routes of files and batches, if the deployment has them, `keeper`
    keeps responses, and clients may choose `adapters` as their model, or `embedding` for vectors.

    Set `app.state.draining` to refuse new requests while open requests run on. Set `app.state.scrapes.owners` if there
    are other owners, and `app.state.calls.most` to the number of connections. Call `app.state.end_revoked` when keys
    have changed. Give figures that other parts report to `app.state.parts` and to `app.state.dashboard`."""
    app = FastAPI(title="AlignedServe", openapi_url=None, redirect_slashes=False)
    app.state.draining = False
    named = settings.served_model_names[0], settings.metrics_prefix
    told = client.now, client.name, settings.keys.knows_name, settings.prices
    app.state.metrics = metrics = RequestMetrics(*named, *told)
    more = traces or Traces(), lambda: bool(app.state.draining), adapters, embedding
    starter = Starter(client, text, settings, metrics, *more)
    app.state.parts = parts = PartMetrics(*named, lambda: starter.whole.members)
    app.state.scrapes = Scrapes(parts, lambda: asyncio.gather(metrics.text()))  # of this gateway alone
    app.state.calls = calls = OpenCalls()
    app.add_middleware(
        RequestMiddleware,
        calls=calls,
        keys=settings.keys,
        origins=(origins := Origins(settings.cors_origins, settings.names, settings.is_exposed)),
        ledger=ledger or Ledger(),
        metrics=metrics,
        now=client.now,
        on_end=starter.explaining.note_end,
    )
    app.add_middleware(PagesOfOrigins, origins=origins)
    app.add_exception_handler(AlignedServeError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    described = document(bool(job_routes))
    routes = _Routes(app, starter, described)
    app.state.dashboard = dashboard = Dashboard(starter.whole, metrics.log, routes.head, settings.stalled_client_s)
    app.state.end_revoked = lambda: calls.end_revoked(settings.keys)
    own = ResponseRoutes(starter, keeper or ResponseKeeper(None, JobsConfig())).routes, job_routes
    for scopes, table in _tables(starter, routes, dashboard, *own):
        for method, path, answer in table:
            app.add_route(path, _restrict(scopes, answer, settings) if scopes else answer, methods=[method])
    return app


def _tables(
    starter: Starter,
    routes: _Routes,
    dashboard: Dashboard,
    responses: Sequence[HttpRoute],
    jobs: Sequence[HttpRoute],
) -> tuple[tuple[tuple[Scope, ...], Sequence[HttpRoute]], ...]:
    """Return the routes in groups. A key needs at least one of the scopes beside its group."""
    unscoped = (
        ("GET", "/", routes.front),
        ("GET", "/docs", routes.docs),
        ("GET", "/live", _always(JSONResponse, {"status": "alive"})),  # what does not answer should be started again
        ("GET", "/health", routes.health),
        ("GET", "/ready", routes.ready),
        ("GET", "/status", routes.status),
        ("GET", "/v1/requests/{id}/timeline", starter.explaining.timeline),
    )
    generating = (
        ("GET", "/v1/models", routes.models),
        ("GET", "/v1/models/{name:path}", routes.model),
        ("POST", "/v1/chat/completions", partial(answer_body, starter, ChatRequest, routes.begin)),
        ("POST", "/v1/completions", partial(answer_body, starter, CompletionRequest, routes.begin)),
        ("POST", "/v1/fim/completions", partial(answer_body, starter, FimRequest, routes.begin)),
        ("POST", "/tokenize", partial(routes.convert, TokenizeRequest, tokenize)),
        ("POST", "/detokenize", partial(routes.convert, DetokenizeRequest, detokenize)),
        ("GET", "/openapi.json", routes.openapi),
        ("GET", "/version", routes.version),
        *responses,
        *MessageRoutes(starter).routes,
        *LlamaRoutes(starter).routes,
        *VectorRoutes(starter).routes,
    )
    changing = (
        ("POST", "/v1/load_lora_adapter", routes.load_adapter),
        ("POST", "/v1/unload_lora_adapter", routes.unload_adapter),
    )
    told_of_all = *dashboard.routes, ("GET", f"{PAGE}/requests/{{id}}", starter.explaining.of_anybody)
    return (
        ((), unscoped),
        ((Scope.GENERATE,), generating),
        ((Scope.ADAPTERS,), changing),
        ((Scope.METRICS, Scope.DASHBOARD), (("GET", "/metrics", routes.metrics),)),
        ((Scope.DASHBOARD,), told_of_all),
        ((Scope.BATCH,), jobs),
    )


T = TypeVar("T")
TextBody = TypeVar("TextBody", TokenizeRequest, DetokenizeRequest)
_Convert: TypeAlias = Callable[[TextBody, TextModel, int], tuple[dict[str, Any], int]]


def _restrict(scopes: Sequence[Scope], answer: Answer, settings: GatewaySettings) -> Answer:
    """Return a route for callers whose key has one of these scopes; routes without scopes are open to all."""

    async def answer_in_scope(http: HttpRequest) -> Response:
        caller = caller_of(http)
        if settings.is_exposed and caller is ANONYMOUS and USUAL_SCOPES.isdisjoint(scopes):
            message = "other machines reach this server, and it has no keys: start it with one that has the scope "
            raise ApiError(403, message + scopes[0].value, code="insufficient_scope")
        if caller.scopes.isdisjoint(scopes):
            message = f"this API key does not allow that: it lacks the scope {scopes[0].value}"
            raise ApiError(403, message, code="insufficient_scope")
        http.state.scopes = scopes
        return await answer(http)

    return answer_in_scope


def _always(answer: Callable[[T], Response], told: T) -> Answer:
    """Return a route whose answer is always made of the same."""

    async def answer_same(_: HttpRequest) -> Response:
        return answer(told)

    return answer_same


class _Routes:
    def __init__(self, app: FastAPI, starter: Starter, described: Mapping[str, Any]) -> None:
        self._app, self._starter, self._docs = app, starter, docs_page(described)
        self._described = dumps(described, ensure_ascii=False, separators=(",", ":"))
        self._client, self._text, self._settings = starter.whole, starter.text, starter.settings
        self._began_at = int(time.time())

    async def models(self, http: HttpRequest) -> Response:
        cards = [self._card(name) for name in self._starter.model_names]
        cards += [self._adapter_card(adapter, http) for adapter, _ in self._starter.adapters.loaded.values()]
        return JSONResponse(list_object([card["id"] for card in cards], cards, has_more=False))

    async def model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        _, adapter = self._starter.vector_model(name)
        return JSONResponse(self._card(name) if adapter is None else self._adapter_card(adapter, http))

    async def health(self, _: HttpRequest) -> Response:
        """Answer whether requests are served, and what does not work in any part; why, only /status says, to operators.

        Unlike /ready it goes on while the server drains, since what is open is served."""
        if not self._client.ready:
            raise not_ready()
        fallen = [{name: said for name, said in fallback.items() if name != "why"} for fallback in self._fallbacks()]
        return JSONResponse({"status": "serving", "fallbacks": fallen})

    async def ready(self, _: HttpRequest) -> Response:
        if self._app.state.draining:
            raise draining()
        if not self._client.ready:
            raise not_ready()
        slo = self._settings.slo
        is_known = self._settings.machine is not None or None not in (slo.ttft_ms, slo.tbt_ms)
        return JSONResponse({"status": "ready", "promise": self._promise() if is_known else None})

    async def status(self, http: HttpRequest) -> Response:
        """Answer whether requests are taken, and by which models; operators also which parts are running, and where.
        Nothing of any request is shown."""
        state, models, _ = self.head()
        if not self._has(http, Scope.DASHBOARD):
            return JSONResponse({"state": state, "models": list(models), "promise": self._promise()})
        parts = [
            {"name": member.name, "role": member.kind.value, "node": member.node, "address": member.address}
            for member in self._client.members
        ]
        return JSONResponse(
            {
                "state": state,
                "models": list(models),
                "promise": self._promise(),
                "parts": parts,
                "late": [{"part": part, "step_s": late_s} for part, late_s in self._client.late.items()],
                "scale": dict(self._settings.scale),
                "fallbacks": self._fallbacks(),
                "weights": self._app.state.parts.weights(),
            }
        )

    def _fallbacks(self) -> list[dict[str, str]]:
        """Return what does not work in this process and in the parts that report to it."""
        told: PartMetrics = self._app.state.parts
        own = [(self._client.name, fallback) for fallback in fallbacks()]
        return [{"part": part, **asdict(fallback)} for part, fallback in (*own, *told.fallbacks())]

    def head(self) -> GatewayHead:
        """Return what this gateway says of itself: its state, its models and its promise."""
        state = "draining" if self._app.state.draining else "ready" if self._client.ready else "not ready"
        return state, self._starter.model_names, self._settings.usual.slo

    def _promise(self) -> dict[str, float | str] | None:
        """Return what chats are promised that ask for nothing; None where the model writes no text."""
        rule = self._text.pooled
        return self._settings.usual.told if rule is None or rule.generates else None

    async def metrics(self, _: HttpRequest) -> Response:
        scrapes: Scrapes = self._app.state.scrapes
        return Response(await scrapes.text(), media_type=CONTENT_TYPE_LATEST)

    async def begin(self, http: HttpRequest, body: ChatRequest | CompletionRequest) -> ChatExchange:
        started = await self._starter.start(http, body)
        shape = make_shape(body, started.requests, started.promise.tier, self._text)
        return ChatExchange(started, bool(body.stream), shape.ignored, shape)

    async def convert(self, kind: type[TextBody], convert: _Convert[TextBody], http: HttpRequest) -> Response:
        async with self._starter.read(http, kind) as body:
            model, _ = self._starter.vector_model(body.model)
            arguments = body, model.text, model.max_model_len
            answer, num_tokens = await self._starter.in_thread(http, partial(convert, *arguments))
            unread = unread_variables(getattr(body, "chat_template_kwargs", None), self._text)
        tab_of(http).convert(num_tokens)
        return json_response(answer, ignored_header(unread), self._settings.stalled_client_s)

    async def load_adapter(self, http: HttpRequest) -> Response:
        async with self._starter.read(http, LoadAdapter) as body:
            name, models = body.lora_name, self._starter.model_names
        load = partial(self._starter.adapters.load, name, body.lora_path, models)
        try:
            await self._starter.in_thread(http, load)  # it reads all files of the adapter
        except AdapterError as error:
            raise invalid(str(error), code="invalid_lora", logged="the adapter cannot be loaded") from error
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, http: HttpRequest) -> Response:
        async with self._starter.read(http, UnloadAdapter) as body:
            name = body.lora_name
        if not self._starter.adapters.unload(name):
            message = f"no adapter {name!r:.80} is loaded: see /v1/models"
            raise ApiError(404, message, param="lora_name", code="model_not_found")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def version(self, _: HttpRequest) -> Response:
        return JSONResponse({"version": _version()})

    async def front(self, http: HttpRequest) -> Response:
        settings = self._settings
        has_keys, is_chat = bool(settings.keys), self._text.template is not None
        return front_answer(http, _version(), settings.listed_names, has_keys, is_chat)

    async def docs(self, http: HttpRequest) -> Response:
        return page_answer(self._docs, http)

    async def openapi(self, http: HttpRequest) -> Response:
        return page_answer(self._described, http, JSON)

    def _card(self, name: str) -> dict[str, Any]:
        """Return what OpenAI's and Anthropic's clients look for."""
        model, _ = self._starter.vector_model(name)
        since = datetime.fromtimestamp(self._began_at, timezone.utc)
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": self._began_at,
            "created_at": since.isoformat().replace("+00:00", "Z"),
            "owned_by": "alignedserve",
            "max_model_len": model.longest,
            "promise": None if model is self._starter.embedding else self._promise(),
        }

    def _adapter_card(self, adapter: Adapter, http: HttpRequest) -> dict[str, Any]:
        """Return what is said of an adapter: its folder only to callers that may load adapters."""
        root = {"root": adapter.folder} if self._has(http, Scope.ADAPTERS) else {}
        return {**self._card(adapter.name), **root, "parent": self._settings.served_model_names[0]}

    def _has(self, http: HttpRequest, scope: Scope) -> bool:
        """Return whether the caller may do what this scope, which is no usual one, allows."""
        caller = caller_of(http)
        return scope in caller.scopes and not (self._settings.is_exposed and caller is ANONYMOUS)


def _version() -> str:
    try:
        return version("alignedserve")
    except PackageNotFoundError:
        return "uninstalled"  # it runs from its source
