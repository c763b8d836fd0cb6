"""Measure what a flood of one client costs the chats of another: `python -m benchmarks.floods`, about five minutes.

    answer         unstreamed answers of 128 choices with 20 log-probabilities, one after the other
    refused        the same, larger than an answer may be
    batch_answer   a batch whose lines have such answers
    forms          16 uploads of forms without end and without content
    unread         40 clients that never read their streams of 4 choices

Beside each, another client asks for a chat of 8 tokens, again and again. A row is the 95th percentile of the time to
its first token, against that of the same chats alone, and how many of them were not served. Each flood has a deployment
of its own, with a key for each client. No part of it may end. Times need quiet cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlparse

import httpx

from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.gateway.access.keys import EVERY_SCOPE, Limits, make_key
from benchmarks.common.serving import NAME, name_of, processes_under, serve
from benchmarks.report import command, report, several, status

CHATS, PAUSE_S, WARM_S = 60, 0.2, 3.0
UPLOADS, READERS = 16, 40
GOAL = 1.5  # times the latency alone
PATH = "/v1/chat/completions"
Flood = Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True, **fields}


def large(max_tokens: int) -> dict[str, Any]:
    return chat(n=128, max_tokens=max_tokens, logprobs=True, top_logprobs=20)


async def answer(http: httpx.AsyncClient) -> None:
    while True:
        await http.post(PATH, json=large(200))


async def refused(http: httpx.AsyncClient) -> None:
    while True:
        await http.post(PATH, json=large(600))


async def batch_answer(http: httpx.AsyncClient) -> None:
    lines = [{"custom_id": str(at), "method": "POST", "url": PATH, "body": large(200)} for at in range(100)]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = (await http.post("/v1/files", files={"file": ("x", data)}, data={"purpose": "batch"})).json()
    asked = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
    (await http.post("/v1/batches", json=asked)).raise_for_status()
    await asyncio.Event().wait()


async def forms(http: httpx.AsyncClient) -> None:
    async def endless() -> Any:
        while True:
            yield b"--b\r\n\r\n\r\n" * 4096

    async def upload() -> None:
        while True:
            with suppress(httpx.TransportError):
                form = {"Content-Type": "multipart/form-data; boundary=b"}
                await http.post("/v1/files", content=endless(), headers=form)

    await asyncio.gather(*(upload() for _ in range(UPLOADS)))


async def unread(http: httpx.AsyncClient) -> None:
    address, body = urlparse(str(http.base_url)), json.dumps(chat(n=4, max_tokens=600, stream=True)).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: {address.hostname}\r\nAuthorization: {http.headers['authorization']}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connections = [await asyncio.open_connection(address.hostname, address.port, limit=1) for _ in range(READERS)]
    for _, writer in connections:
        writer.write(head.encode() + body)
    await asyncio.Event().wait()


FLOODS: dict[str, Flood] = {
    "answer": answer,
    "refused": refused,
    "batch_answer": batch_answer,
    "forms": forms,
    "unread": unread,
}


async def ttfts(http: httpx.AsyncClient) -> list[float | None]:
    """Return the times to the first token of chats, one after the other; None for a chat that was not served."""
    found: list[float | None] = []
    for _ in range(CHATS):
        began, first, is_whole = perf_counter(), None, False
        with suppress(httpx.TransportError):
            async with http.stream("POST", PATH, json=chat(max_tokens=8, stream=True)) as streamed:
                async for line in streamed.aiter_lines():
                    if first is None and '"content":"' in line and '"content":""' not in line:
                        first = perf_counter() - began
                    is_whole |= line == "data: [DONE]"
        found.append(first if is_whole else None)
        await asyncio.sleep(PAUSE_S)
    return found


def p95_ms(found: list[float | None]) -> float:
    served = sorted(s for s in found if s is not None)
    return 1e3 * served[int(0.95 * (len(served) - 1))] if served else float("inf")


async def measure(url: str, keys: dict[str, str], name: str) -> None:
    def client(key: str) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        headers = {"Authorization": f"Bearer {keys[key]}"}
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=600.0, limits=limits, trust_env=False)

    async with client("flood") as flooding, client("chats") as chatting:
        await ttfts(chatting)
        alone = p95_ms(await ttfts(chatting))
        flood = asyncio.create_task(FLOODS[name](flooding))
        await asyncio.sleep(WARM_S)
        beside = await ttfts(chatting)
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
    report(f"beside {name}, first token, p95", p95_ms(beside), "ms", baseline=alone, goal=GOAL * alone)
    report(f"beside {name}, chats not served", float(beside.count(None)), "", goal=0.0)


def parts_under(pid: int) -> set[tuple[int, str | None]]:
    return {(pid, name_of(of)) for pid, of in processes_under(pid).items() if name_of(of)}


def run(args: argparse.Namespace) -> int:
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "keys.yaml")
            keys = {key: make_key(file, key, EVERY_SCOPE, Limits()) for key in ("flood", "chats")}
            with serve(args.model, "--keys-file", str(file), "--jobs-directory", folder) as deployment:
                before = parts_under(deployment.pid)
                asyncio.run(measure(deployment.url, keys, name))
                report(f"beside {name}, parts that ended", len(before - parts_under(deployment.pid)), "", goal=0.0)
    return status()


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--only", type=several(str, FLOODS), default=list(FLOODS), help="the floods to measure")
    parser.add_argument("--model", default=str(DEMO_FOLDER), help="folder of the model")
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
