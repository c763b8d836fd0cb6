"""`alignedserve batch`: batch jobs on any server that has OpenAI's files and batches.

submit FILE ──▶ POST /files, POST /batches ──▶ the id, or with --wait a bar until it has ended, and its results
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import httpx

from alignedserve.cli.remote.options import BatchOptions, BatchSubmission
from alignedserve.errors import BatchError, file_errors
from alignedserve.http_client import RemoteServer, api_at, one_line, said_in
from alignedserve.machine.whole_file import whole_file
from alignedserve.progress import ProgressBar

_LOOK_S = 0.5  # between two looks at a batch
_AGAIN_S = 60.0  # how long a silent server is asked again while a batch runs
ENDED = ("completed", "failed", "expired", "cancelled")


class Unreachable(BatchError):
    """The server does not answer, and may answer again in a moment."""


def submit(options: BatchOptions, asked: BatchSubmission) -> int:
    """Submit a batch; where its end is waited for, return 1 unless it is completed and no line failed."""
    with BatchApi(options) as server:
        endpoint = asked.endpoint or _endpoint_of(asked.file)
        file = server.upload(asked.file)
        body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": asked.window}
        batch = server.post("/batches", body if asked.weight is None else body | {"weight": asked.weight})
        print(batch["id"], flush=True)
        if not asked.wait:
            return 0
        try:
            batch = _waited(server, batch["id"])
        except KeyboardInterrupt:
            there = "" if options.url == BatchOptions().url else f" --url {options.url}"
            print(f"the batch goes on: `alignedserve batch cancel {batch['id']}{there}` ends it", file=sys.stderr)
            raise
        print(_line(batch) + _used(batch))
        _complain(batch)
        if failed := int((batch.get("request_counts") or {}).get("failed", 0)):
            print(f"{failed:,} lines failed{_first_error(server, batch)}", file=sys.stderr)
        if asked.out is not None:
            _download(server, batch, asked.out)
        return 0 if batch["status"] == "completed" and not failed else 1


def status(options: BatchOptions, id: str) -> int:
    with BatchApi(options) as server:
        batch, headers = server.look(id)
        print(_line(batch) + _used(batch))
        _complain(batch)
        if batch["status"] not in ENDED and (told := _prediction(headers)):
            print(told)
    return 0


def listed(options: BatchOptions, limit: int) -> int:
    with BatchApi(options) as server:
        for batch in server.tree("GET", f"/batches?limit={limit}").get("data", []):
            print(_line(batch) + "".join(f": {one_line(said):.200}" for said in _problems(batch)[:1]))
    return 0


def cancel(options: BatchOptions, id: str) -> int:
    with BatchApi(options) as server:
        print(_line(server.post(f"/batches/{quote(id, safe='')}/cancel", {})))
    return 0


def download(options: BatchOptions, id: str, out: Path) -> int:
    """Download the results and errors that exist; return 1 where nothing exists yet."""
    with BatchApi(options) as server:
        return 0 if _download(server, server.look(id)[0], out) else 1


# --- What is shown


def _waited(server: BatchApi, id: str) -> Any:
    """Return the batch when it has ended. A terminal shows a bar, anything else a line for each change of status; a
    warning comes once the server predicts that the batch will be late."""
    told, is_warned, away_since = "", False, None
    with ProgressBar(id, sys.stderr) as bar:
        while True:
            try:
                (batch, headers), away_since = server.look(id), None
            except Unreachable:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since > _AGAIN_S:
                    raise
                time.sleep(_LOOK_S)
                continue
            counts = batch.get("request_counts") or {}
            bar.show(counts.get("completed", 0) + counts.get("failed", 0), counts.get("total", 0))
            if batch["status"] in ENDED:
                return batch
            if told != batch["status"] and not sys.stderr.isatty():
                told = batch["status"]
                bar.note(_line(batch))
            if not is_warned and _is_late(headers):
                is_warned = True
                bar.note(f"{id}: {_prediction(headers)}; what is done when its window ends is kept")
            time.sleep(_LOOK_S)


def _line(batch: Any) -> str:
    counts = batch.get("request_counts") or {}
    completed, failed, total = (counts.get(name, 0) for name in ("completed", "failed", "total"))
    not_run = total - completed - failed if batch["status"] in ENDED else 0
    left = f", {not_run:,} not run" if not_run > 0 else ""
    done = f"{completed:,} done, {failed:,} failed{left}, {total:,} in all"
    return f"{batch['id']}  {batch['status']}  {done}  window {batch.get('completion_window')}"


def _used(batch: Any) -> str:
    """Return a line of the tokens that a batch took, and of its cost where the server tells it."""
    usage = batch.get("usage") or {}
    if not usage.get("total_tokens"):
        return ""
    read, cached = usage["input_tokens"], (usage.get("input_tokens_details") or {}).get("cached_tokens", 0)
    said = [f"{read:,} tokens of prompts ({cached:,} cached)", f"{usage['output_tokens']:,} of outputs"]
    if cost := usage.get("cost"):
        said += [f"{cost['device_seconds']:,.1f} s of workers", f"{cost['joules']:,.1f} J"]
        said += [f"price {cost['price']:,.4f}"] if cost.get("price") else []
    return f"\n  used: {', '.join(said)}"


def _first_error(server: BatchApi, batch: Any) -> str:
    """Return what the first line of the error file says, where there is one."""
    line = server.first_line(batch["error_file_id"]) if batch.get("error_file_id") else ""
    try:
        told = json.loads(line)
        why = told.get("error") or (told.get("response") or {}).get("body")
        return f"; the first, {told.get('custom_id')!r:.80}: {said_in(why)}"
    except (ValueError, AttributeError):
        return ""


def _prediction(headers: httpx.Headers) -> str:
    """Return the prediction that our own server's headers hold; nothing where they hold none."""
    late = ", too late" if _is_late(headers) else ""
    if (finish_at := headers.get("x-batch-predicted-finish-at", "")).isdigit():
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(int(finish_at)))
        return f"predicted finish: {at}{late}; {headers.get('x-batch-tokens-per-s')} tokens/s"
    return f"predicted finish: unknown{late}" if late else ""


def _is_late(headers: httpx.Headers) -> bool:
    return bool(headers.get("x-batch-late") == "true")


def _complain(batch: Any) -> None:
    for said in _problems(batch):
        print(said, file=sys.stderr)


def _problems(batch: Any) -> list[str]:
    """Return why a batch failed as a whole."""
    told = (batch.get("errors") or {}).get("data") or []
    return [f"line {it['line']}: {it.get('message')}" if it.get("line") else str(it.get("message")) for it in told]


def _download(server: BatchApi, batch: Any, out: Path) -> bool:
    """Write results to `out` and errors to a file beside it; return whether there were any."""
    errors = out.with_name(f"{out.stem}.errors{out.suffix}")
    files = [(batch.get("output_file_id"), out), (batch.get("error_file_id"), errors)]
    present = [(id, path) for id, path in files if id]
    for id, path in present:
        print(f"{path}: {server.save(id, path):,} bytes")
    if not present:
        print(f"{batch['id']} is {batch['status']}: there are no results", file=sys.stderr)
    return bool(present)


@contextmanager
def _read(file: Path) -> Iterator[IO[bytes]]:
    with file_errors(BatchError, file, "read"), file.open("rb") as opened:
        yield opened


def _endpoint_of(file: Path) -> str:
    """Return the endpoint that the file's first line names; the server checks it."""
    with _read(file) as opened:
        first = opened.readline().removeprefix(b"\xef\xbb\xbf")
    try:
        return str(json.loads(first)["url"])
    except (LookupError, TypeError) as error:
        is_object = isinstance(error, KeyError)
        wrong = "names no url: name one with --endpoint" if is_object else "is no request: each is an object of JSON"
        raise BatchError(f"{file}: its first line {wrong}") from None
    except ValueError as error:
        raise BatchError(f"{file}: its first line is no JSON: {error}") from None


# --- The server


class BatchApi(RemoteServer):
    """The server's API of files and batches; every failure is a BatchError of one line."""

    kind = BatchError

    def __init__(self, options: BatchOptions) -> None:
        super().__init__(api_at(options.url), options.api_key, ca=options.ca)

    def lost(self, error: Exception) -> BatchError:
        return Unreachable(str(super().lost(error)))

    def refused(self, answer: httpx.Response) -> BatchError:
        kind = Unreachable if answer.status_code in (502, 503, 504) else BatchError
        return kind(str(super().refused(answer)))

    def upload(self, file: Path) -> Any:
        with _read(file) as opened:
            return self.tree("POST", "/files", data={"purpose": "batch"}, files={"file": (file.name, opened)})

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.tree("POST", path, json=body)

    def look(self, id: str) -> tuple[Any, httpx.Headers]:
        answer = self.whole("GET", f"/batches/{quote(id, safe='')}")
        return self.tree_of(answer.text), answer.headers

    def save(self, id: str, path: Path) -> int:
        size = 0
        content = f"/files/{id}/content"
        with file_errors(BatchError, path), self.stream("GET", content) as answer, whole_file(path) as file:
            for piece in answer.iter_bytes():
                size += file.write(piece)
        return size

    def first_line(self, id: str) -> str:
        with self.stream("GET", f"/files/{id}/content") as answer:
            return next(answer.iter_lines(), "")
