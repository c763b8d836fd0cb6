"""Measure what conversations of several turns gain when the KV of their prompts is kept, and the router knows where.

    python -m benchmarks.conversations [--conversations 12] [--turns 4] [--full]
    python -m benchmarks.conversations --backend simulated [--conversations 40] [--cluster 3+2] [--seeds 0,1,2]

**Real**: two 1+1 deployments of the demo model run at the same time, and differ only in `schedule.reuse`. They take
turns: some conversations with the first, then the same conversations with the second. A conversation begins with one of
a few system prompts; the prompt of each turn is the whole conversation before, and a new question. Lengths are forced,
texts are random tokens; a few conversations run at once. The default takes about a minute on two idle cores, and
several minutes on busy cores. TTFT is measured at the client. The share of prompt tokens comes from the usage in the
answers.

**Simulated**: conversations of four turns, of 1,800 tokens and 300 more in each later turn, on two nodes with a pool
each. The baseline is a router that does not learn where the KV of a prompt is (router/placing/beginnings.py): it
decides by the number of requests and their prompts. The figures are over later turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from random import Random
from statistics import mean
from unittest.mock import patch

from alignedserve.cli.simulate_once import settings_of
from alignedserve.core import Request, Sampling
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.router.placing.placement import Placement, Pools
from alignedserve.simulator.records.distribution import percentile
from alignedserve.simulator.reports.trial import SimulationTrial
from alignedserve.simulator.run import Simulation
from alignedserve.simulator.settings import FIRST_ARRIVAL_AT
from alignedserve.simulator.workload.visit import Arrival
from benchmarks.common.requests import request
from benchmarks.common.serving import ask, serve
from benchmarks.report import command, report, several

_MOST = 2_000  # tokens of prompt and answer: the model has 2,048 positions
_SYSTEMS, _SYSTEM = 4, 600  # number of system prompts, and tokens of each
_QUESTION, _ANSWER = (40, 160), (24, 72)
_AT_ONCE = 3
_ROUND = 6  # conversations with a deployment before the other deployment's turn
_SIMULATED_TURNS, _FIRST, _MORE, _OUTPUT = 4, 1_800, 300, 30  # tokens
_BETWEEN_S = 0.3  # seconds between the beginnings of conversations
_THINKS_S = (3.0, 4.0)


@dataclass(frozen=True)
class Turn:
    number: int  # place in its conversation
    num_prompt: int
    num_cached: int
    ttft_s: float


def cached_share(turns: Sequence[Turn]) -> float:
    return 100 * sum(turn.num_cached for turn in turns) / sum(turn.num_prompt for turn in turns)


def report_ttft(name: str, turns: Sequence[float], baseline: Sequence[float], *, has_goal: bool = False) -> None:
    for label, figure in (("mean", mean), ("p50", lambda v: percentile(v, 50)), ("p99", lambda v: percentile(v, 99))):
        value, without = 1e3 * figure(turns), 1e3 * figure(baseline)
        goal = without if has_goal and label == "mean" else None
        report(f"{name}, {label} TTFT", value, "ms", baseline=without, goal=goal)


# --- Real


async def hold(url: str, number: int, turns: int) -> list[Turn]:
    draw, done = Random(f"conversation {number}"), list[Turn]()
    words = _words(Random(f"system {draw.randrange(_SYSTEMS)}"), _SYSTEM)
    for turn in range(turns):
        words += _words(draw, draw.randint(*_QUESTION))
        most = draw.randint(*_ANSWER)
        if len(words) + most > _MOST:
            break
        answer = await ask(url, words, most)
        assert len(answer.tokens) == most, f"{len(answer.tokens)} tokens of {most}"
        done.append(Turn(turn, len(words), answer.num_cached, answer.ttft_s))
        words = words + answer.tokens
    return done


def _words(draw: Random, count: int) -> list[int]:
    return [draw.randrange(10, 2_000) for _ in range(count)]


async def hold_all(url: str, numbers: Sequence[int], turns: int) -> list[Turn]:
    places = asyncio.Semaphore(_AT_ONCE)

    async def in_place(number: int) -> list[Turn]:
        async with places:
            return await hold(url, number, turns)

    return [turn for done in await asyncio.gather(*map(in_place, numbers)) for turn in done]


def run_both(conversations: int, turns: int) -> dict[bool, list[Turn]]:
    """Return all turns, by whether the deployment reuses prompts."""
    done: dict[bool, list[Turn]] = {True: [], False: []}
    with ExitStack() as servers:
        flags = {True: "--schedule-reuse", False: "--no-schedule-reuse"}
        urls = {on: servers.enter_context(serve("demo", "--topology", "1+1", flags[on])).url for on in done}
        for url in urls.values():
            asyncio.run(hold_all(url, [-1], 1))  # warms up the deployment
        for start in range(0, conversations, _ROUND):
            numbers = range(start, min(start + _ROUND, conversations))
            for reuse in (True, False) if start // _ROUND % 2 == 0 else (False, True):
                done[reuse] += asyncio.run(hold_all(urls[reuse], numbers, turns))
    return done


def real(conversations: int, turns: int) -> None:
    done = run_both(conversations, turns)
    on, off = done[True], done[False]
    assert not any(turn.num_cached for turn in off), "something was reused without reuse"
    report("conversations", conversations, "1")
    report("turns", len(on), "1", baseline=len(off))
    report("mean prompt", mean(turn.num_prompt for turn in on), "tokens")
    report("prompt tokens served from the pool", cached_share(on), "%")
    later = [turn for turn in on if turn.number]
    report("prompt tokens served from the pool, after first turns", cached_share(later), "%")
    report_ttft("against no reuse", [turn.ttft_s for turn in on], [turn.ttft_s for turn in off])


# --- Simulated


def arrivals(count: int, seed: int) -> Iterator[Arrival]:
    draw = Random(f"{seed}/conversations")
    for number in range(count):
        words = tuple(draw.randrange(10, 5_000) for _ in range(_FIRST + (_SIMULATED_TURNS - 1) * _MORE))
        at = FIRST_ARRIVAL_AT + _BETWEEN_S * number
        for turn in range(_SIMULATED_TURNS):
            prompt, sampling = words[: _FIRST + _MORE * turn], Sampling(seed=number)
            yield Arrival(request(f"{number}-{turn}", prompt, _OUTPUT, sampling=sampling, arrival_at=at), _OUTPUT, None)
            at += draw.uniform(*_THINKS_S)


def played(count: int, cluster: str, seed: int, *, remembers: bool) -> tuple[float, list[float]]:
    """Return the share of later turns' prompt tokens that came from a pool, and the TTFT of these turns."""
    settings = replace(
        settings_of(SimulationTrial("aligned", "chat", cluster=cluster, seed=seed)), nodes=2, direct=True
    )
    simulation = Simulation(settings, list(arrivals(count, seed)))
    with nullcontext() if remembers else patch.object(Placement, "kept", _forget):
        assert not simulation.run().problems
    later = [asked for asked in simulation.record(0.0).requests if not asked.id.endswith("-0")]
    cores = [process.core for process in simulation.world.processes]
    reused = sum(core.num_reused_tokens for core in cores if isinstance(core, PrefillCore))
    ttfts = [asked.token_at[0] - asked.arrival_at for asked in later]
    return reused / sum(asked.num_prompt for asked in later), ttfts


def _forget(_placement: Placement, _request: Request, _node: str, _pools: Pools) -> None: ...


def simulated(conversations: int, cluster: str, seeds: Sequence[int]) -> None:
    on, off = (
        [played(conversations, cluster, seed, remembers=remembers) for seed in seeds] for remembers in (True, False)
    )
    share, without = (100 * mean(share for share, _ in runs) for runs in (on, off))
    report("later turns' prompt tokens from a pool", share, "%", baseline=without, goal=without, at_least=True)
    ttfts, without_ttfts = ([ttft for _, ttfts in runs for ttft in ttfts] for runs in (on, off))
    report_ttft("later turns", ttfts, without_ttfts, has_goal=True)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--backend", choices=("real", "simulated"), default="real", help="default: %(default)s")
    parser.add_argument("--conversations", type=int, help="default: 12, or 40 if simulated")
    parser.add_argument("--turns", type=int, default=4, help="real: most turns of a conversation")
    parser.add_argument("--full", action="store_true", help="real: two hundred conversations of up to eight turns")
    parser.add_argument("--cluster", default="3+2", help="simulated")
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2], help="simulated")
    args = parser.parse_args()
    if args.backend == "simulated":
        simulated(args.conversations or 40, args.cluster, args.seeds)
    else:
        real(*((200, 8) if args.full else (args.conversations or 12, args.turns)))


if __name__ == "__main__":
    main()
