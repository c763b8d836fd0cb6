"""A line's body becomes its answer, as a request over HTTP would have got it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from alignedserve.core import Estimate, Request, ServiceClass, Slo
from alignedserve.gateway.access.keys import Caller
from alignedserve.gateway.openai.admission import Origin, requests_of
from alignedserve.gateway.openai.errors import no_such_model
from alignedserve.gateway.openai.parsing import parsed
from alignedserve.gateway.openai.promises import Promise
from alignedserve.gateway.openai.reading import Piece, Reader, joined
from alignedserve.gateway.openai.shapes import shape_of
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.owner.client import OwnerClient
from alignedserve.store.job import Endpoint
from alignedserve.text.text_model import TextModel

TIER = "flex"  # that every line has had, whatever it asks for
RUNS_AT = 2  # tokens: it has a place


@dataclass(frozen=True)
class Asked:
    """One line, on its way to an answer."""

    id: str
    endpoint: Endpoint
    body: dict[str, Any]
    jct_s: float
    estimate: Estimate | None
    caller: Caller


@dataclass(frozen=True)
class Answering:
    client: OwnerClient
    text: TextModel
    models: Sequence[str]
    max_model_len: int

    async def answer(self, asked: Asked, on_running: Callable[[], None]) -> dict[str, Any]:
        """Raises ApiError where the answer is one, and Overloaded where there was no room."""
        body, requests = await asyncio.to_thread(self._read, asked)
        tasks = [asyncio.create_task(self._piece(body, request, on_running)) for request in requests]
        try:
            pieces = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return shape_of(body, requests, TIER, self.text).whole(pieces)

    def _read(self, asked: Asked) -> tuple[ChatRequest | CompletionRequest, tuple[Request, ...]]:
        written = json.dumps(asked.body).encode()
        chat = asked.endpoint is Endpoint.CHAT
        body: ChatRequest | CompletionRequest = (
            parsed(ChatRequest, written) if chat else parsed(CompletionRequest, written)
        )
        if body.model not in self.models:  # that is served now: it was when the job was checked
            raise no_such_model(body.model)
        promise = Promise(ServiceClass.BE, Slo(jct_s=asked.jct_s), TIER)
        origin = Origin(asked.id, self.client.name, self.client.now(), asked.caller)
        requests = requests_of(body, promise, origin, self.text, self.max_model_len)
        return body, tuple(_expected(request, asked.estimate) for request in requests)

    async def _piece(
        self, body: ChatRequest | CompletionRequest, request: Request, on_running: Callable[[], None]
    ) -> Piece:
        reader, pieces, num_tokens = Reader.of(body, self.text), list[Piece](), 0
        async with aclosing(self.client.open(request)) as deliveries:
            async for delivered in deliveries:
                pieces.append(reader.read(delivered))
                num_tokens += len(delivered.tokens)
                if num_tokens - len(delivered.tokens) < RUNS_AT <= num_tokens:
                    on_running()
                if pieces[-1].finish:
                    return joined(pieces)
        raise RuntimeError("a request's deliveries ended without a finish")


def _expected(request: Request, estimate: Estimate | None) -> Request:
    """By the other lines of its job, unless its client has said so itself."""
    return request if request.estimate is not None or estimate is None else replace(request, estimate=estimate)
