"""The routes of vectors: /v1/embeddings, /v1/score and /v1/rerank.

body ─▶ a Request for each text or pair ─▶ a vector of each, all at once ─▶ embeddings, scores or ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from alignedserve.architectures.vectors import PooledRule
from alignedserve.core import Request
from alignedserve.gateway.files import HttpRoute
from alignedserve.gateway.http.middleware import record_of, tab_of
from alignedserve.gateway.openai.promises import make_promise
from alignedserve.gateway.openai.requests import Origin
from alignedserve.gateway.openai.strict import parse_body
from alignedserve.gateway.starting import Following, Starter
from alignedserve.gateway.streaming import json_response, unless_gone
from alignedserve.gateway.vectors.answers import (
    Build,
    all_of,
    embedding_answer,
    read_vector,
    rerank_answer,
    score_answer,
)
from alignedserve.gateway.vectors.requests import make_embedding_requests, make_score_requests
from alignedserve.gateway.vectors.types import EmbeddingRequest, RerankRequest, ScoreRequest, VectorRequest
from alignedserve.owner.client import Delivered

_RERANK = ("/v1/rerank", "/rerank", "/v2/rerank")
_SCORE = ("/v1/score", "/score")
_FINISH = "stop"

Body = TypeVar("Body", bound=VectorRequest)


class VectorRoutes:
    def __init__(self, starter: Starter) -> None:
        self._starter = starter

    @property
    def routes(self) -> Sequence[HttpRoute]:
        return (
            ("POST", "/v1/embeddings", self.embed),
            *(("POST", path, self.score) for path in _SCORE),
            *(("POST", path, self.rerank) for path in _RERANK),
        )

    async def embed(self, http: HttpRequest) -> Response:
        return await self._answer(
            http, EmbeddingRequest, make_embedding_requests, lambda body, _: partial(embedding_answer, body)
        )

    async def score(self, http: HttpRequest) -> Response:
        return await self._answer(
            http, ScoreRequest, make_score_requests, lambda body, rule: partial(score_answer, body, rule)
        )

    async def rerank(self, http: HttpRequest) -> Response:
        return await self._answer(
            http, RerankRequest, make_score_requests, lambda body, rule: partial(rerank_answer, body, rule)
        )

    async def _answer(
        self,
        http: HttpRequest,
        kind: type[Body],
        make: Callable[..., tuple[Request, ...]],
        builder: Callable[[Body, PooledRule], Build],
    ) -> Response:
        starter = self._starter
        starter.check_ready()
        async with starter.read(http) as sent:
            body = parse_body(kind, sent)
            adapter = starter.check_model(body.model)
            promise = make_promise(body, http.headers, starter.settings.slo, tab_of(http).caller.limits)
            record = record_of(http)
            origin = Origin(record.id, starter.client.name, record.began_at, tab_of(http).caller, adapter)
            arguments = body, promise, origin, starter.text, starter.settings.max_model_len
            requests = await starter.in_thread(http, partial(make, *arguments))
        assert starter.text.pooled is not None, "no request was made without it"
        build = builder(body, starter.text.pooled)
        prompt_tokens, tab = sum(len(request.prompt) for request in requests), tab_of(http)
        at_once = tab.hold_up_to(min(len(requests), starter.settings.at_once))
        tab.hold_choices(len(requests))
        tab.pay(requests, prompt_tokens, has_limit=True)
        following = starter.follow(http, promise, requests, prompt_tokens)
        read = ((number, request, following, number >= at_once) for number, request in enumerate(requests))
        work = (partial(self._read, *each) for each in read)
        vectors = await unless_gone(http.receive, all_of(work, at_once))
        following.meter.end()
        answer = await starter.in_thread(http, lambda: build(requests, vectors))
        headers = following.meter.timing(is_over=True).headers
        return json_response(answer, headers, starter.settings.stalled_client_s)

    async def _read(self, number: int, request: Request, following: Following, has_waited: bool) -> bytes:
        """Run a request. If it `has_waited` for others of its body, its deadlines count from now on."""
        meter = following.meter
        if has_waited:
            request = replace(request, arrival_at=self._starter.client.now())
        with meter.meter(number, request), following.follow(request) as trace:

            def note(delivered: Delivered) -> None:
                meter.count_delivery(number, delivered)
                meter.count_write(number)
                trace.deliver(delivered)
                meter.finish_choice(number, _FINISH)
                trace.finish(_FINISH)

            return await read_vector(self._starter.client, request, note)
