"""Send the gateway's application what the grammar draws (mutating.py), and look at each answer.

    python -m tests.gateway.mutated [--bodies 1000000] [--minutes 10] [--seed N]

Whatever a client sends, it gets an answer of the interface's form: no traceback is logged, no status is 500 or above
but those that say when to come again, nothing stays open, and no request takes longer than SLOW_S. All follows from the
seed, but the names of what was made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import unquote

import pytest
from starlette.routing import Route

from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.config.sections import JobsConfig
from alignedserve.core import Request
from alignedserve.gateway.app import make_app
from alignedserve.gateway.batches import BatchRoutes
from alignedserve.gateway.embed_side import VectorModel
from alignedserve.gateway.files import FileRoutes
from alignedserve.gateway.http.limits import RefusalPace
from alignedserve.gateway.http.middleware import PAGE
from alignedserve.gateway.responses.keeping import ResponseKeeper
from alignedserve.gateway.settings import GatewaySettings
from alignedserve.store.storage import LazyStorage
from alignedserve.store.store import Holder
from alignedserve.text.infill import InfillTokens
from alignedserve.text.text_model import TextModel
from tests.gateway.conftest import MODEL, MOST, FakeOwner
from tests.gateway.mutating import Call, Grammar, raw_path
from tests.gateway.test_vectors import EMBEDS, ENCODES, VectorOwner

SLOW_S = 10.0  # a grammar's trial may take 2 s of a processor, and the machine may be busy
AT_ONCE = 1000  # bodies, after which what the fake owner was asked is forgotten
MOST_TOLD = 20
_KEPT = ("file-", "resp_", "batch_")  # names of what is kept
MAY_LACK = (501, 503, 507)  # statuses of what this application has not: jobs' runner, room


class _Log(logging.Handler):
    """Keeps the errors that are logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.errors.append(logging.Formatter().format(record))


class EndingOwner(FakeOwner):
    """Answers a token and an end; where a request ignores that, as many tokens as it may have."""

    def steps_of(self, request: Request) -> tuple[Any, ...]:
        return (5,), (2,), (5,) * request.max_tokens


@dataclass
class Told:
    """What came of many calls."""

    statuses: Counter[int] = field(default_factory=Counter)
    slowest: tuple[float, str] = 0.0, ""
    faults: dict[str, str] = field(default_factory=dict)  # where it happened -> the first call and what it did
    num_faults: int = 0

    def fault(self, where: str, call: Call, what: str) -> None:
        self.num_faults += 1
        if len(self.faults) < MOST_TOLD:
            shown = replace(call, body=call.body if len(call.body) < 2000 else call.body[:2000] + b" ...")
            self.faults.setdefault(where, f"{shown}\n{what}")

    def __str__(self) -> str:
        number, (slowest_s, slowest) = self.statuses.total(), self.slowest
        lines = [f"{where}: {what}" for where, what in self.faults.items()]
        counted = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        lines.append(f"{number} requests ({counted}), {self.num_faults} faults")
        lines.append(f"the slowest took {slowest_s:.2f} s: {slowest:.200}")
        return "\n".join(lines)


class Application:
    """The gateway's application with every route, in front of owners that answer at once."""

    def __init__(self, text: TextModel, folder: Path) -> None:
        jobs = JobsConfig(directory=str(folder))
        keeping = LazyStorage(jobs, Holder("gateway", 1))
        self.owners = EndingOwner(), VectorOwner()
        vectors = VectorModel("minilm", self.owners[1], replace(text, pooled=ENCODES), 40, 2)
        job_routes = (*FileRoutes(keeping, jobs).routes, *BatchRoutes(keeping, jobs).routes)
        settings = GatewaySettings((MODEL,), MOST)
        keeper = ResponseKeeper(keeping, jobs)
        written = replace(text, pooled=EMBEDS, infill=InfillTokens(10, 11, 12, 13, 14, (10, 11, 12)))
        self.app = make_app(self.owners[0], written, settings, None, job_routes, keeper=keeper, embedding=vectors)

    @property
    def pages(self) -> list[tuple[str, str]]:
        routes = (route for route in self.app.routes if isinstance(route, Route) and route.path.startswith(PAGE))
        return [(method, route.path) for route in routes for method in route.methods or ()]

    @property
    def num_open(self) -> int:
        return sum(len(owner.open_now) for owner in self.owners)

    def forget(self) -> None:
        for owner in self.owners:
            owner.opened.clear()
            owner.cancelled.clear()

    async def answer(self, call: Call) -> tuple[int, bytes]:
        """Return status and body of the answer, 0 without one. Raise where the application does, or takes too long."""
        cuts = (0, *call.cuts, len(call.body))
        parts = [call.body[begin:end] for begin, end in pairwise(cuts)]
        messages: list[dict[str, Any]] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        messages[-1]["more_body"] = False
        if call.leaves:
            messages[-1] = {"type": "http.disconnect"}
        left, sent = asyncio.Event(), list[Any]()

        async def receive() -> Any:
            if messages:
                return messages.pop(0)
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if call.path.startswith(PAGE):
                left.set()  # the live page's stream has no end

        await asyncio.wait_for(self.app(_scope(call), receive, send), SLOW_S)
        heads = [message for message in sent if message["type"] == "http.response.start"]
        body = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
        return heads[0]["status"] if heads else 0, body


def _scope(call: Call) -> dict[str, Any]:
    raw = raw_path(call)
    length = (
        ()
        if any(name == b"content-length" for name, _ in call.headers)
        else ((b"content-length", str(len(call.body)).encode()),)
    )
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "path": _decoded(raw),
        "raw_path": raw,
        "root_path": "",
        "scheme": "http",
        "query_string": call.query,
        "headers": [(b"host", b"localhost"), *length, *call.headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }


def _decoded(raw: bytes) -> str:
    return unquote(raw.decode("ascii"))  # as uvicorn does


async def try_calls(app: Application, seed: int, number: int, until: float = float("inf")) -> Told:
    """Send so many calls, or until the time, and return what came of them."""
    log, told, grammar = _Log(), Told(), Grammar(app.pages)
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: log.errors.append(f"{context.get('exception')!r}: {context}")
    )
    logging.getLogger().addHandler(log)
    try:
        for each in range(number):
            if time.monotonic() >= until:
                break
            await _try(app, grammar, grammar.draw(Random(f"{seed}/{each}")), told, log)
            if each % AT_ONCE == 0:
                app.forget()
    finally:
        logging.getLogger().removeHandler(log)
    return told


async def _try(app: Application, grammar: Grammar, call: Call, told: Told, log: _Log) -> None:
    began, status = time.monotonic(), 0
    try:
        status, body = await app.answer(call)
        if fault := _fault_of(call, status, body):
            told.fault(fault, call, f"{status}: {body[:500]!r}")
        grammar.ids += _made(body) if status == 200 and call.method == "POST" else ()
    except Exception as error:
        told.fault(f"{type(error).__name__} {_where(error)}", call, repr(error))
    for said in log.errors:
        told.fault(f"log: {said.splitlines()[-1][:100]} {said.splitlines()[-3:-2]}", call, said)
    log.errors.clear()
    if app.num_open:
        told.fault("left open", call, f"{app.num_open} requests")
    told.statuses[status] += 1
    told.slowest = max(told.slowest, (time.monotonic() - began, f"{call.method} {call.path} {call.mutation}"))


def _fault_of(call: Call, status: int, body: bytes) -> str:
    """Return what is wrong with an answer, or an empty text."""
    if call.leaves or call.method in ("HEAD", ""):
        return f"status {status}" if status >= 500 and status not in MAY_LACK else ""
    if not status:
        return "no answer"
    if status >= 500 and status not in MAY_LACK:
        return f"status {status} of {call.path.split('/')[1:3]}"
    if status < 400:
        return ""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return f"an error without a message: {status}"
    return "" if isinstance(message, str) and message else "an empty message"


def _made(body: bytes) -> Iterator[str]:
    try:
        id = json.loads(body).get("id")
    except (ValueError, AttributeError):
        return
    if isinstance(id, str) and id.startswith(_KEPT):
        yield id


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"


@contextmanager
def unpaced() -> Iterator[None]:
    """Let refusals come at once: their pace would make a million of them take a day."""

    async def at_once(*_: object) -> None:
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RefusalPace, "hold_back", at_once)
        yield


def run(text: TextModel, folder: Path, seed: int, number: int, until: float = float("inf")) -> Told:
    with unpaced():
        return asyncio.run(try_calls(Application(text, folder), seed, number, until))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=10.0, help="end after this time")
    parser.add_argument("--seed", type=int, default=None, help="of a run before; default: a new one")
    given = parser.parse_args()
    seed = secrets.randbelow(10**12) if given.seed is None else given.seed
    print(f"python -m tests.gateway.mutated --seed {seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        told = run(TextModel.load(DEMO_FOLDER), Path(folder), seed, given.bodies, began + 60 * given.minutes)
    print(told)
    print(f"{told.statuses.total() / (time.monotonic() - began):.0f} a second")
    return int(bool(told.faults))


if __name__ == "__main__":
    sys.exit(main())
