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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeAlias
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

BatchLine: TypeAlias = tuple[str, dict[str, Any]]  # a valid line: its custom_id and its body
Verdict: TypeAlias = tuple[int, str | None, tuple[Problem, ...]]  # of a file: its lines, their model, its problems


@dataclass(frozen=True)
class RawLine:
    """A line that is not blank, as bytes."""

    number: int
    offset: int
    data: bytes
    is_cut: bool = False  # whether the line is longer than allowed, and this is only its beginning


@dataclass(frozen=True)
class LineRules:
    """The rules for the lines of a job."""

    endpoint: Endpoint
    serves: Callable[[Any], bool]  # whether lines may ask for this model
    most_lines: int
    most_bytes: int  # of a line


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


def check_file(file: IO[bytes], rules: LineRules) -> Verdict:
    """Check all lines; a file with any problem is refused, and the verdict has its first problems."""
    seen: dict[bytes, int] = {}  # digest of a custom_id -> its line
    problems: list[Problem] = []
    model, total, inputs = None, 0, 0
    for raw in raw_lines(file, rules.most_bytes):
        total += 1
        if total > rules.most_lines:
            return _too_large(raw.number, f"{rules.most_lines} requests")
        line = check_line(raw, rules)
        if not isinstance(line, Problem):
            custom_id, body = line
            before = seen.setdefault(hashlib.blake2b(custom_id.encode(), digest_size=16).digest(), raw.number)
            if before != raw.number:
                message = f"custom_id {custom_id!r:.80} is also in line {before}"
                line = Problem("duplicate_custom_id", message, raw.number, "custom_id")
        if isinstance(line, Problem):
            problems.append(line)
            if len(problems) == MOST_PROBLEMS:
                break
            continue
        model = model or str(body["model"])
        inputs += _num_inputs(body) if rules.endpoint is Endpoint.EMBEDDINGS else 0
        if inputs > MOST_INPUTS:
            return _too_large(raw.number, f"{MOST_INPUTS} inputs")
    if not total:
        problems.append(Problem("empty_file", "the file has no requests"))
    return total, model, tuple(problems)


def _too_large(number: int, most: str) -> Verdict:
    return 0, None, (Problem("too_many_requests", f"the file has more than {most}: split it", number),)


def _num_inputs(body: Mapping[str, Any]) -> int:
    """Return how many inputs a body for embeddings has; a list of tokens is one."""
    given = body.get("input")
    return len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1


def check_line(raw: RawLine, rules: LineRules) -> BatchLine | Problem:
    """Return the line, or what is wrong with it.

    Its body is checked only when the line runs: a fault in a body is the answer to that line alone."""
    number = raw.number
    if raw.is_cut:
        return Problem("line_too_long", f"the line is longer than {rules.most_bytes} bytes", number)
    try:
        tree = from_json(raw.data.decode("utf-8"))
    except UnicodeDecodeError:
        return Problem("invalid_json", "the line is not UTF-8", number)
    except ValueError as error:
        return Problem("invalid_json", f"the line is not JSON: {error}", number)
    if not isinstance(tree, dict):
        return Problem("invalid_json", "the line must be a JSON object", number)
    if unknown := sorted(set(tree) - _FIELDS):
        return Problem("unknown_parameter", f"{unknown[0]!r:.80}: there is no such field", number, unknown[0][:80])
    custom_id, body = tree.get("custom_id"), tree.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MOST_ID:
        message = f"custom_id must be a text of 1 to {MOST_ID} characters"
        return Problem("invalid_custom_id", message, number, "custom_id")
    if tree.get("method") != "POST":
        return Problem("invalid_method", f"method must be POST, not {tree.get('method')!r:.40}", number, "method")
    if tree.get("url") != rules.endpoint.value:
        message = f"url must be {rules.endpoint.value}, as the batch's endpoint, not {tree.get('url')!r:.80}"
        return Problem("mismatched_url", message, number, "url")
    if not isinstance(body, dict):
        return Problem("invalid_body", "body must be an object", number, "body")
    if body.get("stream"):
        message = "body.stream: batches are not streamed, leave it out"
        return Problem("stream_not_supported", message, number, "body.stream")
    if not rules.serves(body.get("model")):
        message = f"body.model: {body.get('model')!r:.80} is not served here: see /v1/models"
        return Problem("model_not_found", message, number, "body.model")
    return custom_id, body


def read_checked_line(raw: RawLine) -> BatchLine:
    """Return a line of a file that was checked before."""
    tree = from_json(raw.data)
    return tree["custom_id"], tree["body"]


def custom_id_of(raw: RawLine) -> str | None:
    """Return the name of a line whose JSON is not to be read; None where it is not plain, or not sure."""
    found = _CUSTOM_ID.findall(raw.data)
    return found[0].decode("utf-8", "replace") if len(found) == 1 else None


# --- Lines of the output and error files


def answered_line(number: int, custom_id: str, request_id: str, status: int, body: dict[str, Any]) -> LineResult:
    """Return the result of a line by its answer, in whose body iterators stand for long lists (writing.py).

    Its text may have megabytes: to be called in a thread."""
    text = _format_line(custom_id, {"status_code": status, "request_id": request_id, "body": body}, None)
    usage = body.get("usage") or {}
    prompt, output = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")  # a response, a chat
    cached = (usage.get(f"{prompt}_tokens_details") or {}).get("cached_tokens", 0)
    reasoned = (usage.get(f"{output}_tokens_details") or {}).get("reasoning_tokens", 0)
    tokens = usage.get(f"{prompt}_tokens", 0), cached, usage.get(f"{output}_tokens", 0), reasoned
    cost = usage.get("cost") or {}
    millijoules = round(1e3 * cost.get("joules", 0))
    spent = round(1e6 * cost.get("device_seconds", 0)), millijoules, millijoules * (cost.get("energy") == "modelled")
    return LineResult(number, status < 400, text, *tokens, *spent)


def error_line(custom_id: str | None, code: str, message: str) -> str:
    """Return the error file's line for a line that has no answer."""
    return _format_line(custom_id, None, {"code": code, "message": message})


def failed_line(number: int, custom_id: str | None, code: str, message: str) -> LineResult:
    """Return the result of a line that gets no answer."""
    return LineResult(number, False, error_line(custom_id, code, message))


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
