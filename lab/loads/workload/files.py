"""Reads files of requests: tables with their lengths, and chats with their texts.

A table is a CSV file or rows: `arrival_s,prompt_tokens,output_tokens`; other columns are ignored.
A row without a token of prompt or output cannot run as a request: such rows are left out, and counted.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from alignedserve.errors import WorkloadError, file_errors
from alignedserve.lab.loads.workload.amounts import Amount, Pair

Row = dict[str, str | None]

MOST_S = 1e10  # from any start: large enough for seconds since 1970
_TIME, _PROMPT, _OUTPUT = TRACE_COLUMNS = "arrival_s", "prompt_tokens", "output_tokens"


@dataclass(frozen=True)
class FileRequests:
    """The requests of a file."""

    pairs: tuple[Pair, ...]
    times: tuple[float, ...] = ()  # of their arrivals, if the file has them
    blocks: tuple[tuple[int, ...], ...] = ()  # ids of the prompts' blocks, if the file has ids
    notes: tuple[str, ...] = ()  # for the reader of the figures


def read_lengths(path: Path) -> FileRequests:
    pairs = [_pair(row, where) for where, row in _rows(path, (_PROMPT, _OUTPUT))]
    kept = tuple(pair for pair in pairs if all(pair))
    return FileRequests(kept, notes=notes_of(path, len(pairs), len(kept)))


def read_trace(path: Path) -> FileRequests:
    return trace_of_rows(_rows(path, TRACE_COLUMNS), path)


def trace_of_rows(rows: Iterable[tuple[str, Row]], path: Path) -> FileRequests:
    """Return the requests of rows, each with the place that errors name."""
    times, pairs, num_rows, last = list[float](), list[Pair](), 0, -math.inf
    for where, row in rows:
        num_rows, last, pair = num_rows + 1, _time(row, where, last), _pair(row, where)
        if all(pair):
            times.append(last)
            pairs.append(pair)
    return FileRequests(tuple(pairs), tuple(times), notes=notes_of(path, num_rows, len(pairs)))


def notes_of(path: Path, num_rows: int, num_kept: int) -> tuple[str, ...]:
    if not num_kept:
        raise WorkloadError(f"{path} has no requests")
    empty = num_rows - num_kept
    return (f"{path.name}: {empty} of {num_rows} rows have no prompt or no output, and were left out",) if empty else ()


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each line's value with its place in the file, None where it is no JSON; blank lines are left out."""
    try:
        with file_errors(WorkloadError, path, "read"), path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path} line {number}", _json(line)
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path} is not a file of JSON lines: {error}") from None


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, Row]]:
    """Yield each row with its place in the file."""
    empty = True
    try:
        with file_errors(WorkloadError, path, "read"), path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            for column in columns:
                if column not in (reader.fieldnames or ()):
                    raise WorkloadError(f"{path} has no column {column}: its first line must name {', '.join(columns)}")
            for row in reader:
                empty = False
                yield f"{path} line {reader.line_num}", row
    except (UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path} is not a CSV file: {error}") from None
    if empty:
        raise WorkloadError(f"{path} has no requests")


def _time(row: Row, where: str, last: float) -> float:
    text = row[_TIME]
    if not text:
        lengths = "a file of lengths alone is read as lengths:PATH, with a rate"
        raise WorkloadError(f"{where}: {_TIME} is empty: fill it in, or remove the line; {lengths}")
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if not abs(time) < MOST_S:
        raise WorkloadError(f"{where}: {_TIME} must be a number of seconds, up to {MOST_S:.0e}, not {text!r:.40}")
    return rising(time, last, where, _TIME)


def rising(time: float, last: float, where: str, column: str) -> float:
    """Return the time of a row unless an earlier row has a later time."""
    if time < last:
        raise WorkloadError(f"{where}: {column} is earlier than in the line before: sort the file by it")
    return time


def _pair(row: Row, where: str) -> Pair:
    return _tokens(row, _PROMPT, where), _tokens(row, _OUTPUT, where)


def _tokens(row: Row, column: str, where: str) -> int:
    text = row[column]
    if not text:
        raise WorkloadError(f"{where}: {column} is empty: fill it in, or remove the line")
    if not (re.fullmatch(r"0*[0-9]{1,9}", text)):
        raise WorkloadError(f"{where}: {column} must be a whole number of 0 or more, below a billion, not {text!r:.40}")
    return int(text)


# --- Chats


_LETTERS = 4  # of a token, in English


@dataclass(frozen=True)
class Message:
    role: str
    content: str


Turn = tuple[Message, ...]


@dataclass(frozen=True)
class Chat:
    """A line of a file of chats: a JSON object with `messages`, as OpenAI's chat API takes them.

        {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}, ...]}

    A turn is what is said until the assistant speaks. What an assistant says in the file is left out: the server that
    is asked says it. A load test sends the texts; a simulation counts four letters as a token.
    """

    turns: tuple[Turn, ...]  # what is said before each answer


@dataclass(frozen=True)
class ChatLengths:
    """The lengths of chats; those of their answers are drawn."""

    chats: tuple[Chat, ...] = field(repr=False)
    output: Amount

    def chat(self, number: int) -> Chat:
        """Return the chat of the visit of this number; after the last chat the first comes again."""
        return self.chats[number % len(self.chats)]

    def of_one_turn(self) -> ChatLengths:
        return replace(self, chats=tuple(Chat(chat.turns[:1]) for chat in self.chats))

    def pair(self, number: int, draw: Random, turn: int = 0) -> Pair:
        letters = sum(len(message.content) for message in self.chat(number).turns[turn])
        return max(1, letters // _LETTERS), self.output.count(draw)


def read_chats(path: Path) -> tuple[Chat, ...]:
    chats = tuple(_chat(row, where) for where, row in json_lines(path))
    if not chats:
        raise WorkloadError(f"{path} has no chats")
    return chats


def _chat(row: Any, where: str) -> Chat:
    found = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(found, list):
        raise WorkloadError(f"{where} has no messages, such as {{'messages': [{{'role': 'user', 'content': '...'}}]}}")
    turns, said = list[Turn](), list[Message]()
    for message in (_message(one, where) for one in found):
        if message.role != "assistant":
            said.append(message)
        elif said:
            turns.append(tuple(said))
            said = []
    turns += [tuple(said)] if said else []
    if not turns:
        raise WorkloadError(f"{where}: nobody asks anything in this chat")
    return Chat(tuple(turns))


def _message(found: Any, where: str) -> Message:
    role, content = (found.get("role"), found.get("content")) if isinstance(found, dict) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise WorkloadError(f"{where}: a message must have a role and a text as its content, not {found!r:.60}")
    return Message(role, content)
