"""Read and check the lines of a job's file, and write the lines of its output and error files.

A line ends with LF or CRLF; the last line may end without either. A byte order mark before the first line is skipped,
and so are blank lines. Lines are counted from 1, blank lines included, as an editor counts them. At most one line is in
memory at a time, and of a line that is too long only as much as is allowed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeAlias
from uuid import uuid4

from pydantic_core import from_json

from alignedserve.errors import BytesGone
from alignedserve.gateway.openai.writing import ascii_json, json_parts
from alignedserve.store.blobs import Writing
from alignedserve.store.job import Endpoint, Job, JobStatus, LineCounts, LineResult, Problem
from alignedserve.store.storage import Storage
from alignedserve.store.store import Purpose, StoredFile

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
    models: Collection[str]
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
    if body.get("model") not in rules.models:
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


# --- The files of a job, from its results


log = logging.getLogger("alignedserve.jobs")

_PIECE_BYTES = 1 << 18
# What is said of the lines without a result, by how the job ended, unless the job has a problem of its own.
_UNDONE = {
    JobStatus.EXPIRED: Problem("batch_expired", "the batch's completion window was over before this request was done"),
    JobStatus.CANCELLED: Problem("batch_cancelled", "the batch was cancelled before this request was done"),
}


class _Output:
    """The output file and the error file of a job. Each is begun with its first line: without lines there is none."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self.writings = storage, dict[str, Writing]()

    async def begin(self, name: str) -> Writing:
        if name not in self.writings:
            self.writings[name] = await self._storage.begin(f"file-{uuid4().hex}")
        return self.writings[name]

    async def add(self, name: str, lines: list[str]) -> None:
        await asyncio.to_thread(_write, await self.begin(name), lines)

    async def add_results(self, job: Job) -> set[int]:
        """Write the results of a job in pieces; return the lines that have one."""
        done, size = set[int](), Counter[str]()
        waiting: dict[str, list[str]] = {"output": [], "error": []}
        async for result in self._storage.store.results(job.id):
            name = "output" if result.is_ok else "error"
            done.add(result.line)
            waiting[name].append(result.text)
            size[name] += len(result.text)
            if size[name] >= _PIECE_BYTES:
                await self.add(name, waiting[name])
                waiting[name], size[name] = [], 0
        for name, lines in waiting.items():
            if lines:
                await self.add(name, lines)
        return done

    async def add_undone(self, job: Job, most_bytes: int, done: set[int], code: str, message: str) -> None:
        """Write an error for each line without a result; if the input file is gone, the job ends without them."""
        try:
            opened = await asyncio.to_thread(self._storage.blobs.open, job.input_file_id)
        except BytesGone as gone:
            log.error("%s ends without a line for each request that was not done: %s", job.id, gone)
            return
        writing = await self.begin("error")

        def write() -> None:
            with opened:
                for raw in raw_lines(opened, most_bytes):
                    if raw.number not in done:
                        _write(writing, [error_line(read_checked_line(raw)[0], code, message)])

        await asyncio.to_thread(write)

    async def commit(self, name: str, job: Job, now: float, keep_s: int) -> StoredFile | None:
        if (writing := self.writings.get(name)) is None:
            return None
        await asyncio.to_thread(writing.commit)
        return StoredFile(
            id=writing.id,
            owner=job.owner,
            filename=f"{job.id}_{name}.jsonl",
            bytes=writing.num_bytes,
            purpose=Purpose.BATCH_OUTPUT,
            created_at=int(now),
            expires_at=int(now) + (job.output_lives_s or keep_s),
        )


async def assemble(
    storage: Storage, job: Job, status: JobStatus, most_bytes: int, now: float, keep_s: int
) -> tuple[Job, tuple[StoredFile, ...]]:
    """Return the ended job with its written files; others see them when the job and the files are saved."""
    output = _Output(storage)
    try:
        done = await output.add_results(job)
        if status in _UNDONE and job.total > len(done):
            problem = next(iter(job.problems), _UNDONE[status])
            await output.add_undone(job, most_bytes, done, problem.code, problem.message)
        files = [await output.commit(name, job, now, keep_s) for name in ("output", "error")]
    except BaseException:
        for writing in output.writings.values():
            await storage.abandon(writing)
        raise
    counts = await storage.store.counts(job.id)
    counts += LineCounts(failed=0 if status not in _UNDONE else max(0, job.total - counts.done))
    output_id, error_id = (None if file is None else file.id for file in files)
    ended = job.move(status, now, output_file_id=output_id, error_file_id=error_id, counts=counts)
    return ended, tuple(file for file in files if file is not None)


async def discard(storage: Storage, files: Sequence[StoredFile]) -> None:
    """Remove the files of a job that surely was not saved."""
    for file in files:
        await asyncio.to_thread(storage.blobs.remove, file.id)
        await storage.store.forget_file(file.id)


def _write(writing: Writing, lines: list[str]) -> None:
    """Write the lines; to be called in a thread."""
    writing.write("".join(f"{line}\n" for line in lines).encode())
