"""Draw scenarios from seeds. Most are small and crowded, because cores fail most there.

Most features draw from a generator of their own: a change of one leaves the rest of what a seed draws unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from alignedserve.core import ServiceClass, WorkerLimits, units_for
from alignedserve.lab.fuzzing.scenario import TOPOLOGIES, Ask, JobAsk, Scenario, least_pages
from alignedserve.lab.fuzzing.wider_drawing import (
    some_with_clocks_apart,
    some_with_folds,
    some_with_late_ends,
    some_with_pauses,
    some_with_vectors,
    some_with_windows,
    some_without_faults,
    widened,
)
from alignedserve.lab.simulator.machines.engine import Costs
from alignedserve.lab.simulator.machines.fault_drawing import draw_faults, draw_job_faults
from alignedserve.lab.simulator.machines.faults import JOBS
from alignedserve.lab.simulator.machines.world import NetworkDelays
from alignedserve.lab.simulator.settings import FIRST_ARRIVAL_AT
from alignedserve.papers.names import SchedulerName
from alignedserve.papers.orders import BY_LEVELS, BY_REMAINING
from alignedserve.papers.policy import PaperPolicy
from alignedserve.papers.rules import HYBRID, TWO_ENDED, WEIGHED
from alignedserve.router.placing.admission import Bound, Queues
from alignedserve.scheduling.form_rules import PLAIN, Compression
from alignedserve.scheduling.levels import AGE_S
from alignedserve.scheduling.orders import BY_ARRIVAL, BY_DUE, BY_SLACK, Ordering
from alignedserve.scheduling.policy import Chunking, Grouping, Predictor, Room
from alignedserve.scheduling.slo import Late

_MOST_PROMPT, _MOST_OUTPUT = 200, 60
# Order, whether the best fit chooses, whether by AccelGen's own formulas -> the scheduler
_SCHEDULERS: dict[tuple[Ordering, bool, bool], SchedulerName] = {
    (BY_DUE, False, False): SchedulerName.ALIGNED,
    (BY_DUE, True, False): SchedulerName.BEST_FIT,
    (BY_SLACK, False, False): SchedulerName.BROS,
    (BY_SLACK, True, True): SchedulerName.ACCELGEN,
    (BY_SLACK, False, True): SchedulerName.ACCELGEN_NO_BATCH,
    (BY_REMAINING, False, False): SchedulerName.SHORTEST,
    (BY_LEVELS, False, False): SchedulerName.ALISE,
    (BY_ARRIVAL, False, False): SchedulerName.FCFS,
    (BY_ARRIVAL, True, True): SchedulerName.ACCELGEN_NO_ORDER,
}
_ACCELGEN = (SchedulerName.ACCELGEN, SchedulerName.ACCELGEN_NO_BATCH, SchedulerName.ACCELGEN_NO_ORDER)
_ORDERS = (BY_DUE, BY_SLACK, BY_ARRIVAL, BY_REMAINING, BY_LEVELS)


def draw_scenario(seed: int) -> Scenario:
    calm = some_with_pauses(some_with_late_ends(some_with_clocks_apart(some_without_faults(_draw(seed, widened)))))
    return some_with_jobs(some_with_vectors(some_with_folds(some_with_windows(calm))))


def draw_narrow_scenario(seed: int) -> Scenario:
    """Draw the scenario that a seed had before scenarios were widened: some seeds are kept for what they found."""
    return _draw(seed, lambda drawn: drawn)


def _draw(seed: int, widen: Callable[[Scenario], Scenario]) -> Scenario:
    draw = Random(f"{seed}/scenario")
    num_gateways = draw.choice((1, 1, 2))
    asks = _with_turns(seed, list(_draw_asks(draw, num_gateways)))
    limits = _draw_limits(draw, max(ask.most_tokens for ask in asks))
    drawn = Scenario(
        seed=seed,
        topology=draw.choice(TOPOLOGIES),
        num_gateways=num_gateways,
        limits=limits,
        num_pages=least_pages(asks, limits) + draw.choice((0, 1, 4, 16)),
        most_open=draw.choice((4, 1000, 1000, 1000)),
        queues=_draw_queues(seed),
        policy=_draw_blocks(seed, replace(_draw_policy(draw), compression=_draw_compression(seed))),
        costs=Costs(step_s=10 ** draw.uniform(-3, -1.5), page_s=10 ** draw.uniform(-4, -1.5)),
        network=NetworkDelays(10 ** draw.uniform(-5, -3), 10 ** draw.uniform(-4, -2)),
        asks=asks,
        faults=(),
        direct=Random(f"{seed}/transport").random() < 0.6,
    )
    drawn = _with_hidden(_out_of_memory(_piled_up(_packed(_in_haste(_with_lengths(_crowded(drawn)))))))
    drawn = widen(drawn)
    # Most faults happen while there is work; some before all members have joined, or when no work is left.
    start_at, more_s = draw.choice((0.5, 1.9, 1.9)), draw.choice((0.2, 0.2, 3.0))
    faults = draw_faults(seed, drawn.members, draw.randint(1, 8), start_at, drawn.asks[-1].at + more_s)
    direct = drawn.direct and drawn.policy.block_use.why_not_direct is None
    return replace(drawn, faults=faults, direct=direct, look_ahead=_draw_look_ahead(drawn))


def _draw_asks(draw: Random, num_gateways: int) -> Iterator[Ask]:
    alike = Random(draw.getrandbits(32))
    share_alike = alike.choice((0.0, 0.5, 1.0))
    rate, mean_prompt, mean_output = draw.uniform(3, 100), draw.uniform(5, 60), draw.uniform(1, 20)
    leaving, best_effort = draw.choice((0.0, 0.1, 0.5)), draw.choice((0.0, 0.5, 1.0))
    at = FIRST_ARRIVAL_AT
    for number in range(draw.randint(1, 15)):
        at += draw.expovariate(rate)
        length = min(_MOST_OUTPUT, 1 + int(draw.expovariate(1 / mean_output)))
        yield Ask(
            number=number,
            at=at,
            gateway=f"gateway-{draw.randrange(num_gateways)}",
            num_prompt=min(_MOST_PROMPT, 1 + int(draw.expovariate(1 / mean_prompt))),
            length=length,
            max_tokens=draw.randint(1, length) if draw.random() < 0.2 else min(_MOST_OUTPUT, 2 * length),
            service=ServiceClass.BE if draw.random() < best_effort else ServiceClass.RT,
            leaves_after_s=draw.expovariate(4.0) if draw.random() < leaving else None,
            beginning=alike.randrange(2),
            num_alike=alike.randint(1, 60) if alike.random() < share_alike else 0,
        )


def _with_turns(seed: int, asks: list[Ask]) -> tuple[Ask, ...]:
    """Let some requests of every second run continue an earlier request, which may or may not have ended by then."""
    draw = Random(f"{seed}/turns")
    share = draw.choice((0.0, 0.5))
    for at, ask in enumerate(asks):
        before = asks[draw.randrange(at)] if at and draw.random() < share else None
        if before is not None and before.most_tokens < _MOST_PROMPT:
            later = (ask.at - asks[0].at) * draw.choice((1, 1, 10))
            asks[at] = replace(ask, after=before, at=asks[at].at + later)
    return tuple(sorted(asks, key=lambda ask: ask.at))


def _crowded(drawn: Scenario) -> Scenario:
    """Let many requests with long outputs arrive at once in every fifth run, where memory grows: some are preempted."""
    draw = Random(f"{drawn.seed}/crowd")
    if draw.random() > 1 / 5:
        return drawn
    at, asks = FIRST_ARRIVAL_AT, list[Ask]()
    for number in range(draw.randint(6, 12)):
        at += draw.expovariate(draw.choice((20, 200)))
        length, leaves_after_s = draw.randint(15, _MOST_OUTPUT), draw.choice((None, None, None, 1.0))
        like = draw.choice(drawn.asks)
        new = replace(like, number=number, at=at, after=None, num_prompt=draw.randint(1, 40))
        asks.append(replace(new, length=length, max_tokens=_MOST_OUTPUT, leaves_after_s=leaves_after_s))
    limits, max_batch, most = drawn.limits, draw.randint(3, 6), max(ask.most_tokens for ask in asks)
    num_blocks = int(units_for(most, limits.block_size) * draw.choice((1.0, 1.5, 2.5)))
    limits = replace(limits, num_blocks=num_blocks, max_batch=max_batch, max_step_tokens=max_batch + 16)
    num_pages = least_pages(tuple(asks), limits) * draw.choice((1, 2, 4))
    policy = _draw_blocks(drawn.seed, replace(drawn.policy, room=Room.GROWING))
    if policy.memory.startswith(TWO_ENDED):
        asks = [replace(ask, service=draw.choice([*ServiceClass])) for ask in asks]
    return replace(drawn, asks=tuple(asks), limits=limits, num_pages=num_pages, policy=policy)


def _draw_limits(draw: Random, most_tokens: int) -> WorkerLimits:
    """Draw the limits of workers. Many have room for hardly more than the largest request."""
    block_size, max_batch = draw.choice((2, 8, 16)), draw.randint(1, 6)
    return WorkerLimits(
        num_blocks=units_for(most_tokens, block_size) + draw.choice((0, 2, 16, 64)),
        block_size=block_size,
        page_size=block_size * draw.choice((1, 2, 4)),
        max_step_tokens=max_batch + draw.choice((1, 16, 64)),
        max_batch=max_batch,
    )


def _draw_policy(draw: Random) -> PaperPolicy:
    """Draw the policy. Every second seed has the default policy, apart from compression."""
    if draw.random() < 0.5:
        return PaperPolicy()
    while True:
        order, chunking, is_best_fit = draw.choice(_ORDERS), draw.choice([*Chunking]), draw.choice((False, True))
        policy = PaperPolicy(
            chunking=chunking,
            room=draw.choice([Room.WHOLE, Room.GROWING, Room.CHUNKS]),
            grouping=draw.choice([*Grouping]),
            reuse=draw.random() < 0.7,
            late=draw.choice([*Late]),
            age_s=draw.choice((AGE_S, AGE_S, 0.5)),
            window_s=draw.choice((0.0, 0.75, 10.0)),
            long_prompt=draw.choice((8, 64, 4096)),
            budget_pivots=draw.choice((0.1, 4.0)),
        )
        as_in_paper = draw.random() < 0.3
        if is_best_fit and order in (BY_REMAINING, BY_LEVELS):
            continue
        if as_in_paper and chunking is Chunking.FIXED and not is_best_fit:
            continue
        policy = replace(policy, scheduler=_nearest(order, is_best_fit, as_in_paper))
        if policy.problem is None:
            return policy


def _nearest(order: Ordering, is_best_fit: bool, as_in_paper: bool) -> SchedulerName:
    """Return the scheduler with this order, and with as much of the rest as there is one with."""
    for like in ((order, is_best_fit, as_in_paper), (order, is_best_fit, False), (order, False, False)):
        if (name := _SCHEDULERS.get(like)) is not None:
            return name
    raise AssertionError(f"there is no scheduler with {order}")


def _with_lengths(drawn: Scenario) -> Scenario:
    """Draw the predictor of lengths, from a generator of its own."""
    draw, policy = Random(f"{drawn.seed}/lengths"), drawn.policy
    predictor = draw.choice([Predictor.HASH, Predictor.HASH, Predictor.CONSTANT, Predictor.OFF, Predictor.ORACLE])
    return replace(drawn, policy=replace(policy, predictor=predictor))


def _in_haste(drawn: Scenario) -> Scenario:
    """Give most requests of every second run a TBT too short to wait in the pool."""
    draw = Random(f"{drawn.seed}/haste")
    if draw.random() < 0.5:
        return drawn
    tbt_s = draw.choice((0.001, 0.01, 0.05))
    return replace(drawn, asks=tuple(replace(ask, tbt_s=tbt_s) if draw.random() < 0.7 else ask for ask in drawn.asks))


def _piled_up(drawn: Scenario) -> Scenario:
    """Let more requests arrive in every sixth run than a decode worker can seat: batches wait, and are prefetched."""
    draw = Random(f"{drawn.seed}/piled up")
    if draw.random() > 1 / 6:
        return drawn
    at, asks = FIRST_ARRIVAL_AT, list[Ask]()
    for number in range(draw.randint(10, 18)):
        at += draw.expovariate(200)
        service, leaves_after_s = draw.choice([*ServiceClass, ServiceClass.BE]), draw.choice((None, None, None, 0.5))
        like, length = draw.choice(drawn.asks), draw.randint(2, 30)
        ask = replace(like, number=number, at=at, after=None, num_prompt=draw.randint(1, 60), length=length)
        asks.append(replace(ask, max_tokens=_MOST_OUTPUT, service=service, leaves_after_s=leaves_after_s))
    most, max_batch = max(ask.most_tokens for ask in asks), draw.randint(2, 4)
    num_blocks = units_for(most, drawn.limits.block_size) * draw.choice((2, 4))
    limits = replace(drawn.limits, num_blocks=num_blocks, max_batch=max_batch, max_step_tokens=max_batch + 64)
    policy = replace(
        drawn.policy, grouping=Grouping.ALIGNED, memory=_apart(drawn.policy), candidate_share=draw.choice((0.3, 1.0))
    )
    drawn = replace(drawn, topology=draw.choice(TOPOLOGIES[1:]), asks=tuple(asks), limits=limits, policy=policy)
    num_pages = least_pages(drawn.asks, limits) * draw.choice((4, 16))
    return replace(drawn, num_pages=num_pages, direct=draw.random() < 0.8)


def _out_of_memory(drawn: Scenario) -> Scenario:
    """Let documents grow in every sixth run where hardly two fit; prefill workers have room for preempted work."""
    draw = Random(f"{drawn.seed}/out of memory")
    if draw.random() > 1 / 6:
        return drawn
    at, asks = FIRST_ARRIVAL_AT, list[Ask]()
    for number in range(draw.randint(4, 10)):
        at += draw.expovariate(draw.choice((50, 500)))
        service, leaves_after_s = draw.choice([*ServiceClass, *[ServiceClass.BE] * 4]), draw.choice((None, None, 0.5))
        like = draw.choice(drawn.asks)
        ask = replace(like, number=number, at=at, after=None, num_prompt=draw.randint(1, 20), length=_MOST_OUTPUT)
        asks.append(replace(ask, max_tokens=_MOST_OUTPUT, service=service, leaves_after_s=leaves_after_s))
    block_size, max_batch = draw.choice((2, 4)), draw.randint(3, 6)
    num_blocks = int(units_for(max(ask.most_tokens for ask in asks), block_size) * draw.choice((1.3, 2.0, 3.0)))
    limits = replace(drawn.limits, block_size=block_size, page_size=2 * block_size, num_blocks=num_blocks)
    limits = replace(limits, max_batch=max_batch, max_step_tokens=max_batch + 32)
    policy = replace(drawn.policy, room=Room.GROWING, memory=_apart(drawn.policy))
    if policy.scheduler in _ACCELGEN:
        policy = replace(policy, scheduler=SchedulerName.BROS)
    policy = replace(policy, candidate_share=draw.choice((0.3, 1.0)))
    drawn = replace(drawn, topology=draw.choice(TOPOLOGIES[1:]), asks=tuple(asks), limits=limits)
    drawn = replace(drawn, policy=drawn.policy if policy.problem is not None else policy)
    num_pages = least_pages(drawn.asks, limits) * draw.choice((1, 4, 16))
    return replace(drawn, num_pages=num_pages, direct=True)


def _packed(drawn: Scenario) -> Scenario:
    """Let classes take turns in every sixth run, or levels follow the tokens served; levels may rise often."""
    draw = Random(f"{drawn.seed}/packing")
    policy = replace(drawn.policy, age_s=draw.choice((10.0, 0.05)))
    if draw.random() < 1 / 6:
        policy = replace(
            policy,
            chunking=draw.choice((Chunking.FIXED, Chunking.NONE)),
            room=Room.GROWING if policy.room is Room.CHUNKS else policy.room,
            scheduler=draw.choice((SchedulerName.ROUND_ROBIN, SchedulerName.MLFQ)),
            memory=_apart(policy),
        )
    return replace(drawn, policy=policy)


def _with_hidden(drawn: Scenario) -> Scenario:
    """Keep some requests of every third run as hidden vectors, at a small or a large cost, if the policy allows it.

    Some runs choose the requests that get memory by how long each has been pending.
    """
    draw, policy = Random(f"{drawn.seed}/hidden"), drawn.policy
    takes_turns = policy.scheduler in (SchedulerName.ROUND_ROBIN, SchedulerName.MLFQ)
    if takes_turns and draw.random() < 0.5:
        policy = replace(policy, scheduler=SchedulerName.APT_SERVE)
    as_kv = replace(policy, memory=WEIGHED if policy.scheduler == SchedulerName.APT_SERVE else policy.memory)
    policy = draw.choice((replace(policy, memory=HYBRID), as_kv, as_kv))
    costs = replace(drawn.costs, hidden_token_s=10 ** draw.uniform(-7, -4))
    policy = policy if policy.problem is None and as_kv.memory in (PLAIN, WEIGHED) else as_kv
    return replace(drawn, policy=policy, costs=costs if policy.block_use.keeps_hidden else drawn.costs)


def _draw_queues(seed: int) -> Queues:
    """Draw queues: in every sixth run, queues are bounded, and the router rejects requests when a queue is full."""
    draw = Random(f"{seed}/queues")
    bounds = [Bound(draw.randint(1, 4), draw.choice((50, 200))) for _ in ServiceClass]
    return Queues(*bounds) if draw.random() < 1 / 6 else Queues()


def _draw_look_ahead(drawn: Scenario) -> int:
    """Draw how far decode workers look ahead: a step in every third run, if the policy allows it."""
    return int(drawn.policy.why_not_ahead is None and Random(f"{drawn.seed}/ahead").random() < 1 / 3)


def _draw_compression(seed: int) -> Compression:
    """Draw the compression of the pool's pages, from a generator of its own."""
    compression: Compression = Random(f"{seed}/kinds").choice([*Compression, Compression.INT8])
    return compression


def _draw_blocks(seed: int, policy: PaperPolicy) -> PaperPolicy:
    """Draw the block layout, from a generator of its own: if memory grows, two requests may share a block."""
    draw = Random(f"{seed}/blocks")
    memory, share = draw.choice((PLAIN, TWO_ENDED)), draw.choice((0.0, 0.1, 1.0))
    shared = replace(policy, memory=policy.memory if memory == PLAIN else f"{TWO_ENDED}:{share:g}")
    return shared if shared.problem is None else policy


def _apart(policy: PaperPolicy) -> str:
    """Return the policy's memory; plain where requests share blocks."""
    return PLAIN if policy.memory.startswith(TWO_ENDED) else policy.memory


_DAY_S = 86_400
_AFTER_S = 4.0  # after the last submission, in which faults still happen


def some_with_jobs(drawn: Scenario) -> Scenario:
    draw = Random(f"{drawn.seed}/jobs")
    if draw.random() > 1 / 4:
        return drawn
    jobs = tuple(_draw_job(draw, number, drawn) for number in range(draw.randint(1, 3)))
    drawn = replace(drawn, jobs=jobs, most_open_lines=draw.choice((1, 3, 256)))
    if not drawn.faults:
        return drawn
    at = [job.at for job in jobs]
    faults = (*drawn.faults, *draw_job_faults(drawn.seed, drawn.members, min(at), max(at) + _AFTER_S))
    return replace(drawn, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def _draw_job(draw: Random, number: int, drawn: Scenario) -> JobAsk:
    """Draw a job; no line needs more memory than the largest request."""
    at, most = draw.uniform(0.5, drawn.asks[-1].at), max(ask.most_tokens for ask in drawn.asks)
    return JobAsk(
        number=number,
        at=at,
        lines=tuple(_draw_line(draw, 1000 * (number + 1) + line, at, most) for line in range(draw.randint(1, 12))),
        window_s=draw.choice((_DAY_S, _DAY_S, _DAY_S, draw.randint(1, 8))),
        cancel_after_s=draw.expovariate(1 / 1.5) if draw.random() < 1 / 3 else None,
    )


def _draw_line(draw: Random, number: int, at: float, most_tokens: int) -> Ask:
    num_prompt = draw.randint(1, max(1, most_tokens // 2))
    max_tokens = draw.randint(1, max(1, most_tokens - num_prompt))
    length = draw.randint(1, 2 * max_tokens)
    return Ask(number, at, JOBS, num_prompt, length, max_tokens, ServiceClass.BE)
