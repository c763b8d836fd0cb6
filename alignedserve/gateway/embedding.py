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
from alignedserve.gateway.exchanges import ignored_header
from alignedserve.gateway.files import HttpRoute
from alignedserve.gateway.http.middleware import record_of, tab_of
from alignedserve.gateway.http.records import BodyMeter
from alignedserve.gateway.openai.promises import make_promise
from alignedserve.gateway.openai.reading import cost_of
from alignedserve.gateway.openai.requests import Origin
from alignedserve.gateway.openai.streaming import json_response, unless_gone
from alignedserve.gateway.starting import Starter
from alignedserve.gateway.vectors import (
    Answer,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    VectorRequest,
    all_of,
    embedding_answer,
    make_embedding_requests,
    make_score_requests,
    read_vector,
    rerank_answer,
    score_answer,
)
from alignedserve.owner.client import Delivered, OwnerClient
from alignedserve.tracing.traces import Follow

_RERANK = ("/v1/rerank", "/rerank", "/v2/rerank")
_SCORE = ("/v1/score", "/score")
_FINISH = "stop"

Body = TypeVar("Body", bound=VectorRequest)


class VectorRoutes:
    def __init__(self, starter: Starter) -> None:
        self._starter = starter

    @property
    def routes(self) -> Sequence[HttpRoute]:
        score = partial(self._answer, ScoreRequest, make_score_requests, score_answer)
        rerank = partial(self._answer, RerankRequest, make_score_requests, rerank_answer)
        embed = partial(self._answer, EmbeddingRequest, make_embedding_requests, embedding_answer)
        return (
            ("POST", "/v1/embeddings", embed),
            *(("POST", path, score) for path in _SCORE),
            *(("POST", path, rerank) for path in _RERANK),
        )

    async def _answer(
        self,
        kind: type[Body],
        make: Callable[..., tuple[Request, ...]],
        build: Callable[[Body, Sequence[Request], Sequence[bytes], PooledRule], Answer],
        http: HttpRequest,
    ) -> Response:
        """Answer a body of this kind: `make` makes its requests, and `build` the answer from requests and vectors."""
        starter = self._starter
        starter.check_draining()
        async with starter.read(http, kind) as body:
            model, adapter = starter.vector_model(body.model)
            starter.check_ready(model.client)
            promise = make_promise(body, http.headers, starter.settings.usual, tab_of(http).caller.limits)
            record = record_of(http)
            origin = Origin(record.id, model.client.name, record.began_at, tab_of(http).caller, adapter)
            work = partial(make, body, promise, origin, model.text, model.max_model_len)
            requests = await starter.in_thread(http, work)
        assert model.text.pooled is not None, "no request was made without it"
        prompt_tokens, tab = sum(len(request.prompt) for request in requests), tab_of(http)
        at_once = tab.hold_up_to(min(len(requests), model.at_once))
        tab.hold_choices(len(requests))
        tab.pay(requests, prompt_tokens, has_limit=True)
        meter, follow = starter.follow(http, promise, requests, prompt_tokens, model)
        read = partial(self._read, model.client, meter, follow)
        work = (partial(read, number, request, number >= at_once) for number, request in enumerate(requests))
        vectors = await unless_gone(http.receive, all_of(work, at_once))
        meter.end()
        answer = await starter.in_thread(http, partial(build, body, requests, vectors, model.text.pooled))
        answer["usage"] |= cost_of(meter.charged)
        headers = {**ignored_header(body.ignored), **meter.timing_headers(is_over=True)}
        return json_response(answer, headers, starter.settings.stalled_client_s)

    async def _read(
        self, client: OwnerClient, meter: BodyMeter, follow: Follow, number: int, request: Request, has_waited: bool
    ) -> bytes:
        """Run a request. If it `has_waited` for others of its body, its deadlines count from now on."""
        if has_waited:
            request = replace(request, arrival_at=client.now())
        with meter.meter(number, request) as of_text, follow(request) as trace:

            def note(delivered: Delivered) -> None:
                meter.count_delivery(number, delivered)
                meter.count_write(number)
                trace.deliver(delivered)
                meter.finish_choice(number, _FINISH)
                trace.finish(_FINISH)

            return await read_vector(client, request, note, of_text.use.charge)
