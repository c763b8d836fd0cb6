"""Conversations of several turns with a 1+1 deployment of the demo model, with and without reuse of prompts.

    python -m benchmarks.conversations [--conversations 12] [--turns 4] [--full]

Two deployments stand side by side, alike but for `schedule.reuse`. They are asked in turns: some conversations with
the one, the same ones with the other. A conversation begins with one of a few system prompts; the prompt of each turn
is all that was said before, and a new question. Lengths are forced, texts are random tokens; a few go on at once.

The default takes about a minute on two cores that have nothing else to do, several times that where they have.
TTFT is measured where the client reads. The share of prompt tokens is what the answers' usage says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from statistics import mean, median, quantiles
from time import perf_counter

import httpx

from benchmarks.report import report

_MODEL, _PATIENCE_S = "demo", 300.0
_MOST = 2_000  # tokens of prompt and answer: the model has 2,048 positions
_SYSTEMS, _SYSTEM = 4, 600  # system prompts, and tokens of each
_QUESTION, _ANSWER = (40, 160), (24, 72)
_AT_ONCE = 3
_ROUND = 6  # conversations with one deployment before it is the other's turn


@dataclass(frozen=True)
class Turn:
    number: int  # in its conversation
    num_prompt: int
    num_cached: int
    ttft_s: float


class Conversation:
    def __init__(self, number: int, turns: int) -> None:
        self._draw = Random(f"conversation {number}")
        self._turns = turns
        self._said = _words(Random(f"system {self._draw.randrange(_SYSTEMS)}"), _SYSTEM)

    async def hold(self, client: httpx.AsyncClient) -> list[Turn]:
        done: list[Turn] = []
        for number in range(self._turns):
            self._said += _words(self._draw, self._draw.randint(*_QUESTION))
            most = self._draw.randint(*_ANSWER)
            if len(self._said) + most > _MOST:
                break
            turn, answer = await _asked(client, number, self._said, most)
            self._said += answer
            done.append(turn)
        return done


def _words(draw: Random, count: int) -> list[int]:
    return [draw.randrange(10, 2_000) for _ in range(count)]


async def _asked(client: httpx.AsyncClient, number: int, prompt: list[int], most: int) -> tuple[Turn, list[int]]:
    body = {
        "model": _MODEL,
        "prompt": prompt,
        "max_tokens": most,
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked, first, answer, cached = perf_counter(), 0.0, list[int](), 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                first = first or perf_counter()
                answer += [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
                cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"] if chunk["usage"] else cached
    assert len(answer) == most, f"{len(answer)} tokens of {most}"
    return Turn(number, len(prompt), cached, first - asked), answer


async def _held(url: str, numbers: Sequence[int], turns: int) -> list[Turn]:
    places = asyncio.Semaphore(_AT_ONCE)

    async def hold(number: int) -> list[Turn]:
        async with places:
            return await Conversation(number, turns).hold(client)

    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S) as client:
        return [turn for held in await asyncio.gather(*map(hold, numbers)) for turn in held]


@contextmanager
def served(*, reuse: bool) -> Iterator[str]:
    command = [sys.executable, "-m", "alignedserve", "serve", _MODEL, "--port", "0", "--served-model-name", _MODEL]
    command += ["--topology", "1+1", "--schedule-reuse" if reuse else "--no-schedule-reuse", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield next(found[0] for line in server.stdout if (found := re.findall(r"http://[\d.]+:\d+", line)))
        finally:
            server.send_signal(signal.SIGINT)


def held(conversations: int, turns: int) -> dict[bool, list[Turn]]:
    """With reuse, and without."""
    done: dict[bool, list[Turn]] = {True: [], False: []}
    with ExitStack() as servers:
        urls = {reuse: servers.enter_context(served(reuse=reuse)) for reuse in done}
        for url in urls.values():
            asyncio.run(_held(url, [-1], 1))  # what a first request warms up
        for start in range(0, conversations, _ROUND):
            numbers = range(start, min(start + _ROUND, conversations))
            for reuse in (True, False) if start // _ROUND % 2 == 0 else (False, True):
                done[reuse] += asyncio.run(_held(urls[reuse], numbers, turns))
    return done


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=4, help="of each, at most (default: %(default)s)")
    parser.add_argument("--full", action="store_true", help="two hundred conversations of up to eight turns")
    args = parser.parse_args()
    conversations, turns = (200, 8) if args.full else (args.conversations, args.turns)
    done = held(conversations, turns)
    on, off = done[True], done[False]
    assert not any(turn.num_cached for turn in off), "something was reused without reuse"
    report("conversations", conversations, "1")
    report("turns", len(on), "1", baseline=len(off))
    report("mean prompt", mean(turn.num_prompt for turn in on), "tokens")
    share = sum(turn.num_cached for turn in on) / sum(turn.num_prompt for turn in on)
    report("prompt tokens served from the pool", 100 * share, "%")
    later = [turn for turn in on if turn.number]
    share = sum(turn.num_cached for turn in later) / sum(turn.num_prompt for turn in later)
    report("prompt tokens served from the pool, after first turns", 100 * share, "%")
    figures: dict[str, Callable[[list[float]], float]] = {"mean": mean, "p50": median, "p99": _p99}
    for name, figure in figures.items():
        with_reuse, without = (figure([turn.ttft_s for turn in turns]) for turns in (on, off))
        report(f"{name} TTFT, against no reuse", 1e3 * with_reuse, "ms", baseline=1e3 * without)


if __name__ == "__main__":
    main()
