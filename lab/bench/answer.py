"""Reads a streamed answer: which tokens came, and when the client read them.

Tokens are counted by the first of these that the server sends:

    ids      the ids of each piece's tokens (the field `return_token_ids`, which AlignedServe and vLLM have)
    usage    the number of all tokens, at the end; they are spread evenly over the pieces of text
    pieces   a token for each piece of text
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from alignedserve.http_client import said_in
from alignedserve.lab.loads.records.records import RequestOutcome

_MOST_REFUSAL = 1 << 16  # bytes that are kept of an answer that is no stream
_PREFIX = b"data:"
_DONE = b"[DONE]"


class Counted(Enum):
    """How the tokens of an answer were counted."""

    IDS = "token ids"
    USAGE = "usage"
    PIECES = "pieces of text"


@dataclass(frozen=True, slots=True)
class AskFailure:
    """Why a request got no whole answer."""

    outcome: RequestOutcome
    kind: str  # short, and the same for all requests that failed for the same reason
    text: str  # what the server said, or what happened
    status: int | None = None  # of HTTP, where the server answered with an error


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    ended_at: float
    failure: AskFailure | None
    token_at: Sequence[float]  # when the client read each token
    counted: Counted
    ids: tuple[int, ...]  # of the tokens; empty where the server does not tell them
    text: str
    num_prompt: int | None  # tokens, where the server tells them
    num_cached: int  # tokens of the prompt that the server did not compute


# --- The pieces of a stream


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _PieceUsage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _PieceChoice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _StreamPiece(msgspec.Struct):
    choices: list[_PieceChoice] = []
    usage: _PieceUsage | None = None
    error: Any = None


_PIECES = msgspec.json.Decoder(_StreamPiece)


class StreamReader:
    """Reads the body of an answer as its bytes come."""

    def __init__(self) -> None:
        self.is_begun = False  # whether the server has begun to answer
        self.read_at = 0.0  # when something of it was read last
        self.num_tokens = 0  # so far
        self._status = 0
        self._rest = b""  # of a line that is not whole yet, or the body of a refusal
        self._piece_at = array("d")  # when each piece with text or tokens came, once for each of its tokens
        self._ids = list[int]()
        self._texts = list[str]()
        self._usage: _PieceUsage | None = None
        self._tells_ids = self._has_ended = False
        self._error: str | None = None

    def begin(self, status: int, now: float) -> None:
        self.is_begun, self._status, self.read_at = True, status, now

    def read(self, data: bytes, now: float) -> None:
        self.read_at = now
        if self._status != 200:
            self._rest = (self._rest + data)[:_MOST_REFUSAL]
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_PREFIX):
                self._event(line[len(_PREFIX) :].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == _DONE:
            self._has_ended = True
            return
        try:
            piece = _PIECES.decode(data)
        except msgspec.DecodeError:
            self._error = self._error or f"the server sent no piece of an answer but {data[:200]!r}"
            return
        if piece.usage is not None:
            self._usage = piece.usage
        if piece.error is not None:
            self._error = said_in(piece.error)
        for choice in piece.choices:
            self._add(choice, now)

    def _add(self, choice: _PieceChoice, now: float) -> None:
        self._has_ended = self._has_ended or choice.finish_reason is not None
        text, ids = _text(choice), choice.token_ids
        if text:
            self._texts.append(text)
        if ids is not None:
            self._tells_ids = True
            self._ids += ids
        count = len(ids) if ids is not None else bool(text) or _has_call(choice)
        self.num_tokens += count
        self._piece_at.extend([now] * count)

    def answer(self, now: float, broke: str | None = None) -> StreamedAnswer:
        """Return the whole answer; `broke` says what ended it if it did not end by itself."""
        usage = self._usage or _PieceUsage()
        counted, token_at = self._counted(usage)
        details = usage.prompt_tokens_details or _Details()
        return StreamedAnswer(
            now,
            self._failure(broke),
            token_at,
            counted,
            tuple(self._ids),
            "".join(self._texts),
            usage.prompt_tokens,
            details.cached_tokens or 0,
        )

    def _counted(self, usage: _PieceUsage) -> tuple[Counted, Sequence[float]]:
        if self._tells_ids:
            return Counted.IDS, self._piece_at
        if usage.completion_tokens is not None and self._piece_at:
            return Counted.USAGE, _spread(self._piece_at, usage.completion_tokens)
        return Counted.PIECES, self._piece_at

    def _failure(self, broke: str | None) -> AskFailure | None:
        if self._status not in (0, 200):
            return _refusal(self._status, self._rest)
        if self._error is not None:
            return AskFailure(RequestOutcome.BROKEN, "error in the stream", self._error)
        if self._has_ended:
            return None
        if broke is not None:
            kind = "the answer broke off" if self._status else "no answer"
            return AskFailure(RequestOutcome.BROKEN, kind, broke)
        return AskFailure(RequestOutcome.BROKEN, "the answer ended early", "its end has no finish_reason and no [DONE]")


def _text(choice: _PieceChoice) -> str:
    delta = choice.delta
    if delta is None:
        return choice.text or ""
    return delta.content or delta.reasoning_content or delta.reasoning or ""


def _has_call(choice: _PieceChoice) -> bool:
    return choice.delta is not None and bool(choice.delta.tool_calls)


def _spread(piece_at: Sequence[float], count: int) -> Sequence[float]:
    """Return a time for each of `count` tokens: those of the pieces, evenly repeated; first and last time stay."""
    last = len(piece_at) - 1
    return array("d", (piece_at[number * last // max(1, count - 1)] for number in range(count)))


def _refusal(status: int, body: bytes) -> AskFailure:
    try:
        tree: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        tree = body.decode(errors="replace")
    return AskFailure(RequestOutcome.REFUSED, _kind(status, tree), said_in(tree) or "without a reason", status)


def _kind(status: int, tree: Any) -> str:
    """Return the status with the code or type of the error, if the server gives it one."""
    error = tree.get("error") if isinstance(tree, dict) else None
    named = (error.get("code") or error.get("type")) if isinstance(error, dict) else None
    return f"{status} {named}" if isinstance(named, str) else str(status)
