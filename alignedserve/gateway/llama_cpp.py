"""The routes of llama.cpp's server that editors use: /infill, which fills in the middle of a file, and /completion.

body ─▶ its prompt, as tokens ─▶ a text completion ─▶ pieces of its answer ─▶ an answer in llama.cpp's form

Sampling has llama.cpp's defaults. openai/peers.py knows the fields that are called otherwise here or mean nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from pydantic import Field
from starlette.requests import Request as HttpRequest

from alignedserve.core import FinishReason
from alignedserve.gateway.exchanges import ChatExchange, answer_body
from alignedserve.gateway.files import HttpRoute
from alignedserve.gateway.generation import Numbered
from alignedserve.gateway.openai.formats import Pattern, Schema
from alignedserve.gateway.openai.reading import AnswerPiece, join_pieces
from alignedserve.gateway.openai.requests import check_length, infill_tokens
from alignedserve.gateway.openai.shapes import CompletionShape
from alignedserve.gateway.openai.strict import ListOf, Strict
from alignedserve.gateway.openai.types import FimRequest, SampledRequest, StreamOptions, TokenId
from alignedserve.gateway.starting import StartedRequests, Starter
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

    def completion(self, model: str, prompt: LlamaPrompt) -> FimRequest:
        """Return the text completion of a prompt."""
        most = self.n_predict if self.n_predict is not None and self.n_predict >= 0 else None
        same = FimRequest.model_fields.keys() & type(self).model_fields
        fields = {**_USUAL, **{name: value for name in same if (value := getattr(self, name)) is not None}}
        fields |= {"model": self.model or model, "prompt": prompt.tokens, "max_tokens": most, "echo": most == 0}
        fields |= {"stop_token_ids": [] if self.ignore_eos else [*prompt.ends]}
        fields["seed"] = None if self.seed == -1 else self.seed  # in llama.cpp -1 is any
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
            ids = [*head, *text.answer_ids(file.text)]
            if (room := room - len(ids)) < 0:
                break
            files.insert(0, ids)
        return files


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
        return LlamaExchange(started, body, LlamaShape(started, body, completion, prompt, self._starter.text))


class LlamaShape(CompletionShape):
    """Makes one answer, whole or in events. The last event is the answer without what came before."""

    def __init__(
        self, started: StartedRequests, body: LlamaRequest, made: FimRequest, prompt: LlamaPrompt, text: TextModel
    ) -> None:
        super().__init__(made, started.requests, started.promise.tier, text)
        self.options = StreamOptions(include_usage=True)
        self._fields, self._with_tokens = body.response_fields, body.return_tokens
        self._lacks_files, self._times = prompt.lacks_files, started.meter.timing_usage
        self._last = AnswerPiece("", (), None)
        self.has_line = False

    def count(self, number: int, piece: AnswerPiece) -> None:
        super().count(number, piece)
        self._last = piece
        self.has_line |= "\n" in piece.text

    def chunk(self, number: int, piece: AnswerPiece) -> dict[str, Any] | None:
        self.count(number, piece)
        if not (piece.text or piece.tokens):
            return None
        return {"index": 0, "content": piece.text, "tokens": list(piece.tokens), "stop": False, **self._counts}

    def chunk_like(self, number: int, piece: AnswerPiece) -> None:
        """Say that events differ in more than their text."""

    def usage_chunk(self, timing: Mapping[str, float]) -> dict[str, Any]:
        return self._tree(AnswerPiece("", (), None))

    def whole(self) -> dict[str, Any]:
        return self._tree(join_pieces(self._pieces[0]))

    @property
    def _counts(self) -> dict[str, int]:
        return {"tokens_predicted": self._output_tokens, "tokens_evaluated": self._prompt_tokens}

    def _tree(self, shown: AnswerPiece) -> dict[str, Any]:
        finish, stopped, times = self._last.finish, self._last.stop, self._times()
        computed, cached = self._prompt_tokens - self._cached_tokens, self._cached_tokens
        tree = {
            "index": 0,
            "content": shown.text,
            "tokens": list(shown.tokens) if self._with_tokens else [],
            "stop": True,
            "model": self.model,
            **self._counts,
            "tokens_cached": cached,
            "truncated": self._lacks_files,
            "has_new_line": self.has_line,
            "stop_type": "limit" if finish is FinishReason.LENGTH else "eos" if stopped is None else "word",
            "stopping_word": stopped or "",
            "timings": {
                "cache_n": cached,
                **_timing("prompt", computed, times["prompt_time"]),
                **_timing("predicted", self._output_tokens, times["completion_time"]),
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


class LlamaExchange(ChatExchange):
    _end = b""

    def __init__(self, started: StartedRequests, body: LlamaRequest, shape: LlamaShape) -> None:
        super().__init__(started, bool(body.stream), body.ignored, shape)
        self._most_s = (body.t_max_predict_ms or inf) / 1e3

    async def _pieces(self) -> AsyncIterator[Numbered]:
        """Yield all pieces, up to one that comes too late behind a line."""
        has_line = False
        async for choice, piece in super()._pieces():
            if isinstance(piece, AnswerPiece) and not piece.finish:
                has_line |= "\n" in piece.text
                if has_line and self._meter.timing_usage()["completion_time"] > self._most_s:
                    piece.finish = FinishReason.LENGTH
                    self._meter.finish_choice(choice, piece.finish.value)
                    yield choice, piece
                    return
            yield choice, piece
