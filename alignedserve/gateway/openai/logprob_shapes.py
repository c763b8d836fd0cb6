"""The JSON of log-probabilities: OpenAI's for chats, and its older one for completions."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from alignedserve.core import Logprob

LEAST = -9999.0  # OpenAI's for what is next to impossible: JSON has no infinity

BytesOf = Callable[[int], bytes]


def chat_logprobs(tokens: Sequence[int], logprobs: Sequence[Logprob], bytes_of: BytesOf) -> dict[str, Any]:
    content = [
        {
            **_entry(token, logprob.value, bytes_of),
            "top_logprobs": [_entry(other, value, bytes_of) for other, value in logprob.top],
        }
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _entry(token: int, value: float, bytes_of: BytesOf) -> dict[str, Any]:
    return {"token": _text(token, bytes_of), "logprob": max(value, LEAST), "bytes": list(bytes_of(token))}


def _text(token: int, bytes_of: BytesOf) -> str:
    return bytes_of(token).decode("utf-8", "replace")


class CompletionLogprobs:
    """Of one answer, whose tables follow each other: a token's offset counts the characters before it."""

    def __init__(self, bytes_of: BytesOf, special_ids: frozenset[int]) -> None:
        self._bytes_of, self._special_ids = bytes_of, special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def table(self, tokens: Sequence[int], logprobs: Sequence[Logprob | None]) -> dict[str, list[Any]]:
        """None is the log-probability of a token that nothing comes before."""
        return {
            "tokens": [_text(token, self._bytes_of) for token in tokens],
            "token_logprobs": [one and max(one.value, LEAST) for one in logprobs],
            "top_logprobs": [one and self._likeliest(token, one) for token, one in zip(tokens, logprobs, strict=True)],
            "text_offset": [self._advance(token) for token in tokens],
        }

    def _likeliest(self, token: int, logprob: Logprob) -> dict[str, float]:
        """With the token's own, which may not be one of them. Of several that read alike, the likeliest."""
        likeliest: dict[str, float] = {}
        for other, value in (*logprob.top, (token, logprob.value)):
            likeliest.setdefault(_text(other, self._bytes_of), max(value, LEAST))
        return likeliest

    def _advance(self, token: int) -> int:
        """The token's offset; a special one is not in the text."""
        offset = self._offset
        if token not in self._special_ids:
            self._offset += len(self._decoder.decode(self._bytes_of(token)))
        return offset
