"""Requests of four kinds, whose words tell how long their outputs are, and what a predictor has learnt of them.

Every figure that depends on predictions is compared with the same run without them: a wrong lesson may cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from functools import partial
from random import Random

from alignedserve.core import Sampling, ServiceClass, Slo
from alignedserve.lab.benchmarks.common.simulating import recorded
from alignedserve.lab.loads.records.records import RunRecord
from alignedserve.lab.loads.workload import Arrival
from alignedserve.lab.loads.workload.tape import STOP, VOCABULARY
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import FIRST_ARRIVAL_AT, Settings
from alignedserve.lab.trials.building import settings_of
from alignedserve.router.lengths import OutputLengths
from alignedserve.scheduling.policy import Predictor
from alignedserve.scheduling.sketch import sketch_of
from tests.simulator.requests import request

MEANS = (25, 75, 225, 675)  # output of each kind, in tokens
MOST = 2048
_SLO = Slo()
_SPREAD = 0.4  # of the logarithms of outputs of one kind
_NUM_PAST = 400
_GPU = "rtx4090-llama-3.1-8b-tp1"
_NUM_WORDS = 96  # of a prompt, which tell its kind; as many do not


class Lesson(str, Enum):
    """A state of the predictor at the start of a run: what it has learnt before."""

    NOTHING = "nothing"  # predictor: constant
    PERFECT = "perfect"  # predictor: oracle
    LEARNT = "learnt"  # what is true of these requests
    USELESS = "useless"  # lengths that have nothing to do with the words
    REVERSED = "reversed"  # long outputs for the words that go with short ones

    @property
    def predictor(self) -> Predictor:
        return {Lesson.NOTHING: Predictor.CONSTANT, Lesson.PERFECT: Predictor.ORACLE}.get(self, Predictor.HASH)


def prompt_of(kind: int, num_tokens: int, draw: Random) -> tuple[int, ...]:
    """Return a prompt that begins as no other does and ends with words of its kind."""
    words = Random(kind).choices(range(1, VOCABULARY), k=_NUM_WORDS)
    return (*draw.choices(range(1, VOCABULARY), k=num_tokens), *draw.sample(words, k=_NUM_WORDS))


def output_of(kind: int, draw: Random) -> int:
    return max(1, min(MOST, round(MEANS[kind] * draw.lognormvariate(0.0, _SPREAD))))


def lengths_of(lesson: Lesson, seed: int) -> OutputLengths:
    """Return what the router knows of lengths at the start of a run."""
    draw, lengths = Random(f"{seed}/past"), OutputLengths()
    for _ in range(_NUM_PAST if lesson.predictor is Predictor.HASH else 0):
        kind = draw.randrange(len(MEANS))
        taught = {Lesson.LEARNT: kind, Lesson.REVERSED: len(MEANS) - 1 - kind}.get(lesson, draw.randrange(len(MEANS)))
        prompt = prompt_of(kind, draw.randint(16, 400), draw)
        past = request("past", prompt, MOST, stop_tokens=(STOP,))
        lengths.opened(past, sketch_of(prompt))
        lengths.ended(past, output_of(taught, draw))
        lengths.closed(past.id)
    return lengths


def arrivals(
    number: int, service: ServiceClass, seed: int, rate: float | None = None, most_prompt: int = 1200, slo: Slo = _SLO
) -> Iterator[Arrival]:
    """Yield so many requests, all at once or so many in a second."""
    draw, at = Random(f"{seed}/{service.value}"), FIRST_ARRIVAL_AT
    for which in range(number):
        kind = draw.randrange(len(MEANS))
        prompt = prompt_of(kind, draw.randint(16, most_prompt), draw)
        at += draw.expovariate(rate) if rate else 0.0
        fields = {"service": service, "slo": slo, "sampling": Sampling(seed=draw.getrandbits(31)), "arrival_at": at}
        asked = request(f"{service.value}-{which}", prompt, MOST, stop_tokens=(STOP,), **fields)
        yield Arrival(asked, output_of(kind, draw), None)


def played(settings: Settings, lesson: Lesson, asked: list[Arrival]) -> RunRecord:
    """Play these requests in a deployment whose predictor has learnt this."""
    policy = replace(settings.policy, predictor=lesson.predictor)
    taught = partial(lengths_of, lesson, settings.seed)
    return recorded(Simulation(replace(settings, policy=policy), asked, taught=taught))


def settings_of_cluster(cluster: str, tokens: int | None = None, seed: int = 0) -> Settings:
    """Return a deployment of RTX 4090 with Llama-3.1-8B, each of which keeps the KV of so many tokens."""
    settings = settings_of(SimulationTrial("aligned", None, cluster, seed, None, _GPU))
    if tokens is None:
        return settings
    limits = replace(settings.limits, num_blocks=tokens // settings.limits.block_size)
    return replace(settings, limits=limits)
