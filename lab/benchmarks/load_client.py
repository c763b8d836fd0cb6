"""Measure what the client of `alignedserve bench` costs, how late it reads, and whether another client says the same.

    python -m lab.benchmarks.load_client [--streams 50] [--tokens-s 1000] [--seconds 10]    # half a minute
    python -m lab.benchmarks.load_client --peer-python PATH [--rounds 3] # against vLLM's client; PATH has its CPU build

A server in another process streams tokens on a steady beat, in pieces as AlignedServe and vLLM send them; the text of a
piece is the time at which it was written. The cost is the processor time of the client's process.

Against another client the server is our gateway, whose engine is fake: each open request gets a token on every beat, so
that what the server gives is the same for both. They ask in turns, at random times, as many requests of equal lengths.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import msgspec
import uvloop

from alignedserve.bench.answer import Answer
from alignedserve.bench.connections import Address, Connections
from alignedserve.bench.core import Dialect, LoadTest, Progress
from alignedserve.bench.player import Player
from alignedserve.bench.wording import IdWording
from alignedserve.lab.benchmarks.common.report import command, report, status
from alignedserve.lab.benchmarks.gateway import ours
from alignedserve.lab.benchmarks.peers import vllm_client
from alignedserve.loads.records.distribution import percentile
from alignedserve.loads.workload import Load
from alignedserve.loads.workload.spec import read_workload

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MOST_SHARE = 10.0  # percent of a core, at a thousand tokens a second
BEAT_S, RATE, REQUESTS, LENGTHS = 0.04, 30.0, 900, (64, 16)  # against another client
MOST_APART = 3.0  # percent


# --- The server


def _serve(listening: socket.socket, beat_s: float) -> None:
    uvloop.run(_accept(listening, beat_s))


async def _accept(listening: socket.socket, beat_s: float) -> None:
    server = await asyncio.start_server(lambda reader, writer: _streams(reader, writer, beat_s), sock=listening)
    await server.serve_forever()


async def _streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, beat_s: float) -> None:
    """Answer one request after the other, until the client closes the connection."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")).split()[1])
            await _stream(writer, json.loads(await reader.readexactly(length))["max_tokens"], beat_s)


async def _stream(writer: asyncio.StreamWriter, count: int, beat_s: float) -> None:
    writer.write(HEAD)
    at = perf_counter()
    for number in range(count):
        at += beat_s
        await asyncio.sleep(max(0.0, at - perf_counter()))
        _write(writer, _piece(number, count))
    _write(writer, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": count}})
    writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def _piece(number: int, count: int) -> dict[str, Any]:
    finish = "length" if number == count - 1 else None
    choice = {"index": 0, "text": f"{perf_counter()} ", "logprobs": None, "finish_reason": finish}
    named = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1_790_000_000}
    return {**named, "model": "measured", "choices": [choice | {"token_ids": [number], "stop_reason": None}]}


def _write(writer: asyncio.StreamWriter, piece: dict[str, Any]) -> None:
    data = b"data: %b\n\n" % json.dumps(piece).encode()
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


@contextmanager
def served(beat_s: float) -> Iterator[Address]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        process = get_context("fork").Process(target=_serve, args=(listening, beat_s), daemon=True)
        process.start()
        yield Address("127.0.0.1", listening.getsockname()[1], "/v1", False)
        process.terminate()
        process.join()


# --- The client


async def ask_all(address: Address, streams: int, num_tokens: int) -> list[Answer]:
    connections = Connections(address, perf_counter, 10.0)
    body = msgspec.json.encode({"max_tokens": num_tokens})
    asked = [connections.ask(str(number), "/completions", body) for number in range(streams)]
    answers = await asyncio.gather(*asked)
    connections.close()
    return answers


def lags_s(answer: Answer) -> list[float]:
    """Return how much later than written each token was read."""
    written = map(float, answer.text.split())
    return [read - at for read, at in zip(answer.token_at, written, strict=True)]


async def play(address: Address, streams: int, num_tokens: int) -> float:
    """Play a load as the command does, and return the share of a core that this process took."""
    workload = f"sizes:prompt=200,output={num_tokens},arrivals=closed,in_flight={streams},num_requests={streams}"
    load = Load(read_workload(workload), ["bench"], 0)
    test = LoadTest(load, IdWording(Random(0)), Dialect("measured"))
    lines = list[Progress]()
    player = Player(test, address, 60.0, lambda progress, _tokens, _now: lines.append(progress))
    began, before = perf_counter(), process_time()
    await player.play()
    return 100 * (process_time() - before) / (perf_counter() - began)


# --- Another client


def compare(python: str, rounds: int) -> None:
    """Report the means of our command over those of the peer's."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in _COMPARED}
    with TemporaryDirectory() as name:
        noted, out = Path(name) / "noted", Path(name)
        noted.write_bytes(b"\0" * 4096)
        with ours(BEAT_S, noted) as server:
            url = f"http://127.0.0.1:{server.port}"
            for seed in range(rounds):
                mine = _measured(url, seed, out / "ours.json")
                peer = vllm_client.measured(python, url, RATE, REQUESTS, LENGTHS, seed, out)
                for figure, (path, key, factor) in _COMPARED.items():
                    found[figure][0].append(factor * mine[path])
                    found[figure][1].append(peer[key])
    for figure, (values, peers) in found.items():
        report(f"{figure}, mean of {rounds} rounds, against vLLM's client", fmean(values), "ms", baseline=fmean(peers))
        report(f"{figure}: apart", 100 * abs(fmean(values) / fmean(peers) - 1), "%", goal=MOST_APART)


_COMPARED = {  # figure -> where our JSON has it, where the peer's has it, our unit
    "TTFT": ("ttft_s.mean", "mean_ttft_ms", 1e3),
    "TPOT": ("tpot_s.mean", "mean_tpot_ms", 1e3),
    "end to end": ("end_to_end_s.mean", "mean_e2el_ms", 1e3),
}


def _measured(url: str, seed: int, out: Path) -> dict[str, float]:
    prompt, output = LENGTHS
    workload = f"sizes:prompt={prompt},output={output},rate={RATE:g},num_requests={REQUESTS}"
    line = [sys.executable, "-m", "alignedserve", "bench", "--url", url, "--workload", workload, "--seed", str(seed)]
    subprocess.run([*line, "--json", str(out)], check=True, stdout=subprocess.DEVNULL)
    (run,) = json.loads(out.read_text(encoding="utf-8"))["runs"]
    figures: dict[str, float] = run["classes"]["rt"]
    return figures


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--peer-python", metavar="PATH", help="a Python that has vLLM")
    parser.add_argument("--rounds", type=int, default=3, help="with --peer-python: of each client, in turns")
    parser.add_argument("--streams", type=int, default=50, help="at once")
    parser.add_argument("--tokens-s", type=float, default=1000.0, help="of all streams together")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each of two runs")
    args = parser.parse_args()
    if args.peer_python is not None:
        compare(args.peer_python, args.rounds)
        raise SystemExit(status())
    num_tokens, beat_s = round(args.seconds * args.tokens_s / args.streams), args.streams / args.tokens_s
    with served(beat_s) as address:
        share = uvloop.run(play(address, args.streams, num_tokens))
        answers = uvloop.run(ask_all(address, args.streams, num_tokens))
    lags = [lag for answer in answers for lag in lags_s(answer)]
    report(f"client at {args.tokens_s:g} tokens/s", share, "% of a core", goal=MOST_SHARE * args.tokens_s / 1000)
    report("client: per token", 1e4 * share / args.tokens_s, "us")
    for percent in (50, 95, 99):
        report(f"client: read after it was written, p{percent}", 1e3 * percentile(lags, percent), "ms")
    raise SystemExit(status())


if __name__ == "__main__":
    main()
