"""What it brings that the router knows whose pool has the beginning of a prompt (router/placing/beginnings.py).

    python -m benchmarks.beginnings [--conversations 40] [--cluster 3+2] [--seeds 0,1,2]

Conversations of four turns, of 1,800 tokens and 300 more with each, on two nodes with a pool each. The baseline is a
router that is never told where a prompt's KV has come: numbers of requests and their prompts decide there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from random import Random
from statistics import mean
from unittest.mock import patch

from alignedserve.cli.simulate_once import settings_of
from alignedserve.core import Request, Sampling, ServiceClass, Slo
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.router.placing.placement import Placement, Pools
from alignedserve.simulator.records.distribution import percentile
from alignedserve.simulator.reports.trial import Trial
from alignedserve.simulator.run import Simulation
from alignedserve.simulator.settings import FIRST_ARRIVAL_AT
from alignedserve.simulator.workload.visit import Arrival
from benchmarks.report import report

_TURNS, _FIRST, _MORE, _ANSWER = 4, 1_800, 300, 30  # tokens
_BETWEEN_S = 0.3  # conversations that begin
_THINKS_S = (3.0, 4.0)


@dataclass(frozen=True)
class Later:
    """All turns but the first of each conversation."""

    from_pools: float  # share of their prompts
    ttfts_s: list[float]


def conversations(count: int, seed: int) -> Iterator[Arrival]:
    draw = Random(f"{seed}/conversations")
    for number in range(count):
        said = tuple(draw.randrange(10, 5_000) for _ in range(_FIRST + (_TURNS - 1) * _MORE))
        at = FIRST_ARRIVAL_AT + _BETWEEN_S * number
        for turn in range(_TURNS):
            request = Request(
                id=f"{number}-{turn}",
                owner="gateway-0",
                attempt=0,
                prompt=said[: _FIRST + _MORE * turn],
                emitted=(),
                sampling=Sampling(seed=number),
                max_tokens=_ANSWER,
                stop_tokens=(),
                service=ServiceClass.RT,
                slo=Slo(),
                arrival_at=at,
            )
            yield Arrival(request, _ANSWER, None)
            at += draw.uniform(*_THINKS_S)


def played(count: int, cluster: str, seed: int, *, remembers: bool) -> Later:
    settings = replace(settings_of(Trial("aligned", "chat", cluster=cluster, seed=seed)), nodes=2, direct=True)
    simulation = Simulation(settings, list(conversations(count, seed)))
    with nullcontext() if remembers else patch.object(Placement, "kept", _forgotten):
        assert not simulation.run().problems
    later = [one for one in simulation.record(0.0).requests if not one.id.endswith("-0")]
    cores = [one.core for one in simulation.world.processes]
    reused = sum(core.num_reused_tokens for core in cores if isinstance(core, PrefillCore))
    return Later(reused / sum(one.num_prompt for one in later), [one.token_at[0] - one.arrival_at for one in later])


def _forgotten(_placement: Placement, _request: Request, _node: str, _pools: Pools) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--cluster", default="3+2", help="default: %(default)s")
    parser.add_argument("--seeds", default="0,1,2", help="default: %(default)s")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    on, off = (
        [played(args.conversations, args.cluster, seed, remembers=remembers) for seed in seeds]
        for remembers in (True, False)
    )
    share, without = (100 * mean(one.from_pools for one in runs) for runs in (on, off))
    report("later turns' prompt tokens from a pool", share, "%", baseline=without, goal=without, at_least=True)
    ttfts, without_ttfts = ([1e3 * ttft for one in runs for ttft in one.ttfts_s] for runs in (on, off))
    report("later turns, mean TTFT", mean(ttfts), "ms", baseline=mean(without_ttfts), goal=mean(without_ttfts))
    report("later turns, p99 TTFT", percentile(ttfts, 99), "ms", baseline=percentile(without_ttfts, 99))


if __name__ == "__main__":
    main()
