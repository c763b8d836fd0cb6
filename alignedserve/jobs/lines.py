"""The lines of a job's file: read, checked, found again; and what is written of each.

A line ends with LF or CRLF, the last one with nothing if it likes; a byte order mark before the first is passed over,
and so are lines of blanks. Lines are counted from 1, blank ones too, as an editor shows them. No more than one line is
in memory at a time, and of a line that is too long no more than is allowed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import IO, Any
from uuid import uuid4

from pydantic_core import from_json

from alignedserve.store.job import Endpoint, LineResult, Problem

MOST_LINES = 50_000  # of a batch, as OpenAI has it
MOST_PROBLEMS = 100  # that are told of one file
MOST_ID = 512  # characters of a custom_id
_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 16
_FIELDS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True)
class Raw:
    """A line that is not blank."""

    number: int
    offset: int
    data: bytes
    is_cut: bool = False  # it is longer than allowed, and this its beginning


@dataclass(frozen=True)
class Line:
    """A line that is valid."""

    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    total: int
    model: str | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Rules:
    """What the lines of a job have to be."""

    endpoint: Endpoint
    models: Collection[str]
    most_lines: int
    most_bytes: int  # of a line


class Wrong(Exception):
    """A line that cannot be."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def raw_lines(file: IO[bytes], most_bytes: int) -> Iterator[Raw]:
    number, offset = 0, 0
    while data := file.readline(most_bytes + 2):  # with what ends it
        number += 1
        began, offset = offset, offset + len(data)
        is_cut = len(data.rstrip(b"\r\n")) > most_bytes or (len(data) > most_bytes + 1 and not data.endswith(b"\n"))
        if number == 1 and data.startswith(_BOM):
            data, began = data[len(_BOM) :], began + len(_BOM)
        if is_cut:
            rest = data
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(_SKIP_BYTES)
                offset += len(rest)
        if data.strip(b" \t\r\n"):
            yield Raw(number, began, data.rstrip(b"\r\n"), is_cut)


def check(file: IO[bytes], rules: Rules) -> Verdict:
    """All lines or none: the problems of the first that have any."""
    seen: dict[bytes, int] = {}  # digest of a custom_id -> its line
    problems: list[Problem] = []
    model, total = None, 0
    for raw in raw_lines(file, rules.most_bytes):
        total += 1
        if total > rules.most_lines:
            message = f"the file has more than {rules.most_lines} requests: split it"
            return Verdict(0, None, (Problem("too_many_requests", message, raw.number),))
        try:
            line = parsed(raw, rules)
            before = seen.setdefault(hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest(), raw.number)
            if before != raw.number:
                raise Wrong("duplicate_custom_id", f"custom_id {line.custom_id!r:.80} is in line {before}", "custom_id")
            model = model or str(line.body["model"])
        except Wrong as wrong:
            problems.append(Problem(wrong.code, wrong.message, raw.number, wrong.param))
            if len(problems) == MOST_PROBLEMS:
                break
    if not total:
        problems.append(Problem("empty_file", "the file has no requests"))
    return Verdict(total, model, tuple(problems))


def parsed(raw: Raw, rules: Rules) -> Line:
    """Its body is checked when it runs: what is wrong there is the answer to that line alone."""
    given = _object(raw, rules.most_bytes)
    if unknown := sorted(set(given) - _FIELDS):
        raise Wrong("unknown_parameter", f"{unknown[0]!r:.80}: there is no such field", unknown[0][:80])
    custom_id, body = given.get("custom_id"), given.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MOST_ID:
        raise Wrong("invalid_custom_id", f"custom_id must be a text of 1 to {MOST_ID} characters", "custom_id")
    if given.get("method") != "POST":
        raise Wrong("invalid_method", f"method must be POST, not {given.get('method')!r:.40}", "method")
    if given.get("url") != rules.endpoint.value:
        message = f"url must be {rules.endpoint.value}, as the batch's endpoint, not {given.get('url')!r:.80}"
        raise Wrong("mismatched_url", message, "url")
    if not isinstance(body, dict):
        raise Wrong("invalid_body", "body must be an object", "body")
    if body.get("stream"):
        raise Wrong("stream_not_supported", "body.stream: batches are not streamed, leave it out", "body.stream")
    if body.get("model") not in rules.models:
        message = f"body.model: {body.get('model')!r:.80} does not exist here: see /v1/models"
        raise Wrong("model_not_found", message, "body.model")
    return Line(custom_id, body)


def line_of(raw: Raw) -> Line:
    """Of a file that was checked."""
    given = from_json(raw.data)
    return Line(given["custom_id"], given["body"])


def _object(raw: Raw, most_bytes: int) -> dict[str, Any]:
    if raw.is_cut:
        raise Wrong("line_too_long", f"the line is longer than {most_bytes} bytes")
    try:
        given = from_json(raw.data.decode("utf-8"))
    except UnicodeDecodeError:
        raise Wrong("invalid_json", "the line is not UTF-8") from None
    except ValueError as error:
        raise Wrong("invalid_json", f"the line is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Wrong("invalid_json", "the line must be a JSON object")
    return given


# --- What is written


@dataclass(frozen=True)
class Answer:
    """To one line."""

    status: int
    request_id: str
    body: dict[str, Any]


def answered(number: int, custom_id: str, answer: Answer) -> LineResult:
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    text = _written(custom_id, response, None)
    usage = answer.body.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    tokens = usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0)
    return LineResult(number, answer.status < 400, text, *tokens)


def unanswered(custom_id: str | None, code: str, message: str) -> str:
    """Of a line that was never run to its end."""
    return _written(custom_id, None, {"code": code, "message": message})


def lost(number: int, why: str) -> LineResult:
    """Nobody can read any more what was asked."""
    return LineResult(number, False, unanswered(None, "file_not_found", f"line {number}: {why}"))


def _written(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None) -> str:
    line = {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(line, separators=(",", ":"))
