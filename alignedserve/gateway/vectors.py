"""Vectors of texts: the bodies that ask for embeddings, for scores of pairs of texts, or for documents in the order of
their relevance; the requests made of these bodies, and the answers. The fields are OpenAI's, vLLM's, Jina's and
Cohere's.

Each text, or each pair of texts, is a request of its own:

embeddings                     a vector of each input
scores, the model has a head   a number of each pair, which the model reads as one text
scores, it has none            a vector of each text that differs; the score is the cosine of two of them

Vectors come as they go over the wire: numbers of 4 bytes, little-endian.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from math import sqrt
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from alignedserve.architectures.vectors import PooledRule
from alignedserve.core import Estimate, FinishReason, PooledTask, Pooling, Request, Sampling
from alignedserve.gateway.openai.errors import ApiError, invalid
from alignedserve.gateway.openai.promises import ServicePromise
from alignedserve.gateway.openai.requests import (
    MOST_CONTEXTS,
    Origin,
    check_length,
    check_token_ids,
    request_of,
    too_long,
)
from alignedserve.gateway.openai.strict import ListOf, Strict, fault
from alignedserve.gateway.openai.types import PromisedRequest, Prompt, TokenId, kind_of_prompts, listed_prompts
from alignedserve.owner.client import Delivered, OwnerClient, Settle
from alignedserve.shell.event_loop import end_tasks
from alignedserve.text.text_model import TextModel

MOST_INPUTS = 2048  # of a body, as for OpenAI
MOST_DIMENSIONS = 1 << 20
# Tokens that the pairs of a body may have where its texts have fewer bytes: each pair has the query for itself, at 36
# bytes a token. For example, a query of 64 tokens beside 2,048 documents of 60.
MOST_PAIR_TOKENS = 1 << 18
_INT32 = 2**31

Inputs = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[ListOf[TokenId], Field(min_length=1), Tag("ids")]
    | Annotated[ListOf[Prompt], Field(min_length=1, max_length=MOST_INPUTS), Tag("several")],
    Discriminator(kind_of_prompts),
]
Texts = str | Annotated[ListOf[str], Field(min_length=1, max_length=MOST_INPUTS)]


class VectorRequest(PromisedRequest):
    """The fields that all bodies for vectors have in common."""

    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=_INT32)  # -1: to what the model can read

    def faults(self) -> Iterator[PydanticCustomError]:
        if self.truncate_prompt_tokens == 0:
            yield fault("truncate_prompt_tokens", "must be -1, for as many tokens as the model reads, or above 0")


class EmbeddingRequest(VectorRequest):
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=MOST_DIMENSIONS)
    add_special_tokens: bool | None = None
    prompt_name: str | None = None  # which of the folder's prompts begins each text

    @property
    def inputs(self) -> list[str | list[int]]:
        return listed_prompts(self.input)


class ScoreRequest(VectorRequest):
    """Pairs of texts, by vLLM's names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    items: Texts | None = None

    def faults(self) -> Iterator[PydanticCustomError]:
        yield from super().faults()
        named = [name for name in ("text_1", "text_2", "queries", "items") if getattr(self, name) is not None]
        if named not in (["text_1", "text_2"], ["queries", "items"]):
            yield fault("text_1", "there must be text_1 and text_2, or queries and items")
        first, second = (_listed(getattr(self, name)) for name in named)
        if len(first) not in (1, len(second)):
            yield fault(named[0], f"has {len(first)} texts and {named[1]} has {len(second)}: one text, or as many")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first, second = _listed(self.text_1 or self.queries or ""), _listed(self.text_2 or self.items or "")
        return [*zip(first * len(second) if len(first) == 1 else first, second, strict=True)]


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


class Document(Strict):
    text: str


AnyDocument = Annotated[
    Annotated[str, Tag("text")] | Annotated[Document, Tag("object")],
    Discriminator(lambda document: "text" if isinstance(document, str) else "object"),
]


class RerankRequest(VectorRequest):
    """A query and documents, by the names of Jina and Cohere."""

    query: str
    documents: Annotated[ListOf[AnyDocument], Field(min_length=1, max_length=MOST_INPUTS)]
    top_n: int | None = Field(None, ge=0, lt=_INT32)  # 0: all
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, text) for text in self.texts]


# --- Requests

_ONE = Estimate(1, 1)  # a request for a vector ends with the prompt


_Prompt: TypeAlias = tuple[tuple[int, ...], int | None]  # the tokens of an input; of a pair, where its second begins


def make_embedding_requests(
    body: EmbeddingRequest, promise: ServicePromise, origin: Origin, text: TextModel, max_model_len: int
) -> tuple[Request, ...]:
    """Return a request for each input. Long inputs take long, so an event loop must not call this."""
    rule = _rule_of(text)
    if not rule.embeds:
        raise _wrong_model("makes scores and no embeddings: send pairs of texts to /v1/score")
    reader = _Reader(body, text, rule, max_model_len, "input")
    name = body.prompt_name
    if name is not None and name not in rule.prompts:
        known = ", ".join(sorted(rule.prompts)) or "it has none"
        raise invalid(f"prompt_name: the model has no prompt {name!r:.60}: {known}", "prompt_name")
    begins = rule.usual_prompt if name is None else rule.prompts[name]
    with_special = body.add_special_tokens is not False
    prompts = [
        reader.read(begins + given, None, with_special) if isinstance(given, str) else reader.checked(given)
        for given in body.inputs
    ]
    pooling = Pooling(is_whole=rule.is_whole, dimensions=_dimensions(rule, body.dimensions))
    return _made(prompts, [pooling] * len(prompts), body, promise, origin)


def make_score_requests(
    body: ScoreRequest | RerankRequest, promise: ServicePromise, origin: Origin, text: TextModel, max_model_len: int
) -> tuple[Request, ...]:
    """Return the requests for the scores of a body's pairs: one for each pair where the model scores pairs, else one
    for each text, in the order of `texts_of`."""
    rule = _rule_of(text)
    field = "documents" if isinstance(body, RerankRequest) else "text_1"
    reader = _Reader(body, text, rule, max_model_len, field)
    if rule.scores:
        prompts = _read_pairs(reader, body.pairs, field)
        poolings = [Pooling(PooledTask.SCORE, rule.is_whole, second_at=second_at) for _, second_at in prompts]
        return _made(prompts, poolings, body, promise, origin)
    if not rule.embeds:
        raise _wrong_model(f"has a head of {rule.labels} numbers: only a head of one number gives scores")
    prompts = [reader.read(rule.usual_prompt + given) for given in texts_of(body.pairs)]
    return _made(prompts, [Pooling(is_whole=rule.is_whole)] * len(prompts), body, promise, origin)


def _read_pairs(reader: _Reader, pairs: Sequence[tuple[str, str]], field: str) -> list[_Prompt]:
    """Return the prompt of each pair; raise where a small body has a long text in each of many pairs."""
    num_bytes, num_tokens, prompts = sum(len(text.encode()) for text in texts_of(pairs)), 0, list[_Prompt]()
    most = max(MOST_PAIR_TOKENS, num_bytes)
    for pair in pairs:
        prompts.append(reader.read(*pair))
        num_tokens += len(prompts[-1][0])
        if num_tokens > most and len(pairs) > 1:
            message = f"{field}: the first {len(prompts)} of {len(pairs)} pairs have {num_tokens} tokens, and {most} is"
            raise invalid(f"{message} the most for texts that stand in several pairs: send fewer at a time", field)
    return prompts


def texts_of(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return each text of the pairs once."""
    return [*dict.fromkeys(given for pair in pairs for given in pair)]


def _rule_of(text: TextModel) -> PooledRule:
    if text.pooled is None:
        raise _wrong_model("makes no embeddings here")
    return text.pooled


def _wrong_model(what: str) -> ApiError:
    return invalid(f"this model {what}", "model", "unsupported_model")


def _dimensions(rule: PooledRule, wanted: int | None) -> int | None:
    if wanted is None or wanted == rule.size:
        return None
    if wanted > rule.size:
        raise invalid(f"dimensions: the model's vectors have {rule.size} numbers, not {wanted}", "dimensions")
    if rule.dimensions is not None and wanted not in rule.dimensions:
        known = ", ".join(map(str, sorted({*rule.dimensions, rule.size})))
        raise invalid(f"dimensions: this model's vectors can have {known} numbers, not {wanted}", "dimensions")
    return wanted


class _Reader:
    """Turns the texts of a body into tokens, no more of each than the model can read."""

    def __init__(self, body: VectorRequest, text: TextModel, rule: PooledRule, max_model_len: int, field: str) -> None:
        self._longest = longest = min(rule.longest or max_model_len, max_model_len)
        self._text, self._field = text, field
        cut = body.truncate_prompt_tokens
        if cut is not None and cut > longest:
            message = f"truncate_prompt_tokens: this model reads at most {longest} tokens, not {cut}"
            raise invalid(message, "truncate_prompt_tokens")
        self._cut = longest if cut == -1 else cut

    def read(self, first: str, second: str | None = None, with_special: bool = True) -> _Prompt:
        """Return the prompt of a text, or of a pair of texts."""
        most = self._longest if self._cut is None else MOST_CONTEXTS * self._longest
        check_length([first] if second is None else [first, second], self._text, self._longest, most, self._field)
        encoding = self._text.encoding(first, second, with_special)
        ids: list[int] = encoding.ids
        if self._cut is not None and len(ids) > self._cut:  # special tokens that end the text end it still
            specials, behind = encoding.special_tokens_mask, 0
            while behind < len(ids) and specials[-1 - behind]:
                behind += 1
            ids = [*ids[: max(0, self._cut - behind)], *ids[len(ids) - behind :]][: self._cut]
        second_at = next((place for place, kind in enumerate(encoding.type_ids) if kind), None)
        return self._whole(tuple(ids)), second_at

    def checked(self, ids: Sequence[int]) -> _Prompt:
        check_token_ids(self._field, ids, self._text.vocab_size)
        return self._whole(tuple(ids[: self._cut])), None

    def _whole(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        if not tokens:
            raise invalid(f"{self._field}: a text is empty", self._field)
        if len(tokens) > self._longest:
            raise too_long(f"a text has {len(tokens)}, see truncate_prompt_tokens", self._longest, self._field)
        return tokens


def _made(
    prompts: Sequence[_Prompt],
    poolings: Sequence[Pooling],
    body: VectorRequest,
    promise: ServicePromise,
    origin: Origin,
) -> tuple[Request, ...]:
    rules: dict[str, Any] = {"sampling": Sampling(), "max_tokens": 1, "stop_tokens": (), "estimate": _ONE}
    each = zip(prompts, poolings, strict=True)
    made = (request_of(body, tokens, promise, origin, **rules, pooling=pooling) for (tokens, _), pooling in each)
    return tuple(replace(request, id=f"{origin.id}-{at}") if at else request for at, request in enumerate(made))


# --- Answers

Answer: TypeAlias = dict[str, Any]


def embedding_answer(
    body: EmbeddingRequest, requests: Sequence[Request], vectors: Sequence[bytes], _: PooledRule | None = None
) -> Answer:
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


def score_answer(body: ScoreRequest, requests: Sequence[Request], vectors: Sequence[bytes], rule: PooledRule) -> Answer:
    scores = _scores(body, rule, vectors)
    data = [{"index": place, "object": "score", "score": score} for place, score in enumerate(scores)]
    return {**_head("score", body.model, requests), "data": data, "usage": _usage(requests)}


def rerank_answer(
    body: RerankRequest, requests: Sequence[Request], vectors: Sequence[bytes], rule: PooledRule
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


async def read_vector(
    client: OwnerClient, request: Request, note: Callable[[Delivered], None], settle: Settle
) -> bytes:
    """Run a request to its end and return its vector. `note` hears what was delivered, which has no tokens."""
    async with aclosing(client.open(request, settle)) as deliveries:
        async for delivered in deliveries:
            if delivered.finish is None or delivered.finish is FinishReason.ERROR:
                message = "no vector could be made: the model's numbers are not finite"
                raise ApiError(500, message, code="generation_failed")
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
        await end_tasks(*tasks)
    return [results[number] for number in range(len(results))]
