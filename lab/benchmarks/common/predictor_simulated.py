"""Play what predictions of lengths buy: real prompts and lengths of real outputs through a simulated deployment.

    chats, real-time        oasst, gsm8k, humaneval           one prefill and one decode worker,
    documents, best-effort  everything else                   RTX PRO 6000, Llama-3.1-8B

Each regime is played with each predictor, on the same arrivals. What is learnt before it begins are the past prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from alignedserve.core import Sampling, ServiceClass, Sketch
from alignedserve.lab.benchmarks.common.requests import request
from alignedserve.lab.benchmarks.common.simulating import recorded
from alignedserve.lab.reports.figures import RunFigures
from alignedserve.lab.reports.trial import SimulationTrial
from alignedserve.lab.trials.building import settings_of
from alignedserve.loads.figures.request_figures import end_to_end_s, finished
from alignedserve.loads.workload import Arrival
from alignedserve.loads.workload.tape import STOP
from alignedserve.protocol.commands import Learn
from alignedserve.router.prediction.predictor import HashEncoder
from alignedserve.scheduling.policy import Grouping, Order, Policy, Predictor, Room
from alignedserve.scheduling.sketch import sketch_of
from alignedserve.simulator.predicting import Knowledge
from alignedserve.simulator.run import Simulation
from alignedserve.simulator.settings import FIRST_ARRIVAL_AT, Settings

_CHATS = ("oasst", "gsm8k", "humaneval")
NUM_REQUESTS = 400
_MOST = 1024  # max_tokens of each
_KNOWN = 3000  # past prompts
_MINILM = 384


@dataclass(frozen=True)
class Said:
    """A prompt and the length of an answer to it."""

    source: str
    text: str
    prompt: tuple[int, ...]
    num_output: int


@dataclass(frozen=True)
class Regime:
    name: str
    policy: Policy
    rate: float  # requests in a second
    batch: int = 128
    kv_tokens: int | None = None  # of the device's cache; all that the GPU has


_SHORTEST = Policy(Order.SHORTEST_REMAINING, grouping=Grouping.FCFS)
_FEW = 12_000  # tokens: a dozen of the longest requests
REGIMES = (
    Regime("ample memory, slack", Policy(), rate=25.0),
    Regime("ample memory, few places, shortest first", _SHORTEST, rate=16.0, batch=16),
    Regime("memory pressure, slack, room whole", Policy(room=Room.WHOLE), rate=12.0, kv_tokens=_FEW),
    Regime("memory pressure, slack, room growing", Policy(room=Room.GROWING), rate=12.0, kv_tokens=_FEW),
    Regime("memory pressure, shortest, room growing", replace(_SHORTEST, room=Room.GROWING), 12.0, kv_tokens=_FEW),
)


def simulated(
    past: Sequence[Said], asked: Sequence[Said], minilm: Mapping[tuple[int, ...], bytes], seeds: range, named: str
) -> Iterator[dict[str, object]]:
    predictors = [Predictor.OFF, Predictor.CONSTANT, Predictor.HASH, Predictor.ORACLE]
    predictors += [Predictor.MINILM] if minilm else []
    for regime in [regime for regime in REGIMES if named in regime.name]:
        for seed in seeds:
            for predictor in predictors:
                knowledge = _knowledge(predictor, past[:_KNOWN], minilm)
                yield _line(regime, predictor, seed, asked, knowledge)


def _settings(regime: Regime, predictor: Predictor, seed: int) -> Settings:
    usual = settings_of(SimulationTrial("aligned", cluster="1+1", seed=seed))
    limits = replace(usual.limits, max_batch=regime.batch)
    if regime.kv_tokens is not None:
        limits = replace(limits, num_pairs=regime.kv_tokens // limits.block_size)
    return replace(usual, limits=limits, policy=replace(regime.policy, predictor=predictor))


def _knowledge(predictor: Predictor, past: Sequence[Said], minilm: Mapping[tuple[int, ...], bytes]) -> Knowledge | None:
    if predictor is Predictor.MINILM:
        learnt = tuple(Learn(Sketch(minilm[played.prompt]), len(played.prompt), played.num_output) for played in past)
        return Knowledge(lambda prompt: Sketch(minilm[tuple(prompt)]), lambda: HashEncoder(_MINILM), learnt)
    if predictor is Predictor.HASH:
        learnt = tuple(Learn(sketch_of(played.prompt), len(played.prompt), played.num_output) for played in past)
        return Knowledge(sketch_of, HashEncoder, learnt)
    return None


def _line(
    regime: Regime, predictor: Predictor, seed: int, asked: Sequence[Said], known: Knowledge | None
) -> dict[str, object]:
    settings = _settings(regime, predictor, seed)
    record = recorded(Simulation(settings, list(_arrivals(asked, regime.rate, seed)), known))
    figures, done = RunFigures.from_record(record), finished(record.requests)
    chats = [ended for ended in done if ended.service is ServiceClass.RT]
    documents = [ended for ended in done if ended.service is ServiceClass.BE]
    line: dict[str, object] = {"name": "predictor/simulated", "regime": regime.name, "predictor": predictor.value}
    line |= {"seed": seed, "requests": len(record.requests), "rate": regime.rate}
    for name, requests in (("all", done), ("rt", chats), ("be", documents)):
        if not requests:
            continue
        seconds = [end_to_end_s(ended) for ended in requests]
        line |= {f"{name}_mean_s": float(np.mean(seconds)), f"{name}_p99_s": float(np.percentile(seconds, 99))}
    line |= {"rt_attainment": figures.rt.attainment if chats else None, "be_tokens_per_s": figures.be.tokens_per_s}
    return line | {"duration_s": figures.duration_s, "preemptions": figures.requests.preemptions}


def _arrivals(asked: Sequence[Said], rate: float, seed: int) -> Iterator[Arrival]:
    draw = Random(f"{seed}/played")
    at = FIRST_ARRIVAL_AT
    for number, played in enumerate(draw.sample(asked, NUM_REQUESTS)):
        at += draw.expovariate(rate)
        is_chat = played.source.startswith(_CHATS)
        fields = {"service": ServiceClass.RT if is_chat else ServiceClass.BE, "sampling": Sampling(seed=number)}
        name = f"{played.source}-{number}"
        asked_now = request(name, played.prompt, _MOST, stop_tokens=(STOP,), arrival_at=at, **fields)
        yield Arrival(asked_now, played.num_output, None)
