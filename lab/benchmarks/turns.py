"""Measure what KV that is kept, shared and found again gains: turns of chats, prompts that begin alike, short memory.

    python -m lab.benchmarks.turns [--parts turns,system] [--rounds 1] [--model FOLDER] [--peer URL] [-- SERVE FLAGS]
    python -m lab.benchmarks.turns --url http://127.0.0.1:8000 [--peer URL]
    python -m lab.benchmarks.turns --backend simulated    # the part memory

Three parts ask any server with OpenAI's API: ours and, with `--peer`, another server in turns, whose figures are the
baselines. Lengths are fixed and tokens are new in each round and run, so that no server has seen them before.

    turns     4 chats of 8 turns and 16 chats of 4, with 192 new tokens and 48 out a turn and a second to think: TTFT of
              each turn, median over chats
    system    32 short questions at once under a new system prompt of 1,024 tokens, then 32 more under the same:
              output tokens per second
    siblings  n = 8 against n = 1 on a new prompt of 1,024 tokens: time until every choice has a token

The other parts start deployments of their own, and compare ours with ours:

    nothing   16 prompts at once that begin like no other: time with the prefix cache, and without it
    memory    chats beside best-effort requests of long outputs, with memory for half of their tokens: against workers
              that drop the KV of requests that leave and reuse none, as all colocated workers of commit dda63cc do. A
              simulation also counts the tokens that were computed again

A round of a part takes about a minute on two quiet cores, of `memory` three; more rounds make its runs longer. Ours
refuses no request but in `memory`: a server for `--url` needs `--schedule-refuse-ttfts 0`. The peer is vLLM's server,
with its prefix cache, on the same random model, which `python -m lab.benchmarks.common.models llama160m FOLDER` writes:

    VLLM_CPU_KVCACHE_SPACE=4 VLLM_CPU_OMP_THREADS_BIND=0-1 python -m vllm.entrypoints.openai.api_server --model FOLDER
        --served-model-name measured --host 127.0.0.1 --port 8100 --dtype bfloat16 --max-num-seqs 64
        --enable-prompt-tokens-details
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any, Generic, TypeVar

from alignedserve.lab.benchmarks.common.chats import DEFAULT, ChatClient, ChatLoad, ChatRun, Simulated
from alignedserve.lab.benchmarks.common.machines import MACHINES, save_profile
from alignedserve.lab.benchmarks.common.models import VOCAB, llama160m
from alignedserve.lab.benchmarks.common.report import command, report, several, status
from alignedserve.lab.benchmarks.common.serving import Answer, ask, serve

T = TypeVar("T")

CHATS = ((4, 8), (16, 4))  # chats, and turns of each
NEW, OUT, THINKS_S = 192, 48, 1.0  # tokens of a turn; seconds from an answer to the next question
SETTLES_S = 2.0  # before each load: vLLM's worker spins on a core for a second after its last request, beside ours
SYSTEM, QUESTIONS, QUESTION = 1024, 32, 32
SIBLINGS = 8
UNKNOWN, UNKNOWN_OUT = range(256, 512, 16), 32  # lengths of prompts that begin like no other; tokens out of each
LONG = ChatLoad(rate=2.0, seconds=30.0, documents=64, document=(64, 128), summary=(400, 600))
TOKEN_BYTES = 36_864  # of KV, in the 160 M Llama
SHORT_TOKENS = 8_000  # of memory: in the mean of its half minute the load needs about 16,000

REFUSES_NONE = ("--schedule-refuse-ttfts", "0")
DROPS_KV = ("schedule.reuse=false", "schedule.evict=false")
SHORT = ("--kv-memory-mb", str(-(-SHORT_TOKENS * TOKEN_BYTES // (1 << 20))))

_draw = Random()  # without a seed: a server that was measured before must not know the prompts


def new_tokens(count: int) -> list[int]:
    return [_draw.randrange(3, VOCAB) for _ in range(count)]


# --- Servers in turns


@dataclass(frozen=True)
class Compared(Generic[T]):
    """The figures of a load, one for each round."""

    ours: list[T]
    baseline: list[T]  # of the server that ours is compared with, if there is one

    def report(
        self, name: str, figure: Callable[[Sequence[T]], float], unit: str, factor: float | None = None, **more: bool
    ) -> None:
        """Report the figure of our rounds; its goal is `factor` times that of the baseline's rounds."""
        baseline = figure(self.baseline) if self.baseline else None
        goal = None if factor is None or baseline is None else factor * baseline
        report(name, figure(self.ours), unit, baseline=baseline, goal=goal, **more)


@dataclass(frozen=True)
class Servers:
    ours: str  # URL
    baseline: str | None
    rounds: int

    def play(self, load: Callable[[str], Coroutine[Any, Any, T]], times: int = 1) -> Compared[T]:
        """Play the load on each server, `times` in each round; the server that was last begins the next time."""
        outcomes = Compared[T]([], [])
        asked = [(self.ours, outcomes.ours), *([(self.baseline, outcomes.baseline)] if self.baseline else [])]
        for number in range(times * self.rounds):
            for url, outcome in reversed(asked) if number % 2 else asked:
                sleep(SETTLES_S)
                outcome.append(asyncio.run(load(url)))
        return outcomes


async def ask_whole(url: str, prompt: list[int], num_output: int, **more: Any) -> Answer:
    answer = await ask(url, prompt, num_output, **more)
    assert len(answer.token_at) >= num_output, f"{url}: status {answer.status}, {len(answer.token_at)} tokens"
    return answer


# --- Parts that ask any server


async def talk(url: str, length: int) -> list[Answer]:
    words, answers = list[int](), list[Answer]()
    for _ in range(length):
        words = words + new_tokens(NEW)
        answers.append(await ask_whole(url, words, OUT))
        words = words + answers[-1].tokens
        await asyncio.sleep(THINKS_S)
    return answers


async def talk_all(url: str, chats: int, length: int) -> list[list[Answer]]:
    return await asyncio.gather(*(talk(url, length) for _ in range(chats)))


def turns(servers: Servers) -> None:
    for chats, length in CHATS:
        label = f"{chats} chats of {length} turns"
        talks = servers.play(partial(talk_all, chats=chats, length=length))
        for turn in range(length):
            ttft = partial(ttft_ms_of_turn, turn)
            talks.report(f"{label}: TTFT of turn {turn + 1}", ttft, "ms", 0.7 if turn else None)
        talks.report(f"{label}: TBT p50", tbt_ms, "ms")
        talks.report(f"{label}: prompt tokens found, after first turns", found_percent, "%")


def ttft_ms_of_turn(turn: int, rounds: Sequence[list[list[Answer]]]) -> float:
    return 1e3 * median(answers[turn].ttft_s for talks in rounds for answers in talks)


def tbt_ms(rounds: Sequence[list[list[Answer]]]) -> float:
    return 1e3 * median(gap for talks in rounds for answers in talks for answer in answers for gap in answer.gaps)


def found_percent(rounds: Sequence[list[list[Answer]]]) -> float:
    later = [(turn, answer) for talks in rounds for answers in talks for turn, answer in enumerate(answers) if turn]
    num_prompt = sum(NEW + turn * (NEW + OUT) for turn, _ in later)
    return 100 * sum(answer.num_cached for _, answer in later) / num_prompt


async def ask_under_system(url: str) -> tuple[float, float]:
    """Return the tokens per second of questions under a new system prompt, and of more questions under the same."""
    prompt = new_tokens(SYSTEM)
    return await tokens_s(url, prompt), await tokens_s(url, prompt)


async def tokens_s(url: str, prompt: list[int]) -> float:
    began = perf_counter()
    answers = await ask_at_once(url, [prompt + new_tokens(QUESTION) for _ in range(QUESTIONS)], OUT)
    return QUESTIONS * OUT / (max(answer.token_at[-1] for answer in answers) - began)


async def ask_at_once(url: str, prompts: Sequence[list[int]], num_output: int) -> list[Answer]:
    return await asyncio.gather(*(ask_whole(url, prompt, num_output) for prompt in prompts))


def system(servers: Servers) -> None:
    rates = servers.play(ask_under_system, times=3)
    for place, label in enumerate(("new", "known")):
        name, factor = f"{QUESTIONS} questions under a {label} system prompt", None if place else 1.3
        rates.report(name, partial(median_at, place), "tokens/s", factor, at_least=True)


def median_at(place: int, rounds: Sequence[tuple[float, float]]) -> float:
    return median(figures[place] for figures in rounds)


async def begin_siblings(url: str) -> tuple[float, float]:
    """Return the seconds until the only choice of a prompt has a token, and until each of many choices has one."""
    one, many = [await ask_whole(url, new_tokens(SYSTEM), 4, n=n, temperature=1.0, seed=1) for n in (1, SIBLINGS)]
    assert len(many.begun_at) == SIBLINGS, f"{url}: {len(many.begun_at)} choices"
    return one.all_begun_s, many.all_begun_s


def siblings(servers: Servers) -> None:
    times = servers.play(begin_siblings, times=5)
    for label, rounds in (("", times.ours), (", peer", times.baseline)):
        if rounds:
            one, every = (1e3 * median_at(place, rounds) for place in (0, 1))
            goal = None if label else 1.15 * one
            report(f"n = {SIBLINGS}: first tokens, against n = 1{label}", every, "ms", baseline=one, goal=goal)


# --- Parts that start their own deployments


@dataclass(frozen=True)
class Deployments:
    model: Path
    flags: Sequence[str]  # for `alignedserve serve`
    rounds: int

    @contextmanager
    def serving(self, *flags: str) -> Iterator[str]:
        """Start a deployment with more flags, and return its URL once it has answered."""
        with serve(self.model, "--jobs-store", "off", *self.flags, *flags) as deployment:
            warm_up(deployment.url)
            yield deployment.url

    @contextmanager
    def serving_two(self, first: Sequence[str], second: Sequence[str]) -> Iterator[Servers]:
        with self.serving(*first) as ours, self.serving(*second) as baseline:
            yield Servers(ours, baseline, self.rounds)


def warm_up(url: str) -> None:
    asyncio.run(ask_whole(url, new_tokens(NEW), 8))


async def ask_unknown(url: str) -> float:
    """Return the seconds until all prompts, which begin like no other, have their answers."""
    began = perf_counter()
    answers = await ask_at_once(url, [new_tokens(size) for size in UNKNOWN], UNKNOWN_OUT)
    assert not any(answer.num_cached for answer in answers)
    return max(answer.token_at[-1] for answer in answers) - began


def nothing(deployments: Deployments) -> None:
    with deployments.serving_two(REFUSES_NONE, [*REFUSES_NONE, "--no-schedule-reuse"]) as servers:
        took = servers.play(ask_unknown, times=10)
    took.report("nothing to find: time", lambda seconds: 1e3 * median(seconds), "ms")
    ratio = median(ours / without for ours, without in zip(took.ours, took.baseline, strict=True))
    report("nothing to find: slower than without the prefix cache", 100 * (ratio - 1), "%", goal=1.0)


def memory(deployments: Deployments) -> None:
    drops = [flag for option in DROPS_KV for flag in ("--set", option)]
    load = replace(LONG, seconds=deployments.rounds * LONG.seconds)  # a second round would find the first one's prompts
    with deployments.serving_two(SHORT, [*SHORT, *drops]) as servers:
        report_memory(replace(servers, rounds=1).play(lambda url: ChatClient(url).play(load, DEFAULT)))


def memory_simulated(seeds: Sequence[int]) -> None:
    machine = MACHINES["zen4"]
    limits = replace(machine.limits, num_blocks=SHORT_TOKENS // machine.limits.block_size)
    with TemporaryDirectory() as folder:
        profile = Path(folder) / "steps.json"
        save_profile(profile, replace(machine, limits=limits))
        ours, drops = ([Simulated(profile, seeds, options=options).run(LONG, DEFAULT)] for options in ((), DROPS_KV))
        report_memory(Compared(ours, drops))


def report_memory(runs: Compared[ChatRun]) -> None:
    def average(figure: Callable[[ChatRun], float]) -> Callable[[Sequence[ChatRun]], float]:
        return lambda rounds: mean(map(figure, rounds))

    label = "memory for half"
    rate = average(lambda run: run.meanwhile_tokens_s)
    runs.report(f"{label}: BE while chats come", rate, "tokens/s", 1.2, at_least=True)
    runs.report(f"{label}: BE", average(lambda run: run.tokens_s), "tokens/s")
    attained = average(lambda run: run.attained(DEFAULT))
    runs.report(f"{label}: chats attained", attained, "%", 1.0, at_least=True)
    failed = average(lambda run: sum(not answer.is_whole for answer in [*run.chats, *run.documents]))
    runs.report(f"{label}: refused or failed", failed, "1")
    if runs.ours[0].num_recomputed is not None:
        runs.report(f"{label}: recomputed", average(lambda run: run.num_recomputed or 0), "tokens", 0.0)


# --- The command


ASKING = {"turns": turns, "system": system, "siblings": siblings}
STARTING = {"nothing": nothing, "memory": memory}


def main() -> int:
    parser = command(__doc__)
    parser.add_argument("--backend", choices=("real", "simulated"), default="real", help="default: %(default)s")
    parser.add_argument(
        "--parts", type=several(str, [*ASKING, *STARTING]), help="default: all, or with --url the first three"
    )
    parser.add_argument("--rounds", type=int, default=1, help="real")
    parser.add_argument("--model", type=Path, help="real: a model folder with a tokenizer, in place of random weights")
    parser.add_argument("--url", help="real: ask a server that runs, whose model is named measured")
    parser.add_argument("--peer", metavar="URL", help="real: a server to ask in turns with ours")
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2], help="simulated")
    parser.add_argument("flags", nargs="*", help="real: more flags for `alignedserve serve`, after --")
    args = parser.parse_args()
    if args.backend == "simulated":
        memory_simulated(args.seeds)
        return status()
    parts = args.parts or [*ASKING, *([] if args.url else STARTING)]
    if args.url and not ASKING.keys() >= set(parts):
        parser.error(f"with --url, --parts are of {', '.join(ASKING)}: the others start their own deployments")
    real(parts, args)
    return status()


def real(parts: Sequence[str], args: argparse.Namespace) -> None:
    if args.url:
        ask_parts(parts, Servers(args.url, args.peer, args.rounds))
        return
    with TemporaryDirectory() as folder:
        deployments = Deployments(args.model or llama160m(Path(folder) / "model"), args.flags, args.rounds)
        if asking := [part for part in parts if part in ASKING]:
            with deployments.serving(*REFUSES_NONE) as url:
                ask_parts(asking, Servers(url, args.peer, args.rounds))
        for part in parts:
            if part in STARTING:
                STARTING[part](deployments)


def ask_parts(parts: Sequence[str], servers: Servers) -> None:
    for url in filter(None, (servers.ours, servers.baseline)):
        warm_up(url)
    for part in parts:
        ASKING[part](servers)


if __name__ == "__main__":
    raise SystemExit(main())
