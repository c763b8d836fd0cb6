"""Compute the work that a workload brings and the most that a device can do: a smaller deployment is hopeless.

A worker in balance runs steps of B decodes and B x P / O prompt tokens, where prompts have P and outputs O tokens: what
B requests bring for each emitted token. The worker ends B / (O x time of the step) requests in a second. The best B
that memory, the limits of a step and the time between tokens allow is the most that a worker can do. Real workers do
less: lengths are unequal, and requests come in bursts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from random import Random

from alignedserve.core import ServiceClass, WorkerLimits
from alignedserve.cost.sums import added
from alignedserve.lab.devices.hardware import Hardware
from alignedserve.lab.loads.workload import Mixture
from alignedserve.lab.loads.workload.amounts import Fixed, RecordedLengths
from alignedserve.lab.loads.workload.stream import Stream
from alignedserve.lab.planning.deployments import DeploymentFamily, DeviceOffer

_DRAWN = 1000  # requests of a stream, for the mean lengths
_OPTIMISM = 1.1  # the most that a worker does, over the estimate
_USUAL = 0.75  # what a worker does that keeps its promises, over the estimate
_ENOUGH = 10_000  # workers; more are never offered


Expected = dict[ServiceClass, int | None]  # requests of a class, about


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests in a second, and mean lengths in tokens."""

    rate: float
    prompt: float
    output: float
    tbt_s: float = inf  # the longest time between tokens that is promised


def demand_of(workload: Mixture, be_tokens_per_s: float | None, seed: int) -> Demand:
    """Return the demand of all streams together; closed streams come as fast as documents are promised to run."""
    demands = [_of_stream(stream, be_tokens_per_s, seed) for stream in workload.streams]
    rate = added(demand.rate for demand in demands)
    if not rate:
        return Demand(0.0, 1.0, 1.0)
    return Demand(
        rate,
        added(demand.rate * demand.prompt for demand in demands) / rate,
        added(demand.rate * demand.output for demand in demands) / rate,
        min(demand.tbt_s for demand in demands if demand.rate),
    )


def _of_stream(stream: Stream, be_tokens_per_s: float | None, seed: int) -> Demand:
    draw, clients = Random(f"{seed}/demand/{stream.name}"), stream.clients
    lengths = stream.lengths
    number = min(_DRAWN, len(lengths.pairs)) if isinstance(lengths, RecordedLengths) else _DRAWN
    pairs = [lengths.pair(at, draw) for at in range(number)]
    outputs = [min(output, clients.max_tokens, clients.context - 1) for _, output in pairs]
    prompts = [min(prompt, clients.context - output) for (prompt, _), output in zip(pairs, outputs, strict=True)]
    prompt, output = sum(prompts) / number, sum(outputs) / number
    if stream.promise.service is ServiceClass.RT:
        slos = [stream.promise.draw(draw) for _ in range(number)]
        return Demand(stream.arrivals.mean_rate or 0.0, prompt, output, max(slo.tbt_s for slo in slos))
    return Demand(stream.arrivals.mean_rate or (be_tokens_per_s or 0.0) / output, prompt, output)


def expected_requests(workload: Mixture) -> Expected:
    """Return how many requests of each class come, about; None where that depends on the service."""
    found: Expected = dict.fromkeys(ServiceClass, 0)
    for stream in workload.streams:
        service, before = stream.promise.service, found[stream.promise.service]
        number = _expected(stream)
        found[service] = None if before is None or number is None else before + number
    return found


def _expected(stream: Stream) -> int | None:
    rate, span = stream.arrivals.mean_rate, stream.span
    if stream.num_requests is not None or stream.turns.turns != Fixed(1.0):
        return stream.num_requests
    if rate is None or span.first_s is None:
        return None
    return round(min(rate * span.first_s, span.num_requests or inf))


# --- What a device can do


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """The most requests in a second that a worker of each kind can do."""

    colocated: float
    prefill: float  # prompts alone
    decode: float  # decodes alone

    @classmethod
    def of(cls, device: Hardware, limits: WorkerLimits, demand: Demand) -> WorkerCapacity:
        return cls(
            max(_balanced(device, limits, demand, demand.prompt), default=0.0),
            max(_prompts(device, limits, demand), default=0.0),
            max(_balanced(device, limits, demand, 0.0), default=0.0),
        )


def _balanced(device: Hardware, limits: WorkerLimits, demand: Demand, prompt: float) -> Iterator[float]:
    """Yield what a worker does with steps of some decodes and the prompt tokens that belong to them."""
    prefix = round(demand.prompt + demand.output / 2)
    for decodes in _sizes(min(limits.max_batch, limits.num_tokens // max(1, prefix))):
        tokens = decodes * prompt / demand.output
        step_s = device.truth.seconds_of(_chunks(tokens, demand.prompt), [prefix] * decodes)
        if tokens + decodes <= limits.max_step_tokens and step_s <= demand.tbt_s:
            yield decodes / (demand.output * step_s)


def _prompts(device: Hardware, limits: WorkerLimits, demand: Demand) -> Iterator[float]:
    for tokens in _sizes(limits.max_step_tokens):
        yield tokens / demand.prompt / device.truth.seconds_of(_chunks(tokens, demand.prompt), ())


def _sizes(most: int) -> Sequence[int]:
    """Return a few sizes up to the most, each about a fifth larger than the one before."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, ceil(sizes[-1] * 1.2)))
    return sizes


def _chunks(tokens: float, prompt: float) -> list[tuple[int, int]]:
    """Return prompt tokens as chunks of a step: whole prompts, and a part of a prompt."""
    whole, part = divmod(round(tokens), max(1, round(prompt)))
    chunks = [(max(1, round(prompt)), 0)] * whole
    return [*chunks, (part, round(prompt) // 2)] if part else chunks


# --- Families


def family_of(offer: DeviceOffer, parted: bool, demand: Demand, capacity: WorkerCapacity) -> DeploymentFamily:
    """Return the family with the sizes that the estimate gives."""
    if not demand.rate:
        return DeploymentFamily(offer, 0.5 if parted else None, 2 if parted else 1, 2 if parted else 1)
    share = capacity.decode / (capacity.prefill + capacity.decode) if parted else None
    sized = DeploymentFamily(offer, share, 1, 1)
    least = _first(sized, demand.rate / _OPTIMISM, capacity)
    return DeploymentFamily(offer, share, least, max(least, _first(sized, demand.rate / _USUAL, capacity)))


def _first(sized: DeploymentFamily, rate: float, capacity: WorkerCapacity) -> int:
    """Return the smallest size that can do `rate` requests in a second."""
    least = 1 if sized.prompt_share is None else 2
    return next((size for size in range(least, _ENOUGH) if _most(sized, size, capacity) >= rate), _ENOUGH)


def _most(sized: DeploymentFamily, size: int, capacity: WorkerCapacity) -> float:
    """Return the most that this size does: decode workers take prompts too, where there is time."""
    topology = sized.of_size(size).topology
    if topology.colocated:
        return size * capacity.colocated
    decodes = topology.decode_workers
    return min(decodes * capacity.decode, topology.prefill_workers * capacity.prefill + decodes * capacity.colocated)
