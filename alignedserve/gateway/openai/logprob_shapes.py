"""The JSON of log-probabilities: OpenAI's form for chats, and its older form for completions."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from alignedserve.core import Logprob

LEAST = -9999.0  # OpenAI's value for next to impossible, since JSON has no infinity

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
    """Makes the tables of one answer, in order: a token's offset counts the characters of all tokens before it."""

    def __init__(self, bytes_of: BytesOf, special_ids: frozenset[int]) -> None:
        self._bytes_of, self._special_ids = bytes_of, special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def table(self, tokens: Sequence[int], logprobs: Sequence[Logprob | None]) -> dict[str, list[Any]]:
        """Return the table of these tokens; a token that nothing comes before has the log-probability None."""
        pairs = list(zip(tokens, logprobs, strict=True))
        return {
            "tokens": [_text(token, self._bytes_of) for token in tokens],
            "token_logprobs": [logprob and max(logprob.value, LEAST) for logprob in logprobs],
            "top_logprobs": [logprob and self._likeliest(token, logprob) for token, logprob in pairs],
            "text_offset": [self._advance(token) for token in tokens],
        }

    def _likeliest(self, token: int, logprob: Logprob) -> dict[str, float]:
        """Return the likeliest tokens and the token itself; of tokens with the same text, the likeliest counts."""
        likeliest: dict[str, float] = {}
        for other, value in (*logprob.top, (token, logprob.value)):
            likeliest.setdefault(_text(other, self._bytes_of), max(value, LEAST))
        return likeliest

    def _advance(self, token: int) -> int:
        """Return the token's offset and count its characters; a special token has none in the text."""
        offset = self._offset
        if token not in self._special_ids:
            self._offset += len(self._decoder.decode(self._bytes_of(token)))
        return offset
