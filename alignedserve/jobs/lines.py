"""Read and check the lines of a job's file, and write the lines of its output and error files.

A line ends with LF or CRLF; the last line may end without either. A byte order mark before the first line is skipped,
and so are blank lines. Lines are counted from 1, blank lines included, as an editor counts them. At most one line is in
memory at a time, and of a line that is too long only as much as is allowed.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any
from uuid import uuid4

from pydantic_core import from_json

from alignedserve.gateway.openai.writing import ascii_json, json_parts
from alignedserve.store.job import Endpoint, LineResult, Problem

MOST_LINES = 50_000  # of a batch, as for OpenAI
MOST_INPUTS = 50_000  # for embeddings, in all lines of a batch
MOST_PROBLEMS = 100  # problems that are listed for a file
MOST_ID = 512  # characters of a custom_id
_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 16
_CUSTOM_ID = re.compile(rb'"custom_id"\s*:\s*"([^"\\]+)"')
_FIELDS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True)
class RawLine:
    """A line that is not blank, as bytes."""

    number: int
    offset: int
    data: bytes
    is_cut: bool = False  # whether the line is longer than allowed, and this is only its beginning


@dataclass(frozen=True)
class BatchLine:
    """A valid line."""

    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True)
class FileVerdict:
    """The result of checking a file: the number of its lines and their model, or its problems."""

    total: int
    model: str | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class LineRules:
    """The rules for the lines of a job."""

    endpoint: Endpoint
    models: Collection[str]
    most_lines: int
    most_bytes: int  # of a line


class InvalidLine(Exception):
    """A line breaks the rules."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def raw_lines(file: IO[bytes], most_bytes: int) -> Iterator[RawLine]:
    number, offset = 0, 0
    while data := file.readline(most_bytes + 2):  # with CRLF
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
            yield RawLine(number, began, data.rstrip(b"\r\n"), is_cut)


def check_file(file: IO[bytes], rules: LineRules) -> FileVerdict:
    """Check all lines; a file with any problem is refused, and the verdict lists its first problems."""
    seen: dict[bytes, int] = {}  # digest of a custom_id -> its line
    problems: list[Problem] = []
    model, total, inputs = None, 0, 0
    for raw in raw_lines(file, rules.most_bytes):
        total += 1
        if total > rules.most_lines:
            message = f"the file has more than {rules.most_lines} requests: split it"
            return FileVerdict(0, None, (Problem("too_many_requests", message, raw.number),))
        try:
            line = parse_line(raw, rules)
            before = seen.setdefault(hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest(), raw.number)
            if before != raw.number:
                message = f"custom_id {line.custom_id!r:.80} is also in line {before}"
                raise InvalidLine("duplicate_custom_id", message, "custom_id")
            model = model or str(line.body["model"])
            inputs += _num_inputs(line.body) if rules.endpoint is Endpoint.EMBEDDINGS else 0
            if inputs > MOST_INPUTS:
                message = f"the file has more than {MOST_INPUTS} inputs: split it"
                return FileVerdict(0, None, (Problem("too_many_requests", message, raw.number),))
        except InvalidLine as fault:
            problems.append(Problem(fault.code, fault.message, raw.number, fault.param))
            if len(problems) == MOST_PROBLEMS:
                break
    if not total:
        problems.append(Problem("empty_file", "the file has no requests"))
    return FileVerdict(total, model, tuple(problems))


def _num_inputs(body: Mapping[str, Any]) -> int:
    """Return how many inputs a body for embeddings has; a list of tokens is one."""
    given = body.get("input")
    return len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1


def parse_line(raw: RawLine, rules: LineRules) -> BatchLine:
    """Return the line, or raise InvalidLine.

    Its body is checked only when the line runs: a fault in a body is the answer to that line alone."""
    tree = _parse_object(raw, rules.most_bytes)
    if unknown := sorted(set(tree) - _FIELDS):
        raise InvalidLine("unknown_parameter", f"{unknown[0]!r:.80}: there is no such field", unknown[0][:80])
    custom_id, body = tree.get("custom_id"), tree.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MOST_ID:
        raise InvalidLine("invalid_custom_id", f"custom_id must be a text of 1 to {MOST_ID} characters", "custom_id")
    if tree.get("method") != "POST":
        raise InvalidLine("invalid_method", f"method must be POST, not {tree.get('method')!r:.40}", "method")
    if tree.get("url") != rules.endpoint.value:
        message = f"url must be {rules.endpoint.value}, as the batch's endpoint, not {tree.get('url')!r:.80}"
        raise InvalidLine("mismatched_url", message, "url")
    if not isinstance(body, dict):
        raise InvalidLine("invalid_body", "body must be an object", "body")
    if body.get("stream"):
        raise InvalidLine("stream_not_supported", "body.stream: batches are not streamed, leave it out", "body.stream")
    if body.get("model") not in rules.models:
        message = f"body.model: {body.get('model')!r:.80} is not served here: see /v1/models"
        raise InvalidLine("model_not_found", message, "body.model")
    return BatchLine(custom_id, body)


def read_checked_line(raw: RawLine) -> BatchLine:
    """Return a line of a file that was checked before."""
    tree = from_json(raw.data)
    return BatchLine(tree["custom_id"], tree["body"])


def custom_id_of(raw: RawLine) -> str | None:
    """Return the name of a line whose JSON is not to be read; None where it is not plain, or not sure."""
    found = _CUSTOM_ID.findall(raw.data)
    return found[0].decode("utf-8", "replace") if len(found) == 1 else None


def _parse_object(raw: RawLine, most_bytes: int) -> dict[str, Any]:
    if raw.is_cut:
        raise InvalidLine("line_too_long", f"the line is longer than {most_bytes} bytes")
    try:
        tree = from_json(raw.data.decode("utf-8"))
    except UnicodeDecodeError:
        raise InvalidLine("invalid_json", "the line is not UTF-8") from None
    except ValueError as error:
        raise InvalidLine("invalid_json", f"the line is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise InvalidLine("invalid_json", "the line must be a JSON object")
    return tree


# --- Lines of the output and error files


@dataclass(frozen=True)
class AnsweredLine:
    """The answer to a line; iterators in its body stand for long lists (writing.py)."""

    status: int
    request_id: str
    body: dict[str, Any]


def answered_line(number: int, custom_id: str, answer: AnsweredLine) -> LineResult:
    """Return the result of a line, whose text may have megabytes: to be called in a thread."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    text = _format_line(custom_id, response, None)
    usage = answer.body.get("usage") or {}
    prompt, output = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")  # a response, a chat
    cached = (usage.get(f"{prompt}_tokens_details") or {}).get("cached_tokens", 0)
    reasoned = (usage.get(f"{output}_tokens_details") or {}).get("reasoning_tokens", 0)
    tokens = usage.get(f"{prompt}_tokens", 0), cached, usage.get(f"{output}_tokens", 0), reasoned
    cost = usage.get("cost") or {}
    millijoules = round(1e3 * cost.get("joules", 0))
    spent = round(1e6 * cost.get("device_seconds", 0)), millijoules, millijoules * (cost.get("energy") == "modelled")
    return LineResult(number, answer.status < 400, text, *tokens, *spent)


def error_line(custom_id: str | None, code: str, message: str) -> str:
    """Return the error file's line for a line that has no answer."""
    return _format_line(custom_id, None, {"code": code, "message": message})


def lost_line(number: int, message: str) -> LineResult:
    """Return the result of a line that can no longer be read."""
    return LineResult(number, False, error_line(None, "file_not_found", f"line {number}: {message}"))


def _format_line(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None) -> str:
    line = {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return "".join(map(ascii_json, json_parts(line)))


class LinePlaces:
    """The places in a file of the lines that must still run: 16 bytes each, since every open job holds all of them."""

    def __init__(self, lines: Iterable[RawLine]) -> None:
        """The lines come in the order of their numbers."""
        self._lines, self._offsets, self._sizes = array("I"), array("Q"), array("I")
        for line in lines:
            self._lines.append(line.number)
            self._offsets.append(line.offset)
            self._sizes.append(len(line.data))

    @property
    def lines(self) -> Sequence[int]:
        return self._lines

    def find(self, number: int) -> tuple[int, int]:
        """Return a line's offset and size in bytes; raise LookupError if the line has no place."""
        at = bisect_left(self._lines, number)
        if at == len(self._lines) or self._lines[at] != number:
            raise LookupError(f"line {number} has no place")
        return self._offsets[at], self._sizes[at]
