"""Measure what happens when N people ask one server at once, each by the openai client with its defaults (two retries).

    python -m lab.benchmarks.crowd --model FILE.gguf --llama-cpp FOLDER                     # 12 and 40 people, in turns
    python -m lab.benchmarks.crowd --model FILE.gguf --people 12 --documents 4 [-- SERVE FLAGS]
    python -m lab.benchmarks.crowd --model FILE.gguf --llama-cpp FOLDER --people 1 --tokens 20 --busy 2 --rounds 5
    python -m lab.benchmarks.crowd --url http://127.0.0.1:8000 --people 12                  # any server that runs

Each asks one question of some 500 words, which begins like no other, and hears an answer of exactly `--tokens` tokens,
streamed. Nobody asks for a promise. A person is answered who has all of these tokens. With `--llama-cpp`, a folder that
has `llama-server`, llama.cpp with `--slots` slots is asked the same, in turns. Of several `--rounds` it is the median.
`--documents` are always in flight beside the people: best-effort where the server knows that. `--busy` processes of
others, which only compute, use the machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean, median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

from alignedserve.lab.bench.wording import WORDS
from alignedserve.lab.benchmarks.common.peers import LLAMA_SERVER, serve_llama_cpp
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.lab.benchmarks.common.serving import NAME, serve
from alignedserve.lab.loads.records.distribution import percentile

OURS, PEER = "ours", "llama.cpp"
FEW = 12  # people, of whom none may be told 429, not even to try again
MANY = 40  # people from whom on the goals below hold
TOTAL_SHARE, FIRST_SHARE = 0.85, 0.5  # of llama.cpp's time until all are answered, and of its mean first token
ROOM = 256  # tokens of a slot beside prompt and answer: words may be two tokens, and the template adds some
DOCUMENT = 1000, 64  # words of a document, and tokens out
SETTLES_S = 2.0  # before the people come
OPENAI = "crowd asks by the openai client, which is not installed: pip install openai"


@dataclass
class Crowd:
    """What a crowd has heard."""

    people: int
    first_s: list[float] = field(default_factory=list)  # of those who were answered
    statuses: Counter[int] = field(default_factory=Counter)  # of all attempts, those that were tried again too
    lost: Counter[str] = field(default_factory=Counter)  # why people were not answered
    total_s: float = 0.0
    documents: int = 0  # tokens of documents meanwhile

    @property
    def answered(self) -> int:
        return len(self.first_s)


def words(draw: Random, number: int) -> str:
    return " ".join(draw.choices(WORDS, k=number))


@asynccontextmanager
async def client_of(url: str, crowd: Crowd) -> AsyncIterator[Any]:
    """Yield openai's client with its own defaults, which counts what servers answer to each attempt."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    async def count(response: Any) -> None:
        crowd.statuses[response.status_code] += 1

    http = DefaultAsyncHttpxClient(event_hooks={"response": [count]}, trust_env=False)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http) as client:
        yield client


async def person(client: Any, crowd: Crowd, question: str, tokens: int) -> None:
    from openai import OpenAIError

    began, first, number = perf_counter(), None, 0
    asked = {"messages": [{"role": "user", "content": question}], "max_tokens": tokens, "temperature": 0}
    extra = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    try:
        async for chunk in await client.chat.completions.create(model=NAME, stream=True, extra_body=extra, **asked):
            if chunk.choices and first is None and chunk.choices[0].delta.content:
                first = perf_counter() - began
            number = chunk.usage.completion_tokens if chunk.usage else number
    except OpenAIError as error:
        crowd.lost[f"{type(error).__name__}: {str(error)[:200]}"] += 1
        return
    if first is None or number < tokens:
        crowd.lost[f"{number} of {tokens} tokens"] += 1
    else:
        crowd.first_s.append(first)


async def document(client: Any, crowd: Crowd, draw: Random) -> None:
    """Ask for documents, one after the other, until this is cancelled."""
    from openai import OpenAIError

    length, tokens = DOCUMENT
    extra = {"ignore_eos": True, "service_tier": "flex"}
    while True:
        asked = {"messages": [{"role": "user", "content": words(draw, length)}], "max_tokens": tokens}
        try:
            async for chunk in await client.chat.completions.create(model=NAME, stream=True, extra_body=extra, **asked):
                crowd.documents += bool(chunk.choices and chunk.choices[0].delta.content)
        except OpenAIError:
            await asyncio.sleep(1.0)


async def ask(url: str, args: argparse.Namespace, people: int, draw: Random) -> Crowd:
    crowd, beside = Crowd(people), Crowd(0)
    questions = [words(draw, args.words) for _ in range(people)]
    async with client_of(url, crowd) as client, client_of(url, beside) as other:
        papers = [asyncio.create_task(document(other, beside, draw)) for _ in range(args.documents)]
        await asyncio.sleep(SETTLES_S if papers else 0.0)
        before, began = beside.documents, perf_counter()
        await asyncio.gather(*(person(client, crowd, question, args.tokens) for question in questions))
        crowd.total_s, crowd.documents = perf_counter() - began, beside.documents - before
        for paper in papers:
            paper.cancel()
        await asyncio.gather(*papers, return_exceptions=True)
    return crowd


@contextmanager
def busy_machine(processes: int) -> Iterator[None]:
    """Let processes compute beside the servers, each in a session of its own, as other people's do."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command, start_new_session=True) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def tell(who: str, found: dict[str, list[Crowd]], has_documents: bool) -> None:
    """Report the medians of the rounds, each server's own and ours against the peer's."""
    people = next(iter(found.values()))[0].people
    for name, crowds in found.items():
        label, is_ours = f"{who}, {name}", name != PEER
        fewest, told = min(crowd.answered for crowd in crowds), max(crowd.statuses[429] for crowd in crowds)
        report(f"{label}: answered", fewest, "people", goal=people if is_ours else None, at_least=True)
        report(f"{label}: told 429", told, "times", goal=0 if is_ours and people <= FEW else None)
        for reason, times in sum((crowd.lost for crowd in crowds), Counter[str]()).items():
            print(f"{label}: {times} not answered: {reason}", file=sys.stderr)
    ours = next(iter(found))
    limits = {"all answered after": TOTAL_SHARE, "mean first token": FIRST_SHARE}
    for what, values in figures(found).items():
        baseline, unit = values.get(PEER), "tokens/s" if what == "documents" else "s"
        if what == "documents" and not has_documents:
            continue
        share = limits.get(what) if people >= MANY and baseline else None
        goal = None if share is None or baseline is None else share * baseline
        report(f"{who}, {ours}: {what}", values[ours], unit, baseline=baseline, goal=goal)


def figures(found: dict[str, list[Crowd]]) -> dict[str, dict[str, float]]:
    """Return the medians of all rounds: figure -> server -> value. A server that answered nobody has no first token."""

    def medians(of: Any) -> dict[str, float]:
        return {name: median(of(crowd) for crowd in crowds) for name, crowds in found.items()}

    return {
        "all answered after": medians(lambda crowd: crowd.total_s),
        "mean first token": medians(lambda crowd: fmean(crowd.first_s or [float("inf")])),
        "first token, p95": medians(lambda crowd: percentile(crowd.first_s or [float("inf")], 95)),
        "documents": medians(lambda crowd: crowd.documents / crowd.total_s),
    }


def measure(args: argparse.Namespace, urls: dict[str, str]) -> None:
    for url in urls.values():  # what a server does only once, it does now
        asyncio.run(ask(url, argparse.Namespace(words=20, tokens=4, documents=0), 1, Random()))
    for people in args.people:
        found: dict[str, list[Crowd]] = {name: [] for name in urls}
        for turn in range(args.rounds):
            for name in list(urls) if turn % 2 == 0 else list(urls)[::-1]:
                sleep(SETTLES_S)
                draw = Random(f"{args.seed}/{people}/{turn}")  # no crowd asks what another has asked
                found[name].append(asyncio.run(ask(urls[name], args, people, draw)))
        beside = f" beside {args.busy} busy processes" if args.busy else ""
        tell(f"{people} at once{beside}", found, args.documents > 0)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file, or a folder that only we serve")
    parser.add_argument("--url", help=f"ask this server, whose model is named {NAME}, instead of starting ours")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help=f"where {LLAMA_SERVER} is")
    parser.add_argument("--slots", type=int, default=8, help="of llama.cpp's server")
    parser.add_argument("--people", type=several(int), default=[FEW, MANY], help="numbers of people at once")
    parser.add_argument("--words", type=int, default=470, help="of a question: some 500 tokens with the template")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--documents", type=int, default=0, help="in flight beside them")
    parser.add_argument("--busy", type=int, default=0, help="processes of others that compute meanwhile")
    parser.add_argument("--rounds", type=int, default=1, help="crowds of each size on each server")
    parser.add_argument("--seed", type=int, default=0, help="of the words")
    parser.add_argument("flags", nargs="*", help="more flags for `alignedserve serve`, after --")
    args = parser.parse_args()
    if (args.model is None) == (args.url is None):
        parser.error("name either --model or --url")
    if args.llama_cpp is not None and (args.model is None or not (args.llama_cpp / LLAMA_SERVER).exists()):
        parser.error(f"--llama-cpp needs a folder that has {LLAMA_SERVER}, and --model FILE.gguf")
    try:
        import openai  # noqa: F401
    except ImportError:
        sys.exit(OPENAI)
    with ExitStack() as stack:
        urls = {OURS: args.url}
        if args.url is None:
            jobs = stack.enter_context(TemporaryDirectory())
            urls[OURS] = stack.enter_context(serve(args.model, "--jobs-directory", jobs, *args.flags)).url
        if args.llama_cpp is not None:
            context = args.words + args.tokens + ROOM + (sum(DOCUMENT) if args.documents else 0)
            urls[PEER] = stack.enter_context(serve_llama_cpp(args.llama_cpp, args.model, args.slots, context))
        stack.enter_context(busy_machine(args.busy))
        measure(args, urls)
    sys.exit(status())


if __name__ == "__main__":
    main()
