"""Simulate what conversations gain when the router knows where the KV of their earlier turns is.

    python -m benchmarks.conversations [--conversations 40] [--cluster 3+2] [--seeds 0,1,2]

Conversations of four turns, of 1,800 tokens and 300 more in each later turn, on two nodes with a pool each. The
baseline is a router that does not learn where the KV of a prompt is (router/placing/beginnings.py): it decides by the
number of requests and their prompts. The figures are over later turns. Real turns are in benchmarks/turns.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from statistics import mean
from unittest.mock import patch

from alignedserve.core import Request, Sampling
from alignedserve.prefill_worker.state import PrefillCore
from alignedserve.router.placing.placement import Placement, Pools
from alignedserve.simulator.records.distribution import percentile
from alignedserve.simulator.reports.trial import SimulationTrial
from alignedserve.simulator.run import Simulation
from alignedserve.simulator.settings import FIRST_ARRIVAL_AT
from alignedserve.simulator.trials.building import settings_of
from alignedserve.simulator.workload.visit import Arrival
from benchmarks.common.requests import request
from benchmarks.report import command, report, several

_TURNS, _FIRST, _MORE, _OUTPUT = 4, 1_800, 300, 30  # tokens
_BETWEEN_S = 0.3  # seconds between the beginnings of conversations
_THINKS_S = (3.0, 4.0)


def arrivals(count: int, seed: int) -> Iterator[Arrival]:
    draw = Random(f"{seed}/conversations")
    for number in range(count):
        words = tuple(draw.randrange(10, 5_000) for _ in range(_FIRST + (_TURNS - 1) * _MORE))
        at = FIRST_ARRIVAL_AT + _BETWEEN_S * number
        for turn in range(_TURNS):
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


def report_ttft(turns: Sequence[float], baseline: Sequence[float]) -> None:
    for label, figure in (("mean", mean), ("p50", lambda v: percentile(v, 50)), ("p99", lambda v: percentile(v, 99))):
        value, without = 1e3 * figure(turns), 1e3 * figure(baseline)
        goal = without if label == "mean" else None
        report(f"later turns, {label} TTFT", value, "ms", baseline=without, goal=goal)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--cluster", default="3+2")
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2], help="default: 0,1,2")
    args = parser.parse_args()
    on, off = (
        [played(args.conversations, args.cluster, seed, remembers=remembers) for seed in args.seeds]
        for remembers in (True, False)
    )
    share, without = (100 * mean(share for share, _ in runs) for runs in (on, off))
    report("later turns' prompt tokens from a pool", share, "%", baseline=without, goal=without, at_least=True)
    report_ttft(*([ttft for _, ttfts in runs for ttft in ttfts] for runs in (on, off)))


if __name__ == "__main__":
    main()
