"""The number of workers follows the load in a simulated deployment: a rush comes and goes, and workers with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from alignedserve.config.topology import Range, Topology
from alignedserve.core import Request, Role, Sampling, ServiceClass, Slo, WorkerLimits
from alignedserve.lab.loads.workload import Arrival
from alignedserve.lab.loads.workload.tape import VOCABULARY
from alignedserve.lab.simulator.machines.engine import Costs
from alignedserve.lab.simulator.machines.faults import Kill, Resize
from alignedserve.lab.simulator.run import Simulation
from alignedserve.lab.simulator.settings import FIRST_ARRIVAL_AT, Settings
from alignedserve.router.sizing import Sizes
from alignedserve.scheduling.policy import Policy
from tests.rare import rare, rarely

SLO = Slo(ttft_s=1.0, tbt_s=0.15)
OUTPUT = 6
SLOW = Costs(step_s=0.02, token_s=4e-3)  # a prompt of 64 tokens takes 0.28 s
LIMITS = WorkerLimits(num_blocks=512, block_size=16, page_size=64, max_step_tokens=64, max_batch=16)
RUSH_AT, CALM_AT, END_AT = 6.0, 36.0, 80.0
BETWEEN = {Role.PREFILL: Range(1, 4), Role.DECODE: Range(1, 4)}
SIZES = Sizes(BETWEEN, grow_after_s=2.0, shrink_after_s=10.0)
SPLIT = Settings(topology=Topology(1, 1), limits=LIMITS, num_pages=4096, timing=SLOW, checked=False, record=True)
ALONE = replace(SPLIT, policy=Policy(helps=False))  # prefill workers get no help from decode workers


def chats(calm: float, rush: float) -> list[Arrival]:
    """Draw arrivals of chats at these rates, in requests per second."""
    draw, made = Random("rush"), list[Arrival]()
    for rate, start, end in ((calm, FIRST_ARRIVAL_AT, RUSH_AT), (rush, RUSH_AT, CALM_AT), (calm, CALM_AT, END_AT)):
        at = start + draw.expovariate(rate)
        while at < end:
            made.append(chat(len(made), at, draw))
            at += draw.expovariate(rate)
    return made


def chat(number: int, at: float, draw: Random) -> Arrival:
    request = Request(
        id=f"chat-{number}",
        owner="gateway-0",
        attempt=0,
        prompt=tuple(draw.choices(range(1, VOCABULARY), k=64)),
        emitted=(),
        sampling=Sampling(seed=number),
        max_tokens=OUTPUT,
        stop_tokens=(),
        service=ServiceClass.RT,
        slo=SLO,
        arrival_at=at,
    )
    return Arrival(request, OUTPUT, None)


def served(settings: Settings, calm: float = 0.7, rush: float = 6.0) -> tuple[Simulation, float]:
    """Run the chats, and return also the share of the rush's chats whose first token was in time."""
    simulation = Simulation(settings, chats(calm, rush))
    simulation.run()
    assert simulation.problems == []
    rushed = [request for request in simulation.record(0.0).requests if RUSH_AT + 14 < request.arrival_at < CALM_AT]
    in_time = [bool(request.token_at) and request.token_at[0] - request.arrival_at <= SLO.ttft_s for request in rushed]
    return simulation, sum(in_time) / len(in_time)


def counts(simulation: Simulation, role: Role) -> list[int]:
    """Return how many workers of the role were wanted, after each change."""
    found = [1]
    for _, changes in simulation.launcher.log:
        come, go = (sum(name.startswith(role.value) for name in names) for names in (changes.new, changes.retiring))
        if come or go:
            found.append(found[-1] + come - go)
    return found


def test_they_come_with_a_rush_and_go_after_it() -> None:
    simulation, share = served(replace(ALONE, sizes=SIZES))
    prefill, decode = counts(simulation, Role.PREFILL), counts(simulation, Role.DECODE)
    assert share > 0.9
    assert max(prefill) >= 2
    assert (prefill[-1], decode[-1]) == (1, 1)
    for found in (prefill, decode):
        changes = [later - earlier for earlier, later in pairwise(found)]
        fewer = [change < 0 for change in changes]
        assert fewer == sorted(fewer), "first more of them, then fewer, not to and fro"
        assert min(changes, default=0) >= -1


@rare
def test_the_workers_that_were_there_are_too_few() -> None:
    """The attainment without scaling is low; a decode worker that helps with prompts is not enough either."""
    _, alone = served(ALONE, rush=7.0)
    _, helped = served(SPLIT, rush=7.0)
    assert 0.4 < alone < 0.6
    assert alone + 0.1 < helped < 0.9


@rare
def test_without_refusals_next_to_no_chat_is_in_time() -> None:
    _, share = served(replace(ALONE, policy=Policy(helps=False, refuse_ttfts=0.0)), rush=7.0)
    assert share < 0.1


def test_they_stay_as_they_are_where_they_are_enough() -> None:
    simulation, share = served(replace(SPLIT, sizes=SIZES), rush=1.2)
    assert simulation.launcher.log == []
    assert share > 0.9


@rare
def test_colocated_workers_too() -> None:
    colocated = replace(SPLIT, topology=Topology(), sizes=replace(SIZES, ranges={Role.DECODE: Range(1, 4)}))
    simulation, share = served(colocated)
    decode = counts(simulation, Role.DECODE)
    assert share > 0.75
    assert max(decode) >= 2
    assert decode[-1] < max(decode)


@pytest.mark.parametrize("dies", [*map(rarely, ["prefill-1", "router", "prefill-0"])])
def test_also_while_some_die(dies: str) -> None:
    faults = (Kill(RUSH_AT + 3, dies, 0.3), Kill(CALM_AT + 12, dies, 0.3))
    simulation, share = served(replace(SPLIT, sizes=SIZES, faults=faults))
    assert share > 0.7
    assert counts(simulation, Role.PREFILL)[-1] == 1


LONG = 150  # tokens of output: at least 3 s


@pytest.mark.parametrize(("drain_s", "keeps_all"), [(60.0, True), rarely((0.5, False))])
def test_what_prefill_workers_decode_ends_though_they_come_and_go(drain_s: float, keeps_all: bool) -> None:
    """A prefill worker that retires ends its requests first; where it takes too long, others recompute them."""
    draw, long = Random("lent"), list[Arrival]()
    for number in range(24):
        made = chat(number, FIRST_ARRIVAL_AT + 0.2 * number, draw)
        long.append(replace(made, request=replace(made.request, max_tokens=LONG), length=LONG))
    few, many = Resize(FIRST_ARRIVAL_AT + 1.0, prefill=1, decode=1), Resize(FIRST_ARRIVAL_AT + 2.0, prefill=3, decode=2)
    quick = Costs(step_s=0.02, token_s=5e-4)
    stay = replace(SPLIT.policy, least_moved=LONG + 1)
    settings = replace(SPLIT, topology=Topology(2, 1), timing=quick, policy=stay, checked=True, drain_s=drain_s)
    simulation = Simulation(replace(settings, faults=(few, many)), long)
    simulation.run()
    record = simulation.record(0.0)
    assert record.problems == ()
    assert [len(request.token_at) for request in record.requests] == [LONG] * len(long)
    lent = {step.worker for step in record.steps if step.shape.decodes and step.worker.startswith("prefill")}
    assert lent > {"prefill-0", "prefill-1"}, "those that came, too"
    computed = sum(step.shape.chunk_tokens for step in record.steps)
    assert (computed == sum(len(made.request.prompt) for made in long)) == keeps_all
    assert Counter(simulation.launcher.members.values()) >= Counter({Role.PREFILL: 3, Role.DECODE: 2})
