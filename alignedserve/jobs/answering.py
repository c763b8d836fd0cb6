"""Answer a line of a job as a request over HTTP would be answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from alignedserve.architectures.model_source import leads_to
from alignedserve.config.prices import Charged
from alignedserve.core import Estimate, FinishReason, Request, ServiceClass, Slo
from alignedserve.errors import AlignedServeError
from alignedserve.gateway.access.adapters import Adapters
from alignedserve.gateway.access.keys import MOST_OPEN, Caller
from alignedserve.gateway.access.ledger import Ledger
from alignedserve.gateway.http.limits import REFUSALS, CallerQuota
from alignedserve.gateway.openai.errors import ApiError, no_such_model, only_embeds
from alignedserve.gateway.openai.promises import ServicePromise
from alignedserve.gateway.openai.reading import AnswerPiece, AnswerReader, cost_of, join_pieces
from alignedserve.gateway.openai.requests import Origin, make_requests
from alignedserve.gateway.openai.shapes import make_shape
from alignedserve.gateway.openai.strict import parse_body
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.gateway.responses.answer import ResponseAnswer, response_head
from alignedserve.gateway.responses.types import PREFIX, ResponseRequest, make_lone_chat
from alignedserve.gateway.vectors import (
    EmbeddingRequest,
    all_of,
    embedding_answer,
    make_embedding_requests,
    read_vector,
)
from alignedserve.metrics.meter import RequestMeter
from alignedserve.metrics.requests import RequestMetrics
from alignedserve.owner.client import Delivered, GivenUp, Overloaded, OwnerClient
from alignedserve.shell.bounded_threads import BoundedThreads
from alignedserve.store.job import Endpoint
from alignedserve.text.syntax_trial import Tried
from alignedserve.text.text_model import TextModel
from alignedserve.tracing.traces import Traces

T = TypeVar("T")

TIER = "flex"  # the tier of every line, whatever the body asks for
LINE_AT_ONCE = 32  # choices of a line that run at once
THREADS = 8  # for the texts of lines
RUNS_AT = 2  # tokens of output: with these a request has a place on a decode worker
Answer: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class _Asked:
    """The requests of a line, and how its answer is made of what they deliver."""

    requests: tuple[Request, ...]
    prompt_tokens: int  # of all prompts, each once
    has_limit: bool  # whether the client limits the outputs
    makes_texts: bool  # each request delivers an AnswerPiece; else a vector
    run: Callable[[Request, int], Awaitable[Any]]  # runs one request, given the number of the line's requests
    whole: Callable[[Sequence[Request], Sequence[Any]], Answer]  # of the requests and what each has delivered


@dataclass(frozen=True)
class LineRequest:
    """A line that is to be answered."""

    id: str
    endpoint: Endpoint
    body: dict[str, Any]
    jct_s: float
    estimate: Estimate | None
    caller: Caller


class BatchAnswers(Protocol):
    """The interface of what answers lines, as the job runner uses it."""

    def serves(self, model: Any) -> bool:
        """Return whether lines may ask for this model."""

    async def answer(self, line: LineRequest, on_running: Callable[[], None], /) -> Answer:
        """Return the line's answer, in which iterators may stand for long lists (writing.py); raise ApiError if the
        answer is an error, and Overloaded if there is no room."""


KEY_WAIT_S = 60.0  # the most that a job waits for its key, whose limits may be raised meanwhile


class KeyLimited(AlignedServeError):
    """The line's key has no place, too few tokens or too few log-probabilities left now."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"too few places, tokens or log-probabilities are left: try again in {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Answering:
    client: OwnerClient
    text: TextModel
    own_models: Sequence[str]
    max_model_len: int
    metrics: RequestMetrics
    traces: Traces = field(default_factory=Traces)
    adapters: Adapters = field(default_factory=Adapters)
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_OPEN))  # of all lines' choices
    ledger: Ledger = field(default_factory=Ledger)
    embedding: Answering | None = None  # of the embedding model
    # Each trial of a grammar has a limit of its own, and may wait for those of the other threads.
    threads: BoundedThreads = field(default_factory=lambda: BoundedThreads(THREADS, "texts", times=5))

    def serves(self, model: Any) -> bool:
        if not isinstance(model, str):
            return False
        of_embedding = self.embedding is not None and self.embedding.serves(model)
        return of_embedding or leads_to(model, self.own_models) or model in self.adapters.loaded

    async def answer(self, line: LineRequest, on_running: Callable[[], None]) -> Answer:
        """Return the line's answer; raise ApiError if the answer is an error, and Overloaded if there is no room."""
        if self.embedding is not None and self.embedding.serves(model := line.body.get("model")):
            if line.endpoint is not Endpoint.EMBEDDINGS:
                raise only_embeds(str(model))
            return await self.embedding.answer(line, on_running)
        with self._paying(line) as tab:
            tried = Tried(line.caller.id)
            try:
                asked = await self.threads.do(lambda: self._read(line, tried, on_running, tab))
            finally:
                tab.try_grammars(tried.cpu_s)
            tab.hold_logprobs(asked.requests, asked.has_limit)
            requests = tab.pay(asked.requests, asked.prompt_tokens, asked.has_limit)
            self.metrics.of[ServiceClass.BE].choices.observe(len(requests))
            at_once = tab.hold_up_to(min(len(requests), LINE_AT_ONCE))
            runs = (partial(self._in_place, partial(asked.run, request, len(requests))) for request in requests)
            delivered = await all_of(runs, at_once)
        if asked.makes_texts:
            longest = max(len(piece.tokens) for piece in delivered)
            self.metrics.of[ServiceClass.BE].longest_choice.observe(longest)
        return await self.threads.do(lambda: asked.whole(requests, delivered))

    @contextmanager
    def _paying(self, line: LineRequest) -> Iterator[CallerQuota]:
        """Take a place of the line's key, and let the line pay its tokens, as bodies at gateways do; give back at the
        end what it has not used. Raise KeyLimited where a place or the tokens are not left now."""
        tab, is_refused = CallerQuota(self.ledger, line.caller), False
        try:
            tab.admit()
            yield tab
        except Overloaded as error:
            is_refused = not isinstance(error, GivenUp)
            raise
        except ApiError as error:
            is_refused = error.status in REFUSALS
            if error.status == 429:
                raise KeyLimited(min(KEY_WAIT_S, float(error.headers["Retry-After"]))) from None
            raise
        finally:
            tab.close(is_refused)

    async def _in_place(self, run: Callable[[], Awaitable[T]]) -> T:
        """Run a choice when all lines together have a place left: lines leave room to chats."""
        async with self.places:
            return await run()

    def _promised(self, line: LineRequest, model: str, tried: Tried) -> tuple[ServicePromise, Origin]:
        """Return the promise of a line, and its origin; raise where its model was served when the job was checked, and
        is not now."""
        adapter = self.adapters.find(model)
        if adapter is None and not leads_to(model, self.own_models):
            raise no_such_model(model)
        promise = ServicePromise(ServiceClass.BE, Slo(jct_s=line.jct_s), TIER)
        return promise, Origin(line.id, self.client.name, self.client.now(), line.caller, adapter, tried=tried)

    def _read(self, line: LineRequest, tried: Tried, on_running: Callable[[], None], tab: CallerQuota) -> _Asked:
        """Return what a line asks for; long texts take long, so an event loop must not call this."""
        data, limits = json.dumps(line.body).encode(), (self.text, self.max_model_len)
        if line.endpoint is Endpoint.EMBEDDINGS:
            wanted = parse_body(EmbeddingRequest, data)
            requests = make_embedding_requests(wanted, *self._promised(line, wanted.model, tried), *limits)
            prompt_tokens, run = sum(len(request.prompt) for request in requests), partial(self._read_vector, tab)
            whole = partial(_embeddings, wanted)
            return _Asked(requests, prompt_tokens, has_limit=True, makes_texts=False, run=run, whole=whole)
        body: ChatRequest | CompletionRequest
        if line.endpoint is Endpoint.RESPONSES:
            response = parse_body(ResponseRequest, data)
            head = response_head(response, PREFIX + line.id.removeprefix("req-"), int(time.time()), TIER)
            body, whole = make_lone_chat(response), partial(self._response, response, head | {"store": False})
        else:
            body = parse_body(ChatRequest if line.endpoint is Endpoint.CHAT else CompletionRequest, data)
            whole = partial(self._completion, body)
        requests = make_requests(body, *self._promised(line, body.model, tried), *limits)
        if (estimate := line.estimate) is not None:  # its job's, of the output length, unless the client gave its own
            requests = tuple(replace(each, estimate=each.estimate or estimate) for each in requests)
        prompt_tokens = sum(len(request.prompt) for request in requests[:: body.n or 1])
        run = partial(self._run, body, on_running, tab)
        has_limit = body.most_tokens is not None
        return _Asked(requests, prompt_tokens, has_limit, makes_texts=True, run=run, whole=whole)

    def _response(
        self, body: ResponseRequest, head: Answer, requests: Sequence[Request], pieces: Sequence[AnswerPiece]
    ) -> Answer:
        return ResponseAnswer(body, head, requests[0], self.text).whole(pieces[0])

    def _completion(
        self, body: ChatRequest | CompletionRequest, requests: Sequence[Request], pieces: Sequence[AnswerPiece]
    ) -> Answer:
        shape = make_shape(body, requests, TIER, self.text)
        for number, piece in enumerate(pieces):
            for _ in shape.add(number, piece):
                pass
        return shape.whole()

    async def _read_vector(self, tab: CallerQuota, request: Request, choices: int) -> tuple[bytes, Charged]:
        follow = self.traces.follow(request, {}, choices, self.client.now)
        with RequestMeter(self.metrics, request, TIER, self.client.now, tab.caller.id) as meter, follow as trace:

            def note(delivered: Delivered) -> None:
                meter.deliver(0, delivered.opening, delivered.spent)
                trace.deliver(delivered)
                meter.write()
                meter.finish = FinishReason.STOP.value
                trace.finish(meter.finish)

            return await read_vector(self.client, request, note, meter.use.charge), meter.use.charged

    async def _run(
        self,
        body: ChatRequest | CompletionRequest,
        on_running: Callable[[], None],
        tab: CallerQuota,
        request: Request,
        choices: int,
    ) -> AnswerPiece:
        """Run a request to the end; call `on_running` when there is a place on a decode worker."""
        reader = AnswerReader(body, self.text, request.prompt)
        pieces, num_tokens = list[AnswerPiece](), 0
        follow = self.traces.follow(request, {}, choices, self.client.now)
        with RequestMeter(self.metrics, request, TIER, self.client.now, tab.caller.id) as meter, follow as trace:
            async with aclosing(self.client.open(request, meter.use.charge)) as deliveries:
                async for delivered in deliveries:
                    meter.deliver(len(delivered.tokens), delivered.opening, delivered.spent)
                    pieces.append(reader.read(delivered))
                    pieces[-1].charged = meter.use.charged
                    tab.use(len(delivered.tokens))
                    trace.deliver(delivered)
                    meter.write()
                    num_tokens += len(delivered.tokens)
                    if num_tokens - len(delivered.tokens) < RUNS_AT <= num_tokens:
                        on_running()
                    if finish := pieces[-1].finish:
                        meter.finish = finish.value
                        trace.finish(finish.value)
                        return join_pieces(pieces)
            raise RuntimeError("a request's deliveries ended without a finish")


def _embeddings(
    body: EmbeddingRequest, requests: Sequence[Request], delivered: Sequence[tuple[bytes, Charged]]
) -> Answer:
    answer = embedding_answer(body, requests, [vector for vector, _ in delivered])
    answer["usage"] |= cost_of(charged for _, charged in delivered)
    return answer
