"""Describe a small deployment, with requests and faults.

A scenario names everything, request by request: a shrinker can leave any part out, and a saved scenario means the same
later.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from itertools import product
from random import Random
from typing import Any

from alignedserve.config.topology import Topology
from alignedserve.core import (
    FREE_COPIES,
    CopyCost,
    Pooling,
    Request,
    Sampling,
    ServiceClass,
    Slo,
    WorkerLimits,
    units_for,
)
from alignedserve.cost.fit import OnlineCost, Point
from alignedserve.cost.model import Kind, Shape, Uncertainty
from alignedserve.cost.sums import added
from alignedserve.errors import FuzzError
from alignedserve.lab.fuzzing.typed_tree import WrongTree, typed
from alignedserve.lab.loads.workload import Arrival
from alignedserve.lab.loads.workload.tape import STOP, VOCABULARY
from alignedserve.lab.simulator.machines.engine import Costs, story_from
from alignedserve.lab.simulator.machines.faults import BreakTransfer, Fault, calm_at
from alignedserve.lab.simulator.machines.transfers import TIMEOUT_S
from alignedserve.lab.simulator.machines.world import NetworkDelays
from alignedserve.lab.simulator.settings import Settings, members_of
from alignedserve.papers.policy import PaperPolicy
from alignedserve.protocol.extents import Extents
from alignedserve.router.placing.admission import Queues
from alignedserve.scheduling.form_rules import Compression
from alignedserve.scheduling.policy import Handoff, Policy

# A line that the router refused may wait for a minute, and after a failure it may wait for about as long.
MOST_LINE_WAIT_S = 120.0
SETTLED_S = 60.0  # time to notice deaths and silences, each asked again after 5 s, several times over
TOPOLOGIES = ("colocated", "1+1", "2+1", "1+2", "2+2")


_CHUNKS, _PREFIXES = ((), ((8, 0),), ((64, 8),)), ((), (8,), (8,) * 4, (64,) * 4)  # of steps


class AskedVector(str, Enum):
    """How the prompt of a request for a vector may run."""

    WHOLE = "whole"
    IN_PARTS = "in parts"


@dataclass(frozen=True)
class Ask:
    """A client's request. The turn's number decides the words of the prompt, which follow those of the turn before."""

    number: int
    at: float
    gateway: str
    num_prompt: int
    length: int  # of the output, if `max_tokens` allows it
    max_tokens: int
    service: ServiceClass = ServiceClass.RT
    leaves_after_s: float | None = None
    beginning: int | None = None  # prompts with the same number begin alike
    num_alike: int = 0
    after: Ask | None = None  # the turn before, which this request continues
    tbt_s: float = Slo().tbt_s
    vector: AskedVector | None = None  # in place of an output
    caller: str = ""  # whose key it comes with

    @property
    def most_tokens(self) -> int:
        before = 0 if self.after is None else self.after.most_tokens
        return before + self.num_prompt + self.max_tokens

    @property
    def _said_before(self) -> tuple[int, ...]:
        """Return the prompts and outputs of the turns before."""
        if self.after is None:
            return ()
        arrival = self.after.arrival()
        return story_from(arrival.request, arrival.length, tagged=False).tokens

    def arrival(self) -> Arrival:
        num_alike = min(self.num_alike, self.num_prompt)
        words = Random(f"beginning {self.beginning}").choices(range(1, VOCABULARY), k=num_alike)
        words += Random(f"prompt {self.number}").choices(range(1, VOCABULARY), k=self.num_prompt - num_alike)
        request = Request(
            id=f"request-{self.number}",
            owner=self.gateway,
            attempt=0,
            prompt=(*self._said_before, *words),
            emitted=(),
            sampling=self._sampling,
            max_tokens=self.max_tokens,
            stop_tokens=(STOP,) if self.vector is None else (),
            service=self.service,
            slo=Slo(tbt_s=self.tbt_s),
            arrival_at=self.at,
            salt=self.caller,
            pooling=None if self.vector is None else Pooling(is_whole=self.vector is AskedVector.WHOLE),
        )
        return Arrival(request, self.length, self.leaves_after_s)

    @property
    def _sampling(self) -> Sampling:
        """Return in turn plain sampling, sampling that needs the history, and sampling with log-probabilities; plain
        sampling where there is no output."""
        if self.vector is not None:
            return Sampling()
        kinds = (Sampling(), Sampling(frequency_penalty=0.5), Sampling(logprobs=0, prompt_logprobs=0))
        return replace(kinds[self.number % len(kinds)], seed=self.number)


@dataclass(frozen=True)
class JobAsk:
    """A batch job of a user, who may cancel it."""

    number: int
    at: float
    lines: tuple[Ask, ...]
    window_s: int
    cancel_after_s: float | None = None

    @property
    def name(self) -> str:
        return f"job-{self.number}"

    @property
    def cancel_at(self) -> float | None:
        return None if self.cancel_after_s is None else self.at + self.cancel_after_s


@dataclass(frozen=True)
class Scenario:
    seed: int
    topology: str
    num_gateways: int
    limits: WorkerLimits
    num_pages: int
    most_open: int
    queues: Queues
    policy: PaperPolicy
    costs: Costs
    network: NetworkDelays
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    direct: bool = False  # whether prefill workers send KV to decode workers
    nodes: int = 1  # as in Settings
    look_ahead: int = 0  # of decode workers
    layers: int = 0  # between which workers' steps can pause
    copies_beside: bool = False  # whether their copies from the pool go on beside steps
    knows_copies: bool = False  # whether workers know how long copies take: else all take them to be quicker
    jobs: tuple[JobAsk, ...] = ()
    most_open_lines: int = 256  # of jobs

    @property
    def settings(self) -> Settings:
        return Settings(
            seed=self.seed,
            topology=Topology.parse(self.topology),
            num_gateways=self.num_gateways,
            has_job_runner=bool(self.jobs),
            limits=self.limits,
            num_pages=self.num_pages,
            extents=self.extents,
            most_open=self.most_open,
            queues=self.queues,
            policy=replace(self.policy, least_moved=1),  # its outputs are short
            timing=self.costs,
            copying=CopyCost(self.costs.page_s / self.limits.page_size) if self.knows_copies else FREE_COPIES,
            network=self.network,
            faults=self.faults,
            direct=self.direct,
            nodes=self.nodes,
            look_ahead=self.look_ahead,
            layers=self.layers,
            belief=partial(_belief, self.costs) if self.layers else None,  # no step pauses whose end is not predicted
            copies_beside=self.copies_beside,
            most_s=self.ends_by + 1.0,
        )

    @property
    def extents(self) -> Extents | None:
        """Return the smallest possible extents, so that they change their kind often: 2 pages of KV, or 3 of int8."""
        if self.policy.compression is Compression.OFF:
            return None
        return Extents(units_for(self.num_pages, 2), kv=2, kv_int8=3)

    @property
    def members(self) -> list[str]:
        return list(members_of(self.settings))

    @property
    def calm_at(self) -> float:
        """Return the time after which there are no faults and no new requests."""
        asked_at = [ask.at for ask in self.asks] + [job.cancel_at or job.at for job in self.jobs]
        return max(calm_at(self.faults), max(asked_at, default=0.0))

    @property
    def ends_by(self) -> float:
        """Return the time at which every request has ended, even if each started again and ran alone."""
        lines = [line for job in self.jobs for line in job.lines]
        waits_s = MOST_LINE_WAIT_S if lines else 0.0
        alone_s = added(self._alone_s(ask) for ask in (*self.asks, *lines))
        return self.calm_at + SETTLED_S + waits_s + self._stalled_s + alone_s

    @property
    def _stalled_s(self) -> float:
        """Return the time of the transfers that stall, where KV may have no other road: on several nodes, since one may
        have no pool, and where the policy allows none."""
        is_only_road = self.direct and self.policy.handoff is Handoff.DEVICE
        if self.nodes == 1 and not is_only_road:
            return 0.0
        breaks = (fault for fault in self.faults if isinstance(fault, BreakTransfer) and fault.stalls)
        return sum(fault.transfers for fault in breaks) * 2 * TIMEOUT_S

    def _alone_s(self, ask: Ask) -> float:
        """Return the time for the request's prompt, copies and tokens, each in a step as full as allowed."""
        costs, most = self.costs, self.limits.max_step_tokens
        attended_s = costs.prefix_token_s + costs.hidden_token_s
        step_s = costs.step_s + costs.token_s * most + attended_s * self.limits.max_batch * ask.most_tokens
        steps = units_for(ask.most_tokens, most) + ask.max_tokens
        return step_s * steps + 2 * costs.page_s * units_for(ask.most_tokens, self.limits.page_size)


def _belief(costs: Costs) -> OnlineCost:
    """Return a cost model that knows these costs."""
    shapes = [Shape.build(chunks, prefixes) for chunks, prefixes in product(_CHUNKS, _PREFIXES)]
    points = [
        Point(of, costs.step_s + costs.token_s * of.tokens + costs.prefix_token_s * (of.cached + of.prefixes))
        for of in shapes
        if of.tokens
    ]
    return OnlineCost(points, known=dict.fromkeys(Kind, Uncertainty()))


def least_pages(asks: tuple[Ask, ...], limits: WorkerLimits) -> int:
    """Return the pages that the largest request may need."""
    return max(units_for(ask.most_tokens, limits.page_size) for ask in asks)


def lines(scenario: Scenario) -> list[str]:
    """Return the deployment as text, then the requests and faults in the order of time."""
    limits = scenario.limits
    window = "" if limits.reach is None else f", all layers read the last {limits.reach} tokens"
    if (fold := limits.fold) is not None:
        read = f"the last {fold.sight.window}" if fold.sight.stretch is None else f"stretches of {fold.sight.stretch}"
        window = f", some layers read {read} tokens: {fold.blocks} blocks are folded into one"
    events = [(ask.at, _ask_line(ask)) for ask in scenario.asks]
    events += [(fault.at, _fault_line(fault)) for fault in scenario.faults]
    events += [(job.at, _job_line(job)) for job in scenario.jobs]
    sent = ", KV sent from device to device" if scenario.direct else ""
    return [
        f"{scenario.topology}, nodes: {scenario.nodes}{sent}, gateways: {scenario.num_gateways}, "
        f"pages: {scenario.num_pages} of {limits.page_size}",
        f"each worker: {limits.num_blocks} blocks of {limits.block_size}, steps of {limits.max_step_tokens} tokens, "
        f"{limits.max_batch} requests{window}",
        f"a step takes {1e3 * scenario.costs.step_s:.3g} ms or more, the copy of a page "
        f"{1e3 * scenario.costs.page_s:.3g} ms",
        _policy_line(scenario.policy) + f", look_ahead: {scenario.look_ahead}, layers: {scenario.layers}, "
        f"copies {'beside' if scenario.copies_beside else 'between'} steps",
        f"frames take {1e3 * scenario.network.least_s:.3g} ms and {1e3 * scenario.network.spread_s:.3g} ms by chance, "
        f"receivers of KV hear of its end {1e3 * scenario.network.late_end_s:.3g} ms late",
        *(f"{at:9.4f} s  {line}" for at, line in sorted(events)),
    ]


def _policy_line(policy: Policy) -> str:
    schedule = f"scheduler: {policy.scheduler}, chunking: {policy.chunking.value}"
    more = f"room: {policy.room.value}, late: {policy.late.value}"
    more += f", memory: {policy.memory}"
    pages = f"compression: {policy.compression.value}, predictor: {policy.predictor.value}"
    return f"{schedule}, {more}, {pages}"


def _ask_line(ask: Ask) -> str:
    leaves = "" if ask.leaves_after_s is None else f", leaves after {ask.leaves_after_s:.3f} s"
    goes_on = "" if ask.after is None else f" after request-{ask.after.number}"
    tokens = f"{ask.num_prompt} tokens{goes_on}, says {ask.length} of at most {ask.max_tokens}"
    return f"request-{ask.number} at {ask.gateway}: {tokens}, {ask.service.value}{leaves}"


def _job_line(job: JobAsk) -> str:
    lines = ", ".join(f"{line.num_prompt} tokens say {line.length} of at most {line.max_tokens}" for line in job.lines)
    cancelled = "" if job.cancel_after_s is None else f", cancelled after {job.cancel_after_s:.3f} s"
    return f"{job.name}, window {job.window_s} s{cancelled}: {lines}"


def _fault_line(fault: Fault) -> str:
    values = (f"{name}={_short(value)}" for name, value in asdict(fault).items() if name != "at")
    return f"{type(fault).__name__}({', '.join(values)})"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- For files


def to_tree(scenario: Scenario) -> dict[str, Any]:
    faults = [{"kind": type(fault).__name__} | asdict(fault) for fault in scenario.faults]
    tree: dict[str, Any] = asdict(scenario) | {"faults": faults}
    return tree


def from_tree(tree: Any) -> Scenario:
    try:
        scenario: Scenario = typed(Scenario, tree)
        Topology.parse(scenario.topology)
    except WrongTree as error:
        raise FuzzError(f"this is not a scenario of this version: {error}") from None
    except ValueError:
        wanted = f"one such as {' or '.join(TOPOLOGIES)}"
        raise FuzzError(f"this is not a scenario: topology must be {wanted}, not {scenario.topology!r:.40}") from None
    return scenario
