"""Start the requests of a body: take what it costs its caller, make the requests, and measure and trace them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from alignedserve.architectures.model_source import leads_to
from alignedserve.core import Adapter, Request
from alignedserve.gateway.access.adapters import Adapters
from alignedserve.gateway.embed_side import BothSides, VectorModel
from alignedserve.gateway.explaining import ExplainRoutes
from alignedserve.gateway.generation import Generation
from alignedserve.gateway.http.bodies import LONG_BYTES, Bodies, BodyTurns
from alignedserve.gateway.http.limits import LoopPace
from alignedserve.gateway.http.middleware import record_of, tab_of
from alignedserve.gateway.http.records import BodyMeter
from alignedserve.gateway.openai.errors import draining, no_such_model, not_ready, only_embeds
from alignedserve.gateway.openai.promises import ServicePromise, make_promise, retries
from alignedserve.gateway.openai.reading import AnswerReader
from alignedserve.gateway.openai.requests import Origin, make_requests, num_requests
from alignedserve.gateway.openai.streaming import unless_gone
from alignedserve.gateway.openai.strict import Body, parse_body
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.gateway.settings import GatewaySettings
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.owner.client import OwnerClient
from alignedserve.text.syntax_trial import Tried
from alignedserve.text.text_model import TextModel
from alignedserve.tracing.traces import Follow, Traces

MOST_TOKENS = "x-max-tokens"  # a header: how many tokens an answer may have whose body asked for more than is left
PATIENCE_S = 30.0  # requests wait so long for workers to be ready: a worker that died is back by then

T = TypeVar("T")


@dataclass(frozen=True)
class StartedRequests:
    """The requests of a body, which run as soon as their generation is read."""

    requests: tuple[Request, ...]
    promise: ServicePromise
    generation: Generation
    meter: BodyMeter
    stalled_client_s: float
    headers: dict[str, str]  # of the answer


def tokens_header(requests: Sequence[Request], asked: int | None) -> dict[str, str]:
    """Return the header that says how many tokens each output may have, where a body asked for more."""
    most = min(request.max_tokens for request in requests)
    return {MOST_TOKENS: str(most)} if (asked or 0) > most else {}


class Starter:
    """Starts the requests of all routes that ask for tokens. It holds all bodies, whose memory together is limited."""

    def __init__(
        self,
        client: OwnerClient,
        text: TextModel,
        settings: GatewaySettings,
        metrics: RequestMetrics,
        traces: Traces,
        is_draining: Callable[[], bool],
        adapters: Adapters | None = None,
        embedding: VectorModel | None = None,
    ) -> None:
        self.client, self.text, self.settings = client, text, settings
        self.adapters = adapters or Adapters()
        self.whole = client if embedding is None else BothSides(client, embedding.client)
        self.explaining = ExplainRoutes(self.whole, settings.prices.of)
        names = settings.served_model_names
        self._served = VectorModel(names[0], client, text, settings.max_model_len, settings.at_once)
        self.embedding = embedding
        self._embed_metrics = metrics if embedding is None else metrics.of_model(embedding.name)
        self._metrics, self._traces, self._is_draining = metrics, traces, is_draining
        self._bodies = Bodies(lambda: settings.body_limit_bytes, settings.body_limit_s)
        self._turns, self._pace = BodyTurns(), LoopPace()

    @property
    def model_names(self) -> tuple[str, ...]:
        names = self.settings.listed_names
        return names if self.embedding is None else (*names, self.embedding.name)

    def check_ready(self, client: OwnerClient | None = None) -> None:
        """Raise if no request could run now: of this owner, or for tokens."""
        self.check_draining()
        if (client or self.client).lacks_s > PATIENCE_S:
            raise not_ready()

    def check_draining(self) -> None:
        if self._is_draining():
            raise draining()

    @asynccontextmanager
    async def read(self, http: HttpRequest, kind: type[Body]) -> AsyncIterator[Body]:
        """Yield the body, parsed as this kind. Until the block ends its bytes count as held, and its caller has a turn.

        Raise if the caller's limits leave no request, place or token. Bodies that ask for no tokens are checked too:
        each takes a thread."""
        tab = tab_of(http)
        tab.enter()
        tab.admit()
        async with self._bodies.read(http) as sent, AsyncExitStack() as held:
            http.state.body_bytes, turn = len(sent), self._turns.turn(tab.caller, len(sent))
            if len(sent) <= LONG_BYTES:
                http.state.turn = await held.enter_async_context(turn)
                body = parse_body(kind, sent)
            else:
                async with self._pace.turn(tab.caller.id) as wait_s:
                    if wait_s:
                        await unless_gone(http.receive, asyncio.sleep(wait_s))
                    http.state.turn = await held.enter_async_context(turn)
                    body = self._pace.measured(tab.caller.id, partial(parse_body, kind, sent))
            yield body

    def check_model(self, name: str | None) -> Adapter | None:
        """Return the adapter of this name, None for the model itself; raise where there is neither."""
        if name is not None and self._is_of_embedding(name):
            raise only_embeds(name)
        found = self.adapters.find(name)
        if found is None and name is not None and not leads_to(name, self.settings.served_model_names):
            raise no_such_model(name)
        return found

    def vector_model(self, name: str | None) -> tuple[VectorModel, Adapter | None]:
        """Return what makes vectors by this name, and the adapter of the name; raise where there is neither."""
        if self.embedding is not None and name is not None and self._is_of_embedding(name):
            return self.embedding, None
        return self._served, self.check_model(name)

    def _is_of_embedding(self, name: str) -> bool:
        return self.embedding is not None and leads_to(name, (self.embedding.name,))

    async def in_thread(self, http: HttpRequest, work: Callable[[], T], has_form: bool = False) -> T:
        """Do work on a body's texts in one of few threads, because each may take much memory, and long prompts take
        long."""
        caller, num_bytes = tab_of(http).caller, http.state.body_bytes
        if has_form:
            return await self._turns.try_form(caller, num_bytes, work, http.state.turn)
        return await self._turns.do(caller, num_bytes, work)

    async def make(
        self, http: HttpRequest, body: ChatRequest | CompletionRequest
    ) -> tuple[ServicePromise, tuple[Request, ...]]:
        """Return the requests of a body and their promise; raise if the body cannot be served."""
        adapter = self.check_model(body.model)
        record, tab = record_of(http), tab_of(http)
        tried = Tried(tab.caller.id)
        promise = make_promise(body, http.headers, self.settings.usual, tab.caller.limits)
        whose = record.id, self.client.name, record.began_at, tab.caller
        origin = Origin(*whose, adapter, retries(http.headers), tried)
        work = partial(make_requests, body, promise, origin, self.text, self.settings.max_model_len)
        tries_form = body.format is not None or (isinstance(body, ChatRequest) and body.is_held(self.text))
        try:
            return promise, await self.in_thread(http, work, tries_form)
        finally:
            tab.try_grammars(tried.cpu_s)

    def follow(
        self,
        http: HttpRequest,
        promise: ServicePromise,
        requests: Sequence[Request],
        prompt_tokens: int,
        model: VectorModel | None = None,
    ) -> tuple[BodyMeter, Follow]:
        """Return what measures the requests, which their caller has paid for, and what traces them."""
        record, tab = record_of(http), tab_of(http)
        metrics = self._metrics if model is None or model is self._served else self._embed_metrics
        self.explaining.remember(tab.caller, record.client_id, record.id)
        record.service, record.prompt_tokens = promise.service, prompt_tokens
        metrics.of[promise.service].choices.observe(len(requests))
        meter = BodyMeter(metrics, record, promise.tier, self.client.now, tab)
        return meter, partial(self._traces.follow, headers=http.headers, choices=len(requests), now=self.client.now)

    async def start(self, http: HttpRequest, body: ChatRequest | CompletionRequest) -> StartedRequests:
        """Make the requests of a body. They hold none of its memory, so that it is free while they run."""
        tab = tab_of(http)
        tab.hold_places(num_requests(body))  # before texts are tokenised, which a refused body must not cost others
        promise, requests = await self.make(http, body)
        prompt_tokens = sum(len(it.prompt) for it in requests[:: body.n or 1])
        has_limit = body.most_tokens is not None
        tab.hold_logprobs(requests, has_limit, is_streamed=bool(body.stream))
        requests = tab.pay(requests, prompt_tokens, has_limit)
        meter, follow = self.follow(http, promise, requests, prompt_tokens)
        readers = AnswerReader.each(body, self.text, requests)
        generation = Generation(self.client, requests, readers, meter, follow, self.settings.at_once)
        http.state.end = generation.end
        stalled_s = self.settings.stalled_client_s
        headers = tokens_header(requests, body.most_tokens)
        return StartedRequests(requests, promise, generation, meter, stalled_s, headers)
