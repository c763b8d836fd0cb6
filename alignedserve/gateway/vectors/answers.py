"""Run the requests of a body that asks for vectors, and build its answer: embeddings, scores of pairs, or ranks.

Vectors come as they go over the wire: numbers of 4 bytes, little-endian.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from math import sqrt
from typing import Any, TypeAlias, TypeVar

from alignedserve.architectures.vectors import PooledRule
from alignedserve.core import FinishReason, Request
from alignedserve.gateway.openai.errors import no_vector
from alignedserve.gateway.vectors.requests import texts_of
from alignedserve.gateway.vectors.types import EmbeddingRequest, RerankRequest, ScoreRequest
from alignedserve.owner.client import Delivered, OwnerClient

Answer: TypeAlias = dict[str, Any]
Build: TypeAlias = Callable[[Sequence[Request], Sequence[bytes]], Answer]  # of requests and their vectors


def embedding_answer(body: EmbeddingRequest, requests: Sequence[Request], vectors: Sequence[bytes]) -> Answer:
    """Return the embeddings; an iterator stands for their list, since there may be millions of numbers (writing.py)."""
    as_text = body.encoding_format == "base64"
    data = (
        {
            "object": "embedding",
            "index": place,
            "embedding": base64.b64encode(vector).decode() if as_text else _numbers(vector).tolist(),
        }
        for place, vector in enumerate(vectors)
    )
    return {**_head("embd", body.model, requests), "data": data, "usage": _usage(requests)}


def score_answer(body: ScoreRequest, rule: PooledRule, requests: Sequence[Request], vectors: Sequence[bytes]) -> Answer:
    scores = _scores(body, rule, vectors)
    data = [{"index": place, "object": "score", "score": score} for place, score in enumerate(scores)]
    return {**_head("score", body.model, requests), "data": data, "usage": _usage(requests)}


def rerank_answer(
    body: RerankRequest, rule: PooledRule, requests: Sequence[Request], vectors: Sequence[bytes]
) -> Answer:
    """Return the documents, the most relevant first; documents about as relevant keep their order."""
    ranked = sorted(enumerate(_scores(body, rule, vectors)), key=lambda scored: -scored[1])
    shown, texts = body.return_documents is not False, body.texts
    results = [
        {"index": place, **({"document": {"text": texts[place]}} if shown else {}), "relevance_score": score}
        for place, score in ranked[: body.top_n or None]
    ]
    return {"id": _id("rerank", requests), "model": body.model, "results": results, "usage": _usage(requests)}


def _scores(body: ScoreRequest | RerankRequest, rule: PooledRule, vectors: Sequence[bytes]) -> list[float]:
    """Return the score of each pair: what the model says of it, or the cosine of the vectors of its texts."""
    if rule.scores:
        return [float(_numbers(vector)[0]) for vector in vectors]
    by_text = {given: _direction(_numbers(vector)) for given, vector in zip(texts_of(body.pairs), vectors, strict=True)}
    return [sum(a * b for a, b in zip(by_text[one], by_text[other], strict=True)) for one, other in body.pairs]


def _direction(vector: array[float]) -> list[float]:
    length = sqrt(sum(number * number for number in vector)) or 1.0
    return [number / length for number in vector]


def _numbers(vector: bytes) -> array[float]:
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _head(kind: str, model: str, requests: Sequence[Request]) -> Answer:
    return {"id": _id(kind, requests), "object": "list", "created": int(time.time()), "model": model}


def _id(kind: str, requests: Sequence[Request]) -> str:
    return f"{kind}-{requests[0].id.removeprefix('req-')}"


def _usage(requests: Sequence[Request]) -> dict[str, int]:
    num_tokens = sum(len(request.prompt) for request in requests)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


T = TypeVar("T")


async def read_vector(client: OwnerClient, request: Request, note: Callable[[Delivered], None]) -> bytes:
    """Run a request to its end and return its vector. `note` hears what was delivered, which has no tokens."""
    async with aclosing(client.open(request)) as deliveries:
        async for delivered in deliveries:
            if delivered.finish is None or delivered.finish is FinishReason.ERROR:
                raise no_vector()
            note(replace(delivered, tokens=()))
            return delivered.opening.vector
    raise RuntimeError("a request's deliveries ended without a finish")


async def all_of(work: Iterable[Callable[[], Awaitable[T]]], at_once: int) -> list[T]:
    """Run all work, at most `at_once` pieces at a time, and return the results in its order. A piece gets its task when
    it begins. Where one fails, the others are cancelled."""
    results, left = dict[int, T](), iter(enumerate(work))

    async def take() -> None:
        for number, begin in left:
            results[number] = await begin()

    tasks = [asyncio.create_task(take()) for _ in range(at_once)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [results[number] for number in range(len(results))]
