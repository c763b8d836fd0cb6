"""Clients of a deployment: they send many requests of mixed lengths at once, and check the answers."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer

from alignedserve.cli import main as cli
from tests.demo_conversations import conversations
from tests.end_to_end.deployment import ANSWER_S, MODEL, NAME
from tests.reference import Tally, compare, load

EOS = 2


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command of `alignedserve` in this process: to start Python, and import what it needs, takes a second."""
    with redirect_stdout(StringIO()) as said, redirect_stderr(StringIO()) as complained:
        code = cli.main(typed := [*map(str, arguments)])
    return subprocess.CompletedProcess(typed, code, said.getvalue(), complained.getvalue())


@dataclass(frozen=True)
class Wanted:
    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool
    ignore_eos: bool = False
    logprobs: bool = False
    tier: str = "auto"

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": NAME,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "ignore_eos": self.ignore_eos,
            "temperature": 0,
            "return_token_ids": True,
            "logprobs": 0 if self.logprobs else None,
            "service_tier": self.tier,
        }


@cache
def held_out() -> tuple[int, ...]:
    """Return tokens of conversations that the demo model was not trained on, joined together."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    said = []
    for conversation in conversations():
        said += [message["content"] for message in conversation.messages] + [conversation.answer]
    return tuple(tokenizer.encode("\n".join(said), add_special_tokens=False).ids)


Lengths = tuple[int, int]  # least, most


def mixed(count: int, seed: int, prompts: Lengths = (3, 400), outputs: Lengths = (1, 200)) -> list[Wanted]:
    """Return requests of mixed lengths: half of them streamed, half ignoring the model's own end, some scored."""
    draw = random.Random(seed)
    wanted = []
    for number in range(count):
        length = draw.randint(*prompts)
        start = draw.randrange(len(held_out()) - length)
        prompt = held_out()[start : start + length]
        kind: dict[str, Any] = {"stream": number % 2 == 0, "ignore_eos": number % 4 < 2, "logprobs": number % 3 == 0}
        wanted.append(Wanted(prompt, draw.randint(*outputs), **kind))
    return wanted


def documents(count: int, seed: int, prompts: Lengths = (60, 200), outputs: Lengths = (8, 40)) -> list[Wanted]:
    """Return requests that run to their whole length, whatever the model says, and so hold their seats for long.
    If KV may go from worker to worker, KV of these requests is offered in any case; chats use the pool where steps take
    long, as on a busy machine."""
    return [
        replace(request, tier="flex", ignore_eos=True)
        for request in mixed(count, seed, prompts=prompts, outputs=outputs)
    ]


def client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits, trust_env=False)


async def tokens_of(http: httpx.AsyncClient, wanted: Wanted) -> list[int]:
    """Return all output tokens of a request that must succeed; check that each has a log-probability if that was
    requested."""
    if wanted.stream:
        async with aclosing(streamed(http, wanted.body)) as chunks:
            choices = [chunk["choices"][0] async for chunk in chunks]
    else:
        answer = await http.post("/v1/completions", json=wanted.body)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    logprobs = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
    assert len(logprobs) == (len(tokens) if wanted.logprobs else 0)
    return tokens


async def streamed(
    http: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/completions"
) -> AsyncGenerator[Any, None]:
    """Yield the chunks of a stream that must begin with a 200 and end with [DONE], without an error between."""
    async with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        last = ""
        async for line in answer.aiter_lines():
            last = line or last
            if line and line != "data: [DONE]" and not line.startswith(":"):  # a place in line
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                yield chunk
    assert last == "data: [DONE]", f"the stream broke after {last!r}"


async def all_tokens(url: str, wanted: Sequence[Wanted]) -> list[list[int]]:
    """Send all requests at once, and return the tokens of each."""
    async with client(url) as http:
        return await asyncio.gather(*(tokens_of(http, request) for request in wanted))


@cache
def reference() -> Any:
    """Return the demo model in transformers."""
    return load(MODEL)


def is_greedy(wanted: Wanted, output: Sequence[int]) -> bool:
    """Whether transformers gives this output."""
    with suppress(AssertionError):
        compare(reference(), wanted.prompt, output, Tally())
        return True
    return False


@cache
def _compared(prompt: tuple[int, ...], output: tuple[int, ...]) -> Tally:
    """Compare an output with transformers', once: other kinds of deployments, and kills, mostly give the same again."""
    tally = Tally()
    compare(reference(), prompt, output, tally)
    return tally


def check_greedy(wanted: Sequence[Wanted], outputs: Sequence[Sequence[int]]) -> Tally:
    """Check that every output is that of transformers, and ends where it should."""
    tally = Tally()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # in so small a model, beside other work, threads would mostly wait for each other
    for request, output in zip(wanted, outputs, strict=True):
        found = _compared(request.prompt, tuple(output))
        tally.compared += found.compared
        tally.excused += found.excused
        ends = [index for index, token in enumerate(output) if token == EOS and not request.ignore_eos]
        assert ends == [len(output) - 1] or (not ends and len(output) == request.max_tokens), (request, output)
    torch.set_num_threads(threads)
    tally.check()
    return tally
