"""Who asks for what, and when: drawn from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from alignedserve.core import Request, Sampling, ServiceClass, Slo
from alignedserve.simulator.engine import STOP, VOCABULARY


@dataclass(frozen=True)
class Workload:
    num_requests: int = 100
    rate: float = 20.0  # arrivals in a second
    mean_prompt: int = 60
    most_prompt: int = 400
    mean_output: int = 20
    most_output: int = 100
    limited_share: float = 0.2  # of the requests, whose max_tokens may cut their output
    leaving_share: float = 0.0  # of the clients, who go before the end
    patience_s: float = 0.5  # of those, on average


@dataclass(frozen=True)
class Arrival:
    request: Request
    length: int  # of its output, where max_tokens allows it
    leaves_after_s: float | None


def arrivals(workload: Workload, owners: tuple[str, ...], seed: int, start_at: float) -> Iterator[Arrival]:
    """A Poisson process."""
    draw = Random(f"{seed}/workload")
    at = start_at
    for number in range(workload.num_requests):
        at += draw.expovariate(workload.rate)
        length = _length(draw, workload.mean_output, workload.most_output)
        limited = draw.random() < workload.limited_share
        request = Request(
            id=f"request-{number}",
            owner=owners[number % len(owners)],
            attempt=0,
            prompt=tuple(
                draw.choices(range(1, VOCABULARY), k=_length(draw, workload.mean_prompt, workload.most_prompt))
            ),
            emitted=(),
            sampling=Sampling(seed=draw.getrandbits(31)),
            max_tokens=draw.randint(1, workload.most_output) if limited else workload.most_output,
            stop_tokens=(STOP,),
            service=ServiceClass.RT,
            slo=Slo(),
            arrival_at=at,
        )
        leaves = draw.random() < workload.leaving_share
        yield Arrival(request, length, draw.expovariate(1 / workload.patience_s) if leaves else None)


def _length(draw: Random, mean: int, most: int) -> int:
    return min(most, 1 + int(draw.expovariate(1 / mean)))
