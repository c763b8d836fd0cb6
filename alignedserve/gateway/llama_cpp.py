"""The routes of llama.cpp's server that editors use: /infill, which fills in the middle of a file, and /completion.

body ─▶ its prompt, as tokens ─▶ a text completion ─▶ pieces of its answer ─▶ an answer in llama.cpp's form

Sampling has llama.cpp's defaults. openai/peers.py knows the fields that are called otherwise here or mean nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from pydantic import Field
from starlette.requests import Request as HttpRequest

from alignedserve.core import FinishReason, Request
from alignedserve.gateway.exchanges import Exchange, answer_body
from alignedserve.gateway.files import HttpRoute
from alignedserve.gateway.openai.errors import ApiError
from alignedserve.gateway.openai.formats import Pattern, Schema
from alignedserve.gateway.openai.reading import AnswerPiece
from alignedserve.gateway.openai.requests import check_length, infill_tokens
from alignedserve.gateway.openai.streaming import event, waiting
from alignedserve.gateway.openai.strict import ListOf, Strict
from alignedserve.gateway.openai.types import CompletionRequest, FimRequest, SampledRequest, TokenId
from alignedserve.gateway.starting import StartedRequests, Starter
from alignedserve.owner.client import InLine
from alignedserve.text.infill import FILE_NAME, REPO_NAME
from alignedserve.text.text_model import TextModel

MOST_FILES = 1024  # besides the file that is edited
_USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # where a client names none
_USUAL_PART = 4  # of the context is left for an answer without a limit, where other files would fill it


class LlamaPrompt(NamedTuple):
    tokens: list[int]
    ends: Sequence[int] = ()  # tokens that end the answer besides the model's own
    lacks_files: bool = False  # whether other files of the body did not fit


class LlamaRequest(SampledRequest):
    model: str = ""  # the served one
    n_predict: int | None = Field(None, ge=-1)  # -1 is no limit; with 0 the prompt is only put into the cache
    stop: ListOf[str] | None = Field(None, max_length=16)
    stream: bool | None = None
    ignore_eos: bool | None = None
    guided_json: Schema | str | None = None  # llama.cpp's json_schema
    guided_grammar: Pattern | None = None  # its grammar
    return_tokens: bool | None = None
    response_fields: ListOf[str] | None = Field(None, max_length=64)
    t_max_predict_ms: float | None = Field(None, ge=0)  # so long after its first token an answer ends that has a line

    @abstractmethod
    def prompt_of(self, text: TextModel, max_model_len: int) -> LlamaPrompt:
        """Return the prompt. A long one takes long, so an event loop must not call this."""

    def completion(self, model: str, prompt: LlamaPrompt) -> CompletionRequest:
        """Return the text completion of a prompt."""
        most = self.n_predict if self.n_predict is not None and self.n_predict >= 0 else None
        same = (*SampledRequest.model_fields, "stop", "stream", "ignore_eos", "guided_json", "guided_grammar")
        given = {name: getattr(self, name) for name in same if getattr(self, name) is not None}
        fields = {**_USUAL, **given, "model": self.model or model, "max_tokens": most}
        fields["seed"] = None if self.seed == -1 else self.seed  # in llama.cpp -1 is any
        stops = [] if self.ignore_eos else [*prompt.ends]
        fields |= {"prompt": prompt.tokens, "stop_token_ids": stops, "echo": most == 0}
        made = FimRequest.of(fields)
        made._told = self._told
        return made


class LlamaCompletionRequest(LlamaRequest):
    prompt: str | ListOf[TokenId]

    def prompt_of(self, text: TextModel, max_model_len: int) -> LlamaPrompt:
        if not isinstance(self.prompt, str):
            return LlamaPrompt(self.prompt)
        check_length([self.prompt], text, max_model_len, max_model_len, "prompt")
        return LlamaPrompt(text.prompt_ids(self.prompt))


class ExtraFile(Strict):
    text: str
    filename: str | None = Field(None, max_length=4096)
    time: Any = None  # when the editor took it


class InfillRequest(LlamaRequest):
    input_prefix: str
    input_suffix: str
    input_extra: ListOf[ExtraFile] = Field([], max_length=MOST_FILES)
    prompt: str = ""  # the beginning of the middle

    def prompt_of(self, text: TextModel, max_model_len: int) -> LlamaPrompt:
        tokens, begin = infill_tokens(text, "input_suffix"), text.prompt_ids("")
        for name in ("input_prefix", "input_suffix", "prompt"):
            check_length([getattr(self, name)], text, max_model_len, max_model_len, name)
        after, begun = map(text.inner_ids, (self.input_suffix, self.prompt))
        middle = tokens.prompt(text.answer_ids(self.input_prefix), after, begun)
        if self.input_extra and tokens.file is not None:
            begin += [] if tokens.repo is None else [tokens.repo, *text.answer_ids(REPO_NAME)]
            middle = [tokens.file, *text.answer_ids(FILE_NAME), *middle]
        most = max_model_len // _USUAL_PART if self.n_predict is None or self.n_predict < 0 else self.n_predict
        files = self._files(text, tokens.file, max_model_len - len(begin) - len(middle) - max(1, most))
        ids = [*begin, *(id for file in files for id in file), *middle]
        return LlamaPrompt(ids, tokens.ends, len(files) < len(self.input_extra))

    def _files(self, text: TextModel, begin: int | None, room: int) -> list[list[int]]:
        """Return the tokens of the other files that fit: of the last ones, since editors add files at the end."""
        files = list[list[int]]()
        for file in reversed(self.input_extra):
            if room <= 0 or text.surely_exceeds([file.text], room):
                break
            name = f"{file.filename}\n" if file.filename else FILE_NAME
            head = [] if begin is None else [begin, *text.answer_ids(name)]
            files.append([*head, *text.answer_ids(file.text)])
            if (room := room - len(files[-1])) < 0:
                files.pop()
                break
        return files[::-1]


# --- Routes and answers


class LlamaRoutes:
    def __init__(self, starter: Starter) -> None:
        self._starter = starter

    @property
    def routes(self) -> Sequence[HttpRoute]:
        kinds = {"/infill": InfillRequest, "/completion": LlamaCompletionRequest}
        return [("POST", path, partial(answer_body, self._starter, kind, self._begin)) for path, kind in kinds.items()]

    async def _begin(self, http: HttpRequest, body: LlamaRequest) -> LlamaExchange:
        settings = self._starter.settings
        make = partial(body.prompt_of, self._starter.text, settings.max_model_len)
        prompt = await self._starter.in_thread(http, make)
        completion = body.completion(settings.served_model_names[0], prompt)
        started = await self._starter.start(http, completion)
        answer = LlamaAnswer(body, completion.model, started.requests[0], prompt.lacks_files)
        return LlamaExchange(started, body, answer, self._starter.client.now)


class LlamaAnswer:
    """Builds one answer of its pieces."""

    def __init__(self, body: LlamaRequest, model: str, request: Request, lacks_files: bool) -> None:
        self._fields, self._with_tokens = body.response_fields, bool(body.return_tokens)
        self._model, self._lacks_files, self._num_prompt = model, lacks_files, len(request.prompt)
        self._texts, self._tokens = list[str](), list[int]()
        self._num_cached = 0
        self._last: AnswerPiece | None = None

    def feed(self, piece: AnswerPiece) -> None:
        if self._last is None:
            self._num_cached = piece.num_cached
        self._last = piece
        self._texts.append(piece.text)
        self._tokens += piece.tokens

    @property
    def has_line(self) -> bool:
        return any("\n" in text for text in self._texts)

    def part(self, piece: AnswerPiece) -> dict[str, Any]:
        """Return the event of a piece."""
        counts = {"tokens_predicted": len(self._tokens), "tokens_evaluated": self._num_prompt}
        return {"index": 0, "content": piece.text, "tokens": list(piece.tokens), "stop": False, **counts}

    def whole(self, times: dict[str, float], is_streamed: bool) -> dict[str, Any]:
        """Return the answer, or the last event of a stream, which lacks what came before."""
        assert self._last is not None, "an answer has a piece"
        stopped, computed = self._last.stop, self._num_prompt - self._num_cached
        why = "limit" if self._last.finish is FinishReason.LENGTH else "word" if stopped is not None else "eos"
        tree = {
            "index": 0,
            "content": "" if is_streamed else "".join(self._texts),
            "tokens": self._tokens if self._with_tokens and not is_streamed else [],
            "stop": True,
            "model": self._model,
            "tokens_predicted": len(self._tokens),
            "tokens_evaluated": self._num_prompt,
            "tokens_cached": self._num_cached,
            "truncated": self._lacks_files,
            "has_new_line": self.has_line,
            "stop_type": why,
            "stopping_word": stopped or "",
            "timings": {
                "cache_n": self._num_cached,
                **_timing("prompt", computed, times["prompt_time"]),
                **_timing("predicted", len(self._tokens), times["completion_time"]),
            },
        }
        return tree if self._fields is None else dict(_found(tree, self._fields))


def _timing(what: str, number: int, seconds: float) -> dict[str, float]:
    milliseconds = 1e3 * seconds
    return {
        f"{what}_n": number,
        f"{what}_ms": milliseconds,
        f"{what}_per_token_ms": milliseconds / max(1, number),
        f"{what}_per_second": number / seconds if seconds else 0.0,
    }


def _found(tree: dict[str, Any], paths: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields that a client wants, each by its path, such as timings/prompt_n; those that are missing not."""
    for path in paths:
        value: Any = tree
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            yield path, value


class LlamaExchange(Exchange[LlamaAnswer]):
    def __init__(
        self, started: StartedRequests, body: LlamaRequest, answer: LlamaAnswer, now: Callable[[], float]
    ) -> None:
        super().__init__(started, bool(body.stream), body.ignored, answer)
        self._now = now
        self._most_s = None if not body.t_max_predict_ms else body.t_max_predict_ms / 1e3

    async def _pieces(self) -> AsyncGenerator[AnswerPiece | InLine, None]:
        """Yield all pieces. The answer has them when they are yielded, and ends where it may take no longer."""
        began_at: float | None = None
        async for _, piece in self._generation.pieces():
            if isinstance(piece, AnswerPiece):
                self._told.feed(piece)
                began_at = self._now() if began_at is None else began_at
                is_late = self._most_s is not None and self._now() - began_at > self._most_s
                if is_late and not piece.finish and self._told.has_line:
                    piece.finish = FinishReason.LENGTH
                    self._meter.finish_choice(0, piece.finish.value)
                    yield piece
                    return
            yield piece

    async def _events(self) -> AsyncGenerator[bytes, None]:
        async for piece in self._pieces():
            if isinstance(piece, InLine):
                yield waiting(piece)
            elif piece.text or piece.tokens:
                yield event(self._told.part(piece))
                self._meter.count_write(0)
        yield event(self._told.whole(self._meter.timing_usage(), is_streamed=True))

    def _failed(self, error: ApiError) -> Iterator[bytes]:
        yield event(error.body)

    async def _whole(self) -> dict[str, Any]:
        await self._generation.begin()
        async for piece in self._pieces():
            if not isinstance(piece, InLine):
                self._meter.count_write(0)
        return self._told.whole(self._meter.timing_usage(), is_streamed=False)
