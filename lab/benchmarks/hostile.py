"""Measure what hostile clients cost a gateway, and others' chats: `python -m lab.benchmarks.hostile`, twenty minutes.

First bodies: each kind is sent to the server of gateway.py, a separate process with a fake engine. The figures
are the processor time of the event loop's thread for a single body, without other requests; and the peak memory above
the memory before, with as many bodies at once as the gateway accepts.

Then floods, each beside a deployment of its own, from a process of its own, with a key of its own. That process runs
where nothing else wants a processor (SCHED_IDLE): on a machine of its own it would take no time from the server's. A
busy processor may still slow the one beside it. So the chats also run beside processes that send nothing and only
compute, one for each processor, as idle as the flood's.

    one_stream     what an honest client does: one stream after the other, the least that any load costs
    choices        unstreamed answers of 128 choices, one after the other
    logprobs       unstreamed answers of 16 clients, with 20 log-probabilities of each token
    batch_answer   a batch whose lines have such answers
    forms          16 uploads of forms without end and without content
    near           8 uploads of files whose lines are boundaries but for their last byte
    heads          16 clients that ask for the head of a file of 100 MB
    pages          3,000 connections that ask for /docs, without a key, and read nothing
    unread         40 clients that never read their streams of 4 choices
    schemas        16 clients, each chat with a schema that is new and takes long to try
    texts          64 clients that have 24 kB tokenised
    chats          64 clients that chat, 200 tokens each
    aborts         the same, who leave after a tenth of a second
    documents      64 clients with documents of 600 tokens
    long_prompts   64 clients with new prompts of some 1,500 tokens
    sessions       64 clients with conversations of 6 turns

The last five and `one_stream` are workloads, which the client of `alignedserve bench` plays. Beside each flood it asks,
as another client, for a chat of 8 tokens every quarter of a second. A row is the 95th percentile of the time to the
first token, against that of the same chats alone, and beside processes that compute; how many of them were not
served; the tokens that all get in a second, against those of the flood alone; the share of the flood's work that is
conserved, in which a token counts as the workers' time that it takes alone; the memory that the parts took, and how
many parts ended. Times need quiet cores.

Last `launcher`: the launcher is killed with -9, and the next one started at once (baseline: its first start).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from socket import socket
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlparse

import httpx
import uvloop

from alignedserve.architectures.model_source import DEMO_FOLDER
from alignedserve.core import Role
from alignedserve.gateway.access.keys import EVERY_SCOPE, Limits, make_key
from alignedserve.gateway.http.bodies import BODIES_AT_ONCE
from alignedserve.http_client import RemoteServer
from alignedserve.lab.bench.wording import WordWording
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.lab.benchmarks.common.serving import (
    NAME,
    ask,
    beside,
    memory_mb,
    parts_under,
    played,
    player_of,
    serve,
)
from alignedserve.lab.benchmarks.gateway import CLOCK, ENDED_EARLY, MODEL, GatewayAlone, ask_whole, connections_to, ours
from alignedserve.lab.loads.figures.request_figures import finished, ttft_s
from alignedserve.lab.loads.records.distribution import percentile
from alignedserve.lab.loads.records.records import RunRecord

R = TypeVar("R")
SIZE = 4 << 20  # the usual limit of a body
WARM_S, ALONE_S = 3.0, 10.0
SILENCE_S = 30.0  # after which a chat counts as not served: one that starves would keep the run for minutes
READERS, UPLOADS, PAGES = 40, 16, 3_000
CLIENTS = 64  # of floods of chats: as many as a worker has seats
MOST_TIMES = 1.25  # the first token of a chat alone
CONSERVED = 0.98  # of a flood's work, where another client chats too
BODIES, LAUNCHER = "bodies", "launcher"
PATH = "/v1/chat/completions"
_HEAD = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hi"}}], '
_PROMPT = f'{{"model": "{MODEL}", "prompt": '


def filled(before: str, unit: str, after: str) -> bytes:
    return (before + unit * ((SIZE - len(before) - len(after)) // len(unit)) + after).encode()


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Yield the kind, the route and the body of each hostile request."""
    chat, completions = "/v1/chat/completions", "/v1/completions"
    part, names = '{"type": "text", "text": ""}', ", ".join(f'"{number}": 1' for number in range(300_000))
    yield "token ids", completions, filled(_PROMPT + "[1", ",1", "]}")
    yield "prompts", completions, filled(_PROMPT + "[[1]", ",[1]", "]}")
    yield "a text", completions, filled(_PROMPT + '"', "word ", '"}')
    yield "escapes", completions, filled(_PROMPT + '"', "\\u0000", '"}')
    begun = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": [{part}'
    yield "parts of a message", chat, filled(begun, f",{part}", "]}]}")
    yield "messages", chat, filled(f'{{"model": "{MODEL}", "messages": [{{}}', ",{}", "]}")
    yield "nested lists", chat, filled(_HEAD + '"odd": [1', "," + "[" * 190 + "]" * 190, "]}")
    yield "names", chat, f"{_HEAD}{names}}}".encode()
    yield "digits", chat, filled(_HEAD + '"max_tokens": 1', "0", "}")
    yield "a schema", chat, filled(_HEAD + '"guided_json": {"enum": [1', ', {"a": []}', "]}}")


async def send(server: GatewayAlone, route: str, body: bytes, times: int = 1) -> None:
    """Send a body as often at once; the server refuses it, perhaps before it has read it."""
    with closing(connections_to(server)) as to_server:
        names = map(str, range(times))
        for answer in await asyncio.gather(*(to_server.ask(name, route.removeprefix("/v1"), body) for name in names)):
            refusal = answer.failure
            assert refusal is not None, answer
            assert refusal.kind != ENDED_EARLY, "it was answered"
            is_lost = refusal.status is None and times > 1  # beside others a refusal may be lost with its connection
            assert is_lost or refusal.status == 503 or (refusal.status or 0) // 100 == 4, refusal


def loop_s(server: GatewayAlone) -> float:
    """Return the processor time of the event loop's thread, the first thread of the process."""
    return int(Path(f"/proc/{server.pid}/task/{server.pid}/schedstat").read_text().split()[0]) / 1e9


def chat(content: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": content}], "ignore_eos": True, **fields}


def large(max_tokens: int) -> dict[str, Any]:
    return chat(n=128, max_tokens=max_tokens, logprobs=True, top_logprobs=20)


async def choices(http: httpx.AsyncClient) -> None:
    while True:
        await http.post(PATH, json=chat(n=128, max_tokens=200))


async def logprobs(http: httpx.AsyncClient) -> None:
    await again(UPLOADS, lambda _: http.post(PATH, json=chat(max_tokens=200, logprobs=True, top_logprobs=20)))


async def batch_answer(http: httpx.AsyncClient) -> None:
    lines = [{"custom_id": str(at), "method": "POST", "url": PATH, "body": large(200)} for at in range(100)]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = (await http.post("/v1/files", files={"file": ("x", data)}, data={"purpose": "batch"})).json()
    asked = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
    (await http.post("/v1/batches", json=asked)).raise_for_status()
    await asyncio.Event().wait()


async def forms(http: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"--b\r\n\r\n\r\n" * 4096

    form = {"Content-Type": "multipart/form-data; boundary=b"}
    await again(UPLOADS, lambda _: http.post("/v1/files", content=endless(), headers=form))


async def near(http: httpx.AsyncClient) -> None:
    async def file(boundary: str, line: bytes) -> AsyncIterator[bytes]:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{{}}"\r\n\r\n'
        yield f"{head.format('purpose')}batch\r\n{head.format('file')}".encode()
        for _ in range(16):
            yield line * (131_072 // len(line))

    def upload(number: int) -> Awaitable[object]:
        boundary = "b" * 60 if number % 2 else "b"
        line = f"\r\n--{boundary[1:] or boundary}c".encode()
        form = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        return http.post("/v1/files", content=file(boundary, line), headers=form)

    await again(8, upload)


async def heads(http: httpx.AsyncClient) -> None:
    upload = {"files": {"file": ("x", bytes(100_000_000))}, "data": {"purpose": "batch"}}
    file = (await http.post("/v1/files", **upload)).raise_for_status().json()
    await again(UPLOADS, lambda _: http.head(f"/v1/files/{file['id']}/content"))


async def pages(http: httpx.AsyncClient) -> None:
    address = urlparse(str(http.base_url))

    async def look(_: int) -> None:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1)
            writer.write(f"GET /docs HTTP/1.1\r\nHost: {address.hostname}\r\n\r\n".encode())
            while await reader.read(1):  # of the page, of which no more is read: until the server gives it up
                await asyncio.sleep(20.0)

    await again(PAGES, look)


async def schemas(http: httpx.AsyncClient) -> None:
    def ask(number: int) -> Awaitable[object]:
        schema = {"type": "integer", "multipleOf": 100_003 + 2 * number}
        return http.post(PATH, json=chat(max_tokens=8, guided_json=schema))

    await again(UPLOADS, ask)


async def texts(http: httpx.AsyncClient) -> None:
    data = json.dumps({"model": NAME, "prompt": "word " * 4_800}).encode()
    await again(64, lambda _: http.post("/tokenize", content=data, headers={"Content-Type": "application/json"}))


async def again(clients: int, ask: Callable[[int], Awaitable[object]]) -> None:
    """Have `clients` clients ask without end; each ask gets its own number."""
    numbers = itertools.count()

    async def ask_on() -> None:
        while True:
            with suppress(httpx.TransportError):
                await ask(next(numbers))

    await asyncio.gather(*(ask_on() for _ in range(clients)))


async def unread(http: httpx.AsyncClient) -> None:
    address, body = urlparse(str(http.base_url)), json.dumps(chat(n=4, max_tokens=600, stream=True)).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: {address.hostname}\r\nAuthorization: {http.headers['authorization']}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connections = [await asyncio.open_connection(address.hostname, address.port, limit=1) for _ in range(READERS)]
    for _, writer in connections:
        writer.write(head.encode() + body)
    await asyncio.Event().wait()


FLOODS: dict[str, Callable[[httpx.AsyncClient], Awaitable[None]]] = {
    flood.__name__: flood
    for flood in (choices, logprobs, batch_answer, forms, near, heads, pages, unread, schemas, texts)
}
_CLOSED = f"arrivals=closed,replace=true,first_s=1e6,in_flight={CLIENTS}"
LOADS = {  # floods of what honest clients ask, as workloads; a word is about two tokens
    "one_stream": "sizes:prompt=1,output=200,arrivals=closed,replace=true,first_s=1e6,in_flight=1",
    "chats": f"sizes:prompt=1,output=200,{_CLOSED}",
    "aborts": f"sizes:prompt=1,output=200,leaving_share=1,patience_s=0.1,{_CLOSED}",
    "documents": f"sizes:service=be,prompt=300,output=100,{_CLOSED}",
    "long_prompts": f"sizes:prompt=700,output=2,{_CLOSED}",
    "sessions": f"sizes:prompt=8,output=60,turns=6,think_s=0.001,{_CLOSED}",
}
CHATS = "sizes:prompt=1,output=8,rate=4,cv=0,num_requests=60"  # of the other client


def client(url: str, key: str) -> httpx.AsyncClient:
    return RemoteServer(url, key, silence_s=600.0).in_event_loop(
        base_url=url, limits=httpx.Limits(max_connections=None)
    )


def run_idle() -> None:
    """Let this process run where nothing else wants a processor."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def compute() -> None:
    run_idle()
    while True:
        pass


def run_flood(name: str, url: str, key: str) -> None:
    run_idle()

    async def run() -> None:
        if name in LOADS:
            await player_of(url, LOADS[name], WordWording(Random()), api_key=key)[0].play()
        async with client(url, key) as http:
            await FLOODS[name](http)

    asyncio.run(run())


@contextmanager
def flooding(name: str, url: str, key: str) -> Iterator[None]:
    with beside(run_flood, name, url, key) as processes:
        time.sleep(WARM_S)
        yield
        assert processes[0].is_alive(), f"the flood {name} ended"


class ServedWork(NamedTuple):
    """What a deployment has given up to a moment, or meanwhile."""

    seconds: float
    tokens: float  # of all outputs
    device_s: Mapping[str, float]  # of workers' time, by key

    def since(self, before: ServedWork) -> ServedWork:
        device_s = {key: seconds - before.device_s.get(key, 0.0) for key, seconds in self.device_s.items()}
        return ServedWork(self.seconds - before.seconds, self.tokens - before.tokens, device_s)

    def token_s(self, key: str) -> float:
        """Return the time of workers that a token costs, where all tokens are of this key."""
        return self.device_s.get(key, 0.0) / max(1.0, self.tokens)


def told(metrics: str, at: float) -> ServedWork:
    """Return what a page of metrics tells at a moment."""
    tokens = re.findall(r"^\S*:generation_tokens_total\{\S+ (\S+)$", metrics, re.MULTILINE)
    by_key = re.findall(r'^\S*:request_device_seconds_total\{\S*key="(\w+)"\S* (\S+)$', metrics, re.MULTILINE)
    device_s = defaultdict[str, float](float)
    for key, seconds in by_key:
        device_s[key] += float(seconds)
    return ServedWork(at, sum(map(float, tokens)), device_s)


def served(url: str, key: str) -> ServedWork:
    with RemoteServer(url, key) as server:
        return told(server.whole("GET", "/metrics").text, time.perf_counter())


def conserved(flood: ServedWork, both: ServedWork, chat_tokens: int, chat_token_s: float) -> float:
    """Return the work that both get in a second as a share of the flood's alone: tokens, by what they cost alone.

    `chat_tokens` of both are the chats', which cost `chat_token_s` alone. For example, a stream alone gets 1,000 tokens
    in a second, of 1 ms each; beside it chats get 30 tokens of 4 ms, and the stream 880: 0.12 s and 0.88 s of work in a
    second, as much as alone."""
    token_s = flood.token_s("flood")
    work_s = (both.tokens - chat_tokens) * token_s + chat_tokens * chat_token_s
    return work_s / both.seconds / (flood.tokens * token_s / flood.seconds)


def p95_ms(chats: RunRecord) -> float:
    """Return the 95th percentile of the time to the first token of chats that were served."""
    return 1e3 * percentile(map(ttft_s, finished(chats.requests)), 95)


def measure_flood(name: str, model: str) -> None:
    def chats() -> RunRecord:
        return played(deployment.url, CHATS, WordWording(Random()), api_key=keys["chats"], silence_s=SILENCE_S)

    def given(meanwhile: Callable[[], R]) -> tuple[ServedWork, R]:
        """Return what the deployment gives meanwhile."""
        before = served(deployment.url, keys["chats"])
        done = meanwhile()
        return served(deployment.url, keys["chats"]).since(before), done

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "keys.yaml")
        keys = {key: make_key(file, key, EVERY_SCOPE, Limits()) for key in ("flood", "chats")}
        with serve(model, "--keys-file", str(file), "--jobs-directory", folder) as deployment:
            chats()
            (to_chats, alone), before = given(chats), parts_under(deployment.pid)
            before_mb = sum(memory_mb(part, "VmHWM") for part in before)
            with beside(compute, times=os.cpu_count() or 1):
                busy_ms = p95_ms(chats())
            with flooding(name, deployment.url, keys["flood"]):
                to_flood, _ = given(lambda: time.sleep(ALONE_S))
                both, beside_flood = given(chats)
            ended = before.keys() - parts_under(deployment.pid).keys()
            more_mb = sum(memory_mb(part, "VmHWM") for part in before.keys() - ended) - before_mb
    alone_ms, beside_ms = p95_ms(alone), p95_ms(beside_flood)
    report(f"beside {name}, first token, p95", beside_ms, "ms", baseline=alone_ms, goal=MOST_TIMES * alone_ms)
    report(f"beside {name}, times that beside work", beside_ms, "ms", baseline=busy_ms, goal=MOST_TIMES * busy_ms)
    num_lost = len(beside_flood.requests) - len(finished(beside_flood.requests))
    report(f"beside {name}, chats not served", num_lost, "", goal=0.0)
    if to_flood.tokens > to_flood.seconds:  # else nothing of the flood is answered
        alone_s, both_s = to_flood.tokens / to_flood.seconds, both.tokens / both.seconds
        report(f"beside {name}, of all", both_s, "tokens/s", baseline=alone_s)
        chat_tokens = sum(len(chat.token_at) for chat in beside_flood.requests)
        share = conserved(to_flood, both, chat_tokens, to_chats.token_s("chats"))
        report(f"beside {name}, work conserved", share, "", goal=CONSERVED, at_least=True)
    report(f"beside {name}, peak memory of all parts, more", more_mb, "MB")
    report(f"beside {name}, parts that ended", len(ended), "", goal=0.0)


def measure_bodies() -> None:
    with tempfile.NamedTemporaryFile() as file:
        os.ftruncate(file.fileno(), CLOCK.size)
        most_s = most_mb = 0.0
        for kind, route, body in bodies():
            with ours(0.001, Path(file.name)) as server:
                uvloop.run(ask_whole(server, 1, 1))
                before_s, before_mb = loop_s(server), server.memory_mb
                uvloop.run(send(server, route, body))
                took_s = loop_s(server) - before_s

                uvloop.run(send(server, route, body, BODIES_AT_ONCE))
                uvloop.run(ask_whole(server, 1, 1))
                more_mb = memory_mb(server.pid, "VmHWM") - before_mb
                report(f"gateway, {kind}, {SIZE >> 20} MB, the event loop's time", took_s * 1e3, "ms")
                report(f"gateway, {kind}, {BODIES_AT_ONCE} at once, memory", more_mb, "MB")
                most_s, most_mb = max(most_s, took_s), max(most_mb, more_mb)
        report("gateway, the most of all kinds, the event loop's time", most_s * 1e3, "ms")
        report("gateway, the most of all kinds, memory", most_mb, "MB")


def measure_launcher(model: str) -> None:
    """Kill the launcher, and start the next one at once, which goes on with the parts."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        flags = ("--port", str(probe.getsockname()[1]), "--pool-memory-mb", "256", "--topology", "1+1")
    flags += ("--profile-s", "0", "--set", "engine.tune_s=0")  # what no later start repeats
    with serve(model, *flags) as first:
        parts = {pid: name for pid, name in parts_under(first.pid).items() if name.partition("-")[0] in set(Role)}
        os.kill(first.pid, signal.SIGKILL)
        killed_at = time.perf_counter()
        with serve(model, *flags) as second:
            greeted_s = time.perf_counter() - killed_at
            answer = asyncio.run(ask(second.url, [5, 6, 7], 4))
            lost = {pid for pid in parts if not Path(f"/proc/{pid}").exists()}
            new = [name for name in parts_under(second.pid).values() if name in parts.values()]
    name = "the launcher, killed"
    report(f"{name}: load average of the {os.cpu_count()} processors", os.getloadavg()[0], "")
    report(f"{name}: until the next one greets", greeted_s, "s", baseline=first.ready_s)
    first_token_s = answer.read.token_at[0] - killed_at if answer.is_whole else math.inf
    report(f"{name}: until the first token of a new request", first_token_s, "s", goal=15)
    report(f"{name}: of {len(parts)} parts, those that are other processes", len(lost) + len(new), "", goal=0)


def main() -> int:
    parser, all_ = command(__doc__), [BODIES, *FLOODS, *LOADS, LAUNCHER]
    parser.add_argument("--only", type=several(str, all_), default=all_, help="what to measure")
    parser.add_argument("--model", default=str(DEMO_FOLDER), help="folder of the model")
    args = parser.parse_args()
    for name in args.only:
        if name == BODIES:
            measure_bodies()
        elif name == LAUNCHER:
            measure_launcher(args.model)
        else:
            measure_flood(name, args.model)
    return status()


if __name__ == "__main__":
    raise SystemExit(main())
