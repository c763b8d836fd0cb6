"""From what a client sent to Requests: prompts as tokens, limits, sampling. Nothing here knows of HTTP."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from alignedserve.config.config import SloConfig
from alignedserve.core import Choice, Request, Sampling
from alignedserve.gateway.access.keys import ANONYMOUS, Caller, KeyRing
from alignedserve.gateway.openai.errors import ApiError, invalid
from alignedserve.gateway.openai.promises import Promise
from alignedserve.gateway.openai.types import ChatRequest, CompletionRequest
from alignedserve.scheduling.lengths import hinted
from alignedserve.text.chat_template import all_texts
from alignedserve.text.text_model import SamplingDefaults, TextModel

_SEEDS = 1 << 64
CUT = 16  # times the model's context, of a prompt that need not fit into it
Limits: TypeAlias = tuple[Choice | None, str]  # of what an output may be: its tokens, or its text


@dataclass(frozen=True)
class GatewaySettings:
    served_model_names: tuple[str, ...]
    max_model_len: int  # tokens of prompt and output together
    keys: KeyRing = field(default_factory=lambda: KeyRing(()))
    body_limit_bytes: int = 4 << 20
    body_limit_s: float = 30.0
    cors_origins: tuple[str, ...] = ()  # none: a browser lets no page of others in
    stalled_client_s: float = 60.0  # a client that reads nothing for so long is given up
    slo: SloConfig = field(default_factory=SloConfig)
    scale: Mapping[str, str] = field(default_factory=dict)  # role -> how many workers of it there may be, by load


@dataclass(frozen=True)
class Origin:
    """Where a body came from."""

    id: str  # of its first request, and the beginning of the others'
    owner: str  # the member that gets their tokens
    arrival_at: float
    caller: Caller = ANONYMOUS


def requests_of(
    body: ChatRequest | CompletionRequest, promise: Promise, origin: Origin, text: TextModel, max_model_len: int
) -> tuple[Request, ...]:
    """One for each choice, those of the first prompt first. Long prompts take long: not for an event loop."""
    _check_length(body, text, max_model_len)
    limits = body.format.limits(text) if body.format is not None else (None, "")
    made = [_request(body, prompt, limits, promise, origin, text, max_model_len) for prompt in _prompts(body, text)]
    num_choices = body.n or 1
    return tuple(
        _of_choice(request, origin.id, at * num_choices + number, number)
        for at, request in enumerate(made)
        for number in range(num_choices)
    )


def _of_choice(request: Request, origin: str, place: int, number: int) -> Request:
    """The first has the origin's id, and the seed that was asked for; each of a prompt's choices draws by another."""
    if place == 0:
        return request
    sampling = replace(request.sampling, seed=_wrapped(request.sampling.seed + number))
    return replace(request, id=f"{origin}-{place}", sampling=sampling)


def _wrapped(seed: int) -> int:
    return (seed + _SEEDS // 2) % _SEEDS - _SEEDS // 2


def _request(
    body: ChatRequest | CompletionRequest,
    prompt: tuple[int, ...],
    limits: Limits,
    promise: Promise,
    origin: Origin,
    text: TextModel,
    max_model_len: int,
) -> Request:
    _check_ids(body, prompt, text.vocab_size)
    stop_tokens = (*(body.stop_token_ids or ()), *(() if body.ignore_eos else text.eos_ids))
    max_tokens = _max_tokens(body, len(prompt), max_model_len)
    _check_ends(body, stop_tokens, max_tokens)
    return Request(
        id=origin.id,
        owner=origin.owner,
        attempt=0,
        prompt=prompt,
        emitted=(),
        sampling=_sampling(body, text.sampling, limits),
        max_tokens=max_tokens,
        stop_tokens=tuple(dict.fromkeys(stop_tokens)),
        service=promise.service,
        slo=promise.slo,
        arrival_at=origin.arrival_at,
        priority=body.priority or 0,
        salt=origin.caller.salted(body.cache_salt),
        estimate=None if body.expected_tokens is None else hinted(body.expected_tokens),
    )


def _check_length(body: ChatRequest | CompletionRequest, text: TextModel, max_model_len: int) -> None:
    most = CUT * max_model_len if body.truncate_prompt_tokens else max_model_len
    if isinstance(body, ChatRequest):
        prompts = [[*all_texts([body.shown_messages, body.rendering.tools])]]
    else:
        prompts = [[prompt] for prompt in body.prompts if isinstance(prompt, str)]
    for texts in prompts:
        check_length(texts, text, max_model_len, most, _prompt_field(body))


def check_length(texts: Sequence[str], text: TextModel, max_model_len: int, most: int, field: str) -> None:
    """Before any of it is tokenised as a whole."""
    if sum(map(len, texts)) > most and text.surely_exceeds(texts, most):
        beyond = "it alone has more" if most == max_model_len else f"it alone has more than {most}"
        raise _too_long(f"the prompt is too long: {beyond}", max_model_len, field)


def _prompts(body: ChatRequest | CompletionRequest, text: TextModel) -> list[tuple[int, ...]]:
    if isinstance(body, ChatRequest):
        _check_tools(body, text)
        prompts = [tuple(text.chat_ids(body.shown_messages, body.rendering))]
    else:
        with_special = body.add_special_tokens is not False
        prompts = [tuple(text.prompt_ids(one, with_special) if isinstance(one, str) else one) for one in body.prompts]
    return [prompt[-(body.truncate_prompt_tokens or 0) :] for prompt in prompts]


def _check_tools(body: ChatRequest, text: TextModel) -> None:
    """A model that is not shown its tools, or calls them in a way that is not known here, would never call them."""
    if body.may_call and body.demanded_calls is None and text.call_format is None:
        message = "this model's chat template shows no tools in a way known here: set tool_choice, to demand a call"
        raise invalid(message, "tools", "unsupported_parameter")


def _prompt_field(body: ChatRequest | CompletionRequest) -> str:
    return "messages" if isinstance(body, ChatRequest) else "prompt"


def _check_ids(body: ChatRequest | CompletionRequest, prompt: tuple[int, ...], vocab_size: int) -> None:
    if not prompt:
        raise invalid("the prompt is empty", _prompt_field(body))
    named = {
        _prompt_field(body): prompt,
        "stop_token_ids": body.stop_token_ids,
        "allowed_token_ids": body.allowed_token_ids,
        "logit_bias": [token for token, _ in body.biases],
    }
    for name, ids in named.items():
        if ids and max(ids) >= vocab_size:
            raise invalid(f"{name}: {max(ids)} is no token of this model, which has {vocab_size}", name)


def _check_ends(body: ChatRequest | CompletionRequest, stop_tokens: tuple[int, ...], max_tokens: int) -> None:
    """Whatever may come and may not, there is always a token that may."""
    if body.min_tokens and body.min_tokens > max_tokens:
        raise invalid(f"min_tokens: {body.min_tokens} are more than the output may have, {max_tokens}", "min_tokens")
    if body.min_tokens and body.allowed_token_ids and set(body.allowed_token_ids) <= set(stop_tokens):
        raise invalid("allowed_token_ids: all of them end the output, which min_tokens forbids", "allowed_token_ids")
    if body.format is not None and not stop_tokens:
        name = body.format.field
        raise invalid(f"{name} needs a token that ends the output: leave ignore_eos out, or name a stop token", name)


def _max_tokens(body: ChatRequest | CompletionRequest, prompt_tokens: int, max_model_len: int) -> int:
    left = max_model_len - prompt_tokens
    if left < 1:
        asked = f"the prompt is too long: it has {prompt_tokens} tokens, which leaves none for output"
        raise _too_long(asked, max_model_len, _prompt_field(body))
    if body.most_tokens is not None and body.most_tokens > left:
        name = body.most_tokens_field
        asked = f"{name} asks for {body.most_tokens} tokens of output, the prompt has {prompt_tokens}"
        raise _too_long(asked, max_model_len, name)
    if body.most_tokens == 0:
        return 1  # the engine always makes one; the answer does not show it
    return body.most_tokens or min(left, body.usual_tokens or left)


def _too_long(asked: str, max_model_len: int, field: str) -> ApiError:
    message = f"this model's maximum context length is {max_model_len} tokens: {asked}"
    return invalid(message, field, "context_length_exceeded")


def _sampling(body: ChatRequest | CompletionRequest, usual: SamplingDefaults, limits: Limits) -> Sampling:
    choice, syntax = limits
    scores_prompt = isinstance(body, CompletionRequest) and body.echo
    repetition = usual.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
    return Sampling(
        temperature=usual.temperature if body.temperature is None else body.temperature,
        top_p=usual.top_p if body.top_p is None else body.top_p,
        top_k=max(0, usual.top_k if body.top_k is None else body.top_k),  # -1 keeps all, as in vLLM
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        min_p=usual.min_p if body.min_p is None else body.min_p,
        repetition_penalty=repetition,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        min_tokens=body.min_tokens or 0,
        logit_bias=body.biases,
        allowed_tokens=tuple(dict.fromkeys(body.allowed_token_ids or ())),
        grammar=choice,
        syntax=syntax,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.num_logprobs if scores_prompt else None,
    )
