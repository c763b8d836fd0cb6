"""Clients that ask the same questions again and again while things go wrong, and note what they got."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from random import Random
from typing import Any

import httpx

from tests.end_to_end.client import Wanted, client

_APART_S = 0.2  # between an error and the client's next question


class Error(Enum):
    AWAY = "no connection"
    BROKEN = "connection broke"
    REFUSED = "429 or 503"
    BLAMED = "500: workers ended, the last one alone with the request"
    FAILED = "another status, or an error in the stream"


@dataclass
class Answer:
    number: int  # of the question
    began_at: float
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ended_at: float = 0.0
    pause_s: float = 0.0  # the longest without a token; a whole answer's is none
    pause_until: str = ""  # when it was over
    error: Error | None = None
    said: str = ""  # by the server, with an error


def wall_clock() -> str:
    return datetime.now().isoformat(timespec="milliseconds")


async def ask(http: httpx.AsyncClient, number: int, wanted: Wanted) -> Answer:
    await _read(http, wanted, answer := Answer(number, time.monotonic()))
    return answer


async def _read(http: httpx.AsyncClient, wanted: Wanted, answer: Answer) -> None:
    try:
        if wanted.stream:
            await _read_stream(http, wanted, answer)
        else:
            await _read_whole(http, wanted, answer)
    except httpx.ConnectError as error:
        answer.error, answer.said = Error.AWAY, repr(error)
    except httpx.TransportError as error:
        is_late = isinstance(error, httpx.TimeoutException)
        answer.error, answer.said = Error.FAILED if is_late else Error.BROKEN, repr(error)
    answer.ended_at = time.monotonic()


async def _read_whole(http: httpx.AsyncClient, wanted: Wanted, answer: Answer) -> None:
    got = await http.post("/v1/completions", json=wanted.body)
    if _is_good(got, answer):
        _add(answer, got.json())


async def _read_stream(http: httpx.AsyncClient, wanted: Wanted, answer: Answer) -> None:
    heard_at, last = time.monotonic(), ""
    async with http.stream("POST", "/v1/completions", json=wanted.body) as got:
        if got.status_code != 200:
            await got.aread()
        if not _is_good(got, answer):
            return
        async for line in got.aiter_lines():
            if not line.startswith("data: "):
                continue
            last, now = line, time.monotonic()
            if now - heard_at > answer.pause_s:
                answer.pause_s, answer.pause_until = now - heard_at, wall_clock()
            heard_at = now
            if line != "data: [DONE]":
                _add(answer, json.loads(line[6:]))
    if last != "data: [DONE]" and answer.error is None:
        answer.error, answer.said = Error.BROKEN, f"the stream ended after {last[:100]!r}"


def _is_good(got: httpx.Response, answer: Answer) -> bool:
    if got.status_code == 200:
        return True
    answer.error = Error.REFUSED if got.status_code in (429, 503) else _error_of(got.text)
    answer.said = f"{got.status_code} {got.text[:200]}"
    return False


def _error_of(said: str) -> Error:
    """Return what an error of the server is, whose status may have been sent before it: a kill looks like a poison."""
    return Error.BLAMED if "request_ends_workers" in said else Error.FAILED


def _add(answer: Answer, body: dict[str, Any]) -> None:
    if "error" in body:
        answer.said = str(body["error"])[:200]
        answer.error = _error_of(str(body["error"]))
    for choice in body.get("choices", ()):
        answer.tokens += choice.get("token_ids") or ()
        answer.text += choice.get("text") or ""


async def ask_all(url: str, questions: Sequence[Wanted]) -> list[Answer]:
    async with client(url) as http:
        return await asyncio.gather(*(ask(http, number, wanted) for number, wanted in enumerate(questions)))


class Load:
    """So many clients, each of which asks one question after the other until it is told to stop."""

    def __init__(self, url: str, questions: Sequence[Wanted], clients: int, seed: int) -> None:
        self._url, self._questions = url, questions
        self._draws = [Random(seed * 1000 + number) for number in range(clients)]
        self._is_over = False
        self.answers: list[Answer] = []

    @property
    def num_tokens(self) -> int:
        """Return the tokens that clients have got."""
        return sum(len(answer.tokens) for answer in self.answers)

    def stop(self) -> None:
        self._is_over = True

    async def run(self) -> None:
        """Return when each client has its last answer."""
        async with client(self._url) as http:
            await asyncio.gather(*(self._ask(http, draw) for draw in self._draws))

    async def _ask(self, http: httpx.AsyncClient, draw: Random) -> None:
        while not self._is_over:
            number = draw.randrange(len(self._questions))
            self.answers.append(answer := Answer(number, time.monotonic()))
            await _read(http, self._questions[number], answer)
            if answer.error is not None:
                await asyncio.sleep(_APART_S)
