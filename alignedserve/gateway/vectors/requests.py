"""Make Requests of a body that asks for vectors: each text, or each pair of texts, is a request of its own.

embeddings                     a vector of each input
scores, the model has a head   a number of each pair, which the model reads as one text
scores, it has none            a vector of each text that differs; the score is the cosine of two of them
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Encoding

from alignedserve.architectures.vectors import PooledRule
from alignedserve.core import Estimate, PooledTask, Pooling, Request, Sampling
from alignedserve.gateway.openai.errors import ApiError, invalid
from alignedserve.gateway.openai.promises import ServicePromise
from alignedserve.gateway.openai.requests import MOST_CONTEXTS, Origin, check_length, check_token_ids, too_long
from alignedserve.gateway.vectors.types import EmbeddingRequest, RerankRequest, ScoreRequest, VectorRequest
from alignedserve.text.text_model import TextModel

_ONE = Estimate(1, 1)  # a request for a vector ends with its prompt


@dataclass(frozen=True)
class _VectorPrompt:
    """The tokens of an input; of a pair, where its second text begins."""

    tokens: tuple[int, ...]
    second_at: int | None = None


def make_embedding_requests(
    body: EmbeddingRequest, promise: ServicePromise, origin: Origin, text: TextModel, max_model_len: int
) -> tuple[Request, ...]:
    """Return a request for each input. Long inputs take long, so an event loop must not call this."""
    rule = _rule_of(text)
    if not rule.embeds:
        raise _wrong_model("makes scores and no embeddings: send pairs of texts to /v1/score")
    reader = _Reader(body, text, _longest(rule, max_model_len), "input")
    begins = _prompt_named(rule, body.prompt_name)
    prompts = [
        reader.read(begins + given, body.add_special_tokens is not False)
        if isinstance(given, str)
        else reader.checked(given)
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
    reader = _Reader(body, text, _longest(rule, max_model_len), field)
    if rule.scores:
        prompts = [reader.read_pair(*pair) for pair in body.pairs]
        poolings = [Pooling(PooledTask.SCORE, rule.is_whole, second_at=prompt.second_at) for prompt in prompts]
        return _made(prompts, poolings, body, promise, origin)
    if not rule.embeds:
        raise _wrong_model(f"has a head of {rule.labels} numbers: only a head of one number gives scores")
    prompts = [reader.read(rule.usual_prompt + given, True) for given in texts_of(body.pairs)]
    return _made(prompts, [Pooling(is_whole=rule.is_whole)] * len(prompts), body, promise, origin)


def texts_of(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return each text of the pairs once."""
    return [*dict.fromkeys(given for pair in pairs for given in pair)]


def _rule_of(text: TextModel) -> PooledRule:
    if text.pooled is None:
        raise _wrong_model("makes no embeddings here")
    return text.pooled


def _wrong_model(what: str) -> ApiError:
    return invalid(f"this model {what}", "model", "unsupported_model")


def _longest(rule: PooledRule, max_model_len: int) -> int:
    return min(rule.longest or max_model_len, max_model_len)


def _prompt_named(rule: PooledRule, name: str | None) -> str:
    if name is None:
        return rule.usual_prompt
    if name not in rule.prompts:
        known = ", ".join(sorted(rule.prompts)) or "it has none"
        raise invalid(f"prompt_name: the model has no prompt {name!r:.60}: {known}", "prompt_name")
    return rule.prompts[name]


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
    """Turns the texts of a body into tokens, at most `longest` of each."""

    def __init__(self, body: VectorRequest, text: TextModel, longest: int, field: str) -> None:
        self._text, self._longest, self._field = text, longest, field
        cut = body.truncate_prompt_tokens
        if cut is not None and cut > longest:
            message = f"truncate_prompt_tokens: this model reads at most {longest} tokens, not {cut}"
            raise invalid(message, "truncate_prompt_tokens")
        self._cut = longest if cut == -1 else cut

    def read(self, text: str, with_special: bool) -> _VectorPrompt:
        self._check_texts([text])
        return self._fitting(self._text.encoding(text, None, with_special))

    def read_pair(self, first: str, second: str) -> _VectorPrompt:
        self._check_texts([first, second])
        return self._fitting(self._text.encoding(first, second, True))

    def checked(self, ids: Sequence[int]) -> _VectorPrompt:
        check_token_ids(self._field, ids, self._text.vocab_size)
        return self._whole(tuple(ids[: self._cut]))

    def _check_texts(self, texts: Sequence[str]) -> None:
        most = self._longest if self._cut is None else MOST_CONTEXTS * self._longest
        check_length(texts, self._text, self._longest, most, self._field)

    def _fitting(self, encoding: Encoding) -> _VectorPrompt:
        ids: list[int] = encoding.ids
        if self._cut is not None and len(ids) > self._cut:
            ids = _shortened(ids, encoding.special_tokens_mask, self._cut)
        second_at = next((place for place, kind in enumerate(encoding.type_ids) if kind), None)
        return self._whole(tuple(ids), second_at)

    def _whole(self, tokens: tuple[int, ...], second_at: int | None = None) -> _VectorPrompt:
        if not tokens:
            raise invalid(f"{self._field}: a text is empty", self._field)
        if len(tokens) > self._longest:
            raise too_long(f"a text has {len(tokens)}, see truncate_prompt_tokens", self._longest, self._field)
        return _VectorPrompt(tokens, second_at)


def _shortened(ids: list[int], specials: Sequence[int], most: int) -> list[int]:
    """Return the first tokens; special tokens that end the text end it still."""
    behind = 0
    while behind < len(ids) and specials[-1 - behind]:
        behind += 1
    return [*ids[: max(0, most - behind)], *ids[len(ids) - behind :]][:most]


def _made(
    prompts: Sequence[_VectorPrompt],
    poolings: Sequence[Pooling],
    body: VectorRequest,
    promise: ServicePromise,
    origin: Origin,
) -> tuple[Request, ...]:
    return tuple(
        Request(
            id=f"{origin.id}-{place}" if place else origin.id,
            owner=origin.owner,
            attempt=0,
            prompt=prompt.tokens,
            emitted=(),
            sampling=Sampling(),
            max_tokens=1,
            stop_tokens=(),
            service=promise.service,
            slo=promise.slo,
            arrival_at=origin.arrival_at,
            priority=body.priority or 0,
            salt=origin.caller.salt_with(body.cache_salt),
            weight=origin.caller.weight,
            estimate=_ONE,
            pooling=pooling,
            adapter=origin.adapter,
        )
        for place, (prompt, pooling) in enumerate(zip(prompts, poolings, strict=True))
    )
