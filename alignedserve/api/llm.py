"""LLM: prompts and conversations in, outputs out."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

from alignedserve.api.asking import Answer, ServerCalls
from alignedserve.api.deployment import Deployment, Setting
from alignedserve.api.outputs import Piece, RequestOutput
from alignedserve.errors import AskError
from alignedserve.http_client import PATIENCE_S
from alignedserve.progress import ProgressBar


@dataclass(frozen=True)
class SamplingParams:
    """How an output is sampled; None leaves a value to the server, as a field that a body does not have."""

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = 16  # as in vLLM; None: as many as the context holds
    min_tokens: int | None = None
    logprobs: int | None = None  # of each token, and of this number of the likeliest ones
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None  # json, regex, choice or grammar, as in a body

    def body(self) -> dict[str, Any]:
        """Return the fields of a request's body, for text completions."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        body = {name: value for name, value in given.items() if value is not None}
        if self.logit_bias is not None:
            body["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return body


@dataclass(frozen=True)
class Slo:
    """Deadlines of a request in milliseconds; None leaves them to the server."""

    ttft_ms: float | None = None
    tbt_ms: float | None = None
    jct_ms: float | None = None
    strict: bool | None = None  # whether a prompt that alone takes longer than ttft_ms is refused

    def body(self) -> dict[str, Any]:
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


T = TypeVar("T")

Tokens: TypeAlias = Sequence[int]
Prompt: TypeAlias = str | Tokens | Mapping[str, Any]  # or {"prompt": text}, {"prompt_token_ids": ids}
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Tier: TypeAlias = Literal["default", "flex"]  # real time, best effort

_TEXTS, _CHATS = "/v1/completions", "/v1/chat/completions"
_JOBS_OFF: dict[str, Setting] = {"jobs_store": "off"}  # a part less to start


@dataclass(frozen=True)
class _AskedOptions:
    """The sampling and the promises of one call's requests."""

    params: Params
    priority: int | Sequence[int]
    slo: Slo | None
    service_tier: Tier | None

    @property
    def tier(self) -> Tier:
        return self.service_tier or ("flex" if self.slo is None else "default")


class LLM:
    """A model that answers Python code, in a deployment of its own or on a server that runs.

    llm = LLM("smollm2")
    for output in llm.generate(["Ada was born in", "Alan was born in"], SamplingParams(max_tokens=8)):
        print(output.outputs[0].text)

    `generate` and `chat` return when all outputs are there, so their requests are best-effort unless they get an `slo`
    or a `service_tier`; pieces of a stream are real-time. The deployment ends with the block, with `close`, or with
    the process.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        url: str | None = None,
        api_key: str | None = None,
        ca: str | Path | None = None,
        retry_for_s: float = PATIENCE_S,
        settings: Mapping[str, Setting] | None = None,
        **flags: Setting,
    ) -> None:
        """Start a deployment of the model (without one, of what `serve` takes then; flags and settings as in
        `Deployment`), or use the server at `url`: its model of this name, or the first that it lists. `ca` is the file
        of the authority that signed its certificate, by default what SSL_CERT_FILE names. For `retry_for_s` each
        request is asked again where the server is full."""
        if url is not None and (settings or flags):
            raise AskError(f"{min({**(settings or {}), **flags})} is for a deployment that is started: not beside url")
        self.deployment = (
            None
            if url is not None
            else Deployment("auto" if model is None else model, settings=settings, **(_JOBS_OFF | flags))
        )
        there, file = url or cast(Deployment, self.deployment).url, None if ca is None else Path(ca)
        self._asking = ServerCalls(there, api_key, retry_for_s, file)
        self._model = str(model) if url is not None and model is not None else self._asking.model()

    def __repr__(self) -> str:
        return f"LLM({self._model!r}, at {self._asking.url})"

    @property
    def weights(self) -> dict[str, str]:
        """Return how each worker keeps the weights of the model, and how far that is from plain ones where it quantised
        them itself. A server tells it to keys with the scope `dashboard` alone."""
        return self._asking.weights()

    def close(self) -> None:
        if self.deployment is not None:
            self.deployment.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        slo: Slo | None = None,
        service_tier: Tier | None = None,
    ) -> list[RequestOutput]:
        """Return the outputs of each prompt, in the order of the prompts; a bar on a terminal shows how many there are.

        A single prompt is a text, token ids, or a mapping with either; lower priorities go first.
        """
        said = _AskedOptions(sampling_params, priority, slo, service_tier)
        return _finished(self._generated(prompts, said, use_tqdm))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        slo: Slo | None = None,
        service_tier: Tier | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Return the outputs of one conversation or of several; more fields, such as `tools`, go into the bodies."""
        chats = [messages] if isinstance(messages[0], Mapping) else messages
        asked = [{"messages": list(cast(Messages, chat)), **fields} for chat in chats]
        bodies = self._bodies(asked, _AskedOptions(sampling_params, priority, slo, service_tier))
        answers = _finished(self._all(_CHATS, [*map(_as_chat, bodies)], use_tqdm))
        return [RequestOutput.from_answer(answer, None) for answer in answers]

    def stream(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None, *, slo: Slo | None = None
    ) -> Iterator[Piece]:
        """Yield the pieces of an output as they come, of a prompt or of a conversation."""
        path, body = self._streamed(prompt, sampling_params, slo)
        for event in self._asking.events(path, body):
            yield from map(Piece.from_choice, event["choices"])

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        priority: int | Sequence[int] = 0,
        slo: Slo | None = None,
        service_tier: Tier | None = None,
    ) -> list[RequestOutput]:
        """Return what `generate` returns, in the caller's event loop."""
        said = _AskedOptions(sampling_params, priority, slo, service_tier)
        return await self._generated(prompts, said, shows=False)

    async def astream(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None, *, slo: Slo | None = None
    ) -> AsyncIterator[Piece]:
        """Yield what `stream` yields, in the caller's event loop."""
        path, body = self._streamed(prompt, sampling_params, slo)
        async for event in self._asking.events_async(path, body):
            for choice in event["choices"]:
                yield Piece.from_choice(choice)

    def tokenize(self, text: str) -> list[int]:
        return list(self._asking.one("/tokenize", {"model": self._model, "prompt": text})["tokens"])

    def detokenize(self, token_ids: Tokens) -> str:
        return str(self._asking.one("/detokenize", {"model": self._model, "tokens": list(token_ids)})["prompt"])

    async def _generated(
        self, prompts: Prompt | Sequence[Prompt], said: _AskedOptions, shows: bool
    ) -> list[RequestOutput]:
        asked = _several(prompts)
        answers = await self._all(_TEXTS, self._bodies(map(_text_body, asked), said), shows)
        return [
            RequestOutput.from_answer(answer, _words(prompt)) for answer, prompt in zip(answers, asked, strict=True)
        ]

    async def _all(self, path: str, bodies: Sequence[Answer], shows: bool) -> list[Answer]:
        with ProgressBar("prompts", sys.stderr) as bar:
            told: Callable[[int], None] = (lambda done: bar.show(done, len(bodies))) if shows else (lambda _: None)
            return await self._asking.all_of(path, bodies, told)

    def _streamed(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None, slo: Slo | None
    ) -> tuple[str, Answer]:
        said = _AskedOptions(sampling_params, 0, slo, "default")
        if not isinstance(prompt, str | Mapping) and prompt and isinstance(prompt[0], Mapping):
            [body] = self._bodies([{"messages": list(prompt)}], said)
            return _CHATS, _as_chat(body)
        [body] = self._bodies([_text_body(cast(Prompt, prompt))], said)
        return _TEXTS, body

    def _bodies(self, asked: Iterable[Answer], said: _AskedOptions) -> list[Answer]:
        """Return the whole bodies of what is asked."""
        asked = list(asked)
        more: Answer = {"model": self._model, "return_token_ids": True, "service_tier": said.tier}
        if said.slo is not None:
            more["slo"] = said.slo.body()
        params = _for_each(said.params or SamplingParams(), len(asked), "sampling_params")
        priorities = _for_each(said.priority, len(asked), "priority")
        return [
            {**body, **more, "priority": first, **of.body(), "return_tokens_as_token_ids": of.logprobs is not None}
            for body, of, first in zip(asked, params, priorities, strict=True)
        ]


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the prompts as several; token ids alone are one."""
    is_one = isinstance(prompts, str | Mapping) or (bool(prompts) and isinstance(prompts[0], int))
    return [cast(Prompt, prompts)] if is_one else cast("Sequence[Prompt]", prompts)


def _text_body(prompt: Prompt) -> Answer:
    if isinstance(prompt, Mapping):
        prompt = cast(Prompt, prompt.get("prompt_token_ids") or prompt["prompt"])
    return {"prompt": prompt if isinstance(prompt, str) else list(cast(Tokens, prompt))}


def _words(prompt: Prompt) -> str | None:
    if isinstance(prompt, Mapping):
        return cast("str | None", prompt.get("prompt"))
    return prompt if isinstance(prompt, str) else None


def _as_chat(body: Answer) -> Answer:
    """Return the body with log-probabilities as chats ask for them."""
    if (top := body.pop("logprobs", None)) is not None:
        body |= {"logprobs": True, "top_logprobs": top}
    return body


def _for_each(given: T | Sequence[T], number: int, name: str) -> Sequence[T]:
    """Return one value for each prompt."""
    if not isinstance(given, Sequence):
        return [given] * number
    if len(given) != number:
        raise AskError(f"{name} has {len(given)} values for {number} prompts: give one, or one for each")
    return given


def _finished(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work, in a loop and a thread of its own: a notebook's thread has a loop that runs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="asking", daemon=True)
    thread.start()
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:  # Ctrl-C too: the requests are cancelled
        future.cancel()
        raise
    finally:
        asyncio.run_coroutine_threadsafe(_settled(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _settled() -> None:
    """Wait until the other tasks of this loop have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
