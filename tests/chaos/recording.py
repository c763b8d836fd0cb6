"""Clients that write down all that they see: the history of a trial (oracle.py says what is in it)."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
import yaml

from tests.end_to_end.client import Wanted
from tests.end_to_end.deployment import ANSWER_S, NAME

KEYS = Path(__file__).with_name("keys.yaml")  # has the hash of the key as-chaos-NAME for each name
_USAGE = {name: name for name in ("prompt_tokens", "completion_tokens")}
_USAGE |= {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}  # as responses name them
_OUTPUTS = {"completed": "stop", "incomplete": "length"}  # responses' status -> how completions finish


class Recorder:
    """The file of a history."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._lock, self._ids = path.open("w", encoding="utf-8"), Lock(), itertools.count()
        self.path = path
        for entry in yaml.safe_load(KEYS.read_text(encoding="utf-8"))["keys"]:
            if limits := {name: limit for name, limit in entry.items() if name.endswith("_per_minute")}:
                self.write("limit", key=entry["name"], **limits)

    def write(self, what: str, **fields: object) -> None:
        """Write an event of this kind: it happens now."""
        with self._lock:  # faults are noted by other threads
            self._file.write(json.dumps({"at": time.monotonic(), "is": what, **fields}) + "\n")

    def hurt(self, part: str) -> None:
        self.write("hurt", part=part)

    def call(self, **asked: object) -> int:
        """Write that a client asks; return the number of the call."""
        self.write("call", id=(id := next(self._ids)), **asked)
        return id

    def flush(self) -> None:
        with self._lock:
            self._file.flush()

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Question:
    """A body that has one right answer, since its output is greedy."""

    path: str
    body: Mapping[str, Any]

    @classmethod
    def of(cls, wanted: Wanted) -> Question:
        usage = {"stream_options": {"include_usage": True}} if wanted.stream else {}
        return cls("/v1/completions", {**wanted.body, **usage})

    @classmethod
    def of_chat(cls, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Question:
        limits = {"max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return cls("/v1/chat/completions", {"model": NAME, "messages": messages, **limits, **stream})

    @classmethod
    def to_keep(cls, text: str, max_tokens: int) -> Question:
        body = {"model": NAME, "input": text, "max_output_tokens": max_tokens, "temperature": 0, "store": True}
        return cls("/v1/responses", body)

    @property
    def max_tokens(self) -> int:
        return int(self.body.get("max_tokens") or self.body["max_output_tokens"])

    @property
    def name(self) -> str:
        """Return a name that all bodies with the same right answer have."""
        asked = [self.body.get(name) for name in ("prompt", "messages", "input", "ignore_eos")]
        return hashlib.sha256(json.dumps([self.path, *asked, self.max_tokens]).encode()).hexdigest()[:12]

    @property
    def told(self) -> dict[str, object]:
        """Return what the history says of it."""
        promise = {"promise": tier} if (tier := self.body.get("service_tier")) else {}
        flags = {name: True for name in ("stream", "ignore_eos") if self.body.get(name)}
        told = {"question": self.name, "model": NAME, "sampling": "greedy", "max_tokens": self.max_tokens}
        return {**told, **flags, **promise}


@dataclass
class Seen:
    """What a client got for a call."""

    status: int = 0
    how: str = "done"
    retry_after: float = 0.5  # seconds: what SDKs wait where they are told nothing
    end: dict[str, object] = field(default_factory=dict)  # what the history says with it
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return self.status == 200 and self.how == "done" and "code" not in self.end


def connected(url: str, key: str) -> httpx.AsyncClient:
    limits, headers = httpx.Limits(max_connections=None), {"Authorization": f"Bearer as-chaos-{key}"}
    return httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits, headers=headers, trust_env=False)


class Client:
    """Sends requests with a key, and writes down what comes."""

    def __init__(self, http: httpx.AsyncClient, recorder: Recorder, key: str = "load") -> None:
        self._http, self._recorder, self._key = http, recorder, key
        self.num_tokens = 0  # that came

    async def ask(self, question: Question) -> Seen:
        return await self.call("POST", question.path, question.told, json=question.body)

    async def call(self, method: str, path: str, told: Mapping[str, object] | None = None, **given: Any) -> Seen:
        id, seen = self._recorder.call(key=self._key, method=method, path=path, **told or {}), Seen()
        try:
            async with self._http.stream(method, path, **given) as got:
                seen.status, after = got.status_code, got.headers.get("retry-after", "")
                retry = {"retry_after": int(after)} if after.isdigit() else {}
                seen.retry_after = retry.get("retry_after", seen.retry_after)
                self._recorder.write("head", id=id, status=seen.status, **retry)
                if "event-stream" in got.headers.get("content-type", ""):
                    async for line in got.aiter_lines():
                        self._read_event(id, line, seen)
                else:
                    self._read_whole(id, path, await got.aread(), seen)
        except httpx.TransportError as error:
            is_late, is_away = (isinstance(error, kind) for kind in (httpx.TimeoutException, httpx.ConnectError))
            seen.how = "late" if is_late else "away" if is_away else "broken"
        self._recorder.write("end", id=id, how=seen.how, **seen.end)
        return seen

    def _read_event(self, id: int, line: str, seen: Seen) -> None:
        if line == "data: [DONE]":
            seen.end["done"] = True
        elif line.startswith("data: "):
            self._read(id, json.loads(line.removeprefix("data: ")), seen)

    def _read_whole(self, id: int, path: str, content: bytes, seen: Seen) -> None:
        """Read a body that is no stream: that of a file, or JSON."""
        if seen.status == 200 and path.endswith("/content"):
            seen.end["sha256"] = sha256(content)
            for line in content.splitlines() if content.startswith(b'{"id"') else ():  # a batch's
                self._recorder.write("line", id=id, **_row(json.loads(line)))
            return
        try:
            body = json.loads(content)
        except ValueError:
            body = None
        if isinstance(body, dict):
            self._read(id, body, seen)
        else:
            seen.end["code"] = "no JSON"

    def _read(self, id: int, body: dict[str, Any], seen: Seen) -> None:
        if "error" in body and (seen.status != 200 or body["error"]):
            error = body["error"]
            has_form = isinstance(error, dict) and isinstance(error.get("message"), str) and "type" in error
            seen.end |= {
                "code": str(error.get("code") or error.get("type")) if has_form else "",
                "well_formed": has_form,
            }
            return
        for name, other in _USAGE.items():
            if (number := (body.get("usage") or {}).get(name)) is not None:
                seen.end[other] = number
        for choice in body.get("choices", ()):
            seen.prompt += body.get("prompt_token_ids") or choice.get("prompt_token_ids") or ()
            if piece := _piece(choice):
                self._recorder.write("piece", id=id, **piece)
                seen.tokens += piece.get("tokens", ())
                self.num_tokens += len(piece.get("tokens", ()))
        kind = body.get("object")
        if kind in ("file", "response", "batch"):
            seen.end["thing"] = body["id"]
        if kind == "response" and "output" in body:
            text = "".join(part["text"] for item in body["output"] for part in item.get("content", ()))
            self._recorder.write("piece", id=id, text=text, finish=_OUTPUTS.get(body["status"], body["status"]))
            seen.end["sha256"] = sha256(text.encode())
            if not body["store"]:
                del seen.end["thing"]
        elif kind == "batch":
            counts = body["request_counts"]
            seen.end |= {"state": body["status"], "counts": [counts[name] for name in ("total", "completed", "failed")]}
            files = {"output": body.get("output_file_id"), "errors": body.get("error_file_id")}
            seen.end |= {name: file for name, file in files.items() if file}
        elif kind == "list":
            seen.end["things"] = [each["id"] for each in body["data"]]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _piece(choice: Mapping[str, Any]) -> dict[str, Any]:
    part = choice.get("delta") or choice.get("message") or choice
    found = {"text": part.get("text") or part.get("content"), "tokens": choice.get("token_ids")}
    found["finish"] = choice.get("finish_reason")
    return {name: value for name, value in found.items() if value}


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the history says of a line of a batch's output, or of its errors."""
    response, error = row.get("response") or {}, row.get("error") or {}
    body = response.get("body") or {}
    error = error or body.get("error") or {}
    told = {"code": str(error.get("code"))} if error else _piece(body["choices"][0])
    return {"custom_id": row["custom_id"], **told}
