"""Make Requests of a parsed body: prompts as tokens, limits, sampling. Nothing here knows of HTTP.

`tokenize` and `detokenize` convert prompts to tokens and back, as vLLM's routes do."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from alignedserve.core import Adapter, Choice, Reasoning, Request, Sampling
from alignedserve.errors import PromptTooLong
from alignedserve.gateway.access.keys import ANONYMOUS, Caller
from alignedserve.gateway.openai.errors import ApiError, invalid
from alignedserve.gateway.openai.formats import ANY_OBJECT, Format, WantedCalls
from alignedserve.gateway.openai.promises import ServicePromise
from alignedserve.gateway.openai.types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PromisedRequest,
    TokenizeRequest,
)
from alignedserve.scheduling.lengths import hinted
from alignedserve.text.call_grammar import BesideCalls
from alignedserve.text.chat_template import Rendering, all_texts
from alignedserve.text.infill import InfillTokens
from alignedserve.text.syntax_trial import Tried
from alignedserve.text.text_model import TextModel
from alignedserve.text.token_sets import pack_tokens

_SEEDS = 1 << 64
FAR_TOO_LONG = 8  # characters for each token that a conversation may have: few texts have that many
MOST_CONTEXTS = 16  # the length of a prompt that need not fit into the model's context, in contexts
MOST_RULE_BYTES = 4 << 20  # of memory that the rules of all choices of a body may take in a part: each choice has them
# Tokens that the prompts of all choices of a body may have: each part has the prompt for each choice, at 36 bytes a
# token, and 4 or more in the body. So a few choices, which any prompt may have, take less than 50 times that.
MOST_CHOICE_TOKENS, FEW_CHOICES = 1 << 18, 5
_TOKEN_BYTES, _BIAS_BYTES = 36, 120  # of memory, for a token in a tuple, and for a token with its bias
# Tokens of a body of /tokenize need not fit into the context. MOST_CONTEXTS of a long one would take a thread for ten
# seconds: they are no more than this, or one context.
MOST_CONVERTED = 1 << 18


@dataclass(frozen=True)
class Origin:
    """The origin of a body: its caller, and the member that receives its tokens."""

    id: str  # of the body's first request; the ids of the other requests begin with this id
    owner: str  # the member that receives their tokens
    arrival_at: float
    caller: Caller = ANONYMOUS
    adapter: Adapter | None = None  # that its model names
    tries: int = 0  # how often its client was refused before, as it says
    tried: Tried = field(default_factory=Tried)  # of its grammars


def make_requests(
    body: ChatRequest | CompletionRequest, promise: ServicePromise, origin: Origin, text: TextModel, max_model_len: int
) -> tuple[Request, ...]:
    """Return a request for each choice, those of the first prompt first.

    Long prompts take long, so an event loop must not call this."""
    if (rule := text.pooled) is not None and not rule.generates:
        ask = "scores and writes no text: send pairs of texts to /v1/score"
        if rule.embeds:
            ask = "embeddings and writes no text: send texts to /v1/embeddings"
        raise invalid(f"this model makes {ask}", "model", "unsupported_model")
    prompts = _prompts(body, text, max_model_len)
    rules, stop_tokens = _make_rules(body, text, origin.tried)
    num_choices, num_tokens = body.n or 1, sum(map(len, prompts))
    # A small body must not be large in every part, where each choice has the whole prompt.
    if num_choices > FEW_CHOICES and num_choices * num_tokens > MOST_CHOICE_TOKENS:
        message = f"n: {num_choices} choices of {num_tokens} prompt tokens have {num_choices * num_tokens}, and "
        message += f"{MOST_CHOICE_TOKENS} is the most for more than {FEW_CHOICES} choices: ask for fewer at a time"
        raise invalid(message, "n", "too_large")
    made: list[Request] = []
    for prompt in prompts:
        if not prompt:
            raise invalid("the prompt is empty", _prompt_field(body))
        check_token_ids(_prompt_field(body), prompt, text.vocab_size)
        rest = {
            "sampling": replace(
                rules,
                seed=secrets.randbits(63) if body.seed is None else body.seed,
                reasoning=_limited_reasoning(body, prompt, text, rules) if isinstance(body, ChatRequest) else None,
            ),
            "max_tokens": _max_tokens(body, len(prompt), max_model_len),
            "stop_tokens": stop_tokens,
            "estimate": None if body.expected_tokens is None else hinted(body.expected_tokens),
        }
        made.append(request_of(body, prompt, promise, origin, **rest))
    _check_logprobs(body, made, origin.caller.limits.logprobs_at_once)
    requests: list[Request] = []
    for request in made:
        for number in range(num_choices):
            choice = request  # the body's first request keeps the origin's id
            if requests:  # the choices of a prompt have different seeds
                seed = (request.sampling.seed + number + _SEEDS // 2) % _SEEDS - _SEEDS // 2
                id, sampling = f"{origin.id}-{len(requests)}", replace(request.sampling, seed=seed)
                choice = replace(request, id=id, sampling=sampling)
            requests.append(choice)
    return tuple(requests)


def num_requests(body: ChatRequest | CompletionRequest) -> int:
    """Return the number of requests that a body becomes."""
    return (body.n or 1) * (1 if isinstance(body, ChatRequest) else len(body.prompts))


def _check_logprobs(body: ChatRequest | CompletionRequest, made: Sequence[Request], most: int) -> None:
    """Raise if an answer could have more log-probabilities than are held for one: each takes some 60 bytes of it.

    A stream is sent as it comes, except log-probabilities of a repeated prompt."""
    if body.num_logprobs is None:
        return
    each, choices = 1 + body.num_logprobs, body.n or 1
    outputs = 0 if body.stream else sum(request.max_tokens for request in made)
    prompts = sum(len(request.prompt) for request in made if request.sampling.prompt_logprobs is not None)
    if (asked := choices * (outputs + prompts) * each) > most:
        tokens = f"{choices} choices of {outputs + prompts} tokens" if choices > 1 else f"{outputs + prompts} tokens"
        fields = f"n, {body.most_tokens_field} or the number of log-probabilities"
        message = (
            f"{tokens} with {each} log-probabilities each are {asked}, the limit is {most}: ask for less in {fields}"
        )
        raise invalid(message, "logprobs", "too_many_logprobs")


def _make_rules(
    body: ChatRequest | CompletionRequest, text: TextModel, tried: Tried
) -> tuple[Sampling, tuple[int, ...]]:
    """Return what all requests of a body share: the tokens that end an output, and the sampling without what differs
    from prompt to prompt, which is a seed of our own choice, and the reasoning."""
    named = {
        "stop_token_ids": body.stop_token_ids,
        "allowed_token_ids": body.allowed_token_ids,
        "logit_bias": [token for token, _ in body.biases],
    }
    for name, ids in named.items():
        check_token_ids(name, ids or (), text.vocab_size)
    ends = () if body.ignore_eos else text.eos_ids
    if isinstance(body, CompletionRequest) and body.suffix and not body.ignore_eos:
        ends += infill_tokens(text, "suffix").ends
    stop_tokens = tuple(dict.fromkeys((*(body.stop_token_ids or ()), *ends)))
    # The body's rules together must leave a token that may come next.
    if body.min_tokens and body.allowed_token_ids and set(body.allowed_token_ids) <= set(stop_tokens):
        message = "allowed_token_ids: all of these tokens end the output, which min_tokens forbids"
        raise invalid(message, "allowed_token_ids")
    if body.format is not None and not stop_tokens:
        name = body.format.field
        raise invalid(f"{name} needs a token that ends the output: leave ignore_eos out, or name a stop token", name)
    choice, syntax = _limits(body, text, tried)
    sampling = _sampling(body, text.sampling, choice, syntax)
    # A small body must not be large in every part, since each of its choices has all of its rules.
    num_tokens = len(stop_tokens) + sum(map(len, () if choice is None else choice.outputs))
    num_bytes = len(sampling.allowed_tokens) + len(syntax) + _BIAS_BYTES * len(body.biases) + _TOKEN_BYTES * num_tokens
    num_choices = num_requests(body)
    if num_choices * num_bytes > MOST_RULE_BYTES:
        message = f"each choice has the body's lists of tokens, biases and form, which take {num_bytes} bytes: "
        message += f"of {num_choices} choices {num_choices * num_bytes}, and {MOST_RULE_BYTES} is the most. Send them "
        raise invalid(f"{message}in parts", code="too_large")
    return sampling, stop_tokens


def _limits(body: ChatRequest | CompletionRequest, text: TextModel, tried: Tried) -> tuple[Choice | None, str]:
    """Return what an output must follow, as lists of tokens or as a syntax; raise if nothing could follow it."""
    if body.format is not None:
        return body.format.limits(text, tried)
    if not isinstance(body, ChatRequest) or not body.is_held(text):
        return None, ""
    calls = WantedCalls(body.schemas, body.most_calls > 1, BesideCalls.TEXT)
    try:
        return Format("tools", "calls", calls=calls).limits(text, tried)
    except ApiError:  # a schema cannot be followed: arguments are any objects but where their schema binds them
        strict = body.strict_functions
        functions = {name: schema if name in strict else ANY_OBJECT for name, schema in calls.functions.items()}
        return Format("tools", "calls", calls=replace(calls, functions=functions)).limits(text, tried)


def _limited_reasoning(
    body: ChatRequest, prompt: tuple[int, ...], text: TextModel, rules: Sampling
) -> Reasoning | None:
    """Return the reasoning as the engine must know it; None if nothing limits it or the answer's form."""
    family, has_form = text.reasoning, rules.grammar is not None or bool(rules.syntax)
    if family is None or (not has_form and body.most_reasoning_tokens is None):
        return None
    inside = body.begins_inside(prompt, text)
    return Reasoning(
        family.name,
        inside,
        () if inside else tuple(text.answer_ids(family.starts[0])),
        tuple(text.answer_ids(family.closing)),
        body.most_reasoning_tokens,
        body.decides_to_call,
    )


def request_of(
    body: PromisedRequest, prompt: tuple[int, ...], promise: ServicePromise, origin: Origin, **rest: Any
) -> Request:
    """Return a request of a body; `rest` are the fields that differ between texts and vectors."""
    return Request(
        id=origin.id,
        owner=origin.owner,
        attempt=0,
        prompt=prompt,
        emitted=(),
        service=promise.service,
        slo=promise.slo,
        arrival_at=origin.arrival_at,
        priority=origin.caller.priority if body.priority is None else body.priority,
        salt=origin.caller.salt_with(body.cache_salt),
        weight=origin.caller.weight,
        adapter=origin.adapter,
        is_metered=True,
        tries=origin.tries,
        **rest,
    )


def check_length(texts: Sequence[str], text: TextModel, max_model_len: int, most: int, field: str) -> None:
    """Raise if the texts surely have more than `most` tokens, before they are tokenised as a whole."""
    if sum(map(len, texts)) > most and text.surely_exceeds(texts, most):
        raise _far_too_long(max_model_len, most, field)


def _far_too_long(max_model_len: int, most: int, field: str) -> ApiError:
    length = "it alone has more" if most == max_model_len else f"it alone has more than {most}"
    return too_long(f"the prompt is too long: {length}", max_model_len, field)


def _prompts(body: ChatRequest | CompletionRequest, text: TextModel, max_model_len: int) -> list[tuple[int, ...]]:
    """Return the prompts of a body, as it has them truncated."""
    most = MOST_CONTEXTS * max_model_len if body.truncate_prompt_tokens else max_model_len
    if isinstance(body, ChatRequest):
        prompts = [
            tuple(_chat_ids(text, [message.shown for message in body.messages], body.rendering, max_model_len, most))
        ]
    else:
        for prompt in body.prompts:
            if isinstance(prompt, str):
                check_length([prompt], text, max_model_len, most, "prompt")
        with_special = body.add_special_tokens is not False
        if body.suffix:
            return _prompts_before(body.suffix, body.prompts, text, with_special, max_model_len)
        prompts = [
            tuple(text.prompt_ids(prompt, with_special) if isinstance(prompt, str) else prompt)
            for prompt in body.prompts
        ]
    return [prompt[-(body.truncate_prompt_tokens or 0) :] for prompt in prompts]


def _prompts_before(
    suffix: str, prompts: Sequence[str | list[int]], text: TextModel, with_special: bool, max_model_len: int
) -> list[tuple[int, ...]]:
    """Return the prompts by which the model writes what comes between each of these and the suffix."""
    tokens = infill_tokens(text, "suffix")
    check_length([suffix], text, max_model_len, max_model_len, "suffix")
    begin, after = text.prompt_ids("", with_special), text.inner_ids(suffix)
    if len(prompts) > FEW_CHOICES and len(prompts) * len(after) > MOST_CHOICE_TOKENS:  # a small body must stay small
        message = f"suffix: behind each of {len(prompts)} prompts it has {len(prompts) * len(after)} tokens, and "
        raise invalid(f"{message}{MOST_CHOICE_TOKENS} is the most: send fewer prompts at a time", "suffix", "too_large")
    each = (text.answer_ids(prompt) if isinstance(prompt, str) else prompt for prompt in prompts)
    return [(*begin, *tokens.prompt(prompt, after)) for prompt in each]


def infill_tokens(text: TextModel, field: str) -> InfillTokens:
    """Return the tokens by which the model fills in the middle; raise where it has none."""
    if text.infill is None:
        message = f"{field}: this model cannot fill in the middle: its vocabulary has no tokens such as <|fim_prefix|>"
        raise invalid(message, field, "unsupported_model")
    return text.infill


def _chat_ids(
    text: TextModel, messages: Sequence[Mapping[str, Any]], rendering: Rendering, max_model_len: int, most: int
) -> list[int]:
    """Return the prompt of a conversation; raise if it surely has more than `most` tokens: its texts before they are
    rendered, or where they may be about that long, what the template makes of them."""
    texts = [*all_texts([messages, rendering.tools, rendering.more])]
    if sum(map(len, texts)) > FAR_TOO_LONG * most:
        check_length(texts, text, max_model_len, most, "messages")
    try:
        return text.chat_ids(messages, replace(rendering, most_tokens=most))
    except PromptTooLong:
        raise _far_too_long(max_model_len, most, "messages") from None


def prompt_of(body: ChatRequest, text: TextModel, max_model_len: int) -> tuple[int, ...]:
    """Return the prompt of a chat, which need not leave room for an output."""
    (prompt,) = _prompts(body, text, max_model_len)
    return prompt


def _prompt_field(body: ChatRequest | CompletionRequest) -> str:
    return "messages" if isinstance(body, ChatRequest) else "prompt"


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        raise invalid(f"{field}: {max(ids)} is not a token of this model, which has {vocab_size} tokens", field)


def _max_tokens(body: ChatRequest | CompletionRequest, prompt_tokens: int, max_model_len: int) -> int:
    left = max_model_len - prompt_tokens
    if left < 1:
        fault = f"the prompt is too long: it has {prompt_tokens} tokens, which leaves none for output"
        raise too_long(fault, max_model_len, _prompt_field(body))
    # Who asks for more than is left gets that, since agents ask for more than some models have. The engine always makes
    # a token: where none is wanted, the answer does not show it.
    most = left if body.tokens_asked is None else max(1, min(left, body.tokens_asked))
    if (body.min_tokens or 0) > most:
        raise invalid(f"min_tokens: {body.min_tokens} is more than the output may have, {most}", "min_tokens")
    return most


def too_long(fault: str, max_model_len: int, field: str) -> ApiError:
    message = f"this model's maximum context length is {max_model_len} tokens: {fault}"
    return invalid(message, field, "context_length_exceeded")


_SAME = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")


def _sampling(body: ChatRequest | CompletionRequest, usual: Sampling, choice: Choice | None, syntax: str) -> Sampling:
    set_here: dict[str, Any] = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    return replace(
        usual,
        **set_here,
        top_k=max(0, usual.top_k if body.top_k is None else body.top_k),  # -1 keeps all, as in vLLM
        logit_bias=body.biases,
        allowed_tokens=pack_tokens(body.allowed_token_ids) if body.allowed_token_ids else b"",
        grammar=choice,
        syntax=syntax,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.num_logprobs if isinstance(body, CompletionRequest) and body.echo else None,
    )


def tokenize(body: TokenizeRequest, text: TextModel, max_model_len: int) -> tuple[dict[str, Any], int]:
    """Return the answer of /tokenize, and the number of tokens."""
    most = _most_converted(max_model_len)
    if body.prompt is not None:
        check_length([body.prompt], text, max_model_len, most, "prompt")
        ids = text.prompt_ids(body.prompt, body.add_special_tokens is not False)
    else:
        messages, tools = [message.shown for message in body.messages or ()], [tool.shown for tool in body.tools or ()]
        opens, more = body.add_generation_prompt is not False, body.chat_template_kwargs or {}
        ids = _chat_ids(text, messages, Rendering(tuple(tools), opens, more=more), max_model_len, most)
    written = [text.token_bytes(token).decode("utf-8", "replace") for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": written}, len(ids)


def detokenize(body: DetokenizeRequest, text: TextModel, max_model_len: int) -> tuple[dict[str, Any], int]:
    """Return the answer of /detokenize, and the number of tokens. It is the tokens' text with its special tokens, so
    that it reverses `tokenize`."""
    if len(body.tokens) > (most := _most_converted(max_model_len)):
        fault = f"there are {len(body.tokens)} tokens, and {most} are the most: send them in parts"
        raise too_long(fault, max_model_len, "tokens")
    check_token_ids("tokens", body.tokens, text.vocab_size)
    return {"prompt": text.decode_all(body.tokens)}, len(body.tokens)


def _most_converted(max_model_len: int) -> int:
    return min(MOST_CONTEXTS * max_model_len, max(max_model_len, MOST_CONVERTED))
