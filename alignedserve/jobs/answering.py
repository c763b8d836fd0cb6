"""Answer a line of a job as a request over HTTP would be answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from alignedserve.core import Estimate, Request, ServiceClass, Slo
from alignedserve.gateway.access.keys import Caller
from alignedserve.gateway.openai.errors import no_such_model
from alignedserve.gateway.openai.parsing import parse_body
from alignedserve.gateway.openai.promises import ServicePromise
from alignedserve.gateway.openai.reading import AnswerPiece, AnswerReader, join_pieces
from alignedserve.gateway.openai.requests import Origin, make_requests
from alignedserve.gateway.openai.shapes import make_shape
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.owner.client import OwnerClient
from alignedserve.store.job import Endpoint
from alignedserve.text.text_model import TextModel

TIER = "flex"  # the tier of every line, whatever its body asks for
RUNS_AT = 2  # tokens of output: a request that has them has its place on a decode worker


@dataclass(frozen=True)
class LineRequest:
    """A line that is to be answered."""

    id: str
    endpoint: Endpoint
    body: dict[str, Any]
    jct_s: float
    estimate: Estimate | None
    caller: Caller


class Answers(Protocol):
    """The interface of what answers lines, as the job runner uses it."""

    @property
    def models(self) -> Sequence[str]: ...

    async def answer(self, line: LineRequest, on_running: Callable[[], None], /) -> dict[str, Any]:
        """Return the line's answer; raise ApiError if the answer is an error, and Overloaded if there is no room."""


@dataclass(frozen=True)
class Answering:
    client: OwnerClient
    text: TextModel
    models: Sequence[str]
    max_model_len: int

    async def answer(self, line: LineRequest, on_running: Callable[[], None]) -> dict[str, Any]:
        """Return the line's answer; raise ApiError if the answer is an error, and Overloaded if there is no room."""
        body, requests = await asyncio.to_thread(self._make_requests, line)
        tasks = [asyncio.create_task(self._run(body, request, on_running)) for request in requests]
        try:
            pieces = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return make_shape(body, requests, TIER, self.text).whole(pieces)

    def _make_requests(self, line: LineRequest) -> tuple[ChatRequest | CompletionRequest, tuple[Request, ...]]:
        data = json.dumps(line.body).encode()
        is_chat = line.endpoint is Endpoint.CHAT
        body: ChatRequest | CompletionRequest = (
            parse_body(ChatRequest, data) if is_chat else parse_body(CompletionRequest, data)
        )
        if body.model not in self.models:  # it was served when the job was checked, but may not be now
            raise no_such_model(body.model)
        promise = ServicePromise(ServiceClass.BE, Slo(jct_s=line.jct_s), TIER)
        origin = Origin(line.id, self.client.name, self.client.now(), line.caller)
        requests = make_requests(body, promise, origin, self.text, self.max_model_len)
        return body, tuple(_with_estimate(request, line.estimate) for request in requests)

    async def _run(
        self, body: ChatRequest | CompletionRequest, request: Request, on_running: Callable[[], None]
    ) -> AnswerPiece:
        """Run a request to its end; call `on_running` when it has its place on a decode worker."""
        reader, pieces, num_tokens = AnswerReader.from_body(body, self.text), list[AnswerPiece](), 0
        async with aclosing(self.client.open(request)) as deliveries:
            async for delivered in deliveries:
                pieces.append(reader.read(delivered))
                num_tokens += len(delivered.tokens)
                if num_tokens - len(delivered.tokens) < RUNS_AT <= num_tokens:
                    on_running()
                if pieces[-1].finish:
                    return join_pieces(pieces)
        raise RuntimeError("a request's deliveries ended without a finish")


def _with_estimate(request: Request, estimate: Estimate | None) -> Request:
    """Return the request with its job's estimate of the output length, unless the client gave its own."""
    return request if request.estimate is not None or estimate is None else replace(request, estimate=estimate)
